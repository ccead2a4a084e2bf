"""KV is reused only for a prefix that is equal token for token (S2), shown by numbers.

Prefill's top five of the first token with reuse must equal those of a cold run within bf16 noise.
The noise is measured (noise.py), cold against cold; a planted run on wrong KV must stand far out of
it. How many tokens were reused is asserted too, so that a recompute cannot pass for a reuse.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from conversation import Conversation, Prefilled, distance, post
from prose import document

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.digest import STRIDE_TOKENS, Scope, digest_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvturn_cli.stack import Stack

WRONG_KV_FACTOR = 3
CACHING = {"prefill without prefix caching": 0, "prefill with prefix caching": 1}


@pytest.fixture(params=CACHING.values(), ids=CACHING.keys())
def prefill(request: pytest.FixtureRequest) -> int:
    """The prefill engine that reads. The first turn is always computed by the other one, so that
    what the reader reuses can only come from decode."""
    return int(request.param)


@pytest.fixture
def name(stack: Stack, prefill: int, request: pytest.FixtureRequest) -> str:
    """A conversation id of the test's own."""
    return f"{request.node.originalname}-{prefill}"


def started(stack: Stack, name: str, prefill: int, tenant: str = "") -> Conversation:
    """A conversation after its first turn, about a document."""
    chat = Conversation(stack, name, tenant)
    chat.say(
        document(name) + "\nWhat is the capital of France?", prefill=1 - prefill, max_tokens=16
    )
    return chat


def next_turn(chat: Conversation, messages: list[dict[str, str]], prefill: int) -> Prefilled:
    """Prefills the next turn under the conversation's lease."""
    lease_id = chat.resolve().lease_id
    assert lease_id
    chat.turn += 1
    return chat.prefill(messages, prefill, lease_id)


def test_noise_is_small_and_wrong_kv_stands_out(stack: Stack, noise: float) -> None:
    """A lease planted on another conversation's blocks: prefill reads KV of other tokens.

    The test registers as a decode engine of its own, and offers, under digests of the new prompt,
    the blocks that the real decode engine holds for another conversation.
    """
    victim = started(stack, "planted-victim", prefill=0)
    lease_id = victim.resolve().lease_id
    begun = victim.leases.BeginRead(
        lease_pb2.BeginReadRequest(lease_id=lease_id, conversation=victim.key), timeout=5
    )
    assert begun.granted
    prompt = [{"role": "user", "content": document("planted") + "\nWhat is the capital of Italy?"}]
    chat = Conversation(stack, "planted", turn=1)
    with planted_lease(stack, chat, prompt, begun) as planted_id:
        wrong = chat.prefill(prompt, 0, planted_id)
    assert wrong.reused_tokens > 0
    wrong_distance = distance(wrong.logprobs, chat.cold(prompt))
    print(f"wrong KV: {wrong_distance:.3f}, noise {noise:.3f}")
    assert wrong_distance > WRONG_KV_FACTOR * noise


def test_read_from_an_engine_that_is_gone_is_recomputed(stack: Stack, noise: float) -> None:
    """The lease names an engine at which nobody answers: the turn is served all the same (S7)."""
    owner = started(stack, "gone-owner", prefill=0)
    begun = owner.leases.BeginRead(
        lease_pb2.BeginReadRequest(lease_id=owner.resolve().lease_id, conversation=owner.key),
        timeout=5,
    )
    begun.nixl.nixl_engine_id = "an-engine-that-is-gone"
    begun.nixl.port = 1
    prompt = [{"role": "user", "content": document("gone") + "\nWhat is the capital of Italy?"}]
    chat = Conversation(stack, "gone", turn=1)
    with planted_lease(stack, chat, prompt, begun) as planted_id:
        turn = chat.prefill(prompt, 0, planted_id)
    assert turn.verdict in ("read_failed", "read_too_long")
    assert turn.reused_tokens == 0
    assert distance(turn.logprobs, chat.cold(prompt)) <= noise


def test_growing_history(stack: Stack, noise: float, prefill: int, name: str) -> None:
    """The prompt extends the whole last turn: all that decode holds is read."""
    chat = started(stack, name, prefill)
    messages = [*chat.messages, {"role": "user", "content": "And of Italy?"}]
    assert chat.resolve().token_count == len(chat.held_ids)
    warm = next_turn(chat, messages, prefill)
    assert warm.reused_tokens == len(chat.held_ids)
    assert warm.verdict == "reused"
    assert warm.report["read_bytes"] > 0
    assert distance(warm.logprobs, chat.cold(messages)) <= noise
    # What was read is cached as its own by a prefill engine that caches: it must be right, too.
    again = Conversation(stack, "").prefill(messages, prefill)
    assert again.reused_tokens == 0
    assert distance(again.logprobs, chat.cold(messages)) <= noise


def test_growing_history_that_prefill_has_cached_in_part(stack: Stack, noise: float) -> None:
    """Prefill computed the first turn and cached it: only the reply is read from decode."""
    chat = Conversation(stack, "cached-in-part")
    chat.say(
        document("cached-in-part") + "\nTell me more.", prefill=1, max_tokens=80, ignore_eos=True
    )
    held = chat.resolve().token_count
    messages = [*chat.messages, {"role": "user", "content": "Go on."}]
    warm = next_turn(chat, messages, 1)
    assert warm.report["local_tokens"] > 0
    assert warm.reused_tokens > 0
    assert warm.reused_tokens + warm.report["local_tokens"] <= held
    assert distance(warm.logprobs, chat.cold(messages)) <= noise


def test_edited_first_message(stack: Stack, noise: float, prefill: int, name: str) -> None:
    """The document changes in its last line: what lies before it is read, and no token after."""
    chat = started(stack, name, prefill)
    messages = [dict(message) for message in chat.messages]
    messages[0]["content"] = messages[0]["content"].replace("capital of France", "colour of cheese")
    messages.append({"role": "user", "content": "And of milk?"})
    equal = common_tokens(chat.held_ids, token_ids(stack, messages))
    warm = next_turn(chat, messages, prefill)
    assert warm.reused_tokens == equal - equal % STRIDE_TOKENS > 0
    assert warm.verdict == "partial_prefix"
    assert distance(warm.logprobs, chat.cold(messages)) <= noise


def test_history_edited_at_its_start(stack: Stack, noise: float, prefill: int, name: str) -> None:
    """The first words change: nothing is read."""
    chat = started(stack, name, prefill)
    messages = [{"role": "system", "content": "You are a pirate."}, *chat.messages]
    messages.append({"role": "user", "content": "And of Italy?"})
    warm = next_turn(chat, messages, prefill)
    assert warm.reused_tokens == 0
    assert warm.report["read_bytes"] == 0
    assert warm.verdict in ("prefix_mismatch", "below_threshold")
    assert distance(warm.logprobs, chat.cold(messages)) <= noise


def test_compacted_history(stack: Stack, noise: float, prefill: int, name: str) -> None:
    """An agent replaces the history by a summary: only the start of the document is still equal."""
    chat = started(stack, name, prefill)
    kept = chat.messages[0]["content"][:900]
    messages = [
        {"role": "user", "content": kept + "\n(The rest was summarised: a licence.)"},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": "What is the capital of Italy?"},
    ]
    equal = common_tokens(chat.held_ids, token_ids(stack, messages))
    warm = next_turn(chat, messages, prefill)
    assert warm.reused_tokens == equal - equal % STRIDE_TOKENS > 0
    assert warm.verdict == "partial_prefix"
    assert distance(warm.logprobs, chat.cold(messages)) <= noise


def test_regenerate(stack: Stack, noise: float, prefill: int, name: str) -> None:
    """The same prompt again: all of it is read, up to its last digest point."""
    chat = started(stack, name, prefill)
    messages = chat.messages[:-1]
    length = token_count(stack, messages)
    warm = next_turn(chat, messages, prefill)
    assert warm.reused_tokens == length - length % STRIDE_TOKENS
    assert warm.verdict == "reused"
    assert distance(warm.logprobs, chat.cold(messages)) <= noise


def test_same_text_under_another_conversation(
    stack: Stack, noise: float, prefill: int, name: str
) -> None:
    """Equal text gives no right to another conversation's lease, not even with its id in hand."""
    chat = started(stack, name, prefill)
    stranger = Conversation(stack, f"{name}-stranger", messages=list(chat.messages))
    assert stranger.resolve().lease_id == ""
    messages = [*chat.messages, {"role": "user", "content": "And of Italy?"}]
    stolen = stranger.prefill(messages, prefill, chat.resolve().lease_id)
    assert stolen.reused_tokens == 0
    assert distance(stolen.logprobs, chat.cold(messages)) <= noise
    assert next_turn(chat, messages, prefill=0).reused_tokens > 0, "the owner's lease was harmed"


def test_same_conversation_id_under_another_tenant(
    stack: Stack, noise: float, prefill: int, name: str
) -> None:
    """Tenants may use the same ids and the same words; nobody reads another's KV (S4)."""
    chat = started(stack, name, prefill, tenant="ours")
    other = Conversation(stack, name, tenant="theirs", messages=list(chat.messages))
    assert other.resolve().lease_id == ""
    messages = [*chat.messages, {"role": "user", "content": "And of Italy?"}]
    stolen = other.prefill(messages, prefill, chat.resolve().lease_id)
    assert stolen.reused_tokens == 0
    assert distance(stolen.logprobs, chat.cold(messages)) <= noise


def test_handle_is_used_once_when_two_turns_race(stack: Stack, noise: float) -> None:
    """Two turns of one conversation reach both prefill engines at once: one reads (S3)."""
    chat = Conversation(stack, "race")
    chat.say(document("race") + "\nWhat is the capital of France?")
    lease_id = chat.resolve().lease_id
    messages = [*chat.messages, {"role": "user", "content": "And of Italy?"}]
    gate = threading.Barrier(2)

    def race(prefill: int) -> Prefilled:
        gate.wait()
        return chat.prefill(messages, prefill, lease_id)

    with ThreadPoolExecutor(2) as pool:
        turns = list(pool.map(race, (0, 1)))
    reused = [turn for turn in turns if turn.reused_tokens > 0]
    lost = [turn for turn in turns if turn.reused_tokens == 0]
    assert len(reused) == 1
    assert lost[0].verdict in ("read_in_progress", "consumed", "lease_service_unreachable")
    cold = chat.cold(messages)
    assert all(distance(turn.logprobs, cold) <= noise for turn in turns)
    assert chat.prefill(messages, 0, lease_id).reused_tokens == 0, "the handle was used again"


def token_ids(stack: Stack, messages: list[dict[str, str]]) -> list[int]:
    """The engine's own token ids of a chat."""
    answer = post(
        stack.decode_url + "/tokenize", {"model": stack.served_model_name, "messages": messages}
    )
    return [int(token) for token in answer["tokens"]]


def token_count(stack: Stack, messages: list[dict[str, str]]) -> int:
    """Tokens of a chat's prompt."""
    return len(token_ids(stack, messages))


def common_tokens(one: list[int], other: list[int]) -> int:
    """Tokens that two sequences have in common from their start."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@contextmanager
def planted_lease(
    stack: Stack,
    chat: Conversation,
    prompt: list[dict[str, str]],
    begun: lease_pb2.BeginReadResponse,
) -> Iterator[str]:
    """A session of a false decode engine that offers other blocks under the prompt's digests."""
    tokens = token_ids(stack, prompt)[: begun.retention.token_count]
    tokens = tokens[: len(tokens) - len(tokens) % STRIDE_TOKENS]
    retention = common_pb2.Retention()
    retention.CopyFrom(begun.retention)
    retention.lease_id = f"false-{chat.conversation_id}.1.1"
    retention.conversation.CopyFrom(chat.key)
    retention.token_count = len(tokens)
    retention.digests.values = digest_values(
        tokens, Scope(tenant="", model=str(stack.config.model)), b""
    )
    blocks = -(-len(tokens) // retention.block_size)
    del retention.groups[0].block_ids[blocks:]
    engine = lease_pb2.EngineDescription(
        engine_id=f"false-{chat.conversation_id}",
        incarnation=f"false-{chat.conversation_id}",
        role=common_pb2.ENGINE_ROLE_DECODE,
        nixl=begun.nixl,
        model="m",
        block_size=retention.block_size,
    )
    say: queue.SimpleQueue[lease_pb2.EngineSessionRequest | None] = queue.SimpleQueue()
    call = chat.leases.EngineSession(iter(say.get, None), timeout=60)
    request = lease_pb2.EngineSessionRequest
    say.put(request(session_number=1, sequence=1, register=lease_pb2.RegisterEngine(engine=engine)))
    registered = next(call)
    echo = lease_pb2.Heartbeat(echo_term=registered.term, echo_sequence=registered.sequence)
    say.put(request(session_number=1, sequence=2, heartbeat=echo))
    say.put(request(session_number=1, sequence=3, grant=lease_pb2.Grant(retention=retention)))
    assert next(call).WhichOneof("message") == "heartbeat_ack"
    try:
        assert chat.resolve(expected_turn=chat.turn).lease_id == retention.lease_id
        yield retention.lease_id
    finally:
        say.put(None)
        call.cancel()

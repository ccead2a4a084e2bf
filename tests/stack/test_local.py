"""A turn that the decode engine serves alone, from the KV it holds, on real engines.

Right by numbers: decode's top of the first token, with what it holds, equals that of a cold run
within bf16 noise (noise.py); and its own report shows that it computed the suffix only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conversation import TOP_LOGPROBS, Conversation, distance, post
from prose import document

from kvturn.v1 import lease_pb2

if TYPE_CHECKING:
    from kvturn_cli.stack import Stack

QUESTION = {"role": "user", "content": "And what is the capital of Italy?"}
BLOCK_TOKENS = 128


def begun(stack: Stack, name: str, tenant: str = "") -> Conversation:
    """A conversation after a turn through both engines."""
    chat = Conversation(stack, name, tenant)
    chat.say(document(name) + "\nWhat is the capital of France?", max_tokens=16)
    return chat


def local_turn(
    chat: Conversation, messages: list[dict[str, str]], max_tokens: int = 12, **body: Any
) -> dict[str, Any]:
    """Serves a turn on decode alone, as the router sends it, and returns the answer."""
    chat.turn += 1
    answer = post(
        chat.stack.decode_url + "/v1/chat/completions",
        {
            "model": chat.stack.served_model_name,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
            "kv_transfer_params": {
                "kvturn": {
                    "tenant": chat.tenant,
                    "model": chat.stack.served_model_name,
                    "conversation": chat.conversation_id,
                    "turn": chat.turn,
                }
            },
            **body,
        },
    )
    choice = answer["choices"][0]
    chat.held_ids = [*answer["prompt_token_ids"], *choice["token_ids"]][:-1]
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def top(answer: dict[str, Any]) -> dict[str, float]:
    first = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {one["token"]: one["logprob"] for one in first}


def test_decode_goes_on_from_what_it_holds(stack: Stack, noise: float) -> None:
    """A P/D turn, a local one, then one that is pulled: each goes on from the one before."""
    chat = begun(stack, "local")
    held = len(chat.held_ids)
    first_lease = chat.resolve().lease_id
    messages = [*chat.messages, QUESTION]
    answer = local_turn(chat, messages)
    assert cached(answer) == held // BLOCK_TOKENS * BLOCK_TOKENS > 0
    assert distance(top(answer), chat.cold(messages)) <= noise

    assert chat.granted_turn() == chat.turn
    told = chat.resolve()
    assert told.lease_id != first_lease
    assert told.token_count == len(chat.held_ids)
    # The new retention supersedes the old one: it is the conversation's only lease.
    listed = chat.leases.ListLeases(lease_pb2.ListLeasesRequest(conversation=chat.key))
    active = [one for one in listed.leases if one.state == lease_pb2.Lease.STATE_ACTIVE]
    assert [one.lease_id for one in active] == [told.lease_id]

    messages += [
        {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And of Spain?"},
    ]
    chat.turn += 1
    pulled = chat.prefill(messages, 0, told.lease_id)
    assert pulled.verdict == "reused"
    assert pulled.reused_tokens == told.token_count
    assert distance(pulled.logprobs, chat.cold(messages)) <= noise


def test_many_local_turns_in_a_row(stack: Stack, noise: float) -> None:
    """Four local turns, each on the last one's retention: the last one is right, too."""
    chat = begun(stack, "local-row")
    messages = list(chat.messages)
    for index in range(4):
        held = len(chat.held_ids)
        messages.append({"role": "user", "content": f"Name {index + 2} more facts, please."})
        answer = local_turn(chat, messages)
        assert cached(answer) == held // BLOCK_TOKENS * BLOCK_TOKENS
        assert chat.granted_turn() == chat.turn
        last = list(messages)
        content = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
    assert distance(top(answer), chat.cold(last)) <= noise


def test_what_was_given_up_before_it_arrived_is_computed(stack: Stack, noise: float) -> None:
    """The lease is revoked and decode's cache has lost all between plan and arrival."""
    chat = begun(stack, "local-late")
    messages = [*chat.messages, QUESTION]
    chat.leases.RevokeLease(
        lease_pb2.RevokeLeaseRequest(lease_id=chat.resolve().lease_id), timeout=5
    )
    # Another salt finds none of the engine's cached blocks, as after they were evicted.
    answer = local_turn(chat, messages, cache_salt="none of it is cached")
    assert cached(answer) == 0
    assert distance(top(answer), chat.cold(messages)) <= noise
    assert chat.granted_turn() == chat.turn


def test_an_edited_history_reuses_only_what_is_equal(stack: Stack, noise: float) -> None:
    """The answer in the history is another one: decode's cache finds the blocks before it only."""
    chat = begun(stack, "local-edit")
    edited = [chat.messages[0], {"role": "assistant", "content": "I will not say."}, QUESTION]
    answer = local_turn(chat, edited)
    asked = len(chat.held_ids)
    assert 0 < cached(answer) < asked
    assert cached(answer) % BLOCK_TOKENS == 0
    assert distance(top(answer), chat.cold(edited)) <= noise

"""A decode engine is frozen, killed and started again, on real engines.

NIXL runs over TCP here: it then needs the other process for each transfer, as it does between
machines, and a read from a frozen engine stands still. Over shared memory it would go on.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from conversation import GRANT_TIMEOUT_S, Conversation, post
from engines import (
    SMALL_HOLD_S,
    SMALL_LONGEST_READ_S,
    SMALL_PREFILL_BLOCKS,
    SMALL_TTL_S,
    VERSIONS,
    small_stack,
)
from prose import document
from test_life_of_a_turn import chat, holds_what_is_leased, reuses, spans, wait_until
from test_pressure import metric

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_cli.leash import descendants

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvturn_cli.stack import Stack

pytestmark = pytest.mark.fault

SLACK_S = 10.0
START_S = 300.0
BLOCK_SIZE = 128


@pytest.fixture(scope="module", params=VERSIONS)
def small(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The small stack of one vLLM version. The tests run in the order of the file."""
    with small_stack("faults", request.param, UCX_TLS="tcp,self") as running:
        yield running


def pids(stack: Stack, name: str) -> list[int]:
    """Pids of an engine's processes, its leash not among them."""
    process = next(each for each in reversed(stack.processes) if each.name == name)
    assert process.id is not None
    return descendants(process.id.pid)


def send_signal(stack: Stack, number: signal.Signals) -> None:
    """Signals all processes of the decode engine."""
    for pid in pids(stack, "decode-0"):
        os.kill(pid, number)


def decode_engine(observer: Conversation) -> lease_pb2.Engine | None:
    """The decode engine as the lease service knows it; None without a session."""
    request = lease_pb2.ListEnginesRequest()
    engines = observer.leases.ListEngines(request, timeout=GRANT_TIMEOUT_S).engines
    return next((one for one in engines if one.description.engine_id == "decode-0"), None)


def prefill_blocks(stack: Stack) -> int:
    """Blocks of prefill's KV memory in use, by vLLM's own count, after a step."""
    body = {"model": stack.served_model_name, "prompt": "Hello", "max_tokens": 1}
    post(f"{stack.prefill_url}/v1/completions", body)
    share = metric(stack, "vllm:kv_cache_usage_perc", url=stack.prefill_url)
    return round(share * (SMALL_PREFILL_BLOCKS - 1))


def first_turn(stack: Stack, name: str) -> list[dict[str, str]]:
    """Holds a first turn and returns the history with a second question."""
    messages = [{"role": "user", "content": document(name) + "\nWhat is the capital of France?"}]
    reply, _ = chat(stack, name, messages)
    assert Conversation(stack, name).resolve(1).lease_id
    return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "Why?"}]


def test_decode_frozen_in_the_middle_of_a_read(small: Stack) -> None:
    """The read stands still: past R the turn is sent again without the lease, and recomputes.

    The blocks that the transfer writes to stay reserved on prefill until it has ended.
    """
    assert reuses(small, "connects")  # A first read takes longer: the engines shake hands.
    messages = first_turn(small, "frozen")
    leg = -(-Conversation(small, "frozen").resolve().token_count // BLOCK_SIZE)
    trace_id = os.urandom(16).hex()
    traceparent = f"00-{trace_id}-{os.urandom(8).hex()}-01"
    told: dict[str, str] = {}

    def second_turn() -> None:
        told.update(chat(small, "frozen", messages, traceparent=traceparent)[1])

    def prefills() -> list[dict[str, Any]]:
        mine = [span for span in spans(small) if span["traceId"] == trace_id]
        return [span for span in mine if span["name"] == "prefill"]

    turn = threading.Thread(target=second_turn)
    send_signal(small, signal.SIGSTOP)
    try:
        turn.start()
        wait_until(lambda: len(prefills()) == 2, "a second prefill leg", 2 * SLACK_S)
        stuck, _ = sorted(prefills(), key=lambda span: int(span["startTimeUnixNano"]))
        stuck_s = (int(stuck["endTimeUnixNano"]) - int(stuck["startTimeUnixNano"])) / 1e9
        print(f"given up after {stuck_s:.2f} s: {stuck['status']}")
        assert SMALL_LONGEST_READ_S <= stuck_s <= SMALL_LONGEST_READ_S + SLACK_S
        assert "read is out" in stuck["status"]["message"]
        reserved = prefill_blocks(small)
    finally:
        send_signal(small, signal.SIGCONT)
    turn.join(120)
    assert told["verdict"] == "read_too_long"
    assert told["reused-tokens"] == "0"
    print(f"{reserved} blocks in use on prefill while the read stood still, {leg} a leg")
    # Those of the second leg, which decode had not fetched yet, and those of the read.
    assert reserved >= 2 * leg
    # Those of the second leg may stay: where the freeze has cost the connection to decode, nobody
    # knows whether it fetched them.
    wait_until(lambda: prefill_blocks(small) <= leg + 1, "prefill to free the blocks of the read")
    wait_until(lambda: reuses(small, "after-frozen-read"), "a turn that reuses")


def test_decode_frozen_longer_than_the_hold_registers_again(small: Stack) -> None:
    """It is fenced while it sleeps; awake, it frees what it held and goes on in a new session."""
    messages = first_turn(small, "asleep")
    observer = Conversation(small, "asleep")
    before = decode_engine(observer)
    lease_id = observer.resolve().lease_id
    assert before is not None
    send_signal(small, signal.SIGSTOP)
    try:
        wait_until(lambda: decode_engine(observer) is None, "the session to end", 4 * SMALL_TTL_S)
        assert observer.resolve().verdict == common_pb2.VERDICT_ENGINE_LOST
        assert not begins(observer, lease_id)
    finally:
        send_signal(small, signal.SIGCONT)
    wait_until(lambda: decode_engine(observer) is not None, "the engine to register again")
    after = decode_engine(observer)
    assert after is not None
    assert after.description.incarnation == before.description.incarnation
    assert after.session_number > before.session_number
    assert not begins(observer, lease_id)
    assert chat(small, "asleep", messages)[1]["verdict"] in ("reused", "engine_lost")
    wait_until(lambda: reuses(small, "awake"), "a turn that reuses")
    wait_until(lambda: holds_what_is_leased(observer), "decode to hold what is leased")


def begins(observer: Conversation, lease_id: str) -> bool:
    """Whether a read of that lease is granted."""
    request = lease_pb2.BeginReadRequest(lease_id=lease_id, conversation=observer.key)
    return observer.leases.BeginRead(request, timeout=GRANT_TIMEOUT_S).granted


def test_decode_killed_and_started_again_is_another_incarnation(small: Stack) -> None:
    """Same port, same name: its old leases are fenced, and turns go on with a recompute."""
    messages = first_turn(small, "killed")
    observer = Conversation(small, "killed")
    before = decode_engine(observer)
    lease_id = observer.resolve().lease_id
    assert before is not None
    send_signal(small, signal.SIGKILL)
    wait_until(lambda: decode_engine(observer) is None, "the session to end", 2 * SMALL_TTL_S)
    assert not begins(observer, lease_id)
    engine = next(each for each in small.config.engines if each.name == "decode-0")
    wait_until(lambda: not pids(small, "decode-0"), "the engine to be gone")
    started = small._start_engine(engine)
    wait_until(started.is_ready, "the engine to be ready again", START_S)
    wait_until(lambda: decode_engine(observer) is not None, "the engine to register")
    after = decode_engine(observer)
    assert after is not None
    assert after.description.incarnation != before.description.incarnation
    assert not begins(observer, lease_id)
    reply, told = chat(small, "killed", messages)
    assert reply
    assert told["verdict"] == "engine_lost"
    wait_until(lambda: reuses(small, "reborn"), "a turn that reuses", SMALL_HOLD_S + SLACK_S)
    wait_until(lambda: holds_what_is_leased(observer), "decode to hold what is leased")

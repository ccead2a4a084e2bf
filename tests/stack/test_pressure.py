"""Decode's KV memory is small: what is retained gives way, and no turn waits for it (S6).

The stock connector pins every finished turn for its fixed time; turns then wait for a pin to run
out. Times are compared with those of turns that retain nothing, in the same run and generously: a
pin that is waited for costs seconds for every turn.
"""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest
from conversation import Conversation
from engines import SMALL_BLOCKS, SMALL_HOLD_S, VERSIONS, small_stack
from prose import document
from test_life_of_a_turn import chat, lease_pids, reuses, spans, wait_until
from test_local import BLOCK_TOKENS, cached, local_turn

from kvturn.v1 import lease_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvturn_cli.stack import Stack

CONVERSATIONS = 8
BASELINE = 4
DOCUMENT_TOKENS = 300
"""Three blocks of decode's with question and answer."""
SLACK_S = 5.0


@pytest.fixture(scope="module", params=VERSIONS)
def small(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The small stack of one vLLM version."""
    with small_stack("pressure", request.param) as running:
        yield running


@pytest.fixture(scope="module")
def without(small: Stack) -> list[float]:
    """How long turns take that retain nothing, after a first one that connects the engines."""
    hold_conversations(small, "first", 1, X_Kvturn_Reuse="off")
    return hold_conversations(small, "without", BASELINE, X_Kvturn_Reuse="off")


def hold_conversations(stack: Stack, name: str, count: int, **headers: str) -> list[float]:
    """One turn each of `count` new conversations. Returns their durations in seconds."""
    seconds = []
    for index in range(count):
        key = f"{name}-{index}"
        began_s = time.monotonic()
        messages = [
            {"role": "user", "content": document(key, DOCUMENT_TOKENS) + "\nWhat is a licence?"}
        ]
        chat(stack, key, messages, **headers)
        seconds.append(time.monotonic() - began_s)
    print(f"{name}: {sum(seconds):.1f} s, the longest {max(seconds):.1f} s")
    return seconds


def metric(stack: Stack, name: str, *labels: str, url: str = "") -> float:
    """A value of decode's /metrics, or of `url`: the sum of that name's samples with `labels`."""
    with urllib.request.urlopen(f"{url or stack.decode_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    samples = [line for line in lines if line.startswith(name + "{")]
    return sum(
        float(line.split()[-1]) for line in samples if all(label in line for label in labels)
    )


def test_conversations_that_overfill_decode_run_as_without_retention(
    small: Stack, without: list[float]
) -> None:
    """Much more than fits: each is retained, and gives way to the ones after it.

    What was given up shows in the trace of the turn that needed it, and in vLLM's metrics.
    """
    trace_id = os.urandom(16).hex()
    traceparent = f"00-{trace_id}-{os.urandom(8).hex()}-01"
    retained = hold_conversations(small, "retained", CONVERSATIONS, traceparent=traceparent)
    assert sum(retained) <= 2 * CONVERSATIONS / BASELINE * sum(without) + SLACK_S
    assert max(retained) <= 2 * max(without) + SLACK_S
    given_up = metric(small, "kvturn_connector_given_up_total")
    assert given_up >= CONVERSATIONS // 3, "nothing was given up: was decode ever full?"
    assert metric(small, "kvturn_connector_releases_total", 'reason="pressure"') >= given_up
    assert 0 < metric(small, "kvturn_connector_retained_blocks") < SMALL_BLOCKS
    last = Conversation(small, f"retained-{CONVERSATIONS - 1}")
    assert last.resolve(1).lease_id, "the newest retention is not the first to go"

    def given() -> list[dict[str, int]]:
        return [
            {one["key"]: int(one["value"]["intValue"]) for one in span["attributes"]}
            for span in spans(small)
            if span["name"] == "give_way" and span["traceId"] == trace_id
        ]

    wait_until(lambda: bool(given()), "a give_way span")
    for attributes in given():
        assert attributes["kvturn.blocks_wanted"] > 0
        assert attributes["kvturn.blocks_given_up"] > 0
        assert attributes["kvturn.given_up_normal"] + attributes["kvturn.given_up_idle"] > 0


def test_frozen_lease_service_delays_conversations_by_no_more_than_the_hold(
    small: Stack, without: list[float]
) -> None:
    """Nobody releases: what was offered runs out at K*(TTL + R), and then nothing waits again."""
    for pid in lease_pids(small):
        os.kill(pid, signal.SIGSTOP)
    try:
        frozen = hold_conversations(small, "frozen", CONVERSATIONS)
    finally:
        for pid in lease_pids(small):
            os.kill(pid, signal.SIGCONT)
    assert max(frozen) <= SMALL_HOLD_S + 2 * max(without) + SLACK_S
    assert sum(frozen) <= SMALL_HOLD_S + 2 * CONVERSATIONS / BASELINE * sum(without) + SLACK_S
    wait_until(lambda: reuses(small, "thawed"), "a turn that reuses")


def give_all_back(stack: Stack) -> None:
    """Ends what earlier conversations retain, and waits until decode has its blocks back."""
    leases = Conversation(stack, "").leases
    for lease in leases.ListLeases(lease_pb2.ListLeasesRequest(), timeout=5).leases:
        if lease.state == lease_pb2.Lease.STATE_ACTIVE:
            leases.RevokeLease(lease_pb2.RevokeLeaseRequest(lease_id=lease.lease_id), timeout=5)
    wait_until(
        lambda: metric(stack, "kvturn_connector_retained_blocks") == 0, "decode's blocks are free"
    )


def test_a_turn_that_goes_on_in_place_takes_only_new_blocks(small: Stack) -> None:
    """Decode is nearly full, and serves a long conversation's next turn alone: others stay.

    What the turn needs is held for it already, but for its few new tokens. As many blocks are free
    as these take and decode keeps free besides, and fewer than the whole turn would take.
    """
    give_all_back(small)
    long = Conversation(small, "in-place")
    long.say(document("in-place", 850) + "\nWhat is a licence?")
    beside = 0
    while metric(small, "kvturn_connector_retained_blocks") < SMALL_BLOCKS - 6:
        Conversation(small, f"beside-{beside}").say(document(f"beside-{beside}", 100))
        beside += 1
    assert metric(small, "kvturn_connector_retained_blocks") <= SMALL_BLOCKS - 5
    assert long.resolve().lease_id, "it was given up for the others"
    before = metric(small, "kvturn_connector_given_up_total")
    answer = local_turn(long, [*long.messages, {"role": "user", "content": "And a patent?"}], 8)
    assert cached(answer) > 6 * BLOCK_TOKENS
    assert long.granted_turn() == long.turn
    assert metric(small, "kvturn_connector_given_up_total") == before

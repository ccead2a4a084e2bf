"""One trace per turn, through all processes, on real engines."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from prose import document
from test_life_of_a_turn import TRIES, chat, spans, wait_until

if TYPE_CHECKING:
    from kvturn_cli.stack import Stack

CONVERSATIONS = 4
CANARY = "xylophone"
PARENTS = {
    "resolve": {"turn"},
    "BeginTurn": {"resolve"},
    "plan": {"turn"},
    "prefill": {"turn"},
    "decode": {"turn"},
    "begin_read": {"prefill"},
    "BeginRead": {"begin_read"},
    "kv_read": {"prefill"},
    "EndRead": {"kv_read"},
    "grant": {"decode"},
    "Grant": {"grant"},
    "llm_request": {"prefill", "decode"},
}
"""Of each span of a turn that read, what it lies under."""
OF_A_READ = {"kv_read", "EndRead"}
"""Spans that a turn lacks whose prefill engine had all of it in a cache of its own."""
READ_OR_IN_CACHE = {"reused", "below_threshold"}


def test_concurrent_turns_have_a_trace_each_from_client_to_engines(stack: Stack) -> None:
    """vLLM's own spans included; each under its leg, none in another turn's trace."""

    talks = [
        [{"role": "user", "content": f"{document(f'traces-{number}')}\nWhat is a {CANARY}?"}]
        for number in range(CONVERSATIONS)
    ]

    def turn(number: int) -> tuple[str, str]:
        trace, messages = os.urandom(16).hex(), talks[number]
        parent = f"00-{trace}-{os.urandom(8).hex()}-01"
        reply, told = chat(stack, f"traces-{number}", messages, traceparent=parent)
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "And who plays it?"},
        ]
        return trace, told["verdict"]

    with ThreadPoolExecutor(CONVERSATIONS) as threads:
        # All of one round before the next: long prompts would hold up the reads.
        turns_before = list(threads.map(turn, range(CONVERSATIONS)))
        turns = list(threads.map(turn, range(CONVERSATIONS)))
        # A busy machine may end a question or a read before its time, which is another trace.
        for _ in range(TRIES):
            if {"reused"} <= {verdict for _, verdict in turns} <= READ_OR_IN_CACHE:
                break
            turns_before, turns = turns, list(threads.map(turn, range(CONVERSATIONS)))
    held = [(first, second) for (first, _), (second, _) in zip(turns_before, turns, strict=True)]
    whole = sorted([*PARENTS, "turn", "llm_request"])
    without_read = sorted(name for name in whole if name not in OF_A_READ)

    def names(trace: str) -> list[str]:
        return sorted(span["name"] for span in spans(stack) if span["traceId"] == trace)

    def complete() -> bool:
        found = [names(second) for _, second in held]
        return whole in found and all(each in (whole, without_read) for each in found)

    wait_until(complete, f"spans {whole}")
    found = spans(stack)
    # Each within its trace: vLLM numbers the spans of its start alike in every engine.
    ids = [(span["traceId"], span["spanId"]) for span in found]
    assert len(ids) == len(set(ids)), "two spans of a trace have the same id"
    turn_spans = {span["traceId"]: span for span in found if span["name"] == "turn"}
    for number, (first, second) in enumerate(held):
        mine = {span["spanId"]: span for span in found if span["traceId"] == second}
        for span in mine.values():
            if span["name"] != "turn":
                assert mine[span["parentSpanId"]]["name"] in PARENTS[span["name"]], span["name"]
        legs = [
            mine[span["parentSpanId"]]["name"]
            for span in mine.values()
            if span["name"] == "llm_request"
        ]
        assert sorted(legs) == ["decode", "prefill"]
        (link,) = turn_spans[second]["links"]
        assert (link["traceId"], link["spanId"]) == (first, turn_spans[first]["spanId"])
        told = {each["key"]: each["value"] for each in turn_spans[second]["attributes"]}
        assert told["gen_ai.conversation.id"] == {"stringValue": f"traces-{number}"}
        reads = [span for span in mine.values() if span["name"] == "kv_read"]
        in_cache = told["kvturn.verdict"] == {"stringValue": "below_threshold"}
        assert len(reads) == (0 if in_cache else 1)
        for read in reads:
            said = {each["key"]: each["value"] for each in read["attributes"]}
            for name in ("kvturn.read_bytes", "kvturn.read_blocks"):
                assert int(said[name]["intValue"]) > 0
            assert said["kvturn.read_bytes_per_s"]["doubleValue"] > 0
    assert CANARY not in stack.trace_file.read_text(), "prompt text in a span"


def test_a_turn_that_is_not_sampled_is_in_no_processs_spans(stack: Stack) -> None:
    """The client's decision holds for router, lease service, connectors and vLLM."""
    name = "unsampled"
    messages = [{"role": "user", "content": document(name)}]
    before = os.urandom(16).hex()
    chat(stack, name, messages, traceparent=f"00-{before}-{os.urandom(8).hex()}-00")
    after = os.urandom(16).hex()
    chat(stack, "sampled", messages, traceparent=f"00-{after}-{os.urandom(8).hex()}-01")

    def named(trace: str) -> set[str]:
        return {span["name"] for span in spans(stack) if span["traceId"] == trace}

    wait_until(lambda: {"llm_request", "Grant"} <= named(after), "the later turn's spans")
    assert named(before) == set()
    assert name not in stack.trace_file.read_text()

"""Turns that the router has decode serve alone, between turns that prefill reads for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from conversation import Conversation
from prose import document
from routers import Router, Talk, router, turns_of
from test_life_of_a_turn import wait_until
from test_local import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvturn_cli.stack import Stack

SHORT_OR_READ = ("--local-suffix-max-tokens", "60", "--pull-min-tokens", "1")
"""Decode serves short suffixes alone; for all others prefill reads."""


@pytest.fixture(scope="module")
def chooser(stack: Stack) -> Iterator[Router]:
    """A router that chooses by the length of what is new."""
    with router(stack, "chooser", *SHORT_OR_READ) as running:
        yield running


def test_a_local_turn_is_told_and_read_from(stack: Stack, chooser: Router) -> None:
    """P/D, twice local, then a long question for which prefill reads all that the last one left."""
    talk = Talk(stack, document("ways"))
    first = talk.say("What is the capital of France?", chooser.url)
    name = first.told["conversation"]
    assert (first.told["plan"], first.told["verdict"]) == ("recompute", "first_turn")

    whole = talk.say("And of Italy?", chooser.url, stream=False)
    streamed = talk.say("And of Spain?", chooser.url)
    for local, held in ((whole, first), (streamed, whole)):
        assert (local.told["plan"], local.told["verdict"]) == ("local", "local")
        assert "local_ms=" in local.told["plan-reason"]
        held_tokens = held.usage["prompt_tokens"] + held.usage["completion_tokens"] - 1
        assert local.cached_tokens == held_tokens // BLOCK_TOKENS * BLOCK_TOKENS > 0

    wait_until(lambda: len(turns_of(stack, name)) == 3, "the report of the streamed turn")
    for turn, answered in zip(turns_of(stack, name)[1:], (whole, streamed), strict=True):
        assert (turn["plan"], turn["verdict"]) == ("local", "local")
        assert turn["prompt_tokens"] == answered.usage["prompt_tokens"]
        assert turn["local_tokens"] == answered.cached_tokens
        assert turn["reused_tokens"] == 0
        assert turn["output_tokens"] == answered.usage["completion_tokens"]
        assert turn["decode_engine"]
        assert not turn["prefill_engine"]

    held_tokens = Conversation(stack, name).resolve(3).token_count
    said = streamed.usage["completion_tokens"]
    assert held_tokens == streamed.usage["prompt_tokens"] + said - 1
    pulled = talk.say(document("a long question", 100) + "\nAnd what of this?", chooser.url)
    assert (pulled.told["plan"], pulled.told["verdict"]) == ("pull", "reused")
    assert int(pulled.told["reused-tokens"]) == held_tokens == pulled.cached_tokens


def test_the_default_router_serves_a_growing_conversation(stack: Stack) -> None:
    """`--plan auto`: whatever it chooses, it says why, and nothing is lost."""
    with router(stack, "auto") as auto:
        talk = Talk(stack, document("auto"))
        talk.say("What is the capital of France?", auto.url)
        for country in ("Italy", "Spain", "Greece"):
            answered = talk.say(f"And of {country}?", auto.url)
            assert answered.text
            why, _, *figures = answered.told["plan-reason"].split()
            told = dict(figure.split("=") for figure in figures)
            ways = ("pull", "recompute", "local")
            costs = {way: float(told[f"{way}_ms"]) for way in ways}
            cheapest = [way for way in ways if costs[way] == min(costs.values())]
            assert why in ("cheapest", "explored")
            assert answered.told["plan"] in (cheapest if why == "cheapest" else ways)
            if answered.told["plan"] != "recompute":
                assert answered.cached_tokens > 0

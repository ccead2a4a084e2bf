"""Several routers on the same engines and lease service, none of which was told of an engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from http.client import HTTPException
from typing import TYPE_CHECKING

import pytest
from engines import READS
from prose import document
from routers import CHAT, Router, Talk, router, turns_of
from test_life_of_a_turn import wait_until

from kvturn_cli.leash import descendants

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvturn_cli.stack import Stack

ROUTERS = 3


@pytest.fixture(scope="module")
def routers(stack: Stack) -> Iterator[list[Router]]:
    """Three routers that learn of the engines from their sessions with the lease service."""
    with contextlib.ExitStack() as running:
        yield [
            running.enter_context(router(stack, f"{index}", *READS, named_engines=False))
            for index in range(ROUTERS)
        ]


def kill(victim: Router) -> None:
    """Kills a router's own process, as an operator's `kill -9` does."""
    assert victim.process.id is not None
    for pid in descendants(victim.process.id.pid):
        os.kill(pid, signal.SIGKILL)


def test_turns_reuse_through_whichever_router(stack: Stack, routers: list[Router]) -> None:
    """Five turns of an untagged conversation, in turn through three routers; all tell the same."""
    talk = Talk(stack, document("round robin"))
    first = talk.say("What is the capital of France?", routers[0].url)
    name = first.told["conversation"]
    for number, country in enumerate(("Italy", "Spain", "Greece", "Malta"), 2):
        answered = talk.say(f"And of {country}?", routers[(number - 1) % ROUTERS].url)
        assert answered.goes_on, answered.told
        assert (answered.told["conversation"], answered.told["turn"]) == (name, str(number))
    wait_until(lambda: len(turns_of(stack, name)) == 5, "the report of the last turn")
    for one in routers:
        told = turns_of(stack, name, one.url)
        assert [turn["turn"] for turn in told] == [1, 2, 3, 4, 5]


def test_a_killed_router_costs_its_own_turns_only(stack: Stack, routers: list[Router]) -> None:
    """Killed in the middle of one conversation's answer: that one and another go on elsewhere."""
    killed, *others = routers
    talk, beside = Talk(stack, document("killed")), Talk(stack, document("beside"))
    talk.say("What is the capital of France?", others[0].url)
    beside.say("What is the capital of France?", killed.url)
    talk.messages.append({"role": "user", "content": "Tell me a long story."})
    body = talk.body(max_tokens=400, ignore_eos=True)
    request = urllib.request.Request(
        killed.url + CHAT, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        for _ in range(6):
            answer.readline()
        kill(killed)
        with contextlib.suppress(OSError, HTTPException):  # However it ends, it is over.
            answer.read()
    answered = beside.say("And of Italy?", others[1].url)
    assert answered.goes_on, answered.told
    talk.messages.pop()
    talk.say("And of Italy?", others[1].url)
    answered = talk.say("And of Spain?", others[0].url)
    assert answered.goes_on, answered.told

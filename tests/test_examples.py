"""The examples of docs/clients.md, and the talk of docs/tutorial.md, work as they are pasted."""

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from router_harness import FakeLease, Rig, router
from stub_engine import GUARD_S

DOCS = Path(__file__).resolve().parent.parent / "docs"


def blocks(document: str, language: str = "python") -> list[str]:
    """Returns a document's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / document).read_text(), re.DOTALL)


async def printed(code: str, rig: Rig, interpreter: str = sys.executable) -> Sequence[str]:
    """Runs code that talks to a router on its usual ports; returns the lines that it prints."""
    for written, meant in {
        "http://127.0.0.1:8000": rig.url,
        "127.0.0.1:8001": f"127.0.0.1:{rig.server.grpc_port}",
    }.items():
        code = code.replace(written, meant)
    running = await asyncio.create_subprocess_exec(
        *(interpreter, "-c", code),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(GUARD_S):
        out, errors = await running.communicate()
    assert (running.returncode, errors.decode()) == (0, "")
    return out.decode().splitlines()


@pytest.fixture
async def rig():
    async with router(lease=FakeLease()) as rig:
        rig.prefill.report = {"verdict": "reused", "prompt_tokens": 48, "reused_tokens": 40}
        rig.lease.lease_id = "d.1.1"
        rig.lease.http_address = rig.decode.url
        yield rig


async def test_a_conversation_over_http_sends_its_answers_back(rig: Rig) -> None:
    """The first example of docs/clients.md: what each turn reused, and what its usage says."""
    told = await printed(blocks("clients.md")[0], rig)
    assert told == ["reused 40", "40 tokens were computed nowhere"] * 2
    (_, second) = (seen.json for seen in rig.decode.turns)
    assert second["messages"][1] == {"role": "assistant", "content": "The capital is Paris."}
    names = {begun.conversation.conversation_id for begun in rig.lease.begun}
    assert names == {"trip-43"}


async def test_a_conversation_over_grpc_is_ended_with_its_block(rig: Rig) -> None:
    """The second one: an answer, a stream, and the report that came with it."""
    _, over_grpc = blocks("clients.md")
    assert await printed(over_grpc, rig) == ["reused", "The capital is Paris.", "2 40"]
    (ended,) = rig.lease.ended
    assert {begun.conversation.conversation_id for begun in rig.lease.begun} == {
        ended.conversation_id
    }


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_requests_by_hand_are_served(rig: Rig) -> None:
    """The curl commands: a turn, a longer absence, and the end of the conversation."""
    commands = re.findall(
        r"^ *(curl(?:.*\\\n)*.*)$", (DOCS / "clients.md").read_text(), re.MULTILINE
    )
    turn, keep, end = [await printed(f"{command} -s", rig, "bash") for command in commands]
    assert (turn[0], "x-kvturn-conversation: trip-42" in turn) == ("HTTP/1.1 200 OK", True)
    assert json.loads(keep[0]) == {"kept_s": 60.0}
    assert json.loads(end[0])["leases_ended"] == 1
    (kept,), (ended,) = rig.lease.kept, rig.lease.ended
    assert kept.absence.seconds == 300
    assert kept.conversation == ended == rig.lease.begun[0].conversation


async def test_the_tutorials_conversation_has_five_turns(rig: Rig) -> None:
    """It tells of each turn in the words that are shown, and does without reuse in the last."""
    (talk,) = blocks("tutorial.md")
    told = await printed(talk, rig)
    assert told[0] == "turn 1: reused (pull), 48 prompt tokens, 40 read, 0 cached"
    figures = re.compile(r"\w+ \(\w+\)|\d+ (?=prompt|read|cached)")
    shown = blocks("tutorial.md", "text")[0].splitlines()
    assert [figures.sub("", line) for line in told] == [figures.sub("", line) for line in shown]
    assert told[4].startswith("turn 0: turned_off (recompute), ")
    assert [len(seen.json["messages"]) for seen in rig.decode.turns] == [1, 3, 5, 7, 9]
    edited = rig.decode.turns[3].json["messages"][2]["content"]
    assert edited == "And with children? Keep it cheap."

"""Clients that nobody here wrote, each multi-turn with a tool, on a router with stub engines.

They run in an environment of their own (`make setup` makes .envs/clients), as processes.
"""

import asyncio
import itertools
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from response_engine import RESPONSES, offer_responses
from router_harness import FakeLease, Rig, router
from stub_engine import CHAT
from tool_engine import call_tools, text_of

from kvturn.v1 import lease_pb2

CHECKOUT = Path(__file__).parents[1]
PYTHON = CHECKOUT / ".envs" / "clients" / "bin" / "python"
CLIENT_S = 120
BENCHMARK = shlex.split(os.environ.get("KVTURN_MULTI_TURN_BENCHMARK", ""))
"""How to run the benchmark, as a command line: its Python must have vLLM and pandas."""
MODEL = CHECKOUT / "build" / "models" / "smollm2-135m-instruct"
KEY = [("Authorization", "Bearer none")]
TEXTS = ["It is Paris: 21 \u00b0C now. \u2600", "It is Rome: 21 \u00b0C now. \u2600"]


class Numbering(FakeLease):
    """Numbers the turns of a conversation that the client named."""

    def answer_to(self, begin: lease_pb2.BeginTurn) -> lease_pb2.TurnBegun:
        begun = super().answer_to(begin)
        begun.turn = sum(one.conversation == begin.conversation for one in self.begun)
        return begun


async def run(script: str, rig: Rig, *ways: str) -> list[dict[str, Any]]:
    """Runs some ways of a client's script against the router; returns what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(str(PYTHON), str(Path(__file__).parent / "clients" / script)),
        *("--base-url", f"{rig.url}/v1", "--model", "m", "--ways", *ways),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(CLIENT_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return list(json.loads(out.splitlines()[-1]))


async def assert_told(done: dict[str, Any], rig: Rig) -> None:
    """Each call and each text came whole, and a tagged conversation was one of four turns."""
    assert done["calls"] == ["Paris", "Rome"], done
    assert done["texts"] == TEXTS, done
    if done["tag"] is not None:
        path = f"/kvturn/v1/conversations/{done['tag']}?model=m"
        told = await rig.ask("GET", path, headers=KEY)
        assert [turn["turn"] for turn in told.json["turns"]] == [1, 2, 3, 4]


def assert_known_by_history(talks: list[dict[str, Any]], begun: list[lease_pb2.BeginTurn]) -> None:
    """Each turn was told with the history of the one before it, byte for byte, calls included.

    By that, and by nothing else where there is no tag, a lease service knows that it goes on from
    that turn, whatever a client does to answers before it sends them back.
    """
    assert len(begun) == 4 * len(talks)
    for number, done in enumerate(talks):
        turns = begun[4 * number : 4 * number + 4]
        by_history = done["tag"] is None
        assert [turn.recognise for turn in turns] == [False, *[by_history] * 3], done
        assert len({turn.points[0] for turn in turns}) == 4
        for one, following in itertools.pairwise(turns):
            assert one.points[0] in following.points[1:], done


@pytest.mark.parametrize(
    ("client", "ways"),
    [
        ("with_openai", ["chat"]),
        ("with_litellm", ["openai", "vllm"]),
        ("with_openai_agents", ["chat"]),
        ("with_pydantic_ai", ["chat"]),
    ],
)
async def test_a_client_talks_and_calls_its_tool(client: str, ways: list[str]):
    """Streamed and not, tagged and not: each call and each text arrives whole, on both legs.

    Every request extends the one before it, decode sees the tool results as the client wrote
    them, a tagged conversation is one conversation, and an untagged one can be known for one.
    """
    async with router(lease=Numbering()) as rig:
        rig.decode.script(CHAT, call_tools)
        talks = await run(f"{client}.py", rig, *ways)
        await rig.lease.until(lambda: len(rig.lease.turns_ended) == 4 * len(talks))
        for done in talks:
            await assert_told(done, rig)
        assert_known_by_history(talks, rig.lease.begun)
        prefills, decodes = rig.prefill.turns, rig.decode.turns
        assert len(prefills) == len(decodes)
        for prefill, decode in zip(prefills, decodes, strict=True):
            assert prefill.json["messages"] == decode.json["messages"]
            assert prefill.json["tools"] == decode.json["tools"]
            assert "conversation_id" not in decode.json
        for first in range(0, len(decodes), 4):
            histories = [seen.json["messages"] for seen in decodes[first : first + 4]]
            assert [len(history) for history in histories] == [2, 4, 6, 8]
            for shorter, longer in itertools.pairwise(histories):
                assert longer[: len(shorter)] == shorter
            assert text_of(histories[3][-1]["content"]) == "Rome: 21 \u00b0C"


@pytest.mark.parametrize(
    ("client", "way"),
    [("with_openai", "responses"), ("with_openai", "kept"), ("with_openai_agents", "responses")],
)
async def test_a_client_talks_over_responses(client: str, way: str):
    """With the whole history each time, both legs see it; with only what is new, one engine does.

    Three decode engines: the turns of a kept conversation all find the one that keeps it, and
    without a tag they are one conversation, too.
    """
    async with router(lease=Numbering(), decodes=3) as rig:
        for engine in (*rig.prefills, *rig.decodes):
            offer_responses(engine)
        talks = await run(f"{client}.py", rig, way)
        await rig.lease.until(lambda: len(rig.lease.turns_ended) == 16)
        for done in talks:
            await assert_told(done, rig)
        if way == "kept":
            names = [turn.conversation.conversation_id for turn in rig.lease.begun]
            assert [names.count(name) for name in dict.fromkeys(names)] == [4] * 4
        else:
            assert_known_by_history(talks, rig.lease.begun)
        prefills = [seen.json for seen in rig.prefill.seen if seen.path == RESPONSES]
        decodes = [seen.json for one in rig.decodes for seen in one.seen if seen.path == RESPONSES]
        assert len(decodes) == 16
        going_on = [request for request in decodes if request.get("previous_response_id")]
        assert len(going_on) == (12 if way == "kept" else 0)
        assert len(prefills) == len(decodes) - len(going_on)
        inputs = [request["input"] for request in decodes]
        assert all(request["input"] in inputs for request in prefills)
        longest = max(len(request["input"]) for request in decodes)
        assert longest == (1 if way == "kept" else 7)


@pytest.mark.skipif(
    not BENCHMARK,
    reason="KVTURN_MULTI_TURN_BENCHMARK does not say how to run benchmark_serving_multi_turn.py,"
    " which is in vLLM's source distribution, under benchmarks/multi_turn",
)
@pytest.mark.parametrize("flags", [[], ["--send-conversation-id"], ["--no-stream"]])
async def test_vllms_own_multi_turn_benchmark_runs(flags: list[str], tmp_path: Path):
    """Three conversations of three user turns, two clients at once: nothing fails.

    Every answer is whole, and each turn extends its conversation's last one.
    """
    talks = [
        {
            "id": f"talk-{number}",
            "messages": [
                {"role": role, "content": f"{role} {number} {turn} " + "word " * 20}
                for turn in range(3)
                for role in ("user", "assistant")
            ],
        }
        for number in range(3)
    ]
    (tmp_path / "in.json").write_text(json.dumps(talks))
    async with router() as rig:
        process = await asyncio.create_subprocess_exec(
            *(*BENCHMARK, "--model", str(MODEL), "--served-model-name", "m"),
            *("--url", rig.url, "--input-file", str(tmp_path / "in.json")),
            *("--output-file", str(tmp_path / "out.json"), "--num-clients", "2"),
            *("--max-active-conversations", "2", "--no-early-stop", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(CLIENT_S):
            out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()[-3000:]
        assert len(rig.prefill.turns) == len(rig.decode.turns) == 9
        assert all("conversation_id" not in seen.json for seen in rig.decode.turns)
        assert {len(seen.json["messages"]) for seen in rig.decode.turns} == {1, 3, 5}
        answers = json.loads((tmp_path / "out.json").read_text())
        assert len(answers) == 3
        for talk in answers:
            texts = [said["content"] for said in talk["messages"] if said["role"] == "assistant"]
            assert texts == ["The capital is Paris."] * 3

"""Clients that nobody here wrote, each multi-turn with a tool, on a router with stub engines.

They run in an environment of their own (`make setup` makes .envs/clients), as processes.
"""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from router_harness import Rig, router
from stub_engine import CHAT
from tool_engine import call_tools, text_of

CHECKOUT = Path(__file__).parents[1]
PYTHON = CHECKOUT / ".envs" / "clients" / "bin" / "python"
CLIENT_S = 120
KEY = [("Authorization", "Bearer none")]
TEXTS = ["It is Paris: 21 \u00b0C now. \u2600", "It is Rome: 21 \u00b0C now. \u2600"]


async def run(script: str, rig: Rig) -> list[dict[str, Any]]:
    """Runs a client's script against the router; returns what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(str(PYTHON), str(Path(__file__).parent / "clients" / script)),
        *("--base-url", f"{rig.url}/v1", "--model", "m"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(CLIENT_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return list(json.loads(out.splitlines()[-1]))


@pytest.mark.parametrize(
    "client", ["with_openai", "with_litellm", "with_openai_agents", "with_pydantic_ai"]
)
async def test_a_client_talks_and_calls_its_tool(client: str):
    """Streamed and not, tagged and not: each call and each text arrives whole, on both legs.

    Every request extends the one before it, decode sees the tool results as the client wrote
    them, and a tagged conversation is one conversation.
    """
    async with router() as rig:
        rig.decode.script(CHAT, call_tools)
        for done in await run(f"{client}.py", rig):
            assert done["calls"] == ["Paris", "Rome"], done
            assert done["texts"] == TEXTS, done
            if done["tag"] is not None:
                told = await rig.ask(
                    "GET", f"/kvturn/v1/conversations/{done['tag']}?model=m", headers=KEY
                )
                assert [turn["turn"] for turn in told.json["turns"]] == [1, 2, 3, 4]
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

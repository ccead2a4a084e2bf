"""Clients that nobody here wrote, whose tool a real model calls, on real engines."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from typing import TYPE_CHECKING, Any

from engines import CHECKOUT
from routers import FOUND

from kvturn_cli.engine import process_environment

if TYPE_CHECKING:
    from kvturn_cli.stack import Stack

PYTHON = CHECKOUT / ".envs" / "clients" / "bin" / "python"
CLIENT_S = 120
WAYS = (
    ("with_openai", "chat"),
    ("with_openai", "responses"),
    ("with_openai", "kept"),
    ("with_litellm", "openai"),
    ("with_litellm", "vllm"),
    ("with_openai_agents", "chat"),
    ("with_pydantic_ai", "chat"),
)


def run(stack: Stack, script: str, way: str) -> list[dict[str, Any]]:
    """Runs one way of a client's script on a stack's router; returns what it printed."""
    client = subprocess.run(
        [
            *(str(PYTHON), str(CHECKOUT / "tests" / "clients" / f"{script}.py"), "--brief"),
            *("--base-url", f"{stack.router_url}/v1", "--model", stack.served_model_name),
            *("--ways", way),
        ],
        env=process_environment({"OPENAI_API_KEY": "none"}),
        timeout=CLIENT_S,
        capture_output=True,
        check=False,
        text=True,
    )
    assert client.returncode == 0, f"{script} {way}: {client.stderr[-3000:]}"
    return list(json.loads(client.stdout.splitlines()[-1]))


def turns_of(stack: Stack, conversation: str) -> list[dict[str, Any]]:
    """What the router tells of a conversation's turns."""
    url = f"{stack.router_url}/kvturn/v1/conversations/{conversation}"
    request = urllib.request.Request(
        f"{url}?model={stack.served_model_name}", headers={"Authorization": "Bearer none"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        turns: list[dict[str, Any]] = json.load(answer)["turns"]
        return turns


def test_a_real_models_calls_reach_each_clients_tool(stack: Stack) -> None:
    """One client after another, each streamed and tagged, then neither.

    One at a time: a slow prefill engine that computes another one's prompt meanwhile sees too late
    that a read is done.

    Two questions, each a call of the tool and a text made of what the tool told; each turn of a
    tagged conversation goes on from what decode holds of it.
    """
    for script, way in WAYS:
        for done in run(stack, script, way):
            assert done["calls"] == ["Paris", "Rome"], (script, done)
            assert "Paris: 21" in done["texts"][0], (script, done)
            assert "Rome: 21" in done["texts"][1], (script, done)
            if done["tag"] is not None:
                turns = turns_of(stack, done["tag"])
                assert [turn["turn"] for turn in turns] == [1, 2, 3, 4]
                verdicts = {turn["verdict"] for turn in turns[1:]}
                # A kept conversation goes on in the engine that keeps it, its lease known or not.
                expected = {"local", "no_lease"} if way == "kept" else {*FOUND, "local"}
                assert verdicts <= expected, (script, way, verdicts)

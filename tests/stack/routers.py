"""More routers on a stack's engines, and turns through any router, as its clients send them."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvturn_cli.engine import process_environment
from kvturn_cli.ports import HOST, pick_free
from kvturn_cli.process import LeashedProcess
from kvturn_cli.stack import http_ok

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvturn_cli.stack import Stack

READY_S = 30
TURN_S = 120
CHAT = "/v1/chat/completions"
FOUND = ("reused", "partial_prefix", "below_threshold")
"""Verdicts of turns that had a lease; the last one is told where prefill has nearly all itself."""


@dataclass
class Router:
    """A running router."""

    process: LeashedProcess
    url: str
    grpc: str


@contextlib.contextmanager
def router(stack: Stack, name: str, *args: str, named_engines: bool = True) -> Iterator[Router]:
    """Runs one more router on a stack's engines and lease service.

    Without `named_engines` it has to learn of the engines from their sessions.
    """
    taken: set[int] = set()
    port, grpc_port = pick_free(taken), pick_free(taken)
    command = [sys.executable, "-m", "kvturn_cli", "router", "--lease", stack.lease_address]
    command += ["--host", HOST, "--port", str(port), "--grpc-port", str(grpc_port), *args]
    for role in ("prefill", "decode") if named_engines else ():
        for url in stack.engine_urls(role):
            command += [f"--{role}", url]
    log = stack.config.run_dir / f"router-{name}.log"
    process = LeashedProcess(name, command, process_environment(), log, 10.0)
    started = Router(process, f"http://{HOST}:{port}", f"{HOST}:{grpc_port}")
    try:
        deadline_s = time.monotonic() + READY_S
        while not http_ok(f"{started.url}/ready"):
            assert time.monotonic() < deadline_s, process.tail()
            time.sleep(0.1)
        yield started
    finally:
        process.terminate()
        process.wait_stopped()


class Answered(NamedTuple):
    """A turn's answer: its JSON or its events, and what the router told in headers."""

    events: list[dict[str, Any]]
    told: dict[str, str]

    @property
    def text(self) -> str:
        """What the assistant said, of a chat."""
        said = (choice["delta" if "delta" in choice else "message"] for choice in self._choices())
        return "".join(part.get("content") or "" for part in said)

    def _choices(self) -> Iterator[dict[str, Any]]:
        for event in self.events:
            yield from event["choices"]

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens of a chat."""
        found: dict[str, Any] = self.events[-1]["usage"]
        return found

    @property
    def cached_tokens(self) -> int:
        """The prompt tokens of a chat that no engine computed for it."""
        return int((self.usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    @property
    def goes_on(self) -> bool:
        """Whether the router found what the turn before left, and its history was not computed."""
        tokens = int(self.told["reused-tokens"]) + int(self.told["local-tokens"])
        return self.told["verdict"] in FOUND and tokens > 120


def ask(
    url: str, body: dict[str, Any], headers: dict[str, str] | None = None, path: str = CHAT
) -> Answered:
    """Sends a request to a router and reads its answer to the end."""
    request = urllib.request.Request(
        url + path,
        json.dumps({"temperature": 0, **body}).encode(),
        {"Content-Type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=TURN_S) as answer:
        told = {
            name.lower().removeprefix("x-kvturn-"): value
            for name, value in answer.headers.items()
            if name.lower().startswith("x-kvturn-")
        }
        if answer.headers.get_content_type() == "application/json":
            return Answered([json.load(answer)], told)
        lines = [line[6:].strip() for line in answer if line.startswith(b"data: ")]
    return Answered([json.loads(line) for line in lines if line != b"[DONE]"], told)


def turns_of(stack: Stack, conversation: str, url: str = "") -> list[dict[str, Any]]:
    """What a router, by default the stack's, tells of a conversation's turns."""
    path = f"/kvturn/v1/conversations/{conversation}?model={stack.served_model_name}"
    with urllib.request.urlopen((url or stack.router_url) + path, timeout=10) as answer:
        turns: list[dict[str, Any]] = json.load(answer)["turns"]
        return turns


class Talk:
    """A growing conversation of a client that sends its whole history with each turn."""

    def __init__(self, stack: Stack, opening: str, max_tokens: int = 16) -> None:
        self._stack = stack
        self._opening = opening
        self._max_tokens = max_tokens
        self.messages: list[dict[str, Any]] = []

    def say(
        self,
        text: str,
        url: str = "",
        *,
        stream: bool = True,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> Answered:
        """Holds the next turn, through the stack's router unless told otherwise."""
        first = not self.messages
        self.messages.append(
            {"role": "user", "content": f"{self._opening}\n{text}" if first else text}
        )
        asked = self.body(stream=stream, **body)
        answered = ask(url or self._stack.router_url, asked, headers)
        self.messages.append({"role": "assistant", "content": answered.text})
        return answered

    def body(self, *, stream: bool = True, **body: Any) -> dict[str, Any]:
        """What the next request carries."""
        options = {"stream_options": {"include_usage": True}} if stream else {}
        return {
            "model": self._stack.served_model_name,
            "messages": self.messages,
            "max_tokens": self._max_tokens,
            "stream": stream,
            **options,
            **body,
        }

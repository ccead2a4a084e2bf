"""A vLLM-shaped HTTP engine that does what a test tells it to.

It records every request byte for byte, answers by default as prefill and decode
engines do, and can be scripted per path: `engine.script(path, play)` with a
coroutine that writes the answer. Runs in the test's own event loop, on a free
port of 127.0.0.1.
"""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

GUARD_S = 120
"""Bound on every wait of a test; nothing is ever expected to take so long."""

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass
class Seen:
    """One request as the engine got it."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the other side has closed the connection while the answer was due."""

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name.lower()), None)


class Reply:
    """Writes one answer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.closes = False

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def json(self, value: Any, status: int = 200, *headers: tuple[str, str]) -> None:
        await self.whole(json.dumps(value, separators=(",", ":")).encode(), status, *headers)

    async def whole(self, body: bytes, status: int = 200, *headers: tuple[str, str]) -> None:
        given = {name.lower() for name, _ in headers}
        if "content-type" not in given:
            headers = (*headers, ("content-type", "application/json"))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = f"HTTP/1.1 {status} X\r\n{lines}content-length: {len(body)}\r\n\r\n"
        await self.raw(head.encode() + body)

    async def begin_stream(self, *headers: tuple[str, str]) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        await self.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n" + lines.encode() + b"\r\n"
        )

    async def send(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, value: Any) -> None:
        await self.send(event(value))

    async def end_stream(self, *, done: bool = True) -> None:
        if done:
            await self.send(b"data: [DONE]\n\n")
        await self.raw(b"0\r\n\r\n")

    def abort(self) -> None:
        """Resets the connection, as a killed process does."""
        self._writer.transport.abort()
        self.closes = True

    def close(self) -> None:
        """Closes the connection in order."""
        self._writer.close()
        self.closes = True


Play = Callable[[Seen, Reply], Awaitable[None]]


def event(value: Any) -> bytes:
    """Returns an event as vLLM writes it."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    """Returns a chat chunk as vLLM writes it."""
    choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice | more],
    }


class StubEngine:
    """One engine. `role` chooses its default answers: "prefill" or "decode"."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.healthy = True
        self.seen: list[Seen] = []
        self.arrived = asyncio.Event()
        self.connections = 0
        self.report: dict[str, Any] | None = None
        """What our connector would report in the prefill answer's kvturn, if any."""
        self.handle: dict[str, Any] | None = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": "p-1",
            "remote_request_id": "chatcmpl-p",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": 48,
        }
        self.cached_tokens: int | None = None
        self.text = ["The", " capital", " is", " Paris", "."]
        self._plays: dict[str, Play] = {}
        self._server: asyncio.Server | None = None
        self._port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def turns(self) -> list[Seen]:
        """The completion requests that came."""
        return [seen for seen in self.seen if seen.path in (CHAT, COMPLETIONS)]

    def script(self, path: str, play: Play) -> None:
        """Answers requests for a path with `play` from now on."""
        self._plays[path] = play

    def script_once(self, path: str, play: Play) -> None:
        """Answers the next request for a path with `play`, those after it as before."""
        before = self._plays.get(path, self._default)

        async def first(seen: Seen, reply: Reply) -> None:
            self._plays[path] = before
            await play(seen, reply)

        self._plays[path] = first

    async def start(self) -> "StubEngine":
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self._port, backlog=2048
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Closes the port and every connection, as a killed process does."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def turn(self, number: int = 1) -> Seen:
        """Waits for the n-th completion request, from 1."""
        async with asyncio.timeout(GUARD_S):
            while len(self.turns) < number:
                self.arrived.clear()
                await self.arrived.wait()
        return self.turns[number - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        start, *lines = head.rstrip("\r\n").split("\r\n")
        method, path, _ = start.split(" ")
        headers = [
            (name.lower(), value.strip()) for name, _, value in (x.partition(":") for x in lines)
        ]
        length = int(next((value for name, value in headers if name == "content-length"), "0"))
        seen = Seen(method, path, headers, await reader.readexactly(length))
        self.seen.append(seen)
        self.arrived.set()
        reply = Reply(writer)
        watcher = asyncio.create_task(self._watch(reader, seen))
        try:
            await self._plays.get(path, self._default)(seen, reply)
        except ConnectionError:
            seen.gone.set()
            return False
        finally:
            watcher.cancel()
        return not reply.closes and not seen.gone.is_set()

    async def _watch(self, reader: asyncio.StreamReader, seen: Seen) -> None:
        # The router sends nothing while an answer is due, so a read that
        # returns tells that it has gone.
        while not reader.at_eof() and reader.exception() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        seen.gone.set()

    async def _default(self, seen: Seen, reply: Reply) -> None:
        if seen.path == "/health":
            await reply.whole(b"", 200 if self.healthy else 503)
        elif seen.path == "/v1/models":
            await reply.json({"object": "list", "data": [{"id": "m", "object": "model"}]})
        elif seen.path in (CHAT, COMPLETIONS):
            await (self.prefill if self.role == "prefill" else self.decode)(seen, reply)
        else:
            await reply.json({"detail": "Not Found"}, 404)

    def number_handles(self) -> None:
        """Has each answer as a prefill engine hand over a request of its own: p-0, p-1, ..."""
        numbers = itertools.count()

        async def play(seen: Seen, reply: Reply) -> None:
            del seen
            answer = self.prefill_answer()
            answer["kv_transfer_params"]["remote_request_id"] = f"p-{next(numbers)}"
            await reply.json(answer)

        self.script(CHAT, play)

    def prefill_answer(self) -> dict[str, Any]:
        """Returns what prefill answers by default."""
        handle = None if self.handle is None else dict(self.handle)
        if self.report is not None:
            handle = (handle or {}) | {"kvturn": self.report}
        details = None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}
        return {
            "id": "chatcmpl-p",
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "The"},
                    "finish_reason": "length",
                }
            ],
            "usage": {
                "prompt_tokens": 48,
                "total_tokens": 49,
                "completion_tokens": 1,
                "prompt_tokens_details": details,
            },
            "kv_transfer_params": handle,
        }

    async def prefill(self, seen: Seen, reply: Reply) -> None:
        """Answers as prefill."""
        await reply.json(self.prefill_answer())

    def said(self, seen: Seen) -> tuple[list[str], str]:
        """Returns the tokens that decode answers with, no more than asked for, and why it ends."""
        names = ("max_tokens", "max_completion_tokens")
        limits = [limit for name in names if (limit := seen.json.get(name)) is not None]
        text = self.text[: min(limits, default=len(self.text))]
        return text, "stop" if len(text) == len(self.text) else "length"

    def usage(self) -> dict[str, Any]:
        """Returns decode's usage: the whole prompt counts as cached, for it was pulled."""
        return {
            "prompt_tokens": 48,
            "total_tokens": 48 + len(self.text),
            "completion_tokens": len(self.text),
            "prompt_tokens_details": {"cached_tokens": 48},
        }

    def usage_of(self, text: list[str]) -> dict[str, Any]:
        """Returns decode's usage where it may not have said all that it has to say."""
        if len(text) == len(self.text):
            return self.usage()
        counted = {"total_tokens": 48 + len(text), "completion_tokens": len(text)}
        return self.usage() | counted

    async def decode(self, seen: Seen, reply: Reply) -> None:
        """Answers as decode."""
        if not seen.json.get("stream"):
            await reply.json(self.whole_answer(seen))
            return
        await reply.begin_stream()
        for data in self.events(seen):
            await reply.send(data)
        await reply.end_stream()

    def whole_answer(self, seen: Seen) -> dict[str, Any]:
        """Returns decode's answer when it is not streamed."""
        text, finish = self.said(seen)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        if seen.path == CHAT:
            choice["message"] = {"role": "assistant", "content": "".join(text)}
        else:
            choice["text"] = "".join(text)
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "system_fingerprint": "fp",
            "usage": self.usage_of(text),
            "kv_transfer_params": None,
        }

    def events(self, seen: Seen) -> list[bytes]:
        """Returns decode's events when it streams, without the last one."""
        text, finish = self.said(seen)
        chunks = [chunk({"role": "assistant", "content": ""})]
        chunks += [chunk({"content": token}) for token in text[:-1]]
        chunks.append(chunk({"content": "".join(text[-1:])}, finish))
        if (seen.json.get("stream_options") or {}).get("include_usage"):
            chunks.append(chunk({}) | {"choices": [], "usage": self.usage_of(text)})
        return [event(value) for value in chunks]

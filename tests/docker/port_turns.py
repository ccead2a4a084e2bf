"""Turns through the one port of a compose stack, as a client sees them, one or many at a time."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "smollm2-135m-instruct"
PROSE = "The river ran past the old mill, and the miller counted the sacks of grain. " * 12
TIMEOUT_S = 120

STORY = "Write a long story about a miller, his mill by the river, and the winter of the flood."
LONG_TOKENS = 100
"""An answer worth reading: prefill's own cache holds the prompt, and below 64 tokens computes."""

Message = dict[str, str]


class TurnFailed(Exception):
    """What a client sees of a turn that did not end well."""


@dataclass
class Turn:
    """A turn that ended well."""

    text: str
    headers: dict[str, str]

    @property
    def verdict(self) -> str:
        return self.headers["x-kvturn-verdict"]

    @property
    def reused_tokens(self) -> int:
        return int(self.headers["x-kvturn-reused-tokens"])


@dataclass
class Client:
    """One conversation over one kept-alive connection."""

    port: int
    conversation_id: str
    messages: list[Message] = field(default_factory=list)
    _connection: http.client.HTTPConnection | None = None

    def story(self) -> Turn:
        """Holds a turn with a long answer, in words that no other conversation begins with.

        Prefill's own cache would hold those, and what it holds is not read.
        """
        return self.turn(f"{self.conversation_id}: {STORY}", LONG_TOKENS)

    def turn(self, words: str, tokens: int = 8) -> Turn:
        """Holds one streamed turn whose answer has at most that many tokens. Raises TurnFailed."""
        asked = [*self.messages, {"role": "user", "content": words}]
        body = {"model": MODEL, "messages": asked, "max_tokens": tokens, "stream": True}
        body["temperature"] = 0
        headers = {"Content-Type": "application/json", "X-Conversation-Id": self.conversation_id}
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = self._connection.getresponse()
            read = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            self._connection = None
            raise TurnFailed(f"{type(error).__name__}: {error}") from None
        if answer.status != 200 or "data: [DONE]" not in read:
            raise TurnFailed(f"{answer.status}: {read[-300:]}")
        text = _text(read)
        self.messages = [*asked, {"role": "assistant", "content": text}]
        return Turn(text, {name.lower(): value for name, value in answer.getheaders()})


def _text(stream: str) -> str:
    """Returns the text of a chat stream. Raises TurnFailed for an error in it."""
    pieces = []
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise TurnFailed(line)
        pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
    return "".join(pieces)


class Load:
    """Clients that hold conversations, one turn after the other, until the block ends."""

    def __init__(self, port: int, name: str, clients: int = 2) -> None:
        self.turns = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._hold, args=(port, f"{name}-{number}"))
            for number in range(clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_turns(self, more: int, timeout_s: float) -> None:
        """Returns when that many more turns have ended well. Fails the test if none do."""
        self._wait(lambda: self.turns, more, timeout_s)

    def wait_failures(self, more: int, timeout_s: float) -> None:
        """Returns when that many more turns have failed. Fails the test if none do."""
        self._wait(lambda: len(self.failures), more, timeout_s)

    def _wait(self, count: Callable[[], int], more: int, timeout_s: float) -> None:
        wanted = count() + more
        deadline_s = time.monotonic() + timeout_s
        while count() < wanted:
            late = time.monotonic() > deadline_s
            assert not late, f"{self.turns} turns ended; failures: {self.failures[-3:]}"
            time.sleep(0.1)

    def _hold(self, port: int, name: str) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            client = Client(port, f"{name}-{number}")
            for words in (PROSE, "And then?", "What did the miller count?"):
                if not self._stop.is_set():
                    self._one(client, words)

    def _one(self, client: Client, words: str) -> None:
        try:
            client.turn(words)
        except TurnFailed as failed:
            with self._lock:
                self.failures.append(f"{client.conversation_id}: {failed}")
            # Where all is refused, asking without a pause would only take the cores.
            self._stop.wait(0.5)
        else:
            with self._lock:
                self.turns += 1

"""A turn's answer on its way to a gRPC client: whole, or event by event.

What HTTP would pass on byte for byte comes as text here, so an answer that is not UTF-8 ends in an
error rather than changed. A stream that its engine did not end as OpenAI streams end is not ended
with OK.
"""

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvturn_router.engines.engine_http import Exchange
from kvturn_router.errors import TurnError
from kvturn_router.request.conversation import TurnReport
from kvturn_router.request.spans import find_member
from kvturn_router.turn.legs import ANSWER_BYTES_MAX
from kvturn_router.turn.sse import DONE, EVENT_BYTES_MAX, EventSplitter, payload

_WAITING_MAX: Final = 64
"""Chunks that may wait for the client before the engine is slowed."""

_METADATA_BYTES_MAX: Final = 4096
"""Of an engine's headers; clients take 8 KiB, and end a call that brings more."""

_FIELD_BYTES: Final = 32
"""What HTTP/2 counts for each field besides its name and value."""

# What the transport says itself, or what is about bytes that gRPC carries otherwise.
_name = re.compile(r"(?!grpc-|content-|cache-control$|x-accel-)[0-9a-z_.-]+(?<!-bin)")
_value = re.compile(r"[\x20-\x7e]*")


class GrpcAnswer:
    """Takes the answer from the forwarder; the servicer reads it."""

    def __init__(self) -> None:
        self.report: TurnReport | None = None
        self._headers: Sequence[tuple[bytes, bytes]] = ()
        self._error: TurnError | None = None
        self._ended = False
        self._events = False
        self._done = False
        self._pieces: list[bytes] = []
        self._size = 0
        self._splitter = EventSplitter()
        self._chunks: deque[str] = deque()
        self._flow: Exchange | None = None
        self._paused = False
        self._news = asyncio.Event()

    # Called by the forwarder

    def start(
        self,
        report: TurnReport,
        status: int,
        headers: Sequence[tuple[bytes, bytes]],
        length: int | None,
        flow: Exchange | None,
    ) -> None:
        """Begins the answer."""
        del length, status
        self.report = report
        self._headers = headers
        self._flow = flow
        fields = dict(headers)
        self._events = fields.get(b"content-type", b"").startswith(b"text/event-stream")
        if fields.get(b"content-encoding", b"identity") != b"identity":
            self._error = _unreadable("it is compressed")
        self._news.set()

    def write(self, data: bytes, last: bool) -> None:
        """Takes more of the body."""
        if self._error is not None:
            data = b""
        if not self._events:
            self._keep(data)
        else:
            self._split(data, last)
        if len(self._chunks) > _WAITING_MAX and self._flow is not None and not self._paused:
            self._paused = True
            self._flow.pause()
        self._news.set()

    def fail(self, error: TurnError) -> None:
        """Ends a begun answer that will not be whole."""
        self.finish(error)

    # Called by the servicer

    def finish(self, error: TurnError | None) -> None:
        """Notes that the turn is over; `error` is what ended it early, if anything did.

        The answer lasts until then: its last byte comes before the turn has settled, and a caller
        who left with it would end the turn as one who hung up.
        """
        self._error = self._error or error
        self._ended = True
        self._news.set()

    async def begun(self) -> TurnReport:
        """Waits for the answer to begin. Raises TurnError."""
        while self.report is None:
            if self._error is not None:
                raise self._error
            await self._more()
        return self.report

    def metadata(self, request_id: str | None) -> list[tuple[str, str]]:
        """Returns what an engine's headers say besides the answer, and the client's request id."""
        fields = [] if request_id is None else [("x-request-id", request_id)]
        left = _METADATA_BYTES_MAX
        for header in self._headers:
            name, value = (part.decode("latin-1") for part in header)
            size = len(name) + len(value) + _FIELD_BYTES
            if size <= left and _name.fullmatch(name) and _value.fullmatch(value):
                fields.append((name, value))
                left -= size
        return fields

    async def next_chunk(self) -> str | None:
        """Returns the next chunk, None at the end. Raises TurnError."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._ended:
                return self._rest()
            await self._more()
        chunk = self._chunks.popleft()
        if self._paused and not self._chunks and self._flow is not None:
            self._paused = False
            self._flow.resume()
        return chunk

    async def whole(self) -> str:
        """Waits for the end of an answer that is not streamed; returns it. Raises TurnError."""
        while not self._ended:
            await self._more()
        if self._error is not None:
            raise self._error
        if self._events:
            raise _unreadable("it is a stream, which was not asked for")
        return _text(b"".join(self._pieces))

    async def _more(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _rest(self) -> str | None:
        """Returns what is left when all chunks were taken: an answer that was not streamed."""
        if self._events:
            if not self._done:
                raise TurnError(
                    502, "The decode engine left its stream unfinished.", reason="STREAM_UNFINISHED"
                )
            return None
        pieces, self._pieces = self._pieces, []
        return _text(b"".join(pieces)) if pieces else None

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > ANSWER_BYTES_MAX:
            self._error = self._error or _unreadable(f"it is longer than {ANSWER_BYTES_MAX} bytes")
            self._pieces.clear()
        elif data:
            self._pieces.append(data)

    def _split(self, data: bytes, last: bool) -> None:
        try:
            for event in self._splitter.feed(data):
                self._take(payload(event))
            if self._splitter.too_long:
                raise _unreadable(f"an event is longer than {EVENT_BYTES_MAX} bytes")
            if last:
                self._take(payload(self._splitter.rest))
        except TurnError as error:
            self._error = error

    def _take(self, text: bytes) -> None:
        if text == DONE:
            self._done = True
        if not text or text == DONE or self._error is not None:
            return
        if b'"error"' in text:
            error = find_member(text, (0, len(text)), "error")
            if error is not None and text[error[0] : error[1]] != b"null":
                raise _streamed_error(text, error)
        self._chunks.append(_text(text))


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _unreadable("it is not UTF-8") from None


def _unreadable(why: str) -> TurnError:
    return TurnError(
        502, f"The decode engine's answer cannot be read: {why}.", reason="ANSWER_UNREADABLE"
    )


def _streamed_error(text: bytes, span: tuple[int, int]) -> TurnError:
    code = find_member(text, span, "code")
    digits = text[code[0] : code[1]] if code is not None else b""
    status = int(digits) if re.fullmatch(rb"[45]\d\d", digits) else 500
    return _StreamedError(status, text)


class _StreamedError(TurnError):
    """An error that the engine sent as an event of its stream."""

    def __init__(self, status: int, text: bytes) -> None:
        super().__init__(status, "the engine ended its stream with an error", reason="ENGINE_ERROR")
        self._text = text

    def body(self) -> bytes:
        """Returns the event's own text."""
        return self._text

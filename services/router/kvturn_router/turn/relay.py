"""Passes decode's answer on to the client: the bytes as they came, but for one number.

Bytes of a stream go from the engine's connection to the client's without a
coroutine between. Only the event that holds `cached_tokens` is looked at
(usage.py), and in stock mode the ones that hold a handle (stock.py).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvturn_router.engines.engine_http import EngineFault, Exchange
from kvturn_router.engines.fleet import DECODE
from kvturn_router.errors import TurnError
from kvturn_router.request.conversation import TurnReport
from kvturn_router.request.intake import TurnRequest
from kvturn_router.request.responses import RESPONSES
from kvturn_router.turn.account import Account
from kvturn_router.turn.legs import (
    cut_off,
    engine_error,
    refusal_of,
    relayed_headers,
    whole_body,
)
from kvturn_router.turn.sse import EndWatch
from kvturn_router.turn.stock import StockTap
from kvturn_router.turn.usage import (
    COMPLETION_USAGE,
    RESPONSE_USAGE,
    StreamUsage,
    passed_on,
)


class AnswerSink(Protocol):
    """Where a turn's answer goes; called on the event loop, never blocks."""

    def start(
        self,
        report: TurnReport,
        status: int,
        headers: Sequence[tuple[bytes, bytes]],
        length: int | None,
        flow: Exchange | None,
    ) -> None:
        """Begins the answer.

        `length` is the body's length in bytes, None if not known. `flow` is
        what to pause while the client does not read, None if nothing.
        """

    def write(self, data: bytes, last: bool) -> None:
        """Sends more of the body, and with `last` ends it; the first call sends the head, too."""

    def fail(self, error: TurnError) -> None:
        """Ends a begun answer that will not be whole."""


class Relay:
    """Passes on one turn's answer.

    `tap` watches it in stock mode. `clock_ns` is CLOCK_BOOTTIME.
    """

    def __init__(
        self,
        request: TurnRequest,
        account: Account,
        sink: AnswerSink,
        clock_ns: Callable[[], int],
        tap: StockTap | None,
    ) -> None:
        self.started = False
        """Whether the client has got anything of the answer."""
        self.tap = tap
        self._request = request
        self._account = account
        self._sink = sink
        self._clock_ns = clock_ns
        self._shape = RESPONSE_USAGE if request.path == RESPONSES else COMPLETION_USAGE
        self._usage: StreamUsage | None = None
        self._end: EndWatch | None = None

    async def run(self, exchange: Exchange) -> TurnError | None:
        """Passes an answer on; returns what went wrong after it had begun, None if nothing did.

        Raises EngineFault before it has begun, and EngineRefusal.
        """
        if exchange.status != 200:
            raise await refusal_of(exchange)
        kind = exchange.header(b"content-type")
        if kind.startswith(b"application/json") and not self._request.stream:
            await self._whole(exchange)
            return None
        return await self._as_read(exchange, events=kind.startswith(b"text/event-stream"))

    async def _whole(self, exchange: Exchange) -> None:
        body = await whole_body(exchange)
        self._account.first_byte_ns = self._clock_ns()
        if self.tap is not None:
            body = self.tap.answer(body)
        body, self._account.usage = passed_on(body, self._account.not_computed, self._shape)
        self._start(exchange, len(body), None)
        self._sink.write(body, True)

    async def _as_read(self, exchange: Exchange, *, events: bool) -> TurnError | None:
        # Engines send the head before they compute. Until more comes, another one may answer.
        begun = await exchange.begun()
        readable = events and not exchange.header(b"content-encoding")
        if readable:
            self._usage = StreamUsage(self._account.not_computed, self._shape)
            self._end = None if exchange.framed else EndWatch()
            if not begun and self._end is not None:
                raise cut_off()
        else:
            self.tap = None
        length = exchange.header(b"content-length")
        known = int(length) if not readable and length.isdigit() else None
        self._start(exchange, known, exchange)
        exchange.pass_to(self._pass_on)
        try:
            await exchange.finished()
            if self._end is not None and not self._end.seen:
                raise cut_off()
        except EngineFault as fault:
            error = engine_error(DECODE, fault)
            self._sink.fail(error)
            return error
        if self._usage is not None:
            self._account.usage = self._usage.tokens
        return None

    def _pass_on(self, data: bytes, last: bool) -> None:
        if data and not self._account.first_byte_ns:
            self._account.first_byte_ns = self._clock_ns()
        if self.tap is not None:
            data = self.tap.feed(data)
            if last:
                data += self.tap.finish()
        if self._usage is not None:
            data = self._usage.feed(data) if data else data
            if last:
                data += self._usage.finish()
        if self._end is not None:
            self._end.feed(data)
            last = last and self._end.seen
        self._sink.write(data, last)

    def _start(self, exchange: Exchange, length: int | None, flow: Exchange | None) -> None:
        # No attempt follows: the body's bytes can go while the answer lasts.
        self._request.members.clear()
        self.started = True
        report = self._account.report()
        self._sink.start(report, exchange.status, relayed_headers(exchange), length, flow)

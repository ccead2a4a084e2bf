"""The life of a turn: resolve, plan, prefill leg, decode leg, stream.

One coroutine per turn waits for heads and ends; the bytes of a stream go from
the engine's connection to the client's without one. Whatever fails on the way
to reuse becomes a recompute with a verdict that says why. When the client goes,
the coroutine is cancelled, and both legs' connections end at once.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvturn_router.body import decode_parts, prefill_parts
from kvturn_router.conversation import ConversationKey, TurnReport
from kvturn_router.conversation_book import ConversationBook
from kvturn_router.engine_http import ConnectFault, EngineFault, Exchange, LostFault, SilentFault
from kvturn_router.errors import EngineRefusal, TurnError
from kvturn_router.fleet import DECODE, PREFILL, Engine, Fleet, engine_address
from kvturn_router.intake import COMPLETIONS, TurnRequest
from kvturn_router.lease_client import LeaseClient
from kvturn_router.legs import (
    Legs,
    engine_error,
    no_engine,
    refusal_of,
    relayed_headers,
    whole_body,
)
from kvturn_router.plan import NoEngine, Plan, PlanKind, Resolution, decide
from kvturn_router.prefill_answer import (
    NOTHING,
    decode_transfer,
    kvturn_member,
    prefill_transfer,
    read_answer,
)
from kvturn_router.read_watch import ReadWatch, StuckReadFault
from kvturn_router.responses import (
    RESPONSES,
    no_response,
    response_id,
    responses_decode_parts,
    responses_prefill_parts,
)
from kvturn_router.span_wire import Attribute
from kvturn_router.stock import Handle, StockTap
from kvturn_router.stock_reuse import StockReuse
from kvturn_router.telemetry import TurnSpan, TurnTracer
from kvturn_router.usage import (
    COMPLETION_USAGE,
    RESPONSE_USAGE,
    StreamUsage,
    Usage,
    usage_of,
    with_cached_tokens,
)
from kvturn_router.verdict import Verdict

_GRANT_UNDERWAY_NS: Final = 1_000_000_000
"""How long after a turn's end its grant may still be on its way."""

_RELEASES_MAX: Final = 256
"""Requests under way at once that only release what prefill holds."""


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


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Bounds on one turn's waits.

    `prefill_silence_s` and `decode_silence_s` bound the wait for the next byte
    of each leg, `read_margin_ms` is what a read may be late before it is asked
    after.
    """

    prefill_silence_s: float
    decode_silence_s: float
    read_margin_ms: int


class Forwarder:
    """Serves turns.

    At most one of `lease` and `stock` is given; with neither, turns are served
    through prefill and decode without reuse. `clock_ns` is CLOCK_BOOTTIME.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        legs: Legs,
        book: ConversationBook,
        tracer: TurnTracer,
        limits: TurnLimits,
        clock_ns: Callable[[], int],
        lease: LeaseClient | None,
        stock: StockReuse | None,
    ) -> None:
        assert lease is None or stock is None
        self.fleet = fleet
        self.legs = legs
        self.book = book
        self.tracer = tracer
        self.limits = limits
        self.clock_ns = clock_ns
        self.loop = asyncio.get_running_loop()
        self.lease = lease
        self.stock = stock
        self._turns: set[_Turn] = set()
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """Turns being served."""
        return len(self._turns)

    async def serve(self, request: TurnRequest, sink: AnswerSink) -> None:
        """Serves one turn into `sink`.

        Raises TurnError if it ends before the answer has begun; later faults go
        to the sink. Cancel it when the client is gone.
        """
        turn = _Turn(self, request, sink)
        self._turns.add(turn)
        try:
            await turn.run()
        finally:
            self._turns.discard(turn)

    def end_all(self, error: TurnError) -> None:
        """Ends every turn with an error."""
        for turn in list(self._turns):
            turn.end_with(error)

    async def end_conversation(self, key: ConversationKey) -> int:
        """Ends a conversation; returns how many leases that ended. Raises TurnError."""
        if self.stock is not None:
            self.stock.forget(key)
        return 0 if self.lease is None else await self.lease.end_conversation(key)

    async def keep_alive(self, key: ConversationKey, absence_s: float | None) -> float:
        """Keeps a conversation's KV for a client that will be back; returns for how many seconds.

        Raises TurnError 501 without a lease service, else as `LeaseClient.keep_alive`.
        """
        if self.lease is None:
            raise TurnError(
                501, "There is no lease service to keep it alive at.", reason="NOT_OFFERED"
            )
        return await self.lease.keep_alive(key, absence_s)

    def release(self, engine: Engine, request: TurnRequest, transfer: bytes) -> None:
        """Has decode fetch, and so release, what prefill holds for a turn that is over."""
        if len(self._releases) >= _RELEASES_MAX:
            return
        parts = _prefill_parts(request, transfer)
        task = asyncio.get_running_loop().create_task(self._release(engine, request, parts))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, engine: Engine, request: TurnRequest, parts: list[bytes]) -> None:
        try:
            exchange = await self.legs.send(
                engine,
                request,
                request.path,
                parts,
                TurnSpan(None),
                silence_s=self.limits.prefill_silence_s,
                again_if_stale=False,
            )
            await whole_body(exchange)
        except EngineFault:
            return


class _Turn:
    """One turn on its way."""

    def __init__(self, forwarder: Forwarder, request: TurnRequest, sink: AnswerSink) -> None:
        self._forwarder = forwarder
        self._request = request
        self._sink = sink
        now_ns = forwarder.clock_ns()
        book = forwarder.book
        self._expected_turn = book.retained_turn(request.key, now_ns - _GRANT_UNDERWAY_NS)
        self._number = book.begin_turn(request.key)
        self._span = forwarder.tracer.begin(request.trace)
        self._task = asyncio.current_task(forwarder.loop)
        self._ending: TurnError | None = None
        self._told = False
        self._resolution = Resolution(Verdict.NOT_OFFERED)
        self._handle: Handle | None = None
        self._verdict = Verdict.NOT_OFFERED
        self._lease_id = ""
        self._answer = NOTHING
        self._prefill_ms = 0.0
        self._prefill_url = ""
        self._decode_url = ""
        # Decode's side of prefill's KV: what it was told, and whether prefill
        # still waits for it.
        self._unfetched: tuple[Engine, bytes] | None = None
        self._retains = False
        self._report: TurnReport | None = None
        self._usage: StreamUsage | None = None
        self._tap: StockTap | None = None
        self._tokens: Usage | None = None
        # The most prompt tokens that no engine computed, None without a prefill leg.
        self._not_computed: int | None = None
        is_response = request.path == RESPONSES
        self._shape = RESPONSE_USAGE if is_response else COMPLETION_USAGE
        # Responses say no token ids, so handles of theirs could not be checked.
        self._stock = None if is_response else forwarder.stock

    async def run(self) -> None:
        """Serves the turn. Raises as `Forwarder.serve`."""
        fault: str | None = "the client is gone"
        try:
            await self._serve()
            fault = None
        except TurnError as error:
            fault = error.message
            raise
        except asyncio.CancelledError:
            if self._ending is None:
                raise
            fault = self._ending.message
            if self._report is None:
                raise self._ending from None
            self._sink.fail(self._ending)
        finally:
            self._settle(fault)

    def end_with(self, error: TurnError) -> None:
        """Ends the turn with an error, wherever it is."""
        self._ending = error
        if self._task is not None:
            self._task.cancel()

    async def _serve(self) -> None:
        self._resolution = await self._resolve()
        plan = self._plan()
        self._verdict = plan.verdict or Verdict.NOT_OFFERED
        if plan.prefill is not None:
            await self._prefill(plan, plan.prefill)
        await self._decode(plan.decode)

    # Resolve and plan

    async def _resolve(self) -> Resolution:
        request = self._request
        if not request.reuse:
            return Resolution(Verdict.TURNED_OFF)
        if request.alone:
            return Resolution(Verdict.NOT_OFFERED)
        lease = self._forwarder.lease
        if lease is not None:
            span = self._span.child("resolve")
            self._told = lease.turn_began(request.key)
            metadata = (("traceparent", span.traceparent),) if span.traceparent else ()
            lease_id = ""
            try:
                resolution = await lease.resolve(request.key, self._expected_turn, metadata)
                lease_id = resolution.lease_id
            finally:
                span.end({"kvturn.lease_id": lease_id})
            return resolution
        stock = self._stock
        if stock is not None:
            offer = stock.offer(request, self._number == 1)
            if isinstance(offer, Handle):
                self._handle = offer
                return Resolution(None, "", offer.decode)
            return Resolution(offer)
        return Resolution(Verdict.NOT_OFFERED)

    def _plan(self) -> Plan:
        span = self._span.child("plan")
        fleet = self._forwarder.fleet
        try:
            plan = decide(
                self._resolution,
                list(fleet.prefills),
                list(fleet.decodes),
                self._holder(),
                alone=self._request.alone,
            )
        except NoEngine as error:
            span.end(fault=str(error))
            raise no_engine(error.role) from None
        span.end({"kvturn.plan": plan.kind.value})
        return plan

    def _holder(self) -> int | None:
        """Returns the decode engine that has the history; raises TurnError if it alone would do."""
        response = self._request.response
        fleet = self._forwarder.fleet
        if response is None:
            return fleet.holder_index(self._resolution.http_address)
        for index, engine in enumerate(fleet.decodes):
            if response.is_held_by(engine_address(engine.url).place):
                if not engine.usable:
                    raise no_engine(DECODE)
                return index
        raise no_response("previous_response_id", response.response_id)

    # The prefill leg

    async def _prefill(self, plan: Plan, index: int) -> None:
        """Runs the prefill leg until it has an answer; raises TurnError."""
        fleet = self._forwarder.fleet
        pull = plan.kind is PlanKind.PULL
        lease_id = plan.lease_id
        handle = self._handle if pull and not lease_id else None
        if handle is not None:
            handle = await self._checked(fleet.prefills[index], handle)
        tried: set[int] = set()
        while True:
            engine = fleet.prefills[index]
            try:
                await self._prefill_once(engine, lease_id, handle)
                break
            except ConnectFault as fault:
                fleet.refused(engine, str(fault))
                tried.add(index)
                other = fleet.another(fleet.prefills, tried)
                if other is None:
                    raise no_engine(PREFILL) from None
                index = other
            except (EngineFault, EngineRefusal) as fault:
                if not (lease_id or handle) or not _may_recompute(fault):
                    raise _told_of(PREFILL, fault) from None
                stuck = isinstance(fault, StuckReadFault)
                self._verdict = Verdict.READ_TOO_LONG if stuck else Verdict.READ_FAILED
                lease_id, handle = "", None
        if lease_id:
            report = self._answer.report
            self._verdict = (report.verdict if report else None) or Verdict.NOT_OFFERED
        elif handle is not None:
            self._verdict, self._answer = StockReuse.judged(handle, self._answer)
        elif self._answer.report and self._answer.report.verdict is Verdict.UNSUPPORTED_MODEL:
            # That no turn of this model can reuse says more than that this one had no lease.
            self._verdict = Verdict.UNSUPPORTED_MODEL
        self._not_computed = self._cached_tokens()

    async def _checked(self, engine: Engine, handle: Handle) -> Handle | None:
        stock = self._stock
        assert stock is not None
        verdict = await stock.check(engine, self._request, handle, self._span)
        if verdict is None:
            return handle
        self._verdict = verdict
        return None

    async def _prefill_once(self, engine: Engine, lease_id: str, handle: Handle | None) -> None:
        """Makes one attempt; raises EngineFault or EngineRefusal."""
        forwarder = self._forwarder
        self._lease_id = lease_id or self._lease_id
        self._prefill_url = engine.url
        span = self._span.child("prefill")
        kvturn = self._kvturn(span, lease_id)
        transfer = prefill_transfer(kvturn, [] if handle is None else StockReuse.keys(handle))
        parts = _prefill_parts(self._request, transfer)
        watch = self._watch(lease_id)
        began_ns = forwarder.clock_ns()
        engine.begin()
        exchange: Exchange | None = None
        fault: str | None = "given up"
        try:
            exchange = await forwarder.legs.send(
                engine,
                self._request,
                self._request.path,
                parts,
                span,
                silence_s=forwarder.limits.prefill_silence_s,
                # A stock handle may have been used by the request that was lost.
                again_if_stale=handle is None,
                sent=watch.over if watch is not None else _ignore,
            )
            if exchange.status != 200:
                raise await refusal_of(exchange)
            self._answer = read_answer(await whole_body(exchange))
            fault = None
        except (EngineFault, EngineRefusal) as error:
            fault = str(error)
            raise
        finally:
            engine.end()
            if watch is not None:
                watch.stop()
            if exchange is not None:
                exchange.close()
            self._prefill_ms = (forwarder.clock_ns() - began_ns) / 1e6
            span.end({"kvturn.prefill.engine": engine.url}, fault=fault)

    def _watch(self, lease_id: str) -> ReadWatch | None:
        lease = self._forwarder.lease
        if not lease_id or lease is None:
            return None
        return ReadWatch(
            lease,
            lease_id,
            longest_read_ms=self._resolution.longest_read_ms,
            margin_ms=self._forwarder.limits.read_margin_ms,
        )

    def _kvturn(self, span: TurnSpan, lease_id: str) -> bytes | None:
        # Without a lease service nobody would read what decode retains under
        # the conversation, so it is not named.
        named = self._forwarder.lease is not None and self._request.reuse
        key = self._request.key if named else None
        return kvturn_member(key, self._number, lease_id, span.traceparent)

    # The decode leg

    async def _decode(self, index: int) -> None:
        """Runs the decode leg; raises TurnError before the answer has begun."""
        fleet = self._forwarder.fleet
        tried: set[int] = set()
        while True:
            engine = fleet.decodes[index]
            self._decode_url = engine.url
            try:
                await self._decode_once(engine)
                return
            except ConnectFault as fault:
                fleet.refused(engine, str(fault))
                tried.add(index)
                held = self._request.response is not None
                other = None if held else fleet.another(fleet.decodes, tried)
                if other is None:
                    raise no_engine(DECODE) from None
                index = other
            except LostFault as fault:
                if not fault.stale or self._answer.transfer is None:
                    raise engine_error(DECODE, fault) from None
                # The lost request may have fetched prefill's KV, which can be
                # fetched once: decode computes the prompt itself.
                self._answer = NOTHING
                if self._verdict in (Verdict.REUSED, Verdict.PARTIAL_PREFIX):
                    self._verdict = Verdict.READ_FAILED
            except EngineFault as fault:
                raise engine_error(DECODE, fault) from None

    async def _decode_once(self, engine: Engine) -> None:
        """Makes one attempt; raises EngineFault before the answer has begun, or EngineRefusal."""
        forwarder = self._forwarder
        request = self._request
        span = self._span.child("decode")
        kvturn = None if request.alone else self._kvturn(span, "")
        handed = self._answer.transfer
        transfer = decode_transfer(handed, kvturn)
        asks_ids = self._stock is not None and request.reuse and not request.alone
        if request.path == RESPONSES:
            parts = responses_decode_parts(request.members, transfer, self._response_id(engine))
        else:
            parts = decode_parts(request.members, transfer, ask_token_ids=asks_ids)
        if handed is not None and transfer is not None:
            self._unfetched = (engine, transfer)
        engine.begin()
        exchange: Exchange | None = None
        fault: str | None = "given up"
        try:
            exchange = await forwarder.legs.send(
                engine,
                request,
                request.path,
                parts,
                span,
                silence_s=forwarder.limits.decode_silence_s,
                again_if_stale=handed is None,
                sent=self._is_fetched,
            )
            fault = await self._relay(exchange, engine, asks_ids=asks_ids)
        except (EngineFault, EngineRefusal) as error:
            fault = str(error)
            raise
        finally:
            engine.end()
            if exchange is not None:
                exchange.close()
            span.end({"kvturn.decode.engine": engine.url}, fault=fault)

    def _response_id(self, engine: Engine) -> str:
        key = self._request.key
        place = engine_address(engine.url).place
        return response_id(key.tenant, key.conversation_id, place, secrets.token_hex(12))

    def _is_fetched(self, exchange: Exchange) -> None:
        del exchange
        self._unfetched = None

    async def _relay(self, exchange: Exchange, engine: Engine, *, asks_ids: bool) -> str | None:
        """Passes an answer on; returns what went wrong after it had begun, if anything did."""
        if exchange.status != 200:
            raise await refusal_of(exchange)
        if asks_ids:
            self._tap = StockTap(self._request)
        kind = exchange.header(b"content-type")
        if kind.startswith(b"application/json") and not self._request.stream:
            await self._relay_whole(exchange)
            fault = None
        else:
            fault = await self._relay_as_read(
                exchange, events=kind.startswith(b"text/event-stream")
            )
        if fault is None:
            forwarder = self._forwarder
            # Prefill's report shows that our connector is there; a stock decode
            # engine announces no grant that the next turn could wait for.
            self._retains = (
                forwarder.lease is not None
                and self._request.reuse
                and self._answer.report is not None
            )
            if self._tap is not None and self._stock is not None:
                self._stock.keep(self._request.key, self._tap, engine.url)
        return fault

    async def _relay_whole(self, exchange: Exchange) -> None:
        body = await whole_body(exchange)
        if self._tap is not None:
            body = self._tap.answer(body)
        cached = self._not_computed
        if cached is not None:
            body = with_cached_tokens(body, cached, self._shape)
        self._tokens = usage_of(body, self._shape)
        self._start(exchange, len(body), None)
        self._sink.write(body, True)

    async def _relay_as_read(self, exchange: Exchange, *, events: bool) -> str | None:
        compressed = bool(exchange.header(b"content-encoding"))
        cached = self._not_computed
        if events and not compressed and cached is not None:
            self._usage = StreamUsage(cached, self._shape)
        if not events or compressed:
            self._tap = None
        length = exchange.header(b"content-length")
        untouched = self._usage is None and self._tap is None
        known = int(length) if untouched and length.isdigit() else None
        self._start(exchange, known, exchange)
        exchange.pass_to(self._pass_on)
        try:
            await exchange.finished()
        except EngineFault as fault:
            error = engine_error(DECODE, fault)
            self._sink.fail(error)
            return error.message
        if self._usage is not None:
            self._tokens = self._usage.tokens
        return None

    def _pass_on(self, data: bytes, last: bool) -> None:
        if self._tap is not None:
            data = self._tap.feed(data)
            if last:
                data += self._tap.finish()
        if self._usage is not None:
            data = self._usage.feed(data) if data else data
            if last:
                data += self._usage.finish()
        self._sink.write(data, last)

    def _start(self, exchange: Exchange, length: int | None, flow: Exchange | None) -> None:
        self._request.members.clear()
        self._report = self._reported()
        self._sink.start(self._report, exchange.status, relayed_headers(exchange), length, flow)

    # The account

    def _cached_tokens(self) -> int:
        """Returns the prompt tokens that prefill did not compute."""
        answer = self._answer
        if answer.report is not None:
            tokens = answer.report.reused_tokens + answer.report.local_tokens
        else:
            tokens = answer.cached_tokens or 0
        prompt_tokens = self._prompt_tokens()
        return min(tokens, prompt_tokens) if prompt_tokens else tokens

    def _prompt_tokens(self) -> int:
        report = self._answer.report
        return (report.prompt_tokens if report else 0) or self._answer.prompt_tokens

    def _reported(self) -> TurnReport:
        report = self._answer.report
        local = self._answer.cached_tokens or 0
        return TurnReport(
            turn=self._number,
            verdict=self._verdict,
            prompt_tokens=self._prompt_tokens(),
            reused_tokens=report.reused_tokens if report else 0,
            local_tokens=report.local_tokens if report else local,
            prefill_ms=round(self._prefill_ms, 3),
            read_ms=round(report.read_ms, 3) if report else 0.0,
            read_bytes=report.read_bytes if report else 0,
        )

    def _settle(self, fault: str | None) -> None:
        forwarder = self._forwarder
        request = self._request
        if self._told and forwarder.lease is not None:
            forwarder.lease.turn_ended(request.key)
        if self._unfetched is not None and self._report is None and request.members:
            engine, transfer = self._unfetched
            forwarder.release(engine, request, transfer)
        report = self._report or self._reported()
        if self._report is not None:
            retained_ns = forwarder.clock_ns() if self._retains else 0
            forwarder.book.end_turn(request.key, report, retained_ns)
        if self._span.recorded:
            self._span.end(self._attributes(report), fault=fault)

    def _attributes(self, report: TurnReport) -> dict[str, Attribute]:
        tokens = self._tokens
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": _operation(self._request.path),
            "gen_ai.conversation.id": self._request.key.conversation_id,
            "gen_ai.request.model": self._request.key.model,
            "gen_ai.usage.input_tokens": tokens.prompt_tokens if tokens else report.prompt_tokens,
            "kvturn.turn": report.turn,
            "kvturn.verdict": report.verdict.value,
            "kvturn.prompt_tokens": report.prompt_tokens,
            "kvturn.reused_tokens": report.reused_tokens,
            "kvturn.local_tokens": report.local_tokens,
            "kvturn.read_ms": report.read_ms,
            "kvturn.read_bytes": report.read_bytes,
            "kvturn.lease_id": self._lease_id,
            "kvturn.prefill.engine": self._prefill_url,
            "kvturn.decode.engine": self._decode_url,
        }
        if tokens is not None:
            attributes["gen_ai.usage.output_tokens"] = tokens.completion_tokens
            if tokens.cached_tokens is not None:
                attributes["gen_ai.usage.cache_read.input_tokens"] = tokens.cached_tokens
        return attributes


def _may_recompute(fault: EngineFault | EngineRefusal) -> bool:
    """Tells whether a leg that failed under a lease is worth another try without it.

    A refusal of the request itself would be repeated, and an engine that was
    silent for the whole limit has used up the turn's time.
    """
    if isinstance(fault, EngineRefusal):
        return fault.status >= 500
    return not isinstance(fault, SilentFault)


def _operation(path: str) -> str:
    return "text_completion" if path == COMPLETIONS else "chat"


def _prefill_parts(request: TurnRequest, transfer: bytes) -> list[bytes]:
    parts = responses_prefill_parts if request.path == RESPONSES else prefill_parts
    return parts(request.members, transfer)


def _told_of(role: str, fault: EngineFault | EngineRefusal) -> TurnError:
    return fault if isinstance(fault, EngineRefusal) else engine_error(role, fault)


def _ignore(exchange: Exchange) -> None:
    del exchange

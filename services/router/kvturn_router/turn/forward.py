"""The life of a turn: resolve, plan, prefill leg, decode leg, settle.

One coroutine per turn waits for heads and ends; `relay.py` passes the bytes on.
Whatever fails on the way to reuse becomes a recompute with a verdict that says
why. When the client goes, the coroutine is cancelled, and both legs' connections
end at once.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final

from kvturn.address import engine_address
from kvturn.span_wire import INTERNAL
from kvturn.tracing import Span
from kvturn_router.choice.costs import Costs
from kvturn_router.choice.plan import (
    NoEngine,
    Plan,
    PlanKind,
    Resolution,
    Thresholds,
    TurnSize,
    decide,
)
from kvturn_router.engines.admission import Admission
from kvturn_router.engines.engine_http import (
    ConnectFault,
    EngineFault,
    Exchange,
    LostFault,
    SilentFault,
)
from kvturn_router.engines.fleet import DECODE, PREFILL, Engine, Fleet
from kvturn_router.engines.loads import Loads, Others
from kvturn_router.engines.waiting import NoRoom
from kvturn_router.errors import EngineRefusal, TurnError
from kvturn_router.leases.conversation_book import ConversationBook
from kvturn_router.leases.lease_client import LeaseClient, no_conversation
from kvturn_router.leases.router_session import RouterSession
from kvturn_router.leases.session_turns import Retained, SessionTurn
from kvturn_router.leases.session_wire import turn_trace
from kvturn_router.leases.turn_report import view_of
from kvturn_router.request.body import decode_parts, prefill_parts
from kvturn_router.request.conversation import ConversationKey, ConversationView
from kvturn_router.request.history import History, history_of
from kvturn_router.request.intake import TurnRequest
from kvturn_router.request.responses import (
    RESPONSES,
    no_response,
    response_id,
    responses_decode_parts,
    responses_prefill_parts,
)
from kvturn_router.telemetry.turn_trace import TurnTracer
from kvturn_router.turn.account import Account
from kvturn_router.turn.counts import Outcome, TurnCounts
from kvturn_router.turn.leg_spans import GIVEN_UP, end_leg, resolved
from kvturn_router.turn.legs import Legs, engine_error, no_engine, refusal_of, whole_body
from kvturn_router.turn.prefill_answer import (
    decode_transfer,
    kvturn_member,
    prefill_transfer,
    read_answer,
)
from kvturn_router.turn.read_watch import ReadWatch, StuckReadFault
from kvturn_router.turn.recent_turns import RecentTurns
from kvturn_router.turn.relay import AnswerSink, Relay
from kvturn_router.turn.releases import Releases
from kvturn_router.turn.stock import Handle, StockTap
from kvturn_router.turn.stock_reuse import StockReuse
from kvturn_router.verdict import Verdict

_GRANT_WAIT_S: Final = 1.0
"""How long the account of a turn that decode served alone waits for the tokens that its grant
tells."""

_BEFORE_FETCHING: Final = frozenset((*range(400, 500), 503))
"""With what decode refuses requests that it has not begun to serve."""
_GONE: Final = TurnError(499, "the client is gone", reason="CLIENT_GONE")
"""How a turn ends whose client does not wait for its answer; told to nobody."""

_UNKNOWN: Final = History((), 0, 0)
_NOT_OFFERED: Final = Resolution(Verdict.NOT_OFFERED)


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


@dataclass(frozen=True, slots=True)
class LeaseReuse:
    """Reuse under leases: the session on which turns are told, and questions beside it."""

    session: RouterSession
    client: LeaseClient


class Forwarder:
    """Serves turns.

    At most one of `lease` and `stock` is given; with neither, turns are served
    through prefill and decode without reuse. `book` remembers turns where there
    is no lease service to do so, `recent` those of late in any case. `clock_ns`
    is CLOCK_BOOTTIME.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        admission: Admission,
        legs: Legs,
        book: ConversationBook,
        recent: RecentTurns,
        tracer: TurnTracer,
        limits: TurnLimits,
        costs: Costs,
        thresholds: Thresholds,
        clock_ns: Callable[[], int],
        lease: LeaseReuse | None,
        stock: StockReuse | None,
    ) -> None:
        assert lease is None or stock is None
        self.fleet = fleet
        self.admission = admission
        self.legs = legs
        self.book = book
        self.recent = recent
        self.tracer = tracer
        self.limits = limits
        self.costs = costs
        self.thresholds = thresholds
        self.clock_ns = clock_ns
        self.loop = asyncio.get_running_loop()
        self.lease = lease
        self.stock = stock
        self._turns: set[_Turn] = set()
        self.counts = TurnCounts()
        self.awaiting_grant: set[_Turn] = set()
        """Turns that were served and of which only the grant will tell all."""
        self.releases = Releases(legs, fleet, silence_s=limits.prefill_silence_s)

    @property
    def in_flight(self) -> int:
        """Turns being served."""
        return len(self._turns)

    def serve(self, request: TurnRequest, sink: AnswerSink) -> Coroutine[None, None, None]:
        """Serves one turn into `sink`; to be awaited by the task that is the turn's.

        Gives the request's key its right conversation id before the answer
        begins. Raises TurnError if it ends before that; later faults go to the
        sink. Cancel it when the client is gone.
        """
        return _Turn(self, request, sink).run(self._turns)

    def end_all(self, error: TurnError) -> None:
        """Ends every turn with an error."""
        for turn in list(self._turns):
            turn.end_with(error)

    def tell_all(self) -> None:
        """Tells of turns whose grant is awaited what is known by now."""
        for turn in list(self.awaiting_grant):
            turn.tell()

    async def conversation(self, key: ConversationKey) -> ConversationView:
        """Returns a conversation's latest turns, and what is held of it.

        Over all routers where there is a lease service, else this one's. Raises
        TurnError 404 if it is not known, 503 if the lease service is silent.
        """
        if self.lease is not None:
            return view_of(await self.lease.client.turns(key))
        reports = self.book.reports(key)
        if reports is None:
            raise no_conversation()
        return ConversationView([(key.conversation_id, report) for report in reports], [])

    async def end_conversation(self, key: ConversationKey) -> int:
        """Ends a conversation; returns how many leases that ended. Raises TurnError."""
        if self.stock is not None:
            self.stock.forget(key)
        return 0 if self.lease is None else await self.lease.client.end_conversation(key)

    async def keep_alive(self, key: ConversationKey, absence_s: float | None) -> float:
        """Keeps a conversation's KV for a client that will be back; returns for how many seconds.

        Raises TurnError 501 without a lease service, else as `LeaseClient.keep_alive`.
        """
        if self.lease is None:
            raise TurnError(
                501, "There is no lease service to keep it alive at.", reason="NOT_OFFERED"
            )
        return await self.lease.client.keep_alive(key, absence_s)


class _Turn:
    """One turn on its way."""

    def __init__(self, forwarder: Forwarder, request: TurnRequest, sink: AnswerSink) -> None:
        self._forwarder = forwarder
        self._request = request
        # Responses say no token ids, so handles of theirs could not be checked.
        self._stock = None if request.path == RESPONSES else forwarder.stock
        self._account = Account(forwarder.clock_ns(), request.came_ns)
        self._outcome = Outcome.ROUTER_ERROR
        self._span = forwarder.tracer.begin(request.trace)
        self._account.trace_id = self._span.trace_id
        self._task = asyncio.current_task(forwarder.loop)
        self._ending: TurnError | None = None
        self._session_turn: SessionTurn | None = None
        # Names the span of the conversation's turn before this one.
        self._previous = b""
        self._history = _UNKNOWN
        self._resolution = _NOT_OFFERED
        self._handle: Handle | None = None
        # Engines on which this turn counts.
        self._held: list[Engine] = []
        # Prefill engines that died with this turn in hand; it is given to them no more.
        self._lost: set[Engine] = set()
        # Decode's side of prefill's KV, while prefill still waits for it.
        self._unfetched: tuple[Engine, bytes] | None = None
        self._relay = Relay(request, self._account, sink, forwarder.clock_ns, None)
        self._sink = sink
        self._grant_wait: asyncio.TimerHandle | None = None

    async def run(self, running: "set[_Turn]") -> None:
        """Serves the turn, as one of those that are running. Raises as `Forwarder.serve`."""
        running.add(self)
        fault: TurnError | None = _GONE
        try:
            fault = await self._serve()
            self._outcome = Outcome.OK if fault is None else Outcome.ENGINE_ERROR
        except TurnError as error:
            fault = error
            client = error.status < 500
            self._outcome = Outcome.CLIENT_ERROR if client else Outcome.ENGINE_ERROR
            raise
        except asyncio.CancelledError:
            if self._ending is None:
                self._outcome = Outcome.HUNG_UP
                raise
            self._outcome = Outcome.SHUT_DOWN
            fault = self._ending
            if not self._relay.started:
                raise self._ending from None
            self._sink.fail(self._ending)
        finally:
            running.discard(self)
            self._settle(fault)

    def end_with(self, error: TurnError) -> None:
        """Ends the turn with an error, wherever it is."""
        self._ending = error
        if self._task is not None:
            self._task.cancel()

    async def _serve(self) -> TurnError | None:
        """Returns what went wrong after the answer had begun, None if nothing did."""
        self._resolution = await self._resolve()
        while True:
            plan = await self._plan()
            try:
                if plan.prefill is not None:
                    await self._prefill(plan, plan.prefill)
                return await self._decode(plan.decode)
            except _HolderGoneFault:
                self._resolution = Resolution(Verdict.ENGINE_LOST)
            except _PrefillsBusyFault:
                self._line_up_again()

    def _line_up_again(self) -> None:
        """Gives all engines up, to be planned anew."""
        for engine in [*self._held]:
            self._let_go(engine)
        if self._account.read_failed:
            self._resolution, self._handle = Resolution(self._account.verdict), None

    # Resolve

    async def _resolve(self) -> Resolution:
        forwarder = self._forwarder
        request = self._request
        reuse = request.reuse and not request.alone
        # What goes on with a response of its engine's does not tell its history.
        tells = request.response is None
        if reuse and tells and (forwarder.lease is not None or self._stock is not None):
            key = request.key
            self._history = history_of(
                request.members, request.path, key.tenant, key.model, request.scope
            )
        if forwarder.lease is not None:
            return await self._ask(forwarder.lease.session, reuse)
        if reuse and self._stock is not None:
            request.key = self._stock.name(request, self._history)
        number, self._previous = forwarder.book.begin_turn(request.key, self._span.name_bytes)
        self._account.number = number
        if not request.reuse:
            return Resolution(Verdict.TURNED_OFF)
        if self._stock is None or request.alone:
            return _NOT_OFFERED
        offer = self._stock.offer(request, self._account.number == 1)
        if isinstance(offer, Handle):
            self._handle = offer
            return Resolution(None, "", offer.decode)
        return Resolution(offer)

    async def _ask(self, session: RouterSession, reuse: bool) -> Resolution:
        request = self._request
        span = self._span.child("resolve")
        asked_ns = self._forwarder.clock_ns()
        turn = self._session_turn = session.begin(
            request.key,
            self._history.points,
            recognise=request.recognise and self._history.goes_on,
            reuse=reuse,
            on_retained=self._on_retained,
            trace=turn_trace(self._span, span),
        )
        try:
            resolution = await session.resolution(turn)
        finally:
            self._account.question_ns = self._forwarder.clock_ns() - asked_ns
            span.end(resolved(turn.resolution))
        if turn.conversation_id != request.key.conversation_id:
            request.key = request.key._replace(conversation_id=turn.conversation_id)
        self._account.number = turn.number
        if not reuse:
            off = not request.reuse
            return Resolution(Verdict.TURNED_OFF if off else Verdict.NOT_OFFERED)
        return resolution

    # Plan

    async def _plan(self) -> Plan[Engine]:
        """Decides on engines and way, and counts the turn on the engines. Raises TurnError."""
        span = self._span.child("plan", INTERNAL)
        fault: str | None = "given up"
        try:
            admission = self._forwarder.admission
            plan = admission.claim_now(self._claim)
            if plan is None:
                plan = await self._queue(admission)
            fault = None
        except TurnError as error:
            fault = error.message
            raise
        finally:
            span.end({"kvturn.plan": self._account.kind or ""}, fault=fault)
        self._held = [engine for engine in (plan.prefill, plan.decode) if engine is not None]
        return plan

    async def _queue(self, admission: Admission) -> Plan[Engine]:
        clock_ns = self._forwarder.clock_ns
        came_ns = clock_ns()
        try:
            return await admission.claim(self._claim, _give_back)
        finally:
            self._account.queued_ns += clock_ns() - came_ns

    def _claim(self) -> Plan[Engine]:
        forwarder = self._forwarder
        fleet = forwarder.fleet
        resolution = self._resolution
        try:
            holder = self._holder()
            if self._request.response is not None and resolution.verdict is None:
                kept = fleet.holder(resolution.http_address, resolution.engine_id)
                # The conversation went on elsewhere: what is retained there is of no use here.
                resolution = resolution if kept is holder else Resolution(Verdict.NO_LEASE)
            plan = decide(
                resolution,
                TurnSize(self._history.prompt_bytes, self._history.new_bytes),
                Others(fleet.prefills, self._lost) if self._lost else fleet.prefills,
                fleet.decodes,
                holder,
                forwarder.costs,
                forwarder.thresholds,
                model=self._request.key.model,
                alone=self._request.alone,
                bound=self._request.response is not None,
                now_ns=forwarder.clock_ns(),
            )
        except NoEngine as error:
            loads = fleet.prefills if error.role == PREFILL else fleet.decodes
            lost = self._lost if error.role == PREFILL else ()
            if any(engine.available and engine not in lost for engine in loads):
                raise NoRoom(error.role) from None
            raise no_engine(error.role, fleet.lack(error.role)) from None
        for engine in (plan.prefill, plan.decode):
            if engine is not None:
                engine.begin()
        account = self._account
        account.kind, account.reason, account.forecast = plan.kind, plan.reason, plan.forecast
        account.verdict = plan.verdict or Verdict.NOT_OFFERED
        return plan

    def _holder(self) -> Engine | None:
        """Returns the decode engine that has the history; raises TurnError if it alone would do."""
        response = self._request.response
        fleet = self._forwarder.fleet
        if response is None:
            return fleet.holder(self._resolution.http_address, self._resolution.engine_id)
        for engine in fleet.decodes:
            if response.is_held_by(engine_address(engine.url).place):
                if not engine.usable:
                    raise no_engine(DECODE)
                return engine
        raise no_response("previous_response_id", response.response_id)

    def _let_go(self, engine: Engine) -> None:
        if engine in self._held:
            self._held.remove(engine)
            engine.end()

    def _another(self, engine: Engine, engines: Loads[Engine], tried: set[Engine]) -> Engine | None:
        """Moves the turn from an engine that failed it to one not yet tried, if there is one."""
        tried.add(engine)
        other = engines.least(tried)
        if other is not None:
            self._let_go(engine)
            other.begin()
            self._moved_to(other)
        return other

    async def _another_decode(self, engine: Engine, tried: set[Engine]) -> Engine | None:
        """As `_another`, but waits in line for a decode engine that is full. Raises TurnError.

        No other engine is held by then, so no two turns keep what the other one waits for.
        """
        tried.add(engine)
        self._let_go(engine)
        decodes = self._forwarder.fleet.decodes

        def claim() -> Engine:
            other = decodes.least(tried)
            if other is None:
                left = any(one.available and one not in tried for one in decodes)
                raise NoRoom(DECODE) if left else NoEngine(DECODE)
            other.begin()
            return other

        try:
            other = await self._forwarder.admission.claim(claim, Engine.end)
        except NoEngine:
            return None
        self._moved_to(other)
        return other

    def _moved_to(self, engine: Engine) -> None:
        self._held.append(engine)
        # What was expected was expected of the first.
        self._account.forecast = None

    def _instead(
        self,
        engine: Engine,
        fault: EngineFault | EngineRefusal,
        tried: set[Engine],
    ) -> Engine | None:
        """Returns the prefill engine for a turn with which another one died, None if none.

        One other is tried: a request that ends engines must not end them all. Raises
        _PrefillsBusyFault if each that it could be has no room.
        """
        if not isinstance(fault, LostFault) or self._lost:
            return None
        if not fault.stale:
            self._lost.add(engine)
        other = self._another(engine, self._forwarder.fleet.prefills, tried)
        if other is None and not fault.stale and self._may_line_up():
            raise _PrefillsBusyFault
        return other

    def _may_line_up(self) -> bool:
        prefills = self._forwarder.fleet.prefills
        return any(one.available and one not in self._lost for one in prefills)

    # The prefill leg

    async def _prefill(self, plan: Plan[Engine], engine: Engine) -> None:
        """Runs the prefill leg until it has an answer; raises TurnError."""
        forwarder = self._forwarder
        fleet = forwarder.fleet
        account = self._account
        lease_id = plan.lease_id
        handle = self._handle if plan.kind is PlanKind.PULL and not lease_id else None
        if handle is not None:
            handle = await self._checked(engine, handle)
        tried = set(self._lost)
        while True:
            try:
                await self._prefill_once(engine, lease_id, handle)
                break
            except ConnectFault as fault:
                fleet.refused(engine, str(fault))
                other = self._another(engine, fleet.prefills, tried)
                if other is None and self._may_line_up():
                    raise _PrefillsBusyFault from None
                if other is None:
                    raise no_engine(PREFILL, fleet.lack(PREFILL)) from None
                engine = other
            except (EngineFault, EngineRefusal) as fault:
                self._note_fault(engine, fault)
                reuses = bool(lease_id or handle)
                if reuses and _may_recompute(fault):
                    # Also where it waits in line first: the read may have begun.
                    stuck = isinstance(fault, StuckReadFault)
                    account.give_reuse_up(Verdict.READ_TOO_LONG if stuck else Verdict.READ_FAILED)
                    lease_id, handle = "", None
                other = self._instead(engine, fault, tried)
                if other is None and not (reuses and _may_recompute(fault)):
                    raise _told_of(PREFILL, fault) from None
                engine = other or engine
        self._let_go(engine)
        report = account.answer.report
        if lease_id:
            account.verdict = (report.verdict if report else None) or Verdict.NOT_OFFERED
        elif handle is not None:
            account.verdict, account.answer = StockReuse.judged(handle, account.answer)
        elif report is not None and report.verdict is Verdict.UNSUPPORTED_MODEL:
            # That no turn of this model can reuse says more than that this one had no lease.
            account.verdict = Verdict.UNSUPPORTED_MODEL
        account.note_prefill()
        if lease_id:
            account.saved_ms = self._saved_ms()

    async def _checked(self, engine: Engine, handle: Handle) -> Handle | None:
        stock = self._stock
        assert stock is not None
        verdict = await stock.check(engine, self._request, handle, self._span)
        if verdict is None:
            return handle
        self._account.verdict = verdict
        return None

    async def _prefill_once(self, engine: Engine, lease_id: str, handle: Handle | None) -> None:
        """Makes one attempt; raises EngineFault or EngineRefusal."""
        forwarder = self._forwarder
        account = self._account
        account.lease_id = lease_id or account.lease_id
        account.prefill_url = engine.url
        account.prefill_attempts += 1
        span = self._span.child("prefill")
        transfer = prefill_transfer(
            self._kvturn(span, lease_id), [] if handle is None else StockReuse.keys(handle)
        )
        parts = _prefill_parts(self._request, transfer)
        watch = self._watch(lease_id)
        began_ns = forwarder.clock_ns()
        exchange: Exchange | None = None
        fault: EngineFault | EngineRefusal | None = GIVEN_UP
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
            account.answer = read_answer(await whole_body(exchange))
            engine.health.served_well()
            fault = None
        except (EngineFault, EngineRefusal) as error:
            fault = error
            raise
        finally:
            if watch is not None:
                watch.stop()
            if exchange is not None:
                exchange.close()
            account.prefill_ms = (forwarder.clock_ns() - began_ns) / 1e6
            if span.recorded:
                end_leg(span, PREFILL, engine.url, exchange, fault)

    def _watch(self, lease_id: str) -> ReadWatch | None:
        lease = self._forwarder.lease
        if not lease_id or lease is None:
            return None
        return ReadWatch(
            lease.client,
            lease_id,
            longest_read_ms=self._resolution.longest_read_ms,
            margin_ms=self._forwarder.limits.read_margin_ms,
        )

    def _kvturn(self, span: Span, lease_id: str, history: str = "") -> bytes | None:
        # Without a lease service nobody would read what decode retains under
        # the conversation, so it is not named.
        named = self._forwarder.lease is not None and self._request.reuse
        key = self._request.key if named else None
        return kvturn_member(key, self._account.number, lease_id, span.traceparent, history)

    # The decode leg

    async def _decode(self, engine: Engine) -> TurnError | None:
        """Runs the decode leg; returns what went wrong after the answer had begun, None if nothing.

        Raises TurnError before that, and _HolderGoneFault.
        """
        fleet = self._forwarder.fleet
        account = self._account
        tried: set[Engine] = set()
        while True:
            account.decode_url = engine.url
            try:
                return await self._decode_once(engine)
            except ConnectFault as fault:
                fleet.refused(engine, str(fault))
                self._check_holder(engine)
                held = self._request.response is not None
                other = None if held else await self._another_decode(engine, tried)
                if other is None:
                    raise no_engine(DECODE, fleet.lack(DECODE)) from None
                engine = other
            except (EngineFault, EngineRefusal) as fault:
                self._note_fault(engine, fault)
                stale = isinstance(fault, LostFault) and fault.stale
                other = None
                if isinstance(fault, LostFault):
                    self._check_holder(engine)
                    # One other is tried, as with prefill.
                    if not (stale or tried or self._request.response is not None):
                        other = await self._another_decode(engine, tried)
                if other is None and not (stale and account.answer.transfer is not None):
                    raise _told_of(DECODE, fault) from None
                engine = other or engine
                # The lost request may have fetched prefill's KV, which can be fetched once.
                account.lose_handover()

    def _check_holder(self, engine: Engine) -> None:
        """Ends an attempt to be served by the holder alone, if another engine could serve it."""
        if self._account.kind is PlanKind.LOCAL and self._request.response is None:
            self._let_go(engine)
            raise _HolderGoneFault

    async def _decode_once(self, engine: Engine) -> TurnError | None:
        """Makes one attempt; raises EngineFault before the answer has begun, or EngineRefusal."""
        forwarder = self._forwarder
        request = self._request
        account = self._account
        span = self._span.child("decode")
        own = self._history.points[0].hex() if self._history.points else ""
        kvturn = None if request.alone else self._kvturn(span, "", own)
        handed = account.answer.transfer
        transfer = decode_transfer(handed, kvturn)
        asks_ids = self._stock is not None and request.reuse and not request.alone
        if request.path == RESPONSES:
            parts = responses_decode_parts(request.members, transfer, self._response_id(engine))
        else:
            parts = decode_parts(request.members, transfer, ask_token_ids=asks_ids)
        if handed is not None and transfer is not None:
            self._unfetched = (engine, transfer)
        self._relay.tap = StockTap(request) if asks_ids else None
        account.decode_began_ns = forwarder.clock_ns()
        account.decode_attempts += 1
        exchange: Exchange | None = None
        failed: EngineFault | TurnError | None = GIVEN_UP
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
            failed = fault = await self._relay.run(exchange)
            if fault is None:
                engine.health.served_well()
            else:
                forwarder.fleet.failed(engine, fault.message)
        except (EngineFault, EngineRefusal) as error:
            failed = error
            refused = isinstance(error, EngineRefusal) and error.status in _BEFORE_FETCHING
            if refused and handed is not None:
                # Without a conversation: that it was not fetched is too little to retain it by.
                self._unfetched = (engine, handed)
            raise
        finally:
            if exchange is not None:
                exchange.close()
            if span.recorded:
                first_chunk_ns = 0
                if request.stream and account.first_byte_ns:
                    first_chunk_ns = account.first_byte_ns - account.decode_began_ns
                end_leg(span, DECODE, engine.url, exchange, failed, first_chunk_ns)
        return fault

    def _response_id(self, engine: Engine) -> str:
        key = self._request.key
        place = engine_address(engine.url).place
        return response_id(key.tenant, key.conversation_id, place, secrets.token_hex(12))

    def _is_fetched(self, exchange: Exchange) -> None:
        del exchange
        self._unfetched = None

    def _note_fault(self, engine: Engine, fault: EngineFault | EngineRefusal) -> None:
        """Holds against an engine what is its own fault, and not the request's."""
        stale = isinstance(fault, LostFault) and fault.stale
        own = fault.status >= 500 if isinstance(fault, EngineRefusal) else not stale
        if own and not isinstance(fault, StuckReadFault):
            self._forwarder.fleet.failed(engine, str(fault))

    # Settle

    def _settle(self, fault: TurnError | None) -> None:
        self._account.ended_ns = self._forwarder.clock_ns()
        for engine in self._held:
            engine.end()
        self._held.clear()
        request = self._request
        if self._unfetched is not None and not self._relay.started and request.members:
            engine, transfer = self._unfetched
            parts = _prefill_parts(request, transfer)
            self._forwarder.releases.add(engine, request, parts, self._span)
        account = self._account
        awaits_grant = (
            fault is None
            and account.kind is PlanKind.LOCAL
            and account.retained is None
            and self._session_turn is not None
        )
        if awaits_grant:
            # Only the grant tells how many tokens the prompt had. Until it comes the turn counts
            # as in flight.
            self._grant_wait = self._forwarder.loop.call_later(_GRANT_WAIT_S, self.tell)
            self._forwarder.awaiting_grant.add(self)
        else:
            self._close(fault)

    def _on_retained(self, retained: Retained) -> None:
        if self._account.kind is not PlanKind.LOCAL:
            return
        self._account.retained = retained
        self.tell()

    def tell(self) -> None:
        """Waits no longer for the grant of the turn, if it does."""
        if self._grant_wait is None:
            return
        self._grant_wait.cancel()
        self._grant_wait = None
        self._forwarder.awaiting_grant.discard(self)
        self._close(None)

    def _close(self, fault: TurnError | None) -> None:
        """Tells of the turn, to whom it concerns, what is known by now."""
        forwarder = self._forwarder
        request = self._request
        account = self._account
        if self._session_turn is not None:
            account.number = self._session_turn.number
            self._previous = self._session_turn.previous
            # Nothing more is wanted of it, and a cycle would keep the whole turn in memory.
            self._session_turn.on_retained = None
        if account.kind is PlanKind.LOCAL and fault is None:
            account.saved_ms = self._saved_ms()
        report = account.report() if self._relay.started else None
        if forwarder.lease is not None and self._session_turn is not None:
            forwarder.lease.session.end(
                self._session_turn, retains=self._is_retained(fault), report=report
            )
            if fault is None and account.kind is not None and account.forecast is not None:
                took = account.took(streamed=request.stream)
                now_ns = forwarder.clock_ns()
                forwarder.costs.learn(account.kind.value, account.forecast, took, now_ns)
        elif report is not None:
            forwarder.book.end_turn(request.key, report)
        if report is not None:
            ended_ns = account.ended_ns
            forwarder.recent.ended(ended_ns, request.key, report, streamed=request.stream)
        if self._stock is not None and request.reuse and not request.alone:
            self._stock.ended(request.key)
            if fault is None and self._relay.tap is not None:
                self._stock.keep(request.key, self._relay.tap, account.decode_url)
        forwarder.counts.over(account, self._outcome, streamed=request.stream)
        if self._span.recorded:
            told = account.attributes(request, report or account.report())
            status = 0
            if fault is not None:
                told["error.type"] = fault.reason
            if self._relay.started or fault is not _GONE:
                status = 200 if self._relay.started or fault is None else fault.status
            self._span.end(
                told,
                written=account.common_attributes(request, status),
                fault=None if fault is None else fault.message,
                link=self._previous,
            )

    def _saved_ms(self) -> float | None:
        account = self._account
        if account.kind is None or account.forecast is None:
            return None
        took = account.took(streamed=self._request.stream)
        return self._forwarder.costs.saved_ms(account.kind.value, account.forecast, took)

    def _is_retained(self, fault: TurnError | None) -> bool:
        """Tells whether decode will announce a retention of this turn.

        Prefill's report shows that our connector is there; a stock decode engine announces none.
        """
        request = self._request
        ours = self._account.answer.report is not None or self._account.kind is PlanKind.LOCAL
        return fault is None and ours and request.reuse and not request.alone


class _HolderGoneFault(Exception):
    """The engine that was to serve the turn alone is gone; the client has got nothing yet."""


class _PrefillsBusyFault(Exception):
    """The engine that was to prefill refused or died, and those that are left have no room."""


def _give_back(plan: Plan[Engine]) -> None:
    for engine in (plan.prefill, plan.decode):
        if engine is not None:
            engine.end()


def _may_recompute(fault: EngineFault | EngineRefusal) -> bool:
    """Tells whether a leg that failed under a lease is worth another try without it.

    A refusal of the request itself would be repeated, and an engine that was
    silent for the whole limit has used up the turn's time.
    """
    if isinstance(fault, EngineRefusal):
        return fault.status >= 500
    return not isinstance(fault, SilentFault)


def _prefill_parts(request: TurnRequest, transfer: bytes) -> list[bytes]:
    parts = responses_prefill_parts if request.path == RESPONSES else prefill_parts
    return parts(request.members, transfer)


def _told_of(role: str, fault: EngineFault | EngineRefusal) -> TurnError:
    return fault if isinstance(fault, EngineRefusal) else engine_error(role, fault)


def _ignore(exchange: Exchange) -> None:
    del exchange

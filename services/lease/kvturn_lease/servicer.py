"""The gRPC shell around the lessor: messages in, the clock read, effects carried out.

It owns the one timer. All of it runs on one event loop, and every step from a message to its
effects is synchronous, so the core sees one thing after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from grpc.aio import EOF  # type: ignore[attr-defined]

from kvturn.recognition import Recognition
from kvturn.span_wire import SERVER
from kvturn.v1 import lease_pb2, lease_pb2_grpc
from kvturn_lease import wire
from kvturn_lease.effects import Announced, EndSession, EngineChanged, Record, SendToEngine
from kvturn_lease.errors import (
    HelloLate,
    InvalidArgument,
    LeaseServiceError,
    NotLeader,
    RegisterLate,
    ShuttingDown,
    StoreUnavailable,
)
from kvturn_lease.router_sessions import RouterSessions
from kvturn_lease.routers import Routers
from kvturn_lease.session_stream import SessionStream
from kvturn_lease.status import abort
from kvturn_lease.tally import Tally
from kvturn_lease.telemetry import annotate
from kvturn_lease.turn_reports import TurnReports

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator

    from kvturn.span_wire import Attribute
    from kvturn.tracing import Tracing
    from kvturn_lease.callers import Callers
    from kvturn_lease.config import LeaseConfig
    from kvturn_lease.conversation import ConversationKey
    from kvturn_lease.lease import Retention
    from kvturn_lease.lessor import Lessor
    from kvturn_lease.session import SessionId
    from kvturn_lease.store import Change, Store
    from kvturn_lease.verdict import Verdict

_SECOND_NS = 1_000_000_000
_RETENTIONS_PER_STEP = 256
_CONVERSATIONS_PER_STEP = 256
_WRITTEN_PER_STEP = 64
_TRACEPARENT_CHARACTERS_MAX = 64
_OK = "ok"
"""How calls are counted that were not refused."""

_STREAMS = frozenset({"EngineSession", "RouterSession"})
"""They look whether this process leads once they have read a first message.

A client whose first message is cut off by a refusal learns of no status, and so of no leader.
"""

_VERSION = version("kvturn-lease")

logger = logging.getLogger("kvturn.lease")

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


def _aborts(
    method: Callable[[LeaseServicer, _Request, Any], Awaitable[_Response]],
) -> Callable[[LeaseServicer, _Request, Any], Awaitable[_Response]]:
    """Answers with a status what the method refuses, and counts its answers."""
    name = method.__name__

    @functools.wraps(method)
    async def answer(self: LeaseServicer, request: _Request, context: Any) -> _Response:
        calls = self.tally.calls
        try:
            if name not in _STREAMS:
                self.check_leading()
            response = await method(self, request, context)
        except LeaseServiceError as error:
            calls[name, error.reason] += 1
            await abort(context, error)
        calls[name, _OK] += 1
        return response

    return answer


class Leading(NamedTuple):
    """The parts of the term that runs."""

    lessor: Lessor
    routers: RouterSessions
    store: Store


class LeaseServicer(lease_pb2_grpc.LeaseServiceServicer):
    """Answers kvturn.v1.LeaseService out of a lessor."""

    def __init__(
        self,
        config: LeaseConfig,
        lessor: Lessor | None,
        store: Store | None,
        clock_ns: Callable[[], int],
        tracing: Tracing,
        callers: Callers | None = None,
        tally: Tally | None = None,
    ) -> None:
        """`clock_ns` is CLOCK_BOOTTIME: it goes on while the machine is suspended.

        Without `lessor` and `store` it stands by until lead(). `tally` counts for all of the
        process; None: one of its own.
        """
        self.tally = Tally() if tally is None else tally
        self.term_began_ns = 0
        """When the term that runs began."""
        self._config = config
        self._leading: Lessor | None = None
        self._store: Store | None = None
        self._routers: RouterSessions | None = None
        """Of the term that runs, or of the last one."""
        self._refusal: LeaseServiceError = StoreUnavailable()
        self._clock_ns = clock_ns
        self._tracing = tracing
        self._callers = callers
        self._streams: dict[SessionId, SessionStream] = {}
        self._waiters: dict[ConversationKey, set[asyncio.Future[None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._searching = asyncio.Lock()
        """One search at a time: each looks at all conversations."""
        self._closing = False
        if lessor is not None and store is not None:
            self._open_term(lessor, store)

    def _open_term(self, lessor: Lessor, store: Store) -> None:
        self._leading, self._store = lessor, store
        self.term_began_ns = self._clock_ns()
        self.tally.terms += 1
        recognition = Recognition(self._config.lessor.conversations_max)
        routers = Routers(lessor, recognition, self._config.routers)
        self._routers = RouterSessions(
            self._config, lessor, routers, TurnReports(), self._tracing.tracer
        )

    @property
    def leads(self) -> bool:
        """Whether it answers; else it refuses everything."""
        return self._leading is not None

    @property
    def leading(self) -> Leading | None:
        """What it answers out of, None while it stands by."""
        if self._leading is None or self._routers is None or self._store is None:
            return None
        return Leading(self._leading, self._routers, self._store)

    def lead(self, lessor: Lessor, store: Store) -> None:
        """Answers out of `lessor` from now on."""
        assert self._leading is None
        self._open_term(lessor, store)
        self._arm_timer()

    def stand_by(self, refusal: LeaseServiceError) -> None:
        """Refuses everything with `refusal` from now on; a term that runs is over at once."""
        if self._leading is not None:
            self._leading.depose()
            self._carry_out(self._clock_ns())
            self._leading = self._store = None
            self._arm_timer()
        self._refusal = refusal

    def check_leading(self) -> None:
        """Raises what is to be answered while standing by."""
        if self._leading is None:
            raise self._refusal

    @property
    def _lessor(self) -> Lessor:
        self.check_leading()
        assert self._leading is not None
        return self._leading

    @property
    def _router_sessions(self) -> RouterSessions:
        self.check_leading()
        assert self._routers is not None
        return self._routers

    def close(self) -> None:
        """Ends every session stream with UNAVAILABLE and takes no new one."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for stream in list(self._streams.values()):
            stream.end(ShuttingDown())
        if self._routers is not None:
            self._routers.end_all(ShuttingDown())

    # ---- engine sessions -----------------------------------------------------------------

    @_aborts
    async def EngineSession(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Holds one engine's session for as long as its stream."""
        request = await self._first_message(context, RegisterLate())
        if request is None:
            return
        assert isinstance(request, lease_pb2.EngineSessionRequest)
        session_id = wire.session_id(request)
        if self._callers is not None:
            self._callers.check_engine(session_id.engine_id, context)
        # By itself, because gRPC cannot end a stream whose first message was cancelled on its way.
        await context.send_initial_metadata(())
        stream = await self._register(session_id, request.register)
        logger.info(
            "engine %s registered: session %d, retentions: %d",
            session_id.engine_id,
            session_id.number,
            len(request.register.inventory),
        )
        del request  # a large inventory need not live as long as the session

        def on_end(why: str) -> None:
            self._end_session(session_id, stream)
            logger.info(
                "engine %s: session %d ended: %s", session_id.engine_id, session_id.number, why
            )

        works = (self._receive(session_id, context), stream.write_all(context.write))
        await _run_until_one_ends(works, on_end, context)

    async def _first_message(self, context: Any, late: LeaseServiceError) -> Any:
        """Returns the first message of a session, None if there is none."""
        try:
            async with asyncio.timeout(self._config.lessor.session_ttl_ns / _SECOND_NS):
                request = await context.read()
        except TimeoutError:
            self.check_leading()
            raise late from None
        if request is EOF:
            return None
        self.check_leading()
        if self._closing:
            raise ShuttingDown
        return request

    async def _register(
        self, session_id: SessionId, register: lease_pb2.RegisterEngine
    ) -> SessionStream:
        info = wire.engine_info(register.engine)
        quiet_ns = wire.quiet_ns(register)
        hold_ns = wire.hold_ns(register)
        inventory: list[Retention] = []
        for index, message in enumerate(register.inventory):
            if index % _RETENTIONS_PER_STEP == _RETENTIONS_PER_STEP - 1:
                await asyncio.sleep(0)  # let questions through while a large inventory is read
            inventory.append(wire.retention(message, f"register.inventory[{index}]"))
        if self._closing:
            raise ShuttingDown
        stream = SessionStream(self._config.queued_messages_max)
        with self._now() as now_ns:
            self._lessor.register(
                session_id,
                info,
                inventory,
                quiet_ns=quiet_ns,
                hold_ns=hold_ns,
                previous_term=register.previous_term,
                now_ns=now_ns,
            )
            self._streams[session_id] = stream
        return stream

    async def _receive(self, session_id: SessionId, context: Any) -> None:
        """Feeds the lessor until the engine closes its side. Raises what the lessor raises."""
        while (request := await context.read()) is not EOF:
            if request.session_number != session_id.number:
                raise InvalidArgument("session_number", "must be the one of register")
            self._on_message(session_id, request)

    def _on_message(self, session_id: SessionId, request: lease_pb2.EngineSessionRequest) -> None:
        match request.WhichOneof("message"):
            case "heartbeat":
                self._on_heartbeat(session_id, request.sequence, request.heartbeat)
            case "grant":
                self._on_grant(session_id, request.sequence, request.grant)
            case "freed":
                lease_id, reason = wire.freed(request.freed)
                with self._now() as now_ns:
                    self._lessor.freed(session_id, request.sequence, lease_id, reason, now_ns)
            case "register":
                raise InvalidArgument("message", "must not be register on a session that is open")
            case _:
                raise InvalidArgument("message", "must be set")

    def _on_heartbeat(
        self, session_id: SessionId, sequence: int, heartbeat: lease_pb2.Heartbeat
    ) -> None:
        # Not the limit of one engine: a Register may bring more, and all may be given up at once.
        withdrawn = wire.withdrawn(heartbeat, self._config.lessor.leases_max)
        with self._now() as now_ns:
            self._lessor.heartbeat(
                session_id,
                sequence,
                echo_term=heartbeat.echo_term,
                echo_sequence=heartbeat.echo_sequence,
                withdrawn=withdrawn,
                memory=wire.memory(heartbeat),
                now_ns=now_ns,
            )

    def _on_grant(self, session_id: SessionId, sequence: int, grant: lease_pb2.Grant) -> None:
        lease_id = wire.lease_id(grant.retention.lease_id, "grant.retention.lease_id")
        traceparent = grant.traceparent[:_TRACEPARENT_CHARACTERS_MAX]
        span = self._tracing.span(traceparent, "Grant", SERVER)
        try:
            retention = wire.retention(grant.retention, "grant.retention")
        except InvalidArgument as error:
            logger.warning("engine %s: grant refused: %s", session_id.engine_id, error)
            with self._now() as now_ns:
                self._lessor.refuse_grant(
                    session_id, sequence, lease_id, "RETENTION_INVALID", now_ns
                )
            span.end({"kvturn.lease_id": str(lease_id), "kvturn.refused": error.field})
            return
        with self._now() as now_ns:
            self._lessor.grant(session_id, sequence, retention, now_ns)
        if span.recorded:
            span.end(
                {
                    **_naming(retention.conversation),
                    "kvturn.lease_id": str(lease_id),
                    "kvturn.decode.engine": session_id.engine_id,
                    "kvturn.turn": retention.turn,
                    "kvturn.retained_tokens": retention.token_count,
                    "kvturn.prompt_tokens": grant.retention.prompt_tokens,
                    "kvturn.local_tokens": grant.retention.local_cached_tokens,
                }
            )

    def _end_session(self, session_id: SessionId, stream: SessionStream) -> None:
        if self._streams.get(session_id) is stream:
            del self._streams[session_id]
        with self._now() as now_ns:
            if self._leading is not None:
                self._leading.close_session(session_id, now_ns)

    # ---- router sessions -----------------------------------------------------------------

    @_aborts
    async def RouterSession(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Holds one router's session for as long as its stream."""
        request = await self._first_message(context, HelloLate())
        if request is None:
            return
        await context.send_initial_metadata(())
        if self._closing:
            raise ShuttingDown
        routers = self._router_sessions
        with self._now() as now_ns:
            session, stream = routers.open(request, now_ns)
        router_id = request.hello.router_id
        logger.info("router %s: session opened, turns in flight: %d", router_id, len(session.turns))
        del request

        def on_end(why: str) -> None:
            turns = len(session.turns)
            with self._now() as now_ns:
                routers.close(session, now_ns)
            logger.info("router %s: session ended with %d turns: %s", router_id, turns, why)

        async def receive() -> None:
            while (request := await context.read()) is not EOF:
                with self._now() as now_ns:
                    routers.receive(session, request, now_ns)

        works = (receive(), stream.write_all(context.write), stream.until_ended())
        await _run_until_one_ends(works, on_end, context)

    @_aborts
    async def ListTurns(
        self, request: lease_pb2.ListTurnsRequest, context: Any
    ) -> lease_pb2.ListTurnsResponse:
        """Returns what routers reported of a conversation's latest turns."""
        key = wire.conversation_key(request.conversation, "conversation")
        with self._now() as now_ns:
            return self._router_sessions.turns(key, now_ns)

    @_aborts
    async def ListConversations(
        self, request: lease_pb2.ListConversationsRequest, context: Any
    ) -> lease_pb2.ListConversationsResponse:
        """Returns the conversations with the latest sign of life."""
        wanted, count_max = wire.wanted(request)
        async with self._searching:
            routers = self._router_sessions
            with self._now() as now_ns:
                search = routers.find_conversations(wanted, count_max, now_ns)
            for _ in search.steps():
                await asyncio.sleep(0)  # let turns through
        response = lease_pb2.ListConversationsResponse(total_size=search.total)
        found = iter(search.latest())
        while page := list(itertools.islice(found, _WRITTEN_PER_STEP)):
            with self._now() as now_ns:
                for conversation in page:
                    routers.write_conversation(response, conversation, now_ns)
            await asyncio.sleep(0)
        return response

    # ---- questions -----------------------------------------------------------------------

    @_aborts
    async def ResolveConversation(
        self, request: lease_pb2.ResolveConversationRequest, context: Any
    ) -> lease_pb2.ResolveConversationResponse:
        """Tells which engine holds a conversation's KV, and under which lease."""
        key = wire.conversation_key(request.conversation, "conversation")
        wait_ns = wire.resolve_wait_ns(request)
        if wait_ns > 0:
            await self._await_turn(key, request.expected_turn, wait_ns)
        with self._now() as now_ns:
            resolution = self._lessor.resolve(key, now_ns)
        response = wire.resolution(resolution, self._config.lessor.longest_read_ns)
        annotate(
            {
                **_naming(key),
                "kvturn.lease_id": response.lease_id,
                "kvturn.verdict": _verdict_name(resolution.verdict),
                "kvturn.decode.engine": resolution.engine_id,
            }
        )
        return response

    @_aborts
    async def BeginRead(
        self, request: lease_pb2.BeginReadRequest, context: Any
    ) -> lease_pb2.BeginReadResponse:
        """Grants the one right to read a lease, or says why not."""
        lease_id = wire.lease_id(request.lease_id)
        key = wire.conversation_key(request.conversation, "conversation")
        reader = wire.reader_engine_id(request)
        with self._now() as now_ns:
            answer = self._lessor.begin_read(lease_id, key, now_ns)
        annotate(
            {
                **_naming(key),
                "kvturn.lease_id": request.lease_id,
                "kvturn.granted": not answer.verdict,
                "kvturn.verdict": _verdict_name(answer.verdict),
                "kvturn.prefill.engine": reader,
            }
        )
        return wire.read_answer(answer, request, self._config.lessor.longest_read_ns)

    @_aborts
    async def EndRead(
        self, request: lease_pb2.EndReadRequest, context: Any
    ) -> lease_pb2.EndReadResponse:
        """Notes how a read ended."""
        lease_id = wire.lease_id(request.lease_id)
        outcome = wire.read_outcome(request)
        with self._now() as now_ns:
            self._lessor.end_read(lease_id, outcome, now_ns)
        annotate(
            {
                "kvturn.lease_id": request.lease_id,
                "kvturn.read_outcome": outcome.name.lower(),
                "kvturn.reused_tokens": request.reused_tokens,
                "kvturn.read_bytes": min(request.read_bytes, 2**63 - 1),
                "kvturn.read_ms": request.read_time.ToMicroseconds() / 1_000,
            }
        )
        return lease_pb2.EndReadResponse()

    @_aborts
    async def TouchConversation(
        self, request: lease_pb2.TouchConversationRequest, context: Any
    ) -> lease_pb2.TouchConversationResponse:
        """Notes a sign of life, and that a turn began or ended."""
        key = wire.conversation_key(request.conversation, "conversation")
        delta = wire.turns_delta(request)
        annotate(_naming(key))
        with self._now() as now_ns:
            self._lessor.touch(key, delta, now_ns)
        return lease_pb2.TouchConversationResponse()

    @_aborts
    async def KeepConversationAlive(
        self, request: lease_pb2.KeepConversationAliveRequest, context: Any
    ) -> lease_pb2.KeepConversationAliveResponse:
        """Keeps a conversation from becoming idle for a while."""
        key = wire.conversation_key(request.conversation, "conversation")
        absence_ns = wire.absence_ns(request)
        annotate(_naming(key))
        with self._now() as now_ns:
            kept_ns = self._router_sessions.keep_alive(key, absence_ns, now_ns)
        return lease_pb2.KeepConversationAliveResponse(kept=wire.duration(kept_ns))

    @_aborts
    async def EndConversation(
        self, request: lease_pb2.EndConversationRequest, context: Any
    ) -> lease_pb2.EndConversationResponse:
        """Ends the leases of a conversation or scope."""
        key = wire.conversation_key(request.conversation, "conversation")
        annotate(_naming(key))
        ended = 0
        family = self._router_sessions.family(key)
        while step := list(itertools.islice(family, _CONVERSATIONS_PER_STEP)):
            with self._now() as now_ns:
                for each in step:
                    ended += self._router_sessions.end_conversation(each, now_ns)
            await asyncio.sleep(0)  # let turns through while a large scope is ended
        return lease_pb2.EndConversationResponse(leases_ended=ended)

    @_aborts
    async def GetLease(
        self, request: lease_pb2.GetLeaseRequest, context: Any
    ) -> lease_pb2.GetLeaseResponse:
        """Returns one lease."""
        lease_id = wire.lease_id(request.lease_id)
        with self._now() as now_ns:
            view = self._lessor.get_lease(lease_id, now_ns)
        return lease_pb2.GetLeaseResponse(lease=wire.lease(view))

    @_aborts
    async def ListLeases(
        self, request: lease_pb2.ListLeasesRequest, context: Any
    ) -> lease_pb2.ListLeasesResponse:
        """Returns a page of leases in order of lease id."""
        engine_id, key, page_size, token = wire.page(request)
        with self._now() as now_ns:
            views = self._lessor.list_leases(
                engine_id=engine_id, key=key, after=token, count_max=page_size + 1, now_ns=now_ns
            )
        page = [wire.lease(view) for view in views[:page_size]]
        more = len(views) > page_size
        return lease_pb2.ListLeasesResponse(
            leases=page, next_page_token=page[-1].lease_id if more else ""
        )

    @_aborts
    async def RevokeLease(
        self, request: lease_pb2.RevokeLeaseRequest, context: Any
    ) -> lease_pb2.RevokeLeaseResponse:
        """Ends a lease on an operator's word."""
        lease_id = wire.lease_id(request.lease_id)
        with self._now() as now_ns:
            self._lessor.revoke(lease_id, now_ns)
        logger.info("lease %s revoked", lease_id)
        return lease_pb2.RevokeLeaseResponse()

    async def DescribeService(
        self, request: lease_pb2.DescribeServiceRequest, context: Any
    ) -> lease_pb2.DescribeServiceResponse:
        """Tells of this process, whether it leads or not."""
        refusal = None if self.leads else self._refusal
        routers = self._routers.routers() if self.leads and self._routers is not None else ()
        return wire.service(self._config, _VERSION, refusal, routers)

    @_aborts
    async def ListEngines(
        self, request: lease_pb2.ListEnginesRequest, context: Any
    ) -> lease_pb2.ListEnginesResponse:
        """Returns the engines with a live session."""
        with self._now() as now_ns:
            views = self._lessor.list_engines(now_ns)
        return lease_pb2.ListEnginesResponse(engines=[wire.engine(view) for view in views])

    @_aborts
    async def DrainEngine(
        self, request: lease_pb2.DrainEngineRequest, context: Any
    ) -> lease_pb2.DrainEngineResponse:
        """Has routers send an engine no new turns, or take it up again."""
        engine_id = wire.drained_engine_id(request)
        with self._now() as now_ns:
            self._lessor.drain_engine(engine_id, request.draining, now_ns)
        logger.info("engine %s: %s", engine_id, "drains" if request.draining else "taken up again")
        return lease_pb2.DrainEngineResponse()

    # ---- the lessor's hands --------------------------------------------------------------

    @contextlib.contextmanager
    def _now(self) -> Iterator[int]:
        """Reads the clock for one step of the lessor and carries out what it asks for."""
        now_ns = self._clock_ns()
        try:
            yield now_ns
        finally:
            self._carry_out(now_ns)
            self._arm_timer()

    def _carry_out(self, now_ns: int) -> None:
        lessor, routers = self._leading, self._routers
        if lessor is None:
            return
        assert routers is not None
        changes: list[Change] = []
        while effects := lessor.drain():  # routers' answers can bring more
            for effect in effects:
                match effect:
                    case SendToEngine():
                        self._send(effect, lessor.term)
                    case EndSession(session=session_id, error=error):
                        stream = self._streams.get(session_id)
                        if stream is not None:
                            stream.end(error)
                    case Announced(retention=retention):
                        self._wake_waiters(retention.conversation)
                        routers.announced(effect, now_ns)
                    case EngineChanged(engine_id=engine_id):
                        routers.engine_changed(engine_id, now_ns)
                    case Record(change=change):
                        changes.append(change)
        if lessor.deposed:
            routers.end_all(NotLeader())
        routers.tell()
        if changes and self._store is not None:
            self._store.record(changes)

    def _send(self, effect: SendToEngine, term: int) -> None:
        stream = self._streams.get(effect.session)
        if stream is not None:
            stream.send(wire.engine_message(effect, term, self._config.lessor))

    def _wake_waiters(self, key: ConversationKey) -> None:
        for waiter in self._waiters.get(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _arm_timer(self) -> None:
        """Sees to it that expire() is called when the next deadline comes."""
        next_ns = self._next_deadline_ns()
        if self._timer is not None:
            if next_ns is not None and self._timer_ns <= next_ns:
                return  # wakes early enough, and will be armed anew then
            self._timer.cancel()
            self._timer = None
        if next_ns is not None and not self._closing:
            self._timer_ns = next_ns
            delay_s = max(0, next_ns - self._clock_ns()) / _SECOND_NS
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _next_deadline_ns(self) -> int | None:
        if self._leading is None or self._routers is None:
            return None
        due_ns, turns_due_ns = self._leading.next_deadline_ns(), self._routers.next_deadline_ns()
        if due_ns is None or turns_due_ns is None:
            return due_ns if turns_due_ns is None else turns_due_ns
        return min(due_ns, turns_due_ns)

    def _on_timer(self) -> None:
        self._timer = None
        with self._now() as now_ns:
            if self._leading is not None and self._routers is not None:
                self._leading.expire(now_ns)
                if not self._leading.deposed:
                    self._routers.expire(now_ns)

    async def _await_turn(self, key: ConversationKey, turn: int, wait_ns: int) -> None:
        """Waits until a retention of the turn is announced, for `wait_ns` at most."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ns / _SECOND_NS):
                while self._lessor.awaits_turn(key, turn, self._clock_ns()):
                    waiter: asyncio.Future[None] = loop.create_future()
                    waiters = self._waiters.setdefault(key, set())
                    waiters.add(waiter)
                    try:
                        await waiter
                    finally:
                        waiters.discard(waiter)
                        if not waiters:
                            self._waiters.pop(key, None)


async def _run_until_one_ends(
    works: Iterable[Coroutine[Any, Any, None]], on_end: Callable[[str], None], context: Any
) -> None:
    """Runs all works of a session, calls `on_end` as soon as one ends, and raises its error."""
    tasks = [asyncio.create_task(work) for work in works]
    error: BaseException | None = None
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        error = next((task.exception() for task in done if task.exception()), None)
    finally:  # gRPC cancels this call when the connection breaks, also once more below
        on_end(str(error) if isinstance(error, LeaseServiceError) else "its stream ended")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if error is not None and (isinstance(error, LeaseServiceError) or not context.done()):
        raise error


def _naming(key: ConversationKey) -> dict[str, Attribute]:
    return {"gen_ai.conversation.id": key.conversation_id, "gen_ai.request.model": key.model}


def _verdict_name(verdict: Verdict) -> str:
    """Returns the verdict as spans show it; empty when there is a lease to read."""
    return verdict.name.lower() if verdict else ""

"""The router's session with the lease service.

One stream to whichever process of the lease service leads. Turns begin and end
on it; what gathers in one pass of the event loop goes out in one message. The
lease service answers each turn with what can be reused, numbers it, and pushes
the engines that it knows. No turn can fail because of any of this: one that is
not answered within the question deadline goes on without reuse.

    turn = session.begin(key, points, recognise=False, reuse=True)
    resolution = await session.resolution(turn)
    ...
    session.end(turn, retains=True, report=report)

`session_turns.py` keeps the turns; here are the stream and the timers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import grpc
import grpc.aio

from kvturn.lease_channels import LeaseChannels
from kvturn.v1 import common_pb2, lease_pb2
from kvturn_router.choice.plan import Resolution
from kvturn_router.engines.fleet import AnnouncedEngine
from kvturn_router.leases.session_turns import Retained, SessionTurn, SessionTurns
from kvturn_router.request.conversation import ConversationKey, TurnReport
from kvturn_router.verdict import Verdict

if TYPE_CHECKING:
    _Call = grpc.aio.StreamStreamCall[bytes, lease_pb2.RouterSessionResponse]

logger = logging.getLogger("kvturn.router.session")

_OPEN_TIMEOUT_S: Final = 1.0
"""Longest wait for the first message of the lease service."""
_SILENCE_S: Final = 1.0
"""How long a session may go on after an answer was missed without another word."""
_END_PAUSE_S: Final = 0.005
"""How long the end of a turn waits for company; a turn that begins takes it along."""
_PACE_S: Final = 0.002
"""How long after a message what there is to say waits for company: a message costs as much as the
turns of a dozen. Nobody waits where turns begin one by one."""
_LAST_WORDS_S: Final = 0.5
"""How long the end of a session may take."""
_STALL_NS: Final = 5_000_000
"""A timer that is later than this shows that the process stood still."""
_RECONNECT_S_MIN: Final = 0.02
_RECONNECT_S_MAX: Final = 0.5
_PROBLEMS_MAX: Final = 8
"""Reasons of one outage that are told."""

_REFUSALS: Final = {
    "FIELD_INVALID": "they name something that it does not take",
    "TURNS_EXHAUSTED": "it has as many of this router in flight as it takes",
}
_ROLES: Final = {
    common_pb2.ENGINE_ROLE_PREFILL: "prefill",
    common_pb2.ENGINE_ROLE_DECODE: "decode",
    common_pb2.ENGINE_ROLE_BOTH: "both",
}


class EngineListener(Protocol):
    """Hears which engines have sessions with the lease service."""

    def all_announced(self, engines: Sequence[AnnouncedEngine]) -> None:
        """These are all that have a session now; called at the start of each router session."""

    def announced(self, engines: Sequence[AnnouncedEngine]) -> None:
        """These came or changed."""

    def gone(self, engine_ids: Sequence[str]) -> None:
        """The sessions of these ended."""


class RouterSession:
    """Tells the lease service of this router's turns, and asks it about them.

    `router_id` names the process in logs of the lease service, `version` says what it runs.
    `question_deadline_ms` bounds what a turn waits for its answer. `clock_ns`
    is CLOCK_BOOTTIME. `channels` must be running.
    """

    def __init__(
        self,
        channels: LeaseChannels,
        *,
        router_id: str,
        question_deadline_ms: int,
        listener: EngineListener,
        clock_ns: Callable[[], int],
        version: str = "",
    ) -> None:
        self.channels = channels
        self._listener = listener
        self._clock_ns = clock_ns
        self.turns = SessionTurns(
            router_id=router_id, question_deadline_ms=question_deadline_ms, version=version
        )
        self._loop = asyncio.get_running_loop()
        self._gathered = asyncio.Event()
        self._silent = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._end_pause: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._endpoint = ""
        self._problems: set[str] = set()
        self._refused = ""
        self.sessions = 0
        """Counts sessions begun: what was known in one may be forgotten in the next."""
        self._names = ", ".join(channels.leader.endpoints)

    def start(self) -> None:
        """Opens the session, and whenever it ends the next one."""
        self._task = self._loop.create_task(self._sessions())

    async def stop(self) -> None:
        """Ends the session once all is said and heard; turns in flight are over with it.

        The end of a turn that was told too late would let its conversation's next turn, on another
        router, miss its grant.
        """
        for timer in (self._deadline, self._end_pause):
            if timer is not None:
                timer.cancel()
        self._stopping = True
        self._gathered.set()
        if self._task is not None:
            if self._endpoint:
                await asyncio.wait((self._task,), timeout=_LAST_WORDS_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.turns.nobody_answers(Verdict.LEASE_SERVICE_UNREACHABLE)

    @property
    def settled(self) -> bool:
        """Whether a session has begun, or nobody was found to begin one with."""
        return self.sessions > 0 or not self.turns.answering

    @property
    def up(self) -> bool:
        """Whether there is a session now, and turns are answered on it."""
        return bool(self._endpoint) and self.turns.answering

    # --- turns ------------------------------------------------------------------------------------

    def begin(
        self,
        key: ConversationKey,
        points: Sequence[bytes],
        *,
        recognise: bool,
        reuse: bool,
        on_retained: Callable[[Retained], None] | None = None,
        trace: bytes = b"",
    ) -> SessionTurn:
        """Tells that a turn begins; `end` must follow, whatever happens.

        `points`, `recognise` and `reuse` are as in lease.proto's BeginTurn, `trace` is as
        `turn_trace` returns it. `on_retained` is called if the turn's retention is granted before
        its end.
        """
        turn = self.turns.begin(
            key,
            points,
            self._clock_ns(),
            recognise=recognise,
            reuse=reuse,
            on_retained=on_retained,
            trace=trace,
        )
        self._gathered.set()
        if self._deadline is None and turn.resolution is None:
            self._arm()
        return turn

    async def resolution(self, turn: SessionTurn) -> Resolution:
        """Waits, at most for the question deadline, for what the turn can reuse. Never raises.

        Without an answer in time the verdict is LEASE_SERVICE_UNREACHABLE or
        STORE_UNAVAILABLE. To be asked once per turn.
        """
        if turn.resolution is None:
            waiter: asyncio.Future[None] = self._loop.create_future()
            turn.on_resolved = partial(_wake, waiter)
            await waiter
        assert turn.resolution is not None
        return turn.resolution

    def end(
        self,
        turn: SessionTurn,
        *,
        retains: bool = False,
        report: TurnReport | None = None,
    ) -> None:
        """Tells that a turn is over.

        `retains`: decode will retain its KV. `report`: how it was served, None
        if it was not.
        """
        self.turns.end(turn, retains=retains, report=report)
        if self._end_pause is None:
            self._end_pause = self._loop.call_later(_END_PAUSE_S, self._send_ends)

    def _send_ends(self) -> None:
        self._end_pause = None
        self._gathered.set()

    # --- deadlines --------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Sets the one timer of all waits: for the first that may be over."""
        self._deadline = None
        due_ns = self.turns.next_deadline_ns()
        if due_ns is not None:
            wait_s = max(due_ns - self._clock_ns(), 0) / 1e9
            self._deadline = self._loop.call_later(wait_s, self._expire, due_ns)

    def _expire(self, due_ns: int, again: bool = False) -> None:
        now_ns = self._clock_ns()
        if now_ns > due_ns + _STALL_NS and not again:
            # This process stood still: the answers may be there, unread.
            self._deadline = self._loop.call_later(_STALL_NS / 1e9, self._expire, due_ns, True)
            return
        silent_since_ns = self.turns.expire(now_ns)
        if silent_since_ns is not None:
            self._tell("it is silent")
            if self._endpoint:
                self.channels.silent(self._endpoint, silent_since_ns)
                self._silent.set()
        self._arm()

    # --- sessions ---------------------------------------------------------------------------------

    async def _sessions(self) -> None:
        """One session after the other, for as long as the router runs."""
        pause_s = _RECONNECT_S_MIN
        tried: list[str] = []
        verdict = Verdict.LEASE_SERVICE_UNREACHABLE
        while not self._stopping:
            endpoint = self.channels.leader.next(tried)
            if endpoint is None:
                self.turns.nobody_answers(verdict)
                tried.clear()
                verdict = Verdict.LEASE_SERVICE_UNREACHABLE
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RECONNECT_S_MAX)
                continue
            tried.append(endpoint)
            began, store_unavailable = await self._whole_session(endpoint)
            if began:
                tried.clear()
                pause_s = _RECONNECT_S_MIN
                # A service that ends each session at once is not asked in a busy loop.
                await asyncio.sleep(pause_s)
            if store_unavailable:
                verdict = Verdict.STORE_UNAVAILABLE

    async def _whole_session(self, endpoint: str) -> tuple[bool, bool]:
        """Returns whether it had begun, and whether there was no store to begin it with."""
        asked_ns = self._clock_ns()
        store_unavailable = False
        channel = self.channels.connect(endpoint)
        problem = ""
        try:
            await self._hold_session(endpoint, channel)
        except grpc.aio.AioRpcError as error:
            turned_away = self.channels.refused(endpoint, error, asked_ns)
            store_unavailable = turned_away is not None and turned_away.store_unavailable
            problem = str(turned_away or self.channels.problem(error))
        except TimeoutError:
            self.channels.silent(endpoint, asked_ns)
            problem = "it is silent"
        except (asyncio.InvalidStateError, ConnectionError) as error:
            self.channels.lost(endpoint)
            problem = str(error) or "the connection broke"
        except Exception:
            # What one session brought does not end those after it.
            logger.exception("the session with the lease service failed")
            problem = "a fault of the router"
        finally:
            began, self._endpoint = bool(self._endpoint), ""
            self.turns.close()
            await channel.close(None)
        if problem:
            self._tell(problem)
        return began, store_unavailable

    async def _hold_session(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        """Returns when another endpoint leads or all is said; raises if it ends otherwise."""
        open_stream = channel.stream_stream(
            "/kvturn.v1.LeaseService/RouterSession",
            request_serializer=bytes,  # session_wire.py has written it
            response_deserializer=lease_pb2.RouterSessionResponse.FromString,
        )
        call = open_stream(metadata=self.channels.metadata)  # type: ignore[call-arg]
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                with contextlib.suppress(asyncio.InvalidStateError):  # Refused: it is read why.
                    await call.write(self.turns.open())
                first = await call.read()
            if not isinstance(first, lease_pb2.RouterSessionResponse):
                raise ConnectionError("the session ended at once")
            self._endpoint = endpoint
            self.sessions += 1
            self._silent.clear()
            self.channels.leads(endpoint)
            self._receive(first, first=True)
            self._tell("")
            self._gathered.set()
            await self._until_over(endpoint, call)
        finally:
            call.cancel()

    async def _until_over(self, endpoint: str, call: "_Call") -> None:
        moved = asyncio.ensure_future(self.channels.another_leads(endpoint))
        parts = [
            asyncio.ensure_future(part)
            for part in (self._read(call), self._write(call), self._until_silent())
        ]
        try:
            await asyncio.wait((moved, *parts), return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                if part.done():
                    part.result()
                    if not self._stopping:
                        raise ConnectionError("the session ended")
        finally:
            for part in (moved, *parts):
                part.cancel()
            await asyncio.gather(moved, *parts, return_exceptions=True)

    async def _write(self, call: "_Call") -> None:
        while True:
            await self._gathered.wait()
            self._gathered.clear()
            request = self.turns.take()
            if request is not None:
                await call.write(request)
                await asyncio.sleep(_PACE_S)
            if self._stopping and not self._gathered.is_set():
                await call.done_writing()
                # Once the service has read all it ends the stream.
                await self._loop.create_future()

    async def _read(self, call: "_Call") -> None:
        while isinstance(response := await call.read(), lease_pb2.RouterSessionResponse):
            self._receive(response, first=False)

    async def _until_silent(self) -> None:
        """Returns when an answer was missed and nothing came for a while after."""
        while True:
            await self._silent.wait()
            self._silent.clear()
            await asyncio.sleep(_SILENCE_S)
            if not self.turns.answering:
                raise ConnectionError("it is silent")

    def _receive(self, response: lease_pb2.RouterSessionResponse, *, first: bool) -> None:
        answering = self.turns.answering
        self.turns.receive(response, self._clock_ns())
        if not answering:
            self.channels.leads(self._endpoint)
            self._tell("")
        if self.turns.refused != self._refused:
            self._refused = self.turns.refused
            logger.warning(
                "the lease service refuses turns: %s", _REFUSALS.get(self._refused, self._refused)
            )
        if first or response.engines:
            engines = [_announced(engine) for engine in response.engines]
            (self._listener.all_announced if first else self._listener.announced)(engines)
        if response.engines_gone:
            self._listener.gone(list(response.engines_gone))

    def _tell(self, problem: str) -> None:
        # One line for each reason in an outage, not per turn or attempt.
        if not problem and self._problems:
            logger.warning("the lease service at %s answers again", self._names)
            self._problems.clear()
        elif problem and problem not in self._problems and len(self._problems) < _PROBLEMS_MAX:
            self._problems.add(problem)
            logger.warning(
                "no session with the lease service at %s: %s; turns recompute until there is one",
                self._names,
                problem,
            )


def _announced(engine: lease_pb2.Engine) -> AnnouncedEngine:
    about = engine.description
    return AnnouncedEngine(
        about.engine_id, _ROLES.get(about.role, ""), about.http_address, engine.draining
    )


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

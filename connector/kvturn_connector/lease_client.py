"""The connector's I/O with the lease service: one thread with one event loop.

vLLM's scheduler thread never waits for it. It hands over work with `ask`, `retain` and so on,
which return at once, and picks results up from bounded queues on its next pass. The thread and the
gRPC channels are made in the process that uses them, so a fork before that does no harm.

Questions and the session follow the leader (kvturn/lease_channels.py). Each session has a
connection of its own: a dead one is not met twice, and a long inventory holds up no question.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import grpc

from kvturn.clock import boottime_ns
from kvturn.lease_channels import LeaseChannels, Unanswered
from kvturn.span_wire import CLIENT, INTERNAL
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn_connector.config import NS_PER_MS, NS_PER_S, ConnectorConfig
from kvturn_connector.digest import (
    DIGEST_BYTES,
    STRIDE_TOKENS,
    Scope,
    common_prefix_tokens,
    digest_values,
)
from kvturn_connector.reader import Answer, End
from kvturn_connector.retention import Freed
from kvturn_connector.tally import DIGEST, QUESTION
from kvturn_connector.telemetry import make_tracing, metadata_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from kvturn.metrics import Family
    from kvturn.span_export import SpanQueue
    from kvturn.span_wire import Attribute
    from kvturn.tracing import Tracing
    from kvturn.v1.lease_pb2_grpc import LeaseServiceAsyncStub
    from kvturn_connector.session import EngineSession

    SessionCall = grpc.aio.StreamStreamCall[
        lease_pb2.EngineSessionRequest, lease_pb2.EngineSessionResponse
    ]

logger = logging.getLogger("vllm.kvturn")

T = TypeVar("T")

RECONNECT_MIN_S = 0.1
RECONNECT_MAX_S = 0.5
"""Pause after all endpoints were tried: a leader that is back is found within two heartbeats."""
OPEN_TIMEOUT_S = 2.0
QUIET_HEARTBEATS = 1.5
"""Nothing heard for so many heartbeats: whether the leader still leads is asked."""
TURNED_AWAY = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
"""Refusals of a Register that the next one would meet too, most of all SESSION_FENCED: another
process has taken the engine's name."""
END_READ_TIMEOUT_S = 1.0
END_READ_ATTEMPTS = 5
"""Within the 3 s after which the lease service takes a read for over; silence fails at once."""
REASONS_TOLD_MAX = 8
"""Reasons why there is no session that are told, each once an outage."""
SEND_QUEUE_MAX = 10_000
TASKS_MAX = 10_000
JOIN_TIMEOUT_S = 5.0
DRAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Question:
    """What BeginRead is asked with, and what its answer is compared with."""

    request_id: str
    lease_id: str
    conversation: common_pb2.ConversationKey
    prompt_ids: Sequence[int]
    scope: Scope
    traceparent: str
    asked_ns: int = 0
    """When it was asked; an answer is taken only for the question of that instant."""


class LeaseClient:
    """Talks to the lease service for one engine."""

    def __init__(
        self,
        config: ConnectorConfig,
        engine_id: str,
        session: EngineSession,
        clock: Callable[[], int] = boottime_ns,
        wake_engine: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            wake_engine: makes an idle engine take a step; called when blocks can go back.
        """
        self._config = config
        self._wake_engine = wake_engine
        self._engine_id = engine_id
        self._session = session
        self._clock = clock
        self._answers: deque[tuple[Question, Answer | int]] = deque()
        self._freed: deque[Freed] = deque()
        self._timings: deque[tuple[Family, float]] = deque(maxlen=TASKS_MAX)
        self._withdrawing: dict[int, int] = {}
        self._reading: set[int] = set()
        self._outlooks: dict[int, int] = {}
        self._outbox = asyncio.Queue[lease_pb2.EngineSessionRequest](SEND_QUEUE_MAX)
        self._channels: LeaseChannels
        self._tracing: Tracing
        self._spans: SpanQueue | None = None
        self._spans_told = {"sent": 0, "dropped": 0}
        self._endpoint = ""
        self._heard_ns = 0
        self._quiet_ns = 0
        self._turned_away = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._died_ns = 0
        self._thread = threading.Thread(target=self._run, name="kvturn-lease-client", daemon=True)
        self._thread.start()
        self._started.wait(JOIN_TIMEOUT_S)

    # --- called by the scheduler thread; none of these waits -------------------------------------

    @property
    def registered(self) -> bool:
        """True while the engine has a session with the lease service."""
        return self._session.registered

    @property
    def silent(self) -> bool:
        """True while the lease service does not answer: nothing is released at its word."""
        return self._session.silent(self._clock())

    @property
    def vouching(self) -> bool:
        """False once the thread has ended and all that it vouched for has run out."""
        if self._thread.is_alive():
            return True
        return self._clock() < self._died_ns + self._session.hold_after_vouch_ns

    def ask(self, question: Question) -> None:
        """Sends BeginRead; the answer comes out of `take_answers`."""
        self._spawn(lambda: self._begin_read(question))

    def end_read(self, end: End) -> None:
        """Sends EndRead, again if need be."""
        self._spawn(lambda: self._end_read(end))

    def retain(
        self,
        number: int,
        offer: common_pb2.Retention,
        token_ids: Sequence[int],
        scope: Scope,
        traceparent: str,
    ) -> None:
        """Digests the tokens of a finished request and grants a lease on its blocks."""
        self._call(lambda: self._retain(number, offer, token_ids, scope, traceparent))

    def withdraw(self, number: int, reason: int) -> None:
        """Gives a retention up and asks for its release."""
        self._call(lambda: self._withdraw(number, reason))

    def notice(self, lease_id: str) -> None:
        """All ranks have been told that the lease's blocks were read."""
        self._call(lambda: self._send(self._session.notice(lease_id)))

    def take_answers(self) -> list[tuple[Question, Answer | int]]:
        """Answers to questions since the last call; a verdict where there was none."""
        return _drain(self._answers)

    @property
    def has_freed(self) -> bool:
        """True if `take_freed` would return something."""
        return bool(self._freed)

    def take_freed(self) -> list[Freed]:
        """Retentions freed since the last call; their blocks go back to the pool."""
        return _drain(self._freed)

    def take_reading(self) -> list[int]:
        """Withdrawn retentions that were said, since the last call, to be still read."""
        numbers = []
        while self._reading:
            numbers.append(self._reading.pop())
        return numbers

    def take_timings(self) -> list[tuple[Family, float]]:
        """How long, in seconds, questions and digests took since the last call."""
        return _drain(self._timings)

    def take_spans(self) -> list[tuple[str, int]]:
        """How many spans were "sent" and "dropped" since the last call; nothing for none."""
        if self._spans is None:
            return []
        now = {"sent": self._spans.sent, "dropped": self._spans.dropped}
        before, self._spans_told = self._spans_told, now
        return [(each, count - before[each]) for each, count in now.items() if count > before[each]]

    def take_outlooks(self) -> list[tuple[int, int]]:
        """Retentions whose outlook has changed since the last call, with the new one."""
        changes = []
        while self._outlooks:
            changes.append(self._outlooks.popitem())
        return changes

    def gave_way(self, traceparent: str, attributes: Mapping[str, int]) -> None:
        """Notes in the trace of the turn that needed memory what was given up for it."""
        now_ns = time.time_ns()

        def note() -> None:
            span = self._tracing.span(traceparent, "give_way", INTERNAL, now_ns)
            span.end(attributes, ended_ns=now_ns)

        self._call(note)

    def shutdown(self) -> None:
        """Ends the session and the thread, within a few seconds."""
        self._call(lambda: self._main_task.cancel())
        self._thread.join(JOIN_TIMEOUT_S)

    # --- on the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._main_task = self._loop.create_task(self._main())
                self._loop.run_until_complete(self._main_task)
        except Exception:
            logger.exception("kvturn: the lease client ended; decode's KV is no longer offered")
        finally:
            self._session.close()
            self._died_ns = self._clock()
            self._started.set()
            self._loop.close()

    async def _main(self) -> None:
        self._tracing = make_tracing(self._config.traces, self._engine_id)
        self._spans = self._tracing.queue
        self._channels = LeaseChannels(
            self._config.lease_endpoints, self._clock, self._config.lease_access
        )
        self._started.set()
        # None ends by itself. If one fails the thread ends, and all vouching with it.
        endless = [
            asyncio.create_task(each)
            for each in (self._sessions(), self._tick(), self._channels.run())
        ]
        try:
            await asyncio.gather(*endless)
        finally:
            pending = [*endless, *self._tasks]
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await self._channels.close(grace_s=0.2)
            # gRPC ends what was cancelled a moment later, and then needs the event loop: one that
            # is closed breaks the loops of other clients in the process.
            await asyncio.sleep(DRAIN_S)
            self._tracing.shutdown()

    async def _sessions(self) -> None:
        """One session after the other, for as long as the engine lives."""
        pause_s = RECONNECT_MIN_S
        tried: list[str] = []
        told: set[str] = set()
        while True:
            endpoint = self._channels.leader.next(tried)
            if endpoint is None:
                tried.clear()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RECONNECT_MAX_S)
                continue
            tried.append(endpoint)
            reason = await self._whole_session(endpoint)
            registered = self._session.registered
            if registered:
                told.clear()
            if reason not in told and len(told) < REASONS_TOLD_MAX:
                told.add(reason)
                logger.warning(
                    "kvturn: no session with the lease service at %s: %s; turns recompute "
                    "until there is one",
                    endpoint,
                    reason,
                )
            self._session.close()
            if registered:
                tried.clear()
                pause_s = RECONNECT_MIN_S
                await asyncio.sleep(pause_s)
            elif self._turned_away:
                # Each Register vouches: without a pause what is held would be held for ever.
                await asyncio.sleep(self._session.hold_after_vouch_ns / NS_PER_S)

    async def _whole_session(self, endpoint: str) -> str:
        """Returns why it ended. Whom to try next is up to what the channels have heard."""
        began_ns = self._clock()
        self._turned_away = False
        try:
            await self._one_session(endpoint)
        except grpc.aio.AioRpcError as error:
            self._channels.refused(endpoint, error, began_ns)
            self._turned_away = error.code() in TURNED_AWAY
            return self._channels.problem(error)
        except TimeoutError:
            self._channels.silent(endpoint, began_ns)
            return "no connection in time"
        except (asyncio.InvalidStateError, ConnectionError) as error:
            return str(error) or "no connection"
        except Exception:
            # What one session brought does not end those after it.
            logger.exception("kvturn: the session with the lease service failed")
            return "an error of the connector"
        return "the stream ended"

    async def _one_session(self, endpoint: str) -> None:
        """Holds a session for as long as no other endpoint is known to lead."""
        channel = self._channels.connect(endpoint)
        session = asyncio.create_task(self._hold_session(endpoint, channel))
        moved = asyncio.create_task(self._channels.another_leads(endpoint))
        try:
            await asyncio.wait((session, moved), return_when=asyncio.FIRST_COMPLETED)
            if not session.done():
                raise ConnectionError("another one leads")
            session.result()
        finally:
            session.cancel()
            moved.cancel()
            await asyncio.gather(session, moved, return_exceptions=True)
            await channel.close(None)

    async def _hold_session(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        problem = await self._channels.check(endpoint, channel)
        if problem:
            raise ConnectionError(problem)
        stub = cast("LeaseServiceAsyncStub", lease_pb2_grpc.LeaseServiceStub(channel))
        call = stub.EngineSession(metadata=self._channels.metadata)  # type: ignore[call-arg]
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            self._outbox = asyncio.Queue(SEND_QUEUE_MAX)
            # Not before: from here on all that is held counts as vouched for, and without a
            # lease service that leads it must run out.
            await call.write(self._session.open(self._clock()))
        writer = asyncio.create_task(self._write(call))
        watch = asyncio.create_task(self._read(endpoint, call))
        broken = asyncio.create_task(self._until_broken())
        try:
            await asyncio.wait((writer, watch, broken), return_when=asyncio.FIRST_COMPLETED)
            for task in (watch, writer):
                if task.done():
                    task.result()
            if broken.done():
                raise ConnectionError("silent for a session TTL, or out of sequence")
        finally:
            for task in (writer, watch, broken):
                task.cancel()
            await asyncio.gather(writer, watch, broken, return_exceptions=True)

    async def _write(self, call: SessionCall) -> None:
        while True:
            await call.write(await self._outbox.get())

    async def _read(self, endpoint: str, call: SessionCall) -> None:
        self._endpoint = endpoint
        while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            assert isinstance(response, lease_pb2.EngineSessionResponse)
            self._send(self._session.receive(response, self._clock()))
            self._heard_ns = self._clock()
            if response.HasField("registered") and self._session.registered:
                heartbeat_ns = response.registered.heartbeat_interval.ToNanoseconds()
                self._quiet_ns = round(QUIET_HEARTBEATS * heartbeat_ns)
                self._channels.leads(endpoint)
                logger.info("kvturn: registered with %s", endpoint)

    async def _until_broken(self) -> None:
        while not self._session.broken:
            await self._wake.wait()
            self._wake.clear()

    async def _tick(self) -> None:
        while True:
            self._send(self._session.tick(self._clock()))
            if self._session.registered and self._clock() > self._heard_ns + self._quiet_ns:
                self._channels.doubt(self._endpoint)
            delay_ns = self._session.next_deadline_ns() - self._clock()
            await asyncio.sleep(max(delay_ns, NS_PER_MS) / NS_PER_S)

    def _send(self, requests: list[lease_pb2.EngineSessionRequest]) -> None:
        self._give_back(self._session.retentions.take_freed())
        # Only what concerns retentions: no more than there are, however long nobody takes them.
        self._reading |= self._session.take_reading()
        self._outlooks |= self._session.take_outlooks()
        for request in requests:
            try:
                self._outbox.put_nowait(request)
            except asyncio.QueueFull:
                # The stream stands still; a gap would end the session anyhow.
                self._session.broken = True
        if self._session.broken:
            self._wake.set()

    def _give_back(self, freed: list[Freed]) -> None:
        """Hands retentions to the scheduler thread, which may be asleep for want of requests."""
        if freed:
            self._freed.extend(freed)
            self._wake_engine()

    def _retain(
        self,
        number: int,
        offer: common_pb2.Retention,
        token_ids: Sequence[int],
        scope: Scope,
        traceparent: str,
    ) -> None:
        span = self._tracing.span(traceparent, "grant", CLIENT)
        offer.digests.stride_tokens = STRIDE_TOKENS
        offer.digests.digest_bytes = DIGEST_BYTES
        try:
            with self._timed():
                offer.digests.values = digest_values(token_ids, scope, self._config.secret)
        except Exception:
            # Whatever it is, decode must not hold blocks that nobody will ever release.
            logger.exception("kvturn: a retention cannot be offered; its blocks go back")
            self._give_back([Freed(number, common_pb2.RELEASE_REASON_REVOKED)])
            span.end(_about(offer), fault="cannot be offered")
            return
        self._send(self._session.retain(number, offer, self._clock(), span.traceparent or ""))
        if span.recorded:
            span.end({**_about(offer), "kvturn.lease_id": offer.lease_id})

    def _withdraw(self, number: int, reason: int) -> None:
        # A step can give up thousands, and each heartbeat lists them all: one for all that the
        # scheduler thread has handed over by now.
        if not self._withdrawing:
            self._loop.call_soon(self._send_withdrawals)
        self._withdrawing.setdefault(number, reason)

    def _send_withdrawals(self) -> None:
        withdrawing, self._withdrawing = self._withdrawing, {}
        self._send(self._session.withdraw_all(withdrawing, self._clock()))

    async def _begin_read(self, question: Question) -> None:
        span = self._tracing.span(question.traceparent, "begin_read", CLIENT)
        told: dict[str, Attribute] = {"kvturn.lease_id": question.lease_id}
        fault: str | None = None
        result: Answer | int
        try:
            response = await self._channels.ask(
                lambda stub: stub.BeginRead,
                lease_pb2.BeginReadRequest(
                    lease_id=question.lease_id,
                    conversation=question.conversation,
                    reader_engine_id=self._engine_id,
                ),
                timeout_s=self._config.question_deadline_ns / NS_PER_S,
                metadata=metadata_of(span),
            )
            result = self._answer(question, response)
            told["kvturn.granted"] = response.granted
            if response.granted:
                told["kvturn.common_tokens"] = result.common_tokens
            else:
                told["kvturn.verdict"] = _verdict_name(response.verdict)
        except Unanswered as problem:
            result = common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE
            if problem.store_unavailable:
                result = common_pb2.VERDICT_STORE_UNAVAILABLE
            fault = told["error.type"] = problem.reason
        except grpc.aio.AioRpcError as error:
            result = common_pb2.VERDICT_LEASE_SERVICE_UNREACHABLE
            told["rpc.grpc.status_code"] = error.code().value[0]
            fault = told["error.type"] = error.code().name
        span.end(told, fault=fault)
        self._answers.append((question, result))

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began_ns = self._clock()
        yield
        self._timings.append((DIGEST, (self._clock() - began_ns) / NS_PER_S))

    def _answer(self, question: Question, response: lease_pb2.BeginReadResponse) -> Answer:
        self._timings.append((QUESTION, (self._clock() - question.asked_ns) / NS_PER_S))
        return Answer(
            granted=response.granted,
            verdict=response.verdict,
            retention=response.retention,
            nixl=response.nixl,
            longest_read_ns=response.longest_read.ToNanoseconds(),
            common_tokens=self._common_tokens(question, response) if response.granted else 0,
        )

    def _common_tokens(self, question: Question, response: lease_pb2.BeginReadResponse) -> int:
        """What digests that cannot be compared prove: nothing. The grant is then given back."""
        retention = response.retention
        if retention.digests.stride_tokens != STRIDE_TOKENS:
            return 0
        try:
            with self._timed():
                return common_prefix_tokens(
                    question.prompt_ids,
                    question.scope,
                    self._config.secret,
                    retention.digests.values,
                    retention.token_count,
                )
        except ValueError as error:
            logger.warning("kvturn: lease %s cannot be compared: %s", question.lease_id, error)
            return 0

    async def _end_read(self, ended: End) -> None:
        end = ended.request
        metadata: tuple[tuple[str, str], ...] = ()
        if ended.posted_unix_ns:
            began_ns = ended.posted_unix_ns
            span = self._tracing.span(ended.traceparent, "kv_read", INTERNAL, began_ns)
            metadata = metadata_of(span)
            if span.recorded:
                failed = end.outcome != lease_pb2.READ_OUTCOME_COMPLETED
                told = _about_read(ended)
                span.end(
                    told,
                    fault=str(told["kvturn.read_outcome"]) if failed else None,
                    ended_ns=began_ns + end.read_time.ToNanoseconds(),
                )
        for attempt in range(END_READ_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RECONNECT_MIN_S * 2**attempt)
            # Not told in the end: the lease service ends the read by itself at K*R.
            with contextlib.suppress(Unanswered, grpc.aio.AioRpcError):
                await self._channels.ask(
                    lambda stub: stub.EndRead,
                    end,
                    timeout_s=END_READ_TIMEOUT_S,
                    metadata=metadata,
                )
                return

    # --- crossing over ------------------------------------------------------------------------

    def _spawn(self, make: Callable[[], Coroutine[None, None, None]]) -> None:
        def start() -> None:
            if len(self._tasks) >= TASKS_MAX:
                return  # The deadline of whoever waits is the way out.
            task = self._loop.create_task(make())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._call(start)

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: shutting down.
            self._loop.call_soon_threadsafe(function)


def _drain(queue: deque[T]) -> list[T]:
    items = []
    while queue:
        items.append(queue.popleft())
    return items


def _about_read(end: End) -> dict[str, Attribute]:
    request = end.request
    read_ns = request.read_time.ToNanoseconds()
    outcome = lease_pb2.ReadOutcome.Name(request.outcome)
    return {
        "kvturn.lease_id": request.lease_id,
        "kvturn.read_outcome": outcome.removeprefix("READ_OUTCOME_").lower(),
        "kvturn.reused_tokens": request.reused_tokens,
        "kvturn.read_blocks": end.blocks,
        "kvturn.read_bytes": request.read_bytes,
        "kvturn.read_ms": read_ns / NS_PER_MS,
        "kvturn.read_bytes_per_s": request.read_bytes * NS_PER_S / read_ns if read_ns else 0.0,
    }


def _verdict_name(verdict: common_pb2.Verdict) -> str:
    return common_pb2.Verdict.Name(verdict).removeprefix("VERDICT_").lower()


def _about(offer: common_pb2.Retention) -> dict[str, Attribute]:
    return {
        "gen_ai.conversation.id": offer.conversation.conversation_id,
        "kvturn.turn": offer.turn,
        "kvturn.retained_tokens": offer.token_count,
        "kvturn.retained_blocks": sum(len(group.block_ids) for group in offer.groups),
        "kvturn.local_tokens": offer.local_cached_tokens,
    }

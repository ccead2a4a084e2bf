"""The lease service over real gRPC on a free port: wire contract, statuses, streams, process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from awake import within
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from opentelemetry.proto.trace.v1 import trace_pb2
from recorded_spans import Recording, told

from kvturn.clock import boottime_ns
from kvturn.otlp import Destination
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn_lease.__main__ import main
from kvturn_lease.config import ConfigError, LeaseConfig, LessorConfig, parse_config
from kvturn_lease.errors import NotLeader, StreamSlow
from kvturn_lease.lessor import Lessor
from kvturn_lease.server import LeaseServer, ListenError
from kvturn_lease.servicer import LeaseServicer
from kvturn_lease.session_stream import SessionStream
from kvturn_lease.store import MemoryStore
from kvturn_lease.telemetry import make_tracing
from kvturn_lease.verdict import ReadOutcome, ReleaseReason, Verdict

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvturn.tracing import Tracing

S = 1_000_000_000
MS = 1_000_000
TERM = 7
CONFIG = LeaseConfig(port=0, shutdown_grace_ns=200 * MS)
QUICK = replace(CONFIG, lessor=LessorConfig(session_ttl_ns=200 * MS, heartbeat_ns=50 * MS))
KEY = common_pb2.ConversationKey(tenant="t", model="m", conversation_id="c")
GUARD_S = 120


class HeldClock:
    """Stands still until it is let go: what a test does before takes no time, however slow."""

    def __init__(self) -> None:
        self._start_ns = boottime_ns()
        self._let_go_ns: int | None = None

    def __call__(self) -> int:
        if self._let_go_ns is None:
            return self._start_ns
        return self._start_ns + boottime_ns() - self._let_go_ns

    def let_go(self) -> None:
        self._let_go_ns = boottime_ns()


class Service:
    """A running lease service and a stub to it."""

    def __init__(
        self,
        config: LeaseConfig,
        clock_ns: Callable[[], int] = boottime_ns,
        tracing: Tracing | None = None,
    ) -> None:
        tracing = tracing or make_tracing(None)
        self.lessor = Lessor(config.lessor, TERM)
        self.store = MemoryStore()
        self.servicer = LeaseServicer(config, self.lessor, self.store, clock_ns, tracing)
        self.server = LeaseServer(config, self.servicer, tracing)
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Service]:
        self.port = await self.server.start()
        async with self.channel() as channel:
            self.stub: Any = lease_pb2_grpc.LeaseServiceStub(channel)
            try:
                yield self
            finally:
                await self.server.stop()

    def channel(self, *options: tuple[str, int]) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=list(options))

    def engine(self, name: str = "d1", stub: Any = None) -> RawEngine:
        return RawEngine(stub or self.stub, name)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with Service(CONFIG).running() as running:
        yield running


class RawEngine:
    """One session stream, message by message."""

    def __init__(self, stub: Any, name: str, number: int = 1) -> None:
        self.name = name
        self.number = number
        self.sequence = 0
        self.call = stub.EngineSession()
        self.last: lease_pb2.EngineSessionResponse | None = None
        self.before: list[lease_pb2.EngineSessionResponse] = []
        """What came before the answers to heartbeats, not yet looked at."""

    def description(self) -> lease_pb2.EngineDescription:
        return lease_pb2.EngineDescription(
            engine_id=self.name,
            incarnation=f"inc-{self.name}",
            role=common_pb2.ENGINE_ROLE_DECODE,
            http_address="http://127.0.0.1:8200",
            nixl=common_pb2.NixlAddress(
                nixl_engine_id="n", host="127.0.0.1", port=5600, tp_size=1, dcp_size=1, pp_size=1
            ),
            model="m",
            kv_blocks=100,
            block_size=16,
        )

    def lease_id(self, number: int) -> str:
        return f"inc-{self.name}.{number}.{self.number}"

    def retention(self, number: int, tokens: int = 40) -> common_pb2.Retention:
        points = -(-tokens // 16)
        return common_pb2.Retention(
            lease_id=self.lease_id(number),
            conversation=KEY,
            token_count=tokens,
            block_size=16,
            groups=[common_pb2.BlockGroup(block_ids=range(7, 7 + points))],
            digests=common_pb2.TokenDigests(
                stride_tokens=16, digest_bytes=16, values=bytes(range(16)) * points
            ),
            prompt_tokens=tokens - 1,
            turn=number,
        )

    async def send(self, **message: Any) -> None:
        self.sequence += 1
        await self.call.write(
            lease_pb2.EngineSessionRequest(
                session_number=self.number, sequence=self.sequence, **message
            )
        )

    async def read(self) -> lease_pb2.EngineSessionResponse:
        self.last = await asyncio.wait_for(self.call.read(), GUARD_S)
        assert isinstance(self.last, lease_pb2.EngineSessionResponse)
        return self.last

    async def register(self, **more: Any) -> lease_pb2.EngineSessionResponse:
        register = lease_pb2.RegisterEngine(engine=self.description(), **more)
        await self.send(register=register)
        return await self.read()

    async def beat(self, **more: Any) -> lease_pb2.EngineSessionResponse:
        assert self.last is not None
        heartbeat = lease_pb2.Heartbeat(
            echo_term=self.last.term, echo_sequence=self.last.sequence, **more
        )
        await self.send(heartbeat=heartbeat)
        while not (response := await self.read()).HasField("heartbeat_ack"):
            self.before.append(response)
        return response

    async def up(self) -> RawEngine:
        await self.register()
        await self.beat()
        return self

    async def grant(self, number: int = 1, **more: Any) -> str:
        """Announces a retention, and waits until the service has taken it."""
        await self.send(grant=lease_pb2.Grant(retention=self.retention(number), **more))
        await self.beat()
        return self.lease_id(number)

    async def release(self) -> lease_pb2.Release:
        """Returns the next release."""
        while True:
            response = self.before.pop(0) if self.before else await self.read()
            if response.HasField("release"):
                return response.release

    async def error(self) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo]:
        """Returns how the service ended the stream."""
        while True:
            try:
                if await asyncio.wait_for(self.call.read(), GUARD_S) is grpc.aio.EOF:
                    break
            except grpc.aio.AioRpcError:
                break
        details = dict(await self.call.trailing_metadata())["grpc-status-details-bin"]
        info = error_details_pb2.ErrorInfo()
        assert status_pb2.Status.FromString(details).details[0].Unpack(info)
        assert info.domain == "kvturn.v1"
        return await self.call.code(), info


async def refused(call: Any) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo]:
    """Returns the status and ErrorInfo of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(raised.value)  # type: ignore[arg-type]
    assert status is not None
    assert status.details[0].Unpack(info)
    assert info.domain == "kvturn.v1"
    return raised.value.code(), info


def resolve(key: common_pb2.ConversationKey = KEY, **more: Any) -> Any:
    return lease_pb2.ResolveConversationRequest(conversation=key, **more)


def begin(lease_id: str, key: common_pb2.ConversationKey = KEY) -> lease_pb2.BeginReadRequest:
    return lease_pb2.BeginReadRequest(lease_id=lease_id, conversation=key, reader_engine_id="p1")


# ---- the life of a turn ----------------------------------------------------------------------


async def test_a_turn_from_grant_to_release(service: Service) -> None:
    """Decode registers and grants; the router resolves; prefill reads; decode is told to free."""
    decode = service.engine()
    registered = await decode.register()
    assert registered.sequence == 1
    assert registered.session_number == 1
    assert registered.term == TERM
    assert registered.registered.session_ttl.seconds == 5
    assert registered.registered.longest_read.seconds == 3
    assert registered.registered.heartbeat_interval.seconds == 1
    acknowledged = await decode.beat(memory=lease_pb2.KvMemory(total_blocks=100, free_blocks=90))
    assert acknowledged.WhichOneof("message") == "heartbeat_ack"

    lease_id = await decode.grant()
    resolved = await service.stub.ResolveConversation(resolve())
    assert resolved.lease_id == lease_id
    assert resolved.verdict == common_pb2.VERDICT_UNSPECIFIED
    assert (resolved.engine_id, resolved.token_count) == ("d1", 40)
    assert resolved.http_address == "http://127.0.0.1:8200"
    assert resolved.longest_read.seconds == 3

    granted = await service.stub.BeginRead(begin(lease_id))
    assert granted.granted
    assert granted.retention == decode.retention(1)
    assert granted.nixl == decode.description().nixl
    assert granted.longest_read.seconds == 3
    again = await service.stub.BeginRead(begin(lease_id))
    assert not again.granted
    assert again.verdict == common_pb2.VERDICT_READ_IN_PROGRESS
    assert not again.HasField("retention")

    end = lease_pb2.EndReadRequest(
        lease_id=lease_id, outcome=lease_pb2.READ_OUTCOME_COMPLETED, reused_tokens=40
    )
    await service.stub.EndRead(end)
    await service.stub.EndRead(end)
    release = await decode.release()
    assert release.lease_id == lease_id
    assert release.reason == common_pb2.RELEASE_REASON_CONSUMED
    after = await service.stub.ResolveConversation(resolve())
    assert (after.lease_id, after.verdict) == ("", common_pb2.VERDICT_CONSUMED)


async def test_of_many_readers_at_once_one_is_granted(service: Service) -> None:
    """Fifty questions race on as many channels' worth of streams."""
    lease_id = await (await service.engine().up()).grant()
    answers = await asyncio.gather(*(service.stub.BeginRead(begin(lease_id)) for _ in range(50)))
    assert sum(answer.granted for answer in answers) == 1


async def test_an_answer_waits_for_the_grant_of_the_expected_turn(service: Service) -> None:
    """The client's next turn came before the grant of the last one."""
    decode = await service.engine().up()
    await decode.grant(1)
    question = asyncio.ensure_future(
        service.stub.ResolveConversation(resolve(expected_turn=2, wait={"seconds": 1}))
    )
    known = await service.stub.ResolveConversation(resolve(expected_turn=1, wait={"seconds": 1}))
    assert known.lease_id == decode.lease_id(1)
    lease_id = await decode.grant(2)
    assert (await question).lease_id == lease_id


async def test_an_answer_waits_no_longer_than_it_may(service: Service) -> None:
    decode = await service.engine().up()
    lease_id = await decode.grant(1)
    late = await service.stub.ResolveConversation(resolve(expected_turn=9, wait={"nanos": 20 * MS}))
    assert late.lease_id == lease_id
    first = await service.stub.ResolveConversation(
        resolve(
            common_pb2.ConversationKey(model="m", conversation_id="new"),
            expected_turn=1,
            wait={"nanos": 20 * MS},
        )
    )
    assert first.verdict == common_pb2.VERDICT_FIRST_TURN


async def test_conversations_are_kept_and_ended(service: Service) -> None:
    decode = await service.engine().up()
    await decode.grant()
    touch = lease_pb2.TouchConversationRequest(conversation=KEY, turns_in_flight_delta=1)
    await service.stub.TouchConversation(touch)
    [lease] = (await service.stub.ListLeases(lease_pb2.ListLeasesRequest())).leases
    assert not lease.HasField("idle_in")
    touch.turns_in_flight_delta = -1
    await service.stub.TouchConversation(touch)
    kept = await service.stub.KeepConversationAlive(
        lease_pb2.KeepConversationAliveRequest(conversation=KEY, absence={"seconds": 120})
    )
    assert kept.kept.ToSeconds() == 120
    ended = await service.stub.EndConversation(lease_pb2.EndConversationRequest(conversation=KEY))
    assert ended.leases_ended == 1
    assert (await decode.release()).reason == common_pb2.RELEASE_REASON_ENDED
    ended = await service.stub.EndConversation(lease_pb2.EndConversationRequest(conversation=KEY))
    assert ended.leases_ended == 0


async def test_it_tells_who_it_is_and_by_which_times_it_goes(service: Service) -> None:
    """Its version, its times, and the routers that have a session."""
    call = service.stub.RouterSession()
    hello = lease_pb2.RouterHello(router_id="r1", version="1.2.3")
    await call.write(lease_pb2.RouterSessionRequest(hello=hello))
    await call.read()
    told = await service.stub.DescribeService(lease_pb2.DescribeServiceRequest())
    assert told.version == version("kvturn-lease")
    assert (told.leads, told.leader, told.refusal) == (True, "", "")
    assert told.times.session_ttl.ToNanoseconds() == CONFIG.lessor.session_ttl_ns
    assert told.times.idle.ToNanoseconds() == CONFIG.lessor.idle_ns
    assert not told.times.HasField("fixed_ttl")
    assert not told.times.HasField("leadership")
    assert (told.policy, list(told.etcd_endpoints), told.guarded) == ("idle", [], False)
    assert [(one.router_id, one.version) for one in told.routers] == [("r1", "1.2.3")]
    assert abs(told.wall_time.ToSeconds() - time.time()) < 60
    call.cancel()


async def test_one_that_stands_by_says_who_leads() -> None:
    """It refuses everything else, and routers have their sessions elsewhere."""
    async with Service(CONFIG).running() as service:
        service.servicer.stand_by(NotLeader("10.0.0.3:7600"))
        told = await service.stub.DescribeService(lease_pb2.DescribeServiceRequest())
    assert (told.leads, told.refusal, told.leader) == (False, "NOT_LEADER", "10.0.0.3:7600")
    assert not told.routers


async def test_operators_see_engines_and_leases(service: Service) -> None:
    decode = await service.engine().up()
    await decode.grant(1)
    await decode.grant(2)
    await decode.beat(memory=lease_pb2.KvMemory(total_blocks=100, free_blocks=90))
    [engine] = (await service.stub.ListEngines(lease_pb2.ListEnginesRequest())).engines
    assert engine.description == decode.description()
    assert (engine.session_number, engine.lease_count) == (1, 1)
    assert engine.memory.free_blocks == 90
    assert (await decode.release()).reason == common_pb2.RELEASE_REASON_SUPERSEDED
    found = await service.stub.GetLease(lease_pb2.GetLeaseRequest(lease_id=decode.lease_id(2)))
    lease = found.lease
    assert (lease.lease_id, lease.conversation) == (decode.lease_id(2), KEY)
    assert (lease.engine_id, lease.token_count, lease.block_count) == ("d1", 40, 3)
    assert lease.state == lease_pb2.Lease.STATE_ACTIVE
    assert 0 < lease.idle_in.ToSeconds() <= 60
    await service.stub.RevokeLease(lease_pb2.RevokeLeaseRequest(lease_id=decode.lease_id(2)))
    assert (await decode.release()).reason == common_pb2.RELEASE_REASON_REVOKED


async def test_leases_come_in_pages(service: Service) -> None:
    decode = await service.engine().up()
    for number in range(1, 6):
        retention = decode.retention(number)
        retention.conversation.conversation_id = f"c{number}"
        await decode.send(grant=lease_pb2.Grant(retention=retention))
    await decode.beat()
    request = lease_pb2.ListLeasesRequest(page_size=2)
    sizes, ids = [], []
    while True:
        page = await service.stub.ListLeases(request)
        sizes.append(len(page.leases))
        ids += [lease.lease_id for lease in page.leases]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert sizes == [2, 2, 1]
    assert ids == [decode.lease_id(number) for number in range(1, 6)]
    one = lease_pb2.ListLeasesRequest(conversation=KEY, engine_id="d1")
    one.conversation.conversation_id = "c3"
    assert len((await service.stub.ListLeases(one)).leases) == 1


async def test_a_prefill_engine_is_listed(service: Service) -> None:
    prefill = service.engine("p1")
    engine = lease_pb2.EngineDescription(
        engine_id="p1", incarnation="i", role=common_pb2.ENGINE_ROLE_PREFILL
    )
    await prefill.send(register=lease_pb2.RegisterEngine(engine=engine))
    await prefill.read()
    [listed] = (await service.stub.ListEngines(lease_pb2.ListEnginesRequest())).engines
    assert listed.description == engine


async def test_withdrawn_leases_are_released_and_freed_ones_forgotten(service: Service) -> None:
    decode = await service.engine().up()
    lease_id = await decode.grant(1)
    withdrawn = lease_pb2.WithdrawnLease(
        lease_id=lease_id, reason=common_pb2.RELEASE_REASON_PRESSURE
    )
    await decode.beat(withdrawn=[withdrawn])
    released = await decode.release()
    assert released.lease_id == lease_id
    assert released.reason == common_pb2.RELEASE_REASON_PRESSURE
    lease_id = await decode.grant(2)
    await service.stub.BeginRead(begin(lease_id))
    freed = lease_pb2.RetentionFreed(lease_id=lease_id, reason=common_pb2.RELEASE_REASON_CONSUMED)
    await decode.send(freed=freed)
    await decode.beat()
    code, info = await refused(service.stub.GetLease(lease_pb2.GetLeaseRequest(lease_id=lease_id)))
    assert (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND")


# ---- how sessions end ------------------------------------------------------------------------


async def test_a_newer_session_ends_the_older_stream(service: Service) -> None:
    first = await service.engine().up()
    second = RawEngine(service.stub, "d1", number=2)
    await second.register(previous_term=TERM)
    code, info = await first.error()
    assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SESSION_FENCED")
    await second.beat()
    stale = RawEngine(service.stub, "d1", number=1)
    await stale.send(register=lease_pb2.RegisterEngine(engine=stale.description()))
    code, info = await stale.error()
    assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SESSION_FENCED")
    await second.beat()


async def test_a_sequence_gap_ends_the_stream(service: Service) -> None:
    decode = await service.engine().up()
    decode.sequence += 1
    await decode.send(heartbeat=lease_pb2.Heartbeat())
    code, info = await decode.error()
    assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SEQUENCE_GAP")
    assert dict(info.metadata) == {"expected": "3", "received": "4"}
    assert not (await service.stub.ListEngines(lease_pb2.ListEnginesRequest())).engines


async def test_silence_ends_the_stream() -> None:
    """The one timer does it; nothing else happens meanwhile."""
    clock = HeldClock()
    async with Service(QUICK, clock).running() as service:
        decode = await service.engine().up()
        lease_id = await decode.grant()
        clock.let_go()
        code, info = await decode.error()
        assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SESSION_EXPIRED")
        answer = await service.stub.BeginRead(begin(lease_id))
        assert answer.verdict == common_pb2.VERDICT_ENGINE_LOST


async def test_operators_see_that_an_engine_lost_its_session() -> None:
    """Once it has a new one: how often, and how long ago by the service's clock."""
    now = [1_000 * S]
    async with Service(CONFIG, clock_ns=lambda: now[0]).running() as service:
        decode = await service.engine().up()
        now[0] += 6 * S
        await decode.send(heartbeat=lease_pb2.Heartbeat())
        await decode.error()
        again = service.engine()
        again.number = decode.number + 1
        await again.up()
        now[0] += 2 * S
        [engine] = (await service.stub.ListEngines(lease_pb2.ListEnginesRequest())).engines
    assert engine.expired_session_count == 1
    assert engine.last_expiry_age.ToNanoseconds() == 2 * S


async def test_a_heartbeat_past_the_deadline_ends_the_stream() -> None:
    """The process was paused: the message waits in the socket, the clock goes on."""
    now = [1_000 * S]
    async with Service(CONFIG, clock_ns=lambda: now[0]).running() as service:
        decode = await service.engine().up()
        now[0] += 5 * S
        await decode.send(
            heartbeat=lease_pb2.Heartbeat(echo_term=TERM, echo_sequence=decode.last.sequence)
        )
        code, info = await decode.error()
        assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SESSION_EXPIRED")


@pytest.mark.parametrize("leave", ["half-close", "cancel"])
async def test_a_session_ends_with_its_stream(
    service: Service, leave: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvturn.lease")
    decode = await service.engine().up()
    lease_id = await decode.grant()
    if leave == "half-close":
        await decode.call.done_writing()
        assert await decode.call.code() == grpc.StatusCode.OK
    else:
        decode.call.cancel()
    async with asyncio.timeout(GUARD_S):
        while (await service.stub.ListEngines(lease_pb2.ListEnginesRequest())).engines:
            pass
        while "engine d1: session 1 ended: its stream ended" not in caplog.messages:
            await service.stub.ListEngines(lease_pb2.ListEnginesRequest())
    answer = await service.stub.BeginRead(begin(lease_id))
    assert answer.verdict == common_pb2.VERDICT_ENGINE_LOST
    back = RawEngine(service.stub, "d1", number=2)
    await back.register(inventory=[back.retention(1)], quiet={"nanos": MS}, previous_term=TERM)
    await back.beat()
    assert (await service.stub.BeginRead(begin(back.lease_id(1)))).granted


async def test_a_stream_without_register_is_not_kept() -> None:
    async with Service(QUICK).running() as service:
        code, info = await service.engine().error()
        assert (code, info.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "REGISTER_LATE")


async def test_many_cancelled_streams_leave_nothing_behind(service: Service) -> None:
    before = len(asyncio.all_tasks())
    for _ in range(5):
        engines = [service.engine(f"d{number}") for number in range(20)]
        for number, engine in enumerate(engines):
            engine.number = time.monotonic_ns()
            await engine.register()
            if number % 2:
                engine.call.cancel()
            else:
                await engine.call.done_writing()
    async with asyncio.timeout(GUARD_S):
        while (await service.stub.ListEngines(lease_pb2.ListEnginesRequest())).engines:
            pass
        while len(asyncio.all_tasks()) > before:
            await service.stub.ListEngines(lease_pb2.ListEnginesRequest())


async def test_an_engine_that_does_not_read_is_ended_not_buffered() -> None:
    """Two messages wait at most; the third one ends the stream."""
    stream = SessionStream(queued_max=2)
    written: list[object] = []
    reached, blocked = asyncio.Event(), asyncio.Event()

    async def write(message: object) -> None:
        written.append(message)
        reached.set()
        await blocked.wait()

    writer = asyncio.create_task(stream.write_all(write))
    stream.send(lease_pb2.EngineSessionResponse(sequence=1))
    await reached.wait()
    for sequence in range(2, 6):
        stream.send(lease_pb2.EngineSessionResponse(sequence=sequence))
    blocked.set()
    with pytest.raises(StreamSlow):
        await writer
    assert len(written) == 1


# ---- bad input -------------------------------------------------------------------------------

LONG = "x" * 257


def named(**more: str) -> common_pb2.ConversationKey:
    key = {"tenant": "t", "model": "m", "conversation_id": "c"} | more
    return common_pb2.ConversationKey(**key)


BAD_QUESTIONS: list[tuple[str, Any, str]] = [
    ("ResolveConversation", resolve(named(conversation_id="")), "conversation.conversation_id"),
    ("ResolveConversation", resolve(named(model="")), "conversation.model"),
    ("ResolveConversation", resolve(named(tenant=LONG)), "conversation.tenant"),
    (
        "ResolveConversation",
        resolve(named(conversation_id="é" * 129)),
        "conversation.conversation_id",
    ),
    ("ResolveConversation", resolve(wait={"seconds": -1}), "wait"),
    ("BeginRead", begin(""), "lease_id"),
    ("BeginRead", begin("no-dots"), "lease_id"),
    ("BeginRead", begin("a.1.0"), "lease_id"),
    ("BeginRead", begin("a.01.1"), "lease_id"),
    ("BeginRead", begin("a.1.1.1"), "lease_id"),
    ("BeginRead", begin("a.1.1" + "1" * 128), "lease_id"),
    ("BeginRead", begin("a.1.1", named(model=LONG)), "conversation.model"),
    ("BeginRead", begin("a.1.1", common_pb2.ConversationKey()), "conversation.model"),
    (
        "BeginRead",
        lease_pb2.BeginReadRequest(lease_id="a.1.1", conversation=KEY, reader_engine_id=LONG),
        "reader_engine_id",
    ),
    ("EndRead", lease_pb2.EndReadRequest(lease_id="a.1.1"), "outcome"),
    ("EndRead", lease_pb2.EndReadRequest(lease_id="a.1.1", outcome=77), "outcome"),
    ("EndRead", lease_pb2.EndReadRequest(outcome=1), "lease_id"),
    (
        "EndRead",
        lease_pb2.EndReadRequest(lease_id="a.1.1", outcome=1, read_time={"seconds": -1}),
        "read_time",
    ),
    ("TouchConversation", lease_pb2.TouchConversationRequest(), "conversation.model"),
    (
        "TouchConversation",
        lease_pb2.TouchConversationRequest(conversation=KEY, turns_in_flight_delta=1_000_001),
        "turns_in_flight_delta",
    ),
    (
        "KeepConversationAlive",
        lease_pb2.KeepConversationAliveRequest(conversation=KEY, absence={"nanos": -1}),
        "absence",
    ),
    (
        "KeepConversationAlive",
        lease_pb2.KeepConversationAliveRequest(conversation=KEY, absence={}),
        "absence",
    ),
    ("EndConversation", lease_pb2.EndConversationRequest(), "conversation.model"),
    ("GetLease", lease_pb2.GetLeaseRequest(lease_id="?"), "lease_id"),
    ("RevokeLease", lease_pb2.RevokeLeaseRequest(), "lease_id"),
    ("ListLeases", lease_pb2.ListLeasesRequest(page_size=1001), "page_size"),
    ("ListLeases", lease_pb2.ListLeasesRequest(page_token="?"), "page_token"),
    ("ListConversations", lease_pb2.ListConversationsRequest(page_size=1001), "page_size"),
    ("ListConversations", lease_pb2.ListConversationsRequest(engine_id=LONG), "engine_id"),
    ("ListConversations", lease_pb2.ListConversationsRequest(tenant=LONG), "tenant"),
    ("ListConversations", lease_pb2.ListConversationsRequest(model=LONG), "model"),
    ("ListLeases", lease_pb2.ListLeasesRequest(engine_id=LONG), "engine_id"),
    (
        "ListLeases",
        lease_pb2.ListLeasesRequest(conversation=named(model="")),
        "conversation.model",
    ),
]


@pytest.mark.parametrize(("method", "request_", "field"), BAD_QUESTIONS)
async def test_a_malformed_question_is_refused_by_field(
    service: Service, method: str, request_: Any, field: str
) -> None:
    code, info = await refused(getattr(service.stub, method)(request_))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert (info.reason, info.metadata["field"]) == ("INVALID_ARGUMENT", field)
    assert len(service.lessor._conversations) == 0


async def test_unknown_names_are_not_found(service: Service) -> None:
    unknown = lease_pb2.GetLeaseRequest(lease_id="a.1.1")
    code, info = await refused(service.stub.GetLease(unknown))
    assert (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND")
    code, info = await refused(
        service.stub.RevokeLease(lease_pb2.RevokeLeaseRequest(lease_id="a.1.1"))
    )
    assert (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "LEASE_NOT_FOUND")
    code, info = await refused(
        service.stub.KeepConversationAlive(lease_pb2.KeepConversationAliveRequest(conversation=KEY))
    )
    assert (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "CONVERSATION_NOT_FOUND")
    end = lease_pb2.EndReadRequest(lease_id="a.1.1", outcome=lease_pb2.READ_OUTCOME_FAILED)
    assert await service.stub.EndRead(end) == lease_pb2.EndReadResponse()
    answer = await service.stub.BeginRead(begin("a.1.1"))
    assert answer.verdict == common_pb2.VERDICT_NO_LEASE


Change = Any
BAD_REGISTERS: list[tuple[Change, str]] = [
    (lambda r: r.ClearField("engine"), "register.engine"),
    (lambda r: setattr(r.engine, "engine_id", ""), "register.engine.engine_id"),
    (lambda r: setattr(r.engine, "engine_id", "x" * 129), "register.engine.engine_id"),
    (lambda r: setattr(r.engine, "incarnation", ""), "register.engine.incarnation"),
    (lambda r: setattr(r.engine, "incarnation", "a.b"), "register.engine.incarnation"),
    (lambda r: setattr(r.engine, "incarnation", "x" * 65), "register.engine.incarnation"),
    (lambda r: r.engine.ClearField("role"), "register.engine.role"),
    (lambda r: setattr(r.engine, "http_address", "ftp://x"), "register.engine.http_address"),
    (lambda r: setattr(r.engine, "model", "x" * 2049), "register.engine.model"),
    (lambda r: r.engine.ClearField("nixl"), "register.engine.nixl"),
    (lambda r: setattr(r.engine.nixl, "port", 65_536), "register.engine.nixl.port"),
    (lambda r: setattr(r.engine.nixl, "tp_size", 0), "register.engine.nixl.tp_size"),
    (lambda r: r.quiet.FromNanoseconds(-1), "register.quiet"),
    (lambda r: r.hold.FromNanoseconds(-1), "register.hold"),
    (lambda r: r.hold.FromSeconds(5_000), "register.hold"),
    (lambda r: setattr(r.inventory[0], "lease_id", "x"), "register.inventory[0].lease_id"),
    (
        lambda r: setattr(r.inventory[0], "lease_id", "inc-d1.1.2"),
        "register.inventory[0].lease_id",
    ),
    (
        lambda r: setattr(r.inventory[0], "lease_id", "inc-d2.1.1"),
        "register.inventory[0].lease_id",
    ),
    (lambda r: setattr(r.inventory[0], "token_count", 0), "register.inventory[0].token_count"),
    (
        lambda r: setattr(r.inventory[0], "token_count", 16_777_217),
        "register.inventory[0].token_count",
    ),
    (lambda r: setattr(r.inventory[0], "block_size", 0), "register.inventory[0].block_size"),
    (lambda r: r.inventory[0].ClearField("groups"), "register.inventory[0].groups"),
    (
        lambda r: r.inventory[0].groups[0].ClearField("block_ids"),
        "register.inventory[0].groups",
    ),
    (
        lambda r: setattr(r.inventory[0].digests, "values", b"x" * 47),
        "register.inventory[0].digests.values",
    ),
    (
        lambda r: setattr(r.inventory[0].digests, "stride_tokens", 32),
        "register.inventory[0].digests.stride_tokens",
    ),
    (
        lambda r: setattr(r.inventory[0].digests, "digest_bytes", 8),
        "register.inventory[0].digests.digest_bytes",
    ),
    (
        lambda r: r.inventory[0].ClearField("conversation"),
        "register.inventory[0].conversation.model",
    ),
    (lambda r: r.inventory.append(r.inventory[0]), "register.inventory[1].lease_id"),
    (
        lambda r: setattr(r.engine, "role", common_pb2.ENGINE_ROLE_PREFILL),
        "register.inventory",
    ),
]


@pytest.mark.parametrize(("change", "field"), BAD_REGISTERS)
async def test_a_malformed_register_is_refused_by_field(
    service: Service, change: Change, field: str
) -> None:
    decode = service.engine()
    register = lease_pb2.RegisterEngine(
        engine=decode.description(), inventory=[decode.retention(1)]
    )
    change(register)
    await decode.send(register=register)
    code, info = await decode.error()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert (info.reason, info.metadata["field"]) == ("INVALID_ARGUMENT", field)
    assert (await service.stub.ListEngines(lease_pb2.ListEnginesRequest())).engines == []
    assert not (await service.store.load()).sessions


async def test_a_session_starts_with_register_one(service: Service) -> None:
    for message, field in (
        ({"heartbeat": lease_pb2.Heartbeat()}, "message"),
        ({}, "message"),
        ({"session_number": 0, "sequence": 1}, "session_number"),
        ({"session_number": 1, "sequence": 2}, "sequence"),
    ):
        decode = service.engine()
        request = lease_pb2.EngineSessionRequest(session_number=1, sequence=1)
        if field != "message":
            register = lease_pb2.RegisterEngine(engine=decode.description())
            request = lease_pb2.EngineSessionRequest(**message, register=register)  # type: ignore[arg-type]
        elif message:
            request.heartbeat.SetInParent()
        await decode.call.write(request)
        code, info = await decode.error()
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert info.metadata["field"] == field


def lease_of(session: int) -> str:
    return f"inc-d1.1.{session}"


BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({}, "message"),
    ({"register": lease_pb2.RegisterEngine()}, "message"),
    ({"session_number": 2, "heartbeat": lease_pb2.Heartbeat()}, "session_number"),
    (
        {"heartbeat": lease_pb2.Heartbeat(echo_term=TERM, echo_sequence=99)},
        "heartbeat.echo_sequence",
    ),
    (
        {
            "heartbeat": lease_pb2.Heartbeat(
                withdrawn=[lease_pb2.WithdrawnLease(lease_id=lease_of(1))]
            )
        },
        "heartbeat.withdrawn[0].reason",
    ),
    (
        {
            "heartbeat": lease_pb2.Heartbeat(
                withdrawn=[lease_pb2.WithdrawnLease(lease_id=lease_of(2), reason=5)]
            )
        },
        "heartbeat.withdrawn[0].lease_id",
    ),
    ({"freed": lease_pb2.RetentionFreed(lease_id=lease_of(1), reason=5)}, "freed.reason"),
    ({"freed": lease_pb2.RetentionFreed(lease_id="x", reason=1)}, "freed.lease_id"),
    ({"freed": lease_pb2.RetentionFreed(lease_id=lease_of(2), reason=1)}, "freed.lease_id"),
    ({"grant": lease_pb2.Grant()}, "grant.retention.lease_id"),
    (
        {"grant": lease_pb2.Grant(retention=common_pb2.Retention(lease_id=lease_of(2)))},
        "grant.retention.lease_id",
    ),
]


@pytest.mark.parametrize(("message", "field"), BAD_MESSAGES)
async def test_a_malformed_message_ends_the_stream(
    service: Service, message: dict[str, Any], field: str
) -> None:
    decode = await service.engine().up()
    await decode.call.write(
        lease_pb2.EngineSessionRequest(**({"session_number": 1, "sequence": 3} | message))
    )
    code, info = await decode.error()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert info.metadata["field"] == field


async def test_a_stream_that_ends_with_its_first_answer_on_the_way_says_why(
    service: Service,
) -> None:
    """Register and a wrong message together: the session ends while Registered is being sent.

    Whether that is so is up to the machine, so many try at once.
    """

    async def ended(name: str) -> grpc.StatusCode:
        engine = service.engine(name)
        await engine.send(register=lease_pb2.RegisterEngine(engine=engine.description()))
        await engine.call.write(lease_pb2.EngineSessionRequest(session_number=2, sequence=2))
        return (await engine.error())[0]

    codes = await asyncio.gather(*(ended(f"d{number}") for number in range(200)))
    assert set(codes) == {grpc.StatusCode.INVALID_ARGUMENT}


async def test_a_malformed_retention_is_refused_alone(service: Service) -> None:
    """The session and all its other leases go on."""
    decode = await service.engine().up()
    retention = decode.retention(1)
    retention.digests.values = b"short"
    await decode.send(grant=lease_pb2.Grant(retention=retention))
    answer = await decode.read()
    assert answer.grant_refused.lease_id == decode.lease_id(1)
    assert answer.grant_refused.reason == "RETENTION_INVALID"
    await decode.grant(2)
    assert (await service.stub.ResolveConversation(resolve())).lease_id == decode.lease_id(2)


async def test_a_grant_over_a_limit_is_refused_alone() -> None:
    limits = LessorConfig(leases_per_engine_max=1, blocks_per_lease_max=3)
    async with Service(replace(CONFIG, lessor=limits)).running() as service:
        decode = await service.engine().up()
        await decode.send(grant=lease_pb2.Grant(retention=decode.retention(1, tokens=64)))
        assert (await decode.read()).grant_refused.reason == "BLOCKS_EXHAUSTED"
        await decode.grant(2)
        retention = decode.retention(3)
        retention.conversation.conversation_id = "other"
        await decode.send(grant=lease_pb2.Grant(retention=retention))
        assert (await decode.read()).grant_refused.reason == "LEASES_EXHAUSTED"


async def test_more_leases_than_an_engine_may_hold_can_be_given_up_at_once() -> None:
    """A Register may bring more than a limit that was lowered; a cache reset gives all up."""
    limits = LessorConfig(leases_per_engine_max=1)
    async with Service(replace(CONFIG, lessor=limits)).running() as service:
        decode = service.engine()
        inventory = [decode.retention(1), decode.retention(2)]
        await decode.register(inventory=inventory, quiet={"nanos": MS}, previous_term=TERM + 1)
        pressure = common_pb2.RELEASE_REASON_PRESSURE
        withdrawn = [
            lease_pb2.WithdrawnLease(lease_id=each.lease_id, reason=pressure) for each in inventory
        ]
        await decode.beat(withdrawn=withdrawn)
        answer = await decode.beat(withdrawn=withdrawn)
        assert answer.WhichOneof("message") == "heartbeat_ack"


async def test_an_engine_too_many_is_told_so() -> None:
    limits = LessorConfig(engines_max=1)
    async with Service(replace(CONFIG, lessor=limits)).running() as service:
        await service.engine("d1").up()
        second = service.engine("d2")
        await second.send(register=lease_pb2.RegisterEngine(engine=second.description()))
        code, info = await second.error()
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (info.reason, info.metadata["limit"]) == ("ENGINES_EXHAUSTED", "1")


def test_the_words_of_the_core_are_those_of_the_api() -> None:
    """Enums cross the wire by number."""
    for kind, prefix, words in (
        (ReleaseReason, "RELEASE_REASON", common_pb2.ReleaseReason),
        (Verdict, "VERDICT", common_pb2.Verdict),
        (ReadOutcome, "READ_OUTCOME", lease_pb2.ReadOutcome),
    ):
        for each in kind:
            name = "UNSPECIFIED" if each == 0 else each.name
            assert words.Value(f"{prefix}_{name}") == each  # type: ignore[attr-defined]
    assert len(ReleaseReason) == len(common_pb2.ReleaseReason.keys())  # type: ignore[attr-defined]


# ---- health, reflection, connections, traces -------------------------------------------------


async def test_health_is_served(service: Service) -> None:
    async with service.channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kvturn.v1.LeaseService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_is_served(service: Service) -> None:
    async with service.channel() as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        names = {each.name for each in (await call.read()).list_services_response.service}
        assert {"kvturn.v1.LeaseService", "grpc.health.v1.Health"} <= names


async def test_a_burst_of_questions_waits_for_its_turn(service: Service) -> None:
    """1,500 come while the service is busy, as after a pause: none is dropped.

    They are sent from its own thread, so that it takes none before all are on their way.
    """
    own = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{service.port}", options=own) as channel:
        stub = lease_pb2_grpc.LeaseServiceStub(channel)
        request = lease_pb2.GetLeaseRequest(lease_id="inc-d1.1.1")
        calls = [stub.GetLease.future(request) for _ in range(1500)]
        codes = await asyncio.to_thread(lambda: {call.code() for call in calls})
    assert codes == {grpc.StatusCode.NOT_FOUND}


async def test_eager_pings_are_never_answered_with_goaway(service: Service) -> None:
    """Clients ping as fast as gRPC lets them, idle and with an open stream; both stay connected.

    A server with gRPC's defaults sends GOAWAY after the third ping, at about 3 s.
    """
    eager = (
        ("grpc.keepalive_time_ms", 10),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
    )
    async with service.channel(*eager) as idle, service.channel(*eager) as busy:
        await idle.channel_ready()
        decode = await service.engine("d1", lease_pb2_grpc.LeaseServiceStub(busy)).up()
        ready = grpc.ChannelConnectivity.READY
        changes = [
            asyncio.create_task(channel.wait_for_state_change(ready)) for channel in (idle, busy)
        ]
        done, pending = await asyncio.wait(changes, timeout=4)
        for change in pending:
            change.cancel()
        assert not done
        await decode.beat()


@pytest.fixture
def recording() -> Recording:
    return Recording()


@pytest.fixture
async def traced(recording: Recording) -> AsyncIterator[Service]:
    async with Service(CONFIG, tracing=recording.tracing).running() as running:
        yield running


TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


async def test_questions_continue_their_callers_trace(
    traced: Service, recording: Recording
) -> None:
    lease_id = await (await traced.engine().up()).grant(traceparent=TRACEPARENT)
    metadata = (("traceparent", TRACEPARENT),)
    await traced.stub.BeginRead(begin(lease_id), metadata=metadata)
    await traced.stub.BeginRead(begin(lease_id), metadata=metadata)
    await refused(traced.stub.GetLease(lease_pb2.GetLeaseRequest(lease_id="?"), metadata=metadata))
    finished = await recording.until(4)
    assert [span.name for span in finished] == ["Grant", "BeginRead", "BeginRead", "GetLease"]
    for span in finished:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.kind == trace_pb2.Span.SPAN_KIND_SERVER
    grant, granted, again, failed = (told(span) for span in finished)
    assert grant["kvturn.lease_id"] == lease_id
    assert grant["gen_ai.conversation.id"] == "c"
    assert (granted["kvturn.granted"], granted["rpc.grpc.status_code"]) == (True, 0)
    assert again["kvturn.verdict"] == "read_in_progress"
    assert failed["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "t" not in {str(value) for span in (grant, granted, again) for value in span.values()}


async def test_heartbeats_health_and_malformed_parents_make_no_trouble(
    traced: Service, recording: Recording
) -> None:
    """What is in no trace, or in one that nobody records, makes no span."""
    decode = await traced.engine().up()
    await decode.beat()
    async with traced.channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest())
    await traced.stub.ResolveConversation(resolve(), metadata=(("traceparent", "nonsense"),))
    await decode.grant(traceparent="00-" + "z" * 500)
    unsampled = TRACEPARENT[:-1] + "0"
    await traced.stub.ResolveConversation(resolve(), metadata=(("traceparent", unsampled),))
    recording.tracing.flush()
    assert recording.exported == []


# ---- starting and stopping -------------------------------------------------------------------


# What is promised is 2 s; the rest is for machines that run much else. Any hang takes longer.
STOP_S_MAX = 5


async def test_shutdown_does_not_wait_for_open_streams() -> None:
    """Engines hear UNAVAILABLE, a health watcher and a waiting question do not hold it up."""
    service = Service(CONFIG)
    async with service.running():
        engines = [await service.engine(f"d{number}").up() for number in range(3)]
        health: Any = health_pb2_grpc.HealthStub(service.channel())
        watch = health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        question = asyncio.ensure_future(
            service.stub.ResolveConversation(resolve(expected_turn=1, wait={"seconds": 1}))
        )
        async with within(STOP_S_MAX):
            await service.server.stop()
        for engine in engines:
            code, info = await engine.error()
            assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        await asyncio.gather(question, return_exceptions=True)


async def start_process(*flags: str) -> tuple[asyncio.subprocess.Process, int]:
    """Starts the service as its own process; returns it and its port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvturn_lease",
        "--port",
        "0",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), GUARD_S)).decode()
    assert line.startswith("lease service listening on 127.0.0.1:")
    return process, int(line.rsplit(":", 1)[1])


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGINT, ("--otlp-endpoint", "http://127.0.0.1:9")),
    ],
)
async def test_the_process_stops_at_once_with_open_streams(
    number: signal.Signals, flags: tuple[str, ...]
) -> None:
    """Also when a collector does not answer; and more signals, until the last, do no harm."""
    process, port = await start_process(*flags)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = lease_pb2_grpc.LeaseServiceStub(channel)
        decode = await RawEngine(stub, "d1").up()
        await stub.ResolveConversation(resolve())
        async with within(STOP_S_MAX):
            process.send_signal(number)
            code, _ = await decode.error()
            while process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)  # send_signal() would take the exit code away
                await asyncio.sleep(0.005)
            _, errors = await process.communicate()
    assert code == grpc.StatusCode.UNAVAILABLE
    assert process.returncode == 0
    assert b"Traceback" not in errors
    assert b"opentelemetry" not in errors


def test_a_port_in_use_is_one_clear_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        (
            f"kvturn lease: cannot listen on 127.0.0.1:{port}: "
            "the port is in use; choose another --port, 0 for any free one"
        )
    ]


async def test_a_second_service_does_not_share_the_port(service: Service) -> None:
    with pytest.raises(ListenError):
        await Service(replace(CONFIG, port=service.port)).server.start()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--session-ttl", "3"], "session-ttl"),
        (["--session-ttl", "soon"], "session-ttl"),
        (["--heartbeat", "0"], "heartbeat"),
        (["--heartbeat", "nan"], "heartbeat"),
        (["--longest-read", "0.1"], "longest-read"),
        (["--longest-read", "1e300"], "longest-read"),
        (["--idle", "-1"], "idle"),
        (["--max-hold", "10"], "max-hold"),
        (["--leases", "5"], "leases-per-engine"),
        (["--leases-per-engine", "50000"], "queued-messages"),
        (["--port", "65536"], "port"),
        (["--port", "http"], "port"),
        (["--host", ""], "host"),
        (["--host", "no such host"], "--host"),
        (["--otlp-endpoint", "localhost:4317"], "otlp-endpoint"),
        (["--log-level", "LOUD"], "log-level"),
        (["--log-level", "NOTSET"], "log-level"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--sess", "5"], "--sess"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_in_one_line(
    flags: list[str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) in (1, 2)
    out, err = capfd.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("kvturn lease: ")
    assert named in line


def test_settings_come_from_flags_then_variables_then_defaults() -> None:
    environ = {"KVTURN_LEASE_SESSION_TTL": "8", "KVTURN_LEASE_IDLE": "30", "UNRELATED": "x"}
    config = parse_config(["--idle", "45.5", "--port", "0"], environ)
    assert config.lessor.session_ttl_ns == 8 * S
    assert config.lessor.idle_ns == 45_500 * MS
    assert config.lessor.max_hold_ns == 480 * S
    assert (config.host, config.port) == ("127.0.0.1", 0)
    assert parse_config([], {}) == LeaseConfig()
    with pytest.raises(ConfigError, match="session-ttl"):
        parse_config([], {"KVTURN_LEASE_SESSION_TTL": "x"})
    with pytest.raises(ConfigError, match=r"_IDEL is not .* mean KVTURN_LEASE_IDLE \(--idle\)\?"):
        parse_config([], {"KVTURN_LEASE_IDEL": "30"})
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
    assert parse_config([], endpoint).traces == Destination("http://127.0.0.1:4317")


def test_help_lists_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    percent = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a%b"}
    with pytest.raises(SystemExit) as exit_:
        parse_config(["--help"], {**os.environ, **percent})
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "--session-ttl" in text
    assert "default 7600" in text

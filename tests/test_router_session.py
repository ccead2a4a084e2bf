"""Routers' sessions with the lease service, over real gRPC on a free port."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from recorded_spans import Recording, told
from tcp_proxy import TcpProxy

from kvturn.clock import boottime_ns
from kvturn.lease_channels import error_info
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn_lease.config import LeaseConfig, LessorConfig
from kvturn_lease.conversation import Conversation, ConversationKey
from kvturn_lease.conversation_search import ConversationSearch, Wanted
from kvturn_lease.errors import NotLeader, StreamSlow
from kvturn_lease.lessor import Lessor
from kvturn_lease.router_stream import RouterStream
from kvturn_lease.routers import GRANT_UNDERWAY_NS, Begun, RouterLimits
from kvturn_lease.server import LeaseServer
from kvturn_lease.servicer import LeaseServicer
from kvturn_lease.store import MemoryStore
from kvturn_lease.telemetry import make_tracing
from kvturn_lease.turn_reports import REPORTS_MAX, TurnReports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvturn.tracing import Tracing

GUARD_S = 120.0
LONG_MS = 1_000
"""A wait that is never over while the clock stands still."""
MS = 1_000_000
CONFIG = LeaseConfig(port=0, shutdown_grace_ns=200 * MS)
REUSED = common_pb2.VERDICT_REUSED


def key(name: str) -> common_pb2.ConversationKey:
    return common_pb2.ConversationKey(tenant="t", model="m", conversation_id=name)


def points(*texts: str) -> list[bytes]:
    """Digests of histories, named by what was asked last, the latest first."""
    return [text.encode().ljust(16, b".") for text in texts]


class Service:
    """A running lease service and a stub to it; unless told otherwise its clock stands still."""

    def __init__(
        self,
        config: LeaseConfig = CONFIG,
        clock_ns: Callable[[], int] = lambda: 10**18,
        tracing: Tracing | None = None,
    ) -> None:
        tracing = tracing or make_tracing(None)
        self.config = config
        self.clock_ns = clock_ns
        self.store = MemoryStore()
        self.servicer = LeaseServicer(config, None, None, clock_ns, tracing)
        self.server = LeaseServer(config, self.servicer, tracing)
        self.terms = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Service]:
        await self.lead()
        self.port = await self.server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            self.stub: Any = lease_pb2_grpc.LeaseServiceStub(channel)
            try:
                yield self
            finally:
                await self.server.stop()

    async def lead(self) -> None:
        """Begins the next term, which knows what the store does."""
        self.terms += 1
        lessor = Lessor(self.config.lessor, self.terms)
        lessor.restore(await self.store.load(), self.clock_ns())
        self.servicer.lead(lessor, self.store)

    async def fail_over(self) -> None:
        """Ends the term and begins the next one."""
        self.servicer.stand_by(NotLeader())
        await self.lead()

    async def turns_in_flight(self, name: str = "c") -> bool:
        """Tells whether a turn of a conversation that has a lease is in flight."""
        request = lease_pb2.ListLeasesRequest(conversation=key(name))
        (lease,) = (await self.stub.ListLeases(request)).leases
        return not lease.HasField("idle_in")

    async def until_idle(self, name: str = "c") -> None:
        async with asyncio.timeout(GUARD_S):
            while await self.turns_in_flight(name):
                pass

    async def list_turns(self, name: str) -> list[common_pb2.TurnReport]:
        request = lease_pb2.ListTurnsRequest(conversation=key(name))
        return list((await self.stub.ListTurns(request)).turns)

    async def drain(self, name: str, draining: bool = True) -> None:
        await self.stub.DrainEngine(lease_pb2.DrainEngineRequest(engine_id=name, draining=draining))


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with Service().running() as running:
        yield running


class Engine:
    """A decode engine's session, message by message."""

    def __init__(self, service: Service, name: str = "d1", address: str = "http://d1:8200") -> None:
        self.name = name
        self.address = address
        self.role = common_pb2.ENGINE_ROLE_DECODE
        self._stub = service.stub
        self._number = 0
        self._granted = 0

    async def up(self, *inventory: common_pb2.Retention) -> Engine:
        """Opens the next session and proves it."""
        self._number += 1
        self._sequence = 0
        self._call = self._stub.EngineSession()
        description = lease_pb2.EngineDescription(
            engine_id=self.name,
            incarnation=self.name,
            role=self.role,
            http_address=self.address,
            nixl=common_pb2.NixlAddress(
                nixl_engine_id="n", host="h", port=1, tp_size=1, dcp_size=1, pp_size=1
            ),
        )
        for retention in inventory:
            retention.lease_id = f"{self.name}.{retention.turn}.{self._number}"
        await self._send(register=lease_pb2.RegisterEngine(engine=description, inventory=inventory))
        await self._read()
        await self.beat()
        return self

    async def beat(self) -> None:
        """Heartbeats, and waits for the acknowledgement."""
        heartbeat = lease_pb2.Heartbeat(
            echo_term=self._last.term, echo_sequence=self._last.sequence
        )
        await self._send(heartbeat=heartbeat)
        while (await self._read()).WhichOneof("message") != "heartbeat_ack":
            pass

    async def grant(self, name: str, turn: int, history: bytes = b"", tokens: int = 64) -> str:
        """Grants, and returns once the lease service has it."""
        self._granted += 1
        retention = self.retention(name, turn, history, tokens)
        retention.lease_id = f"{self.name}.{1_000 + self._granted}.{self._number}"
        await self._send(grant=lease_pb2.Grant(retention=retention))
        await self.beat()
        return retention.lease_id

    @staticmethod
    def retention(
        name: str, turn: int, history: bytes = b"", tokens: int = 64
    ) -> common_pb2.Retention:
        count = -(-tokens // 16)
        return common_pb2.Retention(
            conversation=key(name),
            token_count=tokens,
            block_size=16,
            groups=[common_pb2.BlockGroup(block_ids=range(1, 1 + count))],
            digests=common_pb2.TokenDigests(
                stride_tokens=16, digest_bytes=16, values=bytes(16) * count
            ),
            prompt_tokens=tokens - 10,
            local_cached_tokens=5,
            turn=turn,
            history=history,
        )

    async def down(self) -> None:
        """Ends the session with its stream."""
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass

    async def _send(self, **message: Any) -> None:
        self._sequence += 1
        await self._call.write(
            lease_pb2.EngineSessionRequest(
                session_number=self._number, sequence=self._sequence, **message
            )
        )

    async def _read(self) -> lease_pb2.EngineSessionResponse:
        async with asyncio.timeout(GUARD_S):
            self._last = await self._call.read()
        assert isinstance(self._last, lease_pb2.EngineSessionResponse)
        return self._last


class Router:
    """A router's session; what came and was not asked for yet is kept."""

    def __init__(self, service: Service, stub: Any = None) -> None:
        self.call = (stub or service.stub).RouterSession()
        self.begun: dict[int, lease_pb2.TurnBegun] = {}
        self.retained: dict[int, lease_pb2.TurnRetained] = {}
        self.engines: dict[str, lease_pb2.Engine] = {}
        self.pushes = 0
        """Messages that told of engines."""

    async def up(self, *in_flight: lease_pb2.BeginTurn) -> Router:
        hello = lease_pb2.RouterHello(router_id="r", turns_in_flight=in_flight)
        await self.send(hello=hello)
        first = await self.read()
        assert first.welcome.longest_read.ToSeconds() == 3
        return self

    async def send(self, **message: Any) -> None:
        await self.call.write(lease_pb2.RouterSessionRequest(**message))

    async def read(self) -> lease_pb2.RouterSessionResponse:
        async with asyncio.timeout(GUARD_S):
            message = await self.call.read()
        assert isinstance(message, lease_pb2.RouterSessionResponse)
        self.begun.update((turn.turn_id, turn) for turn in message.turns)
        self.retained.update((turn.turn_id, turn) for turn in message.retained)
        self.engines.update((each.description.engine_id, each) for each in message.engines)
        self.pushes += bool(message.engines or message.engines_gone)
        for gone in message.engines_gone:
            del self.engines[gone]
        return message

    async def answer(self, turn_id: int) -> lease_pb2.TurnBegun:
        while turn_id not in self.begun:
            await self.read()
        return self.begun[turn_id]

    async def begin(self, turn_id: int, name: str = "c", **more: Any) -> lease_pb2.TurnBegun:
        await self.send(begin_turns=[beginning(turn_id, name, **more)])
        return await self.answer(turn_id)

    async def end(self, turn_id: int, retains: bool = False, **report: Any) -> None:
        message = lease_pb2.EndTurn(turn_id=turn_id, retains=retains)
        if report:
            message.report.CopyFrom(common_pb2.TurnReport(**report))
        await self.send(end_turns=[message])

    async def settled(self) -> None:
        """Returns once all that was sent has been taken."""
        await self.begin(10**6, "other", reuse=False)
        await self.end(10**6)
        del self.begun[10**6]

    async def error(self) -> tuple[grpc.StatusCode, str]:
        """Waits for the end of the stream; returns its status and reason."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self._read_all()
        return raised.value.code(), error_info(raised.value)[0]

    async def _read_all(self) -> None:
        async with asyncio.timeout(GUARD_S):
            while await self.call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass


def beginning(
    turn_id: int,
    name: str = "c",
    asked: Sequence[bytes] = (),
    *,
    wait_ms: int = 0,
    recognise: bool = False,
    reuse: bool = True,
    trace: lease_pb2.TurnTrace | None = None,
) -> lease_pb2.BeginTurn:
    message = lease_pb2.BeginTurn(
        turn_id=turn_id,
        conversation=key(name),
        points=asked,
        recognise=recognise,
        reuse=reuse,
        trace=trace,
    )
    if wait_ms:
        message.wait.FromMilliseconds(wait_ms)
    return message


# ---- turns -----------------------------------------------------------------------------------


async def test_a_turn_is_told_what_the_turn_before_left(service: Service) -> None:
    """Numbers go up, and the second turn learns lease, holder and sizes of the first one's."""
    engine = await Engine(service).up()
    router = await Router(service).up()
    first = await router.begin(1, asked=points("a"))
    assert (first.conversation_id, first.turn) == ("c", 1)
    assert first.verdict == common_pb2.VERDICT_FIRST_TURN
    lease_id = await engine.grant("c", 1, *points("a"))
    await router.end(1, retains=True)
    second = await router.begin(2, asked=points("b", "a"))
    assert second == lease_pb2.TurnBegun(
        turn_id=2,
        conversation_id="c",
        turn=2,
        lease_id=lease_id,
        engine_id="d1",
        http_address="http://d1:8200",
        token_count=64,
        prompt_tokens=54,
        extends=True,
    )


async def test_a_history_that_was_edited_does_not_extend(service: Service) -> None:
    """The lease is told all the same: tokens may be equal further than messages are."""
    engine = await Engine(service).up()
    router = await Router(service).up()
    await router.begin(1, asked=points("a"))
    lease_id = await engine.grant("c", 1, *points("a"))
    await router.end(1, retains=True)
    second = await router.begin(2, asked=points("b", "x"))
    assert (second.lease_id, second.extends) == (lease_id, False)


async def test_turns_are_numbered_over_all_routers(service: Service) -> None:
    """Neither router has seen the other's turns."""
    one, other = await Router(service).up(), await Router(service).up()
    assert (await one.begin(1)).turn == 1
    assert (await other.begin(1)).turn == 2
    await one.end(1)
    assert (await one.begin(2)).turn == 3


async def test_turns_of_a_router_that_is_cut_off_without_a_word_are_over_soon() -> None:
    """Its machine or its network is gone, and no packet says so: a session's TTL bounds it."""
    ttl_ns = 800 * MS
    lessor = LessorConfig(session_ttl_ns=ttl_ns, heartbeat_ns=ttl_ns // 4)
    async with (
        Service(replace(CONFIG, lessor=lessor)).running() as service,
        TcpProxy("127.0.0.1", service.port) as proxy,
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
    ):
        engine = await Engine(service).up()
        router = Router(service, lease_pb2_grpc.LeaseServiceStub(channel))
        await router.up()
        await router.begin(1)
        await engine.grant("c", 1)
        assert await service.turns_in_flight()
        proxy.swallow = True
        await service.until_idle()


async def test_a_new_term_numbers_turns_after_those_that_routers_bring(service: Service) -> None:
    """Only the routers know: nothing of these turns was retained."""
    router = await Router(service).up()
    for turn_id in (1, 2, 3):
        told = await router.begin(turn_id)
    await service.fail_over()
    brought = beginning(3)
    brought.turn = told.turn
    again = await Router(service).up(brought)
    assert (await again.begin(4)).turn == 4


@pytest.mark.parametrize("teller", ["engine", "router"])
async def test_a_turn_number_that_was_made_up_stops_no_turn(service: Service, teller: str) -> None:
    """There is no higher one on the wire; turns are served all the same."""
    if teller == "engine":
        await (await Engine(service).up()).grant("c", (1 << 32) - 1)
        router = await Router(service).up()
    else:
        brought = beginning(3)
        brought.turn = (1 << 32) - 1
        router = await Router(service).up(brought)
    assert (await router.begin(4)).turn == (1 << 32) - 1


async def test_turns_of_a_router_that_died_are_over(service: Service) -> None:
    """A conversation stays alive while the other router's turn of it is in flight."""
    engine = await Engine(service).up()
    one, other = await Router(service).up(), await Router(service).up()
    await one.begin(1)
    await engine.grant("c", 1)
    await other.begin(7)
    other.call.cancel()
    await one.settled()
    assert await service.turns_in_flight()
    one.call.cancel()
    await service.until_idle()


async def test_a_router_brings_its_turns_into_its_next_session(service: Service) -> None:
    """They count until they end, are not answered again, and keep their conversation."""
    engine = await Engine(service).up()
    router = await Router(service).up()
    await router.begin(1, asked=points("a"))
    await engine.grant("c", 1)
    router.call.cancel()
    again = await Router(service).up(beginning(1, asked=points("a")))
    assert await service.turns_in_flight()
    assert (await again.begin(2, "other")).turn_id == 2
    assert 1 not in again.begun
    await again.end(1)
    await again.settled()
    assert not await service.turns_in_flight()


async def test_a_turn_without_reuse_is_counted_and_told_nothing_else(service: Service) -> None:
    """Its number and its being in flight do not depend on reuse."""
    engine = await Engine(service).up()
    router = await Router(service).up()
    await router.begin(1)
    await engine.grant("c", 1)
    await router.end(1, retains=True)
    second = await router.begin(2, reuse=False)
    assert second == lease_pb2.TurnBegun(
        turn_id=2, conversation_id="c", turn=2, verdict=common_pb2.VERDICT_TURNED_OFF
    )
    assert await service.turns_in_flight()


async def test_turns_end_before_others_of_the_same_message_begin(service: Service) -> None:
    """What one message brings may have happened in either order."""
    router = await Router(service).up()
    await router.begin(1, asked=points("a"))
    await router.send(
        begin_turns=[beginning(2, asked=points("x")), beginning(3, "short")],
        end_turns=[lease_pb2.EndTurn(turn_id=1), lease_pb2.EndTurn(turn_id=3)],
    )
    assert (await router.answer(2)).conversation_id == "c"  # not a branch beside turn 1
    await router.answer(3)
    del router.begun[3]
    assert (await router.begin(3, "short")).turn == 2  # its id is free again


# ---- waiting for a grant ---------------------------------------------------------------------


async def test_a_turn_waits_for_the_grant_of_one_that_ended(service: Service) -> None:
    """The client was quicker than the grant."""
    engine = await Engine(service).up()
    router = await Router(service).up()
    await router.begin(1)
    await router.end(1, retains=True)
    await router.send(begin_turns=[beginning(2, wait_ms=LONG_MS)])
    await router.settled()
    assert 2 not in router.begun
    lease_id = await engine.grant("c", 1)
    assert (await router.answer(2)).lease_id == lease_id


async def test_a_turn_waits_for_one_in_flight_whose_answer_its_client_has(
    service: Service,
) -> None:
    """Through another router, which has not heard of the first one's end."""
    engine = await Engine(service).up()
    one, other = await Router(service).up(), await Router(service).up()
    await one.begin(1, asked=points("a"))
    await other.send(begin_turns=[beginning(1, asked=points("b", "a"), wait_ms=LONG_MS)])
    await other.settled()
    assert 1 not in other.begun
    lease_id = await engine.grant("c", 1, *points("a"))
    answer = await other.answer(1)
    assert (answer.lease_id, answer.extends) == (lease_id, True)


async def test_nobody_waits_for_a_turn_that_leaves_nothing(service: Service) -> None:
    """It ended without a retention, or with its router."""
    one, other = await Router(service).up(), await Router(service).up()
    for number, end in enumerate(("told", "died")):
        name = f"c{number}"
        await one.begin(number, name, asked=points("a"))
        later = beginning(number, name, points("b", "a"), wait_ms=LONG_MS)
        await other.send(begin_turns=[later])
        await other.settled()
        assert number not in other.begun, end
        if end == "told":
            await one.end(number, retains=False)
        else:
            one.call.cancel()
        assert (await other.answer(number)).verdict == common_pb2.VERDICT_NO_LEASE


async def test_a_wait_is_over_when_its_time_is() -> None:
    """The grant never comes: the turn goes on without."""
    async with Service(clock_ns=boottime_ns).running() as service:
        router = await Router(service).up()
        await router.begin(1)
        await router.end(1, retains=True)
        assert (await router.begin(2, wait_ms=20)).verdict == common_pb2.VERDICT_NO_LEASE


async def test_a_turn_that_may_not_wait_is_answered_at_once(service: Service) -> None:
    """It asked for no wait, or not for reuse."""
    router = await Router(service).up()
    await router.begin(1)
    await router.end(1, retains=True)
    assert (await router.begin(2)).verdict == common_pb2.VERDICT_NO_LEASE
    assert (await router.begin(3, wait_ms=LONG_MS, reuse=False)).turn == 3


async def test_a_grant_is_not_awaited_for_ever() -> None:
    """A second after its turn's end nobody waits for it any more."""
    now_ns = 10**18
    async with Service(clock_ns=lambda: now_ns).running() as service:
        router = await Router(service).up()
        await router.begin(1)
        await router.end(1, retains=True)
        await router.settled()
        now_ns += GRANT_UNDERWAY_NS
        assert (await router.begin(2, wait_ms=LONG_MS)).verdict == common_pb2.VERDICT_NO_LEASE


async def test_twins_do_not_wait_for_each_other(service: Service) -> None:
    """Two requests with one history: neither client has the other's answer."""
    router = await Router(service).up()
    await router.begin(1, asked=points("b", "a"))
    twin = await router.begin(2, asked=points("b", "a"), wait_ms=LONG_MS)
    assert (twin.conversation_id, twin.turn) == ("c~2", 1)


async def test_only_so_many_wait_in_one_conversation() -> None:
    """The next is answered at once."""
    config = replace(CONFIG, routers=RouterLimits(waiting=1))
    async with Service(config).running() as service:
        router = await Router(service).up()
        await router.begin(1)
        await router.end(1, retains=True)
        await router.send(begin_turns=[beginning(2, wait_ms=LONG_MS)])
        await router.begin(3, wait_ms=LONG_MS)
        assert 2 not in router.begun


# ---- retentions ------------------------------------------------------------------------------


async def test_the_router_whose_turn_it_was_is_told_what_is_retained(service: Service) -> None:
    """Before the turn's end as after it; another router is not told."""
    engine = await Engine(service).up()
    router, other = await Router(service).up(), await Router(service).up()
    told = lease_pb2.TurnRetained(
        turn_id=1, token_count=64, prompt_tokens=54, local_cached_tokens=5
    )
    await other.begin(1, "else")
    await router.begin(1, "before")
    await engine.grant("before", 1)
    await router.settled()
    assert router.retained == {1: told}
    await router.begin(2, "after")
    await router.end(2, retains=True)
    await router.settled()
    await engine.grant("after", 1)
    await router.settled()
    told.turn_id = 2
    assert router.retained[2] == told
    await other.settled()
    assert other.retained == {}


async def test_a_turn_of_an_earlier_session_is_found_by_its_history(service: Service) -> None:
    """Its number is not known to the session that took it over."""
    engine = await Engine(service).up()
    router = await Router(service).up(beginning(5, asked=points("b", "a")))
    await engine.grant("c", 9, *points("b"))
    await router.settled()
    assert router.retained[5].token_count == 64
    await router.begin(6, "d", asked=points("b"))
    await engine.grant("d", 9, *points("b"))  # an older turn's, asked with the same
    await router.settled()
    assert 6 not in router.retained


# ---- conversations ---------------------------------------------------------------------------


async def test_branches_of_a_conversation_hold_leases_of_their_own(service: Service) -> None:
    """Two agents under one id; ending it ends both, and so does keeping it alive keep both."""
    engine = await Engine(service).up()
    router = await Router(service).up()
    await router.begin(1, asked=points("a"))
    await router.begin(2, asked=points("x"))
    left = await engine.grant("c", 1, *points("a"))
    right = await engine.grant("c~2", 1, *points("x"))
    await router.end(1, retains=True)
    await router.end(2, retains=True)
    assert (await router.begin(3, asked=points("y", "x"))).lease_id == right
    assert (await router.begin(4, asked=points("b", "a"))).lease_id == left
    kept = await service.stub.KeepConversationAlive(
        lease_pb2.KeepConversationAliveRequest(conversation=key("c"))
    )
    assert kept.kept.ToSeconds() > 0
    ended = await service.stub.EndConversation(
        lease_pb2.EndConversationRequest(conversation=key("c"))
    )
    assert ended.leases_ended == 2


async def test_a_turn_without_a_name_is_recognised_by_its_history(service: Service) -> None:
    """Also through another router, and by a leader that learnt of it from the engine alone."""
    engine = await Engine(service).up()
    router = await Router(service).up()
    first = await router.begin(1, "conv-1", asked=points("a"), recognise=True)
    assert first.conversation_id == "conv-1"
    await engine.grant("conv-1", 1, *points("a"))
    await router.end(1, retains=True)
    other = await Router(service).up()
    second = await other.begin(1, "conv-2", asked=points("b", "a"), recognise=True)
    assert (second.conversation_id, second.turn) == ("conv-1", 2)
    await service.fail_over()
    await engine.up(Engine.retention("conv-1", 2, *points("b")))
    third = await (await Router(service).up()).begin(
        1, "conv-3", asked=points("c", "b", "a"), recognise=True
    )
    assert (third.conversation_id, third.turn, third.extends) == ("conv-1", 3, True)


async def test_a_conversation_that_was_ended_is_not_recognised(service: Service) -> None:
    """The client said that it is over: the same history begins another one."""
    router = await Router(service).up()
    await router.begin(1, "conv-1", asked=points("a"), recognise=True)
    await router.end(1)
    await router.settled()
    await service.stub.EndConversation(lease_pb2.EndConversationRequest(conversation=key("conv-1")))
    again = await router.begin(2, "conv-2", asked=points("b", "a"), recognise=True)
    assert again.conversation_id == "conv-2"


async def test_ending_a_scope_of_thousands_holds_up_no_turns(service: Service) -> None:
    """Turns of others are answered in between; all of the scope is over afterwards."""
    router = await Router(service).up()
    names = [f"s~{number:012x}" for number in range(8_000)]
    for number, name in enumerate(names, 1):
        begun = beginning(number, name, asked=points(name), recognise=True)
        await router.send(begin_turns=[begun], end_turns=[lease_pb2.EndTurn(turn_id=number)])
    await router.answer(len(names))
    ending = asyncio.ensure_future(
        service.stub.EndConversation(lease_pb2.EndConversationRequest(conversation=key("s")))
    )
    answered = 0
    while not ending.done():
        answered += 1
        await router.begin(len(names) + answered, "other", reuse=False)
    assert answered > 4
    for number in (0, 4_000, 7_999):
        asked = points("more", names[number])
        again = await router.begin(10**5 + number, f"s~{number:x}", asked=asked, recognise=True)
        assert again.conversation_id == f"s~{number:x}"


async def test_a_conversation_nobody_knows_is_kept_by_nobody(service: Service) -> None:
    """Neither kept alive nor listed."""
    for method, request in (
        ("KeepConversationAlive", lease_pb2.KeepConversationAliveRequest(conversation=key("c"))),
        ("ListTurns", lease_pb2.ListTurnsRequest(conversation=key("c"))),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await getattr(service.stub, method)(request)
        assert error_info(raised.value)[0] == "CONVERSATION_NOT_FOUND"


# ---- reports ---------------------------------------------------------------------------------


async def test_reports_of_all_routers_and_branches_are_listed_by_age(service: Service) -> None:
    """Each with the conversation and number that the turn was given."""
    one, other = await Router(service).up(), await Router(service).up()
    await one.begin(1, asked=points("a"))
    await other.begin(1, asked=points("x"))
    await other.end(1, conversation_id="c~2", turn=1, verdict=REUSED, reused_tokens=7)
    await other.settled()
    await one.end(1, verdict=REUSED, reused_tokens=8)
    await one.begin(2, asked=points("b", "a"))
    await one.end(2)
    await one.settled()
    told = [
        (each.conversation_id, each.turn, each.reused_tokens)
        for each in await service.list_turns("c")
    ]
    assert told == [("c~2", 1, 7), ("c", 1, 8)]
    await one.begin(3, "silent")
    assert await service.list_turns("silent") == []


async def test_only_the_latest_reports_are_kept(service: Service) -> None:
    """Sixteen of a conversation; one that is absurdly long is not taken."""
    router = await Router(service).up()
    for turn in range(1, REPORTS_MAX + 4):
        await router.begin(turn)
        await router.end(turn, verdict=REUSED)
    await router.begin(99)
    await router.end(99, decode_engine="x" * 10_000)
    await router.settled()
    turns = [report.turn for report in await service.list_turns("c")]
    assert turns == list(range(4, REPORTS_MAX + 4))


def test_reports_are_bounded_over_all_conversations() -> None:
    """Whose last report is oldest is forgotten first."""
    reports = TurnReports(bytes_max=10_000)
    keys = [ConversationKey("t", "m", str(number)) for number in range(100)]
    for each in keys:
        reports.add(keys[0], b"new", 0)
        reports.add(each, bytes(100), 0)
    assert 10 < len(reports) < 20
    assert len(reports.latest([keys[0]])) == REPORTS_MAX
    assert reports.latest(keys[1:80]) == []
    assert [found for found, _ in reports.latest(keys[98:])] == keys[98:]


async def test_what_is_held_of_a_scope_is_told_with_its_turns(service: Service) -> None:
    """Of each conversation by itself; no more once it is ended."""
    engine = await Engine(service).up()
    router = await Router(service).up()
    names = [f"s~{number:012x}" for number in (1, 2)]
    for number, name in enumerate(names, 1):
        await router.begin(number, name, asked=points(name), recognise=True)
        await engine.grant(name, 1, *points(name))
        await router.end(number, retains=True, verdict=REUSED)
    await router.settled()
    request = lease_pb2.ListTurnsRequest(conversation=key("s"))
    told = await service.stub.ListTurns(request)
    assert [turn.conversation_id for turn in told.turns] == names
    held = {lease.conversation.conversation_id: lease for lease in told.leases}
    assert set(held) == set(names)
    assert {lease.engine_id for lease in held.values()} == {"d1"}
    assert all(lease.token_count and lease.HasField("idle_in") for lease in held.values())
    await service.stub.EndConversation(lease_pb2.EndConversationRequest(conversation=key(names[0])))
    told = await service.stub.ListTurns(request)
    assert [lease.conversation.conversation_id for lease in told.leases] == names[1:]


# ---- engines ---------------------------------------------------------------------------------


async def test_routers_hear_of_engines_as_they_change(service: Service) -> None:
    """All in the first message; then who came, moved and went, and nothing where all is equal."""
    prefill = Engine(service, "p1", "http://p1:8100")
    prefill.role = common_pb2.ENGINE_ROLE_PREFILL
    await prefill.up()
    router = await Router(service).up()
    assert list(router.engines) == ["p1"]
    assert router.engines["p1"].description.role == common_pb2.ENGINE_ROLE_PREFILL
    decode = await Engine(service).up()
    await router.read()
    assert router.engines["d1"].description.http_address == "http://d1:8200"
    pushes = router.pushes
    await decode.beat()
    await prefill.beat()
    await decode.up()  # its next session took the place of the one before
    await router.settled()
    assert router.pushes == pushes
    decode.address = "http://d1:9"
    await decode.up()
    await router.read()
    assert router.engines["d1"].description.http_address == "http://d1:9"
    await decode.down()
    await router.read()
    assert list(router.engines) == ["p1"]


async def test_an_engine_is_drained_and_taken_up_again(service: Service) -> None:
    """Routers are told at once; its next session and the next leader know it too."""
    engine = await Engine(service).up()
    router = await Router(service).up()
    await service.drain("d1")
    await router.read()
    assert router.engines["d1"].draining
    await service.drain("d1")  # again changes nothing, and is not told
    await engine.down()
    await router.read()
    assert router.engines == {}
    await engine.up()
    await router.read()
    assert router.engines["d1"].draining
    for draining in (True, False):
        await service.drain("d1", draining)
        await service.fail_over()
        await engine.up()
        (listed,) = (await service.stub.ListEngines(lease_pb2.ListEnginesRequest())).engines
        assert listed.draining == draining


async def test_an_engine_nobody_knows_is_not_drained(service: Service) -> None:
    """The error is typed."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await service.drain("d9")
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert error_info(raised.value)[0] == "ENGINE_NOT_FOUND"


async def test_a_prefill_engine_has_a_session_and_retains_nothing(service: Service) -> None:
    """Routers find it by its session; a grant of it is refused and changes nothing."""
    engine = Engine(service, "p1", "http://p1:8100")
    engine.role = common_pb2.ENGINE_ROLE_PREFILL
    await engine.up()
    await engine.grant("c", 1)
    router = await Router(service).up()
    assert (await router.begin(1)).verdict == common_pb2.VERDICT_FIRST_TURN
    assert (await service.stub.ListLeases(lease_pb2.ListLeasesRequest())).leases == []


# ---- limits and malformed messages -----------------------------------------------------------


async def test_only_so_many_routers_have_a_session() -> None:
    """One that leaves makes room."""
    config = replace(CONFIG, routers=RouterLimits(sessions=1))
    async with Service(config).running() as service:
        first = await Router(service).up()
        refused = Router(service)
        await refused.send(hello=lease_pb2.RouterHello(router_id="r"))
        assert await refused.error() == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ROUTERS_EXHAUSTED")
        await first.call.done_writing()
        assert await first.call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        malformed = Router(service)
        hello = lease_pb2.RouterHello(router_id="r")
        await malformed.send(hello=hello, begin_turns=[beginning(1), beginning(1)])
        assert await malformed.error() == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
        await Router(service).up()


async def test_only_so_many_turns_of_a_router_are_in_flight() -> None:
    """More are refused one by one, and take no number."""
    config = replace(CONFIG, routers=RouterLimits(turns=2))
    async with Service(config).running() as service:
        router = await Router(service).up()
        await router.send(begin_turns=[beginning(number) for number in (1, 2, 3)])
        refused = await router.answer(3)
        assert refused == lease_pb2.TurnBegun(turn_id=3, refused="TURNS_EXHAUSTED")
        await router.end(1)
        assert (await router.begin(4)).turn == 3


async def test_a_router_that_does_not_read_loses_its_session() -> None:
    """What gathers is bounded, whatever the router's flow control holds back."""
    stream = RouterStream(lease_pb2.RouterSessionResponse(), items_max=2)
    for turn_id in (1, 2):
        stream.tell(Begun(turn_id, refused="x"))
    ended = asyncio.create_task(stream.until_ended())
    stream.engine("d1", None)
    with pytest.raises(StreamSlow):
        await ended


@pytest.mark.parametrize(
    "turn",
    [
        lease_pb2.BeginTurn(turn_id=5),
        beginning(5, "c" * 257),
        beginning(5, asked=[bytes(15)]),
        beginning(5, asked=[bytes(16)] * 21),
        lease_pb2.BeginTurn(turn_id=5, conversation=key("c"), wait={"seconds": -1}),  # type: ignore[arg-type]
    ],
    ids=["no conversation", "long name", "short digest", "many points", "wait below 0"],
)
async def test_a_malformed_turn_is_refused_alone(
    service: Service, turn: lease_pb2.BeginTurn
) -> None:
    """The others of its message are not, and what is said of it later means nothing."""
    router = await Router(service).up(turn)
    await router.send(begin_turns=[turn, beginning(6)])
    assert (await router.answer(5)) == lease_pb2.TurnBegun(turn_id=5, refused="FIELD_INVALID")
    assert (await router.answer(6)).turn == 1
    await router.end(5, retains=True)
    assert (await router.begin(7, wait_ms=LONG_MS)).turn == 2


async def test_a_malformed_message_ends_the_session(service: Service) -> None:
    """No hello, a second one, no name, or a turn id that is in use."""
    hello = lease_pb2.RouterHello(router_id="r")
    begin = lease_pb2.RouterSessionRequest(begin_turns=[beginning(1)])
    first = lease_pb2.RouterSessionRequest(hello=hello)
    nameless = lease_pb2.RouterSessionRequest(hello=lease_pb2.RouterHello())
    for messages in ([begin], [first, first], [nameless], [first, begin, begin]):
        router = Router(service)
        for message in messages:
            await router.call.write(message)
        assert await router.error() == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")


async def test_a_session_without_a_hello_ends() -> None:
    """Within the session TTL."""
    config = replace(CONFIG, lessor=LessorConfig(session_ttl_ns=100 * MS, heartbeat_ns=25 * MS))
    async with Service(config).running() as service:
        router = Router(service)
        assert await router.error() == (grpc.StatusCode.DEADLINE_EXCEEDED, "HELLO_LATE")


# ---- the end of a term -----------------------------------------------------------------------


async def test_a_leader_that_is_deposed_ends_the_sessions(service: Service) -> None:
    """The router asks the next one, and brings its turns along."""
    router = await Router(service).up()
    await router.begin(1)
    service.servicer.stand_by(NotLeader("other:7600"))
    assert await router.error() == (grpc.StatusCode.UNAVAILABLE, "NOT_LEADER")
    refused = Router(service)
    assert await refused.error() == (grpc.StatusCode.UNAVAILABLE, "NOT_LEADER")
    await service.lead()
    again = await Router(service).up(beginning(1))
    assert (await again.begin(2)).turn == 2


async def test_a_service_that_stops_ends_the_sessions(service: Service) -> None:
    """At once, with its reason."""
    router = await Router(service).up()
    stopping = asyncio.create_task(service.server.stop())
    assert await router.error() == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    await stopping


# ---- conversations ---------------------------------------------------------------------------


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 10**18

    def __call__(self) -> int:
        return self.now_ns

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1_000 * MS)


async def listed(service: Service, **wanted: Any) -> lease_pb2.ListConversationsResponse:
    answer = await service.stub.ListConversations(lease_pb2.ListConversationsRequest(**wanted))
    assert isinstance(answer, lease_pb2.ListConversationsResponse)
    return answer


def names_of(answer: lease_pb2.ListConversationsResponse) -> list[str]:
    return [each.key.conversation_id for each in answer.conversations]


async def test_conversations_are_listed_with_what_is_known_of_them() -> None:
    """The one with the latest sign of life first: its turns, what is held, its latest report."""
    clock = Clock()
    async with Service(clock_ns=clock).running() as service:
        engine = await Engine(service).up()
        router = await Router(service).up()
        await router.begin(1, "early", asked=points("a"))
        await engine.grant("early", 1, *points("a"))
        await router.end(
            1, retains=True, verdict=REUSED, age={"seconds": 99}, total_time={"seconds": 2}
        )
        await router.settled()
        clock.wait(3)
        await router.begin(2, "late")
        clock.wait(0.5)
        answer = await listed(service)
        late, early = (each for each in answer.conversations if each.key.conversation_id != "other")
        assert answer.total_size == 3
        assert late.key == key("late")
        assert (late.turns, late.turns_in_flight, late.lease_count) == (1, 1, 0)
        assert late.quiet_for.ToMilliseconds() == 500
        assert not late.HasField("latest_turn")
        assert not late.HasField("idle_in")
        assert (early.turns, early.turns_in_flight, early.engine_id) == (1, 0, "d1")
        assert (early.token_count, early.block_count, early.lease_count) == (64, 4, 1)
        assert early.quiet_for.ToMilliseconds() == 3_500
        assert early.idle_in.ToMilliseconds() == 56_500
        assert early.latest_turn.conversation_id == "early"
        assert early.latest_turn.verdict == REUSED
        assert early.latest_turn.total_time.ToSeconds() == 2
        # The router's word on the age counts for nothing: its clock began elsewhere.
        assert early.latest_turn.age.ToMilliseconds() == 3_500
        [turn] = await service.list_turns("early")
        assert turn.age.ToMilliseconds() == 3_500


async def test_only_the_conversations_that_are_wanted_are_listed(service: Service) -> None:
    """By tenant, model, engine and what is retained; `total_size` counts those beyond the page."""
    one, two = await Engine(service).up(), await Engine(service, "d2", "http://d2:8200").up()
    router = await Router(service).up()
    for number in range(1, 6):
        await router.begin(number, f"c{number}")
        await router.end(number)
    await router.settled()
    await one.grant("c1", 1)
    await two.grant("c2", 1)
    await one.grant("c3", 1)
    await two.grant("c3", 2)
    every = {"c1", "c2", "c3", "c4", "c5", "other"}
    assert set(names_of(await listed(service, tenant="t"))) == every
    assert set(names_of(await listed(service, model="m"))) == every
    assert names_of(await listed(service, tenant="T")) == []
    assert names_of(await listed(service, model="M")) == []
    assert set(names_of(await listed(service, engine_id="d2"))) == {"c2", "c3"}
    assert set(names_of(await listed(service, retained_only=True))) == {"c1", "c2", "c3"}
    assert names_of(await listed(service, conversation_id="c1")) == ["c1"]
    assert names_of(await listed(service, conversation_id="c")) == []
    page = await listed(service, page_size=2)
    assert (len(page.conversations), page.total_size) == (2, 6)
    await router.begin(6, "s~0123456789ab")
    await router.begin(7, "s")
    await router.begin(8, "s2")
    assert set(names_of(await listed(service, conversation_id="s"))) == {"s", "s~0123456789ab"}
    await two.down()
    # Nothing of it can be reused until it is back, but it held the conversation last.
    assert names_of(await listed(service, retained_only=True)) == ["c1"]
    assert set(names_of(await listed(service, engine_id="d2"))) == {"c2", "c3"}


async def test_the_next_term_lists_what_engines_and_routers_bring_it(service: Service) -> None:
    """Names are in no record: what has no lease and no turn is not known after a failover."""
    engine = await Engine(service).up()
    router = await Router(service).up()
    await router.begin(1, "held")
    await engine.grant("held", 4)
    await router.end(1, retains=True)
    await router.begin(2, "gone")
    await router.end(2)
    await router.settled()
    await service.fail_over()
    await engine.up(Engine.retention("held", 4))
    in_flight = beginning(7, "asked")
    in_flight.turn = 3
    router = await Router(service).up(in_flight)
    answer = await listed(service)
    known = {each.key.conversation_id: each for each in answer.conversations}
    assert set(known) == {"held", "asked"}
    assert (known["held"].turns, known["held"].token_count) == (4, 64)
    assert (known["asked"].turns, known["asked"].turns_in_flight) == (3, 1)


async def test_a_list_of_many_conversations_holds_up_no_turns(service: Service) -> None:
    """Turns are answered while it is made; it holds the latest of all, in order."""
    router = await Router(service).up()
    count = 20_000
    for number in range(1, count + 1):
        begun = beginning(number, f"c{number}")
        await router.send(begin_turns=[begun], end_turns=[lease_pb2.EndTurn(turn_id=number)])
    await router.answer(count)
    listing = asyncio.ensure_future(listed(service, page_size=1_000))
    answered = 0
    while not listing.done():
        answered += 1
        await router.begin(count + answered, "other", reuse=False)
    assert answered > 4
    answer = listing.result()
    assert len(answer.conversations) == 1_000
    assert count <= answer.total_size <= count + 1


def test_a_search_finds_the_latest_of_all() -> None:
    """Wherever they lie, and however many there are of the same time."""
    conversations = []
    for number in range(10_000):
        conversation = Conversation(ConversationKey("t", "m", str(number)))
        conversation.seen_ns = number * 7_919 % 5_003
        conversations.append(conversation)
    search = ConversationSearch(conversations, Wanted(), 300)
    assert len(list(search.steps())) > 1
    found = [each.seen_ns for each in search.latest()]
    assert found == sorted((each.seen_ns for each in conversations), reverse=True)[:300]
    assert search.total == 10_000


# ---- traces ----------------------------------------------------------------------------------


def traced(number: int) -> lease_pb2.TurnTrace:
    """Where a turn is in its trace; all of its ids are of one byte."""
    byte = bytes([number])
    return lease_pb2.TurnTrace(trace_id=byte * 16, span_id=byte * 8, parent_span_id=b"p" + byte * 7)


def named(trace: lease_pb2.TurnTrace) -> lease_pb2.TurnTrace:
    """What a turn is told of the one before it."""
    return lease_pb2.TurnTrace(trace_id=trace.trace_id, span_id=trace.span_id)


@pytest.fixture
async def recorded() -> AsyncIterator[tuple[Service, Recording]]:
    recording = Recording()
    async with Service(tracing=recording.tracing).running() as running:
        yield running, recording


async def test_a_turn_learns_which_recorded_turn_came_before_it_on_any_router(
    recorded: tuple[Service, Recording],
) -> None:
    """Also after a router's session began anew; one that is not recorded learns of none."""
    service, _ = recorded
    one, other = await Router(service).up(), await Router(service).up()
    assert not (await one.begin(1, trace=traced(1))).HasField("previous")
    await one.end(1)
    assert (await other.begin(1, trace=traced(2))).previous == named(traced(1))
    await other.end(1)
    assert not (await one.begin(2)).HasField("previous")
    assert not (await one.begin(3, "another", trace=traced(3))).HasField("previous")
    again = await Router(service).up(beginning(7, trace=traced(4)))
    assert (await again.begin(8, reuse=False, trace=traced(5))).previous == named(traced(4))


async def test_what_a_turn_is_answered_is_a_span_under_its_question(
    recorded: tuple[Service, Recording],
) -> None:
    """One that waits for a grant lasts until it has come; no history and no tenant is told."""
    service, recording = recorded
    engine = await Engine(service).up()
    router = await Router(service).up()
    await router.begin(1, asked=points("secret-a"), trace=traced(1))
    await router.end(1, retains=True)
    waiting = beginning(2, asked=points("b", "secret-a"), wait_ms=LONG_MS, trace=traced(2))
    await router.send(begin_turns=[waiting])
    await router.settled()
    lease_id = await engine.grant("c", 1, *points("secret-a"))
    await router.answer(2)
    malformed = lease_pb2.TurnTrace(trace_id=b"short", span_id=b"s" * 8)
    await router.begin(3, "unheard-of", trace=malformed)
    first, second = (span for span in recording.spans() if span.name == "BeginTurn")
    for span, trace in ((first, traced(1)), (second, traced(2))):
        assert (span.trace_id, span.parent_span_id) == (trace.trace_id, trace.parent_span_id)
    assert told(first) == {
        "gen_ai.conversation.id": "c",
        "kvturn.turn": 1,
        "kvturn.waited": False,
        "kvturn.lease_id": "",
        "kvturn.verdict": "first_turn",
        "kvturn.decode.engine": "",
        "kvturn.retained_tokens": 0,
    }
    assert told(second)["kvturn.lease_id"] == lease_id
    assert told(second)["kvturn.waited"] is True
    assert b"secret" not in b"".join(recording.exported)

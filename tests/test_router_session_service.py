"""A router's session with a lease service as it is: the two ends of it together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from stub_engine import GUARD_S

from kvturn.clock import boottime_ns
from kvturn.lease_channels import LeaseChannels
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn_lease.config import LeaseConfig
from kvturn_lease.errors import NotLeader
from kvturn_lease.lessor import Lessor
from kvturn_lease.server import LeaseServer
from kvturn_lease.servicer import LeaseServicer
from kvturn_lease.store import MemoryStore
from kvturn_lease.telemetry import make_tracing
from kvturn_router.engines.engine import Engine as RouterEngine
from kvturn_router.engines.fleet import Fleet
from kvturn_router.engines.health import Health
from kvturn_router.leases.router_session import RouterSession
from kvturn_router.leases.session_turns import Retained, SessionTurn
from kvturn_router.request.conversation import ConversationKey
from kvturn_router.verdict import Verdict

KEY = ConversationKey("t", "m", "c")


def points(*asked: str) -> list[bytes]:
    """Digests of histories, the latest first."""
    return [text.encode().ljust(16, b".") for text in asked]


async def until(condition: Any) -> None:
    async with asyncio.timeout(GUARD_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Service:
    """A lease service in this process."""

    def __init__(self) -> None:
        config = LeaseConfig(port=0)
        tracing = make_tracing(None)
        self._config, self._terms = config.lessor, 0
        self._servicer = LeaseServicer(config, None, None, boottime_ns, tracing)
        self._server = LeaseServer(config, self._servicer, tracing)

    async def start(self) -> None:
        self.lead()
        self.address = f"127.0.0.1:{await self._server.start()}"

    def lead(self) -> None:
        """Begins a term that knows nothing of the one before."""
        self._terms += 1
        self._servicer.lead(Lessor(self._config, self._terms), MemoryStore())

    async def fail_over(self) -> None:
        """Another term begins; for a moment nobody leads."""
        self._servicer.stand_by(NotLeader())
        await self._server.set_leading(False)
        self.lead()
        await self._server.set_leading(True)

    async def stop(self) -> None:
        await self._server.stop()


class Engine:
    """A decode engine's session."""

    def __init__(self, service: Service) -> None:
        self._channel = grpc.aio.insecure_channel(service.address)
        self._sequence = 0
        self._grants = 0

    async def up(self) -> "Engine":
        stub = lease_pb2_grpc.LeaseServiceStub(self._channel)
        self._call = stub.EngineSession()  # type: ignore[call-arg]
        about = lease_pb2.EngineDescription(
            engine_id="d1",
            incarnation="i",
            role=common_pb2.ENGINE_ROLE_DECODE,
            http_address="http://10.0.0.1:8200",
            nixl=common_pb2.NixlAddress(
                nixl_engine_id="n", host="h", port=1, tp_size=1, dcp_size=1, pp_size=1
            ),
        )
        await self._send(register=lease_pb2.RegisterEngine(engine=about))
        last: Any = await self._call.read()
        await self._send(
            heartbeat=lease_pb2.Heartbeat(echo_term=last.term, echo_sequence=last.sequence)
        )
        await self._call.read()
        return self

    async def grant(self, turn: SessionTurn) -> str:
        """Retains a turn's KV; returns the lease id."""
        self._grants += 1
        lease_id = f"i.{self._grants}.1"
        retention = common_pb2.Retention(
            lease_id=lease_id,
            conversation=common_pb2.ConversationKey(
                tenant=KEY.tenant, model=KEY.model, conversation_id=turn.conversation_id
            ),
            token_count=64,
            block_size=16,
            groups=[common_pb2.BlockGroup(block_ids=range(4))],
            digests=common_pb2.TokenDigests(
                stride_tokens=16, digest_bytes=16, values=bytes(16) * 4
            ),
            prompt_tokens=48,
            local_cached_tokens=32,
            turn=turn.number,
            history=turn.points[0],
        )
        await self._send(grant=lease_pb2.Grant(retention=retention))
        return lease_id

    async def down(self) -> None:
        await self._channel.close()

    async def _send(self, **message: Any) -> None:
        self._sequence += 1
        await self._call.write(
            lease_pb2.EngineSessionRequest(session_number=1, sequence=self._sequence, **message)
        )


class Router:
    """A router's session and fleet."""

    def __init__(self, service: Service) -> None:
        def build(address: Any, number: int) -> RouterEngine:
            health = Health(interval_ns=10**9, failures_max=2, faults_max=5, phase=0, now_ns=0)
            return RouterEngine(address, health=health, connect_timeout_s=1)

        self.fleet = Fleet(build, boottime_ns)
        self._channels = LeaseChannels([service.address], boottime_ns)
        self._probes = asyncio.create_task(self._channels.run())
        self.session = RouterSession(
            self._channels,
            router_id="r",
            question_deadline_ms=5000,
            listener=self.fleet,
            clock_ns=boottime_ns,
        )
        self.session.start()

    async def begin(self, *asked: str, recognise: bool = False, **more: Any) -> SessionTurn:
        """Begins a turn and waits for what it can reuse."""
        turn = self.session.begin(KEY, points(*asked), recognise=recognise, reuse=True, **more)
        await self.session.resolution(turn)
        return turn

    async def stop(self) -> None:
        await self.session.stop()
        self._probes.cancel()
        await asyncio.gather(self._probes, return_exceptions=True)
        await self._channels.close()


@contextlib.asynccontextmanager
async def system(routers: int = 1) -> AsyncIterator[tuple[Service, Engine, list[Router]]]:
    service = Service()
    await service.start()
    engine = await Engine(service).up()
    stack = [Router(service) for _ in range(routers)]
    try:
        for router in stack:
            await until(lambda router=router: router.session.sessions)
        yield service, engine, stack
    finally:
        for router in stack:
            await router.stop()
        await engine.down()
        await service.stop()


async def test_a_conversation_goes_through_two_routers():
    """Turn 1 here, turn 2 there: it waits for turn 1's grant, and reads what turn 1 left."""
    async with system(routers=2) as (_, engine, (here, there)):
        first = await here.begin("a")
        assert (first.number, first.resolution.verdict) == (1, Verdict.FIRST_TURN)
        second = there.session.begin(KEY, points("b", "a"), recognise=False, reuse=True)
        here.session.end(first, retains=True)
        lease_id = await engine.grant(first)
        found = await there.session.resolution(second)
        assert (found.verdict, found.lease_id, second.number) == (None, lease_id, 2)
        assert (found.token_count, found.prompt_tokens, found.extends) == (64, 48, True)
        assert (found.engine_id, found.http_address) == ("d1", "http://10.0.0.1:8200")
        assert found.longest_read_ms == 3000
        assert there.fleet.holder(found.http_address, found.engine_id) is not None


async def test_a_turn_hears_what_is_retained_of_it():
    """Decode grants it while the turn is in flight still."""
    async with system() as (_, engine, (router,)):
        heard: list[Retained] = []
        turn = await router.begin("a", on_retained=heard.append)
        await engine.grant(turn)
        await until(lambda: heard)
        assert heard == [Retained(64, 48, 32)]
        router.session.end(turn, retains=True)


async def test_turns_without_a_name_are_recognised_by_what_they_extend():
    """Both are minted another id; the second turn is told that it goes on with the first."""
    async with system() as (_, engine, (router,)):
        first = await router.begin("a", recognise=True)
        router.session.end(first, retains=True)
        await engine.grant(first)
        minted = KEY._replace(conversation_id="conv-new")
        second = router.session.begin(minted, points("b", "a"), recognise=True, reuse=True)
        assert (await router.session.resolution(second)).lease_id
        assert (second.conversation_id, second.number) == ("c", 2)


async def test_a_turn_in_flight_survives_a_change_of_the_leader():
    """The next term counts it as in flight and lets its grant be found; engines stay."""
    async with system() as (service, _, (router,)):
        first = await router.begin("a")
        (engine,) = router.fleet.decodes
        router.fleet.seen_well(engine)
        await service.fail_over()
        await until(lambda: router.session.sessions == 2)
        second = await router.begin("b")
        assert second.resolution.verdict is not Verdict.LEASE_SERVICE_UNREACHABLE
        # The first is in flight there too: what is no extension of it is a branch of its own.
        assert second.conversation_id == "c~2"
        router.session.end(first)
        assert router.fleet.decodes.least() is engine

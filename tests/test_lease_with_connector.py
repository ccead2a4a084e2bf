"""The lease service and the connector's own client, both real, over one channel."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from kvturn.clock import boottime_ns
from kvturn.v1 import common_pb2, lease_pb2, lease_pb2_grpc
from kvturn_connector.config import ConnectorConfig
from kvturn_connector.digest import Scope
from kvturn_connector.lease_client import LeaseClient, Question
from kvturn_connector.reader import Answer, End
from kvturn_connector.retention import Retentions
from kvturn_connector.session import EngineSession
from kvturn_lease.config import LeaseConfig, LessorConfig
from kvturn_lease.lessor import Lessor
from kvturn_lease.server import LeaseServer
from kvturn_lease.servicer import LeaseServicer
from kvturn_lease.store import MemoryStore
from kvturn_lease.telemetry import make_tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MS = 1_000_000
CONFIG = LeaseConfig(
    port=0,
    lessor=LessorConfig(session_ttl_ns=3_000 * MS, heartbeat_ns=100 * MS, longest_read_ns=400 * MS),
    shutdown_grace_ns=100 * MS,
)
KEY = common_pb2.ConversationKey(tenant="t", model="m", conversation_id="c")
SCOPE = Scope(tenant="t", model="m")
TOKENS = list(range(100))


@asynccontextmanager
async def lease_service(port: int = 0, term: int = 7) -> AsyncIterator[tuple[int, Any]]:
    """A lease service without memory of its predecessor, and a stub to it."""
    config, tracing = replace(CONFIG, port=port), make_tracing(None)
    lessor = Lessor(config.lessor, term)
    servicer = LeaseServicer(config, lessor, MemoryStore(), boottime_ns, tracing)
    server = LeaseServer(config, servicer, tracing)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield port, lease_pb2_grpc.LeaseServiceStub(channel)
        finally:
            await server.stop()


@asynccontextmanager
async def decode_client(port: int) -> AsyncIterator[LeaseClient]:
    """The thread that runs in a decode engine."""
    nixl = common_pb2.NixlAddress(
        nixl_engine_id="n", host="127.0.0.1", port=5600, tp_size=1, dcp_size=1, pp_size=1
    )
    engine = lease_pb2.EngineDescription(
        engine_id="d1", incarnation="inc", role=common_pb2.ENGINE_ROLE_DECODE, nixl=nixl
    )
    session = EngineSession(engine, Retentions("inc", 100, 480_000 * MS), lease_pb2.KvMemory)
    extra = {
        "kvturn_lease_endpoint": f"127.0.0.1:{port}",
        "bidirectional_kv_xfer": True,
        "kvturn_question_deadline_ms": 5_000.0,
    }
    client = LeaseClient(ConnectorConfig.from_extra(extra), "d1", session)
    try:
        async with asyncio.timeout(20):
            yield client
    finally:
        await asyncio.to_thread(client.shutdown)


async def until(condition: Callable[[], bool]) -> None:
    """Returns when something that another thread brings about has come true."""
    while not condition():  # noqa: ASYNC110 - other threads cannot set an asyncio.Event
        await asyncio.sleep(0.005)


def retain(client: LeaseClient, number: int, name: str = "c") -> None:
    offer = common_pb2.Retention(
        conversation=common_pb2.ConversationKey(tenant="t", model="m", conversation_id=name),
        token_count=len(TOKENS),
        block_size=16,
        groups=[common_pb2.BlockGroup(block_ids=range(1, 8))],
        turn=number,
    )
    client.retain(number, offer, TOKENS, SCOPE, "")


async def resolved(stub: Any, name: str = "c") -> str:
    """Returns the conversation's lease id as soon as there is one to read."""
    key = common_pb2.ConversationKey(tenant="t", model="m", conversation_id=name)
    request = lease_pb2.ResolveConversationRequest(
        conversation=key, expected_turn=1, wait={"seconds": 1}
    )
    while not (answer := await stub.ResolveConversation(request)).lease_id:
        pass
    return str(answer.lease_id)


async def ask(client: LeaseClient, lease_id: str) -> Answer:
    client.ask(Question("r", lease_id, KEY, TOKENS[:50], SCOPE, ""))
    answers: list[Any] = []
    await until(lambda: bool(answers.extend(client.take_answers()) or answers))
    answer = answers[0][1]
    assert isinstance(answer, Answer)
    return answer


async def freed(client: LeaseClient) -> list[int]:
    numbers: list[int] = []
    await until(
        lambda: bool(numbers.extend(each.number for each in client.take_freed()) or numbers)
    )
    return numbers


async def test_a_retention_is_granted_read_and_freed() -> None:
    """The client's words are taken as the API says them, and answered in kind."""
    async with lease_service() as (port, stub), decode_client(port) as client:
        await until(lambda: client.registered)
        retain(client, 1)
        lease_id = await resolved(stub)
        answer = await ask(client, lease_id)
        assert answer.granted
        assert answer.common_tokens == 48
        assert not (await ask(client, lease_id)).granted
        outcome = lease_pb2.READ_OUTCOME_COMPLETED
        client.end_read(End(lease_pb2.EndReadRequest(lease_id=lease_id, outcome=outcome)))
        assert await freed(client) == [1]


async def test_a_withdrawn_retention_is_freed() -> None:
    async with lease_service() as (port, stub), decode_client(port) as client:
        await until(lambda: client.registered)
        retain(client, 1)
        await resolved(stub)
        client.withdraw(1, common_pb2.RELEASE_REASON_PRESSURE)
        assert await freed(client) == [1]


async def test_a_new_lease_service_takes_over_what_is_retained() -> None:
    """Restart on the same port: the inventory is inherited, waits, and can then be read."""
    async with AsyncExitStack() as clients:
        async with lease_service() as (port, stub):
            client = await clients.enter_async_context(decode_client(port))
            await until(lambda: client.registered)
            retain(client, 1)
            old_id = await resolved(stub)
        second = await clients.enter_async_context(lease_service(port, term=8))
        stub = second[1]
        started = asyncio.get_running_loop().time()
        lease_id = await resolved(stub)
        waited = asyncio.get_running_loop().time() - started
        assert lease_id != old_id
        assert waited > 0.4  # longer than a reader of the first one may still go on
        assert (await ask(client, lease_id)).granted

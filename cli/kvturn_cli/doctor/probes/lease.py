"""Asks each process of the lease service who it is, and the leader what it knows."""

import asyncio
import time
from collections.abc import Sequence

import grpc
import grpc.aio

from kvturn.lease_access import LeaseAccess
from kvturn.v1 import lease_pb2, lease_pb2_grpc
from kvturn_cli.doctor.facts import Clock, LeaseFacts, LeaseProcess

CONVERSATIONS_MAX = 1_000
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
)


async def probe_lease(
    endpoints: Sequence[str], asked_of: str, access: LeaseAccess, timeout_s: float
) -> LeaseFacts:
    """Asks all endpoints at once, then the one that leads."""
    channels = {one: access.channel(one, _OPTIONS) for one in dict.fromkeys(endpoints)}
    try:
        processes = await asyncio.gather(
            *(_describe(one, channels[one], access, timeout_s) for one in channels)
        )
        candidates = [
            one for one in processes if one.leads or (not one.problem and not one.described)
        ]
        facts = LeaseFacts(processes, asked_of)
        if not candidates:
            return facts
        return await _lists(facts, channels[candidates[0].endpoint], access, timeout_s)
    finally:
        await asyncio.gather(*(channel.close(None) for channel in channels.values()))


async def _describe(
    endpoint: str, channel: grpc.aio.Channel, access: LeaseAccess, timeout_s: float
) -> LeaseProcess:
    stub = lease_pb2_grpc.LeaseServiceStub(channel)
    began_s, asked_s = time.perf_counter(), time.time()
    try:
        described = await stub.DescribeService(  # type: ignore[misc]
            lease_pb2.DescribeServiceRequest(), timeout=timeout_s, metadata=access.metadata
        )
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return LeaseProcess(endpoint)
        return LeaseProcess(endpoint, access.problem(error.code(), error.details() or ""))
    told_s = described.wall_time.ToMicroseconds() / 1e6
    return LeaseProcess(
        endpoint,
        described=described,
        answer_ms=(time.perf_counter() - began_s) * 1_000,
        clock=Clock(f"lease service {endpoint}", told_s - time.time(), told_s - asked_s),
    )


async def _lists(
    facts: LeaseFacts, channel: grpc.aio.Channel, access: LeaseAccess, timeout_s: float
) -> LeaseFacts:
    stub = lease_pb2_grpc.LeaseServiceStub(channel)
    question = lease_pb2.ListConversationsRequest(page_size=CONVERSATIONS_MAX)
    engines, conversations = await asyncio.gather(
        stub.ListEngines(  # type: ignore[call-overload]
            lease_pb2.ListEnginesRequest(), timeout=timeout_s, metadata=access.metadata
        ),
        stub.ListConversations(question, timeout=timeout_s, metadata=access.metadata),
        return_exceptions=True,
    )
    problem = ""
    if isinstance(engines, grpc.aio.AioRpcError):
        problem = access.problem(engines.code(), engines.details() or "")
    listed = isinstance(conversations, lease_pb2.ListConversationsResponse)
    return LeaseFacts(
        facts.processes,
        facts.asked_of,
        engines=engines.engines if isinstance(engines, lease_pb2.ListEnginesResponse) else None,
        conversations=conversations.conversations if listed else None,
        problem=problem,
    )

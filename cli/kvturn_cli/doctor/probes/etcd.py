"""Asks every member of etcd's cluster, and a majority of them."""

import asyncio
import time
from dataclasses import replace

from kvturn.etcd.v3 import etcd_pb2
from kvturn_cli.doctor.facts import EtcdFacts, EtcdMember
from kvturn_lease.etcd.client import RANGE
from kvturn_lease.etcd.config import EtcdConfig
from kvturn_lease.etcd.connection import Connection, Method
from kvturn_lease.etcd.errors import EtcdError

READS = 5
STATUS = Method("/etcdserverpb.Maintenance/Status", etcd_pb2.StatusRequest, etcd_pb2.StatusResponse)
MEMBER_LIST = Method(
    "/etcdserverpb.Cluster/MemberList", etcd_pb2.MemberListRequest, etcd_pb2.MemberListResponse
)


async def probe_etcd(config: EtcdConfig, timeout_s: float) -> EtcdFacts:
    """Asks all endpoints of the configuration at once."""
    members = await asyncio.gather(
        *(_member(replace(config, endpoints=(one,)), timeout_s) for one in config.endpoints)
    )
    reached = tuple(one.endpoint for one in members if not one.problem)
    if not reached:
        return EtcdFacts(members)
    connection = Connection(replace(config, endpoints=reached))
    try:
        return await _cluster(connection, members, config.prefix, timeout_s)
    finally:
        await connection.close()


async def _member(config: EtcdConfig, timeout_s: float) -> EtcdMember:
    [endpoint] = config.endpoints
    connection = Connection(config)
    try:
        status = await connection.call(STATUS, etcd_pb2.StatusRequest(), timeout_s, safe=True)
    except EtcdError as error:
        return EtcdMember(endpoint, str(error) or "it does not answer")
    finally:
        await connection.close()
    return EtcdMember(
        endpoint,
        version=status.version,
        leader=status.leader,
        db_bytes=status.db_size,
        db_used_bytes=status.db_size_in_use,
        quota_bytes=status.db_size_quota,
        errors=tuple(status.errors),
    )


async def _cluster(
    connection: Connection, members: list[EtcdMember], prefix: str, timeout_s: float
) -> EtcdFacts:
    size, problem, read_ms = 0, "", []
    try:
        question = etcd_pb2.MemberListRequest()
        answer = await connection.call(MEMBER_LIST, question, timeout_s, safe=True)
        size = len(answer.members)
    except EtcdError:
        pass  # Its users may lack the right; the members that are named are judged all the same.
    try:
        for _ in range(READS):
            began_s = time.perf_counter()
            key = etcd_pb2.RangeRequest(key=prefix.encode())
            await connection.call(RANGE, key, timeout_s, safe=True)
            read_ms.append((time.perf_counter() - began_s) * 1_000)
    except EtcdError as error:
        problem = str(error) or "no answer in time"
    return EtcdFacts(members, size, read_ms, problem)

"""A lease service that keeps its records in etcd, beside what etcd itself takes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from bench.lease import workload
from bench.lease.figures import Table
from bench.lease.fleet import EngineSession
from bench.lease.load import closed_loop
from bench.lease.operations import (
    IN_FLIGHT,
    Setting,
    echoing,
    holding,
    measure_operations,
    service_args,
)
from bench.lease.processes import BenchError, Cores, ServerProcess, Usage
from bench.lease.questions import (
    COLUMNS,
    PER_SECOND,
    EchoedReads,
    compare,
    leasing,
)
from kvturn.etcd.v3 import etcd_pb2
from kvturn_cli.etcd import etcd_command, find_etcd, is_healthy, version_of
from kvturn_cli.leash import die_with_parent
from kvturn_cli.ports import HOST, pick_free
from kvturn_lease.etcd.client import created_at, prefix_end, put

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_START_TIMEOUT_S = 30.0
_WRITTEN_TIMEOUT_S = 60.0
_DEADLINE_S = 10.0
_RENEWALS = re.compile(rb"^etcd_debugging_lease_renewed_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EtcdScale:
    """How much is measured with etcd."""

    setting: Setting
    heartbeat_s: float
    """For how long heartbeats come without a pause."""
    grants: int
    """How many leases are granted at once."""


class Etcd:
    """A running etcd and one bare connection to it."""

    def __init__(self, pid: int, port: int, version: str) -> None:
        self.version = version
        self.store = f"etcd://{HOST}:{port}"
        self._pid = pid
        self._metrics = f"http://{HOST}:{port}/metrics"
        self._channel = grpc.aio.insecure_channel(f"{HOST}:{port}")
        self._range = self._method("Range", etcd_pb2.RangeRequest, etcd_pb2.RangeResponse)
        self._txn = self._method("Txn", etcd_pb2.TxnRequest, etcd_pb2.TxnResponse)

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close(None)

    def usage(self) -> Usage:
        """Returns what etcd had of its cores."""
        return Usage.of(self._pid)

    async def transact(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        """Applies a transaction whose conditions hold."""
        response: etcd_pb2.TxnResponse = await self._txn(request, timeout=_DEADLINE_S)
        if not response.succeeded:
            raise BenchError("a fenced transaction was refused")
        return response

    async def count(self, prefix: str) -> tuple[int, int]:
        """Returns how many conversations are recorded under a prefix, and etcd's revision."""
        first = f"{prefix}conversations/".encode()
        request = etcd_pb2.RangeRequest(key=first, range_end=prefix_end(first), count_only=True)
        response = await self._range(request, timeout=_DEADLINE_S)
        return response.count, response.header.revision

    def renewals(self) -> int:
        """Returns how many etcd leases were renewed since its start."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self._metrics, timeout=_DEADLINE_S) as answer:
            found = _RENEWALS.search(answer.read())
        return 0 if found is None else int(float(found[1]))

    def _method(self, name: str, request: Any, response: Any) -> Any:
        return self._channel.unary_unary(
            f"/etcdserverpb.KV/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )


@contextlib.asynccontextmanager
async def running_etcd() -> AsyncIterator[Etcd]:
    """Runs one etcd with its usual durability, on any core."""
    binary = find_etcd()
    if binary is None:
        raise BenchError("no etcd; run make setup-fast")
    taken: set[int] = set()
    port, peer_port = pick_free(taken), pick_free(taken)
    with tempfile.TemporaryDirectory() as folder:
        command = etcd_command(binary, Path(folder) / "data", port, peer_port)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        try:
            deadline_s = time.monotonic() + _START_TIMEOUT_S
            while not await asyncio.to_thread(is_healthy, port):
                if process.returncode is not None or time.monotonic() > deadline_s:
                    raise BenchError("etcd did not start")
                await asyncio.sleep(0.05)
            etcd = Etcd(process.pid, port, ".".join(map(str, version_of(binary))))
            try:
                yield etcd
            finally:
                await etcd.close()
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.terminate()
            await process.wait()


class Transactions:
    """One fenced transaction after the other: a put of as many bytes as a granted read has."""

    name = "fenced transaction"

    def __init__(self, etcd: Etcd, points: int) -> None:
        self.ask = etcd.transact
        self.usage = etcd.usage
        self._etcd = etcd
        self._value = workload.begin_read_answer(points)
        self._fence: etcd_pb2.Compare | None = None

    async def prepare(self, count: int) -> Sequence[Any]:
        """Returns transactions on keys that no other one names."""
        if self._fence is None:
            leader = etcd_pb2.TxnRequest(success=[put(b"bench/leader", b"here", 0)])
            response = await self._etcd.transact(leader)
            self._fence = created_at(b"bench/leader", response.header.revision)
        return [
            etcd_pb2.TxnRequest(
                compare=[self._fence], success=[put(b"bench/%032d" % number, self._value, 0)]
            )
            for number in range(count)
        ]

    async def finish(self, requests: Sequence[Any]) -> None:
        """Has nothing to clean up."""


async def measure_etcd(
    scale: EtcdScale, points: int, cores: Cores, *, rounds: int, batch: int, questions: int
) -> list[Table]:
    """Returns the operations with both stores, BeginRead beside a transaction, and the writes."""
    async with running_etcd() as etcd:
        memory = scale.setting
        kept = replace(memory, store=etcd.store, prefix="operations/")
        return [
            await measure_operations(
                "Operations over gRPC, both stores", (memory, kept), points, cores, rounds, batch
            ),
            await _questions(etcd, memory, points, cores, 2 * rounds, questions),
            await _writes(etcd, scale, points, cores),
        ]


async def _questions(
    etcd: Etcd,
    memory: Setting,
    points: int,
    cores: Cores,
    rounds: int,
    count: int,
) -> Table:
    kept = replace(memory, store=etcd.store, prefix="questions/")
    async with (
        echoing(points, cores) as (service, reader),
        leasing("BeginRead, memory store", memory, points, cores) as without,
        leasing("BeginRead, etcd store", kept, points, cores) as with_etcd,
    ):
        transactions = Transactions(etcd, points)
        contenders = (EchoedReads(service, reader), without, with_etcd, transactions)
        answers = await compare(contenders, rounds, count)
    yardstick = answers[transactions.name]
    return Table(
        f"BeginRead beside a fenced transaction, at {PER_SECOND:,} a second",
        f"etcd {etcd.version} on one node with its usual durability, on any core. The transaction "
        "compares the leader key and puts as many bytes as a granted read's answer has, over the "
        f"same kind of connection. {rounds} rounds of {count:,} calls at random times "
        f"(Poisson); each service holds {memory.leases:,} leases on {memory.engines} engines. "
        "*CPU* and *waited* are the asked server's.",
        (*COLUMNS, "p50 / transaction", "p99 / transaction"),
        [(name, *each.cells(yardstick)) for name, each in answers.items()],
    )


async def _writes(etcd: Etcd, scale: EtcdScale, points: int, cores: Cores) -> Table:
    """Measures what reaches etcd behind the service's back."""
    setting = Setting(0, scale.setting.engines, etcd.store, "writes/")
    args = service_args(setting, session_ttl_s=5)
    with ServerProcess("lease service", args, cores.server) as service:
        async with holding(service, setting, points) as (fleet, _):
            started_s = time.monotonic()
            granting = asyncio.create_task(fleet.grant(scale.grants, IN_FLIGHT))
            written_s = await _written(etcd, setting.prefix, scale.grants) - started_s
            await granting
            _, revision = await etcd.count(setting.prefix)
            renewals = etcd.renewals()
            beats, deadline_s = 0, time.monotonic() + scale.heartbeat_s
            while time.monotonic() < deadline_s:
                beating = list(fleet.engines) * 100
                beats += (await closed_loop(EngineSession.heartbeat, beating, IN_FLIGHT)).count
            _, revision_after = await etcd.count(setting.prefix)
            renewals = etcd.renewals() - renewals
    return Table(
        "What the store writes to etcd",
        "Written behind, in fenced transactions of many records: no answer waits for it.",
        ("what", "figure"),
        [
            (
                f"{scale.grants:,} leases granted at once: records written per second, to the last",
                f"{scale.grants / written_s:,.0f}",
            ),
            (
                f"{beats:,} heartbeats in {scale.heartbeat_s:g} s: revisions added",
                f"{revision_after - revision:,}",
            ),
            ("etcd leases renewed meanwhile", f"{renewals:,}"),
        ],
    )


async def _written(etcd: Etcd, prefix: str, count: int) -> float:
    """Returns when etcd holds so many conversations, in seconds of the monotonic clock."""
    deadline_s = time.monotonic() + _WRITTEN_TIMEOUT_S
    while (await etcd.count(prefix))[0] < count:
        if time.monotonic() > deadline_s:
            raise BenchError(f"not all records were in etcd after {_WRITTEN_TIMEOUT_S:g} s")
        await asyncio.sleep(0.02)
    return time.monotonic()

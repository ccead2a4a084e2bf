"""Run by a vLLM environment's Python: the worker's limits on reads, on vLLM's own code.

A stand-in for NIXL's agent says when a transfer is done and when it failed; everything else is
vLLM's pull worker of this version and our subclass of it.
"""

import queue
import sys
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from kvturn.clock import boottime_ns
from kvturn.v1 import lease_pb2
from kvturn_connector.config import ConfigError
from kvturn_connector.connector import _check
from kvturn_connector.handle import notice_name
from kvturn_connector.pace import ReadPace
from kvturn_connector.worker import (
    KvturnWorker,
    KvturnWorkerMetadata,
    NixlTap,
    RankRead,
    ReadLimit,
    boot_id,
)

LONGEST_READ_NS = 3_000_000_000


@dataclass
class Telemetry:
    """What NIXL tells of a transfer."""

    totalBytes: int = 4096
    xferDuration: int = 10
    postDuration: int = 1
    descCount: int = 2


class Agent:
    """A NIXL agent whose transfers end as told."""

    def __init__(self) -> None:
        self.state = "DONE"
        self.notifs: dict[str, list[bytes]] = {}

    def check_xfer_state(self, handle: int) -> str:
        return self.state

    def get_xfer_telemetry(self, handle: int) -> Telemetry:
        return Telemetry()

    def release_xfer_handle(self, handle: int) -> None:
        pass

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notifs, self.notifs = self.notifs, {}
        return notifs


def worker_with_read(asked_ns: int, here: str) -> tuple[KvturnWorker, Agent]:
    """A worker with one read of two transfers in flight."""
    worker: Any = KvturnWorker.__new__(KvturnWorker)
    agent = Agent()
    worker._tap = worker.nixl_wrapper = NixlTap(agent)
    worker._boot_id = boot_id()
    worker._limits = {"r": ReadLimit(asked_ns, LONGEST_READ_NS, here)}
    worker._posted_ns, worker._bytes, worker._outcomes = {"r": boottime_ns()}, {}, {}
    worker._posted_blocks, worker._pace = {"r": 2}, ReadPace()
    worker._ended = {}
    remote = RemoteMeta(([1, 2],), "127.0.0.1", 1, "engine", "kvturn:a.1.1")
    worker._recving_metadata = {"r": ReqMeta(([7, 8],), ([7, 8],), tp_size=1, remote=remote)}
    worker._recving_transfers = {"r": [1, 2]}
    worker._failed_recv_reqs, worker._invalid_block_ids = queue.Queue(), queue.Queue()
    worker._recv_failures, worker._failed_remote_engines = set(), set()
    worker._is_hma_required = False
    worker.xfer_stats = NixlKVConnectorStats()
    worker.tp_rank, worker.engine_id = 0, "here"
    if not hasattr(NixlPullConnectorWorker, "get_transfer_results"):  # 0.29
        del worker._recv_failures
    return worker, agent


def finish(worker: Any) -> tuple[bool, RankRead]:
    """Polls once. Returns whether vLLM takes the read for failed, and what we report of it."""
    popped = worker._pop_done_transfers(worker._recving_transfers)
    done, failed = popped if isinstance(popped, tuple) else (popped, set())
    assert done == {"r"}
    failed = set(failed) | set(worker._failed_recv_reqs.queue)
    worker._settle(done)
    meta = worker.worker_metadata()
    assert worker.worker_metadata() is None, "reported twice"
    return failed == {"r"}, meta.reads["r"]


def check_read_in_time() -> None:
    worker, _ = worker_with_read(boottime_ns(), boot_id())
    failed, read = finish(worker)
    assert not failed
    assert read.outcome == lease_pb2.READ_OUTCOME_COMPLETED
    assert read.read_bytes == 2 * 4096


def check_read_that_ended_too_late_is_discarded() -> None:
    worker, _ = worker_with_read(boottime_ns() - LONGEST_READ_NS - 1, boot_id())
    failed, read = finish(worker)
    assert failed, "KV that came after the longest read would be used"
    assert read.outcome == lease_pb2.READ_OUTCOME_TOO_LONG


def check_rank_on_another_machine_does_not_use_the_read() -> None:
    worker, _ = worker_with_read(boottime_ns(), "another boot")
    failed, read = finish(worker)
    assert failed
    assert read.outcome == lease_pb2.READ_OUTCOME_TOO_LONG


def check_failed_transfer() -> None:
    worker, agent = worker_with_read(boottime_ns(), boot_id())
    agent.state = "ERR"
    failed, read = finish(worker)
    assert failed
    assert read.outcome == lease_pb2.READ_OUTCOME_FAILED


def check_read_whose_time_is_up_is_not_posted() -> None:
    worker, _ = worker_with_read(boottime_ns() - LONGEST_READ_NS - 1, boot_id())
    worker._recving_transfers.clear()
    worker._read_blocks_for_req("r", worker._recving_metadata["r"])
    assert not worker._recving_transfers, "posted"
    assert worker._outcomes == {"r": lease_pb2.READ_OUTCOME_TOO_LONG}


def check_read_that_cannot_be_in_time_is_not_posted() -> None:
    left_ns = LONGEST_READ_NS // 4
    worker, _ = worker_with_read(boottime_ns() - LONGEST_READ_NS + left_ns, boot_id())
    worker._recving_transfers.clear()
    worker._pace.learn(1, left_ns)  # The read at hand has two blocks.
    worker._read_blocks_for_req("r", worker._recving_metadata["r"])
    assert worker._outcomes == {"r": lease_pb2.READ_OUTCOME_TOO_LONG}
    limit = ReadLimit(0, LONGEST_READ_NS, boot_id())
    assert not limit.too_late_to_post(LONGEST_READ_NS // 3, boot_id(), 10 * LONGEST_READ_NS)


def check_ended_reads_are_learned_from() -> None:
    worker, _ = worker_with_read(boottime_ns(), boot_id())
    finish(worker)
    assert worker._pace.expected_ns(2) > 0
    assert not worker._posted_blocks
    worker, agent = worker_with_read(boottime_ns(), boot_id())
    agent.state = "ERR"
    finish(worker)
    assert worker._pace.expected_ns(2) == 0, "a failed read says nothing about the pace"


def check_notices_name_leases_and_are_counted_over_readers() -> None:
    worker, agent = worker_with_read(boottime_ns(), boot_id())
    notice = f"{notice_name('a.1.1')}:2".encode()
    agent.notifs = {"x": [notice, b"request-7:1"]}
    assert worker.nixl_wrapper.get_new_notifs() == {"x": [b"request-7:1"]}
    assert worker.worker_metadata() is None, "one of two readers is not all"
    agent.notifs = {"y": [notice]}
    assert worker.nixl_wrapper.get_new_notifs() == {}
    assert worker.worker_metadata() == KvturnWorkerMetadata({}, {"a.1.1": 1})


def check_worst_outcome_of_the_ranks_counts() -> None:
    one = KvturnWorkerMetadata({"r": RankRead(lease_pb2.READ_OUTCOME_COMPLETED, 5, 10)})
    other = KvturnWorkerMetadata({"r": RankRead(lease_pb2.READ_OUTCOME_TOO_LONG, 7, 10)}, {"l": 1})
    assert one.aggregate(other) is one
    assert one.reads["r"] == RankRead(lease_pb2.READ_OUTCOME_TOO_LONG, 7, 20, ranks=2)
    assert one.notices == {"l": 1}


def check_prefill_insists_on_recompute() -> None:
    fail = {"kv_connector": "x", "kv_load_failure_policy": "fail"}
    _check(KVTransferConfig(kv_role="kv_consumer", **fail))
    refusal = ""
    try:
        _check(KVTransferConfig(kv_role="kv_producer", **fail))
    except ConfigError as error:
        refusal = str(error)
    assert refusal.startswith("kv_load_failure_policy: ")


if __name__ == "__main__":
    checks = {name: check for name, check in list(globals().items()) if name.startswith("check_")}
    for name in sys.argv[1:] or checks:
        checks[name]()
        print("ok", name)

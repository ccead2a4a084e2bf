"""Worker side of the connector, one per rank. Touches vLLM and NIXL; see ARCHITECTURE.md.

On prefill it makes a D->P read safe: it refuses to post one that cannot be in time (saves work),
and after a read has completed it looks at the clock again and discards what came too late (the
safety rule: nothing can stop a one-sided read that was posted late). On decode it counts
read-completion notices, which name the lease and never a request.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper
from vllm.logger import init_logger

from kvturn.clock import boottime_ns
from kvturn.v1 import lease_pb2
from kvturn_connector.handle import NOTICE_PREFIX
from kvturn_connector.metrics import KvturnStats
from kvturn_connector.pace import ReadPace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.kvturn")

COUNTS_MAX = 10_000
"""Leases of which some readers have given notice and some have not; the oldest are forgotten, and
freed on the lease service's word."""


def boot_id() -> str:
    """Names this boot of this machine: CLOCK_BOOTTIME can be compared only within one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextlib.contextmanager
def nixl_progress_delay(delay_us: int) -> Iterator[None]:
    """Lets NIXL agents that are made inside have a progress thread that sleeps.

    NIXL's Python API sets the delay to 0 (nixl 1.5.1, `_api.py`), with which the thread polls
    without a pause. The setting has no other way in than the class of the configuration.
    """
    bindings = getattr(sys.modules.get(getattr(NixlWrapper, "__module__", "")), "nixlBind", None)
    if not delay_us or bindings is None:
        yield
        return
    stock: Any = bindings.nixlAgentConfig

    class PatientConfig(stock):
        """NIXL's configuration with a delay that its user cannot take away."""

        @property
        def pthrDelay(self) -> int:
            return int(stock.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:
            stock.pthrDelay.__set__(self, delay_us)

    bindings.nixlAgentConfig = PatientConfig
    try:
        yield
    finally:
        bindings.nixlAgentConfig = stock


@dataclass(frozen=True, slots=True)
class ReadLimit:
    """Until when a read counts: `longest_read_ns` after BeginRead was sent at `asked_ns`."""

    asked_ns: int
    longest_read_ns: int
    boot_id: str
    """Boot of the machine whose clock `asked_ns` is."""

    def over(self, now_ns: int, here: str) -> bool:
        """True if the read must not be used. A rank on another machine cannot tell: True."""
        return here != self.boot_id or now_ns > self.asked_ns + self.longest_read_ns

    def too_late_to_post(self, now_ns: int, here: str, expected_ns: int) -> bool:
        """True if a read that takes `expected_ns` would not be in time.

        However slow the last reads were, the first half of the time may be tried: else nothing
        would ever be learned again.
        """
        return self.over(now_ns + min(expected_ns, self.longest_read_ns // 2), here)


@dataclass(slots=True)
class RankRead:
    """How one or more ranks ended their part of a read."""

    outcome: lease_pb2.ReadOutcome
    """The worst of the ranks'."""
    read_ns: int
    """From posting to completion; the slowest rank's. 0 if nothing was posted."""
    read_bytes: int
    """Over all ranks."""
    ranks: int = 1

    def add(self, other: RankRead) -> None:
        """Adds other ranks' parts."""
        self.outcome = max(self.outcome, other.outcome)
        self.read_ns = max(self.read_ns, other.read_ns)
        self.read_bytes += other.read_bytes
        self.ranks += other.ranks


class KvturnMetadata(NixlConnectorMetadata):
    """What the scheduler side tells the workers in one step: stock's, and limits of reads."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: dict[str, ReadLimit] = {}
        """By request id, for the D->P reads that start in this step."""

    @classmethod
    def extend(cls, stock: NixlConnectorMetadata, limits: dict[str, ReadLimit]) -> KvturnMetadata:
        """Stock's metadata, with limits."""
        extended = cls()
        extended.__dict__.update(stock.__dict__)
        extended.limits = limits
        return extended


@dataclass
class KvturnWorkerMetadata(KVConnectorWorkerMetadata):
    """What workers tell the scheduler side after a step."""

    reads: dict[str, RankRead] = field(default_factory=dict)
    """Reads that ended, by request id."""
    notices: dict[str, int] = field(default_factory=dict)
    """Ranks of this engine on which all readers of a lease have given notice."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Adds another rank's."""
        assert isinstance(other, KvturnWorkerMetadata)
        for request_id, read in other.reads.items():
            if request_id in self.reads:
                self.reads[request_id].add(read)
            else:
                self.reads[request_id] = read
        for lease_id, ranks in other.notices.items():
            self.notices[lease_id] = self.notices.get(lease_id, 0) + ranks
        return self


class NixlTap:
    """Stands before NIXL's agent: takes out the notices that name leases, measures our reads.

    Stock code never sees our notices, so it cannot take them for those of a request.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._counts: dict[str, int] = defaultdict(int)
        self.notices: dict[str, int] = {}
        """Leases of which all readers have given notice to this rank, not yet reported."""
        self.measured: dict[Any, int] = {}
        """Bytes by transfer handle; filled for the handles that are in it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """As NIXL's, without ours."""
        stock: dict[str, list[bytes]] = {}
        for agent_name, notifs in self._agent.get_new_notifs().items():
            rest = [notif for notif in notifs if not self._take(notif)]
            if rest:
                stock[agent_name] = rest
        return stock

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """As NIXL's."""
        telemetry = self._agent.get_xfer_telemetry(handle)
        if handle in self.measured:
            self.measured[handle] = int(telemetry.totalBytes)
        return telemetry

    def _take(self, notif: bytes) -> bool:
        if not notif.startswith(NOTICE_PREFIX.encode()):
            return False
        lease_id, _, readers = notif.decode().removeprefix(NOTICE_PREFIX).rpartition(":")
        self._counts[lease_id] += 1
        if len(self._counts) > COUNTS_MAX:
            del self._counts[next(iter(self._counts))]
        if self._counts.get(lease_id, 0) >= int(readers):
            del self._counts[lease_id]
            self.notices[lease_id] = 1
        return True


class KvturnWorker(NixlPullConnectorWorker):
    """NIXL's pull worker with reads that have a limit."""

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats: Any = KvturnStats()  # Takes in the scheduler side's as well.
        self._tap = NixlTap(self.nixl_wrapper)
        self.nixl_wrapper: Any = self._tap
        self._boot_id = boot_id()
        self._limits: dict[str, ReadLimit] = {}
        self._pace = ReadPace()
        self._posted_ns: dict[str, int] = {}
        self._posted_blocks: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._outcomes: dict[str, lease_pb2.ReadOutcome] = {}
        self._ended: dict[str, RankRead] = {}

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """As stock's; learns the limits of the reads that start."""
        if isinstance(metadata, KvturnMetadata):
            self._limits.update(metadata.limits)
        super().start_load_kv(metadata)

    def get_finished(self) -> tuple[set[str], set[str]]:
        """As stock's (0.29)."""
        sending, receiving = super().get_finished()
        self._settle(receiving)
        return sending, receiving

    def get_transfer_results(self) -> Any:
        """As stock's (0.32)."""
        results = super().get_transfer_results()
        self._settle(results.finished_recving)
        return results

    def worker_metadata(self) -> KvturnWorkerMetadata | None:
        """What happened since the last call; None if nothing."""
        notices, self._tap.notices = self._tap.notices, {}
        ended, self._ended = self._ended, {}
        return KvturnWorkerMetadata(ended, notices) if ended or notices else None

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        limit = self._limits.get(req_id)
        blocks = sum(len(group) for group in meta.local_block_ids)
        if limit is not None and limit.too_late_to_post(
            boottime_ns(), self._boot_id, self._pace.expected_ns(blocks)
        ):
            logger.warning("kvturn: not posting the read of %s: it would come too late", req_id)
            self._outcomes[req_id] = lease_pb2.READ_OUTCOME_TOO_LONG
            self._fail_unposted(req_id)
            return
        # Stamped before posting: over shared memory the call itself copies.
        now_ns = boottime_ns()
        super()._read_blocks_for_req(req_id, meta)
        if limit is not None and self._recving_transfers.get(req_id):
            self._posted_ns[req_id] = now_ns
            self._posted_blocks[req_id] = blocks

    def _pop_done_transfers(self, transfers: dict[str, list[Any]]) -> Any:
        ours = {
            req_id: list(handles) for req_id, handles in transfers.items() if req_id in self._limits
        }
        self._tap.measured = {handle: 0 for handles in ours.values() for handle in handles}
        popped = super()._pop_done_transfers(transfers)
        # The clock is read after DONE was seen: that is the instant to judge.
        now_ns = boottime_ns()
        done = popped[0] if isinstance(popped, tuple) else popped
        for req_id, handles in ours.items():
            self._bytes[req_id] = self._bytes.get(req_id, 0) + sum(
                self._tap.measured[handle] for handle in handles
            )
            if req_id in done and self._limits[req_id].over(now_ns, self._boot_id):
                logger.warning("kvturn: discarding the read of %s: it came too late", req_id)
                self._outcomes.setdefault(req_id, lease_pb2.READ_OUTCOME_TOO_LONG)
                if isinstance(popped, tuple):
                    popped[1].add(req_id)
                else:
                    self._handle_failed_transfer(req_id, None)
        self._tap.measured = {}
        return popped

    def _handle_failed_transfer(self, req_id: str, *args: Any, **kwargs: Any) -> Any:
        if req_id in self._limits:
            self._outcomes.setdefault(req_id, lease_pb2.READ_OUTCOME_FAILED)
        return super()._handle_failed_transfer(req_id, *args, **kwargs)

    def _fail_unposted(self, req_id: str) -> None:
        """Fails a receive of which nothing was posted."""
        if hasattr(self, "_recv_failures"):  # 0.32
            self._handle_failed_transfer(
                req_id, None, self._recv_failures, record_failed_transfer=False
            )
        else:
            self._handle_failed_transfer(req_id, None)

    def _settle(self, finished: set[str]) -> None:
        """Notes how this rank's part of each finished read ended."""
        now_ns = boottime_ns()
        for req_id in finished:
            if self._limits.pop(req_id, None) is None:
                continue
            read_ns = now_ns - self._posted_ns.pop(req_id, now_ns)
            blocks = self._posted_blocks.pop(req_id, 0)
            outcome = self._outcomes.pop(req_id, lease_pb2.READ_OUTCOME_COMPLETED)
            if blocks and outcome != lease_pb2.READ_OUTCOME_FAILED:
                self._pace.learn(blocks, read_ns)
            self._ended[req_id] = RankRead(
                outcome=outcome,
                read_ns=read_ns,
                read_bytes=self._bytes.pop(req_id, 0),
            )

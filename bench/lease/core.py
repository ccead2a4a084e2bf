"""The lessor alone, in this process: does an operation cost more when more leases are held?"""

from __future__ import annotations

import gc
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from bench.lease import workload
from bench.lease.figures import Spread, Table
from bench.lease.processes import BenchError
from kvturn_lease.config import LessorConfig
from kvturn_lease.conversation import ConversationKey
from kvturn_lease.effects import Record, SendToEngine
from kvturn_lease.lease import LeaseId, Retention
from kvturn_lease.lessor import Lessor
from kvturn_lease.session import EngineInfo, KvMemory, SessionId
from kvturn_lease.store import MemoryStore
from kvturn_lease.verdict import ReadOutcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.lease.operations import Setting

_HOUR_NS = 3_600_000_000_000
_STEP_NS = 1_000_000
_TERM = 7
_T = TypeVar("_T")
_OPERATIONS = (
    "grant",
    "resolve",
    "resolve again",
    "keep_alive",
    "begin_read",
    "end_read",
    "heartbeat",
    "expire",
)


@dataclass(slots=True)
class _Engine:
    session_id: SessionId
    sequence: int = 1
    received_sequence: int = 0


class Core:
    """A lessor that holds a setting's leases, with hand-made time."""

    def __init__(self, setting: Setting, points: int, batch: int) -> None:
        self.setting = setting
        self.cpu_us: dict[str, list[float]] = defaultdict(list)
        """By operation: CPU per call, one figure per round."""
        self._points = points
        self._batch = batch
        self._lessor = Lessor(_limits(setting.leases + 4 * batch), _TERM)
        self._store = MemoryStore()
        self._rng = random.Random(setting.leases)
        self._now_ns = 1_000 * _HOUR_NS
        self._oldest, self._newest = 1, 0
        self._engines = [
            _Engine(SessionId(workload.engine_name(index), workload.incarnation(index), 1))
            for index in range(setting.engines)
        ]
        self._by_session = {engine.session_id: engine for engine in self._engines}
        info = EngineInfo("http://10.0.0.1:8200", True, b"description", b"nixl")
        for engine in self._engines:
            self._lessor.register(
                engine.session_id, info, [], quiet_ns=None, previous_term=0, now_ns=self._now_ns
            )
            self._carry_out()
            self._heartbeat(engine)
        for retention in self._generate(setting.leases):
            self._grant(retention)

    def round(self) -> None:
        """Measures each operation `batch` times; as many leases come as go."""
        gc.collect(1)  # what the rounds before left is not for this one to clean up
        self._now_ns += _STEP_NS
        self._measure("grant", self._grant, list(self._generate(2 * self._batch)))
        held = range(self._oldest, self._newest + 1)
        keys = [_key(number) for number in self._rng.choices(held, k=self._batch)]
        self._measure("resolve", self._resolve, keys)
        self._measure("resolve again", self._resolve, keys)
        self._measure("keep_alive", self._keep_alive, keys)
        oldest = range(self._oldest, self._oldest + self._batch)
        leases = [(self._lease_id(number), _key(number)) for number in oldest]
        self._measure("begin_read", self._begin_read, leases)
        self._measure("end_read", self._end_read, [lease_id for lease_id, _ in leases])
        self._oldest += self._batch
        self._measure("heartbeat", self._heartbeat, self._rng.choices(self._engines, k=self._batch))
        self._expire_oldest()
        for engine in self._engines:
            self._heartbeat(engine)
        held_count = sum(each.lease_count for each in self._lessor.list_engines(self._now_ns))
        if held_count != self.setting.leases:
            raise BenchError(f"the lessor holds {held_count} leases, not {self.setting.leases}")

    def _measure(self, name: str, call: Callable[[_T], None], inputs: Sequence[_T]) -> None:
        before_ns = time.thread_time_ns()
        for each in inputs:
            call(each)
        self.cpu_us[name].append((time.thread_time_ns() - before_ns) / len(inputs) / 1_000)

    def _carry_out(self) -> None:
        """Does what the service does after each step, but for the network."""
        changes = []
        for effect in self._lessor.drain():
            match effect:
                case SendToEngine(session=session_id, sequence=sequence):
                    self._by_session[session_id].received_sequence = sequence
                case Record(change=change):
                    changes.append(change)
        if changes:
            self._store.record(changes)
        self._lessor.next_deadline_ns()

    # ---- operations, each with its effects -----------------------------------------------

    def _grant(self, retention: Retention) -> None:
        engine = self._engines[retention.lease_id.number % len(self._engines)]
        engine.sequence += 1
        self._lessor.grant(engine.session_id, engine.sequence, retention, self._now_ns)
        self._carry_out()

    def _heartbeat(self, engine: _Engine) -> None:
        engine.sequence += 1
        self._lessor.heartbeat(
            engine.session_id,
            engine.sequence,
            echo_term=_TERM,
            echo_sequence=engine.received_sequence,
            withdrawn=[],
            memory=KvMemory(100_000, 50_000, 40_000),
            now_ns=self._now_ns,
        )
        self._carry_out()

    def _resolve(self, key: ConversationKey) -> None:
        if self._lessor.resolve(key, self._now_ns).verdict != Verdict.NONE:
            raise BenchError("a conversation that is held was not found")
        self._carry_out()

    def _keep_alive(self, key: ConversationKey) -> None:
        self._lessor.keep_alive(key, None, self._now_ns)
        self._carry_out()

    def _begin_read(self, lease: tuple[LeaseId, ConversationKey]) -> None:
        if self._lessor.begin_read(*lease, self._now_ns).verdict != Verdict.NONE:
            raise BenchError("a lease that is held was not granted")
        self._carry_out()

    def _end_read(self, lease_id: LeaseId) -> None:
        self._lessor.end_read(lease_id, ReadOutcome.COMPLETED, self._now_ns)
        self._carry_out()

    def _expire_oldest(self) -> None:
        """Lets the oldest leases run out together, and measures what ends them."""
        for number in range(self._oldest, self._oldest + self._batch):
            self._lessor.keep_alive(_key(number), 1, self._now_ns)
            self._carry_out()
        self._oldest += self._batch
        self._now_ns += _STEP_NS
        before_ns = time.thread_time_ns()
        self._lessor.expire(self._now_ns)
        self._carry_out()
        self.cpu_us["expire"].append((time.thread_time_ns() - before_ns) / self._batch / 1_000)

    # ---- leases --------------------------------------------------------------------------

    def _lease_id(self, number: int) -> LeaseId:
        return LeaseId(workload.incarnation(number % len(self._engines)), number, 1)

    def _generate(self, count: int) -> Iterator[Retention]:
        """Yields the next retentions; each has a payload of its own, as from the wire."""
        size = len(workload.payload(self._points))
        for number in range(self._newest + 1, self._newest + count + 1):
            yield Retention(
                self._lease_id(number),
                _key(number),
                self._points * workload.STRIDE_TOKENS,
                self._points,
                1,
                bytes(size),
            )
        self._newest += count


def _limits(leases: int) -> LessorConfig:
    """Returns a configuration that ends nothing by itself and takes that many leases."""
    plenty = 100_000_000_000
    return LessorConfig(
        session_ttl_ns=_HOUR_NS,
        idle_ns=_HOUR_NS,
        max_hold_ns=_HOUR_NS,
        leases_max=leases,
        leases_per_engine_max=leases,
        leases_per_tenant_max=leases,
        blocks_per_engine_max=plenty,
        blocks_per_tenant_max=plenty,
        tokens_per_engine_max=plenty,
        tokens_per_tenant_max=plenty,
    )


def _key(number: int) -> ConversationKey:
    named = workload.conversation(number)
    return ConversationKey(named.tenant, named.model, named.conversation_id)


def measure_core(settings: Sequence[Setting], points: int, rounds: int, batch: int) -> Table:
    """Returns CPU per operation for each setting; the rounds of all settings alternate."""
    cores = [Core(setting, points, batch) for setting in settings]
    for core in cores:
        core.round()  # warm-up
        core.cpu_us.clear()
    for _ in range(rounds):
        for core in cores:
            core.round()
    few = cores[0]
    many = [core for core in cores if core.setting.engines == few.setting.engines][-1]
    rows = []
    for name in _OPERATIONS:
        spreads = [Spread.of(core.cpu_us[name]) for core in cores]
        pairs = zip(many.cpu_us[name], few.cpu_us[name], strict=True)
        ratio = Spread.of([of_many / of_few for of_many, of_few in pairs])
        rows.append((name, *(spread.show(1) for spread in spreads), ratio.show(2)))
    return Table(
        "The core alone, in process",
        f"CPU µs per call of the lessor, its effects carried out into the memory store; {rounds} "
        f"rounds of {batch:,} calls, {points} digest points per lease. `resolve` asks for "
        "conversations at random among all that are held, so with more leases more of them come "
        "from memory instead of the processor's caches; `resolve again` asks for the same ones; "
        "`expire` is per lease that ran out. The ratio compares rounds that ran right after each "
        "other.",
        (
            "operation",
            *(f"{each.leases:,} leases, {each.engines:,} engines" for each in settings),
            f"ratio {many.setting.leases:,} / {few.setting.leases:,}",
        ),
        rows,
    )

"""A decode engine: the real session and retentions, over a modelled scheduler and block pool."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvturn.v1 import common_pb2, lease_pb2
from kvturn_connector.digest import DIGEST_BYTES, STRIDE_TOKENS, Scope, digest_values
from kvturn_connector.session import EXPIRE_INTERVAL_NS
from sim.checkers import Kept
from sim.network import Stream
from sim.pool import Pool
from sim.world import MS, Node, S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.lease_service import LeaseService
    from sim.simulation import Simulation

BLOCK_SIZE = 16
SECRET = b"secret"
STEP_NS = 10 * MS
BACKOFF_MIN_NS, BACKOFF_MAX_NS = 100 * MS, 500 * MS
OPEN_TIMEOUT_NS = 2 * S
RETENTIONS_MAX = 1000
LATE_NS = 200 * MS
"""Releases that take longer are not waited for: others are given up as well."""
HEADROOM, HEADROOM_SILENT = 16, 4
"""One block in so many is kept free; more while the lease service is silent."""
PASS_NS = 50 * MS
"""How often a scheduler that cannot admit a request looks again."""


def scope_of(tenant: str) -> Scope:
    """Returns what KV depends on besides its tokens."""
    return Scope(tenant, "m")


class Job:
    """A request that decode works on: it takes blocks, generates, and leaves a retention."""

    __slots__ = ("blocks", "count", "done", "key", "span_ns", "tokens", "turn")

    def __init__(
        self,
        key: tuple[str, str] | None,
        tokens: Sequence[int],
        turn: int,
        count: int,
        span_ns: int,
        done: Callable[[], None],
    ) -> None:
        self.key = key
        """Tenant and conversation; None: it retains nothing."""
        self.tokens = tokens
        self.turn = turn
        self.count = count
        self.span_ns = span_ns
        self.done = done
        self.blocks: list[int] = []


class Decode(Node):
    """One engine process; `engine_id` outlives it, incarnation and memory do not."""

    def __init__(
        self, sim: Simulation, name: str, engine_id: str, drift_ppm: int, offset_ns: int
    ) -> None:
        super().__init__(sim.world, name, drift_ppm, offset_ns)
        self.sim = sim
        self.engine_id = engine_id
        self.lateness_ns = sim.weather.lateness_ns
        self.slack_ns = 2 * (EXPIRE_INTERVAL_NS + self.lateness_ns) + 6 * STEP_NS + 50 * MS
        """What a tick and some engine steps may take."""
        self._boot()

    # ---- the process ---------------------------------------------------------------------

    def _boot(self) -> None:
        sim = self.sim
        sim.incarnations += 1
        self.incarnation = f"{self.engine_id}i{sim.incarnations}"
        self.pool = Pool(sim.weather.blocks)
        self.held: dict[int, Kept] = {}
        self._waiting: deque[Job] = deque()
        self._running: dict[Job, None] = {}
        self._outlooks: dict[int, int] = {}
        self._withdrawn: dict[int, int] = {}
        self._late: dict[int, None] = {}
        self._freeing: list[int] = []
        self._numbers = 0
        self._stepping = False
        self._notices: dict[str, int] = {}
        self.stream: Stream | None = None
        self._backoff_ns = BACKOFF_MIN_NS
        retentions = sim.cores.retentions(self.incarnation, RETENTIONS_MAX, sim.weather.max_hold_ns)
        description = lease_pb2.EngineDescription(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            role=common_pb2.ENGINE_ROLE_DECODE,
            http_address=f"http://{self.name}",
            nixl=common_pb2.NixlAddress(
                nixl_engine_id=self.nixl_engine_id(),
                host=self.name,
                port=1,
                tp_size=sim.weather.ranks,
                dcp_size=1,
                pp_size=1,
            ),
            model="m",
        )
        self.session = sim.cores.session(description, retentions, self._memory)
        sim.fabric[self.nixl_engine_id()] = self
        self.lead = sim.random.randrange(len(sim.services)) if sim.services else 0
        self.after(0, self._connect)
        self.after(0, self._tick)

    def nixl_engine_id(self) -> str:
        """Names the process's memory to readers."""
        return f"{self.engine_id}.{self.incarnation}"

    def crash(self) -> None:
        """Ends the process: its memory is gone."""
        if self.sim.fabric.get(self.nixl_engine_id()) is self:
            del self.sim.fabric[self.nixl_engine_id()]
        self.sim.checkers.lost(self)
        stream = self.stream
        if stream is not None:
            stream.client_open = False
            self.sim.break_stream(stream, tell_client=False)
        super().crash()

    def restart(self) -> None:
        """Starts the engine anew, under a new incarnation."""
        super().restart()
        self._boot()

    # ---- the session's shell -------------------------------------------------------------

    def _connect(self) -> None:
        """Opens a stream to whoever it takes for the leader; the next one if that fails."""
        sim = self.sim
        target = sim.leader_of(self)
        stands = target.up and (target.paused_until_ns <= self.world.now_ns or sim.chance(0.5))
        if stands and sim.network.is_open(self, target):
            self.after(2 * sim.network.delay_ns(), self._on_connected, target, target.epoch)
        else:
            self.lead += 1
            self.after(OPEN_TIMEOUT_NS if target.up else 10 * MS, self._reconnect)

    def _reconnect(self) -> None:
        self.after(self._backoff_ns, self._connect)
        self._backoff_ns = min(2 * self._backoff_ns, BACKOFF_MAX_NS)

    def _on_connected(self, target: LeaseService, epoch: int) -> None:
        if target.epoch != epoch:
            self._reconnect()
            return
        stream = self.stream = Stream(self.sim.network, self, target)
        self._send([self.session.open(self.clock_ns())], stream)

    def on_response(self, stream: Stream, response: lease_pb2.EngineSessionResponse) -> None:
        """A message of the lease service arrives."""
        if stream is not self.stream:
            return
        self._send(self.session.receive(response, self.clock_ns()))
        if self.session.registered:
            self._backoff_ns = BACKOFF_MIN_NS

    def on_server_closed(self, stream: Stream) -> None:
        """The stream ended, with the leader's name if the answer told it."""
        if stream is self.stream:
            self._drop_stream(told=False)

    def _drop_stream(self, told: bool) -> None:
        stream = self.stream
        assert stream is not None
        self.stream = None
        stream.close_client(stream.server.on_client_closed, told)
        self.world.note(self.name, "session closed")
        if not self.session.registered:
            self.lead += 1
        self.session.close()
        self._reconnect()

    def _tick(self) -> None:
        self._send(self.session.tick(self.clock_ns()))
        now_ns = self.clock_ns()
        self.at_clock(max(self.session.next_deadline_ns(), now_ns + MS), self._tick)

    def _send(
        self, requests: list[lease_pb2.EngineSessionRequest], stream: Stream | None = None
    ) -> None:
        freed = self.session.retentions.take_freed()
        if freed:
            for each in freed:
                self._forget(each.number)
            self._want_step()
        stream = stream or self.stream
        if stream is not None:
            for request in requests:
                stream.send_up(stream.server.on_request, request)
            if self.session.broken:
                self._drop_stream(told=not self.sim.mishap(0.5))

    def _memory(self) -> lease_pb2.KvMemory:
        return lease_pb2.KvMemory(total_blocks=self.pool.total, free_blocks=len(self.pool.free))

    # ---- the scheduler -------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """A request arrives."""
        if job.count > self.pool.total:
            self.after(STEP_NS, job.done)
            return
        self._waiting.append(job)
        if len(self._waiting) == 1:
            self._watch_head()
        self._want_step()

    def _watch_head(self) -> None:
        if self._waiting:
            self.sim.checkers.waits(self, self._waiting[0])

    def is_starved(self, job: Job) -> bool:
        """True if a request waits for what only retentions keep from it."""
        if not self._waiting or self._waiting[0] is not job:
            return False
        held = sum(len(kept.blocks) for kept in self.held.values())
        return len(self.pool.free) + held >= job.count

    def _want_step(self) -> None:
        if not self._stepping:
            self._stepping = True
            self.after(int(STEP_NS * (0.2 + 0.8 * self.sim.random.random())), self._step)

    def _step(self) -> None:
        self._stepping = False
        for number in self._freeing:
            kept = self.held.pop(number)
            self.sim.checkers.freed(kept)
            self.pool.give(kept.blocks)
            self.world.note(self.name, "freed %s", kept)
        self._freeing.clear()
        while self._waiting and len(self.pool.free) >= self._waiting[0].count:
            job = self._waiting.popleft()
            job.blocks = self.pool.take(job.count)
            self._running[job] = None
            self.after(job.span_ns, self._finish, job)
            self._watch_head()
        if self.held:
            self._give_way()

    def _forget(self, number: int) -> None:
        """A retention has ended; its blocks go back in the next step."""
        self._freeing.append(number)
        self._withdrawn.pop(number, None)
        self._late.pop(number, None)
        self._outlooks.pop(number, None)

    def _give_way(self) -> None:
        """Gives up what is idle first, then the oldest."""
        self._outlooks.update(self.session.take_outlooks())
        now_ns = self.clock_ns()
        short = sum(job.count for job in self._waiting) + self._headroom(now_ns)
        short -= len(self.pool.free) + self._coming(now_ns)
        victims: list[int] = []
        for number in sorted(self.held, key=self._order):
            if short <= 0:
                break
            if number not in self._withdrawn and number not in self._freeing:
                victims.append(number)
                short -= len(self.held[number].blocks)
        self.withdraw(dict.fromkeys(victims, common_pb2.RELEASE_REASON_PRESSURE))
        if self._waiting:
            self.after(PASS_NS, self._want_step)

    def _order(self, number: int) -> tuple[bool, int]:
        return self._outlooks.get(number) != lease_pb2.OUTLOOK_IDLE, number

    def _headroom(self, now_ns: int) -> int:
        return self.pool.total // (HEADROOM_SILENT if self.session.silent(now_ns) else HEADROOM)

    def _coming(self, now_ns: int) -> int:
        """Returns how many blocks will be free within a step or two."""
        reading = self.session.take_reading()
        for number, withdrawn_ns in self._withdrawn.items():
            if number in reading or now_ns >= withdrawn_ns + LATE_NS:
                self._late[number] = None
        numbers = [number for number in self._withdrawn if number not in self._late]
        return sum(len(self.held[number].blocks) for number in (*numbers, *self._freeing))

    def withdraw(self, reasons: dict[int, int]) -> None:
        """Gives retentions up, by number with reason."""
        now_ns = self.clock_ns()
        ending = {*self._withdrawn, *self._freeing}
        fresh = {number: reasons[number] for number in reasons if number not in ending}
        for number in fresh:
            self.sim.checkers.withdrawn(self.held[number])
            self._withdrawn[number] = now_ns
        if fresh:
            self._send(self.session.withdraw_all(fresh, now_ns))

    def _finish(self, job: Job) -> None:
        del self._running[job]
        if job.key is not None:
            self._retain(job, job.key)
        else:
            self.pool.give(job.blocks)
        self._want_step()
        job.done()

    def _retain(self, job: Job, key: tuple[str, str]) -> None:
        now_ns = self.clock_ns()
        if self.session.silent(now_ns) and len(self.pool.free) < self._headroom(now_ns):
            self.pool.give(job.blocks)  # nobody could read it meanwhile
            return
        tokens = job.tokens[:-1]  # the last one's KV was never computed
        count = -(-len(tokens) // BLOCK_SIZE)
        blocks, surplus = job.blocks[:count], job.blocks[count:]
        self.pool.give(surplus)
        self._numbers += 1
        kept = Kept(
            engine=self,
            incarnation=self.incarnation,
            number=self._numbers,
            key=key,
            tokens=tokens,
            blocks=blocks,
            generations=[self.pool.generation[block] for block in blocks],
            retained_ns=self.world.now_ns,
        )
        self.held[kept.number] = kept
        self.sim.checkers.retained(kept)
        tenant, conversation_id = key
        offer = common_pb2.Retention(
            conversation=common_pb2.ConversationKey(
                tenant=tenant, model="m", conversation_id=conversation_id
            ),
            token_count=len(tokens),
            block_size=BLOCK_SIZE,
            groups=[common_pb2.BlockGroup(block_ids=blocks)],
            turn=job.turn,
        )
        offer.digests.stride_tokens = STRIDE_TOKENS
        offer.digests.digest_bytes = DIGEST_BYTES
        offer.digests.values = digest_values(tokens, scope_of(tenant), SECRET)
        self.world.note(self.name, "retained %s of %s", kept, key)
        self._send(self.session.retain(kept.number, offer, now_ns))

    # ---- readers -------------------------------------------------------------------------

    def on_notice(self, lease_id: str) -> None:
        """One rank is told that a reader's rank has read its part of the lease's blocks."""
        ranks = self._notices.pop(lease_id, 0) + 1
        if ranks < self.sim.weather.ranks:
            self._notices[lease_id] = ranks
        else:
            self.notice(lease_id)

    def notice(self, lease_id: str) -> None:
        """All ranks are told."""
        self._send(self.session.notice(lease_id))

    def counts(self) -> dict[str, int]:
        """Returns what must be zero once nothing is wanted any more."""
        return {
            "retentions": len(self.session.retentions),
            "blocks": self.pool.total - len(self.pool.free),
            "waiting": len(self._waiting),
        }

"""One seed's world: built by its weather, shaken, healed, judged."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from kvturn.v1 import common_pb2
from kvturn_lease.errors import LeaseServiceError, NotLeader
from sim.chaos import Chaos
from sim.checkers import Checkers, Kept
from sim.cores import Cores, installed
from sim.decode import OPEN_TIMEOUT_NS
from sim.etcd import Etcd
from sim.network import Network, Stream
from sim.router import Conversation, Router, is_readable
from sim.weather import Weather, weather_of
from sim.world import MS, Node, S, Violation, World

if TYPE_CHECKING:
    from collections import Counter

    from sim.decode import Decode
    from sim.lease_service import LeaseService
    from sim.prefill import Prefill

_CALM_TURNS_NS = 2 * S


class Simulation:
    """All roles of one world."""

    def __init__(self, seed: int, weather: Weather, cores: Cores, *, traced: bool = False) -> None:
        self.world = World(seed, traced=traced)
        self.random = self.world.random
        self.weather = weather
        self.cores = cores
        self.network = Network(self.world, weather)
        self.checkers = Checkers(self.world, weather)
        self.fabric: dict[str, Decode] = {}
        """Memory of decode processes, by NIXL engine id."""
        self.calm = False
        self.terms = 0
        self.incarnations = 0
        self.requests = 0
        self.twins: dict[str, Decode] = {}
        """By engine id: the process that was replaced while it was frozen."""
        self.gone: list[Node] = []
        self.services: list[LeaseService] = []
        self.etcd: Etcd | None = None
        if weather.services > 1 and weather.elected:
            self.etcd = Etcd(self.world, weather, self.clock("etcd")[0])
        for index in range(weather.services):
            self.services.append(cores.service(self, f"l{index}", *self.clock(f"l{index}")))
        self.decodes: list[Decode] = [
            cores.decode(self, f"d{index}", f"d{index}", *self.clock(f"d{index}"))
            for index in range(weather.decodes)
        ]
        self.prefills: list[Prefill] = [
            cores.prefill(self, f"p{index}", *self.clock(f"p{index}"))
            for index in range(weather.prefills)
        ]
        self.router = Router(self, "r", *self.clock("r"))
        self.conversations = [
            Conversation(self, "ab"[index % 2], f"c{index // 2}")
            for index in range(weather.conversations)
        ]

    def clock(self, name: str) -> tuple[int, int]:
        """Draws a node's clock: its drift in parts per million, and where it started."""
        most = self.weather.drift_percent * 10_000
        # The ends are where the rules are tight.
        drift_ppm = self.random.choice((-most, most, self.random.randint(-most, most)))
        return drift_ppm, self.random.randrange(1, 1000) * S

    # ---- what roles share ----------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        """Draws; True that often."""
        return self.random.random() < probability

    def mishap(self, probability: float) -> bool:
        """Draws; True that often, but never once the world is healed."""
        return bool(probability) and not self.calm and self.random.random() < probability

    def post_delay_ns(self) -> int:
        """Draws how long a rank takes to post its part of a read."""
        if self.mishap(self.weather.late_posts):
            return int(self.random.random() * 2 * self.weather.longest_read_ns)
        return MS + int(self.random.random() * 5 * MS)

    def transfer_ns(self) -> int:
        """Draws how long a transfer takes."""
        if self.mishap(self.weather.slow_reads):
            return int(self.random.random() * 3 * self.weather.longest_read_ns)
        return MS + int(self.random.random() * 30 * MS)

    def leader_of(self, node: Any) -> LeaseService:
        """Returns the lease service that a client takes for the leader."""
        service: LeaseService = self.services[node.lead % len(self.services)]
        return service

    def follow(self, node: Any, asked: LeaseService, error: Exception | None) -> None:
        """A client learns from an error, or from silence (None), whom to ask next."""
        names = [service.name for service in self.services]
        leader = error.metadata.get("leader", "") if isinstance(error, NotLeader) else ""
        if self.leader_of(node) is not asked:
            return  # it has turned to another one since
        if error is None and self.checkers.calm_from_ns is not None:
            return  # what was asked before the world was healed
        node.lead = names.index(leader) if leader in names else node.lead + 1

    def break_stream(
        self, stream: Stream, *, tell_client: bool = True, tell_server: bool = True
    ) -> None:
        """Cuts a stream; each side hears of it some time later, or never."""
        if stream.cut:
            return
        stream.break_off(int(self.random.random() * 20 * MS), int(self.random.random() * 20 * MS))
        now_ns = self.world.now_ns
        if tell_client:
            at_ns = now_ns + int(self.random.random() * 500 * MS)
            self.world.push(at_ns, stream.client, stream.client.on_server_closed, stream)
        if tell_server:
            at_ns = now_ns + int(self.random.random() * 500 * MS)
            self.world.push(at_ns, stream.server, stream.server.on_client_closed, stream)

    def add_twin(self, decode: Decode) -> None:
        """Starts a new process under the engine's id, beside the old one."""
        self.twins[decode.engine_id] = decode
        twin = self.cores.decode(
            self, decode.name + "t", decode.engine_id, *self.clock(decode.name)
        )
        self.decodes.append(twin)

    def leader(self) -> LeaseService | None:
        """Returns the lease service that leads as etcd has it."""
        if self.etcd is None:
            return self.services[0] if len(self.services) == 1 else None
        return next((each for each in self.services if each.name == self.etcd.leader), None)

    def latest(self, named: tuple[str, str]) -> Kept | None:
        """Returns the retention that a conversation left last."""
        kept = [each for each in self.checkers.kept.values() if each.key == named]
        return max(kept, key=lambda each: each.retained_ns, default=None)

    def expected(self, named: tuple[str, str], prompt: list[int]) -> Kept | None:
        """Returns the retention that a turn must read, if nothing stands against it."""
        calm_from_ns = self.checkers.calm_from_ns
        if calm_from_ns is None:
            return None
        kept = self.latest(named)
        if kept is None or not kept.held or kept.retained_ns < calm_from_ns:
            return None
        if kept.withdrawn_ns is not None or kept.ended or kept.granted_ns is not None:
            return None
        return kept if is_readable(prompt, kept) else None

    # ---- the two phases ------------------------------------------------------------------

    def run(self) -> None:
        """Runs both phases. Raises Violation."""
        for conversation in self.conversations:
            conversation.think()
        Chaos(self).start()
        self.world.run(self.weather.chaos_ns)
        self.heal()
        self.judge_liveness()

    def heal(self) -> None:
        """Ends all faults: what is down comes back, what is superfluous goes."""
        self.calm = True
        self.network.heal()
        for engine_id, old in self.twins.items():
            # A supervisor ends the replaced process and, since the two may have fenced each
            # other, starts the engine anew.
            for decode in [each for each in self.decodes if each.engine_id == engine_id]:
                if decode.up:
                    decode.crash()
            self.decodes.remove(old)
            self.gone.append(old)
        nodes: list[Node] = [*self.services, *self.decodes, *self.prefills, self.router]
        nodes += [rank for prefill in self.prefills for rank in prefill.ranks]
        if self.etcd is not None:
            nodes.append(self.etcd)
        for node in nodes:
            node.lateness_ns = min(node.lateness_ns, 5 * MS)
            if not node.up:
                node.restart()
        self.world.note("world", "healed")

    def judge_liveness(self) -> None:
        """Checks L1, L2 and L3, and the tight bounds of S5 and S6, in the healed world."""
        weather, world = self.weather, self.world
        k = (100 + weather.drift_percent) / (100 - weather.drift_percent)
        leader_ns = 0
        if self.etcd is not None:
            leader_ns = int(1.5 * k * weather.leader_ttl_ns) + S
        spike_ns = weather.spike_ns if weather.spike else 0
        if weather.doubles:
            spike_ns *= 3
        silence_ns = int(k * weather.ttl_ns) + OPEN_TIMEOUT_NS + 2 * S
        # First what was late before is over: messages under way, and timers.
        world.run(world.now_ns + max(spike_ns, weather.lateness_ns))
        end_ns = world.now_ns + leader_ns + silence_ns + 2 * weather.heartbeat_ns
        looks = 0  # that found all well, one after the other
        while weather.elected and looks < 4:
            looks = 0 if self.unregistered() else looks + 1
            if looks == 0 and world.now_ns >= end_ns:
                raise Violation("L1", self.unregistered())
            world.run(world.now_ns + S // 2)
        if weather.elected:
            self.checkers.calm_from_ns = world.now_ns
        world.run(world.now_ns + _CALM_TURNS_NS)
        if self.chance(0.3):  # a cache reset wants all that one engine retains
            decode = self.random.choice(self.decodes)
            decode.withdraw(dict.fromkeys(decode.held, common_pb2.RELEASE_REASON_PRESSURE))
        world.run(world.now_ns + _CALM_TURNS_NS)
        self._stop_clients()
        most_ns = weather.max_hold_ns + weather.idle_ns + 4 * self.checkers.hold_ns + 20 * S
        end_ns = world.now_ns + int(most_ns * k)
        while any(self.counts().values()) and world.now_ns < end_ns:
            world.run(world.now_ns + S)
        left = {name: count for name, count in self.counts().items() if count}
        if left:
            raise Violation("L3", f"left for ever: {left}")

    def unregistered(self) -> str:
        """Says who is not yet registered where it should be; empty once all are."""
        leader = self.leader()
        if leader is None:
            return "no lease service leads"
        views = leader.answer(lambda lessor, now_ns: lessor.list_engines(now_ns))
        if isinstance(views, LeaseServiceError):
            return f"{leader.name} does not lead"
        known = {view.engine_id for view in views}
        for decode in self.decodes:
            stream = decode.stream
            stands = stream is not None and stream.server is leader and not stream.cut
            if not stands or not decode.session.registered:
                return f"{decode.name} is not registered"
            if decode.engine_id not in known:
                return f"{decode.name} is not known"
        # Their sessions, or an earlier answer, have told them by now.
        self.router.lead = self.services.index(leader)
        for prefill in self.prefills:
            prefill.lead = self.router.lead
        return ""

    def _stop_clients(self) -> None:
        """Clients end their conversations; now and then one just falls silent."""
        silent = self.conversations[0] if self.chance(0.25) else None
        for conversation in self.conversations:
            conversation.stop(says_so=conversation is not silent)

    def counts(self) -> dict[str, int]:
        """Returns all that must become zero."""
        counts: dict[str, int] = {}
        nodes: list[Decode | Prefill] = [*self.decodes, *self.prefills]
        for node in nodes:
            for name, count in node.counts().items():
                counts[f"{node.name} {name}"] = count
        leader = self.leader()
        for service in self.services if leader is None else [leader]:
            if service.lessor is not None:
                views = service.lessor.list_leases(
                    engine_id="", key=None, after="", count_max=100, now_ns=service.clock_ns()
                )
                counts[f"{service.name} leases"] = len(views)
        counts["turns"] = sum(conversation.busy for conversation in self.conversations)
        return counts


@dataclass(frozen=True)
class Outcome:
    """How a seed went."""

    seed: int
    weather: Weather
    count: Counter[str]
    events: int
    failure: str
    """Empty if it kept all promises."""
    promise: str = ""
    """The promise or rule that it broke."""
    log: list[str] | None = None

    def __str__(self) -> str:
        """Says what went wrong, and how to see it again."""
        return f"seed {self.seed}: {self.failure}\n  {self.weather}\n  make sim SEED={self.seed}"


def run_seed(seed: int, cores: Cores | None = None, *, traced: bool = False) -> Outcome:
    """Runs one seed to its end or its first broken promise."""
    cores = Cores() if cores is None else cores
    weather = weather_of(Random(seed))
    with installed(cores, weather):
        sim = Simulation(seed, weather, cores, traced=traced)
        failure = promise = ""
        try:
            sim.run()
        except Violation as violation:
            promise = violation.promise
            failure = f"at {sim.world.now_ns / S:.6f} s: {violation}"
        except Exception:  # a core that raises what it should not has failed too
            promise = "crash"
            failure = f"at {sim.world.now_ns / S:.6f} s: {traceback.format_exc(limit=-5)}"
    return Outcome(
        seed, weather, sim.checkers.count, sim.world.events, failure, promise, sim.world.log
    )

"""Faults, one after the other, of the kinds that the weather allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvturn.v1 import common_pb2
from sim.decode import Job
from sim.world import MS, Node, S

if TYPE_CHECKING:
    from sim.simulation import Simulation


class Chaos:
    """Draws a fault every now and then until the world is healed."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._random = sim.random
        self._weather = sim.weather

    def start(self) -> None:
        """Schedules the first fault."""
        if self._weather.faults:
            self._sim.world.push(self._span(0, self._weather.fault_every_ns * 2), None, self._next)

    def _next(self) -> None:
        sim = self._sim
        if sim.calm:
            return
        kind = self._random.choice(self._weather.faults)
        sim.world.note("chaos", kind)
        getattr(self, "_" + kind)()
        span_ns = self._span(0, self._weather.fault_every_ns * 2)
        sim.world.push(sim.world.now_ns + span_ns, None, self._next)

    def _span(self, least_ns: int, most_ns: int) -> int:
        return least_ns + int(self._random.random() * (most_ns - least_ns))

    def _until_calm(self, span_ns: int) -> int:
        """Cuts a span so that it ends with the chaos."""
        return min(span_ns, max(0, self._weather.chaos_ns - self._sim.world.now_ns))

    def _processes(self) -> list[Node]:
        sim = self._sim
        ranks = [rank for prefill in sim.prefills for rank in prefill.ranks]
        nodes: list[Node] = [*sim.decodes, *sim.prefills, *ranks, *sim.services, sim.router]
        return [node for node in nodes if node.up]

    def _pause(self) -> None:
        self._stop(self._span(50 * MS, self._weather.ttl_ns))

    def _long_pause(self) -> None:
        ttl_ns = self._weather.ttl_ns
        self._stop(self._span(ttl_ns, 3 * ttl_ns))

    def _stop(self, span_ns: int) -> None:
        nodes = self._processes()
        if nodes:
            self._random.choice(nodes).pause(self._until_calm(span_ns))

    def _crash(self) -> None:
        sim = self._sim
        nodes: list[Node] = [*sim.decodes, *sim.prefills, *sim.services, sim.router]
        node = self._random.choice([each for each in nodes if each.up] or [sim.router])
        if not node.up:
            return
        node.crash()
        sim.world.note("chaos", "%s crashes", node.name)
        span_ns = self._span(200 * MS, 6 * S)
        sim.world.push(sim.world.now_ns + span_ns, None, self._restart, node)

    def _restart(self, node: Node) -> None:
        if not node.up and node not in self._sim.gone:
            node.restart()

    def _partition(self) -> None:
        sim = self._sim
        one: Node = self._random.choice(sim.services)
        others: list[Node] = [*sim.decodes, *sim.prefills, sim.router]
        if sim.etcd is not None:
            others.append(sim.etcd)
        other = self._random.choice(others)
        span_ns = self._until_calm(self._span(500 * MS, 2 * self._weather.ttl_ns))
        which = self._random.randrange(3)
        if which != 0:
            sim.network.block(one, other, span_ns)
        if which != 1:
            sim.network.block(other, one, span_ns)
        sim.world.note("chaos", "%s, %s: %d for %.3f", one.name, other.name, which, span_ns / S)

    def _swizzle(self) -> None:
        """Clogs some nodes one by one, and lets them go in another order."""
        sim = self._sim
        nodes: list[Node] = [*sim.decodes, *sim.prefills, sim.router]
        chosen = [node for node in nodes if self._random.random() < 0.6]
        for node in chosen:
            start_ns = sim.world.now_ns + self._span(0, S)
            sim.world.push(start_ns, None, self._clog, node, self._span(S, self._weather.ttl_ns))

    def _clog(self, node: Node, span_ns: int) -> None:
        sim = self._sim
        if sim.calm:
            return
        for service in sim.services:
            sim.network.block(node, service, self._until_calm(span_ns))
            sim.network.block(service, node, self._until_calm(span_ns))

    def _break(self) -> None:
        streams = [each.stream for each in self._sim.decodes if each.up and each.stream]
        if streams:
            self._sim.break_stream(self._random.choice(streams))

    def _half_open(self) -> None:
        streams = [each.stream for each in self._sim.decodes if each.up and each.stream]
        if streams:
            which = self._random.randrange(3)
            self._sim.break_stream(
                self._random.choice(streams), tell_client=which == 0, tell_server=which == 1
            )

    def _depose(self) -> None:
        sim = self._sim
        if sim.etcd is not None:
            for service in sim.services:
                if service.up and service.leads:
                    service.resign()

    def _wipe(self) -> None:
        if self._sim.etcd is not None:
            self._sim.etcd.wipe()

    def _etcd_pause(self) -> None:
        """etcd is away for a while: frozen, or down and then restarted."""
        sim = self._sim
        if sim.etcd is not None:
            sim.etcd.pause(self._until_calm(self._span(S, 2 * self._weather.leader_ttl_ns)))
            if self._random.random() < 0.5:
                sim.world.push(sim.world.now_ns, sim.etcd, sim.etcd.restarted)

    def _twin(self) -> None:
        """A frozen engine is replaced under its own engine id, then thaws."""
        sim = self._sim
        decode = self._random.choice(sim.decodes)
        if decode.up and decode.engine_id not in sim.twins:
            decode.pause(self._until_calm(self._span(S, 3 * self._weather.ttl_ns)))
            sim.add_twin(decode)

    def _pressure(self) -> None:
        """Requests of no conversation want much of an engine's memory."""
        sim = self._sim
        decode = self._random.choice(sim.decodes)
        if not decode.up:
            return
        total = decode.pool.total
        for _ in range(self._random.choice((1, 2, 3))):
            count = self._random.randrange(1, total // 2)
            job = Job(None, (), 0, count, self._span(50 * MS, 3 * S), _nothing)
            sim.world.push(sim.world.now_ns, decode, decode.submit, job)

    def _revoke(self) -> None:
        """An operator ends a lease."""
        sim = self._sim
        conversation = self._random.choice(sim.conversations)
        if conversation.leases and sim.router.up:
            lease_id = conversation.leases[-1]
            sim.router.tell(lambda service: service.revoke(lease_id))

    def _reset(self) -> None:
        """A reset of an engine's prefix cache gives all up."""
        decode = self._random.choice(self._sim.decodes)
        if decode.up and decode.paused_until_ns <= self._sim.world.now_ns:
            reason = common_pb2.RELEASE_REASON_PRESSURE
            decode.withdraw(dict.fromkeys(decode.held, reason))


def _nothing() -> None:
    """Nobody waits for it."""

"""What really happens, in plain values, and whether it keeps the promises.

The roles report facts here; nothing in here asks the cores. Each fact is judged when it happens,
and each bound is an event of its own at the time by which something must have happened.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim.world import MS, S, Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.decode import Decode
    from sim.prefill import Prefill
    from sim.weather import Weather
    from sim.world import World

STRIDE = 16


@dataclass(slots=True, eq=False)
class Kept:
    """A retention as it really is."""

    engine: Decode
    incarnation: str
    number: int
    key: tuple[str, str]
    """Tenant and conversation."""
    tokens: Sequence[int]
    blocks: list[int]
    generations: list[int]
    retained_ns: int
    held: bool = True
    """Its blocks have not gone back to the pool, and its engine's process lives."""
    withdrawn_ns: int | None = None
    ended: bool = False
    """The lease service was asked to end it."""
    granted_ns: int | None = None
    transfers: list[Transfer] = field(default_factory=list)
    """Those that are under way."""

    def intact(self) -> bool:
        """True if decode holds it, and no block of it was written since."""
        generation = self.engine.pool.generation
        return self.held and [generation[block] for block in self.blocks] == self.generations

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"


@dataclass(slots=True, eq=False)
class Transfer:
    """One rank's part of a read, under way from decode's memory to prefill's."""

    kept: Kept
    lease_id: str
    reader: Prefill
    window_ns: int
    """True time until which it may count."""
    intact: bool


@dataclass(slots=True)
class Trust:
    """Until when a lease service may trust a session, by its own clock."""

    deadline_ns: int
    sent_ns: deque[tuple[int, int]] = field(default_factory=deque)
    dead: bool = False


class Checkers:
    """Judges S1 to S6 as they happen, by the bounds of the lease rules."""

    def __init__(self, world: World, weather: Weather) -> None:
        self._world = world
        self._weather = weather
        self.kept: dict[tuple[str, int], Kept] = {}
        self.count: Counter[str] = Counter()
        self.calm_from_ns: int | None = None
        """From when on whatever is retained is held by an undisturbed session."""
        self._granted: dict[str, str] = {}
        self._posts: Counter[str] = Counter()
        self._trust: dict[tuple[int, Any], Trust] = {}
        p = weather.drift_percent
        self.hold_ns = -(-(weather.ttl_ns + weather.longest_read_ns) * (100 + p) // (100 - p))
        """K*(TTL + R)."""
        self.reader_ns = -(-weather.longest_read_ns * (100 + p) // (100 - p))
        """K*R."""

    # ---- decode --------------------------------------------------------------------------

    def retained(self, kept: Kept) -> None:
        """Decode holds the KV of a finished request."""
        self.kept[kept.incarnation, kept.number] = kept
        engine = kept.engine
        until_ns = engine.clock_ns() + self._weather.max_hold_ns + self.hold_ns
        self._expect_freed(kept, until_ns, "its longest hold and K*(TTL + R)")

    def withdrawn(self, kept: Kept) -> None:
        """Decode gave a retention up."""
        if kept.withdrawn_ns is not None or not kept.held:
            return
        kept.withdrawn_ns = self._world.now_ns
        engine = kept.engine
        self._expect_freed(kept, engine.clock_ns() + self.hold_ns, "K*(TTL + R) once given up")
        if self._undisturbed(kept) and kept.granted_ns is None:
            self._world.push(
                self._world.now_ns + 200 * MS, None, self._check_gave_way, kept, engine.epoch
            )

    def waits(self, engine: Decode, job: object) -> None:
        """A request is the next to get blocks."""
        # What others left at the last moment must have been given up, too.
        clock_ns = engine.clock_ns() + 2 * self.hold_ns + 4 * S
        t_ns = engine.true_ns(clock_ns) + 2 * engine.slack_ns
        self._world.push(t_ns, engine, self._check_starved, engine, job, engine.stalled_until_ns)

    def _check_starved(self, engine: Decode, job: Any, stalled_until_ns: int) -> None:
        if not engine.is_starved(job):
            return
        if engine.stalled_until_ns != stalled_until_ns:
            self.waits(engine, job)  # it was paused in the meantime
            return
        raise Violation("S6", f"a request starves on {engine.name} while retentions are held")

    def freed(self, kept: Kept) -> None:
        """The blocks go back to the pool."""
        kept.held = False
        now_ns = self._world.now_ns
        if kept.withdrawn_ns is not None:
            self.count["pressure frees"] += 1
        for transfer in kept.transfers:
            if now_ns <= transfer.window_ns:
                raise Violation("S1", f"{kept} freed under a read that may count", str(kept))
            self.count["frees under a read that cannot count"] += 1

    def lost(self, engine: Decode) -> None:
        """A decode process ended; nothing that it held exists any more."""
        for kept in list(self.kept.values()):
            if kept.engine is engine and kept.held:
                kept.held = False

    def ended(self, kept: Kept | None) -> None:
        """The lease service was told, or decided, to end a retention, and it lives."""
        if kept is None or not kept.held or kept.ended:
            return
        kept.ended = True
        if self._undisturbed(kept):
            self._world.push(self._world.now_ns + self.reader_ns + S, None, self._check_ended, kept)

    def released(self, lease_id: str) -> None:
        """A lease service confirms a release."""
        kept = self.of_lease(lease_id)
        if kept is not None and kept.transfers:
            self.count["expiries under a read"] += 1

    def session_expired(self, engine: Decode) -> None:
        """A lease service ended a session for its silence."""
        if any(kept.transfers for kept in engine.held.values()):
            self.count["expiries under a read"] += 1

    def sent(self, session: tuple[int, Any], sequence: int, now_ns: int) -> None:
        """A lease service says something on the session of (term, session id)."""
        trust = self._trust.get(session)
        if trust is None:
            trust = self._trust[session] = Trust(now_ns + self._weather.ttl_ns)
        if trust.dead:
            raise Violation("rule 4", f"{session[1]} is spoken to after its end")
        trust.sent_ns.append((sequence, now_ns))

    def heard(self, session: tuple[int, Any], echo: tuple[int, int], now_ns: int) -> None:
        """A heartbeat of the session arrives at its lease service."""
        trust = self._trust.get(session)
        if trust is None:
            return
        trust.dead = trust.dead or now_ns >= trust.deadline_ns
        if echo[0] != session[0]:
            return
        while trust.sent_ns and trust.sent_ns[0][0] <= echo[1]:
            sent_ns = trust.sent_ns.popleft()[1]
            trust.deadline_ns = max(trust.deadline_ns, sent_ns + self._weather.ttl_ns)

    # ---- reads ---------------------------------------------------------------------------

    def granted(self, lease_id: str, key: tuple[str, str], term: int) -> None:
        """A lease service granted BeginRead."""
        self.count["reads granted"] += 1
        if lease_id in self._granted:
            raise Violation(
                "S3", f"granted again (terms {self._granted[lease_id]}, {term})", lease_id
            )
        self._granted[lease_id] = str(term)
        kept = self.of_lease(lease_id)
        if kept is None:
            raise Violation("S3", "granted what was never retained", lease_id)
        if kept.key != key:
            raise Violation("S4", f"granted {kept.key} to {key}", lease_id)
        kept.granted_ns = self._world.now_ns
        if not kept.held:
            self.count["grants of freed blocks"] += 1

    def compared(self, prompt: Sequence[int], lease_id: str, common_tokens: int) -> None:
        """Prefill found how many tokens of a retention are a prefix of its prompt."""
        kept = self.of_lease(lease_id)
        assert kept is not None
        true_tokens = common_prefix(prompt, kept.tokens)
        if common_tokens != true_tokens:
            raise Violation("S2", f"found {common_tokens} tokens, truly {true_tokens}", lease_id)

    def posted(self, transfer: Transfer) -> None:
        """A rank posted its transfer."""
        self._posts[transfer.lease_id] += 1
        if self._posts[transfer.lease_id] > self._weather.ranks:
            raise Violation("rule 13", "was posted again", transfer.lease_id)
        transfer.kept.transfers.append(transfer)

    def completed(self, transfer: Transfer) -> None:
        """All bytes of a transfer have moved."""
        kept = transfer.kept
        kept.transfers.remove(transfer)
        transfer.intact = transfer.intact and kept.intact()

    def dropped(self, transfer: Transfer) -> None:
        """A transfer failed, or its reader is gone."""
        if transfer in transfer.kept.transfers:
            transfer.kept.transfers.remove(transfer)

    def late(self, transfers: Sequence[Transfer]) -> None:
        """A completed read was discarded because it came too late."""
        self.count["late reads"] += 1
        if not all(transfer.intact for transfer in transfers):
            self.count["late reads of freed blocks"] += 1

    def used(
        self,
        transfers: Sequence[Transfer],
        prompt: Sequence[int],
        key: tuple[str, str],
        common_tokens: int,
        lease_id: str,
    ) -> None:
        """Prefill computes on with KV that it read."""
        self.count["reads used"] += 1
        kept = self.of_lease(lease_id)
        assert kept is not None
        if not transfers or not all(transfer.intact for transfer in transfers):
            raise Violation("S1", f"KV of {kept} was used that decode did not hold", lease_id)
        if kept.key[0] != key[0]:
            raise Violation("S4", f"KV of {kept.key} was used by {key}", lease_id)
        true_tokens = common_prefix(prompt, kept.tokens)
        if common_tokens != true_tokens:
            raise Violation("S2", f"{common_tokens} tokens, truly {true_tokens}", lease_id)

    def of_lease(self, lease_id: str) -> Kept | None:
        """Returns the retention that a lease id names."""
        incarnation, number, _ = lease_id.rsplit(".", 2)
        return self.kept.get((incarnation, int(number)))

    # ---- bounds --------------------------------------------------------------------------

    def _undisturbed(self, kept: Kept) -> bool:
        return self.calm_from_ns is not None and kept.retained_ns >= self.calm_from_ns

    def _expect_freed(self, kept: Kept, clock_ns: int, bound: str) -> None:
        t_ns = kept.engine.true_ns(clock_ns) + kept.engine.slack_ns
        self._world.push(t_ns, kept.engine, self._check_freed, kept, bound)

    def _check_freed(self, kept: Kept, bound: str) -> None:
        if not kept.held:
            return
        engine = kept.engine
        # After a pause it gets the time that it would have had.
        due_ns = engine.stalled_until_ns + engine.slack_ns
        if self._world.now_ns < due_ns:
            self._world.push(due_ns, engine, self._check_freed, kept, bound)
            return
        raise Violation("S5", f"{kept} is held for longer than {bound}", str(kept))

    def _check_gave_way(self, kept: Kept, epoch: int) -> None:
        self.count["calm pressure"] += 1
        if kept.held and kept.granted_ns is None and kept.engine.epoch == epoch:
            raise Violation("S6", f"{kept} does not give way within a round trip", str(kept))

    def _check_ended(self, kept: Kept) -> None:
        if kept.held:
            raise Violation("S5", f"{kept} ended and is held for longer than K*R", str(kept))


def common_prefix(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns the longest common prefix that ends on a digest point of `tokens`."""
    equal = 0
    for ours, theirs in zip(prompt, tokens, strict=False):
        if ours != theirs:
            break
        equal += 1
    return equal if equal == len(tokens) else equal - equal % STRIDE

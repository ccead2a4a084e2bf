"""What a seed's world is like: constants of the lease rules, and how badly things go.

Each kind of fault is switched on or off by itself (swarm), so that some worlds are calm but for one
kind, and kinds that hide each other come alone often enough.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvturn_lease.config import Policy
from sim.world import MS, S

if TYPE_CHECKING:
    from random import Random

PROFILES = ("plain", "plain", "plain", "long_read", "reconnects", "drift")


@dataclass(frozen=True, kw_only=True)
class Weather:
    """One world's settings; a span is in nanoseconds, a chance from 0 to 1."""

    profile: str = "plain"
    ttl_ns: int = 4 * S
    """Session TTL."""
    heartbeat_ns: int = S
    longest_read_ns: int = 2 * S
    """R."""
    shorter_read_ns: int = 0
    """R of every other start of a lease service, where it is set anew; 0: it is not."""
    question_ns: int = 50 * MS
    """Q."""
    policy: Policy = Policy.IDLE
    idle_ns: int = 8 * S
    max_hold_ns: int = 20 * S
    drift_percent: int = 1
    """rho, as the cores are told; clocks drift by up to this."""
    leases_per_engine: int = 1_000
    expiries_per_tick: int = 1_000
    conversations_known: int = 1_000
    """Conversations without a lease that a lease service remembers."""
    decodes: int = 2
    prefills: int = 2
    ranks: int = 2
    """Ranks of each engine."""
    conversations: int = 3
    blocks: int = 40
    """KV blocks of a decode engine."""
    services: int = 2
    """Lease services; with one, there is no election and the store dies with it."""
    elected: bool = True
    """False: each of the services takes itself for the leader, for ever."""
    leader_ttl_ns: int = 3 * S
    """TTL of the leader's key in etcd."""
    chaos_ns: int = 40 * S
    """How long faults go on."""
    think_ns: int = 2 * S
    """Mean time between the turns of a conversation."""
    delay_ns: int = 2 * MS
    """Mean delay of a message."""
    spike: float = 0.0
    """Chance that a message is late by up to spike_ns."""
    spike_ns: int = 3 * S
    loss: float = 0.0
    """Chance that a unary message is lost."""
    doubles: float = 0.0
    """Chance that a unary message arrives twice."""
    lateness_ns: int = 50 * MS
    """Timers come up to so much late."""
    store_loss: float = 0.0
    """Chance that a written-behind change never reaches the store."""
    store_delay_ns: int = 100 * MS
    late_posts: float = 0.0
    """Chance that a rank posts late, by up to 2 R."""
    slow_reads: float = 0.0
    """Chance that a transfer takes up to 2 R."""
    failing_reads: float = 0.0
    aborts: float = 0.0
    """Chance that a turn's prefill leg is aborted at some moment."""
    stale_leases: float = 0.0
    """Chance that a turn comes with an older lease id, or with another conversation's."""
    faults: tuple[str, ...] = ()
    """Kinds of faults that chaos draws from."""
    fault_every_ns: int = 2 * S

    def __str__(self) -> str:
        """Lists all settings that differ from the plain world's."""
        told = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default or field.name in ("ttl_ns", "longest_read_ns"):
                if field.name.endswith("_ns"):
                    value = f"{value / S:g}s"
                told.append(f"{field.name.removesuffix('_ns')}={value}")
        return " ".join(told)


FAULTS = (
    "pause",
    "pause",
    "long_pause",
    "crash",
    "partition",
    "partition",
    "swizzle",
    "break",
    "half_open",
    "depose",
    "wipe",
    "etcd_pause",
    "twin",
    "pressure",
    "pressure",
    "revoke",
    "reset",
)


def weather_of(random: Random) -> Weather:
    """Draws a world."""
    profile = random.choice(PROFILES)
    ttl_ns = random.choice((4, 4, 5, 6)) * S
    longest_read_ns = random.choice((S, 2 * S, 2 * S, 3 * S))
    drift_percent = 1
    if profile == "long_read":
        ttl_ns = 4 * S
        longest_read_ns = random.choice((6, 8, 10)) * S
    if profile == "drift":
        drift_percent = 20

    question_ns = random.choice((50 * MS, 50 * MS, 500 * MS, 800 * MS))
    shorter_read_ns = max(longest_read_ns // 3, question_ns + 200 * MS)

    def perhaps(chance: float, value: float) -> float:
        return value if random.random() < chance else 0.0

    kinds = tuple(kind for kind in dict.fromkeys(FAULTS) if random.random() < 0.45)
    faults = tuple(kind for kind in FAULTS if kind in kinds)
    if profile == "reconnects":
        faults += ("break", "half_open", "break", "half_open", "depose")
    max_hold_ns = random.choice((10, 15, 25)) * S
    services = random.choice((1, 2, 2, 3))
    return Weather(
        profile=profile,
        ttl_ns=ttl_ns,
        shorter_read_ns=shorter_read_ns if random.random() < 0.15 else 0,
        question_ns=question_ns,
        heartbeat_ns=ttl_ns // random.choice((4, 5)),
        longest_read_ns=longest_read_ns,
        policy=random.choice((Policy.IDLE, Policy.IDLE, Policy.PRESSURE, Policy.FIXED_TTL)),
        idle_ns=min(max_hold_ns, random.choice((3, 6, 10)) * S),
        max_hold_ns=max_hold_ns,
        drift_percent=drift_percent,
        leases_per_engine=random.choice((1_000, 1_000, 1_000, 3)),
        expiries_per_tick=random.choice((1_000, 1)),
        conversations_known=random.choice((1_000, 1_000, 1)),
        decodes=random.choice((1, 2, 2)),
        prefills=random.choice((1, 2, 2)),
        ranks=random.choice((1, 2, 2)),
        conversations=random.choice((2, 3, 4)),
        blocks=random.choice((24, 40, 80)),
        services=services,
        elected=services == 1 or random.random() < 0.85,
        leader_ttl_ns=random.choice((2, 3, 5)) * S,
        chaos_ns=random.choice((12, 16, 24)) * S,
        think_ns=random.choice((S, 2 * S, 4 * S)),
        delay_ns=random.choice((MS, 2 * MS, 10 * MS)),
        spike=perhaps(0.4, random.choice((0.01, 0.05))),
        spike_ns=random.choice((S, 3 * S, 6 * S)),
        loss=perhaps(0.5, random.choice((0.01, 0.05, 0.15))),
        doubles=perhaps(0.4, random.choice((0.05, 0.2))),
        lateness_ns=random.choice((50 * MS, 200 * MS, 500 * MS, 500 * MS, 2 * S)),
        store_loss=perhaps(0.5, random.choice((0.1, 0.5))),
        store_delay_ns=random.choice((10 * MS, S)),
        late_posts=perhaps(0.5, random.choice((0.1, 0.4))),
        slow_reads=perhaps(0.6, random.choice((0.2, 0.5))),
        failing_reads=perhaps(0.3, 0.1),
        aborts=perhaps(0.5, random.choice((0.1, 0.3))),
        stale_leases=perhaps(0.5, random.choice((0.1, 0.3))),
        faults=faults,
        fault_every_ns=random.choice((S // 2, S, 2 * S)),
    )

"""What is replayed, and what comes of it as plain numbers."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.policy import bound
from bench.policy.foresight import Frontier, by_turn, by_turn_and_sizes
from bench.policy.replay import SECOND_NS, Clients, Outcome, Setting, replay
from kvturn_connector.victims import PRIORS
from kvturn_lease.config import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bench.policy.trace import Trace

SHARES = (0.25, 0.5, 1.0)
LINGERS_S = (0, 30, 120)
JUDGED = Clients(share=1.0, linger_s=30)
"""The clients that the aim is about."""
KINDS = {"turn": by_turn, "turn and sizes": by_turn_and_sizes}
MISSED_S = 0, 7.5
"""How long it takes to know that a client is gone: at once, and with the judged clients."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is replayed."""

    memories_tokens: tuple[int, ...]
    shares: tuple[float, ...]
    lingers_s: tuple[int, ...]
    requests_max: int | None


FULL = Scale(
    (250_000, 500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000), SHARES, LINGERS_S, None
)
FAST = Scale((500_000, 2_000_000), (1.0,), (30,), 1_500)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy, with one figure for each memory, or one for a memory that is never full."""

    name: str
    reuse: list[float]
    """Share of the reusable tokens."""
    held: list[float]
    """Token-seconds held."""
    made_way: list[float]
    """Share of the requests for which a retention had to be released first."""
    delayed: list[float]
    """Share of the requests that had to wait for a hold to end."""


def never_full(scale: Scale) -> dict[str, Setting]:
    """Returns the policies for a memory that is never full, by name."""
    settings = {
        f"fixed {hold_s} s": Setting(Policy.FIXED_TTL, hold_s=hold_s)
        for hold_s in (480, 240, 120, 60, 30)
    }
    settings["idle 60 s, silent clients"] = Setting(Policy.IDLE)
    for clients in _clients(scale):
        settings[f"idle, {_told(clients)}"] = Setting(Policy.IDLE, clients=clients)
    for heartbeat_s in (1, 2, 10):
        clients = dataclasses.replace(JUDGED, heartbeat_s=heartbeat_s, absence_s=2 * heartbeat_s)
        name = f"idle, {_told(JUDGED)}, every {heartbeat_s} s"
        settings[name] = Setting(Policy.IDLE, clients=clients)
    settings[f"idle, {_told(JUDGED)}, longest hold 720 s"] = Setting(
        Policy.IDLE, hold_s=720, clients=JUDGED
    )
    return settings


def under_pressure(scale: Scale) -> dict[str, Setting]:
    """Returns the policies for a limited memory, by name; the memory is to be filled in."""
    settings = {
        "fixed 480 s": Setting(Policy.FIXED_TTL),
        "fixed 60 s": Setting(Policy.FIXED_TTL, hold_s=60),
        "oldest first (LRU)": Setting(Policy.PRESSURE, priors=None),
        "ours, silent clients": Setting(Policy.PRESSURE),
    }
    flat = (1.0,) * len(PRIORS.turn_factors)
    for name, priors in {
        "all turns alike": dataclasses.replace(PRIORS, turn_factors=flat),
        "three times faster": dataclasses.replace(PRIORS, return_median_s=33.0),
        "three times slower": dataclasses.replace(PRIORS, return_median_s=300.0),
    }.items():
        settings[f"ours, prior: {name}"] = Setting(Policy.PRESSURE, priors=priors)
    for clients in _clients(scale):
        settings[f"ours, {_told(clients)}"] = Setting(Policy.PRESSURE, clients=clients)
    long = Setting(Policy.PRESSURE, hold_s=3_600)
    settings["ours, silent clients, longest hold 3600 s"] = long
    name = f"ours, {_told(JUDGED)}, longest hold 3600 s"
    settings[name] = dataclasses.replace(long, clients=JUDGED)
    return settings


def run(
    trace: Trace, scale: Scale, jobs: int, progress: Callable[[str], None]
) -> tuple[list[Row], list[Row]]:
    """Replays everything; returns the rows for a memory never full, and those under pressure."""
    unlimited = never_full(scale)
    limited = under_pressure(scale)
    cases = list(unlimited.items())
    cases += [
        (name, dataclasses.replace(setting, memory_tokens=memory_tokens))
        for name, setting in limited.items()
        for memory_tokens in scale.memories_tokens
    ]
    with ProcessPoolExecutor(jobs, initializer=_take, initargs=(trace,)) as pool:
        outcomes: list[tuple[str, Outcome]] = []
        done = pool.map(_replay, [setting for _, setting in cases])
        for (name, _), outcome in zip(cases, done, strict=True):
            outcomes.append((name, outcome))
            progress(f"{len(outcomes)}/{len(cases)} {name}")
    first = outcomes[: len(unlimited)]
    later = outcomes[len(unlimited) :]
    rows = [_row(trace, name, [outcome]) for name, outcome in first]
    pressed = [
        _row(trace, name, [outcome for each, outcome in later if each == name]) for name in limited
    ]
    return rows, pressed


def bounds(trace: Trace, scale: Scale) -> dict[str, list[float]]:
    """Returns, by name, the share of reusable tokens that could be reused in each memory."""
    memories = scale.memories_tokens
    possible = {
        "clairvoyant, bound": [bound.reused_tokens_max(trace, each) for each in memories],
        "clairvoyant, whole ones": [bound.reused_tokens_whole(trace, each) for each in memories],
    }
    for name, kind in KINDS.items():
        frontier = Frontier(trace, kind, None)
        budgets = [each * trace.end_ns for each in memories]
        possible[f"no foresight, bound: {name}"] = [
            round(frontier.reused_tokens(budget)) for budget in budgets
        ]
    gone_after_ns = int((JUDGED.linger_s + MISSED_S[-1]) * SECOND_NS)
    frontier = Frontier(trace, by_turn, gone_after_ns)
    possible[f"no foresight, bound: turn, {_told(JUDGED)}"] = [
        round(frontier.reused_tokens(each * trace.end_ns)) for each in memories
    ]
    return {
        name: [tokens / trace.reusable_tokens for tokens in each] for name, each in possible.items()
    }


def least_held(trace: Trace, reused_tokens: float) -> dict[str, float]:
    """Returns, by name, the token-seconds that so much reuse needs with the judged clients."""
    foresight = Frontier(trace, lambda request: request.number, None)
    least = {"full foresight": foresight.token_ns(reused_tokens)}
    for name, kind in KINDS.items():
        for missed_s in MISSED_S:
            gone_after_ns = int((JUDGED.linger_s + missed_s) * SECOND_NS)
            told = "at once" if missed_s == 0 else f"after {missed_s:g} s"
            frontier = Frontier(trace, kind, gone_after_ns)
            least[f"{name}, told {told} who has left"] = frontier.token_ns(reused_tokens)
    return {name: token_ns / SECOND_NS for name, token_ns in least.items()}


def frontiers(trace: Trace) -> dict[str, list[tuple[float, float]]]:
    """Returns, by what is known, the most reuse over token-seconds with the judged clients."""
    kinds = {"full foresight": lambda request: request.number, **KINDS}
    gone_after_ns = int((JUDGED.linger_s + MISSED_S[-1]) * SECOND_NS)
    curves = {}
    for name, kind in kinds.items():
        corners = Frontier(trace, kind, gone_after_ns).corners()
        curves[name] = [
            (token_ns / SECOND_NS, tokens / trace.reusable_tokens) for token_ns, tokens in corners
        ]
    return curves


def _clients(scale: Scale) -> Iterable[Clients]:
    for share in scale.shares:
        for linger_s in scale.lingers_s:
            yield Clients(share, linger_s)


def _told(clients: Clients) -> str:
    return f"{clients.share:.0%} heartbeat, linger {clients.linger_s} s"


def _row(trace: Trace, name: str, outcomes: list[Outcome]) -> Row:
    return Row(
        name,
        reuse=[each.reused_tokens / trace.reusable_tokens for each in outcomes],
        held=[each.token_ns / SECOND_NS for each in outcomes],
        made_way=[each.made_way / each.requests for each in outcomes],
        delayed=[each.delayed / each.requests for each in outcomes],
    )


_trace: Trace | None = None


def _take(trace: Trace) -> None:
    global _trace
    _trace = trace


def _replay(setting: Setting) -> Outcome:
    assert _trace is not None
    return replay(_trace, setting)

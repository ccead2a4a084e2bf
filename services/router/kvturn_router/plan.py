"""How one turn is served: which engines, and whether to read KV back from decode.

A pure function of what the lease service said, of the engines as last seen and
of the request. Decode goes to the engine that holds the conversation while
that engine is usable, because its own prefix cache holds the history too and
because the retention it leaves supersedes the one it has.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvturn_router.costs import Costs, Forecast
from kvturn_router.verdict import Verdict


class EngineState(Protocol):
    """What the decision needs to know of an engine."""

    @property
    def usable(self) -> bool:
        """Whether it may be given requests now."""

    @property
    def in_flight(self) -> int:
        """Requests that it has been given and has not answered."""

    @property
    def served(self) -> int:
        """Requests that it has been given since the router started."""


class PlanKind(StrEnum):
    """The ways to serve a turn."""

    PULL = "pull"
    """Prefill reads KV from decode and computes the rest."""
    LOCAL = "local"
    """The decode engine that holds the KV computes the rest itself; no prefill."""
    RECOMPUTE = "recompute"
    """Prefill computes the whole prompt."""
    ALONE = "alone"
    """Decode serves the request without prefill: its answer cannot be split."""


class Resolution(NamedTuple):
    """What is known of a conversation's KV when the turn begins.

    `verdict` says why there is nothing to read; it is None exactly when there
    is: under `lease_id`, or, where that is "", under a stock handle.
    `http_address` is the holder's, "" if not known. `longest_read_ms` is 0
    where there is no lease.
    """

    verdict: Verdict | None
    lease_id: str = ""
    http_address: str = ""
    longest_read_ms: int = 0


class Plan(NamedTuple):
    """One decision. `prefill` is an index into the prefill engines, None if there is no such leg.

    `verdict` is None exactly when `kind` is PULL: then prefill's connector says it.
    """

    kind: PlanKind
    prefill: int | None
    decode: int
    lease_id: str
    verdict: Verdict | None


class NoEngine(Exception):
    """No engine of the role can be used; `role` is "prefill" or "decode"."""

    def __init__(self, role: str) -> None:
        super().__init__(f"no {role} engine is usable")
        self.role = role


def decide(
    resolution: Resolution,
    prefills: Sequence[EngineState],
    decodes: Sequence[EngineState],
    holder: int | None,
    *,
    alone: bool,
) -> Plan:
    """Returns the plan for one turn.

    `holder` is the index in `decodes` of the engine at the resolution's
    address, None if it is not one of them. `alone` says that the answer cannot
    be given through prefill and decode. Raises NoEngine.
    """
    holder_lost = holder is not None and not decodes[holder].usable
    decode = holder if holder is not None and not holder_lost else least_loaded(decodes)
    if decode is None:
        raise NoEngine("decode")
    if alone:
        off = resolution.verdict is Verdict.TURNED_OFF
        verdict = Verdict.TURNED_OFF if off else Verdict.NOT_OFFERED
        return Plan(PlanKind.ALONE, None, decode, "", verdict)
    prefill = least_loaded(prefills)
    if prefill is None:
        raise NoEngine("prefill")
    if resolution.verdict is not None:
        return Plan(PlanKind.RECOMPUTE, prefill, decode, "", resolution.verdict)
    if holder_lost:
        # Its KV may be gone with it, and a read from a dead engine ends only
        # at the longest read.
        return Plan(PlanKind.RECOMPUTE, prefill, decode, "", Verdict.ENGINE_LOST)
    return Plan(PlanKind.PULL, prefill, decode, resolution.lease_id, None)


def least_loaded(engines: Sequence[EngineState], tried: Collection[int] = ()) -> int | None:
    """Returns the index of the usable engine with the fewest requests in flight.

    Of equals the one that served least, so that idle engines take turns. Leaves
    out `tried`. Returns None if none is left.
    """
    best: int | None = None
    best_load = (0, 0)
    for index, engine in enumerate(engines):
        if not engine.usable or index in tried:
            continue
        load = (engine.in_flight, engine.served)
        if best is None or load < best_load:
            best, best_load = index, load
    return best


# The choice by cost. `choose` and `Choice` take the places and names of `decide` and `Plan` as
# soon as `forward.py` calls them.


class TurnSize(NamedTuple):
    """How long a turn's history is, in bytes of JSON.

    `prompt_bytes` are those of all messages, `new_bytes` those of the messages
    after the last assistant message. 0 where not known.
    """

    prompt_bytes: int
    new_bytes: int


class PlannedEngine(Protocol):
    """What the choice needs to know of an engine."""

    @property
    def url(self) -> str:
        """Its base URL; names it."""

    @property
    def usable(self) -> bool:
        """Whether it answers."""

    @property
    def draining(self) -> bool:
        """Whether it is to get no new turns, though what it retains may be read."""

    @property
    def in_flight(self) -> int:
        """Requests that it has been given and has not answered."""


E = TypeVar("E", bound=PlannedEngine)


class Loads(Protocol[E]):
    """The engines of one role, by load."""

    def least(self, tried: Collection[E] = ()) -> E | None:
        """Returns the usable engine, not draining, not in `tried`, with the fewest requests.

        Of equals the one that served least. None if there is none.
        """


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What is fixed by flags; None leaves it to the cost model."""

    way: PlanKind | None = None
    """PULL, LOCAL or RECOMPUTE wherever it is possible."""
    local_suffix_tokens_max: int | None = None
    """Local for suffixes up to that long, and for no others."""
    pull_tokens_min: int | None = None
    """Pull if at least so many tokens can be read; recompute if fewer."""
    holder_margin: int = 8
    """The holder decodes while it has at most so many requests more than the least loaded."""


class Choice(NamedTuple, Generic[E]):
    """One decision. `prefill` is None if there is no such leg.

    `verdict` is None exactly when `kind` is PULL: then prefill's connector says
    it. `reason` is one line of words and `name=number` for spans and headers,
    ASCII. `forecast` is what `Costs.learn` wants back; None if nothing is to be
    learned from the turn.
    """

    kind: PlanKind
    prefill: E | None
    decode: E
    lease_id: str
    verdict: Verdict | None
    reason: str
    forecast: Forecast | None


def choose(
    resolution: Resolution,
    size: TurnSize,
    prefills: Loads[E],
    decodes: Loads[E],
    holder: E | None,
    costs: Costs,
    thresholds: Thresholds,
    *,
    model: str,
    alone: bool,
    now_ns: int,
) -> Choice[E]:
    """Returns the plan for one turn.

    `holder` is the decode engine at the resolution's address, None if it is
    not one of ours. `model` is the name that the client asks for. `alone` says
    that the answer cannot be given through prefill and decode. Raises NoEngine.
    """
    raise NotImplementedError

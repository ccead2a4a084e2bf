"""How one turn is served: which engines, and whether to read KV back from decode.

A pure function of what the lease service said, of the engines as last seen and
of the request. Decode goes to the engine that holds the conversation while
that engine is usable, because its own prefix cache holds the history too and
because the retention it leaves supersedes the one it has.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from kvturn_router.choice.costs import Costs, Estimate, Estimates, Forecast
from kvturn_router.verdict import Verdict


class PlanKind(StrEnum):
    """The ways to serve a turn."""

    PULL = "pull"
    """Prefill reads KV from decode and computes the rest."""
    LOCAL = "local"
    """The decode engine that holds the KV computes the rest itself; no prefill."""
    RECOMPUTE = "recompute"
    """Prefill computes the whole prompt."""
    ALONE = "alone"
    """Decode serves the request without prefill, which could not do its part of it."""


class Resolution(msgspec.Struct, frozen=True):
    """What is known of a conversation's KV when the turn begins.

    `verdict` says why there is nothing to read; it is None exactly when there
    is: under `lease_id`, or, where that is "", under a stock handle.
    `http_address` is the holder's, "" if not known. `longest_read_ms` is 0
    where there is no lease. `token_count` tokens are retained, by a turn whose
    prompt had `prompt_tokens`; both are 0 if not known. `extends` says that this
    turn's history goes on from that turn's. `conversation_id` and `turn` are
    this turn's, "" and 0 where the lease service did not say; `engine_id` is
    the holder's.
    """

    verdict: Verdict | None
    lease_id: str = ""
    http_address: str = ""
    longest_read_ms: int = 0
    token_count: int = 0
    prompt_tokens: int = 0
    extends: bool = False
    conversation_id: str = ""
    turn: int = 0
    engine_id: str = ""


class NoEngine(Exception):
    """No engine of the role can be used; `role` is "prefill" or "decode"."""

    def __init__(self, role: str) -> None:
        super().__init__(f"no {role} engine is usable")
        self.role = role


class TurnSize(msgspec.Struct, frozen=True):
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
    def open(self) -> bool:
        """Whether it may be given a turn now: usable, not draining, not full."""

    @property
    def in_flight(self) -> int:
        """Requests that it has been given and has not answered."""


E = TypeVar("E", bound=PlannedEngine)


class Loads(Protocol[E]):
    """The engines of one role, by load."""

    def least(self, tried: Collection[E] = ()) -> E | None:
        """Returns the open engine not in `tried` with the fewest requests in flight.

        None if there is none.
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


class Plan(msgspec.Struct, Generic[E], frozen=True):
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


def decide(
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
    bound: bool = False,
    now_ns: int,
) -> Plan[E]:
    """Returns the plan for one turn.

    `holder` is the decode engine at the resolution's address, None if it is
    not one of ours. `model` is the name that the client asks for. `alone` says
    that the answer cannot be given through prefill and decode, and `bound` that
    no engine but the holder can give it, which has the history, however much it
    has to do, and while it drains: a local turn where it holds a lease, too.
    Raises NoEngine.
    """
    if bound and holder is not None:
        decode, where = holder, _HOME
    else:
        decode, where = _decode_engine(holder, decodes, thresholds)
    if alone or bound:
        held = resolution.verdict is None and resolution.lease_id != "" and where == _HOME
        kind = PlanKind.LOCAL if held and not alone else PlanKind.ALONE
        told = Verdict.LOCAL if kind is PlanKind.LOCAL else resolution.verdict
        reason = f"{'not_split' if alone else 'history_at_decode'} {where}"
        return Plan(kind, None, decode, "", told or Verdict.NOT_OFFERED, reason, None)
    prefill = prefills.least()
    verdict = resolution.verdict
    if verdict is None and where == _LOST:
        # Its KV may be gone with it, and a read from a dead engine ends only
        # at the longest read.
        verdict = Verdict.ENGINE_LOST
    if verdict is not None:
        if prefill is None:
            raise NoEngine("prefill")
        forecast = None
        if size.prompt_bytes:  # Else nothing could be learned from it.
            new = _Turn(model, size.prompt_bytes, 0, False, "")
            forecast = _forecast(new, prefill, decode, costs)
        return Plan(
            PlanKind.RECOMPUTE, prefill, decode, "", verdict, f"{verdict} {where}", forecast
        )
    can_be_local = where == _HOME and resolution.lease_id != ""
    if prefill is None and not can_be_local:
        raise NoEngine("prefill")
    address = resolution.http_address if holder is None else holder.url
    extends = resolution.extends and resolution.token_count > 0 and size.new_bytes > 0
    turn = _Turn(model, size.new_bytes, resolution.token_count, extends, address)
    forecast = _forecast(turn, prefill, decode, costs)
    ways = _ways(forecast, thresholds, can_be_local=can_be_local, no_prefill=prefill is None)
    kind, why, costing = _cheapest(ways, forecast, costs, now_ns)
    below = thresholds.pull_tokens_min is not None and PlanKind.PULL not in ways
    return Plan(
        kind,
        None if kind is PlanKind.LOCAL else prefill,
        decode,
        resolution.lease_id if kind is PlanKind.PULL else "",
        _verdict(kind, below_threshold=below),
        f"{why} {where}{costing}",
        forecast,
    )


_HOME: Final = "at_holder"
_LOST: Final = "holder_lost"


class _Turn(msgspec.Struct, frozen=True):
    """What is known of a turn's size; fields as in Forecast."""

    model: str
    new_bytes: int
    held_tokens: int
    extends: bool
    holder: str


def _decode_engine(holder: E | None, decodes: Loads[E], thresholds: Thresholds) -> tuple[E, str]:
    """Returns the engine that will decode, and how it stands to the holder. Raises NoEngine."""
    least = decodes.least()
    if holder is None:
        where = "no_holder"
    elif not holder.usable:
        where = _LOST
    elif holder.draining:
        where = "holder_draining"
    elif not holder.open or (
        least is not None and holder.in_flight > least.in_flight + thresholds.holder_margin
    ):
        where = "holder_overloaded"
    else:
        return holder, _HOME
    if least is None:
        raise NoEngine("decode")
    return least, where


def _forecast(
    turn: _Turn, prefill: PlannedEngine | None, decode: PlannedEngine, costs: Costs
) -> Forecast:
    return Forecast(
        model=turn.model,
        new_bytes=turn.new_bytes,
        new_tokens=costs.new_tokens(turn.model, turn.new_bytes),
        held_tokens=turn.held_tokens,
        extends=turn.extends,
        holder=turn.holder,
        prefill="" if prefill is None else prefill.url,
        prefill_in_flight=0 if prefill is None else prefill.in_flight,
        decode=decode.url,
        decode_in_flight=decode.in_flight,
    )


def _ways(
    forecast: Forecast, thresholds: Thresholds, *, can_be_local: bool, no_prefill: bool
) -> list[PlanKind]:
    """Returns the ways that are possible and that the flags leave open; at least one."""
    if no_prefill:
        return [PlanKind.LOCAL]
    if thresholds.way is PlanKind.LOCAL and can_be_local:
        return [PlanKind.LOCAL]
    if thresholds.way is PlanKind.RECOMPUTE:
        return [PlanKind.RECOMPUTE]
    if thresholds.way is not None or not forecast.extends:
        # How much is still equal is not known: prefill will find out, at little cost.
        return [PlanKind.PULL]
    ways = [PlanKind.PULL, PlanKind.RECOMPUTE]
    if thresholds.pull_tokens_min is not None:
        ways = ways[:1] if forecast.held_tokens >= thresholds.pull_tokens_min else ways[1:]
    if not can_be_local:
        return ways
    if thresholds.local_suffix_tokens_max is None:
        return [*ways, PlanKind.LOCAL]
    short = forecast.new_tokens <= thresholds.local_suffix_tokens_max
    return [PlanKind.LOCAL] if short else ways


def _cheapest(
    ways: Sequence[PlanKind], forecast: Forecast, costs: Costs, now_ns: int
) -> tuple[PlanKind, str, str]:
    """Returns the way to take, why in a word, and what the ways cost as the reason tells it."""
    if not forecast.extends:
        return ways[0], "only_way", ""
    estimates = costs.estimates(forecast, now_ns)
    costing = (
        f" new_tokens={forecast.new_tokens:.0f} held_tokens={forecast.held_tokens:.0f}"
        + "".join(f" {way}_ms={_of(estimates, way).ms:.1f}" for way in ways)
    )
    if len(ways) == 1:
        return ways[0], "only_way", costing
    best = min(ways, key=lambda way: _of(estimates, way).ms)
    hope = min(ways, key=lambda way: _of(estimates, way).best_ms)
    wanted = hope is not best and _of(estimates, hope).best_ms < _of(estimates, best).ms
    if costs.explores(forecast.decode, wanted=wanted):
        return hope, "explored", costing
    return best, "cheapest", costing


def _of(estimates: Estimates, way: PlanKind) -> Estimate:
    if way is PlanKind.PULL:
        return estimates.pull
    return estimates.local if way is PlanKind.LOCAL else estimates.recompute


def _verdict(kind: PlanKind, *, below_threshold: bool) -> Verdict | None:
    if kind is PlanKind.PULL:
        return None
    if kind is PlanKind.LOCAL:
        return Verdict.LOCAL
    return Verdict.BELOW_THRESHOLD if below_threshold else Verdict.CHEAPER_TO_COMPUTE

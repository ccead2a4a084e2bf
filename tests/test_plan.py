"""The choice how to serve a turn: which way, which engines, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from kvturn_router.choice.costs import EXPLORED_FIRST, Costs, Priors, Took
from kvturn_router.choice.plan import NoEngine, PlanKind, Resolution, Thresholds, TurnSize, decide
from kvturn_router.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Collection

SECOND_NS = 10**9
HELD = Resolution(None, "i.1.1", "http://d0", 3000, token_count=2048, extends=True)
SHORT = TurnSize(9000, 60)
LONG = TurnSize(90_000, 80_000)
EVEN = Priors(prefill=(30.0, 0.5), read=(60.0, 0.01), handover=(20.0, 0.01), local=(30.0, 0.7))
"""Short suffixes are computed on decode sooner, long ones on prefill."""
REASON = re.compile(r"[a-z_]+ [a-z_]+( [a-z_]+=\d+(\.\d+)?)*")


@dataclass(eq=False)
class Engine:
    url: str
    usable: bool = True
    draining: bool = False
    in_flight: int = 0
    full: bool = False

    @property
    def open(self) -> bool:
        return self.usable and not self.draining and not self.full


@dataclass
class Loads:
    """The engines of a role; `least` as the fleet's."""

    engines: list[Engine] = field(default_factory=list)

    def least(self, tried: Collection[Engine] = ()) -> Engine | None:
        fit = [one for one in self.engines if one.open and one not in tried]
        return min(fit, key=lambda one: one.in_flight, default=None)


class Fleet:
    """Two prefill and two decode engines; decode 0 holds the conversation."""

    def __init__(self) -> None:
        self.prefills = [Engine("http://p0"), Engine("http://p1")]
        self.decodes = [Engine("http://d0"), Engine("http://d1")]
        self.holder: Engine | None = self.decodes[0]
        self.costs = Costs(EVEN)

    def decide(
        self,
        resolution: Resolution = HELD,
        size: TurnSize = SHORT,
        *,
        alone: bool = False,
        bound: bool = False,
        **fixed: Any,
    ) -> Any:
        choice = decide(
            resolution,
            size,
            Loads(self.prefills),
            Loads(self.decodes),
            self.holder,
            self.costs,
            Thresholds(**fixed),
            model="m",
            alone=alone,
            bound=bound,
            now_ns=SECOND_NS,
        )
        assert REASON.fullmatch(choice.reason), choice.reason
        return choice

    def know(self) -> None:
        """Makes the rates certain, so that nothing is explored."""
        for index in range(40):
            for size in (SHORT, LONG):
                plan = self.decide(size=size)
                new = 4 + 0.25 * size.new_bytes
                self.costs.learn(
                    "recompute", plan.forecast, _took(new, 0, 30 + 0.5 * (2048 + new)), index
                )
                self.costs.learn("pull", plan.forecast, _took(new, 2048, 110 + 0.5 * new), index)
                self.costs.learn(
                    "local",
                    plan.forecast,
                    Took(int(2048 + new), 0, 2048, 0, 30 + 0.7 * new, 0),
                    index,
                )


def _took(new: float, reused: int, prefill_ms: float) -> Took:
    return Took(int(2048 + new), reused, 0, prefill_ms, 20 + 0.01 * new, 0)


@pytest.fixture
def fleet() -> Fleet:
    """Engines whose costs are known."""
    made = Fleet()
    made.know()
    return made


def test_a_short_suffix_is_computed_by_the_holder(fleet):
    """No prefill leg, no read, and a verdict of its own."""
    plan = fleet.decide()
    assert (plan.kind, plan.prefill, plan.decode) == (PlanKind.LOCAL, None, fleet.decodes[0])
    assert (plan.lease_id, plan.verdict) == ("", Verdict.LOCAL)
    assert plan.reason.startswith("cheapest at_holder new_tokens=19 held_tokens=2048 pull_ms=")
    assert " local_ms=" in plan.reason
    assert " recompute_ms=" in plan.reason


def test_a_long_suffix_is_pulled_for(fleet):
    """Prefill reads and computes; the holder decodes; prefill's connector says the verdict."""
    plan = fleet.decide(size=LONG)
    assert (plan.kind, plan.decode) == (PlanKind.PULL, fleet.decodes[0])
    assert plan.prefill in fleet.prefills
    assert (plan.lease_id, plan.verdict) == ("i.1.1", None)


def test_a_read_that_costs_more_than_computing_is_not_made(fleet):
    """Little is held: computing it again is cheaper than a read's fixed part."""
    few = replace(HELD, token_count=40)
    plan = fleet.decide(few, TurnSize(90_000, 8000), local_suffix_tokens_max=0)
    assert (plan.kind, plan.lease_id) == (PlanKind.RECOMPUTE, "")
    assert plan.verdict is Verdict.CHEAPER_TO_COMPUTE


def test_running_requests_make_local_dearer(fleet):
    """The same short suffix, while many answers run on the holder: prefill computes it."""
    for engine in fleet.decodes:
        engine.in_flight = 400
    assert fleet.decide(size=TurnSize(9000, 500)).kind is PlanKind.PULL


def test_an_overloaded_holder_is_read_from_and_does_not_decode(fleet):
    """Nine more requests than the least loaded, the margin is eight: another engine decodes."""
    fleet.decodes[0].in_flight = 9
    plan = fleet.decide()
    assert (plan.kind, plan.decode, plan.lease_id) == (PlanKind.PULL, fleet.decodes[1], "i.1.1")
    assert plan.reason.startswith("cheapest holder_overloaded ")
    assert " local_ms=" not in plan.reason
    fleet.decodes[0].in_flight = 8
    assert fleet.decide().decode is fleet.decodes[0]
    assert fleet.decide(holder_margin=7).decode is fleet.decodes[1]


def test_a_full_holder_does_not_decode(fleet):
    """It has as many requests as it may be given; with all engines full nothing is planned."""
    fleet.decodes[0].full = True
    plan = fleet.decide()
    assert (plan.kind, plan.decode) == (PlanKind.PULL, fleet.decodes[1])
    fleet.decodes[1].full = True
    with pytest.raises(NoEngine):
        fleet.decide()


def test_a_draining_holder_is_read_from_and_does_not_decode(fleet):
    """It gets no new turns, but what it retains can still be read."""
    fleet.decodes[0].draining = True
    plan = fleet.decide()
    assert (plan.kind, plan.decode, plan.lease_id) == (PlanKind.PULL, fleet.decodes[1], "i.1.1")
    assert plan.reason.startswith("cheapest holder_draining ")


def test_a_holder_that_is_not_usable_is_a_lost_engine(fleet):
    """Nothing is read from an engine that does not answer."""
    fleet.decodes[0].usable = False
    plan = fleet.decide()
    assert (plan.kind, plan.decode) == (PlanKind.RECOMPUTE, fleet.decodes[1])
    assert plan.verdict is Verdict.ENGINE_LOST
    assert plan.reason == "engine_lost holder_lost"


def test_a_holder_this_router_does_not_know_is_pulled_from(fleet):
    """The holder's address is none of ours: prefill can read from it all the same."""
    fleet.holder = None
    plan = fleet.decide(replace(HELD, http_address="http://elsewhere"))
    assert (plan.kind, plan.lease_id) == (PlanKind.PULL, "i.1.1")
    assert plan.forecast.holder == "http://elsewhere"


@pytest.mark.parametrize("verdict", [Verdict.RELEASED, Verdict.FIRST_TURN, Verdict.TURNED_OFF])
def test_where_nothing_is_held_the_verdict_is_the_resolutions(fleet, verdict):
    """Prefill computes all; the last holder decodes, whose cache may help with the transfer."""
    plan = fleet.decide(Resolution(verdict, "", "http://d0"))
    assert (plan.kind, plan.decode, plan.verdict) == (PlanKind.RECOMPUTE, fleet.decodes[0], verdict)
    assert plan.reason == f"{verdict} at_holder"


@pytest.mark.parametrize(
    "resolution",
    [
        replace(HELD, extends=False),
        replace(HELD, token_count=0),
        Resolution(None, "", "http://d0"),
    ],
)
def test_where_it_is_not_known_what_is_still_equal_prefill_finds_out(fleet, resolution):
    """An edited history, an older lease service, a stock handle: a read is tried."""
    for thresholds in ({}, {"pull_tokens_min": 4096}, {"local_suffix_tokens_max": 4096}):
        plan = fleet.decide(resolution, **thresholds)
        assert (plan.kind, plan.lease_id) == (PlanKind.PULL, resolution.lease_id)
        assert plan.reason == "only_way at_holder"


def test_flags_fix_the_way(fleet):
    """Each way wherever it is possible, whatever it costs."""
    assert fleet.decide(way=PlanKind.PULL).kind is PlanKind.PULL
    assert fleet.decide(size=LONG, way=PlanKind.LOCAL).kind is PlanKind.LOCAL
    recompute = fleet.decide(way=PlanKind.RECOMPUTE)
    assert (recompute.kind, recompute.verdict) == (PlanKind.RECOMPUTE, Verdict.CHEAPER_TO_COMPUTE)
    fleet.decodes[0].draining = True
    assert fleet.decide(way=PlanKind.LOCAL).kind is PlanKind.PULL


def test_flags_fix_the_thresholds(fleet):
    """Local up to so many new tokens and for no others; a read from so many held tokens on."""
    assert fleet.decide(local_suffix_tokens_max=18).kind is not PlanKind.LOCAL
    assert fleet.decide(size=LONG, local_suffix_tokens_max=30_000).kind is PlanKind.LOCAL
    few = fleet.decide(size=LONG, pull_tokens_min=2049)
    assert (few.kind, few.verdict) == (PlanKind.RECOMPUTE, Verdict.BELOW_THRESHOLD)
    assert fleet.decide(size=LONG, pull_tokens_min=2048).kind is PlanKind.PULL


def test_an_answer_that_cannot_be_split_goes_to_decode_alone(fleet):
    """No prefill engine is needed, not even a usable one."""
    fleet.prefills = []
    plan = fleet.decide(Resolution(Verdict.NOT_OFFERED), alone=True)
    assert (plan.kind, plan.prefill, plan.verdict) == (PlanKind.ALONE, None, Verdict.NOT_OFFERED)
    assert plan.forecast is None
    off = fleet.decide(Resolution(Verdict.TURNED_OFF), alone=True)
    assert off.verdict is Verdict.TURNED_OFF


def test_what_only_the_holder_can_answer_is_local_where_it_holds_a_lease(fleet):
    """No prefill leg either way; without a lease the verdict says why nothing was retained."""
    fleet.prefills = []
    held = fleet.decide(bound=True)
    assert (held.kind, held.prefill, held.verdict) == (PlanKind.LOCAL, None, Verdict.LOCAL)
    assert held.forecast is None
    released = fleet.decide(Resolution(Verdict.RELEASED), bound=True)
    assert (released.kind, released.verdict) == (PlanKind.ALONE, Verdict.RELEASED)
    both = fleet.decide(Resolution(Verdict.NOT_OFFERED), bound=True, alone=True)
    assert (both.kind, both.verdict) == (PlanKind.ALONE, Verdict.NOT_OFFERED)


def test_without_prefill_a_holder_serves_its_own_and_others_are_refused(fleet):
    """All prefill engines are gone: what decode holds it can go on with."""
    fleet.prefills[0].usable = fleet.prefills[1].draining = False
    fleet.prefills[1].usable = False
    assert fleet.decide(size=LONG).kind is PlanKind.LOCAL
    with pytest.raises(NoEngine) as missing:
        fleet.decide(Resolution(Verdict.FIRST_TURN))
    assert missing.value.role == "prefill"


def test_without_decode_the_turn_is_refused(fleet):
    """The one decode engine that is left drains."""
    fleet.decodes[0].usable = False
    fleet.decodes[1].draining = True
    with pytest.raises(NoEngine) as missing:
        fleet.decide()
    assert missing.value.role == "decode"


def test_what_might_be_better_is_tried_a_few_times():
    """Only local is known well, and nothing of reads: a few of 20 turns try another way."""
    fleet = Fleet()
    size = TurnSize(9000, 700)
    forecast = fleet.decide(size=size, way=PlanKind.LOCAL).forecast
    for index in range(40):
        fleet.costs.learn("local", forecast, Took(2227, 0, 2048, 0.0, 155.0, 0), index)
    plans = [fleet.decide(size=size) for _ in range(20)]
    explored = [plan for plan in plans if plan.reason.startswith("explored ")]
    assert len(explored) == EXPLORED_FIRST
    assert all(plan.kind is not PlanKind.LOCAL for plan in explored)
    assert all(plan.kind is PlanKind.LOCAL for plan in plans if plan not in explored)

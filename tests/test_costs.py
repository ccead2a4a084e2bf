"""What the ways to serve a turn cost, as learned from turns with hand-made durations."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from kvturn_router.choice.costs import (
    ENGINES_MAX,
    EXPLORED_FIRST,
    EXPLORED_SHARE,
    TAUGHT_MIN,
    Costs,
    Estimate,
    Forecast,
    Priors,
    Took,
)
from kvturn_router.choice.fit import HALF_LIFE_NS, PRIOR_DEVIATION, Fit

SECOND_NS = 10**9
WRONG = (0.25, 1.0, 4.0)
BLOCKS = (16, 32, 128)
"""Tokens of a block on decode, small and large."""


class World(NamedTuple):
    """How long things really take: ms of a leg, ms of a token; and tokens of a block on decode."""

    prefill: tuple[float, float] = (60.0, 0.9)
    read: tuple[float, float] = (150.0, 0.05)
    handover: tuple[float, float] = (60.0, 0.1)
    local: tuple[float, float] = (40.0, 1.1)
    block: int = 128

    def serve(self, way: str, held: int, new: float, scale: tuple[float, float]) -> Took:
        """Returns what a turn tells; `scale` is the noise of each leg."""
        prompt = int(held + new)
        begun = held % self.block
        decode_ms = self.handover[0] + self.handover[1] * (new + begun)
        if way == "local":
            decode_ms = self.local[0] + self.local[1] * (new + begun)
            return Took(prompt, 0, held - begun, 0.0, decode_ms * scale[1], 0)
        computed = new if way == "pull" else held + new
        prefill_ms = self.prefill[0] + self.prefill[1] * computed
        reused = held if way == "pull" else 0
        if reused:
            prefill_ms += self.read[0] + self.read[1] * held
        return Took(prompt, reused, 0, prefill_ms * scale[0], decode_ms * scale[1], 0)

    def ms(self, way: str, held: int, new: float) -> float:
        took = self.serve(way, held, new, (1.0, 1.0))
        return took.prefill_ms + took.decode_ms

    def wrong(self, compute: float, transfer: float, local: float) -> Priors:
        """Priors that are off by these factors."""
        return Priors(
            prefill=_times(self.prefill, compute),
            read=_times(self.read, transfer),
            handover=_times(self.handover, transfer),
            local=_times(self.local, local),
        )


def _times(rate: tuple[float, float], factor: float) -> tuple[float, float]:
    return rate[0] * factor, rate[1] * factor


def forecast(costs: Costs, held: int, new_bytes: int, **changed: object) -> Forecast:
    """A turn of one conversation on one pair of idle engines."""
    known = Forecast(
        model="m",
        new_bytes=new_bytes,
        new_tokens=costs.new_tokens("m", new_bytes),
        held_tokens=held,
        extends=True,
        holder="http://d",
        prefill="http://p",
        prefill_in_flight=0,
        decode="http://d",
        decode_in_flight=0,
    )
    return replace(known, **changed)  # type: ignore[arg-type]


def pick(costs: Costs, turn: Forecast, now_ns: int, *, explore: bool) -> str:
    """The way that a turn is to go, by the rule of `plan.decide`."""
    ways = costs.estimates(turn, now_ns)._asdict()
    best = min(ways, key=lambda way: ways[way].ms)
    hope = min(ways, key=lambda way: ways[way].best_ms)
    wanted = hope != best and ways[hope].best_ms < ways[best].ms
    return hope if explore and costs.explores(turn.decode, wanted=wanted) else best


HELD_OUT = [(held, new) for held in (450, 1300, 2600) for new in (12, 45, 170, 420, 900)]


def regrets(world: World, costs: Costs, now_ns: int) -> list[float]:
    """How much longer than the best way the picked one takes, for each turn not learned from."""
    found = []
    for held, new in HELD_OUT:
        turn = forecast(costs, held, round((new - 4) / 0.22))
        way = pick(costs, turn, now_ns, explore=False)
        best = min(world.ms(each, held, new) for each in ("pull", "local", "recompute"))
        found.append(world.ms(way, held, new) / best - 1.0)
    return found


class Pupil:
    """Costs that learn from turns of a world, one every five seconds, as they pick them."""

    def __init__(self, world: World, priors: Priors, seed: int) -> None:
        self.world = world
        self.costs = Costs(priors)
        self.now_ns = 0
        self.rng = random.Random(seed)

    def turn(self, way: str = "", slower: float = 1.0) -> None:
        """Serves one turn as the costs pick it, or that way, and `slower` times as long."""
        self.now_ns += 5 * SECOND_NS
        rng = self.rng
        held = rng.randint(300, 3500)
        new_bytes = round(rng.choice((30, 100, 300, 1000, 3000)) * rng.uniform(0.8, 1.2))
        turn = forecast(self.costs, held, new_bytes)
        way = way or pick(self.costs, turn, self.now_ns, explore=True)
        scale = (slower * rng.lognormvariate(0, 0.1), slower * rng.lognormvariate(0, 0.1))
        took = self.world.serve(way, held, 4 + 0.22 * new_bytes, scale)
        self.costs.learn(way, turn, took, self.now_ns)

    def mean_regret(self) -> float:
        """How much longer than the best ways its picks take, on average over unseen turns."""
        found = regrets(self.world, self.costs, self.now_ns)
        return sum(found) / len(found)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("local", WRONG)
@pytest.mark.parametrize("transfer", WRONG)
@pytest.mark.parametrize("compute", WRONG)
def test_priors_that_are_wrong_by_four_are_overridden(compute, transfer, local, block):
    """After 25 turns, with a tenth of noise, picks are within 10 % of the best and stay so."""
    world = World(block=block)
    pupil = Pupil(world, world.wrong(compute, transfer, local), seed=7)
    for index in range(60):
        pupil.turn()
        assert index < 25 or pupil.mean_regret() < 0.1


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("slower", [3.0, 5.0, 10.0])
def test_a_way_whose_first_turn_was_an_outlier_is_tried_again(slower, block):
    """The first local turn took far longer than they do: 40 turns later that is known.

    In one run of twenty another accident may have followed.
    """
    wrong = []
    for seed in range(20):
        pupil = Pupil(World(block=block), World().wrong(1, 1, 1), seed)
        pupil.turn("local", slower)
        for _ in range(40):
            pupil.turn()
        if pupil.mean_regret() >= 0.1:
            wrong.append(seed)
    assert len(wrong) <= 1


@pytest.mark.parametrize("slower", [20, 200])
def test_what_was_learned_while_decode_stood_still_is_forgotten(slower):
    """Thirty local turns took far longer: half an hour later picks are right again."""
    for seed in range(10):
        pupil = Pupil(World(), Priors(), seed)
        for _ in range(60):
            pupil.turn()
        for _ in range(30):
            pupil.turn("local", slower)
        assert pupil.mean_regret() > 0.1, seed
        for _ in range(360):
            pupil.turn()
        assert pupil.mean_regret() < 0.1, seed


def test_block_size_shows_in_what_the_cache_left():
    """All that was found could be blocks of 256, but 100 tokens were left: blocks are of 128."""
    costs = Costs()
    for held in (2608, 2660):
        turn = forecast(costs, held, 300)
        costs.learn("local", turn, Took(held + 70, 0, 2560, 0.0, 200.0, 0), 0)
    whole = costs.estimates(forecast(costs, 20 * 128, 300), 0).local.ms
    begun = costs.estimates(forecast(costs, 21 * 128 + 2, 300), 0).local.ms
    assert begun - whole == pytest.approx(2 * costs.learned().local[1])


def taught(world: World, turns: int = 40) -> Costs:
    """Costs that have seen every way often, without noise."""
    costs, rng = Costs(), random.Random(1)
    for index in range(turns):
        held, new_bytes = rng.randint(300, 3500), rng.choice((50, 500, 3000))
        turn = forecast(costs, held, new_bytes)
        for way in ("pull", "local", "recompute"):
            took = world.serve(way, held, 4 + 0.22 * new_bytes, (1.0, 1.0))
            costs.learn(way, turn, took, index * SECOND_NS)
    return costs


def test_fixed_part_and_slope_come_apart():
    """All ways seen at several sizes: each is told to a tenth, also for sizes never seen."""
    world = World()
    costs = taught(world)
    told = costs.estimates(forecast(costs, 5000, 2000), 40 * SECOND_NS)
    new = 4 + 0.22 * 2000
    for way in ("pull", "local", "recompute"):
        assert getattr(told, way).ms == pytest.approx(world.ms(way, 5000, new), rel=0.1)


def test_one_outlier_moves_little():
    """A turn that took twenty times as long as all before and after is not believed."""
    costs = taught(World())
    turn = forecast(costs, 1000, 300)
    before = costs.estimates(turn, 40 * SECOND_NS).local.ms
    took = World().serve("local", 1000, 70, (1.0, 20.0))
    costs.learn("local", turn, took, 40 * SECOND_NS)
    assert costs.estimates(turn, 40 * SECOND_NS).local.ms < 1.2 * before


def test_a_change_that_lasts_is_believed():
    """The network becomes five times as slow and stays so: 30 pulls later that is known."""
    world = World()
    costs = taught(world)
    slow = world._replace(read=_times(world.read, 5))
    for index in range(30):
        turn = forecast(costs, 2000, 300)
        took = slow.serve("pull", 2000, 70, (1.0, 1.0))
        costs.learn("pull", turn, took, (40 + index) * SECOND_NS)
    told = costs.estimates(forecast(costs, 2000, 300), 70 * SECOND_NS).pull.ms
    assert told == pytest.approx(slow.ms("pull", 2000, 70), rel=0.2)


def test_decode_without_a_prefix_cache_computes_all():
    """Local turns report no hit: soon local is expected to cost the whole prompt."""
    world = World()
    costs = taught(world)
    for index in range(15):
        turn = forecast(costs, 2000, 300)
        whole_ms = world.local[0] + world.local[1] * 2070
        costs.learn("local", turn, Took(2070, 0, 0, 0.0, whole_ms, 0), (40 + index) * SECOND_NS)
    told = costs.estimates(forecast(costs, 2000, 300), 60 * SECOND_NS)
    assert told.local.ms > 0.6 * whole_ms
    assert told.pull.ms < told.local.ms


def test_prefill_that_caches_needs_to_read_and_compute_less():
    """Prefill finds nine tenths of what is held in its own cache: recomputing is cheap there."""
    costs = Costs()
    for index in range(20):
        turn = forecast(costs, 2000, 300)
        took = Took(2070, 0, 1800, 20 + 0.1 * 270, 20.0, 0)
        costs.learn("recompute", turn, took, index * SECOND_NS)
    told = costs.estimates(forecast(costs, 2000, 300), 20 * SECOND_NS)
    assert told.recompute.ms < 100


def test_failed_reads_make_pulling_dear():
    """Every read begins and brings nothing: the time it cost counts as the read's."""
    world = World()
    costs = taught(world)
    turn = forecast(costs, 2000, 300)
    before = costs.estimates(turn, 40 * SECOND_NS).pull.ms
    for index in range(10):
        took = Took(2070, 0, 0, world.ms("recompute", 2000, 70) + 3000, 60.0, 0, read_failed=True)
        costs.learn("pull", turn, took, (40 + index) * SECOND_NS)
    assert costs.estimates(turn, 50 * SECOND_NS).pull.ms > before + 1000


def test_answers_that_are_not_streamed_teach_too():
    """Decode's legs last to the end of answers of 5 to 200 tokens, at 12 ms each."""
    world, rng = World(), random.Random(3)
    costs = Costs()
    for index in range(80):
        held, new_bytes = rng.randint(300, 3500), rng.choice((50, 500, 3000))
        turn = forecast(costs, held, new_bytes)
        for way in ("pull", "local", "recompute"):
            generated = rng.randint(5, 200)
            took = world.serve(way, held, 4 + 0.22 * new_bytes, (1.0, 1.0))
            took = replace(
                took, decode_ms=took.decode_ms + 12 * generated, generated_tokens=generated
            )
            costs.learn(way, turn, took, index * SECOND_NS)
    told = costs.estimates(forecast(costs, 2000, 2000), 80 * SECOND_NS)
    assert told.local.ms == pytest.approx(world.ms("local", 2000, 444), rel=0.25)
    assert told.pull.ms == pytest.approx(world.ms("pull", 2000, 444), rel=0.25)


def test_load_counts():
    """Requests ahead on prefill are waited for; requests that run on decode are slowed down."""
    costs = taught(World())
    now_ns = 40 * SECOND_NS
    idle = costs.estimates(forecast(costs, 1000, 300), now_ns)
    queued = costs.estimates(forecast(costs, 1000, 300, prefill_in_flight=3), now_ns)
    running = costs.estimates(forecast(costs, 1000, 300, decode_in_flight=10), now_ns)
    assert queued.pull.ms > idle.pull.ms + 500
    assert queued.recompute.ms > idle.recompute.ms + 500
    assert queued.local == idle.local
    assert running.local.ms > 1.5 * idle.local.ms
    assert running.pull == idle.pull


def test_a_new_engine_begins_with_what_others_taught():
    """The first estimate for an engine that was never seen is that of one that was."""
    costs = taught(World())
    now_ns = 40 * SECOND_NS
    seen = costs.estimates(forecast(costs, 1000, 300), now_ns)
    new = costs.estimates(
        forecast(costs, 1000, 300, holder="http://new", decode="http://new"), now_ns
    )
    assert new.local.ms == pytest.approx(seen.local.ms, rel=0.01)
    assert new.local.best_ms < seen.local.best_ms


def test_what_is_known_fades_and_the_estimate_stays():
    """Hours without a turn: the estimate is the same, hope is that of a way never taken."""
    costs = taught(World())
    turn = forecast(costs, 1000, 300)
    now = costs.estimates(turn, 40 * SECOND_NS).local
    later = costs.estimates(turn, 40 * SECOND_NS + 50 * HALF_LIFE_NS).local
    assert later.ms == now.ms
    assert now.best_ms > 0.75 * now.ms
    assert later.best_ms < 0.35 * later.ms


def test_exploring_is_bounded():
    """However much it is wanted, only few turns explore; engines are counted apart."""
    costs = Costs()
    explored = 0
    for count in range(1, 1001):
        explored += costs.explores("http://d", wanted=True)
        assert explored <= EXPLORED_FIRST + count / EXPLORED_SHARE
    assert explored >= 1000 // EXPLORED_SHARE
    assert costs.explores("http://other", wanted=True)
    assert not costs.explores("http://another", wanted=False)


def test_memory_is_bounded():
    """Far more pairs of engines than are kept: the oldest are forgotten, the latest stay."""
    costs, world = Costs(), World()
    for index in range(ENGINES_MAX + 100):
        name = f"http://{index}"
        turn = forecast(costs, 1000, 300, holder=name, decode=name, prefill=f"http://p{index}")
        for way in ("pull", "local"):
            costs.learn(way, turn, world.serve(way, 1000, 70, (1.0, 1.0)), index)
        costs.explores(name, wanted=False)
    sizes = [len(kept) for kept in vars(costs).values() if hasattr(kept, "__len__")] + [
        len(kept._fits) for kept in vars(costs).values() if hasattr(kept, "_fits")
    ]
    assert max(sizes) == ENGINES_MAX


def test_what_says_nothing_teaches_nothing():
    """A turn without prompt tokens, and one without durations, leave all as it was."""
    costs = Costs()
    turn = forecast(costs, 1000, 300)
    before = costs.estimates(turn, 0)
    for way in ("pull", "local", "recompute"):
        costs.learn(way, turn, Took(0, 0, 0, 50.0, 50.0, 0), SECOND_NS)
    assert costs.estimates(turn, SECOND_NS) == before
    costs.learn("recompute", turn, Took(1070, 0, 0, 0.0, 0.0, 0), SECOND_NS)
    told = costs.estimates(turn, SECOND_NS)
    assert told.pull == before.pull
    assert isinstance(told.local, Estimate)


@pytest.mark.parametrize("factor", [1 / 20, 0.25, 4.0, 12.0])
def test_a_fit_finds_rates_far_from_its_prior(factor):
    """Exact observations at two sizes: both rates are right to 10 % after thirty of them."""
    fit = Fit((10.0, 1.0))
    for index in range(30):
        units = (10.0, 200.0)[index % 2]
        fit.learn(units, factor * (10.0 + units), index * SECOND_NS)
    for units in (10.0, 200.0):
        assert fit.value(units) == pytest.approx(factor * (10.0 + units), rel=0.1)
        assert fit.deviation(units, 30 * SECOND_NS) < 0.2


def test_a_fit_follows_what_changes_slowly():
    """After 500 observations, steps of a tenth, none of them an outlier: it keeps up."""
    fit = Fit((10.0, 1.0))
    true = 100.0
    for index in range(500):
        fit.learn(100.0, true, index)
    for index in range(100):
        true *= 1.0 if index % 10 else 1.1
        fit.learn(100.0, true, 500 + index)
    assert fit.value(100.0) == pytest.approx(true, rel=0.15)


def test_a_fit_stays_positive_and_finite_under_anything():
    """Wild observations in any order: values stay positive, deviations within bounds."""
    rng = random.Random(11)
    fit = Fit((10.0, 1.0))
    now_ns = 0
    for _ in range(20_000):
        now_ns += rng.choice((0, SECOND_NS, HALF_LIFE_NS, 100 * HALF_LIFE_NS))
        units = rng.choice((0.0, 1.0, 50.0, 1e6))
        fit.learn(units, rng.choice((0.0, 1e-6, 1.0, 1e3, 1e9)), now_ns, rng.choice((0.0, 1e4)))
        assert fit.fixed > 0
        assert fit.each > 0
        assert 0 <= fit.deviation(rng.choice((0.0, 1e6)), now_ns) <= PRIOR_DEVIATION


@pytest.mark.parametrize("way", ["pull", "local"])
@pytest.mark.parametrize("held", [2_000, 6_000])
def test_what_reuse_saved_is_what_computing_would_have_taken_longer(way, held):
    """To within a fifth of what computing takes, for ways and sizes that differ."""
    world = World()
    costs = taught(world)
    turn = forecast(costs, held, 1_000)
    took = world.serve(way, held, 300, (1.0, 1.0))
    saved_ms = costs.saved_ms(way, turn, took)
    whole_ms = world.ms("recompute", held, 300)
    assert saved_ms == pytest.approx(whole_ms - world.ms(way, held, 300), abs=whole_ms / 5)
    answer = replace(took, decode_ms=took.decode_ms + 1e6, generated_tokens=500)
    assert costs.saved_ms(way, turn, answer) == pytest.approx(saved_ms, abs=whole_ms / 5)


def test_reuse_that_took_longer_than_computing_saved_nothing():
    """A read that stood in line: 0, which is not negative and is no praise."""
    world = World()
    costs = taught(world)
    turn = forecast(costs, 2_000, 1_000)
    took = replace(world.serve("pull", 2_000, 300, (1.0, 1.0)), prefill_ms=1e6)
    assert costs.saved_ms("pull", turn, took) == 0.0


def test_nothing_is_said_to_be_saved_that_is_not_known():
    """Priors tell nothing, nor do two turns; nor is anything saved by computing."""
    world = World()
    costs = Costs()
    turn = forecast(costs, 2_000, 1_000)
    for number in range(6):
        for way in ("pull", "local"):
            took = world.serve(way, 2_000, 300, (1.0, 1.0))
            known = costs.saved_ms(way, turn, took) is not None
            assert not known or number >= TAUGHT_MIN
        # Turns that are alike never show what longer ones take.
        costs.learn("pull", turn, world.serve("pull", 2_000, 300, (1.0, 1.0)), number * SECOND_NS)
    costs = taught(world)
    computed = world.serve("recompute", 2_000, 300, (1.0, 1.0))
    assert costs.saved_ms("recompute", turn, computed) is None
    assert costs.saved_ms("pull", turn, computed) is None
    took = world.serve("pull", 2_000, 300, (1.0, 1.0))
    assert costs.saved_ms("pull", replace(turn, prefill="another"), took) is None
    assert costs.saved_ms("pull", turn, replace(took, prompt_tokens=0)) is None

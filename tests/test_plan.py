"""The decision how to serve a turn, without any I/O."""

from dataclasses import dataclass

import pytest

from kvturn_router.plan import NoEngine, PlanKind, Resolution, decide, least_loaded
from kvturn_router.verdict import Verdict


@dataclass
class Engine:
    usable: bool = True
    in_flight: int = 0
    served: int = 0


LEASED = Resolution(None, "i.1.1", "http://d", 3000)


def test_a_lease_is_pulled_and_its_holder_decodes():
    """Decode 1 holds the conversation and is busier than decode 0: it still gets the turn."""
    decodes = [Engine(), Engine(in_flight=9)]
    plan = decide(LEASED, [Engine()], decodes, 1, alone=False)
    assert plan == (PlanKind.PULL, 0, 1, "i.1.1", None)


def test_a_holder_that_is_not_usable_is_a_lost_engine():
    """The holder was taken out: another decode serves, and nothing is read from the holder."""
    decodes = [Engine(usable=False), Engine()]
    plan = decide(LEASED, [Engine()], decodes, 0, alone=False)
    assert plan == (PlanKind.RECOMPUTE, 0, 1, "", Verdict.ENGINE_LOST)


def test_a_holder_this_router_does_not_know_is_pulled_from_by_any_decode():
    """The holder's address is none of ours: prefill can read from it all the same."""
    plan = decide(LEASED, [Engine()], [Engine(in_flight=1), Engine()], None, alone=False)
    assert plan == (PlanKind.PULL, 0, 1, "i.1.1", None)


def test_without_a_lease_the_verdict_is_the_resolutions():
    """The last holder is known though nothing is held: it decodes, prefill computes."""
    resolution = Resolution(Verdict.RELEASED, "", "http://d")
    plan = decide(resolution, [Engine()], [Engine(), Engine(in_flight=3)], 1, alone=False)
    assert plan == (PlanKind.RECOMPUTE, 0, 1, "", Verdict.RELEASED)


def test_the_least_loaded_engines_serve_and_idle_ones_take_turns():
    """Load comes first; of equally loaded engines the one that served least is next."""
    engines = [Engine(in_flight=2), Engine(in_flight=1, served=5), Engine(in_flight=1, served=4)]
    assert least_loaded(engines) == 2
    assert least_loaded(engines, tried={2}) == 1
    assert least_loaded([Engine(usable=False)]) is None


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        (Verdict.NOT_OFFERED, Verdict.NOT_OFFERED),
        (Verdict.TURNED_OFF, Verdict.TURNED_OFF),
        (Verdict.FIRST_TURN, Verdict.NOT_OFFERED),
    ],
)
def test_an_answer_that_cannot_be_split_goes_to_decode_alone(verdict, told):
    """No prefill engine is needed, not even a usable one."""
    plan = decide(Resolution(verdict), [Engine(usable=False)], [Engine()], None, alone=True)
    assert plan == (PlanKind.ALONE, None, 0, "", told)


def test_a_missing_role_is_named():
    """Prefill or decode without a usable engine refuses the turn."""
    with pytest.raises(NoEngine) as missing:
        decide(LEASED, [Engine(usable=False)], [Engine()], None, alone=False)
    assert missing.value.role == "prefill"
    with pytest.raises(NoEngine) as missing:
        decide(LEASED, [Engine()], [], None, alone=False)
    assert missing.value.role == "decode"

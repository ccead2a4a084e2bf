"""Bodies of every sort: what is refused, what is named, and what engines get of the rest."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.bodies import ROUTES, bodies, good_bodies
from fuzz.checks import check_body
from fuzz.corpus import corpus


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("body", corpus("bodies").values(), ids=corpus("bodies").keys())
def test_a_kept_body_is_judged_as_before(body, path):
    """Each was once misjudged, or shows a rule."""
    check_body(body, path)


@given(bodies, st.sampled_from(ROUTES))
@settings(max_examples=200, deadline=None)
def test_a_body_is_a_turn_or_a_400_that_names_the_field(body, path):
    """As Python's json and a table of kinds judge it; both legs say what came."""
    check_body(body, path)


@given(good_bodies, st.sampled_from(ROUTES))
@settings(max_examples=100, deadline=None)
def test_a_body_well_formed_reaches_the_legs_as_it_came(body, path):
    """Numbers, escapes, order and unknown members; less what is withheld."""
    check_body(body, path)

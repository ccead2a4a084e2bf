"""Bodies of every sort: what is refused, what is named, and what engines get of the rest."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.bodies import ROUTES, bodies, good_bodies
from fuzz.checks import check_body
from fuzz.corpus import corpus
from kvturn_router.errors import TurnError
from kvturn_router.request.body import CONTAINERS_MAX, MEMBERS_MAX, parse


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


def _nested(depth: int) -> bytes:
    one = b"[" * depth + b"]" * depth
    return b'{"model":"m","messages":[' + b",".join([one] * (1_500_000 // len(one))) + b"]}"


HOSTILE: Mapping[str, Callable[[], bytes]] = {
    "flat": lambda: _nested(1),
    "100": lambda: _nested(100),
    "130": lambda: _nested(130),
    "900": lambda: _nested(900),
    "objects": lambda: b'{"model":"m","messages":[' + b'{"a":1},' * 190_000 + b"0]}",
    "strings": lambda: b'{"model":"m","messages":[' + b'"[[{{\\\\",' * 150_000 + b"0]}",
    "names": lambda: b"{" + b",".join(b'"k%d" :1' % number for number in range(120_000)) + b"}",
    "escaped": lambda: (
        b"{" + b",".join(b'"\\u006b%d":1' % number for number in range(90_000)) + b',"k1":1}'
    ),
    "n": lambda: b'{"model":"m","messages":[],"n":' + b"1" * 1_500_000 + b"}",
    "quotes": lambda: b'{"model":"m","messages":["' + b'\\"' * 700_000 + b'"]}',
    "space": lambda: b'{"model":"m"' + b" " * 1_500_000 + b',"messages":[]}',
}
"""Made where they are wanted: each has 1.5 MB, and all tests are imported to run any."""


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_body_costs_no_more_than_reading_it(make):
    """The bound is what Python's json takes, some times over."""
    body = make()
    began = time.process_time()
    with contextlib.suppress(RecursionError):
        json.loads(body, parse_int=str)
    reading = time.process_time() - began
    began = time.process_time()
    with contextlib.suppress(TurnError):
        parse(body)
    assert time.process_time() - began < 5 * reading + 0.1


def test_a_body_has_so_many_members_and_containers_at_most():
    """The limits are named; what is at them is read."""
    most = b",".join(b'"%d":0' % number for number in range(MEMBERS_MAX))
    assert len(parse(b"{" + most + b"}")) == MEMBERS_MAX
    with pytest.raises(TurnError, match="more than 1000 members"):
        parse(b"{" + most + b',"a":0}')
    lists = b"[" + b"[]," * (CONTAINERS_MAX - 3) + b"[]]"
    assert parse(b'{"messages":%b}' % lists)
    with pytest.raises(TurnError, match="more than 1000000 arrays and objects"):
        parse(b'{"messages":[%b]}' % lists)

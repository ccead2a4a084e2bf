"""Bytes of every sort on a connection: what is served, what is refused, and what is left behind."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.calls import calls
from fuzz.corpus import corpus
from fuzz.front import Front
from fuzz.streams import Stream, streams, wrong_streams

quick = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def front():
    with Front() as running:
        yield running


_kept = corpus("streams")


@pytest.mark.parametrize("data", _kept.values(), ids=_kept.keys())
def test_a_kept_stream_is_answered_as_before(front, data):
    """Each once led astray, or shows a way to; whole, and cut in ten places and byte by byte."""
    stream = Stream(data, (), True)
    whole = front.check_stream(stream)
    for count in (10, len(data)):
        cut = front.check_stream(stream, [len(data) * at // count for at in range(count)])
        assert cut.may_be(whole), (cut, whole)


@given(stream=streams)
@settings(quick, max_examples=100)
def test_a_stream_is_served_or_refused_and_leaves_nothing_behind(front, stream):
    """Answers in good form, engines that see good turns only, no task or connection left."""
    front.check_stream(stream)


@given(stream=wrong_streams, splits=st.lists(st.integers(0, 2_000), max_size=4))
@settings(quick, max_examples=100)
def test_no_request_hides_in_another(front, stream, splits):
    """Whatever is wrong with a request's framing, and however its bytes come."""
    front.check_stream(stream, splits)


@given(stream=streams, splits=st.lists(st.integers(0, 3_000), min_size=1, max_size=30))
@settings(quick, max_examples=50)
def test_it_does_not_matter_how_bytes_are_cut(front, stream, splits):
    """The same answers and the same turns, however they come."""
    front.check_cuts((stream, splits))


@given(call=calls)
@settings(quick, max_examples=100)
def test_a_call_is_served_or_refused_and_leaves_nothing_behind(front, call):
    """As over HTTP: what is no turn is an INVALID_ARGUMENT, whatever else is in the message."""
    front.check_call(call)

"""cached_tokens, the one number that the router changes, and the events around it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_engine import event

from kvturn_router.turn.sse import EventSplitter
from kvturn_router.turn.usage import RESPONSE_USAGE, StreamUsage, passed_on


def usage(cached: int | None) -> dict[str, object]:
    details = {"cached_tokens": cached, "multimodal_tokens": None}
    return {
        "model": "m",
        "choices": [],
        "usage": {
            "prompt_tokens": 48,
            "total_tokens": 50,
            "completion_tokens": 2,
            "prompt_tokens_details": details,
        },
    }


PLAIN = [
    event(
        {
            "choices": [
                {"delta": {"content": 'he said "prompt_tokens_details": {"cached_tokens": 9}'}}
            ]
        }
    ),
    b": keep-alive\n\n",
    event({"choices": [{"delta": {"content": "prompt_tokens_details"}}]}),
    event({"usage": {"prompt_tokens": 48, "prompt_tokens_details": None}}),
]
DONE = b"data: [DONE]\n\n"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(min_value=1, max_value=90)), st.sampled_from([b"\n", b"\r\n"]))
def test_the_number_is_replaced_however_the_stream_is_cut(cuts, line_end):
    """Every byte but the number is as it was, and each read goes on as far as it can."""
    sent = (b"".join(PLAIN) + event(usage(48)) + DONE).replace(b"\n", line_end)
    wanted = (b"".join(PLAIN) + event(usage(32)) + DONE).replace(b"\n", line_end)
    stream = StreamUsage(32)
    out = b""
    position = 0
    for size in [*cuts, len(sent)]:
        out += stream.feed(sent[position : position + size])
        position += size
        assert wanted.startswith(out)
        # Only an event that may hold the number is ever held back.
        assert len(out) >= min(position, len(b"".join(PLAIN[:2])))
    assert out + stream.finish() == wanted
    assert stream.tokens == (48, 2, 32, "m")


def test_a_stream_of_decode_alone_is_read_and_not_changed():
    """No other engine computed for it: its own count stands, and its tokens are known."""
    sent = b"".join(PLAIN) + event(usage(48)) + DONE
    stream = StreamUsage(None)
    out = b"".join(stream.feed(sent[start : start + 50]) for start in range(0, len(sent), 50))
    assert out + stream.finish() == sent
    assert stream.tokens == (48, 2, 48, "m")


def test_streams_with_carriage_returns_are_understood():
    """Lines may end in CR LF."""
    sent = event(usage(48)).replace(b"\n", b"\r\n")
    assert StreamUsage(3).feed(sent) == event(usage(3)).replace(b"\n", b"\r\n")


def test_an_unfinished_event_that_holds_the_number_comes_out_at_the_end():
    """The stream broke off: nothing is lost, nothing is changed."""
    sent = event(usage(48))[:-20]
    stream = StreamUsage(3)
    assert stream.feed(sent) + stream.finish() == sent


def test_a_whole_answer_keeps_its_form():
    """Spacing and the order of members stay; only the number differs."""
    answer = json.dumps({"id": "x"} | usage(48), indent=2).encode()
    passed, said = passed_on(answer, 7)
    assert passed == answer.replace(b'"cached_tokens": 48', b'"cached_tokens": 7')
    assert said == (48, 2, 7, "m")
    assert passed_on(answer, None) == (answer, (48, 2, 48, "m"))


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_one_event_is_looked_at_among_many_of_one_read(line_end: bytes) -> None:
    """The others stay as they are, on both of its sides."""
    before, after = PLAIN[0] * 20, DONE
    sent, wanted = (
        (before + event(usage(cached)) + after).replace(b"\n", line_end) for cached in (48, 32)
    )
    stream = StreamUsage(32)
    assert stream.feed(sent) == wanted
    assert stream.tokens == (48, 2, 32, "m")
    unchanged = StreamUsage(48)
    assert unchanged.feed(sent) == sent
    assert unchanged.tokens == (48, 2, 48, "m")


def test_numbers_of_the_same_name_elsewhere_stay() -> None:
    """Before, after and within the usage there are others: only the prompt's is changed."""
    others = {"cached_tokens": 48}
    answer = {"others": others} | usage(48) | {"more": [others]}
    answer["usage"] = {"completion_tokens_details": others} | usage(48)["usage"]  # type: ignore[dict-item, operator]
    text = json.dumps(answer).encode()
    passed, said = passed_on(text, 7)
    details = b'"prompt_tokens_details": {"cached_tokens": %d'
    assert passed == text.replace(details % 48, details % 7) != text
    assert said == (48, 2, 7, "m")
    # The same where the only other one is a text.
    text = json.dumps(usage(48) | {"text": "cached_tokens", "choices": ["cached_tokens"]}).encode()
    assert passed_on(text, 7)[0] == text.replace(b'"cached_tokens": 48', b'"cached_tokens": 7')


@pytest.mark.parametrize("number", ["-1", "1000000000", "4.5", '"9"', "true"])
def test_a_number_that_no_tokens_can_have_is_none(number: str) -> None:
    """The answer goes on as it is; nothing is told of it."""
    counts = b'{"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": %b}'
    answer = b'{"usage": %b}' % (counts % b'{"cached_tokens": %b}' % number.encode())
    assert passed_on(answer, 0) == (answer, None)


def test_a_model_is_told_where_the_usage_is() -> None:
    """Of an answer at its top, of an event of the Responses API in its response."""
    counts = {"input_tokens": 48, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 48}}
    response = {"id": "resp_1", "model": "m-lora", "usage": counts}
    _, said = passed_on(json.dumps(response).encode(), 7, RESPONSE_USAGE)
    assert said == (48, 2, 7, "m-lora")
    stream = StreamUsage(7, RESPONSE_USAGE)
    stream.feed(event({"type": "response.completed", "response": response, "model": "another"}))
    assert stream.tokens == (48, 2, 7, "m-lora")


@pytest.mark.parametrize("model", ["7", "null", '["m"]', '"%s"' % ("x" * 600), '{"a":1}'])
def test_a_model_that_is_no_name_is_none(model: str) -> None:
    """The tokens are known all the same."""
    counts = '{"prompt_tokens": 4, "completion_tokens": 2}'
    answer = b'{"model": %b, "usage": %b}' % (model.encode(), counts.encode())
    assert passed_on(answer, 7) == (answer, (4, 2, None, ""))


def test_what_the_engine_did_not_send_is_not_added():
    """No usage, no details, a null number or a body that is no JSON: untouched."""
    for answer in (
        b'{"usage":null}',
        b'{"usage":{"prompt_tokens":1}}',
        b'{"usage":{"prompt_tokens_details":null}}',
        json.dumps(usage(None)).encode(),
        b'{"prompt_tokens_details":{"cached_tokens":5}}',
        b"not json",
        b"",
    ):
        assert passed_on(answer, 7)[0] == answer


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(min_value=1, max_value=60)))
def test_events_are_cut_where_they_end(cuts):
    """However the stream came, the same events come out."""
    events = [*PLAIN, DONE]
    stream = b"".join(events)
    splitter = EventSplitter()
    out: list[bytes] = []
    position = 0
    for size in [*cuts, len(stream)]:
        out += splitter.feed(stream[position : position + size])
        position += size
    assert out == events
    assert splitter.rest == b""

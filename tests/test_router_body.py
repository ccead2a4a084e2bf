"""Reading request bodies and cutting them into legs, without any I/O."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvturn_router.errors import TurnError
from kvturn_router.request import body as bodies
from kvturn_router.request.body import (
    DEPTH_MAX,
    decode_parts,
    needs_decode_alone,
    parse,
    prefill_parts,
    without_transfer_arguments,
)
from kvturn_router.request.intake import CHAT, COMPLETIONS


def prefill(**members: Any) -> dict[str, Any]:
    parts = prefill_parts(parse(json.dumps(members).encode()), b'{"do_remote_decode":true}')
    return dict(json.loads(b"".join(parts)))


def decode(text: bytes) -> bytes:
    return b"".join(decode_parts(parse(text), b"{}"))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b'""',
        b"null",
        b"7",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":01}',
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\\udc00\\ud800"}',
        b'{"a":1} {}',
        b'{"a":1,}',
        b"{'a':1}",
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":"\x00"}',
        '{"a":1}'.encode("utf-16"),
        b'{"a":' + b"[" * DEPTH_MAX + b"]" * DEPTH_MAX + b"}",
        b'{"a":' * 200 + b"1" + b"}" * 200,
        b"[" * 100_000,
    ],
)
def test_what_is_not_one_json_object_is_refused(text):
    """Broken, wrongly encoded, repeated or deep bodies are a 400."""
    with pytest.raises(TurnError) as refused:
        parse(text)
    assert refused.value.status == 400
    assert json.loads(refused.value.body())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "text",
    [
        b'{"model":"m","n":1,"model":"x"}',
        b'{ "model" : "m", "n": 1, "model": "x" }',
        b'{"\\u006dodel":"m","model":"x"}',
    ],
)
def test_a_name_given_twice_is_refused_by_name(text):
    """Engines and proxies disagree about which one counts, so neither does."""
    with pytest.raises(TurnError) as refused:
        parse(text)
    assert refused.value.param == "model"


def test_the_deepest_body_is_accepted_whatever_its_strings_hold():
    """Brackets and quotes inside strings do not count."""
    text = b'{"s":"' + b'[{\\"\\\\' * 500 + b'","a":' + b"[" * 127 + b"]" * 127 + b"}"
    assert set(parse(text)) == {"s", "a"}


@pytest.mark.parametrize("gap", [b",", b", ", b" ,"])
@pytest.mark.parametrize("nested", [DEPTH_MAX - 2, DEPTH_MAX - 1])
@pytest.mark.parametrize("text", [b"", b'"}, {},{},{[[[{{{"', b'"a\\", },{},{ b"'])
def test_many_messages_are_not_depth_and_hide_none(gap, nested, text):
    """Objects in a row, and brackets in strings, count for nothing wherever a deep one lies."""
    rows = gap.join([b'{"c":%b}' % (text or b"1")] * 300)
    deep = b"[" * nested + b"]" * nested
    for body in (rows + b"," + deep, deep + b"," + rows, rows + b"," + deep + b"," + rows):
        whole = b'{"messages":[%b]}' % body
        if nested + 2 <= DEPTH_MAX:
            assert set(parse(whole)) == {"messages"}
        else:
            with pytest.raises(TurnError):
                parse(whole)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


texts = st.text(alphabet='[]{}"\\:,a\né', max_size=6)
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=30,
)


@settings(max_examples=150, deadline=None)
@given(value=values, ascii_only=st.booleans())
def test_depth_is_counted_exactly(value, ascii_only):
    """With the limit at 3, a body is refused exactly if it nests deeper."""
    text = json.dumps({"k": value}, ensure_ascii=ascii_only).encode()
    most = bodies.DEPTH_MAX
    try:
        bodies.DEPTH_MAX = 3
        parse(text)
        accepted = True
    except TurnError:
        accepted = False
    finally:
        bodies.DEPTH_MAX = most
    assert accepted is (depth({"k": value}) <= 3)


@settings(max_examples=100, deadline=None)
@given(
    members=st.dictionaries(st.text(max_size=5), values, max_size=6),
    indent=st.sampled_from([None, 1]),
)
def test_decode_gets_what_the_client_sent(members, indent):
    """Whatever the spacing, every member arrives with its value, in order."""
    members = {name: value for name, value in members.items() if name not in bodies.WITHHELD}
    sent = json.loads(decode(json.dumps(members, indent=indent).encode()))
    assert list(sent.items()) == [*members.items(), ("kv_transfer_params", {})]


def test_values_travel_as_the_bytes_that_came():
    """Numbers beyond doubles, escapes and spacing inside values are untouched."""
    text = b'{"model":"m","seed":123456789012345678901234567890,"x":[1.50, 2e400],"t":"\\u00e9\\/"}'
    assert decode(text) == text[:-1] + b',"kv_transfer_params":{}}'


def test_decode_never_sees_what_is_the_routers():
    """The conversation id, a chosen request id and transfer parameters stay behind."""
    text = (
        b'{"conversation_id":"c","model":"m","kv_transfer_params":{"remote_host":"evil"},'
        b'"ec_transfer_params":{},"request_id":"mine","session_id":"s"}'
    )
    assert decode(text) == b'{"model":"m","session_id":"s","kv_transfer_params":{}}'


def test_transfer_parameters_hidden_in_vllm_xargs_are_taken_out():
    """The engine merges vllm_xargs into the place where it looks for transfer parameters."""
    members = parse(b'{"vllm_xargs":{"a":1,"kv_transfer_params":"x","\\u0065c_transfer_params":1}}')
    without_transfer_arguments(members)
    assert bytes(members["vllm_xargs"]) == b'{"a":1}'
    untouched = parse(b'{"vllm_xargs":{ "a" : 1 }}')
    without_transfer_arguments(untouched)
    assert bytes(untouched["vllm_xargs"]) == b'{ "a" : 1 }'


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, {"max_tokens": 1}),
        ({"max_tokens": 500}, {"max_tokens": 1}),
        ({"max_tokens": None}, {"max_tokens": 1}),
        ({"max_completion_tokens": 512}, {"max_tokens": 1, "max_completion_tokens": 1}),
        (
            {"max_tokens": 500, "max_completion_tokens": 512},
            {"max_tokens": 1, "max_completion_tokens": 1},
        ),
    ],
)
def test_prefill_is_asked_for_exactly_one_token(given, limits):
    """Whichever limit the client set, or none."""
    asked = prefill(model="m", **given)
    assert {name: asked[name] for name in asked if name.startswith("max_")} == limits


def test_prefill_gets_only_what_it_accepts():
    """What clashes with one unstreamed token goes; what shapes the prompt stays."""
    shaping = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": {"name": "s"}},
        "chat_template_kwargs": {"enable_thinking": False},
        "logprobs": True,
        "top_logprobs": 5,
        "cache_salt": "salt",
        "session_id": "s",
        "some_new_field": 1,
    }
    clashing = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "stream_interval": 4,
        "min_tokens": 100,
        "stop": ["x"],
        "n": 1,
        "best_of": 1,
        "return_token_ids": True,
        "request_id": "mine",
        "conversation_id": "c",
        "kv_transfer_params": {"remote_host": "evil"},
    }
    assert prefill(**shaping, **clashing) == shaping | {
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "min_tokens", "stop"])
def test_decode_sees_absent_and_null_as_they_were(name):
    """An absent member stays absent, a null one null."""
    assert name not in json.loads(decode(b'{"model":"m"}'))
    assert json.loads(decode(b'{"model":"m","%b":null}' % name.encode()))[name] is None


@pytest.mark.parametrize(
    ("members", "path", "alone"),
    [
        ({}, CHAT, False),
        ({"n": 1, "best_of": None, "echo": False, "prompt_logprobs": None}, CHAT, False),
        ({"n": 2}, CHAT, True),
        ({"best_of": 3}, CHAT, True),
        ({"echo": True}, CHAT, True),
        ({"prompt_logprobs": 0}, CHAT, True),
        ({"use_beam_search": True}, CHAT, True),
        ({"max_tokens": 0}, CHAT, True),
        ({"prompt": "x"}, COMPLETIONS, False),
        ({"prompt": ["x"]}, COMPLETIONS, False),
        ({"prompt": [[1, 2]]}, COMPLETIONS, False),
        ({"prompt": [1, 2, 3]}, COMPLETIONS, False),
        ({"prompt": ["x", "y"]}, COMPLETIONS, True),
        ({"prompt": [[1], [2]]}, COMPLETIONS, True),
        ({"prompt": []}, COMPLETIONS, True),
        ({"prompt": "x", "prompt_embeds": "AAAA"}, COMPLETIONS, True),
    ],
)
def test_answers_that_cannot_be_split_are_recognised(members, path, alone):
    """Several answers or prompts, and everything that reports on the prompt itself."""
    assert needs_decode_alone(parse(json.dumps(members).encode()), path) is alone


@pytest.mark.parametrize(
    ("member", "value"),
    [("n", "2"), ("max_tokens", True), ("echo", 1), ("prompt_logprobs", "all"), ("best_of", [])],
)
def test_a_member_of_the_wrong_kind_is_refused_by_name(member, value):
    """What the router itself reads must be of the right kind; the 400 names it."""
    with pytest.raises(TurnError) as refused:
        needs_decode_alone(parse(json.dumps({member: value}).encode()), CHAT)
    assert refused.value.param == member
    assert member in refused.value.message

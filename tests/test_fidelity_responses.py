"""The Responses API: what each leg is sent, and how a response is found again."""

import json

import pytest

from kvturn_router.body import parse
from kvturn_router.errors import TurnError
from kvturn_router.responses import (
    response_id,
    response_name,
    responses_decode_parts,
    responses_need_decode_alone,
    responses_prefill_parts,
)

UNIQUE = "0123456789abcdef01234567"
FUNCTION = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("members", "alone"),
    [
        ({"input": "x"}, False),
        ({"tools": [FUNCTION, {"type": "custom", "name": "c"}]}, False),
        ({"tools": [], "background": False, "truncation": "disabled"}, False),
        ({"tools": None, "previous_response_id": None, "max_output_tokens": None}, False),
        ({"previous_response_id": "resp_1"}, True),
        ({"background": True}, True),
        ({"truncation": "auto"}, True),
        ({"max_output_tokens": 0}, True),
        ({"tools": [FUNCTION, {"type": "code_interpreter"}]}, True),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, True),
        ({"tools": ["x"]}, True),
        ({"tools": [{"type": 1}]}, True),
    ],
)
def test_what_cannot_be_split_is_recognised(members, alone):
    """A history that only decode has, background work, the engine's own tools, a cut prompt."""
    assert responses_need_decode_alone(parse(json.dumps(members).encode())) is alone


@pytest.mark.parametrize(
    ("member", "value"),
    [("previous_response_id", 1), ("background", "yes"), ("tools", {}), ("max_output_tokens", "1")],
)
def test_a_member_of_the_wrong_kind_is_refused_by_name(member, value):
    """What the router itself reads must be of the right kind."""
    with pytest.raises(TurnError) as refused:
        responses_need_decode_alone(parse(json.dumps({member: value}).encode()))
    assert refused.value.param == member


def test_the_legs_of_a_response():
    """Prefill makes one token and keeps nothing; decode gets all the client sent, and the id."""
    text = (
        b'{"model":"m","input":[{"role": "user"}],"stream":true,"store":true,"background":false,'
        b'"max_output_tokens":500,"stop":["x"],"instructions":"\\u00e9","request_id":"mine",'
        b'"kv_transfer_params":{"remote_host":"evil"},"conversation_id":"c"}'
    )
    members = parse(text)
    assert b"".join(responses_prefill_parts(members, b"{}")) == (
        b'{"model":"m","input":[{"role": "user"}],"instructions":"\\u00e9",'
        b'"stream":false,"store":false,"max_output_tokens":1,"kv_transfer_params":{}}'
    )
    assert b"".join(responses_decode_parts(members, b"{}", "resp_1")) == (
        b'{"model":"m","input":[{"role": "user"}],"stream":true,"store":true,"background":false,'
        b'"max_output_tokens":500,"stop":["x"],"instructions":"\\u00e9",'
        b'"request_id":"resp_1","kv_transfer_params":{}}'
    )


@pytest.mark.parametrize("conversation_id", ["c", "conv-1/\u00e9 \U0001f600", "x" * 256])
def test_a_response_id_leads_back_to_its_engine_and_conversation(conversation_id):
    """For the tenant that got it; for another it is as if it had never been."""
    made = response_id("t", conversation_id, "http://d1:8100", UNIQUE)
    assert made.isascii()
    assert " " not in made
    name = response_name(made, "t")
    assert name is not None
    assert name.conversation_id == conversation_id
    assert name.is_held_by("http://d1:8100")
    assert not name.is_held_by("http://d2:8100")
    assert response_name(made, "other") is None
    assert response_name(made, "") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "resp_1",
        "resp_" + "0" * 48 + "Yw",
        response_id("t", "c", "http://d", UNIQUE) + "A",
        response_id("t", "c", "http://d", UNIQUE)[:-1],
        "resp_" + "0" * 48 + "\u00e9" * 4,
    ],
)
def test_an_id_that_the_router_did_not_make_is_not_known(text):
    """Made up, cut, or longer than it was."""
    assert response_name(text, "t") is None

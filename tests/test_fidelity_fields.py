"""Every field that engines know: what prefill gets of it, and that decode gets it as it came."""

import json

import pytest
from request_fields import (
    ALONE,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DECODE,
    KEPT,
    SET,
    WITHHELD,
    Field,
)
from router_harness import router
from stub_engine import CHAT, COMPLETIONS

from kvturn_router.request.body import decode_parts, needs_decode_alone, parse, prefill_parts

FIELDS = [
    pytest.param(path, name, field, id=f"{path.split('/')[2]}-{name}")
    for path, fields in ((CHAT, CHAT_FIELDS), (COMPLETIONS, COMPLETION_FIELDS))
    for name, field in fields.items()
]
PROMPT = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, COMPLETIONS: {"prompt": "x"}}


def body(path: str, name: str, field: Field) -> bytes:
    """Returns a body with the field, written in a way that no serializer writes."""
    members = {"model": "m"} | PROMPT[path] | field.needs | {name: field.example}
    return json.dumps(members, indent=3, ensure_ascii=True).replace("0.9", "0.90").encode()


def sent(parts: list[bytes]) -> dict[str, bytes]:
    """Returns the members of a leg's body, each as the bytes that it is sent as."""
    return {name: bytes(value) for name, value in parse(b"".join(parts)).items()}


@pytest.mark.parametrize(("path", "name", "field"), FIELDS)
def test_each_field_goes_where_it_belongs(path: str, name: str, field: Field):
    """Kept by both legs, left to decode, set for prefill, withheld, or answered by decode alone."""
    text = body(path, name, field)
    members = parse(text)
    value = bytes(members[name])
    assert value in text
    assert needs_decode_alone(members, path) is (field.way == ALONE)
    on_decode = sent(decode_parts(members, None)).get(name)
    assert on_decode == (None if field.way == WITHHELD else value)
    if field.way == ALONE:
        return
    on_prefill = sent(prefill_parts(members, b"{}")).get(name)
    if field.way == KEPT:
        assert on_prefill == value
    elif field.way in (SET, WITHHELD):
        assert on_prefill != value
    else:
        assert field.way == DECODE
        assert on_prefill is None


async def test_a_prompt_cut_to_what_fits_is_never_split():
    """What fits depends on the answer's length: prefill, asked for one token, would cut elsewhere.

    Decode would then take KV of other tokens for its own prompt's.
    """
    async with router() as rig:
        request = {"model": "m", **PROMPT[CHAT], "max_tokens": 500, "truncate_prompt_tokens": -1}
        answer = await rig.post(request)
        assert answer.verdict == "not_offered"
        assert rig.prefill.turns == []
        assert rig.decode.turns[0].json == request
        request["truncate_prompt_tokens"] = 32
        await rig.post(request)
        assert rig.prefill.turns[0].json["truncate_prompt_tokens"] == 32

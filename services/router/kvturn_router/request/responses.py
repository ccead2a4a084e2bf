"""The Responses API (/v1/responses): how a turn of it is split, and who holds a response.

A request that carries its whole history is a turn like any other. One that
names a `previous_response_id` carries only what is new: the history lies in the
memory of the engine that made that response, the decode engine, and nowhere
else. Prefill could not render its prompt, so it is answered by that engine
alone, whose own prefix cache holds the history. Engines keep responses only
where they are told to (VLLM_ENABLE_RESPONSES_API_STORE).

Which engine that is, and of which conversation, is written in the response's
id: the router chooses it (`request_id`, which is why no client may). So any
router of the same engines finds the way, and none has to remember it. The id
says it under a digest of the tenant, so that another tenant's is not known here.
Nothing here does I/O.
"""

import hashlib
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, NamedTuple

import msgspec

from kvturn_router.errors import TurnError, shown
from kvturn_router.request.body import (
    WITHHELD,
    Members,
    given,
    given_flag,
    given_number,
    given_string,
    joined,
    kind,
)

RESPONSES: Final = "/v1/responses"

_NOT_FOR_PREFILL: Final = WITHHELD | {
    "background",
    "enable_response_messages",
    "max_output_tokens",
    "metadata",
    "store",
    "stream",
    "stop",
}
"""Members left out of the prefill copy; they clash with one token, not streamed, not kept."""

_ONE_TOKEN: Final = [
    ("stream", b"false"),
    ("store", b"false"),
    ("max_output_tokens", b"1"),
]

_SPLIT_TOOLS: Final = ("function", "custom", "namespace")
"""Tools that the client runs. The others run inside the engine, which then asks its model again."""

_id = re.compile(r"resp_([0-9a-f]{8})([0-9a-f]{24})([0-9a-f]{16})([A-Za-z0-9_-]{2,344})")
_tools_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_tool_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ResponseName(NamedTuple):
    """What a response's id says: the digest of its engine's address, and its conversation."""

    response_id: str
    engine_digest: str
    conversation_id: str

    def is_held_by(self, place: str) -> bool:
        """Tells whether the engine at that place, `host:port`, made the response."""
        return self.engine_digest == _digest(place)


def responses_need_decode_alone(members: Members) -> bool:
    """Tells whether the answer cannot be split into one prompt and what is generated from it.

    True for a generation in the background, tools that the engine runs itself,
    and a prompt cut to what fits. Raises TurnError 400 for a member of a wrong
    kind.
    """
    limit = given_number(members, "max_output_tokens")
    background = given_flag(members, "background")
    truncation = given_string(members, "truncation")
    return (
        background
        or truncation not in (None, "disabled")
        or (limit is not None and limit < 1)
        or not _splits(given(members, "tools", "array"))
    )


def _splits(tools: bytes | None) -> bool:
    return tools is None or all(
        _kind_of(tool) in _SPLIT_TOOLS for tool in _tools_decoder.decode(tools)
    )


def _kind_of(tool: bytes) -> str | None:
    members = _tool_decoder.decode(tool) if kind(tool) == "object" else {}
    value = members.get("type")
    return msgspec.json.decode(value, type=str) if value and kind(value) == "string" else None


def responses_prefill_parts(members: Members, transfer: bytes) -> list[bytes]:
    """Returns the prefill leg's body: one token, neither streamed nor kept."""
    return joined(members, _NOT_FOR_PREFILL, [*_ONE_TOKEN, ("kv_transfer_params", transfer)])


def responses_decode_parts(
    members: Members, transfer: bytes | None, response_id: str
) -> list[bytes]:
    """Returns the decode leg's body: all the client asked, under the id that the router chose."""
    added = [("request_id", msgspec.json.encode(response_id))]
    if transfer is not None:
        added.append(("kv_transfer_params", transfer))
    return joined(members, WITHHELD, added)


def response_id(tenant: str, conversation_id: str, place: str, unique: str) -> str:
    """Returns the id of a response that the decode engine at `place` is about to make.

    `place` is its `host:port`, `unique` 24 hexadecimal digits that nobody can
    guess.
    """
    assert len(unique) == 24
    conversation = urlsafe_b64encode(conversation_id.encode()).rstrip(b"=").decode()
    engine = _digest(place)
    return f"resp_{engine}{unique}{_seal(tenant, engine, unique, conversation)}{conversation}"


def response_name(text: str, tenant: str) -> ResponseName | None:
    """Returns what the id of a response of that tenant's says, None if it is no such id."""
    found = _id.fullmatch(text)
    if found is None:
        return None
    engine, unique, seal, conversation = found.groups()
    if seal != _seal(tenant, engine, unique, conversation):
        return None
    try:
        padded = conversation + "=" * (-len(conversation) % 4)
        return ResponseName(text, engine, urlsafe_b64decode(padded).decode())
    except ValueError:
        return None


def no_response(param: str, text: str) -> TurnError:
    """Returns what a client is told of a response that nobody here holds for it."""
    return TurnError(
        404,
        f"Response with id '{shown(text)}' not found.",
        reason="RESPONSE_NOT_FOUND",
        param=param,
    )


def _digest(place: str) -> str:
    return hashlib.sha256(place.encode()).hexdigest()[:8]


def _seal(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

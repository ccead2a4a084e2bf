"""The request body: read once, top level only, and cut into the two legs.

The values of the top-level members stay the bytes that came (`msgspec.Raw`
views into the body), so messages, integers, unknown fields and their order
reach the engines untouched; a leg is made by joining members, leaving some out
and adding a few. Nothing here does I/O.
"""

import codecs
import itertools
import json
from collections.abc import Collection, Mapping, Sequence

import msgspec

from kvturn_router.errors import TurnError, bad_field, shown
from kvturn_router.request.spans import member_spans

Members = Mapping[str, bytes]
"""Top-level members in the order they came: name to the value's JSON bytes."""

DEPTH_MAX = 128
"""Deepest nesting of a body, in arrays and objects."""

CONTAINERS_MAX = 1_000_000
"""Most arrays and objects in a body that is not plainly flat."""

MEMBERS_MAX = 1_000
"""Most members of a body."""

_PASSES = 8

_PIECE_BYTES = 64 << 10
"""Of UTF-8 that is looked at at a time."""

WITHHELD = frozenset({"conversation_id", "kv_transfer_params", "ec_transfer_params", "request_id"})
"""Members that no engine ever sees.

`request_id` would let a client choose the id under which an engine files the
request; transfer parameters of a client's own would let it name addresses and
blocks.
"""

_NOT_FOR_PREFILL = WITHHELD | {
    "stream",
    "stream_options",
    "stream_interval",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "stop",
    "n",
    "best_of",
    "return_token_ids",
    "return_prompt_text",
}
"""Members left out of the prefill copy.

They clash with "one token, not streamed" or ask for more than the KV. `stop`
would end the one-token request as an abort, which hands over no KV. What
shapes the prompt (tools, tool_choice, response_format, ...) stays.
"""

_MAY_BE_ALONE = frozenset(
    {
        "n",
        "best_of",
        "max_completion_tokens",
        "echo",
        "use_beam_search",
        "truncate_prompt_tokens",
        "prompt_logprobs",
        "routed_experts_prompt_start",
        "prompt_embeds",
    }
)

_BRACKETS_WALKED_MAX = 2_000

_REPORTS = ("prompt_logprobs", "routed_experts_prompt_start")
"""Numbers that ask for a report on the prompt's own tokens."""

_INNER_TRANSFER_NAMES = ("kv_transfer_params", "ec_transfer_params")

_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_string_decoder = msgspec.json.Decoder(str)
_number_decoder = msgspec.json.Decoder(float)
_brackets_as_steps = bytes.maketrans(b"[]", b"\x01\xff")
_brackets_alike = bytes.maketrans(b"{}", b"[]")
_not_structure = bytes(byte for byte in range(256) if byte not in b'[]{}"')


class _WrittenNames(dict[str, bytes]):
    """Names as they are written after a member; names that are not known are not kept."""

    def __missing__(self, name: str) -> bytes:
        return b",%b:" % msgspec.json.encode(name)


_written_names = _WrittenNames(
    (name, b',"%b":' % name.encode())
    for name in (
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "tools",
        "tool_choice",
        "response_format",
        "kv_transfer_params",
        "do_remote_decode",
        "do_remote_prefill",
    )
)


def parse(body: bytes) -> dict[str, bytes]:
    """Returns the members of a JSON object.

    Raises TurnError 400 for anything that is not one JSON object in UTF-8,
    names a member twice, nests deeper than DEPTH_MAX, or has more members or
    more arrays and objects than the limits above.
    """
    try:
        if not body.isascii():
            _read_utf8(body)
        members: dict[str, bytes] = _object_decoder.decode(body)  # type: ignore[assignment]
    except UnicodeDecodeError:
        raise _unreadable("it is not UTF-8") from None
    except msgspec.ValidationError:
        raise _unreadable("it is not an object") from None
    except msgspec.DecodeError as error:
        raise _unreadable(str(error)) from None
    except RecursionError:
        raise _too_deep() from None
    if len(members) > MEMBERS_MAX:
        raise _unreadable(f"it has more than {MEMBERS_MAX} members")
    _refuse_depth(body)
    _refuse_repeated_names(body, members)
    return members


def _read_utf8(body: bytes) -> None:
    # In pieces: as a string, the whole could take four times the memory.
    view, done = memoryview(body), 0
    while done < len(body):
        piece = view[done : done + _PIECE_BYTES]
        done += codecs.utf_8_decode(piece, "strict", done + len(piece) == len(body))[1]


def _unreadable(why: str) -> TurnError:
    return TurnError(
        400, f"The body cannot be read as a JSON object: {why}.", reason="BODY_INVALID"
    )


def _too_deep() -> TurnError:
    return _unreadable(f"it nests deeper than {DEPTH_MAX} levels")


def _refuse_depth(body: bytes) -> None:
    # This runs on every body. A prompt has few brackets for its length, and most of those are of
    # the messages in a row, so two bounds that cost next to nothing nearly always settle it.
    # Counted by replace(), which leaps from one hit to the next; count() looks at each byte.
    brackets = 2 * len(body) - len(body.replace(b"{", b"")) - len(body.replace(b"[", b""))
    if brackets > DEPTH_MAX and brackets - _siblings(body, brackets) > DEPTH_MAX:
        _refuse_structure(body)


def _siblings(body: bytes, brackets: int) -> int:
    """Counts objects that follow another one directly, and so nest no deeper than that.

    Both brackets of such a pair are in the same string or in none, so at every point of the body
    each pair stands for a bracket that is closed before it or opened after it. Counts none where
    brackets are too many for it to be worth the time.
    """
    if brackets > _BRACKETS_WALKED_MAX:
        return 0
    found = 0
    position = body.find(b"{")
    while position >= 0:
        if body[position - 2 : position] == b"}," or body[position - 3 : position] == b"}, ":
            found += 1
        position = body.find(b"{", position + 1)
    return found


def _refuse_structure(body: bytes) -> None:
    # Exactly. Escapes go first, so that each quote left opens or closes a string; then strings go.
    # What remains loses one level a pass, which soon leaves nothing of most bodies; the rest is
    # walked, so that the time does not grow with the depth.
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = b"".join(body.translate(_brackets_alike, _not_structure).split(b'"')[::2])
    if len(structure) > 2 * CONTAINERS_MAX:
        raise _unreadable(f"it has more than {CONTAINERS_MAX} arrays and objects")
    passes = min(_PASSES, DEPTH_MAX)
    for _ in range(passes):
        structure = structure.replace(b"[]", b"")
        if not structure:
            return
    steps = memoryview(structure.translate(_brackets_as_steps)).cast("b")
    if max(itertools.accumulate(steps)) > DEPTH_MAX - passes:
        raise _too_deep()


def _refuse_repeated_names(body: bytes, members: Members) -> None:
    # A body with neither a repeated name nor space around its names has just
    # this many bytes besides its values. Only others are looked at again.
    besides = len(body) - sum(map(len, members.values()))
    if besides == 1 + sum(map(len, members)) + 4 * len(members):
        return
    if member_spans(body, (0, len(body)), members) is not None:
        return
    seen: set[str] = set()
    # Numbers stay text: Python refuses to make integers of thousands of digits.
    for name, _ in json.loads(body, object_pairs_hook=list, parse_int=str):
        if name in seen:
            raise bad_field(name, f"{shown(name)} is given more than once.")
        seen.add(name)


def kind(value: bytes) -> str:
    """Returns the JSON kind of a value: string, number, object, array, boolean or null."""
    first = memoryview(value)[0]
    return _kinds.get(first, "number")


_TRUE = ord("t")

_kinds = {
    ord('"'): "string",
    ord("{"): "object",
    ord("["): "array",
    ord("t"): "boolean",
    ord("f"): "boolean",
    ord("n"): "null",
}


def given(members: Members, name: str, *kinds: str) -> bytes | None:
    """Returns a member's value, or None if it is absent or null.

    Raises TurnError 400 naming the member if it is of none of the kinds.
    """
    value = members.get(name)
    if value is None:
        return None
    found = _kinds.get(memoryview(value)[0], "number")
    if found == "null":
        return None
    if found not in kinds:
        raise bad_field(name, f"{name} must be {_either(kinds)}, not {_article(found)}.")
    return value


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "ao" else f"a {word}"


def _either(kinds: Sequence[str]) -> str:
    return " or ".join(_article(word) for word in kinds)


def given_string(members: Members, name: str) -> str | None:
    """Returns a string member, or None if it is absent or null. Raises as `given`."""
    if name not in members:  # As most are; a call less.
        return None
    value = given(members, name, "string")
    return None if value is None else _string_decoder.decode(value)


def given_flag(members: Members, name: str) -> bool:
    """Returns a boolean member, false if it is absent or null. Raises as `given`."""
    if name not in members:
        return False
    value = given(members, name, "boolean")
    return value is not None and memoryview(value)[0] == _TRUE


def given_number(members: Members, name: str) -> float | None:
    """Returns a number member, or None if it is absent or null. Raises as `given`."""
    if name not in members:
        return None
    value = given(members, name, "number")
    try:
        return None if value is None else _number_decoder.decode(value)
    except msgspec.DecodeError:  # A number, but one that no float can hold.
        raise bad_field(name, f"`{name}` is out of range.") from None


def needs_decode_alone(members: Members, path: str) -> bool:
    """Tells whether the answer cannot be given through prefill and decode.

    True for several answers or prompts in one request, beam search, everything
    that reports on the prompt's own tokens, which decode would have to compute,
    and a prompt cut to what the longest answer leaves room for, which is another
    prompt where the answer is one token. Raises TurnError 400 for a member of a
    wrong kind.
    """
    tokens_max = given_number(members, "max_tokens")
    more = not _MAY_BE_ALONE.isdisjoint(members) and _asks_for_more(members)
    one_prompt = path != "/v1/completions" or _is_one_prompt(members)
    return more or not one_prompt or (tokens_max is not None and tokens_max < 1)


def _asks_for_more(members: Members) -> bool:
    # All before any is judged: each member's kind is checked, whatever the others say.
    several = [given_number(members, name) for name in ("n", "best_of")]
    tokens_max = given_number(members, "max_completion_tokens")
    flags = [given_flag(members, name) for name in ("echo", "use_beam_search")]
    kept_tokens = given_number(members, "truncate_prompt_tokens")
    reports = [given(members, name, "number") for name in _REPORTS]
    embeds = given(members, "prompt_embeds", "string", "array")
    return (
        any(number is not None and number != 1 for number in several)
        or (tokens_max is not None and tokens_max < 1)
        or any(flags)
        or (kept_tokens is not None and kept_tokens < 0)
        or any(report is not None for report in reports)
        or embeds is not None
    )


def _is_one_prompt(members: Members) -> bool:
    value = given(members, "prompt", "string", "array")
    if value is None or kind(value) == "string":
        return value is not None
    if _starts_with_number(value):
        return True
    return len(_array_decoder.decode(value)) == 1


def _starts_with_number(array: bytes) -> bool:
    head = bytes(memoryview(array)[1:64]).lstrip()
    return head[:1].isdigit()


def without_transfer_arguments(members: dict[str, bytes]) -> None:
    """Takes transfer parameters out of `vllm_xargs`, where the engine reads them too.

    Raises TurnError 400 if `vllm_xargs` is no object.
    """
    value = given(members, "vllm_xargs", "object")
    if value is None:
        return
    inner = _object_decoder.decode(value)
    if any(name in inner for name in _INNER_TRANSFER_NAMES):
        kept = {name: raw for name, raw in inner.items() if name not in _INNER_TRANSFER_NAMES}
        members["vllm_xargs"] = b"".join(joined(kept))


def joined(
    members: Members,
    leave_out: Collection[str] = (),
    added: Sequence[tuple[str, bytes]] = (),
) -> list[bytes]:
    """Returns the parts of a JSON object: members but some, then the added ones."""
    parts: list[bytes] = []
    for name, value in members.items():
        if name not in leave_out:
            parts += (_written_names[name], value)
    for name, value in added:
        parts += (_written_names[name], value)
    if not parts:
        return [b"{}"]
    parts[0] = b"{" + parts[0][1:]  # not the comma
    parts.append(b"}")
    return parts


def prefill_parts(members: Members, transfer: bytes) -> list[bytes]:
    """Returns the prefill leg's body: one token, not streamed, with these transfer parameters."""
    added = [("stream", b"false"), ("max_tokens", b"1")]
    if "max_completion_tokens" in members:
        added.append(("max_completion_tokens", b"1"))
    added.append(("kv_transfer_params", transfer))
    return joined(members, _NOT_FOR_PREFILL, added)


def decode_parts(
    members: Members, transfer: bytes | None, *, ask_token_ids: bool = False
) -> list[bytes]:
    """Returns the decode leg's body: all the client asked, with these transfer parameters.

    `ask_token_ids` adds `return_token_ids`, over whatever the client gave.
    """
    leave_out: Collection[str] = WITHHELD
    added: list[tuple[str, bytes]] = []
    if ask_token_ids:
        leave_out = WITHHELD | {"return_token_ids"}
        added.append(("return_token_ids", b"true"))
    if transfer is not None:
        added.append(("kv_transfer_params", transfer))
    return joined(members, leave_out, added)

"""What must be said of a body, judged by Python's own json and a table of kinds."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvturn_router.request.body import DEPTH_MAX
from kvturn_router.request.conversation import NAME_BYTES_MAX
from kvturn_router.request.intake import CHAT, COMPLETIONS
from kvturn_router.request.responses import RESPONSES

if TYPE_CHECKING:
    from collections.abc import Mapping

_EVERYWHERE: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("string",),
    "stream": ("boolean",),
    "stream_options": ("object",),
    "vllm_xargs": ("object",),
    "return_token_ids": ("boolean",),
    "conversation_id": ("string",),
    "session_id": ("string",),
    "prompt_cache_key": ("string",),
}
_COMPLETING: Final[Mapping[str, tuple[str, ...]]] = {
    "n": ("number",),
    "best_of": ("number",),
    "max_tokens": ("number",),
    "max_completion_tokens": ("number",),
    "truncate_prompt_tokens": ("number",),
    "echo": ("boolean",),
    "use_beam_search": ("boolean",),
    "prompt_logprobs": ("number",),
    "routed_experts_prompt_start": ("number",),
    "prompt_embeds": ("string", "array"),
}
_RESPONDING: Final[Mapping[str, tuple[str, ...]]] = {
    "max_output_tokens": ("number",),
    "background": ("boolean",),
    "truncation": ("string",),
    "tools": ("array",),
    "previous_response_id": ("string",),
}

KINDS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    CHAT: {**_EVERYWHERE, **_COMPLETING},
    COMPLETIONS: {**_EVERYWHERE, **_COMPLETING},
    RESPONSES: {**_EVERYWHERE, **_RESPONDING},
}
"""Members that the router looks at on each route, and the kinds they may be of; null is none."""

NEEDED: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    CHAT: ("messages", ("array",)),
    COMPLETIONS: ("prompt", ("string", "array")),
    RESPONSES: ("input", ("string", "array")),
}
"""What each route needs, and of what kinds."""

_AS_FLOAT: Final = {
    **dict.fromkeys((CHAT, COMPLETIONS), tuple(_COMPLETING)[:5]),
    RESPONSES: ("max_output_tokens",),
}
_NAMES: Final = ("model", "conversation_id")


class Number(str):
    """A number as it was written."""

    __slots__ = ()


class Pairs(list[tuple[str, Any]]):
    """An object's members in their order."""

    __slots__ = ()


class Judgement(NamedTuple):
    """What must be said of a body.

    `pairs` are its members; None if it is refused. `faults` are the fields that
    a refusal may name, None for the body itself.
    """

    pairs: Pairs | None
    faults: frozenset[str | None]


def judge(body: bytes, path: str) -> Judgement:
    """Returns what must be said of a body that comes to a route without naming headers."""
    pairs = read(body)
    if pairs is None:
        return Judgement(None, frozenset({None}))
    names = [name for name, _ in pairs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        return Judgement(None, frozenset(twice))
    faults = _faults(dict(pairs), path)
    return Judgement(None if faults else pairs, frozenset(faults))


def read(text: bytes) -> Pairs | None:
    """Returns the members of a JSON object in UTF-8, None for anything else."""
    try:
        value = json.loads(
            text.decode(),
            object_pairs_hook=Pairs,
            parse_int=Number,
            parse_float=Number,
            parse_constant=_refuse,
        )
    except (ValueError, RecursionError):
        return None
    fit = isinstance(value, Pairs) and _depth(value) <= DEPTH_MAX and not _halved(value)
    return value if fit else None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _depth(value: Any) -> int:
    if isinstance(value, Pairs):
        return 1 + max((_depth(inner) for _, inner in value), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _halved(value: Any) -> bool:
    """Tells whether some string has half of a surrogate pair, which is no text."""
    if isinstance(value, Pairs):
        return any(_halved(name) or _halved(inner) for name, inner in value)
    if isinstance(value, list):
        return any(map(_halved, value))
    return isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value)


def _faults(members: dict[str, Any], path: str) -> set[str | None]:
    given = {name: value for name, value in members.items() if value is not None}
    faults: set[str | None] = {
        name
        for name, kinds in KINDS[path].items()
        if name in given and _kind(given[name]) not in kinds
    }
    faults |= {
        name
        for name in _AS_FLOAT[path]
        if isinstance(given.get(name), Number) and not math.isfinite(float(given[name]))
    }
    for name in _NAMES:
        value = given.get(name, "" if name == "model" else "c")
        if type(value) is str and not 1 <= len(value.encode()) <= NAME_BYTES_MAX:
            faults.add(name)
    if path == RESPONSES and "previous_response_id" in given:
        faults.add("previous_response_id")  # No response of that name was made here.
    needed, kinds = NEEDED[path]
    if needed in given:
        faults |= set() if _kind(given[needed]) in kinds else {needed}
    elif not (path == COMPLETIONS and "prompt_embeds" in given):
        faults.add(needed)
    return faults


def _kind(value: Any) -> str:
    kinds = {
        Number: "number",
        str: "string",
        Pairs: "object",
        list: "array",
        bool: "boolean",
        type(None): "null",
    }
    return kinds[type(value)]

"""Where the values of a JSON text lie, so that one can be replaced in place.

An engine's answer is not re-serialised: a value is cut out and another put in,
and every other byte stays. msgspec finds the values, a regular expression the
names between them. Nothing here does I/O.
"""

import json
import re
from collections.abc import Mapping, Sequence

import msgspec

Span = tuple[int, int]
"""Start and end of a value in the text it was found in."""

UNREADABLE = (msgspec.DecodeError, RecursionError)
"""What msgspec raises for a text that is no JSON, or is nested too deeply to be read."""

_space = rb"[ \t\r\n]*"
_name = re.compile(_space + rb"[{,]" + _space + rb'"((?:[^"\\]|\\.)*)"' + _space + rb":" + _space)
_object_end = re.compile(_space + rb"}" + _space)
_item = re.compile(_space + rb"[\[,]" + _space)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def member_spans(text: bytes, span: Span, members: Mapping[str, bytes]) -> dict[str, Span] | None:
    """Returns where each member's value lies.

    `members` are the members that msgspec read from the object at `span`, in
    its order. Returns None when a name occurs twice in it: then the values
    cannot be told apart.
    """
    spans: dict[str, Span] = {}
    position, end = span
    for name, value in members.items():
        found = _name.match(text, position)
        if found is None or not _is_name(found[1], name):
            return None
        position = found.end() + len(value)
        spans[name] = (found.end(), position)
    # Of two values of a name only the last was read; its length may lead into the first.
    if members and _object_end.fullmatch(text, position, end) is None:
        return None
    return spans


def _is_name(written: bytes, name: str) -> bool:
    if b"\\" in written:
        return bool(json.loads(b'"%s"' % written) == name)
    return written == name.encode()


def find_member(text: bytes, span: Span, name: str) -> Span | None:
    """Returns where the member `name` of the object at `span` has its value.

    Returns None if there is no such member, or no object.
    """
    try:
        members = _object_decoder.decode(memoryview(text)[span[0] : span[1]])
    except UNREADABLE:
        return None
    if name not in members:
        return None
    return (member_spans(text, span, members) or {}).get(name)


def find_items(text: bytes, span: Span) -> Sequence[Span]:
    """Returns where the items of the array at `span` lie; none if it is no array."""
    try:
        items = _array_decoder.decode(memoryview(text)[span[0] : span[1]])
    except UNREADABLE:
        return ()
    spans: list[Span] = []
    position = span[0]
    for item in items:
        found = _item.match(text, position)
        if found is None:
            return ()
        position = found.end() + len(item)
        spans.append((found.end(), position))
    return spans


def replace(text: bytes, changes: Sequence[tuple[Span, bytes]]) -> bytes:
    """Returns the text with each span replaced; spans must not overlap."""
    parts: list[bytes] = []
    position = 0
    for (start, end), value in sorted(changes):
        parts += (text[position:start], value)
        position = end
    parts.append(text[position:])
    return b"".join(parts)

"""Spans in OTLP's wire form. No I/O.

The SDK takes 26 us to make a span and 32 us more to encode it, which for the
spans of a turn is more than all else that the router does for it. What a span of
a turn says is little and of few kinds, so it is written here as soon as it ends,
in 2 to 10 us. What stands before an attribute's value is written once, and so is
what many spans have in common. Field numbers are those of opentelemetry/proto/trace/v1/trace.proto.
"""

import functools
from collections.abc import Mapping
from struct import Struct
from typing import Final

from kvturn.proto_wire import field, varint

Attribute = str | bool | int | float
Attributes = Mapping[str, Attribute]

INTERNAL: Final = 1
SERVER: Final = 2
CLIENT: Final = 3

TRACE_ID_BYTES: Final = 16
SPAN_NAME_BYTES: Final = 24
"""Of what names a span: its trace's id, and its own."""

_KEPT_TEXT_MAX: Final = 256
"""Texts below this size have what stands before them kept, for each attribute and size."""

_INT64_MAX: Final = (1 << 63) - 1

_ids = Struct("<2s16s2s8s").pack
_times = Struct("<BQBQ").pack
_double = Struct("<d").pack

_FLOAT: Final = -100
_FALSE: Final = -101
_TRUE: Final = -102
_VALUES: Final = {_FLOAT: (b"\x21", 8), _FALSE: (b"\x10\x00", 0), _TRUE: (b"\x10\x01", 0)}
"""How values begin that are neither text nor a whole number, and how many bytes follow."""

_HAS_REMOTE: Final = b"\x85\x01\x00\x01\x00\x00"
_IS_REMOTE: Final = b"\x85\x01\x00\x03\x00\x00"
_STATUS_UNSET: Final = b"\x7a\x00"


def span_bytes(
    name_bytes: bytes,
    parent_id: bytes,
    parent_is_remote: bool,
    name: str,
    kind: int,
    began_ns: int,
    ended_ns: int,
    attributes: Attributes,
    written: bytes = b"",
    fault: str | None = None,
    link: bytes = b"",
) -> bytes:
    """Returns a span that has ended as a member of ScopeSpans, tag and length included.

    `name_bytes` names it, SPAN_NAME_BYTES; `parent_id` has 8 bytes, or none for a root. `kind` is
    INTERNAL, SERVER or CLIENT. Times are in nanoseconds since 1970. `written` are more attributes,
    as `attribute_bytes` writes them. `fault` says why it failed, None if it did not. `link` names
    another span, of SPAN_NAME_BYTES, or is empty.
    """
    trace_id, own_id = name_bytes[:TRACE_ID_BYTES], name_bytes[TRACE_ID_BYTES:]
    return field(
        b"\x12",
        b"".join(
            (
                _ids(b"\x0a\x10", trace_id, b"\x12\x08", own_id),
                b"\x22\x08" + parent_id if parent_id else b"",
                _named(name, kind),
                _times(0x39, began_ns, 0x41, ended_ns),
                *_parts(attributes),
                written,
                _link(link) if link else b"",
                _STATUS_UNSET if fault is None else _failed(fault),
                _IS_REMOTE if parent_is_remote else _HAS_REMOTE,
            )
        ),
    )


def attribute_bytes(attributes: Attributes) -> bytes:
    """Returns attributes as members of a span: what many spans have in common is written once."""
    return b"".join(_parts(attributes))


def _parts(attributes: Attributes) -> list[bytes]:
    parts: list[bytes] = []
    for key, value in attributes.items():
        heads = _heads[key]
        if isinstance(value, str):
            text = value.encode("utf-8", "replace")
            parts += (heads[len(text)], text)
        elif isinstance(value, float):
            parts += (heads[_FLOAT], _double(value))
        elif isinstance(value, bool):
            parts.append(heads[_TRUE if value else _FALSE])
        else:
            # Engines tell some of them, and one that is out of range is no reason to fail.
            number = varint(min(max(value, 0), _INT64_MAX))
            parts += (heads[-len(number)], number)
    return parts


@functools.cache  # names are our own, and few
def _named(name: str, kind: int) -> bytes:
    return field(b"\x2a", name.encode()) + b"\x30%c" % kind


class _Heads(dict[int, bytes]):
    """What stands before an attribute's value, by what follows it.

    Of a text that is its bytes, of a number less than 0: its bytes, negated. Each is written once;
    all that is left to do for an attribute is to write its value.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = field(b"\x0a", name.encode())

    def __missing__(self, follows: int) -> bytes:
        written, size = _VALUES.get(follows, (b"\x18", -follows))
        if follows >= 0:
            written, size = b"\x0a" + varint(follows), follows
        value = b"\x12" + varint(len(written) + size) + written
        head = b"\x4a" + varint(len(self._name) + len(value) + size) + self._name + value
        if follows < _KEPT_TEXT_MAX:
            self[follows] = head
        return head


class _HeadsByName(dict[str, _Heads]):
    def __missing__(self, name: str) -> _Heads:
        heads = self[name] = _Heads(name)
        return heads


_heads = _HeadsByName()  # names are our own, and few


def _link(span: bytes) -> bytes:
    # Known to be remote: it may be another router's.
    return b"\x6a\x21\x0a\x10%b\x12\x08%b\x35\x00\x03\x00\x00" % (span[:16], span[16:])


def _failed(fault: str) -> bytes:
    return field(b"\x7a", field(b"\x12", fault.encode(errors="replace")) + b"\x18\x02")

"""Spans in OTLP's wire form. No I/O.

The SDK takes 26 us to make a span and 32 us more to encode it, which for the
spans of a turn is more than all else that the router does for it. What a span of
a turn says is little and of few kinds, so it is written here as soon as it ends,
in 2 to 10 us. Most of its attributes are those of the turns before it, and are
written once. Field numbers are those of opentelemetry/proto/trace/v1/trace.proto.
"""

import functools
from collections.abc import Mapping
from struct import Struct
from typing import Final, NamedTuple

from kvturn.proto_wire import field, varint

Attribute = str | bool | int | float
Attributes = Mapping[str, Attribute]

INTERNAL: Final = 1
SERVER: Final = 2
CLIENT: Final = 3

TRACE_ID_BYTES: Final = 16
SPAN_NAME_BYTES: Final = 24
"""Of what names a span: its trace's id, and its own."""

_WRITTEN_MAX: Final = 4_096
"""Attributes that are kept as they were written, the least recently used forgotten first."""

_INT64_MAX: Final = (1 << 63) - 1

_times = Struct("<BQBQ").pack
_double = Struct("<Bd").pack

_HAS_REMOTE: Final = b"\x85\x01\x00\x01\x00\x00"
_IS_REMOTE: Final = b"\x85\x01\x00\x03\x00\x00"
_STATUS_UNSET: Final = b"\x7a\x00"


class EndedSpan(NamedTuple):
    """One span that has ended.

    `trace_id` has 16 bytes, `span_id` 8, and `parent_id` 8, or none for a root.
    `kind` is INTERNAL, SERVER or CLIENT. Times are in nanoseconds since 1970.
    `fault` says why it failed, None if it did not. `link` names another span, of
    SPAN_NAME_BYTES, or is empty.
    """

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    parent_is_remote: bool
    name: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: Attributes
    fault: str | None
    link: bytes = b""


def span_bytes(span: EndedSpan) -> bytes:
    """Returns a span as a member of ScopeSpans, tag and length included."""
    trace_id, own, parent, remote, name, kind, began, ended, attributes, fault, link = span
    return field(
        b"\x12",
        b"".join(
            (
                b"\x0a\x10%b\x12\x08%b" % (trace_id, own),
                b"\x22\x08" + parent if parent else b"",
                _named(name, kind),
                _times(0x39, began, 0x41, ended),
                *map(_attribute, attributes, attributes.values()),
                _link(link) if link else b"",
                _STATUS_UNSET if fault is None else _failed(fault),
                _IS_REMOTE if remote else _HAS_REMOTE,
            )
        ),
    )


@functools.cache  # names are our own, and few
def _named(name: str, kind: int) -> bytes:
    return field(b"\x2a", name.encode()) + b"\x30%c" % kind


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, float):
        # Hardly ever that of a turn before, and quicker written than looked for.
        return field(b"\x4a", _name(name) + b"\x12\x09" + _double(0x21, value))
    return _kept(name, value)


@functools.lru_cache(_WRITTEN_MAX, typed=True)
def _kept(name: str, value: str | bool | int) -> bytes:
    if isinstance(value, str):
        written = field(b"\x0a", value.encode(errors="replace"))
    elif isinstance(value, bool):
        written = b"\x10\x01" if value else b"\x10\x00"
    else:
        # Engines tell some of them, and one that is out of range is no reason to fail.
        written = b"\x18" + varint(min(max(value, 0), _INT64_MAX))
    return field(b"\x4a", _name(name) + field(b"\x12", written))


@functools.cache  # names are our own, and few
def _name(name: str) -> bytes:
    return field(b"\x0a", name.encode())


def _link(span: bytes) -> bytes:
    # Known to be remote: it may be another router's.
    return b"\x6a\x21\x0a\x10%b\x12\x08%b\x35\x00\x03\x00\x00" % (span[:16], span[16:])


def _failed(fault: str) -> bytes:
    return field(b"\x7a", field(b"\x12", fault.encode(errors="replace")) + b"\x18\x02")

"""Spans in OTLP's wire form.

The SDK takes 26 us to make a span and 32 us more to encode it, which for the
five spans of a turn is more than all else that the router does for it. What a
span of a turn says is little and of few kinds, so it is written here as soon as
it ends, in 2 to 10 us. Most of its attributes are those of the turns before it,
and are written once. Field numbers are those of
opentelemetry/proto/trace/v1/trace.proto.
"""

import functools
from collections.abc import Mapping
from struct import Struct
from typing import Final

import msgspec

from kvturn_router.proto_wire import field, varint

Attribute = str | int | float
Attributes = Mapping[str, Attribute]

SERVER: Final = 2
CLIENT: Final = 3

_WRITTEN_MAX: Final = 4_096
"""Attributes that are kept as they were written, the least recently used forgotten first."""

_times = Struct("<BQBQ").pack
_double = Struct("<Bd").pack

_HAS_REMOTE: Final = b"\x85\x01\x00\x01\x00\x00"
_IS_REMOTE: Final = b"\x85\x01\x00\x03\x00\x00"
_STATUS_UNSET: Final = b"\x7a\x00"


class Span(msgspec.Struct, frozen=True):
    """One span that has ended.

    `trace_id` has 16 bytes, `span_id` 8, and `parent_id` 8, or none for a root.
    `kind` is SERVER or CLIENT. Times are in nanoseconds since 1970. `fault` says
    why it failed, None if it did not.
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


def span_bytes(span: Span) -> bytes:
    """Returns a span as a member of ScopeSpans, tag and length included."""
    attributes = span.attributes
    parent_id = span.parent_id
    return field(
        b"\x12",
        b"".join(
            (
                b"\x0a\x10%b\x12\x08%b" % (span.trace_id, span.span_id),
                b"\x22\x08" + parent_id if parent_id else b"",
                _named(span.name, span.kind),
                _times(0x39, span.began_ns, 0x41, span.ended_ns),
                *map(_attribute, attributes, attributes.values()),
                _STATUS_UNSET if span.fault is None else _failed(span.fault),
                _IS_REMOTE if span.parent_is_remote else _HAS_REMOTE,
            )
        ),
    )


@functools.cache  # names are the router's own, and few
def _named(name: str, kind: int) -> bytes:
    return field(b"\x2a", name.encode()) + b"\x30%c" % kind


@functools.lru_cache(_WRITTEN_MAX, typed=True)
def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, str):
        written = field(b"\x0a", value.encode(errors="replace"))
    elif isinstance(value, int):
        written = b"\x18" + varint(value)
    else:
        written = _double(0x21, value)
    return field(b"\x4a", _name(name) + field(b"\x12", written))


@functools.cache  # names are the router's own, and few
def _name(name: str) -> bytes:
    return field(b"\x0a", name.encode())


def _failed(fault: str) -> bytes:
    return field(b"\x7a", field(b"\x12", fault.encode(errors="replace")) + b"\x18\x02")

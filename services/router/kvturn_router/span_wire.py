"""Spans in OTLP's wire form.

The SDK takes 26 us to make a span and 32 us more to encode it, which for the
five spans of a turn is more than all else that the router does for it. What a
span of a turn says is little and of few kinds, so it is written here as soon as
it ends, in 2 to 10 us. Field numbers are those of opentelemetry/proto/trace/v1/trace.proto.
"""

import functools
from collections.abc import Mapping
from struct import Struct
from typing import Final

import msgspec

Attribute = str | int | float
Attributes = Mapping[str, Attribute]

SERVER: Final = 2
CLIENT: Final = 3

_times = Struct("<BQBQ").pack
_double = Struct("<Bd").pack

_HAS_REMOTE: Final = b"\x85\x01\x00\x01\x00\x00"
_IS_REMOTE: Final = b"\x85\x01\x00\x03\x00\x00"
_STATUS_UNSET: Final = b"\x7a\x00"


class Span(msgspec.Struct, frozen=True):
    """One span that has ended.

    Ids are lower-case hexadecimal, `parent_id` is empty for a root. `kind` is
    SERVER or CLIENT. Times are in nanoseconds since 1970. `fault` says why it
    failed, None if it did not.
    """

    trace_id: str
    span_id: str
    parent_id: str
    parent_is_remote: bool
    name: str
    kind: int
    began_ns: int
    ended_ns: int
    attributes: Attributes
    fault: str | None


def span_bytes(span: Span) -> bytes:
    """Returns a span as a member of ScopeSpans, tag and length included."""
    parts = [
        b"\x0a\x10%b\x12\x08%b" % (bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id)),
        b"\x22\x08" + bytes.fromhex(span.parent_id) if span.parent_id else b"",
        _field(b"\x2a", span.name.encode()),
        b"\x30%c" % span.kind,
        _times(0x39, span.began_ns, 0x41, span.ended_ns),
    ]
    for name, value in span.attributes.items():
        parts.append(_attribute(name, value))
    parts.append(_STATUS_UNSET if span.fault is None else _failed(span.fault))
    parts.append(_IS_REMOTE if span.parent_is_remote else _HAS_REMOTE)
    return _field(b"\x12", b"".join(parts))


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, str):
        written = _field(b"\x0a", value.encode(errors="replace"))
    elif isinstance(value, int):
        written = b"\x18" + _varint(value)
    else:
        written = _double(0x21, value)
    return _field(b"\x4a", _name(name) + _field(b"\x12", written))


@functools.cache  # names are the router's own, and few
def _name(name: str) -> bytes:
    return _field(b"\x0a", name.encode())


def _failed(fault: str) -> bytes:
    return _field(b"\x7a", _field(b"\x12", fault.encode(errors="replace")) + b"\x18\x02")


def _field(tag: bytes, value: bytes) -> bytes:
    size = len(value)
    return b"%b%c%b" % (tag, size, value) if size < 128 else tag + _varint(size) + value


def _varint(number: int) -> bytes:
    if number < 128:
        return b"%c" % number
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)

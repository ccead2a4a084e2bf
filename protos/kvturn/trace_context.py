"""A W3C trace context, as it crosses processes. No I/O."""

import re
from typing import NamedTuple

_traceparent = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_NO_TRACE = "0" * 32
_NO_SPAN = "0" * 16


class TraceContext(NamedTuple):
    """A trace context that came with a request; ids are hexadecimal."""

    traceparent: str
    trace_id: str
    span_id: str
    sampled: bool

    @property
    def name_bytes(self) -> bytes:
        """Names the span: its trace's id and its own, 24 bytes."""
        return bytes.fromhex(self.trace_id + self.span_id)


def trace_context(header: str | None) -> TraceContext | None:
    """Returns the context of a traceparent header; None if absent or malformed."""
    found = _traceparent.fullmatch(header.strip()) if header else None
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    # Version 00 has four parts, later ones may have more; ff is no version.
    if version == "ff" or (version == "00" and more) or trace == _NO_TRACE or span == _NO_SPAN:
        return None
    return TraceContext(f"00-{trace}-{span}-{flags}", trace, span, bool(int(flags, 16) & 1))

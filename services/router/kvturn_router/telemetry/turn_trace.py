"""One trace per turn.

A span is a few fields until it ends, and then bytes in a queue (span_wire.py,
span_export.py): what a turn that hangs has done so far is seen. Its parent is
explicit and never attached to a context, so turns that interleave on one event
loop cannot mix.

Without an endpoint there are no spans, and a client's trace context goes on to
the engines as it came; so it does if the client says that it is not sampled.
"""

import re
from random import getrandbits
from time import time_ns
from typing import NamedTuple

from kvturn_router.telemetry.span_export import SpanExporter, SpanQueue
from kvturn_router.telemetry.span_wire import CLIENT, SERVER, Attributes, Span, span_bytes

_traceparent = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_NO_TRACE = "0" * 32
_NO_SPAN = "0" * 16


class TraceContext(NamedTuple):
    """A W3C trace context that came with a request; ids are hexadecimal."""

    traceparent: str
    trace_id: str
    span_id: str
    sampled: bool


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


class TurnSpan:
    """One span of a turn that nobody records."""

    __slots__ = ("_traceparent",)

    recorded = False
    """Whether anything reads what `end` is told."""

    def __init__(self, traceparent: str | None) -> None:
        self._traceparent = traceparent

    @property
    def traceparent(self) -> str | None:
        """What to send along with calls made under it; None if there is no trace at all."""
        return self._traceparent

    def child(self, name: str) -> "TurnSpan":
        """Begins a span under this one."""
        del name
        return self

    def end(self, attributes: Attributes | None = None, *, fault: str | None = None) -> None:
        """Ends the span, once; `fault` marks it as failed and says why."""


class _RecordedSpan(TurnSpan):
    __slots__ = ("_began_ns", "_id", "_name", "_parent_id", "_queue", "_remote", "_trace_id")

    recorded = True

    def __init__(
        self, queue: SpanQueue, name: str, trace_id: bytes, parent_id: bytes, remote: bool
    ) -> None:
        self._traceparent = None
        self._queue = queue
        self._name = name
        self._trace_id = trace_id
        self._parent_id = parent_id
        self._remote = remote
        self._id = getrandbits(64).to_bytes(8)
        self._began_ns = time_ns()

    @property
    def traceparent(self) -> str | None:
        if self._traceparent is None:  # Most spans make no calls.
            self._traceparent = f"00-{self._trace_id.hex()}-{self._id.hex()}-01"
        return self._traceparent

    def child(self, name: str) -> TurnSpan:
        return _RecordedSpan(self._queue, name, self._trace_id, self._id, False)

    def end(self, attributes: Attributes | None = None, *, fault: str | None = None) -> None:
        remote = self._remote
        parent_id = self._parent_id
        # In the order of the fields: names would take as long again.
        span = Span(
            self._trace_id,
            self._id,
            parent_id,
            remote,
            self._name,
            SERVER if remote or not parent_id else CLIENT,
            self._began_ns,
            time_ns(),
            attributes or {},
            fault,
        )
        self._queue.put(span_bytes(span))


class TurnTracer:
    """Begins turns' traces. `queue` is None where spans are off."""

    def __init__(self, queue: SpanQueue | None) -> None:
        self._queue = queue

    def begin(self, parent: TraceContext | None) -> TurnSpan:
        """Begins the span of a turn, under the client's own if it sent one."""
        if self._queue is None or (parent is not None and not parent.sampled):
            return TurnSpan(None if parent is None else parent.traceparent)
        if parent is None:
            return _RecordedSpan(self._queue, "turn", getrandbits(128).to_bytes(16), b"", False)
        trace_id, span_id = bytes.fromhex(parent.trace_id), bytes.fromhex(parent.span_id)
        return _RecordedSpan(self._queue, "turn", trace_id, span_id, True)


class Telemetry:
    """The process's tracer and its way out.

    `exporter` is None where spans are off.
    """

    def __init__(self, exporter: SpanExporter | None) -> None:
        self.queue = None if exporter is None else SpanQueue(exporter)
        self.turns = TurnTracer(self.queue)

    def flush(self) -> None:
        """Exports the spans that have ended, and returns when that is done."""
        if self.queue is not None:
            self.queue.flush()

    def shutdown(self) -> None:
        """Exports what is left, for at most 1 s."""
        if self.queue is not None:
            self.queue.shutdown()

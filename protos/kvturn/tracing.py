"""Spans as they are made, in the router, the lease service and the connector.

A span is a few fields until it ends, and then bytes in a queue (span_wire.py,
span_export.py): what a turn that hangs has done so far is seen. Its parent is
explicit and never attached to a context, so turns that interleave on one event
loop cannot mix.

A trace begins in the router, which decides whether it is recorded; the other
processes record what comes with the context of one that is, and nothing else.
"""

import logging
from random import Random
from time import time_ns

from kvturn.span_export import SHUTDOWN_TIMEOUT_S, SpanExporter, SpanQueue
from kvturn.span_wire import CLIENT, SPAN_NAME_BYTES, Attributes, span_bytes
from kvturn.trace_context import trace_context


class Span:
    """One span that nobody records."""

    __slots__ = ("_traceparent",)

    recorded = False
    """Whether anything reads what `end` is told."""

    name_bytes = b""
    """Names the span: its trace's id and its own, SPAN_NAME_BYTES; empty if it is not recorded."""

    def __init__(self, traceparent: str | None = None) -> None:
        self._traceparent = traceparent

    @property
    def traceparent(self) -> str | None:
        """What to send along with calls made under it; None if there is no trace at all."""
        return self._traceparent

    @property
    def trace_id(self) -> str:
        """Its trace's id, 32 hexadecimal digits; empty if it is not recorded."""
        return self.name_bytes[:16].hex()

    def child(self, name: str, kind: int = CLIENT) -> "Span":
        """Begins a span under this one."""
        del name, kind
        return self

    def end(
        self,
        attributes: Attributes | None = None,
        *,
        written: bytes = b"",
        fault: str | None = None,
        link: bytes = b"",
        ended_ns: int = 0,
    ) -> None:
        """Ends the span, once; `fault` marks it as failed and says why.

        `written` are more attributes, as span_wire's `attribute_bytes` writes them. `link` is the
        `name_bytes` of a span that it goes on from, `ended_ns` when it ended if that is not now.
        """


UNRECORDED = Span()
"""A span in no trace."""


class _RecordedSpan(Span):
    __slots__ = ("_began_ns", "_kind", "_name", "_parent_id", "_remote", "_tracer", "name_bytes")

    recorded = True

    def __init__(
        self,
        tracer: "Tracer",
        name: str,
        kind: int,
        trace_id: bytes,
        parent_id: bytes,
        remote: bool,
        began_ns: int,
    ) -> None:
        self._traceparent = None
        self._tracer = tracer
        self._name = name
        self._kind = kind
        self._parent_id = parent_id
        self._remote = remote
        self._began_ns = began_ns
        self.name_bytes = trace_id + tracer.bits(64).to_bytes(8)

    @property
    def traceparent(self) -> str | None:
        if self._traceparent is None:  # Most spans make no calls.
            name = self.name_bytes.hex()
            self._traceparent = f"00-{name[:32]}-{name[32:]}-01"
        return self._traceparent

    def child(self, name: str, kind: int = CLIENT) -> Span:
        own = self.name_bytes
        return _RecordedSpan(self._tracer, name, kind, own[:16], own[16:], False, time_ns())

    def end(
        self,
        attributes: Attributes | None = None,
        *,
        written: bytes = b"",
        fault: str | None = None,
        link: bytes = b"",
        ended_ns: int = 0,
    ) -> None:
        # In the order of the parameters: names would take as long again.
        span = span_bytes(
            self.name_bytes,
            self._parent_id,
            self._remote,
            self._name,
            self._kind,
            self._began_ns,
            ended_ns or time_ns(),
            attributes or {},
            written,
            fault,
            link,
        )
        self._tracer.queue.put(span)


class Tracer:
    """Begins spans. To be made in the process that uses it, after any fork."""

    def __init__(self, queue: SpanQueue) -> None:
        self.queue = queue
        # vLLM seeds the module's own generator alike in every engine, and with it the spans of
        # prefill and decode would get the same ids.
        self.bits = Random().getrandbits

    def root(self, name: str, kind: int, trace_id: bytes) -> Span:
        """Begins a span that has no parent, in a trace of its own."""
        return _RecordedSpan(self, name, kind, trace_id, b"", False, time_ns())

    def under(self, parent: bytes, name: str, kind: int, began_ns: int = 0) -> Span:
        """Begins a span under another process's, given its `name_bytes`.

        `began_ns` is when it began if that is not now.
        """
        assert len(parent) == SPAN_NAME_BYTES
        began_ns = began_ns or time_ns()
        return _RecordedSpan(self, name, kind, parent[:16], parent[16:], True, began_ns)


class Tracing:
    """A process's tracer and its way out.

    `exporter` is None where spans are off. `logger` is told of a collector
    that is out of reach.
    """

    def __init__(self, exporter: SpanExporter | None, logger: logging.Logger) -> None:
        self.queue = None if exporter is None else SpanQueue(exporter, logger)
        self.tracer = None if self.queue is None else Tracer(self.queue)

    def span(self, traceparent: str, name: str, kind: int, began_ns: int = 0) -> Span:
        """Begins a span under the one that a traceparent names.

        It is not recorded where spans are off, or if nobody records that trace: then its context
        goes on as it came.
        """
        parent = trace_context(traceparent)
        if parent is None:
            return UNRECORDED
        if self.tracer is None or not parent.sampled:
            return Span(parent.traceparent)
        return self.tracer.under(parent.name_bytes, name, kind, began_ns)

    def flush(self) -> None:
        """Exports the spans that have ended, and returns when that is done."""
        if self.queue is not None:
            self.queue.flush()

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Exports what is left, for at most `timeout_s`."""
        if self.queue is not None:
            self.queue.shutdown(timeout_s)

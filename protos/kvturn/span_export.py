"""The way of spans out of the process, on which nobody ever waits.

A bounded queue, and a thread that empties it. What does not fit or cannot be
delivered is dropped, with one warning until nothing has been for a while.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvturn.watched import FileFault

QUEUE_MAX: Final = 16_384
"""Spans waiting; more are dropped."""
BATCH_BYTES_MAX: Final = 3 << 20
"""Of one request; collectors take 4 MiB unless they are told otherwise."""
_WAKES_AT: Final = 4_096
"""Spans waiting that are not left to wait for the next time."""
_DELAY_S: Final = 0.5
SHUTDOWN_TIMEOUT_S: Final = 1.0
CALM_S: Final = 60.0
"""Without a loss, until a collector is said to take all again: one that comes and goes is no news
each time."""


class SpanExporter(Protocol):
    """Delivers spans, each as a member of ScopeSpans. Called on the queue's thread."""

    def export(self, spans: Sequence[bytes]) -> bool:
        """Returns whether they are delivered."""

    def shutdown(self) -> None:
        """Lets go of the connection."""


class SpanQueue:
    """Spans waiting to be exported. To be made in the process that uses it, after any fork.

    `logger` is told when spans begin to be lost, and when none has been for CALM_S by `clock_s`.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        logger: logging.Logger,
        queue_max: int = QUEUE_MAX,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exporter = exporter
        self._logger = logger
        self._queue_max = queue_max
        self._clock_s = clock_s
        self._spans: list[bytes] = []
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._ending = False
        self._abandoned = False
        self.sent = 0
        """Spans delivered."""
        # Apart, as each is counted on a thread of its own.
        self._unfit = self._undelivered = 0
        self._told_of = 0
        self._lost_s: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="spans")
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Spans that wait."""
        return len(self._spans)

    @property
    def dropped(self) -> int:
        """Spans that did not fit or could not be delivered."""
        return self._unfit + self._undelivered

    def put(self, span: bytes) -> None:
        """Takes a span, if there is room."""
        waiting = len(self._spans)
        if waiting < self._queue_max:
            self._spans.append(span)
        else:
            self._unfit += 1
        if waiting == _WAKES_AT:
            self._wanted.set()

    def flush(self) -> None:
        """Exports what waits, and returns when that is done."""
        with self._lock:
            while batch := self._batch():
                del self._spans[: len(batch)]
                self._export(batch)

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Exports what is left, for at most `timeout_s`."""
        self._ending = True
        self._wanted.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            # A collector that hangs must not hold the process, nor be spoken of after its end.
            self._abandoned = True
            self._tell_loss(f"after {timeout_s:.1f} s, the last")
            self._exporter.shutdown()

    def _run(self) -> None:
        while not self._ending:
            self._wanted.wait(_DELAY_S)
            self._wanted.clear()
            self.flush()
        if not self._abandoned:
            self._exporter.shutdown()

    def _batch(self) -> list[bytes]:
        left = BATCH_BYTES_MAX
        for count, span in enumerate(self._spans):
            left -= len(span)
            if left < 0:
                return self._spans[: max(count, 1)]
        return self._spans[:]

    def _export(self, spans: Sequence[bytes]) -> None:
        began = time.monotonic()
        reason = "more than the collector takes"
        try:
            delivered = self._exporter.export(spans)
            if not delivered:
                reason = f"after {time.monotonic() - began:.1f} s"
        except FileFault as fault:
            delivered = False
            reason = str(fault)
        except Exception as error:  # a fault of the exporter is not the turn's
            delivered = False
            reason = type(error).__name__
        if delivered:
            self.sent += len(spans)
        else:
            self._undelivered += len(spans)
        if not self._abandoned:
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        """Tells what an export, and what was put meanwhile, make known."""
        before, self._told_of = self._told_of, self.dropped
        if self._told_of > before:
            self._tell_loss(reason)
        elif self._lost_s is not None and self._clock_s() - self._lost_s >= CALM_S:
            self._lost_s = None
            self._logger.warning("spans are delivered again")

    def _tell_loss(self, reason: str) -> None:
        if self._lost_s is None:
            self._logger.warning("spans cannot be delivered (%s); they are dropped", reason)
        self._lost_s = self._clock_s()

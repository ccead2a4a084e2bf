"""The way of spans out of the process, on which nobody ever waits.

A bounded queue, and a thread that empties it. What does not fit or cannot be
delivered is dropped, with one warning until delivery works again.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol

QUEUE_MAX: Final = 16_384
"""Spans waiting; more are dropped."""
BATCH_BYTES_MAX: Final = 3 << 20
"""Of one request; collectors take 4 MiB unless they are told otherwise."""
_WAKES_AT: Final = 4_096
"""Spans waiting that are not left to wait for the next time."""
_DELAY_S: Final = 0.5
SHUTDOWN_TIMEOUT_S: Final = 1.0


class SpanExporter(Protocol):
    """Delivers spans, each as a member of ScopeSpans. Called on the queue's thread."""

    def export(self, spans: Sequence[bytes]) -> bool:
        """Returns whether they are delivered."""

    def shutdown(self) -> None:
        """Lets go of the connection."""


class SpanQueue:
    """Spans waiting to be exported. To be made in the process that uses it, after any fork.

    `logger` is told when delivery begins to fail, and when it works again.
    """

    def __init__(
        self, exporter: SpanExporter, logger: logging.Logger, queue_max: int = QUEUE_MAX
    ) -> None:
        self._exporter = exporter
        self._logger = logger
        self._queue_max = queue_max
        self._spans: list[bytes] = []
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._ending = False
        self._abandoned = False
        self._delivering = True
        self.sent = self.dropped = 0
        """Spans delivered, and those that did not fit or could not be delivered."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="spans")
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Spans that wait."""
        return len(self._spans)

    def put(self, span: bytes) -> None:
        """Takes a span, if there is room."""
        waiting = len(self._spans)
        if waiting < self._queue_max:
            self._spans.append(span)
        else:
            self.dropped += 1
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
            self._tell(False, f"after {timeout_s:.1f} s, the last")
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
        try:
            delivered = self._exporter.export(spans)
            reason = f"after {time.monotonic() - began:.1f} s"
        except Exception as error:  # a fault of the exporter is not the turn's
            delivered = False
            reason = type(error).__name__
        if delivered:
            self.sent += len(spans)
        else:
            self.dropped += len(spans)
        if not self._abandoned:
            self._tell(delivered, reason)

    def _tell(self, delivered: bool, reason: str) -> None:
        if not delivered and self._delivering:
            self._logger.warning("spans cannot be delivered (%s); they are dropped", reason)
        elif delivered and not self._delivering:
            self._logger.warning("spans are delivered again")
        self._delivering = delivered

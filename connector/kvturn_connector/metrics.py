"""What decode holds and gives up, in vLLM's own metrics. Touches vLLM; see ARCHITECTURE.md.

vLLM carries a connector's statistics from the engine core to its `/metrics` and to its periodic log
line. Stock's for NIXL are extended: the worker's and the scheduler side's are added up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)

from kvturn.v1 import common_pb2, lease_pb2

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RETAINED_BLOCKS = "kvturn_retained_blocks"
RELEASED = "kvturn_released_"
GIVEN_UP = "kvturn_given_up_"
REASONS = {
    value: name.removeprefix("RELEASE_REASON_").lower()
    for name, value in common_pb2.ReleaseReason.items()
    if value
}
OUTLOOKS = {
    value: name.removeprefix("OUTLOOK_").lower()
    for name, value in lease_pb2.Outlook.items()
    if value
}
KEYS = (
    RETAINED_BLOCKS,
    *(RELEASED + reason for reason in REASONS.values()),
    *(GIVEN_UP + outlook for outlook in OUTLOOKS.values()),
)


class KvturnStats(NixlKVConnectorStats):
    """Stock's, and what happened to retentions since the last step."""

    def reset(self) -> None:
        """Forgets all."""
        super().reset()
        self.data.update({key: [] for key in KEYS})

    def is_empty(self) -> bool:
        """True if there is nothing to report."""
        return super().is_empty() and not any(self.data.get(key) for key in KEYS)

    def released(self, reason: int) -> None:
        """Blocks of a retention went back to the pool."""
        self.data[RELEASED + REASONS.get(reason, "revoked")].append(1)

    def given_up(self, outlook: int) -> None:
        """A retention was given up for a request that needs its memory."""
        self.data[GIVEN_UP + OUTLOOKS.get(outlook, "normal")].append(1)

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        held = self.data.get(RETAINED_BLOCKS)
        counts = {
            f"Retentions {key.removeprefix('kvturn_').replace('_', ' ')}": len(self.data[key])
            for key in KEYS[1:]
            if self.data.get(key)
        }
        return {**super().reduce(), **({"Retained blocks": held[-1]} if held else {}), **counts}


class KvturnPromMetrics(NixlPromMetrics):
    """Stock's, and `kvturn:*`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._retained_blocks = self._gauge_cls(
            name="kvturn:retained_blocks",
            documentation="Blocks of KV memory that are held for later turns.",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
        self._released = self._counter_cls(
            name="kvturn:released_retentions",
            documentation="Retentions whose blocks went back to the pool, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._given_up = self._counter_cls(
            name="kvturn:given_up_retentions",
            documentation="Retentions given up for requests that needed their memory, by what "
            "the lease service expected of their conversations.",
            labelnames=[*labelnames, "outlook"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes what an engine reported of a step."""
        super().observe(transfer_stats_data, engine_idx)
        labels = self.per_engine_labelvalues[engine_idx]
        if held := transfer_stats_data.get(RETAINED_BLOCKS):
            self._retained_blocks.labels(*labels).set(held[-1])
        for prefix, names, counter in (
            (RELEASED, REASONS, self._released),
            (GIVEN_UP, OUTLOOKS, self._given_up),
        ):
            for name in names.values():
                if ended := transfer_stats_data.get(prefix + name):
                    counter.labels(*labels, name).inc(len(ended))

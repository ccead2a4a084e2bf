"""What the connector counts, in vLLM's own metrics. Touches vLLM; see ARCHITECTURE.md.

vLLM carries a connector's statistics from the engine core to its `/metrics` and to its periodic log
line. Stock's for NIXL are extended: the worker's and the scheduler side's are added up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)

from kvturn_connector.config import turned_off_by
from kvturn_connector.tally import FAMILIES, KEYS, OFF, RETAINED_BLOCKS, key_of, labels_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

    from kvturn.metrics import Family

_COUNTS = tuple(
    key_of(family, label)
    for family in FAMILIES
    if family.kind == "counter"
    for label in labels_of(family)
)


class KvturnStats(NixlKVConnectorStats):
    """Stock's, and what the connector counted since the last step."""

    def reset(self) -> None:
        """Forgets all."""
        super().reset()
        self.data.update({key: [] for key in KEYS})

    def is_empty(self) -> bool:
        """True if there is nothing to report."""
        return super().is_empty() and not any(self.data.get(key) for key in KEYS)

    def add(self, family: Family, value: float = 1, label: str = "") -> None:
        """Counts `value` more, observes it, or sets it, as the family is."""
        self.data[key_of(family, label)].append(value)

    def add_by_name(self, family: Family, names: Mapping[int, str], value: int) -> None:
        """Counts one more under the name of a protobuf value; others have none."""
        if value in names:
            self.add(family, 1, names[value])

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: what is held, and all that was counted."""
        held = self.data.get(key_of(RETAINED_BLOCKS))
        counts = {
            key.replace("_connector_", " ").replace("_total", "").replace("_", " "): sum(
                self.data[key]
            )
            for key in _COUNTS
            if self.data.get(key)
        }
        return {**super().reduce(), **({"Retained blocks": held[-1]} if held else {}), **counts}


class KvturnPromMetrics(NixlPromMetrics):
    """Stock's, and `kvturn_connector_*`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {family.name: self._metric(family, labelnames) for family in FAMILIES}
        # All from the start: a rate sees no first time where there was no sample before.
        for engine_labels in per_engine_labelvalues.values():
            for family in FAMILIES:
                for label in labels_of(family):
                    self._child(family, engine_labels, label)
            # vLLM builds this for a connector that is turned off, too, which reports nothing.
            for setting in turned_off_by(_extra_config(vllm_config)):
                self._child(OFF, engine_labels, setting).set(1)

    def _metric(self, family: Family, labelnames: list[str]) -> Any:
        named = {
            "name": family.name.removesuffix("_total"),
            "documentation": family.about,
            "labelnames": [*labelnames, *family.labels],
        }
        if family.kind == "gauge":
            return self._gauge_cls(multiprocess_mode="mostrecent", **named)
        if family.kind == "histogram":
            return self._histogram_cls(buckets=list(family.bounds), **named)
        return self._counter_cls(**named)

    def _child(self, family: Family, engine_labels: list[object], label: str) -> Any:
        labels = [*engine_labels, label] if label else engine_labels
        return self._metrics[family.name].labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes what an engine reported of a step."""
        super().observe(transfer_stats_data, engine_idx)
        engine_labels = self.per_engine_labelvalues[engine_idx]
        for family in FAMILIES:
            for label in labels_of(family):
                values = transfer_stats_data.get(key_of(family, label))
                if not values:
                    continue
                child = self._child(family, engine_labels, label)
                if family.kind == "gauge":
                    child.set(values[-1])
                elif family.kind == "counter":
                    child.inc(sum(values))
                else:
                    for value in values:
                        child.observe(value)


def _extra_config(vllm_config: VllmConfig) -> Mapping[str, Any]:
    transfer = vllm_config.kv_transfer_config
    return {} if transfer is None else transfer.kv_connector_extra_config

"""Pages of metrics as Prometheus reads them: its text format, or OpenMetrics if asked for.

Services alone import this: the connector's numbers go through vLLM's own metrics.
"""

from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry
from prometheus_client.utils import floatToGoString

from kvturn.metrics import Family

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prometheus_client.core import Metric

    from kvturn.metrics import Page, Value

_EOF = b"# EOF\n"


def process_page() -> Page:
    """Returns what the process itself takes: CPU time, memory, files."""
    page: Page = {}
    for metric in ProcessCollector(registry=None).collect():
        page[_family(metric).name] = [([], sample.value) for sample in metric.samples]
    return page


def process_families() -> list[Family]:
    """Returns the families of `process_page`."""
    return [_family(metric) for metric in ProcessCollector(registry=None).collect()]


def _family(metric: Metric) -> Family:
    ending = "_total" if metric.type == "counter" else ""
    return Family(metric.name + ending, metric.type, metric.documentation)


async def written(
    families: Iterable[Family], pages: Mapping[str, Page], accept: str
) -> tuple[str, bytes]:
    """Returns the content type that `accept` asks for, and the pages in it.

    `pages` come by the name of the worker that each is of; with one that is named "" there is no
    such label. Lets others on the event loop go on between families.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # the library cannot compare a version that is no number
        encode, content_type = choose_encoder("")
    out = bytearray()
    ends = False
    for family in families:
        of_workers = [(worker, page.get(family.name, ())) for worker, page in pages.items()]
        text = encode(_One(_metric(family, of_workers)))
        ends = text.endswith(_EOF)
        out += text.removesuffix(_EOF)
        await asyncio.sleep(0)
    return content_type, bytes(out) + (_EOF if ends else b"")


class _One(CollectorRegistry):
    """A registry of one metric, which is what the library's encoders take."""

    def __init__(self, metric: Metric) -> None:
        super().__init__(auto_describe=False)
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _metric(
    family: Family, samples: Sequence[tuple[str, Sequence[tuple[list[str], Value]]]]
) -> Metric:
    named = any(worker for worker, _ in samples)
    labels = [*family.labels, "worker"] if named else list(family.labels)
    add: Callable[[list[str], Value], None]
    metric: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    if family.kind == "histogram":
        histogram = metric = HistogramMetricFamily(family.name, family.about, labels=labels)

        def add(values: list[str], value: Value) -> None:
            assert not isinstance(value, int | float)
            counts, total = value
            edges = [*map(floatToGoString, family.bounds), "+Inf"]
            histogram.add_metric(
                values, list(zip(edges, accumulate(counts), strict=True)), sum_value=total
            )

    else:
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        plain = metric = kind(family.name, family.about, labels=labels)

        def add(values: list[str], value: Value) -> None:
            assert isinstance(value, int | float)
            plain.add_metric(values, value)

    for worker, found in samples:
        for values, value in found:
            add([*values, worker] if named else values, value)
    return metric

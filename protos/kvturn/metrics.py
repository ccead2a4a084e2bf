"""Metrics as Prometheus reads them, of numbers that a process counts by itself.

What is counted on a hot path is a plain int, or a `Histogram` of them; only when somebody asks are
these written down, as a `Page`: a list of samples for each `Family`. `prometheus_client` writes the
page out, in the text format or as OpenMetrics, whichever is asked for. Services alone import this:
the connector's numbers go through vLLM's own metrics.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prometheus_client.core import Metric

OTHER = "other"
"""The label of all that would be too many by name."""

ENGINES_NAMED_MAX = 256
"""Engines that have samples of their own on a page; what more there are is added up as OTHER."""

_EOF = b"# EOF\n"


class Histogram:
    """How often values fell up to each of some bounds, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` ascend; values above the last count, too."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    def observe(self, value: float) -> None:
        """Counts a value in."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def sample(self) -> tuple[list[int], float]:
        """Returns what it has counted up to now."""
        return list(self.counts), self.total


@dataclass(frozen=True, slots=True)
class Family:
    """A metric's name and meaning. `kind` is "counter", "gauge" or "histogram".

    A counter's name ends in `_total`; the unit, if there is one, stands before that. `bounds` are
    a histogram's.
    """

    name: str
    kind: str
    about: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuses a family that is not named by Prometheus' conventions."""
        assert self.kind in ("counter", "gauge", "histogram")
        assert (self.kind == "counter") == self.name.endswith("_total")
        assert bool(self.bounds) == (self.kind == "histogram")

    def histogram(self) -> Histogram:
        """Returns a new histogram of this family's bounds."""
        return Histogram(self.bounds)


Value: TypeAlias = "float | tuple[list[int], float]"
"""A number, or of a histogram the counts of its buckets and the sum."""

Page: TypeAlias = "dict[str, list[tuple[list[str], Value]]]"
"""Samples by name of their family: the values of its labels, and the sample's own."""


class PageWriter:
    """Writes down what a process has counted."""

    def __init__(self) -> None:
        self.page: Page = {}

    def put(self, family: Family, value: float | Histogram, *labels: str) -> None:
        """Adds a sample, with the values of the family's labels in their order."""
        assert len(labels) == len(family.labels)
        told = value.sample() if isinstance(value, Histogram) else value
        self.page.setdefault(family.name, []).append((list(labels), told))

    def put_all(self, family: Family, values: Mapping[str, float | Histogram]) -> None:
        """Adds the samples of a family with one label, by its value."""
        for label, value in values.items():
            self.put(family, value, label)


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
    encode, content_type = choose_encoder(accept)
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

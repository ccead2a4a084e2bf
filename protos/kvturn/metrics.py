"""What processes count: names and meanings of metrics, and histograms. No I/O.

What is counted on a hot path is a plain int, or a `Histogram` of them; only when somebody asks are
these written down, as a `Page`: a list of samples for each `Family`. `metrics_page.py` turns that
into what Prometheus reads.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvturn.span_export import SpanQueue

OTHER = "other"
"""The label of all that would be too many by name."""

ENGINES_NAMED_MAX = 256
"""Engines that have samples of their own on a page; what more there are is added up as OTHER."""


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

    def put_spans(self, family: Family, spans: SpanQueue | None) -> None:
        """Adds how many spans were delivered and dropped; None: tracing is off."""
        self.put(family, 0 if spans is None else spans.sent, "sent")
        self.put(family, 0 if spans is None else spans.dropped, "dropped")

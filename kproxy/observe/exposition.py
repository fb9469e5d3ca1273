"""Prometheus families: as plain values, of several processes, as a page.

| kind | of several processes |
| --- | --- |
| counters, histograms | the sum; it must never shrink, or rates of it show a restart |
| gauges of each process's own things (connections, bytes) | the sum |
| gauges of shared things (the table, brokers) | the worst, the highest or the lowest: `across` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

Across = Literal["sum", "max", "min"]
_FOLDS: dict[Across, Callable[[float, float], float]] = {"sum": lambda one, other: one + other, "max": max, "min": min}
_GROWING = ("counter", "histogram")


class Gauge(GaugeMetricFamily):
    """A gauge with the way to combine it across processes."""

    def __init__(
        self,
        name: str,
        documentation: str,
        value: float | None = None,
        across: Across = "sum",
        labels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(name, documentation, value=value, labels=labels)
        self.across: Across = across


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One line of the page `/metrics`."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """All lines of one name; `kind` is Prometheus' type."""

    name: str
    documentation: str
    kind: str
    across: Across
    samples: list[Sample]

    def metric(self) -> Metric:
        """Convert to a metric of Prometheus' library."""
        metric = Metric(self.name, self.documentation, self.kind)
        for sample in self.samples:
            metric.add_sample(sample.name, sample.labels, sample.value)
        return metric


def family_of(metric: Metric) -> Family:
    """Convert a metric of Prometheus' library to a plain value."""
    across: Across = metric.across if isinstance(metric, Gauge) else "sum"
    samples = [Sample(each.name, dict(each.labels), float(each.value)) for each in metric.samples]
    return Family(metric.name, metric.documentation, metric.type, across, samples)


def merge(pages: Iterable[Sequence[Family]]) -> list[Family]:
    """Combine the families of several processes."""
    merged: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], Sample]] = {}
    for page in pages:
        for family in page:
            merged.setdefault(family.name, family)
            lines = values.setdefault(family.name, {})
            fold = _FOLDS[family.across]
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                known = lines.get(key)
                value = sample.value if known is None else fold(known.value, sample.value)
                lines[key] = Sample(sample.name, sample.labels, value)
    return [msgspec.structs.replace(family, samples=list(values[name].values())) for name, family in merged.items()]


def growing(page: Sequence[Family]) -> list[Family]:
    """The families that outlive their process: counters and histograms."""
    return [family for family in page if family.kind in _GROWING]


def render(collectors: Iterable[Collector], accept: str) -> tuple[bytes, str]:
    """Render the page in the format that an HTTP Accept header asks for.

    The page and its content type.
    """
    registry = CollectorRegistry(auto_describe=False)
    PlatformCollector(registry=registry)
    for collector in collectors:
        registry.register(collector)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def this_process() -> tuple[Collector, ...]:
    """Collectors of the system's and Python's own numbers of this process."""
    apart = CollectorRegistry()
    return ProcessCollector(registry=apart), GCCollector(registry=apart)


def counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=value)


def gauge(name: str, documentation: str, value: float, across: Across = "sum") -> Metric:
    return Gauge(name, documentation, value, across)


def histogram(name: str, documentation: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    """Make a histogram.

    `counts` has one number for each bucket by itself, and one for values beyond `bounds`.
    """
    cumulated = accumulate(counts)
    buckets = [(str(bound), float(next(cumulated))) for bound in bounds]
    return HistogramMetricFamily(name, documentation, buckets=[*buckets, ("+Inf", float(sum(counts)))], sum_value=total)

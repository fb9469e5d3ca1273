"""How numbers become `/metrics`: families of Prometheus' library, and the page that is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kproxy.observe.families import Across, Gauge


def render(collectors: Iterable[Collector], accept: str) -> tuple[bytes, str]:
    """The page and its content type, in the format that an HTTP Accept header asks for."""
    registry = CollectorRegistry(auto_describe=False)
    PlatformCollector(registry=registry)
    for collector in collectors:
        registry.register(collector)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def this_process() -> tuple[Collector, ...]:
    """What the system and Python know of this process."""
    apart = CollectorRegistry()
    return ProcessCollector(registry=apart), GCCollector(registry=apart)


def counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value=value)


def gauge(name: str, documentation: str, value: float, across: Across = "sum") -> Metric:
    return Gauge(name, documentation, value, across)


def histogram(name: str, documentation: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    """`counts` are those of each bucket by itself, and one more for what is beyond the last of `bounds`."""
    cumulated = accumulate(counts)
    buckets = [(str(bound), float(next(cumulated))) for bound in bounds]
    return HistogramMetricFamily(name, documentation, buckets=[*buckets, ("+Inf", float(sum(counts)))], sum_value=total)

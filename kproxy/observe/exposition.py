"""Make Prometheus families, merge those of several processes, and render them as a page.

Values of several processes are merged as follows:

- counters, histograms and summaries are added. A sum must never shrink: Prometheus would take it for a restart.
- gauges of each process's own things (connections, bytes) are added.
- gauges of shared things (the table, brokers) have the worst, the highest or the lowest value (`FOLDS`). So do
  counters of events that every process sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

FOLDS: Final[Mapping[str, Callable[[float, float], float]]] = {
    "kproxy_audit_age_seconds": max,
    "kproxy_broker_hung": max,
    "kproxy_broker_oldest_request_age_seconds": max,
    "kproxy_broker_up": min,
    "kproxy_build_info": max,
    "kproxy_client_id_slow_seconds": max,
    "kproxy_connection_in_flight_bytes_limit": max,
    "kproxy_connection_in_flight_bytes_max": max,
    "kproxy_connection_in_flight_requests_limit": max,
    "kproxy_connection_in_flight_requests_max": max,
    "kproxy_draining": max,
    "kproxy_fleet_proxies": min,
    "kproxy_fleet_registered": max,
    "kproxy_hung_brokers": max,
    "kproxy_own_members": min,
    "kproxy_owner_changes": max,
    "kproxy_plain_path_compiled": min,
    "kproxy_table_age_seconds": max,
    "kproxy_table_brokers": min,
    "kproxy_table_partitions": min,
    "kproxy_table_revision": min,
    "kproxy_table_stale": max,
    "kproxy_tls_certificate_expiry_timestamp_seconds": min,
}
"""How values of several processes are combined; all others are added."""
_GROWING = ("counter", "histogram", "summary")
_BY_NAME = ("kproxy_topic_", "kproxy_client_id_")
MOST_NAMES_KEPT: Final = 1_000


def parse(page: bytes) -> list[Metric]:
    """Parse the proxy's own families of a page in Prometheus' text format, without those about its process.

    Raises ValueError.
    """
    families = text_string_to_metric_families(page.decode())
    return [each for each in families if each.name.startswith("kproxy_") and not each.name.startswith("kproxy_worker")]


def _add(one: float, other: float) -> float:
    return one + other


def merge(pages: Iterable[Sequence[Metric]]) -> list[Metric]:
    """Combine the families of several processes."""
    merged: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for page in pages:
        for family in page:
            merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            lines = values.setdefault(family.name, {})
            fold = FOLDS.get(family.name, _add)
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                lines[key] = fold(lines[key], sample.value) if key in lines else sample.value
    for name, lines in values.items():
        for (line, labels), value in lines.items():
            merged[name].add_sample(line, dict(labels), value)
    return list(merged.values())


def growing(page: Sequence[Metric]) -> list[Metric]:
    """Return the families that outlive their process: counters, histograms and summaries.

    Names that clients choose come and go: of topics and clients only the first MOST_NAMES_KEPT series are kept.
    """
    kept = [family for family in page if family.type in _GROWING]
    for family in kept:
        if family.name.startswith(_BY_NAME):
            del family.samples[MOST_NAMES_KEPT:]
    return kept


_NO_BROKER: Final = ("", "other")


def of_known_brokers(families: Sequence[Metric]) -> Sequence[Metric]:
    """Leave out what was counted of brokers that no process knows any more; return the same families."""
    known = {*_NO_BROKER}
    for family in families:
        if family.name == "kproxy_broker_up":
            known.update(sample.labels["broker"] for sample in family.samples)
    for family in families:
        family.samples = [each for each in family.samples if each.labels.get("broker", "") in known]
    return families


class Families(Collector):
    """A collector of families that exist already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(collectors: Iterable[Collector], accept: str) -> tuple[bytes, str]:
    """Render the page in the format that an HTTP Accept header asks for.

    Returns the page and its content type.
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


def gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)


def counter_by(
    name: str, documentation: str, labels: Sequence[str], series: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Make a counter with labels; each of `series` has its values of `labels`."""
    return _filled(CounterMetricFamily(name, documentation, labels=labels), series)


def gauge_by(
    name: str, documentation: str, labels: Sequence[str], series: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Make a gauge with labels, as `counter_by`."""
    return _filled(GaugeMetricFamily(name, documentation, labels=labels), series)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, series: Iterable[tuple[Sequence[str], float]]) -> Metric:
    for values, value in series:
        family.add_metric(values, value)
    return family


class Counted(Protocol):
    """What a histogram counted: one number for each bucket, not cumulated, and one for values beyond `bounds`."""

    @property
    def bounds(self) -> Sequence[float]: ...

    @property
    def buckets(self) -> Sequence[int]: ...

    @property
    def seconds(self) -> float: ...


def histogram(
    name: str, documentation: str, series: Iterable[tuple[Sequence[str], Counted]], labels: Sequence[str] = ()
) -> Metric:
    """Make a histogram; each of `series` has its values of `labels`."""
    family = HistogramMetricFamily(name, documentation, labels=labels)
    for values, counted in series:
        names = [*map(str, counted.bounds), "+Inf"]
        buckets = [*zip(names, map(float, accumulate(counted.buckets)), strict=True)]
        family.add_metric(values, buckets, counted.seconds)
    return family

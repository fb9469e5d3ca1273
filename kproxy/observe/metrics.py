"""Make the Prometheus families of this process, when `/metrics` is requested. docs/metrics.md describes them."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from kproxy.config import Limits
from kproxy.installed import commit, version
from kproxy.observe.busiest import Busiest
from kproxy.observe.exposition import counter, counter_by, gauge, gauge_by, histogram, this_process
from kproxy.observe.table import TableView
from kproxy.observe.tally import (
    BROKER_BOUNDS_S,
    BROKER_ERRORS,
    OTHER_BROKERS,
    OTHER_VERSION,
    STAGES,
    VERSION_BITS,
    BrokerCounts,
    Tally,
)
from kproxy.plain import compiled
from kproxy.routing.retry import event_name
from kproxy.routing.topology import NO_OWNER
from kproxy.trail.shipper import ShipperVitals
from kproxy_codec import api_keys, error_codes


@dataclass(frozen=True, slots=True)
class BrokerVitals:
    """The known state of a broker. `oldest_s` is the longest present wait of a request for it, in seconds."""

    up: bool
    hung: bool = False
    in_flight: int = 0
    oldest_s: float = 0.0
    in_flight_bytes: int = 0


class SlowClient(NamedTuple):
    """A client connection that keeps the proxy waiting; the fields are those of overview.ClientLine."""

    slow_s: float
    slow_at: str
    client_id: str
    principal: str
    address: str


@dataclass(frozen=True, slots=True)
class Vitals:
    """The state at this moment.

    `brokers` has, by id, the brokers of the table, and those that have left it lately; `upstream_connections` the
    number of open connections to a broker.

    `most_requests` and `most_bytes` are the most that one client connection has in flight. `slow`: the slowest clients,
    the slowest first.

    `own_claims` counts the claims that clients of this process hold, `own_members` the processes that can hold claims,
    `own_unsettled` the partitions whose claims wait for writes of earlier claimants through this process.
    """

    client_connections: int = 0
    paused_connections: int = 0
    upstream_connections: Mapping[int, int] = field(default_factory=dict)
    in_flight_requests: int = 0
    in_flight_bytes: int = 0
    most_requests: int = 0
    most_bytes: int = 0
    slow: Sequence[SlowClient] = ()
    limits: Limits = field(default_factory=Limits)
    brokers: Mapping[int, BrokerVitals] = field(default_factory=dict)
    draining: bool = False
    half_open_connections: int = 0
    half_open_limit: int = 0
    # When certificates end, in seconds since the epoch, by their use and the name of the listener.
    certificates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    own_claims: int = 0
    own_members: int = 0
    own_unsettled: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ProxyCollector(Collector):
    """The families of one serving process, at one moment.

    `counters` are named events: `splits`, `deadlines` and so on.
    """

    tally: Tally
    counters: Mapping[str, int]
    table: TableView
    vitals: Vitals
    shipping: ShipperVitals | None = None

    def collect(self) -> Iterable[Metric]:
        yield from self.of_clients()
        yield from self.of_brokers().collect()

    def of_brokers(self) -> BrokersCollector:
        """Return the collector of the families about brokers."""
        return BrokersCollector(self.vitals.brokers, self.tally)

    def of_clients(self) -> Iterable[Metric]:
        """Yield all other families."""
        yield build_info()
        yield from _traffic(self.tally, self.vitals)
        yield from _limits(self.vitals)
        yield from _outcomes(self.tally, self.counters, self.vitals.brokers)
        yield from _named("topic", self.tally.topics, "Produce requests that name a topic", _TOPIC_BYTES)
        yield from _busiest_partitions(self.tally.topics)
        yield from _named("client_id", self.tally.clients, "Requests of a client", _CLIENT_BYTES)
        if self.tally.clients is not None:
            yield _slow(self.vitals.slow)
        yield from _connections(self.vitals, self.counters)
        yield from _tls(self.vitals, self.counters)
        yield from _table(self.table)
        yield from _fleet(self.table, self.counters)
        yield from _claims(self.vitals, self.counters)
        yield from _security(self.counters)
        yield from _audit(self.shipping, self.counters)


class WorkersCollector(Collector):
    """The worker processes: whether each serves, and the number of restarts."""

    def __init__(self, up: Mapping[int, bool], restarts: int) -> None:
        self._up = up
        self._restarts = restarts

    def collect(self) -> Iterable[Metric]:
        yield gauge("kproxy_workers", "Configured worker processes.", len(self._up))
        up = [([str(number)], int(is_up)) for number, is_up in sorted(self._up.items())]
        yield gauge_by("kproxy_worker_up", "1 while a worker serves and answers.", ["worker"], up)
        yield counter("kproxy_worker_restarts", "Workers restarted after they ended.", self._restarts)


class ProcessesCollector(Collector):
    """The system's numbers of several processes, by the label `worker`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, pid in self._pids.items():
            # An unused registry: the collector requires one.
            for metric in ProcessCollector(pid=partial(int, pid), registry=CollectorRegistry()).collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.add_sample(sample.name, {**sample.labels, "worker": name}, sample.value)
        return families.values()


def own_process() -> Iterable[Collector]:
    """The further collectors of a process without workers."""
    return *this_process(), WorkersCollector({1: True}, 0)


DENIED: Final = "principal.denied."


def denials_of(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the number of operations that ACLs have denied, by principal."""
    return {key.removeprefix(DENIED): count for key, count in list(counters.items()) if key.startswith(DENIED)}


@cache
def build_info() -> Metric:
    """Return the gauge that tells what runs; the first call may take a moment."""
    what = [version(), commit(), platform.python_version()]
    return gauge_by("kproxy_build_info", "1, with what runs.", ["version", "commit", "python"], [(what, 1)])


def _limits(vitals: Vitals) -> Iterable[Metric]:
    """Yield limits, and what is not shown elsewhere of their use."""
    limits = vitals.limits
    text = "The most client connections (limits.max_connections)."
    yield gauge("kproxy_client_connections_limit", text, limits.max_connections)
    text = "The bytes in flight beyond which no client is read (limits.max_in_flight_bytes_total)."
    yield gauge("kproxy_in_flight_bytes_limit", text, limits.max_in_flight_bytes_total)
    text = "The most half-open connections of all listeners that have a handshake (limits.max_half_open of each)."
    yield gauge("kproxy_half_open_connections_limit", text, vitals.half_open_limit)
    text = "Requests in flight of the client connection that has the most."
    yield gauge("kproxy_connection_in_flight_requests_max", text, vitals.most_requests)
    text = "The requests in flight at which a client connection is not read (limits.max_open_requests)."
    yield gauge("kproxy_connection_in_flight_requests_limit", text, limits.max_open_requests)
    text = "Bytes in flight of the client connection that has the most."
    yield gauge("kproxy_connection_in_flight_bytes_max", text, vitals.most_bytes)
    text = "The bytes in flight at which a client connection is not read (limits.max_in_flight_bytes)."
    yield gauge("kproxy_connection_in_flight_bytes_limit", text, limits.max_in_flight_bytes)


def _traffic(tally: Tally, vitals: Vitals) -> Iterable[Metric]:
    requests = [
        ([api_keys.name_of(key >> VERSION_BITS), _version(key & OTHER_VERSION)], count)
        for key, count in sorted(tally.requests.items())
    ]
    yield counter_by("kproxy_requests", "Requests received.", ["api", "version"], requests)
    yield counter("kproxy_client_received_bytes", "Bytes received from clients.", tally.received_bytes)
    yield counter("kproxy_client_sent_bytes", "Bytes sent to clients.", tally.sent_bytes)
    yield gauge("kproxy_in_flight_requests", "Requests that are not answered yet.", vitals.in_flight_requests)
    yield gauge(
        "kproxy_in_flight_bytes",
        "Bytes of requests that are arriving or not answered yet, and of answers that clients have not taken.",
        vitals.in_flight_bytes,
    )
    yield histogram(
        "kproxy_produce_duration_seconds",
        "Produce requests, from the first byte until the answer has its turn.",
        [((), tally.produce)],
    )
    yield histogram(
        "kproxy_produce_stage_seconds",
        "Parts of that time, and of the answer's way to the kernel, by the stage that they were spent in.",
        [([stage], getattr(tally, stage)) for stage in STAGES],
        ["stage"],
    )
    yield histogram(
        "kproxy_event_loop_delay_seconds",
        "Delay of the event loop's timers, measured ten times a second.",
        [((), tally.delays)],
    )


def _version(version: int) -> str:
    return "other" if version == OTHER_VERSION else str(version)


def _outcomes(tally: Tally, counters: Mapping[str, int], brokers: Iterable[int]) -> Iterable[Metric]:
    shown = {OTHER_BROKERS, NO_OWNER, *brokers}
    errors = [
        ([api_keys.name_of(api_key), error_codes.name_of(error_code), _broker(broker)], count)
        for (api_key, error_code, broker), count in sorted(tally.errors.items())
        if broker in shown
    ]
    text = "Partitions answered with an error code, by its name and the broker they were sent to last."
    yield counter_by("kproxy_errors", text, ["api", "error", "broker"], errors)
    retries = [
        ([event_name(event), _broker(broker)], count)
        for (event, broker), count in sorted(tally.retries.items())
        if broker in shown
    ]
    text = "Partitions that are sent again, by cause and broker."
    yield counter_by("kproxy_retries", text, ["cause", "broker"], retries)
    yield counter("kproxy_split_requests", "Requests that went to more than one broker.", counters.get("splits", 0))
    yield counter(
        "kproxy_plain_path_requests",
        "Produce requests sent on the plain path, which costs least: earlier batches of their partitions succeeded.",
        tally.plain_requests,
    )
    yield counter(
        "kproxy_plain_path_left",
        "Of these, requests that left it before their answer, for an error, a move or a lost connection.",
        counters.get("plain.left", 0),
    )
    yield counter("kproxy_deadlines", "Requests that were answered at their deadline.", counters.get("deadlines", 0))
    drops = [
        ([_text(topic), error_codes.name_of(error_code)], count)
        for topic, reasons in tally.drops.items()
        for error_code, count in reasons.items()
    ]
    yield counter_by("kproxy_acks0_dropped", "acks=0 batches that are lost.", ["topic", "reason"], drops)
    text = "acks=0 batches sent shortly before a broker's connection ended: it is unknown whether they arrived."
    unconfirmed = [([_text(topic)], count) for topic, count in sorted(tally.unconfirmed.items())]
    yield counter_by("kproxy_acks0_unconfirmed", text, ["topic"], unconfirmed)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


_TOPIC_BYTES = {"bytes": (1, "Bytes of its batches")}
_CLIENT_BYTES = {"received_bytes": (1, "Bytes received from a client"), "sent_bytes": (2, "Bytes sent to a client")}


def _named(of: str, busiest: Busiest | None, requests: str, more: Mapping[str, tuple[int, str]]) -> Iterable[Metric]:
    """Yield the counters of the busiest."""
    if busiest is None:
        return
    rows = [([*map(_text, name)], counts) for name, counts in busiest.read()]
    for name, (place, text) in {"requests": (0, requests), **more}.items():
        series = [(labels, counts[place]) for labels, counts in rows]
        text = f"{text}: the busiest by name, all others as other."
        yield counter_by(f"kproxy_{of}_{name}", text, busiest.labels, series)


def _busiest_partitions(topics: Busiest | None) -> Iterable[Metric]:
    if topics is None:
        return
    text = "Bytes of the batches of a topic's busiest partition, since it is the busiest."
    series = [([_text(topic), str(partition)], count) for (topic,), partition, count in topics.partitions()]
    yield counter_by("kproxy_topic_busiest_partition_bytes", text, ["topic", "partition"], series)


def _slow(clients: Sequence[SlowClient]) -> Metric:
    text = "For how long a client has kept the proxy waiting, by sending a request or not reading answers: the slowest."
    # Of each name, the slowest.
    worst = {(each.client_id, each.principal, each.slow_at): each.slow_s for each in reversed(clients)}
    return gauge_by("kproxy_client_id_slow_seconds", text, ["client_id", "principal", "at"], worst.items())


def _broker(broker: int) -> str:
    """Return the label of a broker: empty for none."""
    return "other" if broker == OTHER_BROKERS else "" if broker == NO_OWNER else str(broker)


def _connections(vitals: Vitals, counters: Mapping[str, int]) -> Iterable[Metric]:
    yield gauge("kproxy_client_connections", "Open client connections.", vitals.client_connections)
    yield gauge(
        "kproxy_paused_connections",
        "Client connections that are not read because the process holds too many bytes in flight.",
        vitals.paused_connections,
    )
    yield gauge(
        "kproxy_plain_path_compiled",
        "1 where the compiled plain path runs, 0 where Python does its work at a higher cost.",
        int(compiled is not None),
    )
    upstream = [
        ([_broker(broker)], vitals.upstream_connections.get(broker, 0))
        for broker in sorted(vitals.brokers.keys() | vitals.upstream_connections.keys())
    ]
    yield gauge_by("kproxy_upstream_connections", "Connections to brokers.", ["broker"], upstream)
    yield counter("kproxy_client_connections_accepted", "Client connections.", counters.get("clients.accepted", 0))
    yield counter(
        "kproxy_client_connections_refused",
        "Client connections closed at once, because of too many connections or too few open files.",
        counters.get("clients.too_many", 0),
    )
    yield counter(
        "kproxy_client_connections_cut",
        "Client connections closed because of an invalid request, or because the error has no response.",
        counters.get("clients.refused", 0),
    )
    yield counter(
        "kproxy_client_connections_idle_closed",
        "Client connections closed because they asked for nothing (limits.idle_s).",
        counters.get("clients.idle", 0),
    )
    yield counter(
        "kproxy_producer_ids", "Producer ids that the proxy assigned.", counters.get("producer_ids.given_out", 0)
    )
    yield counter(
        "kproxy_producer_ids_refused",
        "Producers without a producer id, because etcd did not answer.",
        counters.get("producer_ids.refused", 0),
    )
    yield gauge("kproxy_draining", "1 from SIGTERM until the process ends.", int(vitals.draining))


_BROKER_GAUGES: Mapping[str, tuple[str, Callable[[BrokerVitals], float]]] = {
    "kproxy_broker_up": (
        "1 while a broker can be reached and answers; 0 also after it has left the table.",
        lambda broker: broker.up,
    ),
    "kproxy_broker_hung": ("1 while a broker hangs: nothing is sent to it.", lambda broker: broker.hung),
    "kproxy_broker_in_flight_requests": (
        "Requests of clients that a broker has not answered yet.",
        lambda broker: broker.in_flight,
    ),
    "kproxy_broker_in_flight_bytes": ("Bytes of these requests.", lambda broker: broker.in_flight_bytes),
    "kproxy_broker_oldest_request_age_seconds": (
        "Time for which the request that waits longest for a broker has been the next to be answered.",
        lambda broker: broker.oldest_s,
    ),
}


_BROKER_COUNTERS: Mapping[str, tuple[str, Callable[[BrokerCounts], int]]] = {
    "kproxy_broker_dials": ("Connections to a broker that were tried.", lambda counts: counts.dials),
    "kproxy_broker_sent_bytes": ("Bytes of requests sent to a broker.", lambda counts: counts.sent_bytes),
    "kproxy_broker_received_bytes": ("Bytes of a broker's answers.", lambda counts: counts.received_bytes),
}
_NO_COUNTS = BrokerCounts(BROKER_BOUNDS_S)


def _shown(brokers: Iterable[int], counted: Iterable[int]) -> list[int]:
    """Return the brokers that have series: those of the vitals, and the ids that stand for several or none.

    The series of a broker, with all its counts, end some time after it has left the table.
    """
    return sorted(set(brokers).union(each for each in counted if each in (OTHER_BROKERS, NO_OWNER)))


class BrokersCollector(Collector):
    """The families about brokers. Counters begin at 0, so that their first increase shows.

    There may be many brokers: `collect` may run in another thread, while requests are counted.
    """

    def __init__(self, brokers: Mapping[int, BrokerVitals], tally: Tally) -> None:
        self._brokers = dict(sorted(brokers.items()))
        self._hangs = {each: tally.hangs[each] for each in _shown(brokers, tally.hangs)}
        self._probes = {
            each: (tally.probes[each], tally.probe_seconds.get(each, 0.0)) for each in _shown(brokers, tally.probes)
        }
        self._counts = {each: tally.by_broker.get(each, _NO_COUNTS) for each in _shown(brokers, tally.by_broker)}

    def collect(self) -> Iterable[Metric]:
        hung = sum(broker.hung for broker in self._brokers.values())
        yield gauge("kproxy_hung_brokers", "Brokers that hang: nothing is sent to them.", hung)
        for name, (text, value_of) in _BROKER_GAUGES.items():
            values = [([str(broker)], float(value_of(vitals))) for broker, vitals in self._brokers.items()]
            yield gauge_by(name, text, ["broker"], values)
        hangs = [([_broker(broker)], count) for broker, count in self._hangs.items()]
        yield counter_by("kproxy_hangs", "Brokers found to hang.", ["broker"], hangs)
        probes = SummaryMetricFamily(
            "kproxy_broker_probe_duration_seconds",
            "Probes of a broker that lets a request wait, from the question to the answer or until they are given up.",
            labels=["broker"],
        )
        for broker, (count, seconds) in self._probes.items():
            probes.add_metric([_broker(broker)], count, seconds)
        yield probes
        yield from self._of_connections()

    def _of_connections(self) -> Iterable[Metric]:
        for name, (text, count_of) in _BROKER_COUNTERS.items():
            yield counter_by(
                name, text, ["broker"], [([_broker(each)], count_of(counts)) for each, counts in self._counts.items()]
            )
        failures = [
            ([_broker(broker), kind], counts.errors[kind])
            for broker, counts in self._counts.items()
            for kind in BROKER_ERRORS
        ]
        text = "Errors of connections to a broker, by kind."
        yield counter_by("kproxy_broker_connection_errors", text, ["broker", "kind"], failures)
        yield histogram(
            "kproxy_broker_request_seconds",
            "Time from a request's hand-over to a broker until its answer. A fetch includes its wait for data.",
            [
                ([_broker(broker), api_keys.name_of(api_key)], times)
                for broker, counts in self._counts.items()
                for api_key, times in ((api_keys.PRODUCE, counts.produce), (api_keys.FETCH, counts.fetch))
            ],
            ["broker", "api"],
        )


_OUTCOMES = ("done", "failed")


def expiry(certificates: Mapping[tuple[str, str], float]) -> Metric:
    """Return the gauge of certificates' ends, which are as in Vitals."""
    text = "When a certificate in use ends, as Unix time."
    ends = sorted(certificates.items())
    return gauge_by("kproxy_tls_certificate_expiry_timestamp_seconds", text, ["use", "listener"], ends)


def _by(label: str, values: Iterable[str], name: str, text: str, counters: Mapping[str, int], prefix: str) -> Metric:
    """Return a counter with one label; those of its values are in `counters` under `prefix` and the value."""
    return counter_by(name, text, [label], [([value], counters.get(prefix + value, 0)) for value in values])


def reloads(counters: Mapping[str, int]) -> Metric:
    """Return the counter of reloads."""
    text = "Reloads of the files of TLS, users, tokens and their keys, ACLs and quotas, and of users and rules in etcd."
    return _by("outcome", _OUTCOMES, "kproxy_tls_reloads", text, counters, "tls.reloads.")


def config_reloads(counters: Mapping[str, int]) -> Iterable[Metric]:
    """Yield the counters and gauges of reloads of the configuration; none in a worker, whose supervisor has them."""
    if "config.since" in counters:
        text = "Readings of the configuration again (SIGHUP), by outcome."
        yield _by("outcome", _OUTCOMES, "kproxy_config_reloads", text, counters, "config.reloads.")
        text = "Whether the last reading of the configuration succeeded: 1, else 0."
        yield gauge("kproxy_config_last_reload_successful", text, counters["config.successful"])
        text = "When the configuration in force was read, as Unix time."
        yield gauge("kproxy_config_last_reload_success_timestamp_seconds", text, counters["config.since"])


def events_lost(counters: Mapping[str, int]) -> Metric:
    """Return the counter of lost security events."""
    text = "Security events that could not be written to access.events."
    return counter("kproxy_security_events_lost", text, counters.get("security.events_lost", 0))


def page_connections(counters: Mapping[str, int]) -> Iterable[Metric]:
    """The counters of the admin page's handshakes, and of connections that it has closed without an answer."""
    text = "Ended TLS handshakes of connections to the admin page, by outcome."
    yield _handshakes("kproxy_admin_handshakes", text, counters, "page.handshakes.")
    text = "Connections to the admin page closed because no request arrived, or for others."
    yield _by("reason", ("idle", "crowded"), "kproxy_admin_connections_cut", text, counters, "page.cut.")


def _handshakes(name: str, text: str, counters: Mapping[str, int], counted_as: str) -> Metric:
    ended = [
        ([key.removeprefix(counted_as).removeprefix("failed.")], count)
        for key, count in sorted(counters.items())
        if key.startswith(counted_as)
    ]
    return counter_by(name, text, ["outcome"], ended)


def _tls(vitals: Vitals, counters: Mapping[str, int]) -> Iterable[Metric]:
    yield expiry(vitals.certificates)
    yield from config_reloads(counters)
    yield reloads(counters)
    yield from page_connections(counters)
    text = "Attempts to fetch the keys of tokens from their issuer."
    yield _by("outcome", _OUTCOMES, "kproxy_token_key_fetches", text, counters, "oauth.fetches.")
    yield gauge(
        "kproxy_half_open_connections",
        "Client connections that have not finished their TLS handshake or PROXY protocol header.",
        vitals.half_open_connections,
    )
    text = "Ended TLS handshakes and PROXY protocol headers of clients, by outcome."
    yield _handshakes("kproxy_client_handshakes", text, counters, "tls.handshakes.")


def _table(view: TableView) -> Iterable[Metric]:
    topology = view.topology
    for name, text, value in (
        ("kproxy_table_revision", "The highest revision seen.", topology.revision),
        ("kproxy_table_age_seconds", "Time since the ownership source last answered.", view.age_s),
        ("kproxy_table_stale", "1 while the table is older than the limit.", int(view.stale)),
    ):
        yield gauge_by(name, text, ["source"], [([view.source], value)] if math.isfinite(value) else [])
    text = "Partitions that got another owner, or one again, by topic."
    changes = [([_text(topic)], count) for topic, count in sorted(topology.owner_changes.items())]
    yield counter_by("kproxy_owner_changes", text, ["topic"], changes)
    yield gauge("kproxy_table_partitions", "Partitions that have an owner.", topology.owned_count)
    yield gauge("kproxy_table_brokers", "Brokers with an address.", len(topology.brokers))


def _fleet(view: TableView, counters: Mapping[str, int]) -> Iterable[Metric]:
    yield gauge("kproxy_fleet_proxies", "Proxies that metadata names to clients.", len(view.proxies))
    yield registered(view.registration)
    text, prefix = "Proxies' entries in etcd that could not be parsed.", "fleet.skipped."
    skipped = [(name.removeprefix(prefix), n) for name, n in sorted(counters.items()) if name.startswith(prefix)]
    yield counter_by("kproxy_fleet_keys_skipped", text, ["reason"], [([reason], count) for reason, count in skipped])


# Outcomes of requests for a resource; counters are named after them.
_OWN_OUTCOMES = ("granted", "fenced", "timed_out", "refused")
_OWN_GATED = {"PRODUCE": "own.gated", "FETCH": "own.fetch_gated"}


def _claims(vitals: Vitals, counters: Mapping[str, int]) -> Iterable[Metric]:
    yield gauge("kproxy_own_claims", "Claims that clients of this process hold.", vitals.own_claims)
    yield gauge("kproxy_own_members", "Processes that can hold claims.", vitals.own_members)
    yield gauge(
        "kproxy_own_unsettled_partitions",
        "Unsettled partitions: an earlier claimant may still write to them.",
        vitals.own_unsettled,
    )
    text = "Requested resources, by outcome."
    yield _by("outcome", _OWN_OUTCOMES, "kproxy_own_requests", text, counters, "own.")
    yield counter(
        "kproxy_own_severed", "Client connections severed because they lost a claim.", counters.get("own.severed", 0)
    )
    yield counter(
        "kproxy_own_released",
        "Partitions released at their leaders, without a claimant.",
        counters.get("own.released", 0),
    )
    text = "Partitions refused to clients without a claim of them."
    gated = [([api], counters.get(name, 0)) for api, name in _OWN_GATED.items()]
    yield counter_by("kproxy_own_gated", text, ["api"], gated)
    yield counter("kproxy_own_keys_skipped", "Claims in etcd that could not be parsed.", counters.get("own.skipped", 0))


def _security(counters: Mapping[str, int]) -> Iterable[Metric]:
    named = [(name.split("."), count) for name, count in sorted(counters.items())]
    text = "Attempts of clients to authenticate, by mechanism and outcome."
    attempts = [([".".join(parts[2:]), parts[1]], count) for parts, count in named if parts[0] == "sasl"]
    yield counter_by("kproxy_authentications", text, ["mechanism", "outcome"], attempts)
    text = "Operations on resources that ACLs deny, or with access.dry_run would deny."
    denials = [
        ([parts[3], parts[2], str(parts[1] == "denied").lower()], count)
        for parts, count in named
        if parts[0] == "access"
    ]
    yield counter_by("kproxy_denials", text, ["resource", "operation", "enforced"], denials)
    text = "The same by principal; after the first 100 all others are other."
    by_principal = [([principal], count) for principal, count in sorted(denials_of(counters).items())]
    yield counter_by("kproxy_principal_denials", text, ["principal"], by_principal)
    yield events_lost(counters)
    yield counter(
        "kproxy_throttled_requests",
        "Requests that exceeded a quota: their clients were not read for a while.",
        counters.get("quotas.throttled", 0),
    )


_AUDIT_COUNTERS = {
    "overlaps": "Ranges of offsets that were assigned twice.",
    "overlapping_records": "Offsets that were assigned twice.",
    "rows_shipped": "Rows of the audit trail that the sink has stored.",
    "rows_dropped": "Lost rows of the audit trail: the acknowledgements in them cannot be proven.",
    "pages_dropped": "Lost pages of the audit trail.",
    "sink_failures": "Failed writes to the audit sink.",
}


def _audit(shipping: ShipperVitals | None, counters: Mapping[str, int]) -> Iterable[Metric]:
    for name, documentation in _AUDIT_COUNTERS.items():
        yield counter(f"kproxy_audit_{name}", documentation, counters.get(f"audit.{name}", 0))
    if shipping is not None:
        yield gauge(
            "kproxy_audit_waiting_bytes",
            "Bytes of the audit trail that the sink has not stored yet.",
            shipping.waiting_bytes,
        )
        yield gauge("kproxy_audit_waiting_bytes_limit", "The bytes beyond which rows are lost.", shipping.max_bytes)
        yield gauge(
            "kproxy_audit_age_seconds",
            "Time since the audit sink last stored rows, or since the start of the process.",
            shipping.age_s,
        )


def registered(registration: str) -> Metric:
    """Return the gauge of the registration: one of several processes has the entry."""
    value = int(registration == "registered")
    return gauge("kproxy_fleet_registered", "1 while this proxy has its own entry in the fleet.", value)

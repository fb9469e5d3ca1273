"""The admin page of a broker.

It has `/metrics`, `/livez`, `/readyz`, and `/`, a short summary for people.

`/metrics` has the broker's replicas, its lease and its disk as Prometheus families, made on request. docs/metrics.md
explains each family. Totals count all replicas on this broker; series of single partitions are limited to the first
MAX_PARTITION_SERIES by topic and index, to bound the page.

Replicas are read on the event loop, LOOKED_AT_ONCE at a time; families are built from that without the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kproxy.broker.cluster import NO_OWNER, ClusterView
from kproxy.broker.disk import FLUSH_BOUNDS_S, FLUSHES
from kproxy.broker.partition import Partition
from kproxy.broker.replica_manager import ReplicaManager
from kproxy.broker.replication.isr_keeper import IsrKeeper
from kproxy.broker.replication.partition_replication import UNKNOWN_OFFSET, Role
from kproxy.observe.exposition import counter, gauge, histogram, render, this_process
from kproxy.observe.http_page import Readiness

MAX_PARTITION_SERIES = 1_000
LOOKED_AT_ONCE = 50
_LABELS = ("topic", "partition")
# The most under-replicated partitions that the summary lists.
MAX_LINES = 20


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """The broker's status at a moment, for its admin page.

    `problem`: why clients should not be sent here, or empty. `lease_lapses`: how often the lease was renewed only after
    it might have ended. `etcd_silent_s`: time since etcd was last heard, infinite before that.
    `certificates`: when they end, in seconds since the epoch, by use; `handshakes`: ended TLS handshakes, by use and
    outcome. The uses are `listener` and `replication`.
    """

    problem: str
    lease_remaining_s: float
    lease_lapses: int
    lease_losses: int
    etcd_silent_s: float
    client_connections: int
    follower_connections: int
    certificates: Mapping[str, float] = field(default_factory=dict)
    handshakes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class FollowerState(NamedTuple):
    """A follower as its leader knows it. `lag_records` counts the whole log before it `has_told` anything."""

    node_id: int
    has_told: bool
    lag_records: int
    behind_s: float
    is_in_sync: bool


class ReplicaState(NamedTuple):
    """One replica on this broker. Fields that only leaders know are 0 on others; a leader has a live lease."""

    topic: str
    partition_index: int
    is_leader: bool
    high_watermark: int
    log_start_offset: int
    log_end_offset: int
    leader_epoch: int
    is_dirty: bool
    has_failed: bool
    is_stopped: bool
    producers: int
    isr_size: int = 0
    min_insync_replicas: int = 0
    waiters: int = 0
    followers: Sequence[FollowerState] = ()

    @property
    def replicas(self) -> int:
        return 1 + len(self.followers)

    @property
    def is_under_replicated(self) -> bool:
        return self.is_leader and self.isr_size < self.replicas

    @property
    def is_under_min_isr(self) -> bool:
        return self.is_leader and self.isr_size < self.min_insync_replicas


def state_of(partition: Partition) -> ReplicaState:
    """Read the state of a replica at this moment."""
    log, replication = partition.log, partition.replication
    is_leader, start, end = partition.serves_reads(), log.log_start_offset, log.log_end_offset
    state = ReplicaState(
        partition.topic,
        partition.partition_index,
        is_leader,
        replication.high_watermark,
        start,
        end,
        replication.leader_epoch,
        log.is_dirty,
        partition.disk_fails,
        bool(partition.failure),
        len(log.producers),
    )
    if not is_leader:
        return state
    followers = []
    for node_id, (told, behind_s) in sorted(replication.follower_progress().items()):
        lag_records, is_in_sync = max(end - max(told, start), 0), replication.is_in_sync(node_id)
        followers.append(FollowerState(node_id, told != UNKNOWN_OFFSET, lag_records, behind_s, is_in_sync))
    return state._replace(
        isr_size=len(replication.isr.members),
        min_insync_replicas=replication.min_insync_replicas,
        waiters=replication.waiting,
        followers=followers,
    )


async def states_of(hosted: Mapping[tuple[bytes, int], Partition]) -> list[ReplicaState]:
    """Read the states of all replicas on this broker, by topic and index, each at its own moment."""
    states = []
    for position, (_, partition) in enumerate(sorted(hosted.items())):
        if partition.role is not Role.CLOSED:
            states.append(state_of(partition))
        if position % LOOKED_AT_ONCE == LOOKED_AT_ONCE - 1:
            await asyncio.sleep(0)
    return states


@dataclass(frozen=True, slots=True)
class BrokerCounts:
    """Counts of the broker as a whole.

    `leases`: partition keys on its lease, as etcd says. `ended`: ended leaderships by reason. `not_opened`: logs.
    `disk_fails`: the disk as a whole.
    """

    leases: int
    live_brokers: int
    offline: int
    not_opened: int
    disk_fails: bool
    ended: Mapping[str, int]
    shrinks: int
    expansions: int


async def counts_of(
    node_id: int, view: ClusterView, replica_manager: ReplicaManager, isr_keeper: IsrKeeper
) -> BrokerCounts:
    """Read the counts of this moment.

    Every broker counts the offline partitions of all: those whose brokers are all dead have nobody else to count them.
    """
    held = offline = 0
    partitions = [(topic, index) for topic in view.topics.values() for index in range(len(topic.replicas))]
    for position, (topic, index) in enumerate(partitions):
        ownership, broker = view.ownership(topic.name, index), view.brokers.get(node_id)
        held += ownership is not None and broker is not None and ownership.lease_id == broker.lease_id
        offline += view.owner(topic.name, index) == NO_OWNER and view.state(topic, index) is not None
        if position % LOOKED_AT_ONCE == LOOKED_AT_ONCE - 1:
            await asyncio.sleep(0)
    return BrokerCounts(
        held,
        len(view.brokers),
        offline,
        replica_manager.replicas.not_opened,
        bool(replica_manager.disk.failure),
        dict(replica_manager.ended),
        isr_keeper.shrinks,
        isr_keeper.expansions,
    )


class BrokerCollector(Collector):
    """The Prometheus families of one status, its counts and replica states."""

    def __init__(self, status: BrokerStatus, counts: BrokerCounts, states: Sequence[ReplicaState]) -> None:
        self._status = status
        self._counts = counts
        self._states = states

    def collect(self) -> Iterable[Metric]:
        yield from _replicas(self._counts, self._states)
        yield from _in_sync(self._counts, [state for state in self._states if state.is_leader])
        yield from _lease(self._status, self._counts)
        yield from _tls(self._status)
        yield from _disk(self._counts, self._states)
        yield from _partitions(self._states[:MAX_PARTITION_SERIES])


def _replicas(counts: BrokerCounts, states: Sequence[ReplicaState]) -> Iterable[Metric]:
    yield gauge("kproxy_broker_partitions", "Replicas on this broker.", len(states))
    yield gauge(
        "kproxy_broker_partitions_without_series",
        "Replicas that are only in the totals, because there are too many for a series each.",
        max(len(states) - MAX_PARTITION_SERIES, 0),
    )
    led = sum(state.is_leader for state in states)
    yield gauge("kproxy_broker_led_partitions", "Partitions that this broker leads.", led)
    yield gauge(
        "kproxy_broker_leases",
        "Partition leases in etcd that this broker holds; briefly more or fewer than it leads.",
        counts.leases,
    )
    yield gauge(
        "kproxy_broker_offline_partitions",
        "Partitions of the cluster that had a leader and have none now.",
        counts.offline,
    )
    yield gauge("kproxy_broker_live_brokers", "Live brokers in etcd.", counts.live_brokers)


def _in_sync(counts: BrokerCounts, led: Sequence[ReplicaState]) -> Iterable[Metric]:
    yield gauge(
        "kproxy_broker_under_replicated_partitions",
        "Led partitions with a replica that is not in sync.",
        sum(state.is_under_replicated for state in led),
    )
    yield gauge(
        "kproxy_broker_under_min_isr_partitions",
        "Led partitions with fewer replicas in sync than min.insync.replicas: acks=all is refused.",
        sum(state.is_under_min_isr for state in led),
    )
    yield gauge(
        "kproxy_broker_max_follower_lag_records",
        "The highest lag of a follower of a led partition, in records.",
        max((follower.lag_records for state in led for follower in state.followers), default=0),
    )
    yield gauge(
        "kproxy_broker_waiters",
        "Producers that wait for in-sync replicas (acks=all), including timed-out ones until the next sweep.",
        sum(state.waiters for state in led),
    )
    yield counter("kproxy_broker_isr_shrinks", "ISRs that lost a member.", counts.shrinks)
    yield counter("kproxy_broker_isr_expansions", "ISRs that gained a member.", counts.expansions)


def _lease(now: BrokerStatus, counts: BrokerCounts) -> Iterable[Metric]:
    yield gauge("kproxy_broker_ready", "1 while the broker is ready for clients, as in /readyz.", int(not now.problem))
    yield gauge(
        "kproxy_broker_lease_remaining_seconds",
        "Time for which the broker's lease is certain to live; 0 without a lease.",
        now.lease_remaining_s,
    )
    yield counter(
        "kproxy_broker_lease_lapses",
        "Renewals of the broker's lease after its lease fence; the broker led nothing in between.",
        now.lease_lapses,
    )
    yield counter("kproxy_broker_lease_losses", "Losses of the broker's lease.", now.lease_losses)
    ended = CounterMetricFamily(
        "kproxy_broker_leaderships_ended", "Partitions that this broker stopped leading, by reason.", labels=["reason"]
    )
    for reason, count in sorted(counts.ended.items()):
        ended.add_metric([reason], count)
    yield ended
    if now.etcd_silent_s != float("inf"):
        yield gauge("kproxy_broker_etcd_age_seconds", "Time since etcd last answered.", now.etcd_silent_s)
    yield gauge("kproxy_broker_client_connections", "Open client connections.", now.client_connections)
    yield gauge(
        "kproxy_broker_follower_connections",
        "Follower brokers connected to this broker.",
        now.follower_connections,
    )


def _tls(now: BrokerStatus) -> Iterable[Metric]:
    ends = GaugeMetricFamily(
        "kproxy_broker_tls_certificate_expiry_timestamp_seconds",
        "When a certificate in use ends, as Unix time.",
        labels=["use"],
    )
    handshakes = CounterMetricFamily(
        "kproxy_broker_tls_handshakes", "Ended TLS handshakes of those who connect.", labels=["use", "outcome"]
    )
    for use, ends_at in now.certificates.items():
        ends.add_metric([use], ends_at)
        for outcome, count in sorted(now.handshakes.get(use, {}).items()):
            handshakes.add_metric([use, outcome], count)
    yield ends
    yield handshakes


def _disk(counts: BrokerCounts, states: Sequence[ReplicaState]) -> Iterable[Metric]:
    yield histogram(
        "kproxy_broker_flush_duration_seconds",
        "Flushes of segments to the disk (fsync).",
        FLUSH_BOUNDS_S,
        FLUSHES.buckets,
        FLUSHES.seconds,
    )
    dirty = sum(state.is_dirty for state in states)
    yield gauge("kproxy_broker_dirty_logs", "Logs with bytes to be flushed.", dirty)
    yield gauge(
        "kproxy_broker_failed_logs",
        "Logs that cannot be opened, read, written or flushed; all while the disk as a whole fails.",
        counts.not_opened + sum(counts.disk_fails or state.has_failed for state in states),
    )
    yield gauge(
        "kproxy_broker_stopped_replicas",
        "Followers that stopped, because their leader lacks records that are committed here.",
        sum(state.is_stopped for state in states),
    )
    yield gauge(
        "kproxy_broker_producer_ids",
        "Idempotent producers with state, counted once for each partition.",
        sum(state.producers for state in states),
    )


_OF_EACH: Mapping[str, tuple[str, Callable[[ReplicaState], int]]] = {
    "high_watermark": (
        "The high watermark: the offset after the last committed one.",
        lambda each: each.high_watermark,
    ),
    "log_start_offset": ("The first offset in the log.", lambda each: each.log_start_offset),
    "log_end_offset": ("The offset after the last one in the log.", lambda each: each.log_end_offset),
    "leader_epoch": ("The leader epoch of the replica; -1 without one.", lambda each: each.leader_epoch),
    "is_leader": ("1 if this broker leads the partition.", lambda each: int(each.is_leader)),
}
_OF_LED: Mapping[str, tuple[str, Callable[[ReplicaState], int]]] = {
    "replicas": ("Replicas, reported by the leader.", lambda each: each.replicas),
    "isr_size": ("Replicas in sync, reported by the leader.", lambda each: each.isr_size),
    "min_insync_replicas": (
        "Least in-sync replicas for acks=all, reported by the leader.",
        lambda each: each.min_insync_replicas,
    ),
}


def _partitions(shown: Sequence[ReplicaState]) -> Iterable[Metric]:
    led = [state for state in shown if state.is_leader]
    for of_these, families in ((shown, _OF_EACH), (led, _OF_LED)):
        for name, (documentation, value_of) in families.items():
            family = GaugeMetricFamily(f"kproxy_broker_partition_{name}", documentation, labels=_LABELS)
            for state in of_these:
                family.add_metric([state.topic, str(state.partition_index)], value_of(state))
            yield family
    labels = [*_LABELS, "follower"]
    lag = GaugeMetricFamily("kproxy_broker_follower_lag_records", "Records that a follower lacks.", labels=labels)
    behind = GaugeMetricFamily(
        "kproxy_broker_follower_behind_seconds", "Time since a follower had every record.", labels=labels
    )
    for state in led:
        for follower in state.followers:
            values = [state.topic, str(state.partition_index), str(follower.node_id)]
            lag.add_metric(values, follower.lag_records)
            behind.add_metric(values, follower.behind_s)
    yield lag
    yield behind


class BrokerPages:
    """The pages of the broker `node_id`."""

    def __init__(
        self,
        node_id: int,
        view: ClusterView,
        replica_manager: ReplicaManager,
        isr_keeper: IsrKeeper,
        status: Callable[[], BrokerStatus],
    ) -> None:
        self._node_id = node_id
        self._view = view
        self._replica_manager = replica_manager
        self._isr_keeper = isr_keeper
        self._status = status
        self._process = this_process()
        # A page of many partitions takes some tenths of a second of CPU time.
        self._page_lock = asyncio.Lock()

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        async with self._page_lock:
            counts = await counts_of(self._node_id, self._view, self._replica_manager, self._isr_keeper)
            collector = BrokerCollector(self._status(), counts, await states_of(self._replica_manager.hosted))
            return await asyncio.to_thread(render, (*self._process, collector), accept)

    async def readiness(self) -> Readiness:
        problem = self._status().problem
        return Readiness(not problem, problem or "ready")

    async def liveness(self) -> Readiness:
        return Readiness(True, "alive")

    async def summary(self) -> str:
        states = await states_of(self._replica_manager.hosted)
        led = [state for state in states if state.is_leader]
        lacking = [state for state in led if state.is_under_replicated]
        refusing = sum(state.is_under_min_isr for state in led)
        now = self._status()
        ended = f"lapsed {_times(now.lease_lapses)}, lost {_times(now.lease_losses)}"
        lines = [
            f"kproxy broker {self._node_id}: {now.problem or 'ready'}",
            "",
            f"lease    {now.lease_remaining_s:.1f} s left; {ended}",
            f"leads    {len(led)} of the {len(states)} partitions that it keeps",
            f"whole    {len(led) - len(lacking)} of these have all replicas in sync; {refusing} refuse acks=all",
            *_lines_of(lacking),
        ]
        return "\n".join(lines)


def _lines_of(lacking: Sequence[ReplicaState]) -> Iterable[str]:
    for state in lacking[:MAX_LINES]:
        missing = "; ".join(_missing(follower) for follower in state.followers if not follower.is_in_sync)
        count = f"{state.isr_size} of {state.replicas} in sync"
        yield f"         {state.topic}/{state.partition_index}: {count}: {missing}"
    if len(lacking) > MAX_LINES:
        yield f"         and {len(lacking) - MAX_LINES:,} more"


def _missing(follower: FollowerState) -> str:
    what = f"lacks {follower.lag_records:,} records" if follower.has_told else "does not fetch"
    return f"broker {follower.node_id} {what}, not caught up for {follower.behind_s:.0f} s"


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")

"""`/metrics` of a broker: what its replicas, its lease and its disk do, as Prometheus families, made when asked for.

docs/metrics.md says what each of them means. The totals are of all replicas on this broker; series of single partitions
are of the first MAX_PARTITION_SERIES of them by topic and index, so that a page has an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kproxy.broker.cluster import NO_OWNER, ClusterView
from kproxy.broker.flush_times import FLUSH_BOUNDS_S, FLUSHES
from kproxy.broker.leases import PartitionLeaseManager
from kproxy.broker.partition import Partition
from kproxy.broker.replication.isr_keeper import IsrKeeper
from kproxy.broker.replication.manager import UNKNOWN_OFFSET
from kproxy.broker.standing import Standing
from kproxy.observe.exposition import counter, gauge, histogram

MAX_PARTITION_SERIES = 1_000


@dataclass(frozen=True, slots=True)
class FollowerState:
    """What a leader knows of one follower. `lag_records`: all that the log holds where it `has_told` nothing yet."""

    node_id: int
    has_told: bool
    lag_records: int
    behind_s: float
    is_in_sync: bool


def followers_of(partition: Partition) -> list[FollowerState]:
    """Of a partition that this broker leads."""
    end, start = partition.log_end_offset, partition.log_start_offset
    followers = []
    for node_id, (told, behind_s) in sorted(partition.replication.follower_progress().items()):
        lag_records, is_in_sync = max(end - max(told, start), 0), partition.replication.is_in_sync(node_id)
        followers.append(FollowerState(node_id, told != UNKNOWN_OFFSET, lag_records, behind_s, is_in_sync))
    return followers


def is_under_replicated(partition: Partition) -> bool:
    """Whether a partition that this broker leads has a replica that is not in sync."""
    replication = partition.replication
    return len(replication.isr.members) < 1 + len(replication.follower_progress())


class BrokerCollector(Collector):
    """What this broker counts."""

    def __init__(
        self,
        view: ClusterView,
        leases: PartitionLeaseManager,
        isr_keeper: IsrKeeper,
        standing: Callable[[], Standing],
    ) -> None:
        self._view = view
        self._leases = leases
        self._isr_keeper = isr_keeper
        self._standing = standing

    def collect(self) -> Iterable[Metric]:
        kept = [partition for _, partition in sorted(self._leases.hosted.items())]
        led = [partition for partition in kept if partition.serves_reads()]
        yield from self._replicas(kept, led)
        yield from _in_sync(led, self._isr_keeper)
        yield from self._lease()
        yield from self._disk(kept)
        yield from _partitions(kept[:MAX_PARTITION_SERIES])

    def _replicas(self, kept: list[Partition], led: list[Partition]) -> Iterable[Metric]:
        yield gauge("kproxy_broker_partitions", "Replicas on this broker.", len(kept))
        yield gauge(
            "kproxy_broker_partitions_without_series",
            "Replicas that only the totals tell of: there are too many for a series each.",
            max(len(kept) - MAX_PARTITION_SERIES, 0),
        )
        yield gauge("kproxy_broker_led_partitions", "Partitions that this broker leads.", len(led))
        yield gauge(
            "kproxy_broker_offline_partitions",
            "Partitions with a replica here that were led before and that nobody leads now.",
            sum(self._is_offline(partition) for partition in kept if not partition.serves_reads()),
        )
        yield gauge("kproxy_broker_live_brokers", "Brokers that are alive, as etcd says.", len(self._view.brokers))

    def _is_offline(self, partition: Partition) -> bool:
        topic, index = self._view.topics.get(partition.topic), partition.partition_index
        if topic is None or self._view.state(topic, index) is None:
            return False
        return self._view.owner(topic.name, index) == NO_OWNER

    def _lease(self) -> Iterable[Metric]:
        now = self._standing()
        yield gauge(
            "kproxy_broker_ready", "1 while clients should be sent here, as /readyz says.", int(not now.problem)
        )
        yield gauge(
            "kproxy_broker_lease_remaining_seconds",
            "For how long the broker's lease is certain to live; 0 without one.",
            now.lease_remaining_s,
        )
        yield counter(
            "kproxy_broker_lease_lapses",
            "Times that the broker's lease was renewed only after it might have ended: nothing was led meanwhile.",
            now.lease_lapses,
        )
        yield counter("kproxy_broker_lease_losses", "Times that the broker's lease was lost.", now.lease_losses)
        ended = CounterMetricFamily(
            "kproxy_broker_leaderships_ended", "Partitions that this broker leads no more, by why.", labels=["reason"]
        )
        for reason, count in sorted(self._leases.ended.items()):
            ended.add_metric([reason], count)
        yield ended
        if now.etcd_silent_s != float("inf"):
            yield gauge("kproxy_broker_etcd_age_seconds", "Since etcd last said anything.", now.etcd_silent_s)
        yield gauge("kproxy_broker_client_connections", "Open client connections.", now.client_connections)
        yield gauge(
            "kproxy_broker_follower_connections",
            "Brokers that are connected to fetch from this one.",
            now.follower_connections,
        )

    def _disk(self, kept: list[Partition]) -> Iterable[Metric]:
        yield histogram(
            "kproxy_broker_flush_duration_seconds",
            "Flushes of segments to the disk (fsync).",
            FLUSH_BOUNDS_S,
            FLUSHES.buckets,
            FLUSHES.seconds,
        )
        logs = [partition.log for partition in kept]
        yield gauge("kproxy_broker_dirty_logs", "Logs with bytes to be flushed.", sum(log.is_dirty for log in logs))
        failed = sum(log.failure is not None and not log.is_closed for log in logs)
        yield gauge(
            "kproxy_broker_failed_logs",
            "Logs that could not be opened, written or flushed.",
            failed + self._leases.replicas.not_opened,
        )
        yield gauge(
            "kproxy_broker_stopped_replicas",
            "Followers that found their leader without what is committed here, and stopped for good.",
            sum(bool(partition.failure) for partition in kept),
        )
        yield gauge(
            "kproxy_broker_producer_ids",
            "Idempotent producers that are remembered, each once a partition.",
            sum(len(log.producers) for log in logs),
        )


def _in_sync(led: list[Partition], isr_keeper: IsrKeeper) -> Iterable[Metric]:
    yield gauge(
        "kproxy_broker_under_replicated_partitions",
        "Led partitions with a replica that is not in sync.",
        sum(map(is_under_replicated, led)),
    )
    yield gauge(
        "kproxy_broker_under_min_isr_partitions",
        "Led partitions with fewer replicas in sync than min.insync.replicas: acks=all is refused.",
        sum(not partition.replication.has_enough_in_sync for partition in led),
    )
    lags = [follower.lag_records for partition in led for follower in followers_of(partition)]
    yield gauge(
        "kproxy_broker_max_follower_lag_records",
        "Records that the follower furthest behind lacks of a led partition.",
        max(lags, default=0),
        "max",
    )
    yield gauge(
        "kproxy_broker_waiters",
        "Producers that wait for in-sync replicas (acks=all); those that gave up count until the next sweep.",
        sum(partition.replication.waiting for partition in led),
    )
    yield counter("kproxy_broker_isr_shrinks", "ISRs that lost a member.", isr_keeper.shrinks)
    yield counter("kproxy_broker_isr_expansions", "ISRs that got a member.", isr_keeper.expansions)


_OF_EACH: Mapping[str, tuple[str, Callable[[Partition], int]]] = {
    "high_watermark": ("Behind the last committed offset.", lambda each: each.high_watermark),
    "log_start_offset": ("The first offset in the log.", lambda each: each.log_start_offset),
    "log_end_offset": ("Behind the last offset in the log.", lambda each: each.log_end_offset),
    "leader_epoch": ("The epoch in which it leads or follows; -1: none.", lambda each: each.leader_epoch),
    "is_leader": ("1 where this broker leads.", lambda each: int(each.serves_reads())),
}
_OF_LED: Mapping[str, tuple[str, Callable[[Partition], int]]] = {
    "replicas": ("Replicas, told by the leader.", lambda each: 1 + len(each.replication.follower_progress())),
    "isr_size": ("Replicas in sync, told by the leader.", lambda each: len(each.replication.isr.members)),
    "min_insync_replicas": (
        "Replicas in sync without which acks=all is refused, told by the leader.",
        lambda each: each.replication.min_insync_replicas,
    ),
}


def _partitions(shown: list[Partition]) -> Iterable[Metric]:
    led = [partition for partition in shown if partition.serves_reads()]
    for of_these, families in ((shown, _OF_EACH), (led, _OF_LED)):
        for name, (documentation, value_of) in families.items():
            family = _family(f"kproxy_broker_partition_{name}", documentation, "topic", "partition")
            for partition in of_these:
                family.add_metric(_place(partition), value_of(partition))
            yield family
    lag = _family(
        "kproxy_broker_follower_lag_records", "Records that a follower lacks.", "topic", "partition", "follower"
    )
    behind = _family(
        "kproxy_broker_follower_behind_seconds",
        "Since a follower had all that there was.",
        "topic",
        "partition",
        "follower",
    )
    for partition in led:
        for follower in followers_of(partition):
            labels = [*_place(partition), str(follower.node_id)]
            lag.add_metric(labels, follower.lag_records)
            behind.add_metric(labels, follower.behind_s)
    yield lag
    yield behind


def _family(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=labels)


def _place(partition: Partition) -> list[str]:
    return [partition.topic, str(partition.partition_index)]

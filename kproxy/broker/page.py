"""Serve the admin page of a broker: `/metrics`, `/livez`, `/readyz`, `/`, and `/partitions` of the cluster.

`/metrics` has totals over the broker's replicas, its lease and its disk as Prometheus families, made on request.
docs/metrics.md explains each family. A proxy's `/replication` shows single partitions, and so does `kproxy table`.
Replicas and leases are read on the event loop, in portions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kproxy.address import Address
from kproxy.broker.cluster import NO_OWNER, ClusterView
from kproxy.broker.disk import FLUSHES
from kproxy.broker.partition import Partition
from kproxy.broker.producer_state import wall_ms
from kproxy.broker.replica_manager import ReplicaManager
from kproxy.broker.replication.isr_keeper import IsrKeeper
from kproxy.broker.replication.partition_replication import Role
from kproxy.installed import version
from kproxy.observe.exposition import Families, counter, gauge, histogram, render, this_process
from kproxy.observe.http_page import Readiness
from kproxy.observe.overview import (
    MAX_PARTITION_ROWS,
    BrokerLine,
    Level,
    Overview,
    PartitionLine,
    PartitionsPage,
    Timeline,
    Verdict,
    shown,
)
from kproxy.runtime.tasks import in_portions


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """The broker's status at a moment, for its admin page.

    `problem`: the reason not to send clients here, or empty. `lease_lapses`: how often the lease was renewed only after
    it might have ended. `etcd_silent_s`: time since etcd's last answer, infinite before the first. `certificates`: when
    they end, in seconds since the epoch, by use; `handshakes`: ended TLS handshakes, by use and outcome. The uses are
    `listener` and `replication`.
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


@dataclass(slots=True)
class ReplicaTotals:
    """Sums over the replicas on this broker, except `max_lag`, in records."""

    replicas: int = 0
    led: int = 0
    under_replicated: int = 0
    under_min_isr: int = 0
    max_lag: int = 0
    waiters: int = 0
    dirty: int = 0
    failed: int = 0
    stopped: int = 0
    producers: int = 0

    def add(self, partition: Partition) -> None:
        log, replication = partition.log, partition.replication
        self.replicas += 1
        self.dirty += log.is_dirty
        self.failed += partition.disk_fails
        self.stopped += bool(partition.failure)
        self.producers += len(log.producers)
        if not partition.serves_reads():
            return
        followers = replication.follower_progress()
        in_sync = len(replication.isr.members)
        self.led += 1
        self.under_replicated += in_sync < 1 + len(followers)
        self.under_min_isr += in_sync < replication.min_insync_replicas
        self.waiters += replication.waiting
        for told, _ in followers.values():
            # Before a follower's first report, its lag is the whole log.
            self.max_lag = max(self.max_lag, log.log_end_offset - max(told, log.log_start_offset))


@dataclass(eq=False)
class BrokerPages:
    """The pages of the broker `node_id`."""

    node_id: int
    view: ClusterView
    replica_manager: ReplicaManager
    isr_keeper: IsrKeeper
    status: Callable[[], BrokerStatus]

    def __post_init__(self) -> None:
        self._process = this_process()
        self._started = wall_ms()
        self._timeline = Timeline(wall_ms)
        # What `sample` saw last: live brokers, and counts of changes.
        self._brokers: dict[int, str] | None = None
        self._counts: dict[str, int] = {}

    def routes(self) -> list[web.RouteDef]:
        """The routes of the pages that only a broker has."""
        return [web.get("/partitions", self._get_partitions)]

    async def sample(self) -> None:
        brokers = {each.node_id: str(Address(each.host, each.port)) for each in self.view.brokers.values()}
        if self._brokers is not None:
            for node_id in brokers.keys() - self._brokers.keys():
                self._timeline.add("broker", "good", f"broker {node_id} at {brokers[node_id]} has joined")
            for node_id in self._brokers.keys() - brokers.keys():
                self._timeline.add("broker", "bad", f"broker {node_id} at {self._brokers[node_id]} has left")
        now = self.status()
        ended = {f"partitions are no longer led: {why}": n for why, n in self.replica_manager.ended.items()}
        counts: dict[str, int] = ended | {
            "in-sync replicas were lost, in partitions": self.isr_keeper.shrinks,
            "in-sync replicas came back, in partitions": self.isr_keeper.expansions,
            "renewals of the lease were late": now.lease_lapses,
            "leases were lost": now.lease_losses,
        }
        for text, count in counts.items():
            more = count - self._counts.get(text, 0)
            if more and self._brokers is not None:
                self._timeline.add("moves", "good" if "came back" in text else "warn", text, more)
        self._brokers, self._counts = brokers, counts

    async def overview(self) -> Overview:
        totals, now, view = await self._totals(), self.status(), self.view
        owned, lacking = Counter[int](), Counter[int]()
        async for line in self._lines():
            owned[line.owner] += 1
            lacking.update(each for each in line.replicas or () if each not in (line.isr or ()))
        leads = f"leads {totals.led:,} of {totals.replicas:,} replicas, lease {now.lease_remaining_s:.1f} s left"
        problem = now.problem or (f"{owned[NO_OWNER]:,} partitions have no leader" if owned[NO_OWNER] else "")
        level: Level = "bad" if now.problem else "warn" if problem or totals.under_replicated else "good"
        lagging = f"{totals.under_replicated:,} partitions lack a replica, " if totals.under_replicated else ""
        brokers = [
            BrokerLine(
                id=each.node_id,
                address=str(Address(each.host, each.port)),
                state="up",
                partitions=owned[each.node_id],
                lacking=lacking[each.node_id],
                this=each.node_id == self.node_id,
                connections=now.client_connections if each.node_id == self.node_id else None,
            )
            for each in view.brokers.values()
        ]
        gone = (lacking.keys() | owned.keys()) - view.brokers.keys() - {NO_OWNER}
        brokers += [BrokerLine(id=each, address="", state="gone", lacking=lacking[each]) for each in gone]
        return Overview(
            kind="broker",
            name=f"kproxy broker {self.node_id}",
            version=version(),
            at=wall_ms(),
            started=self._started,
            verdict=Verdict(level, problem or f"serving, {lagging}{leads}"),
            table_age_s=round(now.etcd_silent_s, 1) if now.etcd_silent_s != float("inf") else None,
            clients=now.client_connections,
            partitions=owned.total() - owned[NO_OWNER],
            brokers=shown(brokers),
            brokers_total=len(view.brokers),
            facts={
                "followers connected": str(now.follower_connections),
                "highest lag": f"{totals.max_lag:,} records",
                "refuse acks=all": f"{totals.under_min_isr:,} partitions",
                "producers with state": f"{totals.producers:,}",
            },
            events=self._timeline.latest,
        )

    async def _lines(self) -> AsyncIterator[PartitionLine]:
        """Yield the cluster's partitions in order, in portions."""
        view = self.view
        places = ((topic, index) for _, topic in sorted(view.topics.items()) for index in range(len(topic.replicas)))
        async for topic, index in in_portions(places, time.monotonic):
            state, ownership = view.state(topic, index), view.ownership(topic.name, index)
            if state is not None:
                yield PartitionLine(
                    topic.name,
                    index,
                    view.owner(topic.name, index),
                    ownership.mod_revision if ownership is not None else 0,
                    isr=state.in_sync,
                    replicas=topic.replicas[index],
                )

    async def _get_partitions(self, request: web.Request) -> web.Response:
        asked = request.query
        try:
            limit, owner = int(asked.get("limit", 100)), int(asked["owner"]) if "owner" in asked else None
            name, _, index = asked.get("after", "/-1").rpartition("/")
            after = (name, int(index))
            if not 1 <= limit <= MAX_PARTITION_ROWS:
                raise ValueError(f"limit must be a number from 1 to {MAX_PARTITION_ROWS}")
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        search, lines = asked.get("search", "").lower(), list[PartitionLine]()
        async for line in self._lines():
            if (line.topic, line.partition) <= after or (owner is not None and line.owner != owner):
                continue
            if search in f"{line.topic}/{line.partition}".lower():
                lines.append(line)
                if len(lines) > limit:
                    break
        more = len(lines) > limit
        del lines[limit:]
        after_text = f"{lines[-1].topic}/{lines[-1].partition}" if more else None
        page = PartitionsPage(lines, after_text)
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        totals, (leases, offline) = await self._totals(), await self._leases_and_offline()
        now = self.status()
        families = [*self._replicas(totals, leases, offline), *self._lease(now), *_tls(now), *self._disk(totals)]
        return render((*self._process, Families(families)), accept)

    async def readiness(self) -> Readiness:
        problem = self.status().problem
        return Readiness(not problem, problem or "ready")

    async def liveness(self) -> Readiness:
        return Readiness(True, "alive")

    async def summary(self) -> str:
        totals, now = await self._totals(), self.status()
        ended = f"lapsed {now.lease_lapses}, lost {now.lease_losses} times"
        return "\n".join(
            (
                f"kproxy broker {self.node_id}: {now.problem or 'ready'}",
                "",
                f"lease    {now.lease_remaining_s:.1f} s left; {ended}",
                f"leads    {totals.led} of the {totals.replicas} partitions that it keeps",
                f"lacking  {totals.under_replicated} of these lack a replica; {totals.under_min_isr} refuse acks=all",
            )
        )

    async def _totals(self) -> ReplicaTotals:
        totals = ReplicaTotals()
        async for partition in in_portions(list(self.replica_manager.hosted.values()), time.monotonic):
            if partition.role is not Role.CLOSED:
                totals.add(partition)
        return totals

    async def _leases_and_offline(self) -> tuple[int, int]:
        """Count the leases of this broker in etcd, and all partitions that no live broker owns.

        Every broker counts the offline partitions, as the brokers of some may all be dead.
        """
        held = offline = 0
        partitions = [(topic, index) for topic in self.view.topics.values() for index in range(len(topic.replicas))]
        async for topic, index in in_portions(partitions, time.monotonic):
            ownership, broker = self.view.ownership(topic.name, index), self.view.brokers.get(self.node_id)
            held += ownership is not None and broker is not None and ownership.lease_id == broker.lease_id
            has_state = self.view.state(topic, index) is not None
            offline += has_state and self.view.owner(topic.name, index) == NO_OWNER
        return held, offline

    def _replicas(self, totals: ReplicaTotals, leases: int, offline: int) -> Iterable[Metric]:
        for name, documentation, value in (
            ("partitions", "Replicas on this broker.", totals.replicas),
            ("led_partitions", "Partitions that this broker leads.", totals.led),
            ("leases", "Partition leases in etcd of this broker; briefly more or fewer than it leads.", leases),
            ("offline_partitions", "Partitions of the cluster without a leader.", offline),
            ("live_brokers", "Live brokers in etcd.", len(self.view.brokers)),
            (
                "under_replicated_partitions",
                "Led partitions with a replica that is not in sync.",
                totals.under_replicated,
            ),
            (
                "under_min_isr_partitions",
                "Led partitions with fewer replicas in sync than min.insync.replicas: acks=all is refused.",
                totals.under_min_isr,
            ),
            ("max_follower_lag_records", "The highest lag of a follower of a led partition.", totals.max_lag),
            (
                "waiters",
                "Producers that wait for in-sync replicas (acks=all), including timed-out ones until the next sweep.",
                totals.waiters,
            ),
        ):
            yield gauge(f"kproxy_broker_{name}", documentation, value)
        yield counter("kproxy_broker_isr_shrinks", "ISRs that lost a member.", self.isr_keeper.shrinks)
        yield counter("kproxy_broker_isr_expansions", "ISRs that gained a member.", self.isr_keeper.expansions)
        ended = CounterMetricFamily(
            "kproxy_broker_leaderships_ended",
            "Partitions that this broker stopped leading, by reason.",
            labels=["reason"],
        )
        for reason, count in sorted(self.replica_manager.ended.items()):
            ended.add_metric([reason], count)
        yield ended

    def _lease(self, now: BrokerStatus) -> Iterable[Metric]:
        for name, documentation, value in (
            ("ready", "1 while the broker is ready for clients, as in /readyz.", int(not now.problem)),
            (
                "lease_remaining_seconds",
                "Time for which the broker's lease is certain to live; 0 without a lease.",
                now.lease_remaining_s,
            ),
            ("client_connections", "Open client connections.", now.client_connections),
            ("follower_connections", "Follower brokers connected to this broker.", now.follower_connections),
        ):
            yield gauge(f"kproxy_broker_{name}", documentation, value)
        if now.etcd_silent_s != float("inf"):
            yield gauge("kproxy_broker_etcd_age_seconds", "Time since etcd last answered.", now.etcd_silent_s)
        yield counter(
            "kproxy_broker_lease_lapses",
            "Renewals of the broker's lease after its lease fence; the broker led nothing in between.",
            now.lease_lapses,
        )
        yield counter("kproxy_broker_lease_losses", "Losses of the broker's lease.", now.lease_losses)

    def _disk(self, totals: ReplicaTotals) -> Iterable[Metric]:
        yield histogram(
            "kproxy_broker_flush_duration_seconds",
            "Flushes of segments to the disk (fsync).",
            [((), FLUSHES)],
        )
        failed = totals.replicas if self.replica_manager.disk.failure else totals.failed
        for name, documentation, value in (
            ("dirty_logs", "Logs with bytes to be flushed.", totals.dirty),
            (
                "failed_logs",
                "Logs that cannot be opened, read, written or flushed; all while the disk as a whole fails.",
                self.replica_manager.replicas.not_opened + failed,
            ),
            (
                "stopped_replicas",
                "Followers that stopped, because their leader lacks records that are committed here.",
                totals.stopped,
            ),
            ("producer_ids", "Idempotent producers with state, counted once for each partition.", totals.producers),
        ):
            yield gauge(f"kproxy_broker_{name}", documentation, value)


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

"""Run what the section `acks` needs: three brokers, a proxy before them, Kafka's load tool, and topics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from bench.brokers import PREFIX, brokers
from bench.java_load import JavaLoad, java_load
from bench.processes import cpu_seconds
from bench.replicas import Replicas
from bench.table import serve
from kproxy.dev.embedded_etcd import EmbeddedEtcd

PARTITIONS = 6
WAYS = VIA_PROXY, DIRECT = "kproxy", "direct"
ADMIN_TIMEOUT_S = 30.0


class Cluster(NamedTuple):
    """All running processes; `pids` by their role."""

    java: JavaLoad
    bootstraps: dict[str, str]
    pids: dict[str, list[int]]
    admin: AdminClient
    data_dirs: dict[int, Path]

    def cpu(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in self.pids.items()}


@contextlib.contextmanager
def cluster(etcd: EmbeddedEtcd, directory: Path) -> Iterator[Cluster]:
    """Run brokers, proxy and load. Raise StartupError."""
    with contextlib.ExitStack() as stack:
        java = stack.enter_context(java_load(directory))
        addresses, broker_pids, data_dirs, _ = stack.enter_context(brokers(etcd, directory))
        proxy, port, _ = stack.enter_context(serve(etcd.endpoint, PREFIX))
        pids = {"kproxy": [proxy.pid], "brokers": broker_pids, "etcd": [etcd.pid], "java": [java.pid]}
        admin = AdminClient({"bootstrap.servers": addresses, "log_level": 2})
        yield Cluster(java, {VIA_PROXY: f"127.0.0.1:{port}", DIRECT: addresses}, pids, admin, data_dirs)


class Topic:
    """A topic of the measurement, and the records sent to it. It is deleted when its block ends: it is large."""

    def __init__(self, cluster: Cluster, name: str, replication_factor: int, partitions: int) -> None:
        self.name = name
        self.sent = 0
        self._partition_count = partitions
        self._cluster = cluster
        self._replication_factor = replication_factor

    def __enter__(self) -> Topic:
        wanted = NewTopic(self.name, self._partition_count, self._replication_factor)
        self._cluster.admin.create_topics([wanted])[self.name].result(ADMIN_TIMEOUT_S)
        deadline = time.monotonic() + ADMIN_TIMEOUT_S
        while _in_sync(partitions := self._partitions()) < self._replication_factor:
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: some followers are not in sync")
            time.sleep(0.05)
        self.replicas = [self._places(index, found) for index, found in partitions.items()]
        return self

    def __exit__(self, *error: object) -> None:
        self._cluster.admin.delete_topics([self.name])[self.name].result(ADMIN_TIMEOUT_S)
        deadline = time.monotonic() + ADMIN_TIMEOUT_S
        while any(each.leader.exists() for each in self.replicas) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _partitions(self) -> dict[int, Any]:
        topics = self._cluster.admin.list_topics(self.name, timeout=ADMIN_TIMEOUT_S).topics
        found: dict[int, Any] = topics[self.name].partitions
        return found

    def _places(self, index: int, found: Any) -> Replicas:
        places = {node: self._cluster.data_dirs[node] / f"{self.name}-{index}" for node in found.replicas}
        leader = places.pop(found.leader)
        return Replicas(leader, tuple(places.values()))

    def in_sync(self) -> int:
        """Return the smallest number of replicas in sync; 0 if a partition has no leader."""
        return _in_sync(self._partitions())

    def missing(self) -> int:
        """Return the number of sent records that a reader does not get; negative if there are more than were sent."""
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = {TopicPartition(self.name, index): latest for index in range(self._partition_count)}
        ends = self._cluster.admin.list_offsets(asked).values()
        return self.sent - sum(int(each.result(ADMIN_TIMEOUT_S).offset) for each in ends)


def _in_sync(partitions: dict[int, Any]) -> int:
    return min((len(each.isrs) if each.leader >= 0 else 0 for each in partitions.values()), default=0)

"""Run three replicas of one partition that fetch from one another by plain calls; the test plays etcd."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from kproxy.broker.config import FlushPolicy, LogOptions
from kproxy.broker.keys import BrokerValue, ReplicaKey
from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.log import Log
from kproxy.broker.partition import ACKS_ALL, AppendResult, Partition, Reconciliation, ReplicaSettings
from kproxy.broker.replication.partition_replication import Isr
from kproxy.broker.writer_fence import KeptFence
from kproxy_codec.fetch import PartitionFetch, PartitionFetched
from kproxy_codec.record_batch import parse_batch
from tests.support.wire.record_batches import build_batch

REPLICAS = (1, 2, 3)
ISR_LAG_S = 10.0
TOPIC_ID = uuid.uuid4()


def on_disk(node_id: int, disk: int = 0) -> ReplicaKey:
    """A broker's replica, on its first disk or another one."""
    return ReplicaKey(node_id, uuid.UUID(int=100 * disk + node_id))


def broker_value(node_id: int) -> BrokerValue:
    """The value of a live broker on its first disk."""
    return BrokerValue(node_id, "h", 9, 9, on_disk(node_id).log_id)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Fence:
    def __init__(self) -> None:
        self.live = True

    def is_live(self) -> bool:
        return self.live


class Group:
    """Three replicas of one partition; the test chooses the leader, as etcd would."""

    def __init__(
        self,
        directory: Path,
        *,
        isr_lag_s: float = ISR_LAG_S,
        reconciliation: Reconciliation | None = None,
        flush: FlushPolicy = "interval",
    ) -> None:
        self.directory = directory
        self.isr_lag_s = isr_lag_s
        self._reconciliation = reconciliation
        self._log_options = LogOptions(flush=flush)
        self.clock = Clock()
        self.epoch = -1
        self.isr = Isr(frozenset(map(on_disk, REPLICAS)), 1)
        self.live = set(REPLICAS)
        self.gone: set[int] = set()
        self._looked_with: tuple[frozenset[int], frozenset[int]] | None = None
        self.fences: dict[int, Fence] = {}
        self.replicas = {node_id: self.open(node_id) for node_id in REPLICAS}

    @property
    def leadership(self) -> Leadership:
        return Leadership(self.epoch, 10 + self.epoch)

    def open(self, node_id: int, disk: int = 0) -> Partition:
        settings = ReplicaSettings(node_id, self.clock, self.isr_lag_s, min_insync_replicas=2)
        log = Log.open(self.directory / str(node_id), options=self._log_options)
        log_id = on_disk(node_id, disk).log_id
        return Partition("t", 0, TOPIC_ID, log, settings, log_id, reconciliation=self._reconciliation)

    def restart(self, node_id: int) -> Partition:
        """Kill and restart it: the state in memory is gone."""
        self.replicas[node_id].close()
        self.replicas[node_id] = self.open(node_id)
        return self.replicas[node_id]

    def replace_disk(self, node_id: int) -> Partition:
        """Restart it with an empty disk, as a follower of the leader."""
        self.replicas[node_id].close()
        shutil.rmtree(self.directory / str(node_id))
        replica = self.replicas[node_id] = self.open(node_id, disk=1)
        leader = next(each for each in self.replicas.values() if each.replication.is_leading)
        replica.become_follower(leader.leader_id, self.leadership)
        return replica

    def elect(self, node_id: int) -> Partition:
        """`node_id` takes the partition, and the followers follow it."""
        self.epoch += 1
        assert self.replicas[node_id].replica in self.isr.members, "only who is in sync may take it"
        fence = self.fences[node_id] = Fence()
        leader = self.replicas[node_id]
        leader.become_leader(self.leadership, REPLICAS, self.isr, fence, KeptFence())
        for follower in self.replicas.values():
            if follower is not leader and not follower.replication.is_leading:
                follower.become_follower(node_id, self.leadership)
        return leader

    def depose(self, node_id: int) -> Partition:
        """Tell it that it no longer leads: it opens its log again and follows."""
        follower = self.restart(node_id)
        leader = next(each for each in self.replicas.values() if each.replication.is_leading)
        follower.become_follower(leader.leader_id, self.leadership)
        return follower

    def fetch(self, node_id: int) -> PartitionFetched:
        """Send one request; return its answer."""
        follower = self.replicas[node_id]
        asked = follower.next_fetch()
        assert asked is not None
        fetched = fetch_as_replica(self.replicas[follower.leader_id], node_id, asked, 1 << 20)
        follower.take_fetched(asked, fetched)
        return fetched

    def look_at_isr(self) -> set[int]:
        """Do what the ISR keeper does, with an etcd that answers at once. Return the brokers in sync."""
        leader = next(each for each in self.replicas.values() if each.replication.is_leading)
        brokers = frozenset(self.live), frozenset(self.gone)
        is_due = brokers != self._looked_with or leader.replication.is_isr_due
        self._looked_with = brokers
        wanted = leader.replication.wanted_isr(*brokers) if is_due else None
        if wanted is not None:
            leader.replication.isr_proposed(wanted)
            self.isr = Isr(wanted, self.isr.revision + 1)
            leader.replication.isr_settled(self.isr)
        return {replica.node_id for replica in self.isr.members}

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.close()

    def contents(self, node_id: int) -> bytes:
        log = self.replicas[node_id].log
        return log.read(log.log_start_offset, 1 << 30) if log.log_end_offset else b""


def fetch_as_replica(leader: Partition, replica_id: int, asked: PartitionFetch, max_bytes: int) -> PartitionFetched:
    """Ask as a follower; return the immediate answer."""
    refused = leader.replica_asks(replica_id, asked)
    return refused if refused is not None else leader.read_as_replica(asked, max_bytes)


def append(partition: Partition, value: bytes = b"v", *, acks: int = ACKS_ALL, **producer: int) -> AppendResult:
    view = memoryview(build_batch([value], **producer))
    return partition.append_as_leader(view, parse_batch(view), acks)

"""Run a leader and a follower in one process: the real listener, the real fetchers and real logs, but no etcd.

The test chooses the leaders; both views receive the changes as if from etcd.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

from kproxy.broker.cluster import ClusterView
from kproxy.broker.config import BrokerConfig
from kproxy.broker.context import Broker
from kproxy.broker.data_dir import DataDir
from kproxy.broker.keys import BrokerValue, Keys, TopicValue, encode_value
from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.log import Log
from kproxy.broker.partition import ACKS_ALL, AppendResult, Partition, ReplicaSettings
from kproxy.broker.replica_manager import ReplicaManager
from kproxy.broker.replication.authentication import Secret
from kproxy.broker.replication.encryption import NO_ENCRYPTION, Encryption
from kproxy.broker.replication.fetchers import ReplicaFetchers
from kproxy.broker.replication.isr_keeper import FollowerPresence
from kproxy.broker.replication.listener import ReplicationListener
from kproxy.broker.replication.partition_replication import Isr
from kproxy.broker.writer_fence import KeptFence
from kproxy_codec.framing import ReceiveArena
from kproxy_codec.record_batch import parse_batch
from tests.support.brokers.replica_group import on_disk
from tests.support.wire.record_batches import build_batch

LEADER, FOLLOWER = 1, 2
SECRET = Secret.of("the cluster's secret, as long as one from etcd")
MAX_ANSWER_BYTES = 100 << 20


class Alive:
    def is_live(self) -> bool:
        return True


class Side:
    """One broker: its view of the cluster, and its replicas."""

    def __init__(self, node_id: int, directory: Path) -> None:
        self.node_id = node_id
        self.directory = directory
        self.keys = Keys("/test")
        self.view = ClusterView(self.keys)
        self._revision = 0

    def tell(self, key: str, value: Any) -> None:
        self._revision += 1
        self.view.apply_put(key, encode_value(value), lease_id=0, revision=self._revision)

    def tell_broker(self, node_id: int, port: int) -> None:
        self.tell(self.keys.broker(node_id), BrokerValue(node_id, "127.0.0.1", 1, port, on_disk(node_id).log_id))

    def open(self, topic: str, index: int, topic_id: uuid.UUID) -> Partition:
        self.tell(self.keys.topic(topic), TopicValue(topic_id, [[LEADER, FOLLOWER]] * (index + 1), {}))
        settings = ReplicaSettings(self.node_id, time.monotonic, min_insync_replicas=2)
        log = Log.open(self.directory / f"{topic}-{index}")
        return Partition(topic, index, topic_id, log, settings, on_disk(self.node_id).log_id)


class LeaderSide(Side):
    """Leads the partitions that the test names, and listens for followers."""

    def __init__(self, directory: Path, node_id: int = LEADER, encryption: Encryption = NO_ENCRYPTION) -> None:
        super().__init__(node_id, directory)
        self._encryption = encryption
        config = BrokerConfig(node_id, directory / "data", ())
        self.leases = ReplicaManager(
            cast(Any, None),
            self.view,
            cast(DataDir, None),
            node_id,
            settings_of=lambda *_: ReplicaSettings(node_id, time.monotonic),
            on_identity_lost=lambda _: None,
        )
        nobody = cast(Any, None)
        self._broker = Broker(config, "cluster", self.view, self.leases, nobody, nobody, nobody, nobody)
        self.listener = self._listener()
        self.port = 0

    def _listener(self) -> ReplicationListener:
        presence = FollowerPresence(0.5, 10.0)
        return ReplicationListener(lambda: SECRET, ReceiveArena(), presence, self._encryption, time.monotonic)

    async def start(self) -> None:
        """Listen on the previous port, if there was one."""
        self.port = await self.listener.bind(("127.0.0.1", self.port))
        await self.listener.start(self._broker)

    async def restart(self) -> None:
        await self.listener.close()
        self.listener = self._listener()
        await self.start()

    def lead(self, topic: str, index: int, topic_id: uuid.UUID, *, epoch: int = 0) -> Partition:
        partition = self.open(topic, index, topic_id)
        isr = Isr(frozenset(map(on_disk, (LEADER, FOLLOWER))), 1)
        partition.become_leader(Leadership(epoch, 10 + epoch), (LEADER, FOLLOWER), isr, Alive(), KeptFence())
        self.leases.partitions[topic.encode(), index] = partition
        return partition


class FollowerSide(Side):
    """Follows the partitions that the test names."""

    def __init__(self, directory: Path, node_id: int = FOLLOWER, encryption: Encryption = NO_ENCRYPTION) -> None:
        super().__init__(node_id, directory)
        self.hosted: dict[tuple[bytes, int], Partition] = {}
        self.holds_lease = True
        self.fetchers = ReplicaFetchers(
            on_disk(node_id),
            self.view,
            self.hosted,
            lambda: SECRET,
            ReceiveArena(),
            MAX_ANSWER_BYTES,
            may_fetch=lambda: self.holds_lease,
            encryption=encryption,
        )

    def follow(
        self, topic: str, index: int, topic_id: uuid.UUID, *, leader_id: int = LEADER, epoch: int = 0
    ) -> Partition:
        partition = self.hosted.get((topic.encode(), index))
        if partition is None:
            partition = self.hosted[topic.encode(), index] = self.open(topic, index, topic_id)
        partition.become_follower(leader_id, Leadership(epoch, 10 + epoch))
        self.fetchers.wake()
        return partition


class Pair:
    """Both brokers, and the partitions that they replicate."""

    def __init__(
        self, directory: Path, leaders: Encryption = NO_ENCRYPTION, followers: Encryption = NO_ENCRYPTION
    ) -> None:
        self.leader = LeaderSide(directory / "leader", encryption=leaders)
        self.follower = FollowerSide(directory / "follower", encryption=followers)

    def replicate(self, topic: str, topic_id: uuid.UUID, index: int) -> tuple[Partition, Partition]:
        """Add a partition; return the leader's replica and the follower's."""
        return self.leader.lead(topic, index, topic_id), self.follower.follow(topic, index, topic_id)


def append(partition: Partition, *values: bytes) -> AppendResult:
    """Append one batch."""
    view = memoryview(build_batch(list(values)))
    return partition.append_as_leader(view, parse_batch(view), ACKS_ALL)


@asynccontextmanager
async def fetching(follower: FollowerSide) -> AsyncIterator[None]:
    """Run the follower's fetchers until the block ends."""
    task = asyncio.create_task(follower.fetchers.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        close(follower.hosted.values())


def close(partitions: Iterable[Partition]) -> None:
    for partition in partitions:
        partition.close()


@asynccontextmanager
async def pair(
    directory: Path, leaders: Encryption = NO_ENCRYPTION, followers: Encryption = NO_ENCRYPTION
) -> AsyncIterator[Pair]:
    """A leader that listens and a follower that fetches from it, until the block ends; their TLS is as given."""
    both = Pair(directory, leaders, followers)
    await both.leader.start()
    both.follower.tell_broker(LEADER, both.leader.port)
    try:
        async with fetching(both.follower):
            yield both
    finally:
        await both.leader.listener.close()
        close(both.leader.leases.partitions.values())

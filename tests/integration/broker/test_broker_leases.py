"""ReplicaManager against a real etcd, with views that do not update: only the transaction decides."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

from kproxy.broker.broker_lease import BrokerLease
from kproxy.broker.cluster import ClusterView
from kproxy.broker.data_dir import VERSION, DataDir
from kproxy.broker.disk import write_json
from kproxy.broker.keys import Keys, PartitionKey, ReplicaKey, StateValue, encode_value
from kproxy.broker.partition import ReplicaSettings
from kproxy.broker.replica_manager import ReplicaManager
from kproxy.etcd import EtcdClient, Snapshot
from kproxy.etcd.lease import LeaseFence, lease_clock
from tests.support.brokers.replica_group import broker_value, on_disk
from tests.support.brokers.topics import DEAD, put_topic
from tests.support.waiting import PATIENCE_S

TOPIC = "t"
LOG_IDS = {node_id: on_disk(node_id).log_id for node_id in range(1, 6)}
# Any of the brokers may take such a partition at once.
ANYBODYS = [DEAD, *LOG_IDS]


class Member:
    """One broker's lease, view and manager; its view only knows what `look` reads."""

    def __init__(self, node_id: int, client: EtcdClient, prefix: str, directory: Path, ttl_s: int = 10) -> None:
        self.node_id = node_id
        self.keys = Keys(prefix)
        self.view = ClusterView(self.keys)
        self.client = client
        (directory / str(node_id)).mkdir()
        identity = {"node_id": node_id, "log_id": str(LOG_IDS[node_id]), "version": VERSION}
        write_json(directory / str(node_id) / "broker.json", identity)
        self.data_dir = DataDir.open(directory / str(node_id), node_id)
        self.identity_lost: list[str] = []
        self.manager = ReplicaManager(
            client,
            self.view,
            self.data_dir,
            node_id,
            settings_of=lambda topic, partition_index: ReplicaSettings(node_id, lease_clock),
            on_identity_lost=self.identity_lost.append,
        )
        self.lease = BrokerLease(
            client, self.keys, broker_value(node_id), ttl_s=ttl_s, clock=lease_clock, on_claimed=self.claimed
        )

    def claimed(self, key: str, value: bytes, fence: LeaseFence) -> None:
        self.view.apply_put(key, value, lease_id=fence.lease_id, revision=fence.claim_revision)

    async def join(self) -> LeaseFence:
        return await self.lease.establish(0)

    async def look(self) -> None:
        """Read everything, as a mirror does when it starts."""
        snapshots = [await self.client.get_prefix(prefix) for prefix in self.view.prefixes]
        kvs = [kv for snapshot in snapshots for kv in snapshot.kvs]
        self.view.on_snapshot(Snapshot(snapshots[0].revision, snapshots[0].cluster_id, kvs))

    async def begin(self) -> None:
        assert self.lease.fence is not None
        await self.look()
        self.manager.begin(self.lease.fence)

    async def take(self, *partitions: int) -> list[int]:
        """Return the partitions led after an attempt to take these."""
        await self.manager.take([PartitionKey(TOPIC, partition) for partition in partitions], 10)
        return sorted(partition for _, partition in self.manager.partitions)

    async def leave(self) -> None:
        await self.manager.close()
        await self.lease.revoke()
        self.data_dir.close()


Join = Callable[[int], Awaitable[Member]]


@pytest.fixture
async def join(etcd_client: EtcdClient, etcd_prefix: str, tmp_path: Path) -> AsyncIterator[Join]:
    async with AsyncExitStack() as stack:

        async def join_one(node_id: int) -> Member:
            member = Member(node_id, etcd_client, etcd_prefix, tmp_path)
            stack.push_async_callback(member.leave)
            await member.join()
            return member

        yield join_one


@pytest.fixture
async def topic_id(etcd_client: EtcdClient, etcd_prefix: str) -> uuid.UUID:
    """TOPIC's id; its 20 partitions were led before, and their first replica is dead."""
    keys = Keys(etcd_prefix)
    return await put_topic(etcd_client, keys, TOPIC, [ANYBODYS] * 20, log_ids=LOG_IDS, leader_epoch=0)


async def test_concurrent_takers_of_a_partition_share_one_transaction(join: Join, topic_id: uuid.UUID) -> None:
    member = await join(1)
    await member.begin()
    before = (await member.client.get_prefix(member.keys.leases)).revision
    await asyncio.gather(*(member.take(0) for _ in range(50)))
    assert (await member.client.get_prefix(member.keys.leases)).revision == before + 1
    log_directory = str(member.data_dir.partition_path(TOPIC, 0))
    opened = [file.path for file in psutil.Process().open_files() if file.path.startswith(log_directory)]
    assert len(opened) == 1, "the log is open more than once"


async def test_partition_changed_by_others_is_not_taken(join: Join, topic_id: uuid.UUID) -> None:
    """It may have been written meanwhile by the broker that is now alone in its ISR."""
    member = await join(1)
    await member.begin()
    await member.client.put(
        member.keys.state(TOPIC, 0), encode_value(StateValue(0, [ReplicaKey(2, topic_id)], topic_id))
    )
    assert await member.take(0, 1) == [1]


async def test_topic_deleted_meanwhile_is_not_taken(join: Join, topic_id: uuid.UUID) -> None:
    member = await join(1)
    await member.begin()
    await member.client.delete(member.keys.topic(TOPIC))
    assert await member.take(0) == []
    assert not (await member.client.get_prefix(member.keys.leases)).kvs


async def test_lost_answer_to_a_take_over_is_resolved(join: Join, topic_id: uuid.UUID) -> None:
    member = await join(1)
    fence = member.lease.fence
    assert fence is not None
    state = StateValue(4, [ReplicaKey(1, member.data_dir.log_id)], topic_id)
    await member.client.put(member.keys.state(TOPIC, 0), encode_value(state))
    await member.client.put(member.keys.lease(TOPIC, 0), b"1", lease_id=fence.lease_id)
    await member.begin()
    assert await member.take(0) == [0]
    assert member.manager.partitions[TOPIC.encode(), 0].leader_epoch == 4


async def test_partition_lost_and_retaken_reads_its_log_anew(join: Join, topic_id: uuid.UUID) -> None:
    member = await join(1)
    await member.begin()
    await member.take(0)
    first = member.manager.partitions[TOPIC.encode(), 0]
    await member.client.delete(member.keys.lease(TOPIC, 0))
    await member.look()
    assert member.manager.partitions == {}
    assert not first.serves_reads()
    await member.take(0)
    again = member.manager.partitions[TOPIC.encode(), 0]
    assert again is not first
    assert (first.leader_epoch, again.leader_epoch) == (1, 2)
    assert again.leadership.fencing_token > first.leadership.fencing_token


async def test_snapshot_before_take_over_does_not_end_it(join: Join, topic_id: uuid.UUID) -> None:
    member = await join(1)
    await member.begin()
    snapshots = [await member.client.get_prefix(prefix) for prefix in member.view.prefixes]
    await member.take(0)
    kvs = [kv for snapshot in snapshots for kv in snapshot.kvs]
    member.view.on_snapshot(Snapshot(snapshots[0].revision, snapshots[0].cluster_id, kvs))
    assert list(member.manager.partitions) == [(TOPIC.encode(), 0)]


async def test_key_of_deleted_topic_does_not_block_namesake(join: Join, topic_id: uuid.UUID) -> None:
    """Both happened unseen by the broker: the first topic's key is its own, and only it can delete it."""
    member = await join(1)
    await member.begin()
    running = asyncio.create_task(member.manager.run())
    await member.take(0)
    topic_key, lease_key = member.keys.topic(TOPIC), member.keys.lease(TOPIC, 0)
    await member.client.delete(topic_key)
    await put_topic(member.client, member.keys, TOPIC, [ANYBODYS], log_ids=LOG_IDS, leader_epoch=0)
    await member.look()
    async with asyncio.timeout(PATIENCE_S):
        while await member.client.get(lease_key) is not None:
            await asyncio.sleep(0.01)
        await member.look()
        while await member.take(0) != [0]:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_dead_fence_stops_all_take_overs(join: Join, topic_id: uuid.UUID) -> None:
    member = await join(1)
    await member.begin()
    assert member.lease.fence is not None
    member.lease.fence.break_for_good()
    assert await member.take(0) == []


async def test_restored_etcd_ends_every_ownership(join: Join, topic_id: uuid.UUID) -> None:
    member = await join(1)
    await member.begin()
    await member.take(0)
    member.view.on_restored()
    assert member.identity_lost == ["etcd was restored"]

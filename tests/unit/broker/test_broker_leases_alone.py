"""A broker's conclusions from etcd's changes: which partitions it leads, and in which epoch."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from kproxy.broker import election, replica_manager
from kproxy.broker.apis import bind_fences, produce
from kproxy.broker.cluster import ClusterView
from kproxy.broker.config import BrokerConfig
from kproxy.broker.context import Bindings, Broker, Request
from kproxy.broker.data_dir import DataDir
from kproxy.broker.fence_keeper import FenceKeeper
from kproxy.broker.keys import BrokerValue, Keys, PartitionKey, ReplicaKey, StateValue, TopicValue, encode_value
from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.partition import Inconsistent, Partition, ReplicaSettings
from kproxy.broker.replica_manager import ReplicaManager
from kproxy.etcd import KeyValue, Snapshot, WatchEvent, delete_op, put_op
from kproxy.etcd.lease import LeaseFence
from kproxy_codec.api_keys import BIND_FENCES
from kproxy_codec.framing import parse_request_header, request_header
from kproxy_codec.own import FenceBinding, encode_bind_fences_request
from kproxy_codec.primitives import INT32
from tests.support.brokers.replica_group import broker_value, on_disk
from tests.support.clients.raw_client import produce_frame
from tests.support.models.simulated_etcd import EtcdStore, SimulatedEtcdClient
from tests.support.waiting import eventually
from tests.support.wire.messages import topic_id
from tests.support.wire.record_batches import build_batch

KEYS = Keys("/p")
KEY = PartitionKey("t", 0)
TTL_S = 10


class Stage:
    """Broker 1's lease manager with a simulated etcd, whose changes are delivered when the test says so."""

    def __init__(self, directory: Path) -> None:
        self.store = EtcdStore(lambda: 0.0)
        self.client = SimulatedEtcdClient(self.store)
        self.view = ClusterView(KEYS)
        self.data_dir = DataDir.open(directory, 1)
        self.lost = ""
        self.leases = ReplicaManager(
            self.client,
            self.view,
            self.data_dir,
            1,
            settings_of=lambda *_: ReplicaSettings(1, lambda: 0.0),
            on_identity_lost=self._on_identity_lost,
        )
        self.fence = LeaseFence(0, lambda: 0.0)
        self._told = 0
        self._running: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
        await self.leases.close()
        self.data_dir.close()

    def _on_identity_lost(self, reason: str) -> None:
        self.lost = reason

    async def put(self, key: str, value: BrokerValue | TopicValue | StateValue, lease_id: int = 0) -> None:
        await self.client.txn([], [put_op(key, encode_value(value), lease_id)])

    async def put_topic(self, topic_id: uuid.UUID, replicas: list[int], isr: list[ReplicaKey] | None = None) -> None:
        """Put topic `t`, which no broker has led, with the ISR `isr`, or broker 1 alone."""
        isr = isr or [ReplicaKey(1, self.data_dir.log_id)]
        await self.put(KEYS.state("t", 0), StateValue(-1, isr, topic_id))
        await self.put(KEYS.topic("t"), TopicValue(topic_id, [replicas], {}))

    async def begin(self) -> None:
        """Start broker 1."""
        lease = await self.client.lease_grant(TTL_S)
        fence = LeaseFence(lease.lease_id, lambda: 0.0)
        fence.renew(0.0, TTL_S)
        self.fence = fence
        await self.put(KEYS.broker(1), broker_value(1), lease.lease_id)
        fence.claim_revision = self._told = self.store.revision
        self.view.on_snapshot(self.store.snapshot(self.view.prefixes))
        self.leases.begin(fence)

    async def begin_alone(self) -> uuid.UUID:
        """Start broker 1, which alone keeps a topic; return the topic's id."""
        topic_id = uuid.uuid4()
        await self.put_topic(topic_id, [1])
        await self.begin()
        return topic_id

    def run(self) -> None:
        """Let it take partitions as they become due, until the test ends."""
        self._running = asyncio.create_task(self.leases.run())

    def tell(self) -> None:
        """Deliver the changes since the last call."""
        for revision, events in self.store.events_after(self._told):
            self._told = revision
            self.view.on_events(events, revision)

    def restore(self) -> None:
        """Restore etcd to its state at the beginning."""
        self.store = self.client.store = EtcdStore(lambda: 0.0)

    async def recreate_topic(self) -> uuid.UUID:
        """Delete the topic and create it again; return the new id."""
        topic_id = uuid.uuid4()
        await self.client.txn([], [delete_op(KEYS.topic("t")), delete_op(KEYS.state("t", 0))])
        await self.put_topic(topic_id, [1])
        return topic_id

    def tell_snapshot(self) -> None:
        """Deliver a snapshot, as after a watch that was broken for longer than etcd keeps its history."""
        self._told = self.store.revision
        self.view.on_snapshot(self.store.snapshot(self.view.prefixes))

    def leads(self, topic_id: uuid.UUID) -> bool:
        """Whether it leads the topic with this id, after the delivery of all changes."""
        self.tell()
        led = self.leases.led(b"t", 0)
        return led is not None and led.topic_id == topic_id

    async def take(self) -> Partition | None:
        await self.leases.take([KEY], 5.0)
        return self.leases.led(b"t", 0)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    await stage.close()


async def test_topic_created_and_deleted_unseen_is_no_error(stage: Stage) -> None:
    """A watch that resumes reports both at once, which once ended the mirror and the broker."""
    stage.view.on_snapshot(Snapshot(1, 1, []))
    value = encode_value(TopicValue(uuid.uuid4(), [[1]], {}))
    put = WatchEvent(False, KeyValue(KEYS.topic("t"), value, 2, 2, 1, 0))
    gone = WatchEvent(True, KeyValue(KEYS.topic("t"), b"", 0, 3, 0, 0))
    stage.view.on_events([put, gone], 3)
    assert not stage.view.topics


async def test_concurrent_takers_share_one_transaction(stage: Stage) -> None:
    await stage.begin_alone()
    before = stage.store.revision
    await asyncio.gather(*(stage.take() for _ in range(50)))
    assert stage.store.revision == before + 1
    log_directory = str(stage.data_dir.partition_path("t", 0))
    opened = [file.path for file in psutil.Process().open_files() if file.path.startswith(log_directory)]
    assert len(opened) == 1, "the log is open more than once"


async def _other_is_alone_in_isr(stage: Stage, topic_id: uuid.UUID) -> None:
    await stage.put(KEYS.state("t", 0), StateValue(-1, [on_disk(2)], topic_id))


async def _topic_is_deleted(stage: Stage, _: uuid.UUID) -> None:
    await stage.client.txn([], [delete_op(KEYS.topic("t"))])


async def _lease_is_over(stage: Stage, _: uuid.UUID) -> None:
    stage.fence.break_for_good()


@pytest.mark.parametrize("happen", [_other_is_alone_in_isr, _topic_is_deleted, _lease_is_over])
async def test_unseen_change_prevents_take_over(
    stage: Stage, happen: Callable[[Stage, uuid.UUID], Awaitable[None]]
) -> None:
    """The broker's view does not show it: only the transaction, or the fence, decides."""
    topic_id = await stage.begin_alone()
    await happen(stage, topic_id)
    assert await stage.take() is None
    assert stage.store.get(KEYS.lease(*KEY)) is None


async def test_lost_answer_to_a_take_over_is_resolved(stage: Stage) -> None:
    topic_id = await stage.begin_alone()
    await stage.put(KEYS.state("t", 0), StateValue(4, [ReplicaKey(1, stage.data_dir.log_id)], topic_id))
    await stage.client.txn([], [put_op(KEYS.lease(*KEY), b"1", stage.fence.lease_id)])
    stage.tell()
    led = await stage.take()
    assert led is not None
    assert led.leader_epoch == 4


async def test_partition_lost_and_retaken_reads_its_log_anew(stage: Stage) -> None:
    await stage.begin_alone()
    first = await stage.take()
    assert first is not None
    await stage.client.txn([], [delete_op(KEYS.lease(*KEY))])
    stage.tell()
    assert stage.leases.partitions == {}
    assert not first.serves_reads()
    again = await stage.take()
    assert again is not None
    assert again is not first
    assert (first.leader_epoch, again.leader_epoch) == (0, 1)
    assert again.leadership.fencing_token > first.leadership.fencing_token


async def test_snapshot_before_take_over_does_not_end_it(stage: Stage) -> None:
    await stage.begin_alone()
    before = stage.store.snapshot(stage.view.prefixes)
    led = await stage.take()
    stage.view.on_snapshot(before)
    assert stage.leases.led(b"t", 0) is led is not None


async def test_new_epoch_exceeds_all_obeyed_here(stage: Stage) -> None:
    """A restored etcd remembers an earlier epoch without records: a replica that obeyed it refuses this leader."""
    topic_id = uuid.uuid4()
    await stage.put(KEYS.topic("t"), TopicValue(topic_id, [[1, 2]], {}))
    await stage.put(KEYS.state("t", 0), StateValue(5, [ReplicaKey(1, stage.data_dir.log_id), on_disk(2)], topic_id))
    log = stage.data_dir.open_log("t", 0, topic_id)
    log.checkpoint(0, Leadership(8, 100))
    log.close()
    await stage.begin()
    led = await stage.take()
    assert led is not None
    assert led.leader_epoch == 9


@pytest.mark.parametrize("tell", [Stage.tell_snapshot, Stage.tell])
async def test_lease_key_of_deleted_topic_blocks_no_leader(stage: Stage, tell: Callable[[Stage], None]) -> None:
    """Whether or not the deletion was seen: while the old key exists, no other broker can take the partition."""
    await stage.begin_alone()
    stage.run()
    assert await stage.take() is not None
    topic_id = await stage.recreate_topic()
    tell(stage)

    await eventually(lambda: stage.leads(topic_id), what="a leader of the new topic")
    lease, topic = stage.store.get(KEYS.lease(*KEY)), stage.store.get(KEYS.topic("t"))
    assert lease is not None
    assert topic is not None
    assert lease.create_revision > topic.create_revision, "led behind the key of the old one"


async def test_topic_created_after_etcd_restore_is_seen(stage: Stage) -> None:
    """Its revisions are lower than the earlier ones; a replica that counts as another would not lead."""
    for _ in range(20):
        await stage.put(KEYS.broker(9), broker_value(9))
    await stage.begin()
    stage.view.on_restored()
    assert stage.lost == "etcd was restored"
    stage.leases.drop_all(stage.lost)
    stage.restore()
    await stage.begin()
    topic_id = uuid.uuid4()
    await stage.put(KEYS.topic("t"), TopicValue(topic_id, [[2, 1]], {}))
    await stage.put(KEYS.state("t", 0), StateValue(0, [on_disk(2), ReplicaKey(1, stage.data_dir.log_id)], topic_id))
    stage.tell()
    stage.run()
    led = await stage.take()
    assert led is not None


async def test_out_of_sync_log_does_not_lead(stage: Stage) -> None:
    """Its disk was replaced: the committed records are on other brokers or on the old disk."""
    topic_id = uuid.uuid4()
    await stage.put(KEYS.topic("t"), TopicValue(topic_id, [[1, 2]], {}))
    await stage.put(KEYS.state("t", 0), StateValue(5, [on_disk(1), on_disk(2)], topic_id))
    await stage.begin()
    assert await stage.take() is None
    await stage.put(KEYS.state("t", 0), StateValue(5, [ReplicaKey(1, stage.data_dir.log_id)], topic_id))
    stage.tell()
    assert await stage.take() is not None


async def test_next_replica_takes_partition_the_first_cannot(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first broker lives, but its disk accepts no new log: once no broker led the partition then."""
    monkeypatch.setattr(election, "START_GRACE_S", 0.0)
    monkeypatch.setattr(election, "UNWRITTEN_DELAY_S", 0.2)
    topic_id = uuid.uuid4()
    await stage.put(KEYS.broker(2), broker_value(2))
    await stage.put_topic(topic_id, [2, 1], [ReplicaKey(1, stage.data_dir.log_id), on_disk(2)])
    await stage.begin()
    stage.run()
    assert await stage.take() is None, "a client's touch took what is wanted elsewhere"
    await eventually(lambda: stage.leads(topic_id), what="the next one's turn")


async def test_fence_bind_takes_a_never_taken_partition(stage: Stage) -> None:
    await stage.put_topic(topic_id("t"), [1])
    await stage.begin()
    fence = stage.store.revision
    nobody = cast(Any, None)
    keeper = FenceKeeper(stage.client, stage.view, on_deposed=stage.leases.deposed)
    broker = Broker(BrokerConfig(1, Path(), ()), "cluster", stage.view, stage.leases, nobody, nobody, keeper, nobody)
    message = request_header(BIND_FENCES, 0, 1, b"") + encode_bind_fences_request([FenceBinding("t", 0, fence)])
    frame = memoryview(INT32.pack(len(message)) + message)
    bindings: Bindings = {}
    answer = bind_fences.handle(broker, Request(frame, parse_request_header(frame), bindings))
    assert isinstance(answer, Awaitable)
    await answer
    led = stage.leases.led(b"t", 0)
    assert led is not None
    assert (led.writers.fence, led.writers.is_owned) == (fence, True)
    assert bindings == {(b"t", 0): fence}


async def test_unreadable_fence_prevents_leading(stage: Stage) -> None:
    await stage.put_topic(uuid.uuid4(), [1])
    await stage.client.txn([], [put_op(KEYS.fence("t", 0), b"what?")])
    await stage.begin()
    assert await stage.take() is None
    await stage.client.txn([], [delete_op(KEYS.fence("t", 0))])
    stage.tell()
    assert await stage.take() is not None


async def test_records_for_deleted_topic_id_miss_its_namesake(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic was deleted and created again while the request waited for its take-over (KIP-516)."""
    await stage.put_topic(topic_id("t"), [1])
    await stage.begin()
    take = stage.leases.take

    async def take_late(keys: Iterable[PartitionKey], timeout_s: float) -> None:
        await stage.recreate_topic()
        stage.tell()
        await asyncio.sleep(0.2)  # the old owner's log is removed
        await take(keys, timeout_s)
        assert stage.leases.led(b"t", 0) is not None

    monkeypatch.setattr(stage.leases, "take", take_late)
    nobody = cast(Any, None)
    broker = Broker(BrokerConfig(1, Path(), ()), "cluster", stage.view, stage.leases, nobody, nobody, nobody, nobody)
    frame = memoryview(produce_frame(records=bytes(build_batch([b"v"])), version=13, acks=1))
    answer = produce.handle(broker, Request(frame, parse_request_header(frame), {}))
    assert isinstance(answer, Awaitable)
    await answer
    led = stage.leases.led(b"t", 0)
    assert led is not None
    assert led.log_end_offset == 0


@pytest.mark.parametrize("error", [OSError("no room"), Inconsistent("beyond the end"), RuntimeError("unforeseen")])
async def test_leader_that_cannot_begin_returns_its_key(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Its transaction has created the key, so no broker would lead as long as this broker lives."""
    topic_id = await stage.begin_alone()
    tried: list[int] = []

    def fail(partition: Partition, leadership: Leadership, *_: Any) -> None:
        tried.append(leadership.fencing_token)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Partition, "become_leader", fail)
        assert await stage.take() is None
        await eventually(lambda: stage.store.get(KEYS.lease(*KEY)) is None, what="the key is given back")
        stage.tell()
        assert await stage.take() is None
        assert len(tried) == 1, "it is not tried again at once"
    monkeypatch.setattr(replica_manager, "SWEEP_INTERVAL_S", 0.01)
    stage.run()
    await eventually(lambda: stage.leads(topic_id), what="another try, after the next sweep")


async def test_sweeps_leave_settled_partitions_alone(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    topic_id = await stage.begin_alone()
    monkeypatch.setattr(replica_manager, "SWEEP_INTERVAL_S", 0.01)
    monkeypatch.setattr(replica_manager, "SWEEPS_PER_LOOK_AT_ALL", 1 << 30)
    looks: Counter[PartitionKey] = Counter()
    is_settled = ReplicaManager._is_settled

    def count(manager: ReplicaManager, key: PartitionKey) -> bool:
        looks[key] += 1
        return is_settled(manager, key)

    monkeypatch.setattr(ReplicaManager, "_is_settled", count)
    stage.run()
    await eventually(lambda: stage.leads(topic_id), what="the lead")
    began, before = stage.leases._sweeps, looks[KEY]
    await eventually(lambda: stage.leases._sweeps > began + 20, what="sweeps")
    assert looks[KEY] <= before + 2
    monkeypatch.setattr(replica_manager, "SWEEPS_PER_LOOK_AT_ALL", 5)
    await eventually(lambda: looks[KEY] > before + 4, what="looks at all")

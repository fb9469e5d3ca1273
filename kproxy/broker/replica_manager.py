"""Take partitions for this broker to lead, hold their leases, and give them up.

States of a partition
  absent      not hosted: another broker's, or not opened yet
  following   hosted, and led by another broker or by none
  working     one task opens the log or asks etcd; other callers wait for the same task
  led         in `partitions`, behind the fence of the lease it was taken with

Transitions
  absent    -> working     the broker keeps a replica, or may take the partition
  working   -> following   the log is open; this broker may not take the partition, or failed to: the sweep tries again
  following -> working     a change in etcd lets this broker take it, a client requests it, or the sweep finds it
  working   -> led         Txn: lease key absent, state and topic unchanged -> lease key on our lease, leader epoch + 1
  working   -> following   the Txn succeeded but the log cannot begin an epoch: the key is released, for other brokers
                           or a retry after the next sweep
  led       -> absent      our key is gone or another broker's, the lease is lost, the disk fails while another live
                           replica is in sync (`disk_watch`), or the preferred replica is in sync again and is to lead
  any       -> absent      the topic is deleted; or the log has failed or cannot be opened: then the sweep tries again

`election` decides which broker takes a partition, and when.

Invariants
1. A partition is led only between a successful Txn and the first sign that its key is gone. State in memory is dropped
   with the leadership, and the log is reread first. So a lead that moves from A to B and back to A never reuses an
   offset.
2. A key is ours if it is on our lease. Its value, a broker id, does not prove this: a predecessor may have that id.
3. A release deletes only our own key. A key of a deleted topic is released as soon as it is seen, whatever the outcome
   of earlier attempts: it would keep a new topic of that name from being led.
4. At most one task works on a partition, and its log is open at most once: `HostedReplicas` opens and closes for that
   task alone. A closed replica is reopened from the disk.
5. For a partition whose disk fails, other candidates come first. Without one, this broker continues to lead, and
   refuses what its disk refuses.
6. A stop refuses writes first, lets live in-sync followers reach the log's end, and only then gives up the lease.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from kproxy.broker.cluster import Change, ClusterView, Kind, Ownership, Topic
from kproxy.broker.data_dir import DataDir
from kproxy.broker.disk_watch import DiskWatch
from kproxy.broker.election import (
    HAND_OVER_TIMEOUT_S,
    NOT_A_CANDIDATE,
    ElectionQueue,
    LeaderRebalance,
    candidate_place,
    is_in_sync,
    was_led,
)
from kproxy.broker.hosted_replicas import HostedReplicas
from kproxy.broker.keys import PartitionKey, StateValue, node_ids
from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.lease_txn import LeaseReleases, TakeOver
from kproxy.broker.partition import Inconsistent, Partition, ReplicaSettings
from kproxy.broker.replication.partition_replication import Isr, Role
from kproxy.broker.segment import LogFailed
from kproxy.etcd import EtcdClient, EtcdError
from kproxy.etcd.lease import LeaseFence

_logger = structlog.get_logger(__name__)


CONCURRENT_WORKS = 16
SWEEP_INTERVAL_S = 3.0
SWEEPS_PER_LOOK_AT_ALL = 10
CLOSE_TIMEOUT_S = 2.0


class ReplicaManager:
    """Takes partitions and holds their leases. The caller owns the coroutine `run`; `close` ends everything else."""

    def __init__(
        self,
        client: EtcdClient,
        view: ClusterView,
        data_dir: DataDir,
        node_id: int,
        *,
        settings_of: Callable[[Topic, int], ReplicaSettings],
        on_identity_lost: Callable[[str], None],
        hand_over_after_s: float = float("inf"),
        disk_patience_s: float = float("inf"),
        on_leaders_changed: Callable[[PartitionKey], None] = lambda _: None,
    ) -> None:
        """`on_identity_lost` is called with a reason when the broker's key is gone. A partition that this broker has
        led for `hand_over_after_s` seconds goes back to its first replica, once that is in sync. A partition whose disk
        fails for `disk_patience_s` seconds goes to another replica in sync. `on_leaders_changed`: as in HostedReplicas.
        """
        self.partitions: dict[tuple[bytes, int], Partition] = {}
        self.replicas = HostedReplicas(view, data_dir, node_id, settings_of, on_leaders_changed)
        self.stopping = False
        # Count of ended leaderships by reason.
        self.ended: Counter[str] = Counter()
        self._client = client
        self._view = view
        self._keys = view.keys
        self._data_dir = data_dir
        self._node_id = node_id
        self._on_identity_lost = on_identity_lost
        self._releases = LeaseReleases(client, view.keys, lambda fence: self._fence is fence and not self.stopping)
        self._fence: LeaseFence | None = None
        self._working: dict[PartitionKey, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Partitions that the running task takes, besides hosting them.
        self._to_take: set[PartitionKey] = set()
        # Partitions that this broker took but could not lead; others may take them until the next sweep.
        self._failed_to_lead: set[PartitionKey] = set()
        self._slots = asyncio.Semaphore(CONCURRENT_WORKS)
        self._queued: set[PartitionKey] = set()
        self._rebalance = LeaderRebalance(view, node_id, self.partitions, hand_over_after_s)
        self._election = ElectionQueue(view, node_id, self._queue)
        self._unsettled: set[PartitionKey] = set()
        self._sweeps = 0
        self.disk = DiskWatch(self._restless, lambda: data_dir.probe(), disk_patience_s, self._on_mended)
        self._wake = asyncio.Event()
        view.subscribe(self._on_change)

    @property
    def hosted(self) -> dict[tuple[bytes, int], Partition]:
        """Every replica on this broker, including led ones."""
        return self.replicas.hosted

    def _restless(self) -> list[Partition]:
        return [partition for partition in self.hosted.values() if not partition.is_at_rest]

    # Called by the rest of the broker

    @property
    def holds_lease(self) -> bool:
        """Whether the broker's lease is certain to live: etcd has answered within its time."""
        return self._fence is not None and self._fence.is_live()

    def led(self, topic: bytes, partition_index: int) -> Partition | None:
        """Return the partition if this broker leads it now."""
        return self.partitions.get((topic, partition_index))

    def may_take(self, topic: str, partition_index: int) -> bool:
        """Return whether a client's request may make this broker take the partition."""
        key = PartitionKey(topic, partition_index)
        return self._may_take(key) and self._may_take_for_client(key)

    async def take(self, keys: Iterable[PartitionKey], timeout_s: float) -> None:
        """Take these partitions if this broker may; stop waiting after `timeout_s`."""
        tasks = [self._start_work(key, take=True) for key in keys if self.may_take(*key)]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def begin(self, fence: LeaseFence) -> None:
        """Begin with a new lease: take the partitions that this broker may take."""
        self._fence = fence
        self._election.begin()
        self._check_identity()
        self._queue_all()

    async def settle(self, timeout_s: float) -> None:
        """Wait until no work is queued or running.

        At most `timeout_s`; partitions that wait for other candidates do not count.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (self._queued or self._working) and loop.time() < deadline:
            if self._working:
                await asyncio.wait(self._working.values(), timeout=deadline - loop.time())
            await asyncio.sleep(0)

    def drop_all(self, reason: str) -> None:
        """Drop every leadership because the lease is gone; the replicas are closed, and reopened as followers."""
        self._fence = None
        for topic, partition_index in list(self.partitions):
            self._drop(PartitionKey(topic.decode(), partition_index), reason)

    def resign_all(self) -> None:
        """Take no more partitions and refuse writes: the broker stops."""
        self.stopping = True
        for partition in self.partitions.values():
            partition.resign()

    async def drain(self, timeout_s: float) -> None:
        """Let live in-sync followers reach the ends of the logs led here."""
        await self._rebalance.wait_for_followers(self.partitions.values(), timeout_s)

    async def close(self) -> None:
        """Drop all leaderships, close all replicas and wait for the tasks."""
        self.stopping = True
        self.drop_all("the broker stops")
        self._election.close()
        self.disk.close()
        tasks = {*self._working.values(), *self._tasks}
        if tasks:
            # A task may wait for a disk that hangs.
            _, hanging = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            for task in hanging:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for key in self.replicas.hosted_keys():
            self.replicas.close(key)

    # Taking partitions

    async def run(self) -> None:
        """Host and take partitions as they become due, until cancelled."""
        loop = asyncio.get_running_loop()
        next_sweep_at = loop.time() + SWEEP_INTERVAL_S
        next_look_at = loop.time() + self.disk.interval_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(next_sweep_at, next_look_at)):
                    await self._wake.wait()
            if loop.time() >= next_look_at:
                self._look_at_disk()
                next_look_at = loop.time() + self.disk.interval_s
            # Sweep in time, even under load.
            if loop.time() >= next_sweep_at:
                self._sweep()
                next_sweep_at = loop.time() + SWEEP_INTERVAL_S
            self._wake.clear()
            wanted, self._queued = self._queued, set()
            self._unsettled |= wanted
            for key in wanted:
                self._process(key)

    def _process(self, key: PartitionKey) -> None:
        """Run the next step for a partition."""
        fence, ownership = self._fence, self._view.ownership(*key)
        if fence is not None and ownership is not None and self._is_of_deleted_topic(key, ownership, fence):
            self._start(self._release(key, ownership.mod_revision, fence))
        elif self._may_take_now(key):
            self._start_work(key, take=True)
        elif self._wants_hosting(key):
            self._start_work(key, take=False)

    def _queue_all(self) -> None:
        for topic in self._view.topics.values():
            self._queued.update(PartitionKey(topic.name, index) for index in range(len(topic.replicas)))
        self._wake.set()

    def _queue(self, key: PartitionKey) -> None:
        self._queued.add(key)
        self._wake.set()

    def _topic_of(self, key: PartitionKey) -> Topic | None:
        topic = self._view.topics.get(key.topic)
        return topic if topic is not None and 0 <= key.partition_index < len(topic.replicas) else None

    def _wants_hosting(self, key: PartitionKey) -> bool:
        topic = self._topic_of(key)
        if topic is None or self.stopping or self.replicas.get(key) is not None:
            return False
        return self._node_id in topic.replicas[key.partition_index]

    def _may_take(self, key: PartitionKey) -> bool:
        topic, fence = self._topic_of(key), self._fence
        if topic is None or fence is None or self.stopping or not fence.is_live() or key in self._releases.under_way:
            return False
        if key in self._failed_to_lead:
            return False
        partition = self.replicas.get(key)
        if partition is not None and (partition.role is not Role.FOLLOWER or partition.failure):
            return False
        ownership = self._view.ownership(*key)
        if ownership is not None:
            # A key on our own lease without a partition: the answer to a Txn was lost.
            return ownership.lease_id == fence.lease_id and not self._is_of_deleted_topic(key, ownership, fence)
        if partition is not None and not is_in_sync(self._view, topic, key.partition_index, partition.replica):
            return False
        place = candidate_place(self._view, topic, key.partition_index, self._node_id, count_dead=False)
        return place != NOT_A_CANDIDATE

    def _may_take_for_client(self, key: PartitionKey) -> bool:
        """Return whether a client's request may take this partition here.

        Clients may send requests for a new partition to any broker, but it should begin on its preferred one. If that
        broker cannot take it, another one takes it after a delay.
        """
        topic = self._topic_of(key)
        if topic is None or self._view.ownership(*key) is not None:
            return True
        if self._stands_back(key):
            return False
        if was_led(self._view, topic, key.partition_index):
            return True
        return candidate_place(self._view, topic, key.partition_index, self._node_id, count_dead=False) == 0

    def _may_take_now(self, key: PartitionKey) -> bool:
        topic = self._topic_of(key)
        if topic is None or not self._may_take(key):
            self._election.done(key)
            return False
        return self._election.may_take_now(key, topic, stands_back=self._stands_back(key))

    def _stands_back(self, key: PartitionKey) -> bool:
        """Return whether another broker should take the partition because the disk fails here."""
        partition = self.replicas.get(key)
        is_unreadable = partition is not None and partition.unreadable is not None
        return (is_unreadable or self.disk.stands_back(key)) and self._another_may_lead(key)

    def _another_may_lead(self, key: PartitionKey) -> bool:
        """Return whether another live broker is in sync."""
        topic = self._topic_of(key)
        state = self._view.state(topic, key.partition_index) if topic is not None else None
        if state is None:
            return False
        return any(each != self._node_id and each in self._view.brokers for each in state.in_sync)

    def _start_work(self, key: PartitionKey, *, take: bool) -> asyncio.Task[None]:
        if take:
            self._to_take.add(key)
        task = self._working.get(key)
        if task is None:
            task = self._working[key] = asyncio.create_task(self._work(key), name=f"work on {key}")
            task.add_done_callback(lambda done: self._on_work_done(key, done))
        return task

    def _on_work_done(self, key: PartitionKey, task: asyncio.Task[None]) -> None:
        self._working.pop(key, None)
        self._election.done(key)
        if not task.cancelled() and task.exception() is not None:
            _logger.error("partition failed", topic=key.topic, partition=key.partition_index, exc_info=task.exception())
        elif key not in self._to_take:
            # It was just opened; this broker may be able to take it.
            self._queue(key)
        self._to_take.discard(key)

    async def _work(self, key: PartitionKey) -> None:
        """Open the log if it is not open, then take the partition if this broker may."""
        async with self._slots:
            topic = self._topic_of(key)
            if topic is None or self.stopping:
                return
            partition = await self.replicas.open(key, topic)
            fence = self._fence
            if partition is None or fence is None or key not in self._to_take or not self._may_take(key):
                return
            try:
                await self._take(key, topic, partition, fence)
            except (EtcdError, ValueError, OSError, LogFailed, Inconsistent) as error:
                _logger.warning(
                    "partition not acquired", topic=topic.name, partition=key.partition_index, reason=str(error)
                )

    async def _take(self, key: PartitionKey, topic: Topic, partition: Partition, fence: LeaseFence) -> None:
        """Become the leader, if the transaction succeeds.

        Raises EtcdError, ValueError, and what `Partition.become_leader` raises; then the key is released.
        """
        state = self._view.state(topic, key.partition_index)
        if state is None:
            return  # the next check finds the reason
        take_over = TakeOver(self._client, self._keys, self._node_id, key, topic)
        # The epochs in our own log also count: a restored etcd may hold an earlier epoch than one that was obeyed and
        # wrote no records. A replica that obeyed an epoch follows no lower one.
        known_epoch = max(partition.log.leader_epochs.latest, partition.leadership.leader_epoch)
        next_state = StateValue(max(state.leader_epoch, known_epoch) + 1, state.isr, state.topic_id)
        taken = await take_over.attempt(fence.lease_id, next_state, state.mod_revision, known_epoch=known_epoch)
        if taken is None or self._fence is not fence or not fence.is_live() or self.stopping:
            return
        if self.replicas.get(key) is not partition:
            return  # closed meanwhile; the next look finds the key on our lease
        self._election.owned(key)
        try:
            partition.become_leader(
                Leadership(taken.state.leader_epoch, taken.token),
                topic.replicas[key.partition_index],
                Isr(frozenset(taken.state.isr), taken.revision),
                fence,
                taken.fence,
            )
        except Exception:
            self._failed_to_lead.add(key)
            self._start(self._release(key, taken.token, fence))
            raise
        self.partitions[topic.name.encode(), key.partition_index] = partition
        self._rebalance.begun(key)
        self.replicas.on_leaders_changed(key)
        self._view.apply_put(self._keys.state(*key), taken.value, lease_id=0, revision=taken.revision)
        owner = take_over.owner
        if not self._view.apply_put(self._keys.lease(*key), owner, lease_id=fence.lease_id, revision=taken.token):
            self._check_still_led(key)
        _logger.info(
            "partition acquired",
            topic=topic.name,
            partition=key.partition_index,
            leader_epoch=taken.state.leader_epoch,
            isr=node_ids(taken.state.isr),
            log_end_offset=partition.log_end_offset,
        )

    # Losing partitions

    def deposed(self, partition: Partition) -> None:
        """Drop a partition whose lease key is no longer ours according to etcd."""
        if self.partitions.get((partition.topic.encode(), partition.partition_index)) is partition:
            self._drop(PartitionKey(partition.topic, partition.partition_index), "another may own it")

    def _on_change(self, change: Change) -> None:
        if change.kind is Kind.SNAPSHOT:
            self._on_snapshot()
        elif change.kind is Kind.RESTORED:
            # Our lease belongs to a lost history of etcd.
            self._on_identity_lost("etcd was restored")
        elif change.kind is Kind.BROKER:
            if change.node_id == self._node_id:
                self._check_identity()
            for key in self.replicas.hosted_keys():
                self.replicas.point_at_leader(key)
            self._queue_all()
        elif change.kind is Kind.TOPIC:
            if change.deleted is not None:
                self._forget(change.deleted)
            else:
                # A later change in the same batch may have removed the topic again.
                created = self._view.topics.get(change.topic)
                for partition_index in range(len(created.replicas) if created is not None else 0):
                    self._queue(PartitionKey(change.topic, partition_index))
        else:
            key = PartitionKey(change.topic, change.partition_index)
            if change.kind is Kind.OWNER:
                self._on_owner(key)
            self.replicas.point_at_leader(key)
            self._queue(key)

    def _on_owner(self, key: PartitionKey) -> None:
        self._check_still_led(key)
        if self._view.ownership(*key) is None and self._topic_of(key) is not None:
            self._election.orphaned(key)
        else:
            self._election.owned(key)

    def _on_snapshot(self) -> None:
        """Compare with a snapshot, which does not show our own later changes."""
        revision = self._view.snapshot_revision
        for partition in list(self.partitions.values()):
            if partition.leadership.fencing_token <= revision:
                self._check_still_led(PartitionKey(partition.topic, partition.partition_index))
        for key in self.replicas.hosted_keys():
            topic, hosted = self._topic_of(key), self.replicas.get(key)
            if topic is None or (hosted is not None and hosted.topic_id != topic.topic_id):
                self._drop(key, "its topic is gone")
            self.replicas.point_at_leader(key)
        for topic in self._view.topics.values():
            lost = sum(self._view.state(topic, index) is None for index in range(len(topic.replicas)))
            if lost:
                advice = "restore etcd from a newer snapshot, or delete the topic: nobody can tell who has its records"
                _logger.error("partition states lost", topic=topic.name, partitions=lost, advice=advice)
        if self._fence is not None and self._fence.claim_revision <= revision:
            self._check_identity()
        self._queue_all()

    def _check_still_led(self, key: PartitionKey) -> None:
        if self.led(key.topic.encode(), key.partition_index) is None:
            return
        ownership, fence = self._view.ownership(*key), self._fence
        if fence is None or ownership is None or ownership.lease_id != fence.lease_id:
            self._drop(key, "its lease key is gone")

    def _check_identity(self) -> None:
        fence, broker = self._fence, self._view.brokers.get(self._node_id)
        if fence is not None and (broker is None or broker.lease_id != fence.lease_id):
            self._on_identity_lost(f"the key {self._keys.broker(self._node_id)} is not ours any more")

    def _drop(self, key: PartitionKey, reason: str) -> None:
        """Close the replica, led or not; it is reopened if this broker still hosts it."""
        led = self.partitions.pop((key.topic.encode(), key.partition_index), None)
        self._rebalance.ended(key)
        self.replicas.close(key)
        if led is not None:
            self.ended[reason] += 1
            log = _logger.info if self.stopping else _logger.warning
            log("partition closed", topic=key.topic, partition=key.partition_index, reason=reason)
        self._queue(key)

    # Giving partitions up

    def _sweep(self) -> None:
        """Check every unsettled partition, and periodically all, in case a change went unnoticed."""
        self._failed_to_lead.clear()
        for partition in self._restless():
            if partition.log.failure is None:
                continue
            key = PartitionKey(partition.topic, partition.partition_index)
            if partition.replication.is_leading:
                self.disk.gave_up(key)
                self._start(self._give_up(key, "its log has failed"))
            else:
                self._drop(key, "its log has failed")
        # A broker that still has logs to open would follow late, and so leave the ISR.
        if not self._working:
            for key in self._rebalance.next_batch():
                self._start(self._hand_over(key))
        if self._sweeps % SWEEPS_PER_LOOK_AT_ALL == 0:
            for topic in self._view.topics.values():
                self._unsettled.update(PartitionKey(topic.name, index) for index in range(len(topic.replicas)))
        self._sweeps += 1
        self._unsettled = {key for key in self._unsettled if not self._is_settled(key)}
        self._queued |= self._unsettled
        self._wake.set()

    def _is_settled(self, key: PartitionKey) -> bool:
        """Return whether the partition has an owner and is hosted here, or led if that is us."""
        topic = self._topic_of(key)
        if topic is None:
            return True
        ownership, partition = self._view.ownership(*key), self.replicas.get(key)
        if ownership is None or partition is None or ownership.mod_revision < topic.create_revision:
            return False
        return partition.replication.is_leading == (ownership.node_id == self._node_id)

    def _on_mended(self) -> None:
        """Retry partitions that could not be written or fetched."""
        for key in self.replicas.hosted_keys():
            self.replicas.on_leaders_changed(key)

    def _look_at_disk(self) -> None:
        """Give up partitions that others can lead and whose disk has failed here for too long."""
        self.disk.look()
        if not self.disk.has_faults:
            return
        for partition in list(self.partitions.values()):
            if partition.role is Role.LEADER and partition.log.failure is None and self.disk.fault_of(partition):
                key = PartitionKey(partition.topic, partition.partition_index)
                if self._another_may_lead(key):
                    partition.resign()
                    self._start(self._leave(key, partition, self.disk.fault_of(partition)))

    async def _leave(self, key: PartitionKey, partition: Partition, fault: str) -> None:
        """Give up the resigned partition, whether or not its followers can still get the rest of its log."""
        await self._rebalance.wait_for_followers([partition], HAND_OVER_TIMEOUT_S)
        if self.stopping or self.led(key.topic.encode(), key.partition_index) is not partition:
            return
        if self._another_may_lead(key):
            self.disk.gave_up(key)
            _logger.error("disk fails", **partition.log_fields, reason=fault)
            await self._give_up(key, "its disk fails")
        else:
            partition.replication.resume()

    async def _hand_over(self, key: PartitionKey) -> None:
        if await self._rebalance.prepare(key, lambda: self.stopping):
            await self._give_up(key, "the replica that stands first is to lead it")

    async def _give_up(self, key: PartitionKey, reason: str) -> None:
        """Stop leading the partition and release its lease key."""
        fence, partition = self._fence, self.led(key.topic.encode(), key.partition_index)
        if fence is not None and partition is not None:
            self._drop(key, reason)
            await self._release(key, partition.leadership.fencing_token, fence)

    async def _release(self, key: PartitionKey, token: int, fence: LeaseFence) -> None:
        await self._releases.release(key, token, fence)
        ownership = self._view.ownership(*key)
        if ownership is None or ownership.mod_revision != token:
            self._queue(key)  # otherwise when the view reports the deletion

    def _is_of_deleted_topic(self, key: PartitionKey, ownership: Ownership, fence: LeaseFence) -> bool:
        """Return whether a key on our lease belongs to a deleted topic, even if a new one has its name."""
        topic = self._topic_of(key)
        return ownership.lease_id == fence.lease_id and (
            topic is None or ownership.mod_revision < topic.create_revision
        )

    def _forget(self, topic: Topic) -> None:
        """Close a deleted topic's replicas and remove their logs. `_process` releases its keys."""
        for partition_index in range(len(topic.replicas)):
            key = PartitionKey(topic.name, partition_index)
            self._election.owned(key)
            self._drop(key, "its topic is deleted")
        self.replicas.forget(topic)
        self._data_dir.mark_deleted(topic.topic_id)
        self._start(self._remove(topic))

    async def _remove(self, topic: Topic) -> None:
        for partition_index in range(len(topic.replicas)):
            key = PartitionKey(topic.name, partition_index)
            while key in self._working:
                await asyncio.wait([self._working[key]])
            partition = self.replicas.get(key)
            if partition is not None and partition.topic_id == topic.topic_id:
                self._drop(key, "its topic is deleted")
            try:
                await self._data_dir.in_thread(
                    partial(self._data_dir.delete_log, topic.name, partition_index, topic.topic_id)
                )
            except OSError as error:
                _logger.error("log of deleted topic not removed", **key._asdict(), reason=str(error))
        self._data_dir.unmark_deleted(topic.topic_id)

    def _start(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

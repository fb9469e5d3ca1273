"""Which partitions this broker leads: taking them, keeping them, losing them.

States of a partition, here
  absent      somebody else's, nobody's, or never seen
  acquiring   one task opens the log and asks etcd; whoever wants the partition meanwhile waits for the same task
  led         in `partitions`, behind the fence of the lease it was taken with

Transitions
  absent -> acquiring   a change in etcd makes it ours to take, a client touches it, or the sweep finds it
  acquiring -> led      Txn: lease key absent, state and topic unchanged -> lease key on our lease, leader epoch + 1
  acquiring -> absent   the Txn said no, etcd or the log failed; the sweep comes by again
  led -> absent         our key is gone or another's, the lease is lost, the topic is deleted

Who may take a partition: where it has a state, the members of its ISR, which with one replica is the log's holder.
Where it has none it was never written: its first replica takes it at once or, if that one is dead, the live broker that
rendezvous hashing names; any broker may on a client's touch while the first replica is dead.

Invariants
1. A partition is led only between a Txn that succeeded and the first sign that its key is gone; what was held in memory
   is dropped with it, and the log is read anew by the next take-over. So A, then B, then A never reuses an offset.
2. A key is ours if it stands on our lease. Its value names a broker, and a predecessor of the same id is not us.
3. Release deletes a key only if it stands on our lease.
4. At most one task works on a partition, and its log is open at most once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import structlog

from kproxy.broker.broker_lease import LeaseFence
from kproxy.broker.cluster import Change, ClusterView, Kind, Topic
from kproxy.broker.data_dir import DataDir
from kproxy.broker.keys import PartitionKey
from kproxy.broker.log import Log
from kproxy.broker.partition import Partition
from kproxy.broker.segment import LogFailed
from kproxy.broker.take_over import TakeOver
from kproxy.ownership.etcd import EtcdClient, EtcdError, delete_op, lease_is

CONCURRENT_ACQUISITIONS = 16
SWEEP_INTERVAL_S = 3.0
_logger = structlog.get_logger(__name__)


class PartitionLeaseManager:
    """Acquires and holds partition leases. `run` is one coroutine that the caller owns; `close` ends the rest."""

    def __init__(
        self,
        client: EtcdClient,
        view: ClusterView,
        data_dir: DataDir,
        node_id: int,
        *,
        on_identity_lost: Callable[[str], None],
    ) -> None:
        """`on_identity_lost` is called with a reason when the broker's own key turns out to be gone."""
        self.partitions: dict[tuple[bytes, int], Partition] = {}
        self.stopping = False
        self._client = client
        self._view = view
        self._keys = view.keys
        self._data_dir = data_dir
        self._node_id = node_id
        self._on_identity_lost = on_identity_lost
        self._fence: LeaseFence | None = None
        self._acquiring: dict[PartitionKey, asyncio.Task[Partition | None]] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(CONCURRENT_ACQUISITIONS)
        self._wanted: set[PartitionKey] = set()
        self._wake = asyncio.Event()
        view.subscribe(self._on_change)

    # What the rest of the broker asks

    def led(self, topic: bytes, partition_index: int) -> Partition | None:
        """The partition, if this broker leads it now."""
        return self.partitions.get((topic, partition_index))

    def may_take(self, topic: str, partition_index: int) -> bool:
        """Whether a client's touch may make this broker take the partition, which it does not lead."""
        return self._may_take(PartitionKey(topic, partition_index), touched=True)

    async def take(self, keys: Iterable[PartitionKey], timeout_s: float) -> None:
        """Take those of the partitions that are ours to take, or as many as time allows."""
        tasks = [self._acquire_shared(key) for key in keys if self._may_take(key, touched=True)]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def begin(self, fence: LeaseFence) -> None:
        """A new lease is held: take what is ours to take."""
        self._fence = fence
        self._check_identity()
        self._want_all()

    async def settle(self, timeout_s: float) -> None:
        """Wait until nothing is left to take, or the time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (self._wanted or self._acquiring) and loop.time() < deadline:
            if self._acquiring:
                await asyncio.wait(self._acquiring.values(), timeout=deadline - loop.time())
            await asyncio.sleep(0)

    def drop_all(self, reason: str) -> None:
        """The lease is gone, and every ownership with it."""
        self._fence = None
        for topic, partition_index in list(self.partitions):
            self._drop(PartitionKey(topic.decode(), partition_index), reason)

    def resign_all(self) -> None:
        """The broker stops: take nothing more, and refuse writes to what is led."""
        self.stopping = True
        for partition in self.partitions.values():
            partition.resign()

    def flush_all(self) -> None:
        """Bring every led log to the disk; blocks."""
        for partition in list(self.partitions.values()):
            try:
                partition.flush()
            except (OSError, LogFailed) as error:
                _logger.error(
                    "flush failed", topic=partition.topic, partition=partition.partition_index, error=str(error)
                )

    async def close(self) -> None:
        """Drop what is led and wait for the tasks at work."""
        self.stopping = True
        self.drop_all("the broker stops")
        await asyncio.gather(*self._acquiring.values(), *self._chores, return_exceptions=True)

    # Taking partitions

    async def run(self) -> None:
        """Take what becomes ours to take, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(SWEEP_INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                self._want_all()
            self._wake.clear()
            wanted, self._wanted = self._wanted, set()
            for key in wanted:
                if self._may_take(key, touched=False):
                    self._acquire_shared(key)

    def _want_all(self) -> None:
        for topic in self._view.topics.values():
            self._wanted.update(PartitionKey(topic.name, index) for index in range(len(topic.replicas)))
        self._wake.set()

    def _want(self, key: PartitionKey) -> None:
        self._wanted.add(key)
        self._wake.set()

    def _may_take(self, key: PartitionKey, *, touched: bool) -> bool:
        topic = self._view.topics.get(key.topic)
        fence = self._fence
        if topic is None or fence is None or self.stopping or not 0 <= key.partition_index < len(topic.replicas):
            return False
        if (key.topic.encode(), key.partition_index) in self.partitions or not fence.is_live():
            return False
        ownership = self._view.ownership(*key)
        if ownership is not None:
            # A key on our own lease with no partition behind it: a Txn whose answer was lost.
            return ownership.lease_id == fence.lease_id
        state = self._view.state(topic, key.partition_index)
        if state is not None:
            return self._node_id in state.isr
        preferred = topic.replicas[key.partition_index][0]
        if preferred in self._view.brokers or preferred == self._node_id:
            return preferred == self._node_id
        return touched or self._is_next_best(key)

    def _is_next_best(self, key: PartitionKey) -> bool:
        """Whether this broker stands in for a dead first replica. All come to the same answer, and it spreads."""

        def weight(node_id: int) -> bytes:
            return hashlib.blake2b(f"{key.topic}/{key.partition_index}/{node_id}".encode(), digest_size=8).digest()

        return max(self._view.brokers, key=weight, default=-1) == self._node_id

    def _acquire_shared(self, key: PartitionKey) -> asyncio.Task[Partition | None]:
        task = self._acquiring.get(key)
        if task is None:
            task = self._acquiring[key] = asyncio.create_task(self._acquire(key), name=f"acquire {key}")
            task.add_done_callback(lambda done: self._acquired(key, done))
        return task

    def _acquired(self, key: PartitionKey, task: asyncio.Task[Partition | None]) -> None:
        self._acquiring.pop(key, None)
        if not task.cancelled() and task.exception() is not None:
            _logger.error(
                "acquisition failed", topic=key.topic, partition=key.partition_index, exc_info=task.exception()
            )

    async def _acquire(self, key: PartitionKey) -> Partition | None:
        async with self._slots:
            fence, topic = self._fence, self._view.topics.get(key.topic)
            if fence is None or topic is None or not self._may_take(key, touched=True):
                return None
            try:
                log = await asyncio.to_thread(self._data_dir.open_log, topic.name, key.partition_index, topic.topic_id)
            except (OSError, LogFailed) as error:
                _logger.error("log not opened", topic=topic.name, partition=key.partition_index, error=str(error))
                return None
            partition = None
            try:
                partition = await self._take(key, topic, log, fence)
            except (EtcdError, ValueError) as error:
                _logger.warning("not acquired", topic=topic.name, partition=key.partition_index, error=str(error))
            finally:
                if partition is None:
                    log.close()
            return partition

    async def _take(self, key: PartitionKey, topic: Topic, log: Log, fence: LeaseFence) -> Partition | None:
        """Become the leader, if the transaction says so. Raises EtcdError, ValueError."""
        state, stored = self._view.state(topic, key.partition_index), self._view.stored_state(*key)
        # The log's own word counts too: a restored etcd may remember an earlier epoch than was written with.
        leader_epoch = max(state.leader_epoch if state is not None else -1, log.last_leader_epoch) + 1
        stored_revision = stored.mod_revision if stored is not None else 0
        take_over = TakeOver(self._client, self._keys, self._node_id, key, topic)
        taken = await take_over.attempt(fence.lease_id, leader_epoch, stored_revision)
        if taken is None or self._fence is not fence or not fence.is_live() or self.stopping:
            return None
        partition = Partition(
            topic.name,
            key.partition_index,
            topic.topic_id,
            log,
            leader_epoch=taken.leader_epoch,
            fencing_token=taken.revision,
            fence=fence,
        )
        self.partitions[topic.name.encode(), key.partition_index] = partition
        self._view.apply_put(self._keys.state(*key), taken.state, lease_id=0, revision=taken.revision)
        owner = take_over.owner
        if not self._view.apply_put(self._keys.lease(*key), owner, lease_id=fence.lease_id, revision=taken.revision):
            self._check_still_led(key)
        _logger.info(
            "partition acquired",
            topic=topic.name,
            partition=key.partition_index,
            leader_epoch=taken.leader_epoch,
            log_end_offset=log.log_end_offset,
        )
        return partition

    # Losing partitions

    def _on_change(self, change: Change) -> None:
        if change.kind is Kind.SNAPSHOT:
            self._on_snapshot()
        elif change.kind is Kind.RESTORED:
            # Whatever our lease was, it stands in a history that is no more.
            self._on_identity_lost("etcd was restored")
        elif change.kind is Kind.BROKER:
            if change.node_id == self._node_id:
                self._check_identity()
            self._want_all()
        elif change.kind is Kind.TOPIC:
            if change.deleted is not None:
                self._forget(change.deleted)
            else:
                for partition_index in range(len(self._view.topics[change.topic].replicas)):
                    self._want(PartitionKey(change.topic, partition_index))
        else:
            key = PartitionKey(change.topic, change.partition_index)
            if change.kind is Kind.OWNER:
                self._check_still_led(key)
            self._want(key)

    def _on_snapshot(self) -> None:
        """What we did after the snapshot's revision is not in it, and says nothing."""
        revision = self._view.snapshot_revision
        for partition in list(self.partitions.values()):
            if partition.fencing_token <= revision:
                self._check_still_led(PartitionKey(partition.topic, partition.partition_index))
        if self._fence is not None and self._fence.claim_revision <= revision:
            self._check_identity()
        self._want_all()

    def _check_still_led(self, key: PartitionKey) -> None:
        ownership, fence = self._view.ownership(*key), self._fence
        if fence is None or ownership is None or ownership.lease_id != fence.lease_id:
            self._drop(key, "its lease key is gone")

    def _check_identity(self) -> None:
        fence, broker = self._fence, self._view.brokers.get(self._node_id)
        if fence is not None and (broker is None or broker.lease_id != fence.lease_id):
            self._on_identity_lost(f"the key {self._keys.broker(self._node_id)} is not ours any more")

    def _drop(self, key: PartitionKey, reason: str) -> None:
        partition = self.partitions.pop((key.topic.encode(), key.partition_index), None)
        if partition is not None:
            partition.close()
            log = _logger.info if self.stopping else _logger.warning
            log("partition closed", topic=key.topic, partition=key.partition_index, reason=reason)

    def _forget(self, topic: Topic) -> None:
        """The topic was deleted: give up its keys and remove its logs."""
        for partition_index in range(len(topic.replicas)):
            self._drop(PartitionKey(topic.name, partition_index), "its topic is deleted")
        self._start(self._remove(topic, self._fence))

    async def _remove(self, topic: Topic, fence: LeaseFence | None) -> None:
        for partition_index in range(len(topic.replicas)):
            key = PartitionKey(topic.name, partition_index)
            if key in self._acquiring:
                await asyncio.wait([self._acquiring[key]])
            lease_key = self._keys.lease(*key)
            try:
                if fence is not None:
                    await self._client.txn([lease_is(lease_key, fence.lease_id)], [delete_op(lease_key)])
                await asyncio.to_thread(self._data_dir.delete_log, topic.name, partition_index, topic.topic_id)
            except (EtcdError, OSError) as error:
                _logger.error("deleted topic lingers", topic=topic.name, partition=partition_index, error=str(error))

    def _start(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

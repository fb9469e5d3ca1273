"""Keep writers' fences in etcd, where a partition's next leader reads which writers to refuse.

Steps of a bind or release of one partition
  compared   the fence is compared with the one in memory; this answers most requests without etcd
  kept       a transaction has put it; it counts from then on, and is answered
  unknown    the transaction has no answer: nothing is assumed, and the next request finds out the result

Invariants
1. The transaction is guarded by the lease key's create revision, so that only the owner writes; by the topic's
   mod_revision, so that nothing is put for a deleted topic; and by the fence key's mod_revision, so that a late
   transaction changes nothing that came after it.
2. Success is answered only by a partition that still leads and has the fence in memory.
3. A fence above etcd's revision is refused: it comes from a lost history, not from a grant, and would lock out every
   current writer.
4. At most one transaction runs for each partition, and at most CONCURRENT_FENCES for all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

import structlog

from kproxy.broker.cluster import Change, ClusterView, Kind
from kproxy.broker.keys import FenceValue, encode_value
from kproxy.broker.lease_txn import kept_fence
from kproxy.broker.partition import Partition
from kproxy.broker.writer_fence import FenceComparison, KeptFence
from kproxy.etcd import (
    EtcdClient,
    EtcdError,
    create_revision_is,
    get_op,
    mod_revision_is,
    put_op,
)
from kproxy_codec import error_codes
from kproxy_codec.own import NO_FENCE, BoundFence, FenceBinding

CONCURRENT_FENCES = 16
# The limit of one connection, so that others get their share.
CONCURRENT_OF_A_REQUEST = 8
# Each attempt may find the put of an earlier one whose answer was lost.
ATTEMPTS = 4
_logger = structlog.get_logger(__name__)


class FenceKeeper:
    """Binds and releases the fences of the partitions that this broker leads.

    `on_deposed` is called when etcd shows that a partition's lease key is no longer ours.
    """

    def __init__(self, client: EtcdClient, view: ClusterView, *, on_deposed: Callable[[Partition], None]) -> None:
        self._client = client
        self._view = view
        self._on_deposed = on_deposed
        self._slots = asyncio.Semaphore(CONCURRENT_FENCES)
        self._turns: WeakKeyDictionary[Partition, asyncio.Lock] = WeakKeyDictionary()
        # The latest revision of etcd seen here.
        self._latest = 0
        view.subscribe(self._on_change)

    def _on_change(self, change: Change) -> None:
        if change.kind is Kind.RESTORED:
            self._latest = 0

    def at_once(self, partition: Partition, asked: FenceBinding) -> BoundFence | None:
        """Answer from memory; None if etcd must keep the fence first."""
        if not partition.takes_writes():
            return _answer(partition, asked, error_codes.NOT_LEADER_OR_FOLLOWER)
        comparison = partition.writers.compare(asked.fence, is_released=asked.is_released)
        if comparison is FenceComparison.HIGHER:
            return None
        is_lower = comparison is FenceComparison.LOWER
        return _answer(partition, asked, error_codes.POLICY_VIOLATION if is_lower else error_codes.NONE)

    async def settle_all(self, asked: Sequence[tuple[Partition, FenceBinding]], timeout_s: float) -> list[BoundFence]:
        """Answer each request; 7 REQUEST_TIMED_OUT if it takes too long. The next request finds out the result."""
        answers = [_answer(*each, error_codes.REQUEST_TIMED_OUT) for each in asked]
        waiting = deque(enumerate(asked))

        async def settle_next() -> None:
            while waiting:
                at, each = waiting.popleft()
                answers[at] = await self.settle(*each)

        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENT_OF_A_REQUEST, len(waiting))):
                    group.create_task(settle_next())
        return answers

    async def settle(self, partition: Partition, asked: FenceBinding) -> BoundFence:
        """Answer one request, once etcd keeps its fence.

        15 COORDINATOR_NOT_AVAILABLE: etcd did not keep it. 7 REQUEST_TIMED_OUT: the result is unknown.
        """
        turn = self._turns.setdefault(partition, asyncio.Lock())
        async with turn:
            try:
                for _ in range(ATTEMPTS):
                    answer = self.at_once(partition, asked)
                    if answer is not None:
                        return answer
                    async with self._slots:
                        refused = await self._keep(partition, asked)
                    if refused != error_codes.NONE:
                        return _answer(partition, asked, refused)
            except EtcdError as error:
                _logger.warning("fence not kept", **partition.log_fields, fence=asked.fence, reason=str(error))
                if error.maybe_applied:
                    return _answer(partition, asked, error_codes.REQUEST_TIMED_OUT)
            except ValueError as error:
                _logger.error("fence in etcd unreadable", **partition.log_fields, reason=str(error))
        return _answer(partition, asked, error_codes.COORDINATOR_NOT_AVAILABLE)

    async def _keep(self, partition: Partition, asked: FenceBinding) -> int:
        """Put the fence, or read etcd's; after NONE the caller compares again. Raises EtcdError, ValueError."""
        keys = self._view.keys
        place = partition.topic, partition.partition_index
        topic = self._view.topics.get(partition.topic)
        if topic is None or topic.topic_id != partition.topic_id:
            return error_codes.UNKNOWN_TOPIC_OR_PARTITION
        lease_key, topic_key, fence_key = keys.lease(*place), keys.topic(partition.topic), keys.fence(*place)
        if asked.fence > self._latest:
            now = await self._client.get_snapshot(fence_key)
            self._latest = max(self._latest, now.revision)
            if asked.fence > self._latest:
                _logger.error("fence refused", **partition.log_fields, fence=asked.fence)
                return error_codes.INVALID_REQUEST
        is_owned = not asked.is_released
        result = await self._client.txn(
            [
                create_revision_is(lease_key, partition.leadership.fencing_token),
                mod_revision_is(topic_key, topic.mod_revision),
                mod_revision_is(fence_key, partition.writers.revision),
            ],
            [put_op(fence_key, encode_value(FenceValue(asked.fence, is_owned, partition.topic_id)))],
            [get_op(lease_key), get_op(topic_key), get_op(fence_key)],
        )
        self._latest = max(self._latest, result.revision)
        if result.succeeded:
            partition.writers.keep(KeptFence(asked.fence, is_owned, result.revision))
            _logger.info("fence kept", **partition.log_fields, fence=asked.fence, is_owned=is_owned)
            return error_codes.NONE
        lease, found_topic, fence = result.found
        if lease is None or lease.create_revision != partition.leadership.fencing_token:
            self._on_deposed(partition)
            return error_codes.NOT_LEADER_OR_FOLLOWER
        if found_topic is None or found_topic.mod_revision != topic.mod_revision:
            return error_codes.UNKNOWN_TOPIC_OR_PARTITION
        # The lease is ours, so this broker has put the stored fence itself, and lost the answer.
        partition.writers.keep(kept_fence(fence, partition.topic_id))
        return error_codes.NONE


def _answer(partition: Partition, asked: FenceBinding, error_code: int) -> BoundFence:
    return BoundFence(asked.topic, asked.partition_index, error_code, partition.writers.fence or NO_FENCE)

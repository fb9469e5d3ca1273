"""Take and release a partition's lease key by etcd transactions.

Take: if the lease key is absent, and the state and the topic are unchanged since the decision, put the lease key on the
broker's lease, and the state with the next leader epoch and the same ISR. This is atomic: no partition has an owner
without a state, no two brokers both believe that they took it, and no broker takes it after leaving the ISR. The same
transaction reads the writers' fence. The fence changes only under the lease key of this transaction, so the new leader
knows the highest one.

Release: delete the lease key, so that another broker can take the partition.

Invariants of a release
1. It deletes only this broker's key: the guard names its create revision.
2. Until etcd confirms the deletion, this broker does not take the partition again: a late deletion would let another
   broker lead too.
3. At most CONCURRENT_RELEASES run at a time.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from kproxy.broker.cluster import Topic
from kproxy.broker.keys import FenceValue, Keys, PartitionKey, StateValue, decode_value, encode_value
from kproxy.broker.writer_fence import KeptFence
from kproxy.etcd import (
    EtcdClient,
    EtcdError,
    KeyValue,
    LeaseLost,
    TxnCompare,
    TxnOp,
    TxnResult,
    create_revision_is,
    delete_op,
    get_op,
    key_absent,
    lease_is,
    mod_revision_is,
    put_op,
)
from kproxy.etcd.lease import LeaseFence

CONCURRENT_RELEASES = 16
# Pause before a failed deletion is retried.
RETRY_PAUSE_S = 0.5

ATTEMPTS = 3
_logger = structlog.get_logger(__name__)


class Taken(NamedTuple):
    """The result of a take-over.

    `token` is the lease key's create revision, the fencing token. `value` is the state as stored at `revision`. `fence`
    is the writers' fence.
    """

    token: int
    state: StateValue
    value: bytes
    revision: int
    fence: KeptFence


def kept_fence(kv: KeyValue | None, topic_id: uuid.UUID) -> KeptFence:
    """Decode a fence key as read; an earlier topic's fence does not count. Raises ValueError."""
    if kv is None:
        return KeptFence()
    value = decode_value(kv.value, FenceValue)
    if value.topic_id != topic_id:
        return KeptFence(revision=kv.mod_revision)
    return KeptFence(value.fence, value.is_owned, kv.mod_revision)


class TakeOver:
    """One broker's attempt to take one partition. `owner` is the value of the lease key."""

    def __init__(self, client: EtcdClient, keys: Keys, node_id: int, key: PartitionKey, topic: Topic) -> None:
        self.owner = str(node_id).encode()
        self._client = client
        self._lease_key = keys.lease(*key)
        self._state_key = keys.state(*key)
        self._topic_key = keys.topic(topic.name)
        self._fence_key = keys.fence(*key)
        self._topic = topic

    async def attempt(
        self, lease_id: int, state: StateValue, stored_revision: int, *, known_epoch: int
    ) -> Taken | None:
        """Take the partition with `state`; None if it is not available.

        An earlier attempt without an answer may have taken it; then return its result. `stored_revision` is the
        mod_revision of the stored state, 0 if there is none. `known_epoch` is the last leader epoch that this broker
        led or followed in. Raises EtcdError; ValueError for an unreadable state or fence.
        """
        value = encode_value(state)
        result = await self._run(
            [
                key_absent(self._lease_key),
                mod_revision_is(self._state_key, stored_revision),
                mod_revision_is(self._topic_key, self._topic.mod_revision),
            ],
            [put_op(self._lease_key, self.owner, lease_id), put_op(self._state_key, value)],
        )
        if result.succeeded:
            return Taken(result.revision, state, value, result.revision, self._fence(result))
        lease, stored, _ = result.found
        if lease is None or stored is None or lease.lease_id != lease_id:
            return None
        before = decode_value(stored.value, StateValue)
        found = Taken(lease.create_revision, before, stored.value, stored.mod_revision, self._fence(result))
        if before.leader_epoch > known_epoch:
            return found
        return await self._begin_epoch(lease_id, found, state.leader_epoch)

    async def _begin_epoch(self, lease_id: int, found: Taken, leader_epoch: int) -> Taken | None:
        """Begin another epoch under a lease key with which this broker led before.

        No broker may lead twice in one epoch.
        """
        state = StateValue(leader_epoch, found.state.isr, found.state.topic_id)
        value = encode_value(state)
        guards = [lease_is(self._lease_key, lease_id), mod_revision_is(self._state_key, found.revision)]
        result = await self._run(guards, [put_op(self._state_key, value)])
        if result.succeeded:
            return Taken(found.token, state, value, result.revision, self._fence(result))
        lease, stored, _ = result.found
        if lease is None or lease.lease_id != lease_id or stored is None or stored.value != value:
            return None
        return Taken(lease.create_revision, state, value, stored.mod_revision, self._fence(result))

    def _fence(self, result: TxnResult) -> KeptFence:
        try:
            return kept_fence(result.found[-1], self._topic.topic_id)
        except ValueError as error:
            raise ValueError(f"{self._fence_key} in etcd cannot be read: {error}") from error

    async def _run(self, compares: Sequence[TxnCompare], puts: Sequence[TxnOp]) -> TxnResult:
        fence = get_op(self._fence_key)
        success, look = [*puts, fence], [get_op(self._lease_key), get_op(self._state_key), fence]
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._client.txn(compares, success, look)
            except LeaseLost:
                raise
            except EtcdError as error:
                # A repeated Txn whose first run was applied fails its comparison and reads our own key.
                if not error.maybe_applied:
                    raise
        return await self._client.txn(compares, success, look)


class LeaseReleases:
    """Deletes this broker's partition lease keys.

    `under_way` has the keys whose deletion etcd has not confirmed. `is_current` returns whether a fence is still the
    broker's and the broker is not stopping.
    """

    def __init__(self, client: EtcdClient, keys: Keys, is_current: Callable[[LeaseFence], bool]) -> None:
        self.under_way: set[PartitionKey] = set()
        self._client = client
        self._keys = keys
        self._is_current = is_current
        self._slots = asyncio.Semaphore(CONCURRENT_RELEASES)

    async def release(self, key: PartitionKey, revision: int, fence: LeaseFence) -> None:
        """Delete the key created at `revision`; retry while its lease is this broker's."""
        if key in self.under_way:
            return
        lease_key = self._keys.lease(*key)
        self.under_way.add(key)
        try:
            while self._is_current(fence):
                try:
                    async with self._slots:
                        await self._client.txn([create_revision_is(lease_key, revision)], [delete_op(lease_key)])
                    return
                except EtcdError as error:
                    _logger.warning("lease key not deleted", **key._asdict(), reason=str(error))
                    await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            self.under_way.discard(key)

"""Deleting partition lease keys of ours, so that what has no answer, and may be done late, does no harm.

Invariants
1. Only a key of ours is deleted: one that was created at a revision that we know of, or that stands on our lease.
2. Until etcd has said that a key is gone its partition is not taken again: a deletion that is done late would let
   another lead beside us.
3. A deleted topic's key is deleted only while no other topic has its name, or by its revision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from kproxy.broker.broker_lease import LeaseFence
from kproxy.broker.keys import Keys, PartitionKey
from kproxy.ownership.etcd import EtcdClient, EtcdError, create_revision_is, delete_op, key_absent, lease_is

# Before a key that could not be deleted is tried again.
RETRY_PAUSE_S = 0.5
_logger = structlog.get_logger(__name__)


class LeaseKeys:
    """Deletes this broker's partition lease keys. `under_way` are those of which etcd has not said yet that they are
    gone; `is_current` tells whether a fence is still the broker's, and the broker goes on."""

    def __init__(self, client: EtcdClient, keys: Keys, is_current: Callable[[LeaseFence], bool]) -> None:
        self.under_way: set[PartitionKey] = set()
        self._client = client
        self._keys = keys
        self._is_current = is_current

    async def release(self, key: PartitionKey, revision: int, fence: LeaseFence) -> None:
        """Delete the key that was created at `revision`, as often as it takes, while its lease is ours."""
        if key in self.under_way:
            return
        lease_key = self._keys.lease(*key)
        self.under_way.add(key)
        try:
            while self._is_current(fence):
                try:
                    await self._client.txn([create_revision_is(lease_key, revision)], [delete_op(lease_key)])
                    return
                except EtcdError as error:
                    _logger.warning("lease key not deleted", **key._asdict(), error=str(error))
                    await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            self.under_way.discard(key)

    async def release_deleted(self, key: PartitionKey, fence: LeaseFence) -> None:
        """Delete whatever key we have of a topic that is deleted. Raises EtcdError."""
        lease_key = self._keys.lease(*key)
        guards = [key_absent(self._keys.topic(key.topic)), lease_is(lease_key, fence.lease_id)]
        await self._client.txn(guards, [delete_op(lease_key)])

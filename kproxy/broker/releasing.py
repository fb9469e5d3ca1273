"""Deleting partition lease keys of ours, so that what has no answer, and may be done late, does no harm.

Invariants
1. Only the very key that was ours is deleted: it is named by the revision at which it was created.
2. Until etcd has said that a key is gone its partition is not taken again: a deletion that is done late would let
   another lead beside us.
3. At most CONCURRENT_RELEASES are asked for at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from kproxy.broker.keys import Keys, PartitionKey
from kproxy.etcd import EtcdClient, EtcdError, create_revision_is, delete_op
from kproxy.etcd.lease import LeaseFence

CONCURRENT_RELEASES = 16
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
        self._slots = asyncio.Semaphore(CONCURRENT_RELEASES)

    async def release(self, key: PartitionKey, revision: int, fence: LeaseFence) -> None:
        """Delete the key that was created at `revision`, as often as it takes, while its lease is ours."""
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
                    _logger.warning("lease key not deleted", **key._asdict(), error=str(error))
                    await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            self.under_way.discard(key)

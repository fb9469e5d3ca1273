"""Which partitions are to be read anew, and who waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice

from kproxy.ownership.lease_keys import Partition

# etcd's own limit on the operations of one transaction.
REREAD_KEYS = 128
MAX_WAITING_REREADS = 100_000


class Rereads:
    """The partitions that wait for a re-read, each once, with a future that all who wait for it share."""

    def __init__(self) -> None:
        self._waiting: dict[Partition, asyncio.Future[None]] = {}
        self._any = asyncio.Event()
        self._served = False

    def open(self) -> None:
        self._served = True

    async def wait_for(self, partition: Partition) -> None:
        """Until a read that begins after this call has ended, well or not; not at all where nobody reads."""
        if not self._served:
            return
        future = self._waiting.get(partition)
        if future is None:
            if len(self._waiting) >= MAX_WAITING_REREADS:
                return
            future = self._waiting[partition] = asyncio.get_running_loop().create_future()
            self._any.set()
        # One caller's end is not the others'.
        await asyncio.shield(future)

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[list[Partition]]:
        """Take what waits, as much as one transaction holds, and release who waited for it in the end."""
        await self._any.wait()
        batch = dict(islice(self._waiting.items(), REREAD_KEYS))
        for partition in batch:
            del self._waiting[partition]
        if not self._waiting:
            self._any.clear()
        try:
            yield list(batch)
        finally:
            for future in batch.values():
                future.set_result(None)

    def close(self) -> None:
        """Release everybody: nothing will be read any more."""
        self._served = False
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_result(None)

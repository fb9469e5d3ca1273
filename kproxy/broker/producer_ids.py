"""Producer ids, unique in the cluster: taken from `{prefix}/producer-ids` in blocks, by compare-and-swap.

The key holds, in decimal, the first id that nobody has taken. Whoever moves it on by BLOCK owns what lies between; ids
of a block that its broker did not live to give out are lost, which costs nothing.
"""

from __future__ import annotations

import asyncio

from kproxy.ownership.etcd import EtcdClient, EtcdError, key_absent, mod_revision_is, put_op

BLOCK = 1000
ATTEMPTS = 20


class ProducerIds:
    """Gives out producer ids. Raises EtcdError where a new block is needed and cannot be had."""

    def __init__(self, client: EtcdClient, key: str) -> None:
        self._client = client
        self._key = key
        self._next = 0
        self._end = 0
        self._lock = asyncio.Lock()

    async def allocate(self) -> int:
        """An id that nobody else gets."""
        async with self._lock:
            if self._next == self._end:
                self._next = await self._take_block()
                self._end = self._next + BLOCK
            allocated = self._next
            self._next += 1
            return allocated

    async def _take_block(self) -> int:
        for _ in range(ATTEMPTS):
            found = await self._client.get(self._key)
            try:
                first = int(found.value) if found is not None else 0
            except ValueError as error:
                raise EtcdError(f"{self._key} holds no number") from error
            unchanged = mod_revision_is(self._key, found.mod_revision) if found is not None else key_absent(self._key)
            result = await self._client.txn([unchanged], [put_op(self._key, str(first + BLOCK).encode())])
            if result.succeeded:
                return first
        raise EtcdError(f"{self._key} was changed by others {ATTEMPTS} times in a row")

"""Numbers that nobody else gets, from one key: taken in blocks, by compare-and-swap.

The key holds, in decimal, the first number that nobody has taken. Whoever moves it on by BLOCK owns what lies between;
numbers of a block that its taker did not live to give out are lost, which costs nothing. Producer ids come from here,
those of the reference brokers and those of the proxies, from the one key `{prefix}/producer-ids`.

Invariants
1. A block is given out only after etcd has said that the swap was made. Where that stayed unknown the block is left to
   nobody, and the next one is taken.
2. At most one attempt to take a block is under way; who waits for it when it fails fails with it, so that an etcd that
   does not answer holds up each caller for one attempt and not for those of all before it.
3. Numbers only grow, also where a restored etcd has the key at an earlier value.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from kproxy.etcd.client import EtcdClient
from kproxy.etcd.errors import EtcdError
from kproxy.etcd.messages import key_absent, mod_revision_is, put_op

BLOCK: Final = 1000
ATTEMPTS: Final = 20
_DECIMAL = re.compile(rb"[0-9]{1,19}")
_HIGHEST: Final = 2**63 - 1 - BLOCK


class IdBlocks:
    """Gives out the numbers of `key`. Raises EtcdError where a new block is needed and cannot be had."""

    def __init__(self, client: EtcdClient, key: str) -> None:
        self._client = client
        self._key = key
        self._next = 0
        self._end = 0
        self._lock = asyncio.Lock()
        self._failures = 0
        self._failure = ""

    async def allocate(self) -> int:
        """A number that nobody else gets."""
        failures = self._failures
        async with self._lock:
            if self._next == self._end:
                if self._failures != failures:
                    raise EtcdError(self._failure)
                await self._refill()
            allocated = self._next
            self._next += 1
            return allocated

    async def _refill(self) -> None:
        try:
            first = await self._take_block()
        except EtcdError as error:
            self._failures += 1
            self._failure = str(error)
            raise
        self._next, self._end = first, first + BLOCK

    async def _take_block(self) -> int:
        for _ in range(ATTEMPTS):
            found = await self._client.get(self._key)
            first = 0 if found is None else self._number(found.value)
            first = max(first, self._end)
            unchanged = key_absent(self._key) if found is None else mod_revision_is(self._key, found.mod_revision)
            result = await self._client.txn([unchanged], [put_op(self._key, str(first + BLOCK).encode())])
            if result.succeeded:
                return first
        raise EtcdError(f"{self._key} was changed by others {ATTEMPTS} times in a row")

    def _number(self, value: bytes) -> int:
        if _DECIMAL.fullmatch(value) is None or int(value) > _HIGHEST:
            raise EtcdError(f"{self._key} holds no number")
        return int(value)

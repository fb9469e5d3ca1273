"""Allocate unique numbers, such as producer ids, from one etcd key: take blocks of them by compare-and-swap.

The key's value is, in decimal, the first number that is not taken. A process that advances the value by BLOCK owns the
numbers in between. Numbers that the process has not used when it ends are lost, which costs nothing. Reference brokers
and proxies take producer ids from the key `{prefix}/producer-ids`.

Invariants
1. A block is used only after etcd has confirmed the swap. If the outcome is unknown the block is left unused, and the
   next block is taken.
2. At most one attempt to take a block is in flight; if it fails, all waiting callers fail. So if etcd does not answer,
   each caller waits for one attempt, not for one per caller before it.
3. The numbers of one process only grow. After a restore of etcd two processes may get the same numbers.
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
    """Allocates the numbers of `key`. Raises EtcdError if a new block is needed and cannot be taken."""

    def __init__(self, client: EtcdClient, key: str) -> None:
        self._client = client
        self._key = key
        self._next = 0
        self._end = 0
        self._lock = asyncio.Lock()
        self._failures = 0
        self._failure = ""

    async def allocate(self) -> int:
        """A number that no other caller or process gets, unless etcd is restored (invariant 3)."""
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

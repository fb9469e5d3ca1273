"""One at a time for each of many things, first come, first served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Turns:
    """Locks by name, each there only as long as somebody has it or waits for it."""

    def __init__(self) -> None:
        # How many have it or wait for it.
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def of(self, name: Hashable) -> AsyncIterator[None]:
        """The turn that comes after all that were asked for before."""
        lock, count = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, count + 1
        try:
            async with lock:
                yield
        finally:
            count = self._locks[name][1] - 1
            if count:
                self._locks[name] = lock, count
            else:
                del self._locks[name]

    def __len__(self) -> int:
        return len(self._locks)

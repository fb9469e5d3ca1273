"""Waiting for something to change, by whoever many are."""

from __future__ import annotations

import asyncio


class Changes:
    """Each `tell` wakes everybody who waits at that moment."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def tell(self) -> None:
        """Something has changed."""
        changed, self._next = self._next, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def wait(self, deadline: float | None = None) -> bool:
        """Until the next `tell`; False where it does not come by the deadline (seconds, the event loop's clock)."""
        loop = asyncio.get_running_loop()
        left = None if deadline is None else deadline - loop.time()
        if left is not None and left <= 0:
            return False
        if self._next is None:
            self._next = loop.create_future()
        done, _ = await asyncio.wait([self._next], timeout=left)
        return bool(done)

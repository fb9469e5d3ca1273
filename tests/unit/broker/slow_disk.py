"""Simulate a disk whose flushes (fsync of segments) the test delays, counts and lets fail."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kproxy.broker import segment

PATIENCE_S = 30.0


class SlowDisk:
    """`waiting` is set while a caller waits for a disk that hangs; with `fails` the wait ends with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs = 0
        self.fails = False
        self.before_sync: Callable[[], None] = lambda: None
        self.waiting = threading.Event()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._sync = segment._sync_data
        monkeypatch.setattr(segment, "_sync_data", self._wait)

    def _wait(self, fd: int) -> None:
        self.before_sync()
        self.waiting.set()
        assert self._goes_on.wait(PATIENCE_S)
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        self._sync(fd)
        self.syncs += 1

    def hang(self) -> None:
        self.waiting.clear()
        self._goes_on.clear()

    async def is_waited_for(self) -> None:
        assert await asyncio.to_thread(self.waiting.wait, PATIENCE_S)

    def go_on(self) -> None:
        self._goes_on.set()

    @asynccontextmanager
    async def at_work(self, flush: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Keep the disk busy with this flush during the block."""
        self.hang()
        flushing = asyncio.create_task(flush)
        await self.is_waited_for()
        try:
            yield
        finally:
            self.go_on()
        await flushing

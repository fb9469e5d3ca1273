"""One log brought to the disk in a thread, for whoever waits for it on the event loop.

States
  idle      all that was asked for is on the disk, or the log has failed or is closed
  flushing  a thread waits for the disk

Transitions
  idle     -> flushing   `begin`: something was appended
  flushing -> flushing   the flush has ended, and more was appended meanwhile
  flushing -> idle       the flush has ended, and nothing was; it has failed, and the log with it; `close`

Invariants
1. One flush of a log is under way at a time, and whoever appended before it began is done when it ends: however many
   wait, they wait for two turns of the disk at most.
2. Whoever waits is woken at the end of every flush, at its failure, and at the close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

import structlog

from kproxy.broker.log import Log
from kproxy.broker.segment import LogFailed

_logger = structlog.get_logger(__name__)


class LogFlusher:
    """Flushes `log` in `threads`, the loop's own where that is None; calls `on_flushed` when more is on the disk."""

    def __init__(self, log: Log, threads: Executor | None, on_flushed: Callable[[], None]) -> None:
        self._log = log
        self._threads = threads
        self._on_flushed = on_flushed
        self._under_way: asyncio.Future[None] | None = None
        self._waiters: set[Callable[[], None]] = set()

    @property
    def is_at_work(self) -> bool:
        """Whether some of the log is still on its way to the disk, and may get there."""
        return self._log.flushed_offset < self._log.log_end_offset and self._log.failure is None

    def begin(self) -> None:
        """Something was appended: it goes to the disk now, or when the flush under way has ended."""
        if self._under_way is None and self.is_at_work:
            self._under_way = asyncio.get_running_loop().run_in_executor(self._threads, self._flush)
            self._under_way.add_done_callback(self._ended)

    def _flush(self) -> None:
        try:
            self._log.flush()
        except LogFailed:
            return  # closed meanwhile, or failed: then `log.failure` says why, and its keeper tells of it

    def _ended(self, flush: asyncio.Future[None]) -> None:
        if flush.cancelled():
            return
        self._under_way = None
        if flush.exception() is not None:
            _logger.error("flush failed", directory=str(self._log.directory), exc_info=flush.exception())
        elif self._log.failure is None:
            self._on_flushed()
            self.begin()
        self._wake()

    async def wait(self, offset: int) -> bool:
        """Wait until `offset` is on the disk; False where it cannot be said that it is."""
        log = self._log
        while log.flushed_offset <= offset and log.failure is None:
            woken = asyncio.get_running_loop().create_future()

            def wake(woken: asyncio.Future[None] = woken) -> None:
                if not woken.done():
                    woken.set_result(None)

            self.add_waiter(wake)
            try:
                await woken
            finally:
                self._waiters.discard(wake)
        return log.flushed_offset > offset

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, when a flush has ended, well or not."""
        self._waiters.add(wake)

    def _wake(self) -> None:
        woken, self._waiters = self._waiters, set()
        for wake in woken:
            wake()

    def close(self) -> None:
        """The log is closed: wait for nothing more. What the thread is at ends by itself. May be called twice."""
        if self._under_way is not None:
            self._under_way.cancel()
            self._under_way = None
        self._wake()

"""Flush one log in a thread after each append (flush policy `always`), and wake the code that waits for the disk.

States
  idle      everything is on the disk, or the log has failed or is closed
  flushing  a thread waits for the disk

Transitions
  idle     -> flushing   `begin`: something was appended
  flushing -> flushing   the flush has ended, and more was appended meanwhile
  flushing -> idle       the flush has ended and nothing was appended; it has failed, and the log with it; `close`

Invariants
1. One flush of a log runs at a time, and it covers everything appended before it began. So a waiter waits for two
   flushes at most, however many wait.
2. Waiters are woken at the end of every flush, at its failure, and at the close.
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
    """Flushes `log` in `threads` (None: the loop's own); calls `on_flushed` when more is on the disk."""

    def __init__(self, log: Log, threads: Executor | None, on_flushed: Callable[[], None]) -> None:
        self._log = log
        self._threads = threads
        self._on_flushed = on_flushed
        self._under_way: asyncio.Future[None] | None = None
        self._waiters: set[Callable[[], None]] = set()

    @property
    def is_flushing(self) -> bool:
        """Whether part of the log is not on the disk yet but may get there."""
        return self._log.flushed_offset < self._log.log_end_offset and self._log.failure is None

    def begin(self) -> None:
        """Flush appended records, now or after the running flush."""
        if self._under_way is None and self.is_flushing:
            self._under_way = asyncio.get_running_loop().run_in_executor(self._threads, self._flush)
            self._under_way.add_done_callback(self._ended)

    def _flush(self) -> None:
        try:
            self._log.flush()
        except LogFailed:
            return  # closed meanwhile, or failed: LogMaintenance logs `log.failure`

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
        """Wait until `offset` is on the disk; False if the log fails or is closed first."""
        log = self._log
        while log.flushed_offset <= offset and log.failure is None:
            ended = asyncio.Event()
            self.add_waiter(ended.set)
            try:
                await ended.wait()
            finally:
                self._waiters.discard(ended.set)
        return log.flushed_offset > offset

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, when a flush has ended, even in failure."""
        self._waiters.add(wake)

    def _wake(self) -> None:
        woken, self._waiters = self._waiters, set()
        for wake in woken:
            wake()

    def close(self) -> None:
        """Stop waiting: the log is closed. A running flush ends by itself. May be called twice."""
        if self._under_way is not None:
            self._under_way.cancel()
            self._under_way = None
        self._wake()

"""X"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol, TypeVar

import structlog

from kproxy.broker.config import NO_RETENTION_LIMIT
from kproxy.broker.leader_epochs import Leadership
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


# Kafka's replica.high.watermark.checkpoint.interval.ms.
CHECKPOINT_INTERVAL_S = 5.0
THREADS = 8
_Share = TypeVar("_Share")


class MaintainedReplica(Protocol):
    """A partition whose log is replica."""

    @property
    def topic(self) -> str: ...
    @property
    def partition_index(self) -> int: ...
    @property
    def log(self) -> Log: ...
    @property
    def high_watermark(self) -> int: ...
    @property
    def leadership(self) -> Leadership: ...


def wall_clock_ms() -> int:
    """Milliseconds since the epoch, as records' timestamps are."""
    return time.time_ns() // 1_000_000


class LogMaintenance:
    """Keeps the logs of what `hosted` names at the time. `run` is one coroutine that the caller owns; then `close`."""

    def __init__(
        self,
        hosted: Callable[[], Iterable[MaintainedReplica]],
        *,
        flush_interval_s: float,
        retention_check_interval_s: float,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._hosted = hosted
        self._flush_interval_s = flush_interval_s
        self._retention_check_interval_s = retention_check_interval_s
        self._now_ms = now_ms
        self._told: weakref.WeakSet[Log] = weakref.WeakSet()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="log-keeper")
        # Held for as long as threads are at work, so that no log is worked on by two.
        self._at_work = asyncio.Lock()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as rounds:
            rounds.create_task(_every(self._flush_interval_s, self.flush))
            rounds.create_task(_every(CHECKPOINT_INTERVAL_S, self.checkpoint))
            rounds.create_task(_every(self._retention_check_interval_s, self.remove_old_segments))

    def close(self) -> None:
        """Begin nothing more; what the thread is at ends by itself, and a log may be closed meanwhile."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def flush(self, *, whatever_the_policy: bool = False) -> None:
        """Bring to the disk what was appended to logs whose policy is `interval`; tell of logs that have failed.

        With `always` nobody waits for a round: see flusher.
        """
        dirty = [replica.log for replica in self._usable() if replica.log.is_dirty]
        due = [log for log in dirty if whatever_the_policy or log.options.flush == "interval"]
        if due:
            await self._share_out(_flush, due)
        for replica in list(self._hosted()):
            if replica.log.failure is not None and not replica.log.is_closed and replica.log not in self._told:
                self._told.add(replica.log)
                _logger.error("log failed", **_named(replica), error=str(replica.log.failure))

    async def checkpoint(self) -> None:
        """Write down the high watermarks that have moved, and the leaderships that are obeyed."""
        due = [
            replica
            for replica in self._usable()
            if replica.high_watermark != replica.log.high_watermark_checkpoint
            or replica.leadership != replica.log.leadership
        ]
        await self._write_checkpoints(due)

    async def remove_old_segments(self) -> None:
        """Apply retention."""
        shortened = []
        for replica in list(self._hosted()):
            if _is_limited(replica.log) and _is_usable(replica.log) and self._shorten(replica):
                shortened.append(replica)
            await asyncio.sleep(0)
        # A log that is empty now has its leader epoch from there.
        await self._write_checkpoints([replica for replica in shortened if _is_usable(replica.log)])

    def _shorten(self, replica: MaintainedReplica) -> bool:
        try:
            removed = replica.log.remove_old_segments(self._now_ms(), replica.high_watermark)
        except (OSError, LogFailed) as error:
            _logger.error("retention not applied", **_named(replica), error=str(error))
            return False
        if removed:
            _logger.info(
                "old segments removed", **_named(replica), segments=removed, start=replica.log.log_start_offset
            )
        return removed > 0

    async def _write_checkpoints(self, due: Sequence[MaintainedReplica]) -> None:
        wanted = [(replica.log, replica.high_watermark, replica.leadership) for replica in due]
        if wanted:
            await self._share_out(_checkpoint, wanted)

    async def _share_out(self, work: Callable[[Sequence[_Share]], None], due: Sequence[_Share]) -> None:
        """Do `work` for all that is due: a disk brings many small files home in hardly more time than one."""
        loop = asyncio.get_running_loop()
        async with self._at_work:
            shares = [due[first::THREADS] for first in range(min(THREADS, len(due)))]
            await asyncio.gather(*(loop.run_in_executor(self._threads, work, share) for share in shares))

    def _usable(self) -> list[MaintainedReplica]:
        return [replica for replica in self._hosted() if _is_usable(replica.log)]


async def _every(interval_s: float, do_round: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await do_round()


def _flush(logs: Sequence[Log]) -> None:
    for log in logs:
        try:
            log.flush()
        except LogFailed:
            continue  # closed meanwhile, or failed: then `log.failure` says why, and the event loop tells of it


def _checkpoint(wanted: Sequence[tuple[Log, int, Leadership]]) -> None:
    refused: list[OSError] = []
    for log, high_watermark, leadership in wanted:
        try:
            log.checkpoint(high_watermark, leadership)
        except OSError as error:
            refused.append(error)
        except LogFailed:
            continue  # as above
    if refused:
        _logger.error("high watermarks not written down", logs=len(refused), error=str(refused[0]))


def _is_usable(log: Log) -> bool:
    return not log.is_closed and log.failure is None


def _is_limited(log: Log) -> bool:
    return log.options.retention_bytes != NO_RETENTION_LIMIT or log.options.retention_ms != NO_RETENTION_LIMIT


def _named(replica: MaintainedReplica) -> dict[str, object]:
    return {"topic": replica.topic, "partition": replica.partition_index}

"""What is done to every log from time to time: flushing, checkpoints, retention.

A round of each kind ends before the next of that kind begins. Flushing and checkpoints wait for the disk, so they run
in threads of their own; what changes a log runs on the event loop, between its appends, and waits for no disk.

Invariants
1. A log that is closed or removed meanwhile is passed over: it is no error, and nothing of it is written any more.
2. That a log has failed is told once. It is not flushed again, since the kernel may claim that what it could not write
   is written; giving the partition to another broker is `leases`' affair.
3. A high watermark is written down only once what lies below it is on the disk (`Log.checkpoint`): segments begin while
   the one before them is still on its way there, and below a high watermark that was written down nothing is cut away.
4. What cannot be done now, for want of room, is tried again in the next round, and no round keeps the others waiting.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import structlog

from kproxy.broker.checkpoint import Leadership
from kproxy.broker.log import Log
from kproxy.broker.log_options import NO_RETENTION_LIMIT
from kproxy.broker.segment import LogFailed

# Kafka's replica.high.watermark.checkpoint.interval.ms.
CHECKPOINT_INTERVAL_S = 5.0
THREADS = 8
_Share = TypeVar("_Share")
_logger = structlog.get_logger(__name__)


class Kept(Protocol):
    """A partition whose log is kept."""

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


class LogKeeper:
    """Keeps the logs of what `hosted` names at the time. `run` is one coroutine that the caller owns; then `close`."""

    def __init__(
        self,
        hosted: Callable[[], Iterable[Kept]],
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
        dirty = [kept.log for kept in self._usable() if kept.log.is_dirty]
        due = [log for log in dirty if whatever_the_policy or log.options.flush == "interval"]
        if due:
            await self._share_out(_flush, due)
        for kept in list(self._hosted()):
            if kept.log.failure is not None and not kept.log.is_closed and kept.log not in self._told:
                self._told.add(kept.log)
                _logger.error("log failed", **_named(kept), error=str(kept.log.failure))

    async def checkpoint(self) -> None:
        """Write down the high watermarks that have moved, and the leaderships that are obeyed."""
        due = [
            kept
            for kept in self._usable()
            if kept.high_watermark != kept.log.high_watermark_checkpoint or kept.leadership != kept.log.leadership
        ]
        await self._write_checkpoints(due)

    async def remove_old_segments(self) -> None:
        """Apply retention."""
        shortened = []
        for kept in list(self._hosted()):
            if _is_limited(kept.log) and _is_usable(kept.log) and self._shorten(kept):
                shortened.append(kept)
            await asyncio.sleep(0)
        # A log that is empty now has its leader epoch from there.
        await self._write_checkpoints([kept for kept in shortened if _is_usable(kept.log)])

    def _shorten(self, kept: Kept) -> bool:
        try:
            removed = kept.log.remove_old_segments(self._now_ms(), kept.high_watermark)
        except (OSError, LogFailed) as error:
            _logger.error("retention not applied", **_named(kept), error=str(error))
            return False
        if removed:
            _logger.info("old segments removed", **_named(kept), segments=removed, start=kept.log.log_start_offset)
        return removed > 0

    async def _write_checkpoints(self, due: Sequence[Kept]) -> None:
        wanted = [(kept.log, kept.high_watermark, kept.leadership) for kept in due]
        if wanted:
            await self._share_out(_checkpoint, wanted)

    async def _share_out(self, work: Callable[[Sequence[_Share]], None], due: Sequence[_Share]) -> None:
        """Do `work` for all that is due: a disk brings many small files home in hardly more time than one."""
        loop = asyncio.get_running_loop()
        async with self._at_work:
            shares = [due[first::THREADS] for first in range(min(THREADS, len(due)))]
            await asyncio.gather(*(loop.run_in_executor(self._threads, work, share) for share in shares))

    def _usable(self) -> list[Kept]:
        return [kept for kept in self._hosted() if _is_usable(kept.log)]


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


def _named(kept: Kept) -> dict[str, object]:
    return {"topic": kept.topic, "partition": kept.partition_index}

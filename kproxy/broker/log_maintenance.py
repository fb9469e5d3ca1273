"""Flush logs, write their checkpoints and apply retention periodically.

A round of each kind ends before the next of that kind begins. Flushes and checkpoints wait for the disk, so they run in
threads; retention runs on the event loop, between appends. A replica is at rest (`Partition.is_at_rest`) once its log
is flushed and its checkpoint written; flushes and checkpoints skip it until it changes.

Invariants
1. A log that is closed or removed meanwhile is skipped without an error, and never written again.
2. A log's failure is logged once. A failed log is not flushed again, because the kernel may report bytes as written
   that it could not write. `replica_manager` moves the partition to another broker.
3. A high watermark is written only once everything below it is on the disk (`Log.checkpoint`): a segment begins while
   the one before it is still being flushed, and nothing below a written high watermark is ever cut off.
4. Work that fails for lack of room is retried in the next round. One round at a time uses the threads; others wait.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

import structlog

from kproxy.broker.config import NO_RETENTION_LIMIT
from kproxy.broker.disk_threads import DiskThreads
from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.log import Log
from kproxy.broker.partition import Partition
from kproxy.broker.producer_state import wall_ms
from kproxy.broker.segment import LogFailed
from kproxy.broker.snapshot import LogState

# Kafka's replica.high.watermark.checkpoint.interval.ms.
CHECKPOINT_INTERVAL_S = 5.0
THREADS = 8
_Share = TypeVar("_Share")
# A log, and its files' contents: high watermark, leadership, state for a snapshot.
_Wanted = tuple[Log, int, Leadership, LogState | None]
_logger = structlog.get_logger(__name__)


@dataclass(eq=False)
class LogMaintenance:
    """Maintains the logs of the replicas that `hosted` yields. The caller owns the coroutine `run`; then `close`."""

    hosted: Callable[[], Iterable[Partition]]
    _: KW_ONLY
    flush_interval_s: float
    retention_check_interval_s: float
    now_ms: Callable[[], int] = wall_ms

    def __post_init__(self) -> None:
        self._logged_failures: weakref.WeakSet[Log] = weakref.WeakSet()
        self._threads = DiskThreads(THREADS, "log-keeper")
        # Held while the threads work, so that only one works on a log.
        self._work_lock = asyncio.Lock()

    async def run(self) -> None:
        """Run the rounds until cancelled."""
        async with asyncio.TaskGroup() as rounds:
            rounds.create_task(_every(self.flush_interval_s, self.flush))
            rounds.create_task(_every(CHECKPOINT_INTERVAL_S, self.checkpoint))
            rounds.create_task(_every(self.retention_check_interval_s, self.remove_old_segments))

    def close(self) -> None:
        """Stop beginning work. The threads finish by themselves; a log may be closed meanwhile."""
        self._threads.shutdown()

    async def flush(self, *, whatever_the_policy: bool = False) -> None:
        """Flush logs with the flush policy `interval`; report failed logs.

        Logs with the policy `always` are flushed by their LogFlusher. With `whatever_the_policy` all logs are flushed,
        and running flushes are awaited.
        """
        replicas = self.hosted() if whatever_the_policy else self._restless()
        logs = [replica.log for replica in replicas if _is_usable(replica.log)]
        if whatever_the_policy:
            due = [log for log in logs if log.is_dirty or log.flush_under_way]
        else:
            due = [log for log in logs if log.is_dirty and log.options.flush == "interval"]
        await self._run_in_threads(_flush, due)
        for replica in self._restless():
            if (
                replica.log.failure is not None
                and not replica.log.is_closed
                and replica.log not in self._logged_failures
            ):
                self._logged_failures.add(replica.log)
                _logger.error("log failed", **replica.log_fields, reason=str(replica.log.failure))

    async def checkpoint(self, *, is_last: bool = False) -> None:
        """Write the high watermarks and leaderships that have changed, and snapshots of the logs.

        `is_last`: appends have ended; the next opening begins at the ends of the logs.
        """
        wanted = []
        for replica in list(self.hosted()) if is_last else self._restless():
            log, high_watermark, leadership = replica.log, replica.high_watermark, replica.leadership
            if not _is_usable(log):
                continue
            is_flushed_only_at_end = log.options.flush == "never"
            if is_flushed_only_at_end:
                high_watermark = min(high_watermark, log.flushed_offset)
            state = log.state_below(high_watermark, is_last=is_last)
            if state or (high_watermark, leadership) != (log.high_watermark_checkpoint, log.leadership):
                wanted.append((log, high_watermark, leadership, state))
            elif is_flushed_only_at_end or not log.is_dirty:
                replica.note_at_rest()
        await self._run_in_threads(_checkpoint, wanted)

    async def remove_old_segments(self) -> None:
        """Apply retention."""
        shortened = []
        for replica in list(self.hosted()):
            if _is_limited(replica.log) and _is_usable(replica.log):
                if self._shorten(replica):
                    shortened.append(replica)
                await asyncio.sleep(0)
        # An empty log has its leader epoch only in its checkpoint.
        usable = [each for each in shortened if _is_usable(each.log)]
        wanted = [(each.log, each.high_watermark, each.leadership, None) for each in usable]
        await self._run_in_threads(_checkpoint, wanted)

    def _shorten(self, replica: Partition) -> bool:
        try:
            removed = replica.log.remove_old_segments(self.now_ms(), replica.high_watermark)
        except (OSError, LogFailed) as error:
            _logger.error("retention not applied", **replica.log_fields, reason=str(error))
            replica.log_shortened()
            return False
        if removed:
            replica.log_shortened()
            _logger.info(
                "old segments removed", **replica.log_fields, segments=removed, start=replica.log.log_start_offset
            )
        return removed > 0

    async def _run_in_threads(self, work: Callable[[Sequence[_Share]], None], due: Sequence[_Share]) -> None:
        """Share the work among the threads: a disk flushes many small files almost as fast as one."""
        if not due:
            return
        loop = asyncio.get_running_loop()
        async with self._work_lock:
            shares = [due[first::THREADS] for first in range(min(THREADS, len(due)))]
            await asyncio.gather(*(loop.run_in_executor(self._threads, work, share) for share in shares))

    def _restless(self) -> list[Partition]:
        return [replica for replica in self.hosted() if not replica.is_at_rest]


async def _every(interval_s: float, do_round: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await do_round()


def _flush(logs: Sequence[Log]) -> None:
    for log in logs:
        try:
            log.flush()
        except LogFailed:
            continue  # closed meanwhile, or failed: the event loop logs `log.failure`


def _checkpoint(wanted: Sequence[_Wanted]) -> None:
    refused: list[OSError] = []
    for log, high_watermark, leadership, state in wanted:
        try:
            log.checkpoint(high_watermark, leadership, state)
        except OSError as error:
            refused.append(error)
        except LogFailed:
            continue  # closed meanwhile, or failed
    if refused:
        _logger.error("high watermarks not written", logs=len(refused), reason=str(refused[0]))


def _is_usable(log: Log) -> bool:
    return not log.is_closed and log.failure is None


def _is_limited(log: Log) -> bool:
    return log.options.retention_bytes != NO_RETENTION_LIMIT or log.options.retention_ms != NO_RETENTION_LIMIT

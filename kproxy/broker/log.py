"""Store a partition's record batches on disk, as received, in a log of segment files.

The log has the offsets from `log_start_offset` to `log_end_offset`.

States
  open      appended to and read by one thread
  failed    a failed write could not be undone, a flush or a removal failed, or the producers could not be read again
            after a truncation; every later append, read, removal, flush and checkpoint raises LogFailed
  closed    the files are closed; offsets can still be read

Invariants
1. log_start_offset <= every offset in the log < log_end_offset; the next batch gets log_end_offset. There is no gap.
2. Bytes are appended only behind the last whole batch, and appended bytes never change. Bytes are removed in whole
   batches from the end (`truncate_to`, `undo_append`), in whole segments from the start, or all at once (`reset_to`).
3. Opening reads every batch that the files of `snapshot` do not cover, up to the first damage: a bad batch, or a gap
   between segments. The recovery point is the high watermark of the last checkpoint. From there on, a killed process or
   a power cut may leave damage, also in the middle of the log, because a segment begins before the one before it is on
   the disk: the log is cut off at the damage, and what follows is removed. Damage below the recovery point is
   LogCorrupt: those offsets were assigned and committed. The same holds for a sole replica that ends below it.
4. Only the process that opened the log writes to it (the data directory is locked).
5. `producers` and `leader_epochs` follow from the batches in the log, and from the epoch that a leader assigned at its
   end. Producers from a snapshot may have written what retention has removed since.
6. One thread works on a log and never waits for the disk. `flush` and `checkpoint` wait, in other threads, one of each
   at a time; `close` waits for neither.
7. All below `flushed_offset` is on the disk, names of segments included, unless it has been removed. When a log is
   opened, the names of segments that begin at or above the recovery point count as not on the disk.
8. Removing from the start leaves at least one segment whose name is on the disk, unless `flush` is never: a directory
   without segments would look like a log that begins at 0.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from kproxy.broker.config import NO_RETENTION_LIMIT, LogOptions
from kproxy.broker.disk import ChangedNames, DiskError, disk_error, read_json, sync_directory, write_json
from kproxy.broker.leader_epochs import NO_LEADER_EPOCH, NO_LEADERSHIP, LeaderEpochs, Leadership
from kproxy.broker.producer_state import ProducerHistory, ProducerStates
from kproxy.broker.segment import SUFFIX, LogFailed, Segment, TimestampAndOffset
from kproxy.broker.snapshot import (
    INDEX_SUFFIX,
    INTERVAL_BYTES,
    LogState,
    index_path,
    read_index,
    read_snapshot,
    snapshot_path,
    write_index,
    write_snapshot,
)
from kproxy.broker.validation import check_replicated
from kproxy_codec.primitives import Buffer
from kproxy_codec.record_batch import NO_TIMESTAMP, RecordBatch, leader_epoch_of

# Above every offset.
_NO_OFFSET = 1 << 63


_CHECKPOINT_FILE = "checkpoint.json"
_CHECKPOINT_VERSION = 1


class LogCorrupt(LogFailed):
    """Committed records on the disk cannot be read."""


class Log:
    """One partition's batches on disk.

    Every method may block on the page cache. `flush` and `checkpoint` also wait for the disk, and `open` reads all that
    no snapshot covers.
    """

    def __init__(self, directory: Path, segments: list[Segment], options: LogOptions) -> None:
        """Wrap segments that have been read already: see `open`."""
        self.directory = directory
        self.options = options
        self.producers = ProducerStates()
        self.leader_epochs = LeaderEpochs()
        self.truncated_bytes = 0
        self.high_watermark_checkpoint = 0
        self.leadership = NO_LEADERSHIP
        self._segments = segments
        self._base_offsets: list[int] = []
        self._producer_history = ProducerHistory()
        # The end of the snapshot in the file: the base offset and a position of its segment, and the offset.
        self._snapshot_at = (-1, 0, -1)
        self._last_append = 0
        # The reason why the log must be reopened before use; None while it works.
        self.failure: Exception | None = None
        self.is_closed = False
        self.flushed_offset = 0
        # Segments whose names may not be on the disk: their directory, and the base offset of the first one.
        self._changed_names: ChangedNames | None = None
        self._unsynced_from = _NO_OFFSET
        # The lowest offset at which the log was truncated during the running flush.
        self._cut_at = _NO_OFFSET
        # Held while a thread flushes: another one must not count bytes that are not flushed yet.
        self._flush_lock = threading.Lock()
        self._flushes = 0
        # Held while `flushed_offset` and its inputs change.
        self._flushed_lock = threading.Lock()
        # Held while a checkpoint is put in place, and while the log is closed.
        self._close_lock = threading.Lock()
        # Held while a checkpoint is written.
        self._checkpoint_lock = threading.Lock()

    @classmethod
    def open(cls, directory: Path, *, options: LogOptions | None = None, is_only_replica: bool = False) -> Log:
        """Open the log in `directory`, creating it if needed.

        `truncated_bytes` of the result counts the bytes cut off at the first damage; `high_watermark_checkpoint` and
        `leadership` are the last ones written, or 0 and NO_LEADERSHIP. With the flush policy `always` the log is first
        flushed; with `interval` only a new log is. An undamaged log that lacks committed records opens, unless it
        `is_only_replica`: then no other replica has them. Raises LogFailed (LogCorrupt), OSError.
        """
        directory.mkdir(parents=True, exist_ok=True)
        segments: list[Segment] = []
        log = cls(directory, segments, options or LogOptions())
        try:
            for path in sorted(directory.glob(f"*{SUFFIX}")):
                segments.append(Segment.open(path))  # noqa: PERF401 - what is open is closed when the next one fails
            log._recover(is_only_replica)
            is_new = not segments
            if is_new:
                log._create_segment(0)
            if log.options.flush == "always" or (is_new and log.options.flush == "interval"):
                log.flush()  # no code waits for the log yet
        except BaseException:
            log.close()
            raise
        return log

    def _recover(self, is_only_replica: bool) -> None:
        checkpoint = _read_checkpoint(self.directory)
        self.high_watermark_checkpoint = checkpoint.high_watermark
        self.leadership = Leadership(checkpoint.obeyed_epoch, checkpoint.fencing_token)
        if self._segments:
            self._recover_segments(checkpoint.high_watermark, is_only_replica)
            self.flushed_offset = min(checkpoint.high_watermark, self.log_end_offset)
        else:
            if is_only_replica:
                self._check_end("ends at offset 0", 0, checkpoint.high_watermark)
            self._remove_unused()
        is_empty = bool(self._segments) and self.log_start_offset == self.log_end_offset
        if is_empty and checkpoint.log_end_offset == self.log_end_offset and checkpoint.leader_epoch >= 0:
            self.leader_epochs.assign(checkpoint.leader_epoch, self.log_start_offset)

    def _check_end(self, damage: str, end_offset: int, recovery_point: int) -> None:
        if end_offset < recovery_point:
            known = f"all below offset {recovery_point} was on the disk, and is not cut away"
            raise LogCorrupt(f"{self.directory.name}: {damage}; {known}")

    def _recover_segments(self, recovery_point: int, is_only_replica: bool) -> None:
        """Read the segments up to the first damage, and remove the rest. Raises OSError, LogCorrupt."""
        kept, bad_bytes, damage = 0, 0, ""
        known_to = self._adopt_snapshot(recovery_point)

        def note_batch(batch: RecordBatch) -> None:
            if batch.base_offset >= known_to:
                self._note_batch(batch, batch.max_timestamp)

        for segment in self._segments:
            if kept and segment.base_offset != self._segments[kept - 1].next_offset:
                before = self._segments[kept - 1]
                damage = f"{before.path.name} ends at offset {before.next_offset}, {segment.path.name} comes next"
                break
            kept += 1
            before_epoch = self.leader_epochs.epoch_at(segment.next_offset - 1)
            bad_bytes = segment.recover(note_batch, before_epoch, recovery_point)
            if bad_bytes:
                damage = f"a bad batch in {segment.path.name} at byte {segment.size_in_bytes}"
                break
        last, behind = self._segments[kept - 1], self._segments[kept:]
        if damage or is_only_replica:
            # At a batch's end only the recovery point shows that a tail is missing.
            self._check_end(damage or f"ends at offset {last.next_offset}", last.next_offset, recovery_point)
        self.truncated_bytes = bad_bytes + sum(segment.length_in_bytes() for segment in behind)
        if bad_bytes:
            last.truncate_tail()
        for segment in reversed(behind):
            segment.delete()
        del self._segments[kept:]
        self._base_offsets = [segment.base_offset for segment in self._segments]
        self.leader_epochs.truncate_from_start(self.log_start_offset)
        self._remove_unused()
        if bad_bytes:
            self._outdate_snapshot()
        # The process that began these segments may have died before their names were on the disk.
        begun_since = self._base_offsets[bisect_left(self._base_offsets, recovery_point) :]
        if begun_since:
            self._note_new_name(begun_since[0])

    def _adopt_snapshot(self, recovery_point: int) -> int:
        """Adopt the log's snapshot and indexes; return the offset up to which they reach. Raises OSError."""
        snapshot = read_snapshot(self.directory, recovery_point)
        if snapshot is None:
            return 0
        index, state = snapshot
        holding = next((each for each in self._segments if each.base_offset == index.base_offset), None)
        if holding is None or not holding.adopt(index):
            return 0
        for segment in self._segments[: self._segments.index(holding)]:
            found = read_index(self.directory, segment.base_offset, recovery_point)
            segment.is_indexed = found is not None and segment.adopt(found)
        for leader_epoch, start_offset in state.leader_epochs:
            self.leader_epochs.assign(leader_epoch, start_offset)
        self.producers = state.producers
        self._producer_history.keep(state.offset, state.producers)
        self._snapshot_at = (index.base_offset, index.size_in_bytes, state.offset)
        return state.offset

    def _remove_unused(self) -> None:
        """Remove files that describe another log, before this one is written to. Raises OSError."""
        used = {index_path(self.directory, each.base_offset) for each in self._segments if each.is_indexed}
        unused = [path for path in self.directory.glob(f"*{INDEX_SUFFIX}") if path not in used]
        path = snapshot_path(self.directory)
        if self._snapshot_at[2] < 0 and path.exists():
            unused.append(path)
        for each in unused:
            each.unlink()
        if unused:
            sync_directory(self.directory)

    def _note_batch(self, batch: RecordBatch, written_ms: int | None = None) -> None:
        """Count a batch found in the log or received from a leader; written at `written_ms`, or now."""
        self._producer_history.note_batch(batch.base_offset, batch.size_in_bytes, self.producers)
        self.leader_epochs.assign(batch.partition_leader_epoch, batch.base_offset)
        self.producers.update(batch, batch.base_offset, written_ms)

    def _create_segment(self, base_offset: int) -> Segment:
        """Add a segment at the end. On OSError none is created."""
        try:
            segment = Segment.create(self.directory, base_offset)
            try:
                self._note_new_name(base_offset)
            except OSError:
                segment.delete()
                raise
        except OSError as error:
            raise disk_error(error, self.directory) from error
        self._segments.append(segment)
        self._base_offsets.append(base_offset)
        return segment

    def _note_new_name(self, base_offset: int) -> None:
        """Note that a segment begins at `base_offset`. Raises OSError."""
        with self._flushed_lock:
            if self._changed_names is None and self.options.flush != "never":
                self._changed_names = ChangedNames(self.directory)
            self._unsynced_from = min(self._unsynced_from, base_offset)

    @property
    def log_start_offset(self) -> int:
        return self._segments[0].base_offset

    @property
    def log_end_offset(self) -> int:
        return self._segments[-1].next_offset

    @property
    def size_in_bytes(self) -> int:
        return sum(segment.size_in_bytes for segment in self._segments)

    @property
    def is_dirty(self) -> bool:
        """Whether `flush` would write to the disk."""
        return self._changed_names is not None or any(segment.is_dirty for segment in list(self._segments))

    @property
    def flush_under_way(self) -> int:
        """The number of the running flush, from 1; 0 if there is none."""
        return self._flushes if self._flush_lock.locked() else 0

    @property
    def counted_end_offset(self) -> int:
        """The end that this replica may report: `flushed_offset` with the flush policy `always`."""
        return self.flushed_offset if self.options.flush == "always" else self.log_end_offset

    # Appending

    def append(self, records: Buffer, batch: RecordBatch) -> None:
        """Write one batch; it already carries its offset and leader epoch.

        The offset is `log_end_offset`. On OSError the log is unchanged; the message names the failed disk. Raises
        LogFailed, and ValueError for a decreasing epoch. The caller updates `producers` once the append is final.
        """
        self._check()
        leader_epoch = leader_epoch_of(records)
        base_offset = self.log_end_offset
        self.leader_epochs.assign(leader_epoch, base_offset)
        self._producer_history.note_batch(base_offset, len(records), self.producers)
        self._last_append = base_offset
        self._write(records, [batch], base_offset)

    def append_replicated(self, records: Buffer) -> int:
        """Write a leader's batches from `log_end_offset`; return the new end.

        A partial last batch, as in a Fetch answer, is left out. Raises ReplicatedBatchInvalid, with nothing written;
        OSError, with whole batches written or none; LogFailed.
        """
        self._check()
        end_offset = self.log_end_offset
        # An epoch that this replica began as leader, and that wrote no records, is not binding.
        batches = check_replicated(records, end_offset, self.leader_epochs.epoch_at(end_offset - 1))
        segment_bytes, view = self.options.segment_bytes, memoryview(records)
        taken = 0
        while taken < len(batches):
            first, upto = batches[taken], taken + 1
            room = segment_bytes - self._segments[-1].size_in_bytes
            if first.size_in_bytes > room:
                room = segment_bytes
            while upto < len(batches) and batches[upto].end - first.position <= room:
                upto += 1
            together = batches[taken:upto]
            self._write(view[first.position : together[-1].end], together, first.base_offset)
            for batch in together:
                self._note_batch(batch)
            taken = upto
        return self.log_end_offset

    def _write(self, records: Buffer, batches: list[RecordBatch], base_offset: int) -> None:
        """Write batches into the last segment, or a new one if it is full."""
        segment = self._segments[-1]
        is_full = segment.size_in_bytes > 0 and segment.size_in_bytes + len(records) > self.options.segment_bytes
        try:
            if is_full:
                segment = self._create_segment(base_offset)
            segment.append(records, batches, base_offset)
        except LogFailed as error:
            self.failure = error
            raise
        except OSError as error:
            self._outdate_snapshot()
            if is_full:
                self._undo_roll()
            raise disk_error(error, self.directory) from error

    def _undo_roll(self) -> None:
        """Remove the new, empty segment, if there is one."""
        if self._segments[-1].size_in_bytes == 0 and len(self._segments) > 1:
            self._drop_last()

    # Removing

    def truncate_to(self, offset: int) -> None:
        """Drop every batch that reaches to or above `offset`.

        Raises OSError, LogFailed. An epoch without records at the end is also dropped. The log start offset stays.
        """
        self._check()
        if offset < self.log_end_offset:
            kept = max(bisect_left(self._base_offsets, offset), 1)
            while len(self._segments) > kept:
                self._drop_last()
            self._cut_off(offset)
            try:
                self._rebuild_producers()
            except (OSError, LogFailed) as error:
                self.failure = error  # with only some producers, a resend would become a second record
                raise
        self.leader_epochs.truncate_from_end(self.log_end_offset)

    def undo_append(self) -> None:
        """Remove the batch of the last `append`. Raises LogFailed."""
        self._check()
        self._cut_off(self._last_append)

    def _outdate_snapshot(self) -> None:
        """Mark the snapshot as outdated, for a stop to rewrite: truncation changes a file's modification time."""
        self._snapshot_at = (*self._snapshot_at[:2], -1)

    def _cut_off(self, offset: int) -> None:
        self._outdate_snapshot()
        try:
            self._segments[-1].truncate_to(offset)
            self._lower_flushed_offset(self.log_end_offset)
        except LogFailed as error:
            self.failure = error
            raise
        except OSError as error:
            raise self._failed(disk_error(error, self.directory)) from error

    def _lower_flushed_offset(self, offset: int) -> None:
        """Lower `flushed_offset` to the truncated end, whatever a running flush has seen."""
        with self._flushed_lock:
            self.flushed_offset = min(self.flushed_offset, offset)
            self._cut_at = min(self._cut_at, offset)

    def _rebuild_producers(self) -> None:
        """Restore the `producers` of the log's new end."""
        offset, self.producers = self._producer_history.restore(self.log_end_offset, self.log_start_offset)
        for segment in self._segments:
            if segment.next_offset > offset:
                for batch in segment.batches_from(offset):
                    self.producers.update(batch, batch.base_offset, batch.max_timestamp)

    def reset_to(self, offset: int) -> None:
        """Drop everything; the empty log begins at `offset`. Raises LogFailed."""
        self._check()
        for segment in reversed(self._segments):
            self._delete(segment)
        try:
            fresh = self._create_segment(offset)
        except DiskError as error:
            raise self._failed(error) from error
        self._segments[:], self._base_offsets[:] = [fresh], [offset]
        self._lower_flushed_offset(0)
        self._producer_history.clear()
        self.producers = ProducerStates()
        self.leader_epochs.truncate_from_end(0)

    def remove_old_segments(self, now_ms: int, high_watermark: int) -> int:
        """Apply retention: remove old segments; return their number.

        Only whole segments below the high watermark are removed. Raises OSError, LogFailed. If the last segment is also
        old enough, a new, empty one replaces it; the old one is removed in the next round, once the new one is on the
        disk.
        """
        self._check()
        count = _removable_segments(self._segments, self.options, now_ms, high_watermark)
        if count == len(self._segments):
            self._create_segment(self.log_end_offset)
        return self._drop_first(count)

    def advance_log_start(self, offset: int) -> None:
        """Drop whole segments below `offset`, where the leader's log begins now. Raises LogFailed."""
        self._check()
        self._drop_first(bisect_right(self._base_offsets, offset) - 1)

    def _drop_first(self, count: int) -> int:
        """Drop up to `count` of the oldest segments, but leave one whose name is on the disk; return the number."""
        if self.options.flush != "never":
            count = max(0, min(count, bisect_left(self._base_offsets, self._unsynced_from) - 1))
        # One by one, oldest first, so that an error leaves no gap.
        for _ in range(count):
            del self._base_offsets[0]
            self._delete(self._segments.pop(0))
        if count > 0:
            self.leader_epochs.truncate_from_start(self.log_start_offset)
        return count

    def _drop_last(self) -> None:
        self._base_offsets.pop()
        self._delete(self._segments.pop())

    def _delete(self, segment: Segment) -> None:
        try:
            segment.delete()
        except OSError as error:
            raise self._failed(disk_error(error, self.directory)) from error

    # Reading

    def read(self, offset: int, max_bytes: int, *, up_to: int | None = None) -> bytes:
        """Read batches of one segment, from the one that holds `offset`.

        The first is whole, the last perhaps partial. If `up_to` is given, only batches that end below it are read.
        `offset` must lie in the log; at its end the result is empty. Raises OSError, LogFailed.
        """
        self._check()
        position = max(bisect_right(self._base_offsets, offset) - 1, 0)
        for segment in self._segments[position:]:
            found = segment.read(offset, max_bytes, up_to)
            if found:
                return found
        return b""

    def find_timestamp(self, timestamp: int) -> TimestampAndOffset | None:
        """Find the first batch with a record at or after `timestamp` (ms); return its first timestamp and offset."""
        self._check()
        for segment in self._segments:
            found = segment.find_timestamp(timestamp)
            if found is not None:
                return found
        return None

    def max_timestamp(self) -> TimestampAndOffset:
        """Return the largest timestamp (ms), and the last offset of the first batch with it; (-1, -1) if empty."""
        largest = TimestampAndOffset(NO_TIMESTAMP, -1)
        for segment in self._segments:
            if segment.max_timestamp.timestamp > largest.timestamp:
                largest = segment.max_timestamp
        return largest

    # The disk

    def flush(self) -> None:
        """Flush the whole log to the disk.

        Blocks; not for the thread that appends. Raises LogFailed: after an error the contents of the disk are unknown.
        """
        with self._flush_lock:
            self._flushes += 1
            self._check()
            with self._flushed_lock:
                self._cut_at, end_offset = _NO_OFFSET, self.log_end_offset
                names, self._changed_names = self._changed_names, None
            try:
                for segment in list(self._segments):
                    if segment.is_dirty:
                        segment.flush()
                if names is not None:
                    names.sync()
                elif self.options.flush == "never":
                    sync_directory(self.directory)
            except OSError as error:
                raise self._failed(disk_error(error, self.directory)) from error
            finally:
                if names is not None:
                    names.close()
            # A log closed meanwhile was not flushed completely.
            self._check()
            with self._flushed_lock:
                self.flushed_offset = max(self.flushed_offset, min(end_offset, self._cut_at))
                if self._changed_names is None:
                    self._unsynced_from = _NO_OFFSET

    def state_below(self, high_watermark: int, *, is_last: bool = False) -> LogState | None:
        """Return the state for the next snapshot, None if none is due; `is_last` before the log is closed."""
        base_offset, position, offset = self._snapshot_at
        if self.options.flush == "never":
            high_watermark = min(high_watermark, self.flushed_offset)
        if is_last and offset < high_watermark == self.log_end_offset:
            self._producer_history.keep(high_watermark, self.producers)
        found = self._producer_history.newest_up_to(high_watermark)
        if found is None or found[0] <= offset or found[0] < self.log_start_offset:
            return None
        segment = self._segments[bisect_right(self._base_offsets, found[0]) - 1]
        is_new = segment.base_offset != base_offset
        if not is_new and not is_last and segment.position_before(found[0]) - position < INTERVAL_BYTES:
            return None
        epochs = [(epoch, start) for epoch, start in self.leader_epochs.entries() if start < found[0]]
        return LogState(found[0], epochs, found[1])

    def _write_snapshots(self, high_watermark: int, state: LogState | None) -> None:
        """Write the indexes of segments below the high watermark, then the snapshot. Raises OSError, LogFailed."""
        segments = list(self._segments)
        for segment in segments[:-1]:
            if segment.next_offset <= high_watermark and not segment.is_indexed:
                write_index(self.directory, segment.index_below(segment.next_offset), self._while_open())
                segment.is_indexed = True
        if state is None or state.offset > high_watermark:
            return
        holding = [each for each in segments if each.base_offset <= state.offset]
        if holding:
            index = holding[-1].index_below(state.offset)
            write_snapshot(self.directory, index, state, self._while_open())
            self._snapshot_at = (index.base_offset, index.size_in_bytes, state.offset)

    def checkpoint(self, high_watermark: int, leadership: Leadership, state: LogState | None = None) -> None:
        """Write the high watermark, the newest leadership and a snapshot of `state` beside the log. Blocks.

        Everything below the high watermark is flushed first, except with the flush policy `never`: then the checkpoint
        is limited to the flushed part. Damage above the checkpoint counts as a power cut's. Raises OSError, LogFailed.
        """
        with self._checkpoint_lock:
            self._check()
            if self.options.flush != "never":
                self.flush()
            high_watermark = min(high_watermark, self.flushed_offset)
            obeyed = max(leadership, self.leadership)
            checkpoint = Checkpoint(high_watermark, *obeyed, self.log_end_offset, self.leader_epochs.latest)
            try:
                write_checkpoint(self.directory, checkpoint, self._while_open())
                if obeyed > self.leadership and self.options.flush != "never":
                    sync_directory(self.directory)
                self.high_watermark_checkpoint, self.leadership = high_watermark, obeyed
                # Last: a snapshot beyond the high watermark in the checkpoint is not used.
                self._write_snapshots(high_watermark, state)
            except OSError as error:
                # A log closed meanwhile may have lost its directory, which is not a disk error.
                self._check()
                raise disk_error(error, self.directory) from error

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Keep the log open: the directory of a closed log may have been replaced."""
        with self._close_lock:
            self._check()
            yield

    def close(self) -> None:
        """Close the files; offsets can still be read. May be called twice."""
        with self._close_lock:
            if not self.is_closed:
                self.is_closed = True
                self.failure = self.failure or LogFailed("the log is closed")
                for segment in self._segments:
                    segment.close()
                with self._flushed_lock:
                    names, self._changed_names = self._changed_names, None
                if names is not None:
                    names.close()

    def _failed(self, error: DiskError) -> LogFailed:
        """Mark the log as failed for good."""
        self.failure = error
        return LogFailed(f"{self.directory.name}: {error}")

    def _check(self) -> None:
        if self.failure is not None:
            raise LogFailed(f"{self.directory.name}: {self.failure}") from self.failure


class Checkpoint(NamedTuple):
    """The content of checkpoint.json, which is replaced in one step.

    A log without the file has the defaults. The high watermark may be old, so no log is truncated to it. It is also
    Kafka's recovery point: it is written only once everything below is on the disk, names of segments included, and
    nothing below it is ever removed from the end. So damage below it is the disk's fault, and damage above it may come
    from a power cut. The leadership is the highest one that this replica has obeyed. The leader epoch serves a log that
    retention has emptied: it is the epoch before the log end offset.
    """

    high_watermark: int = 0
    obeyed_epoch: int = NO_LEADER_EPOCH
    fencing_token: int = 0
    log_end_offset: int = 0
    leader_epoch: int = NO_LEADER_EPOCH


def _read_checkpoint(directory: Path) -> Checkpoint:
    """Read the checkpoint in `directory`. Raises OSError, or LogFailed for a damaged one or another version."""
    found = read_json(directory / _CHECKPOINT_FILE)
    if found is None:
        return Checkpoint()
    version, *numbers = (found.get(name) for name in ("version", *Checkpoint._fields))
    if not all(isinstance(number, int) for number in (version, *numbers)):
        raise LogFailed(f"{directory / _CHECKPOINT_FILE} is damaged: its content is {found}")
    if version != _CHECKPOINT_VERSION:
        raise LogFailed(
            f"{directory / _CHECKPOINT_FILE} has version {version}; this release reads {_CHECKPOINT_VERSION}"
        )
    return Checkpoint._make(numbers)


def write_checkpoint(directory: Path, checkpoint: Checkpoint, replacing: AbstractContextManager[object]) -> None:
    """Write a checkpoint as `write_json` does. Raises OSError."""
    write_json(directory / _CHECKPOINT_FILE, {"version": _CHECKPOINT_VERSION, **checkpoint._asdict()}, replacing)


def _removable_segments(segments: Sequence[Segment], options: LogOptions, now_ms: int, high_watermark: int) -> int:
    """Count the oldest segments that retention removes.

    None reaches above the high watermark. The rules are those of Kafka's retention.bytes and retention.ms with
    cleanup.policy=delete. By size: while the rest is at least `retention_bytes`, and never the last segment. By time:
    while the largest timestamp is older than `retention_ms`. `now_ms` is milliseconds since the epoch.
    """
    left_bytes = sum(segment.size_in_bytes for segment in segments)
    count = 0
    for segment in segments:
        if segment.size_in_bytes == 0 or segment.next_offset > high_watermark:
            break
        is_old = (
            options.retention_ms != NO_RETENTION_LIMIT and segment.newest_timestamp() < now_ms - options.retention_ms
        )
        left_bytes -= segment.size_in_bytes
        is_too_much = (
            options.retention_bytes != NO_RETENTION_LIMIT
            and left_bytes >= options.retention_bytes
            and segment is not segments[-1]
        )
        if not is_old and not is_too_much:
            break
        count += 1
    return count

"""A partition's log: segments of record batches as received, with offsets from `log_start_offset` to `log_end_offset`.

States
  open      appended to and read by one thread
  failed    a write failed and could not be undone, or what was written may not be on the disk; every later call raises
            LogFailed
  closed    nothing more

Invariants
1. log_start_offset <= every offset in the log < log_end_offset; the next batch gets log_end_offset. There is no gap.
2. Bytes are appended only behind the last whole batch, and nothing that was appended is ever changed. What goes, goes
   in whole batches from the end (`truncate_to`), in whole segments from the start (retention), or all at once.
3. Opening reads every batch, up to the first damage: a bad batch, or a gap between segments. From the recovery point
   on, which is the high watermark last written down (`checkpoint`), a killed process or a power cut leaves just that,
   also in the midst of the log, since a segment begins before the one before it is on the disk: the log is cut off
   there, and what lies behind is removed. Damage below it nobody may paper over, since offsets were given out and
   committed: LogCorrupt.
4. The process that opened the log is the only one that writes to it (the data directory is locked).
5. `producers` and `leader_epochs` are what the batches in the log say, and the epoch a leader has assigned at its end.
6. One thread works on a log and never waits for the disk; `flush` and `checkpoint` do, run in others beside it, one of
   either at a time, and `close` waits for neither.
7. What lies below `flushed_offset` is on the disk, names of segments included, unless it has been removed.
8. Of the start of a log only so much is removed that a segment is left whose name is on the disk, unless `flush` is
   never: a directory without any would be taken for a log that begins at 0.
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
from kproxy.broker.validation import check_replicated
from kproxy_codec.primitives import Buffer
from kproxy_codec.record_batch import NO_TIMESTAMP, RecordBatch, leader_epoch_of

# Above every offset.
_NOWHERE = 1 << 63


class LogCorrupt(LogFailed):
    """What was on the disk, and committed, cannot be read."""


class Log:
    """One partition's batches on disk. Everything here blocks for as long as the page cache makes it; `flush` and
    `checkpoint` as long as the disk does, and `open` for as long as the log is large."""

    def __init__(self, directory: Path, segments: list[Segment], options: LogOptions) -> None:
        """Of segments that are read already: see `open`."""
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
        self._last_append = 0
        self._failure: Exception | None = None
        self._closed = False
        self.flushed_offset = 0
        # Of segments that may not be on the disk by name: the names, and the first one's base offset.
        self._changed_names: ChangedNames | None = None
        self._unnamed_from = _NOWHERE
        # The lowest offset that the log was cut off at since the flush under way has begun.
        self._cut_at = _NOWHERE
        # Held for as long as a thread waits for the disk: what it has taken on is not there yet for another.
        self._flushing = threading.Lock()
        # Held while `flushed_offset` and what it depends on are changed.
        self._counting = threading.Lock()
        # Held while a checkpoint is put into its place, and while the log is closed.
        self._closing = threading.Lock()
        # Held while a checkpoint is written.
        self._checkpointing = threading.Lock()

    @classmethod
    def open(cls, directory: Path, *, options: LogOptions | None = None) -> Log:
        """The log in `directory`, created where there is none. Raises LogFailed (LogCorrupt), OSError.

        Of the result, `truncated_bytes` tells how much of a torn tail was cut off; `high_watermark_checkpoint` and
        `leadership` are the last ones written, 0 and NO_LEADERSHIP where there are none. Where the disk is waited for
        before an append is answered, all that is found is brought there first.
        """
        directory.mkdir(parents=True, exist_ok=True)
        segments: list[Segment] = []
        log = cls(directory, segments, options or LogOptions())
        try:
            for path in sorted(directory.glob(f"*{SUFFIX}")):
                segments.append(Segment.open(path))  # noqa: PERF401 - what is open is closed when the next one fails
            log._recover()
            if not segments:
                log._create_segment(0)
            if log._changed_names is not None or log.options.flush == "always":
                log.flush()  # here nobody's turn waits
        except BaseException:
            log.close()
            raise
        return log

    def _recover(self) -> None:
        checkpoint = _read_checkpoint(self.directory)
        self.high_watermark_checkpoint = checkpoint.high_watermark
        self.leadership = Leadership(checkpoint.obeyed_epoch, checkpoint.fencing_token)
        if self._segments:
            self._recover_segments(checkpoint.high_watermark)
            self.flushed_offset = min(checkpoint.high_watermark, self.log_end_offset)
        is_empty = bool(self._segments) and self.log_start_offset == self.log_end_offset
        if is_empty and checkpoint.log_end_offset == self.log_end_offset and checkpoint.leader_epoch >= 0:
            self.leader_epochs.assign(checkpoint.leader_epoch, self.log_start_offset)

    def _recover_segments(self, recovery_point: int) -> None:
        """Read the segments up to the first damage, and cut off what is behind it. Raises OSError, LogCorrupt."""
        kept, bad_bytes, damage = 0, 0, ""
        for segment in self._segments:
            if kept and segment.base_offset != self._segments[kept - 1].next_offset:
                before = self._segments[kept - 1]
                damage = f"{before.path.name} ends at offset {before.next_offset}, {segment.path.name} comes next"
                break
            kept += 1
            bad_bytes = segment.recover(self._note_found, self.leader_epochs.latest, recovery_point)
            if bad_bytes:
                damage = f"a bad batch in {segment.path.name} at byte {segment.size_in_bytes}"
                break
        last, behind = self._segments[kept - 1], self._segments[kept:]
        if damage and last.next_offset < recovery_point:
            known = f"all below offset {recovery_point} was on the disk, and is not cut away"
            raise LogCorrupt(f"{self.directory.name}: {damage}; {known}")
        self.truncated_bytes = bad_bytes + sum(segment.length_in_bytes() for segment in behind)
        if bad_bytes:
            last.truncate_tail()
        for segment in reversed(behind):
            segment.delete()
        del self._segments[kept:]
        self._base_offsets = [segment.base_offset for segment in self._segments]

    def _note_found(self, batch: RecordBatch) -> None:
        self._note(batch, batch.max_timestamp)

    def _note(self, batch: RecordBatch, written_ms: int | None = None) -> None:
        """A batch that stands in the log, found there or come from a leader, since `written_ms`, or now."""
        self._producer_history.note_batch(batch.base_offset, batch.size_in_bytes, self.producers)
        self.leader_epochs.assign(batch.partition_leader_epoch, batch.base_offset)
        self.producers.update(batch, batch.base_offset, written_ms)

    def _create_segment(self, base_offset: int) -> Segment:
        """Raises OSError, with nothing created."""
        try:
            segment = Segment.create(self.directory, base_offset)
            try:
                self._names_change(base_offset)
            except OSError:
                segment.delete()
                raise
        except OSError as error:
            raise disk_error(error, self.directory) from error
        self._segments.append(segment)
        self._base_offsets.append(base_offset)
        return segment

    def _names_change(self, base_offset: int) -> None:
        """A segment begins at `base_offset`. Raises OSError."""
        with self._counting:
            if self._changed_names is None and self.options.flush != "never":
                self._changed_names = ChangedNames(self.directory)
            self._unnamed_from = min(self._unnamed_from, base_offset)

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
    def is_closed(self) -> bool:
        return self._closed

    @property
    def failure(self) -> Exception | None:
        """Why only opening it anew can make it usable; None while it is well."""
        return self._failure

    @property
    def is_dirty(self) -> bool:
        """Whether there is something that `flush` would bring to the disk."""
        return self._changed_names is not None or any(segment.is_dirty for segment in list(self._segments))

    @property
    def counted_end_offset(self) -> int:
        """The end of what this replica may say it has: of what is on the disk, where an answer waits for that."""
        return self.flushed_offset if self.options.flush == "always" else self.log_end_offset

    # Appending

    def append(self, records: Buffer, batch: RecordBatch) -> None:
        """Write one batch that already carries `log_end_offset` as its base offset, and its leader's epoch.

        Raises OSError, after which the log is as it was; the message says what disk does not take it. Raises LogFailed,
        and ValueError for an epoch that goes back. The caller updates `producers` once the append stands.
        """
        self._check()
        leader_epoch = leader_epoch_of(records)
        base_offset = self.log_end_offset
        self.leader_epochs.assign(leader_epoch, base_offset)
        self._producer_history.note_batch(base_offset, len(records), self.producers)
        self._last_append = base_offset
        self._write(records, [batch], base_offset)

    def append_replicated(self, records: Buffer) -> int:
        """Write batches as the leader has them, from `log_end_offset` on; the log end offset afterwards.

        A last batch that is cut short is left out, as a Fetch answer may end with one. Raises ReplicatedBatchInvalid,
        with nothing written; OSError, with whole batches written or none; LogFailed.
        """
        self._check()
        end_offset = self.log_end_offset
        # An epoch assigned at the end, by a leader that this replica was, has written nothing and binds nobody.
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
                self._note(batch)
            taken = upto
        return self.log_end_offset

    def _write(self, records: Buffer, batches: list[RecordBatch], base_offset: int) -> None:
        """Write batches into the last segment, or a new one where it is full."""
        segment = self._segments[-1]
        is_full = segment.size_in_bytes > 0 and segment.size_in_bytes + len(records) > self.options.segment_bytes
        try:
            if is_full:
                segment = self._create_segment(base_offset)
            segment.append(records, batches, base_offset)
        except LogFailed as error:
            self._failure = error
            raise
        except OSError as error:
            if is_full:
                self._undo_roll()
            raise disk_error(error, self.directory) from error

    def _undo_roll(self) -> None:
        """Remove the new segment, if there is one: it is empty."""
        if self._segments[-1].size_in_bytes == 0 and len(self._segments) > 1:
            self._drop_last()

    # Removing

    def truncate_to(self, offset: int) -> None:
        """Drop every batch that reaches to or above `offset`. Raises OSError, LogFailed.

        An epoch that was assigned at the end and wrote nothing goes as well. The log start offset stays.
        """
        self._check()
        if offset < self.log_end_offset:
            kept = max(bisect_left(self._base_offsets, offset), 1)
            while len(self._segments) > kept:
                self._drop_last()
            self._cut_off(offset)
            self._rebuild_producers()
        self.leader_epochs.truncate_from_end(self.log_end_offset)

    def undo_append(self) -> None:
        """Take back the last `append`. Raises LogFailed."""
        self._check()
        self._cut_off(self._last_append)

    def _cut_off(self, offset: int) -> None:
        try:
            self._segments[-1].truncate_to(offset)
            self._count_less(self.log_end_offset)
        except LogFailed as error:
            self._failure = error
            raise
        except OSError as error:
            raise self._failed(disk_error(error, self.directory)) from error

    def _count_less(self, offset: int) -> None:
        """The log was cut off: what is written there now is not on the disk, whatever a flush under way has seen."""
        with self._counting:
            self.flushed_offset = min(self.flushed_offset, offset)
            self._cut_at = min(self._cut_at, offset)

    def _rebuild_producers(self) -> None:
        """Make `producers` what they were at the log's end."""
        offset, self.producers = self._producer_history.restore(self.log_end_offset, self.log_start_offset)
        for segment in self._segments:
            if segment.next_offset > offset:
                for batch in segment.batches_from(offset):
                    self.producers.update(batch, batch.base_offset, batch.max_timestamp)

    def reset_to(self, offset: int) -> None:
        """Drop everything; the log is empty then and begins at `offset`. Raises LogFailed."""
        self._check()
        for segment in reversed(self._segments):
            self._delete(segment)
        try:
            fresh = self._create_segment(offset)
        except DiskError as error:
            raise self._failed(error) from error
        self._segments[:], self._base_offsets[:] = [fresh], [offset]
        self._count_less(0)
        self._producer_history.clear()
        self.producers = ProducerStates()
        self.leader_epochs.truncate_from_end(0)

    def remove_old_segments(self, now_ms: int, high_watermark: int) -> int:
        """Remove what retention lets go, in whole segments below the high watermark; how many.

        Raises OSError, LogFailed. Segments old enough are removed to the last: a new, empty one takes its place, and it
        goes in the next round, once that one is on the disk.
        """
        self._check()
        count = _removable_segments(self._segments, self.options, now_ms, high_watermark)
        if count == len(self._segments):
            self._create_segment(self.log_end_offset)
        return self._drop_first(count)

    def advance_log_start(self, offset: int) -> None:
        """The leader's log begins at `offset` now: drop whole segments below. Raises LogFailed."""
        self._check()
        self._drop_first(bisect_right(self._base_offsets, offset) - 1)

    def _drop_first(self, count: int) -> int:
        """Drop so many of the oldest segments, or as many as leave one whose name is on the disk; how many."""
        if self.options.flush != "never":
            count = max(0, min(count, bisect_left(self._base_offsets, self._unnamed_from) - 1))
        # One by one, the oldest first: whenever this ends, what is left has no gap.
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
        """Batches from the one that holds `offset` on, from one segment: the first whole, the last perhaps cut short.

        Only batches that end below `up_to`, where that is given. `offset` must lie in the log; at its end the answer is
        empty. Raises OSError, LogFailed.
        """
        self._check()
        position = max(bisect_right(self._base_offsets, offset) - 1, 0)
        for segment in self._segments[position:]:
            found = segment.read(offset, max_bytes, up_to)
            if found:
                return found
        return b""

    def find_timestamp(self, timestamp: int) -> TimestampAndOffset | None:
        """The first batch that holds a record at or after `timestamp` (ms): its first timestamp and offset."""
        self._check()
        for segment in self._segments:
            found = segment.find_timestamp(timestamp)
            if found is not None:
                return found
        return None

    def max_timestamp(self) -> TimestampAndOffset:
        """The largest timestamp (ms) and the last offset of the first batch that has it; (-1, -1) in an empty log."""
        largest = TimestampAndOffset(NO_TIMESTAMP, -1)
        for segment in self._segments:
            if segment.max_timestamp.timestamp > largest.timestamp:
                largest = segment.max_timestamp
        return largest

    # Keeping

    def flush(self) -> None:
        """Bring what was appended to the disk: all that stands in the log now. Blocks, not on the thread that appends.

        Raises LogFailed: after an error nobody knows what is there.
        """
        with self._flushing:
            self._check()
            with self._counting:
                self._cut_at, end_offset = _NOWHERE, self.log_end_offset
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
            # Of a log that was closed meanwhile, not all was flushed.
            self._check()
            with self._counting:
                self.flushed_offset = max(self.flushed_offset, min(end_offset, self._cut_at))
                if self._changed_names is None:
                    self._unnamed_from = _NOWHERE

    def checkpoint(self, high_watermark: int, leadership: Leadership) -> None:
        """Remember both beside the log; the leadership never goes back. Blocks. Raises OSError, LogFailed.

        What lies below the high watermark is brought to the disk first, unless `flush` is never: then no more of it is
        remembered than is there. From there on, damage is taken for a power cut's.
        """
        with self._checkpointing:
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
            except OSError as error:
                # Closed meanwhile: its directory may have been removed, which is no disk's error.
                self._check()
                raise disk_error(error, self.directory) from error
            self.high_watermark_checkpoint, self.leadership = high_watermark, obeyed

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """The directory's name is ours: a closed log may have been moved away, and another be at its place."""
        with self._closing:
            self._check()
            yield

    def close(self) -> None:
        """Let go of the files; the offsets can still be asked for. May be called twice."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._failure = self._failure or LogFailed("the log is closed")
                for segment in self._segments:
                    segment.close()
                with self._counting:
                    names, self._changed_names = self._changed_names, None
                if names is not None:
                    names.close()

    def _failed(self, error: DiskError) -> LogFailed:
        """The log has failed for good."""
        self._failure = error
        return LogFailed(f"{self.directory.name}: {error}")

    def _check(self) -> None:
        if self._failure is not None:
            raise LogFailed(f"{self.directory.name}: {self._failure}") from self._failure


_FILE = "checkpoint.json"
_VERSION = 1


class Checkpoint(NamedTuple):
    """Zeros in a log that has none."""

    high_watermark: int = 0
    obeyed_epoch: int = NO_LEADER_EPOCH
    fencing_token: int = 0
    log_end_offset: int = 0
    leader_epoch: int = NO_LEADER_EPOCH


def _read_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint in `directory`. Raises OSError, LogFailed for one that cannot be what was written."""
    found = read_json(directory / _FILE)
    if found is None:
        return Checkpoint()
    version = found.get("version", 0)
    if not isinstance(version, int) or version > _VERSION:
        raise LogFailed(f"{directory / _FILE} is of version {version}, which a later release wrote: use that one")
    numbers = [found.get(name) for name in Checkpoint._fields]
    if not all(isinstance(number, int) for number in numbers):
        raise LogFailed(f"{directory / _FILE} is damaged: it says {found}")
    return Checkpoint._make(numbers)


def write_checkpoint(directory: Path, checkpoint: Checkpoint, replacing: AbstractContextManager[object]) -> None:
    """As `write_json`. Raises OSError."""
    write_json(directory / _FILE, {"version": _VERSION, **checkpoint._asdict()}, replacing)


def _removable_segments(segments: Sequence[Segment], options: LogOptions, now_ms: int, high_watermark: int) -> int:
    """How many of the oldest segments may go. Nothing at or above the high watermark may.

    By size: as long as what is left is no less than `retention_bytes`, and never the last segment. By time: where the
    largest timestamp is older than `retention_ms`. `now_ms` is milliseconds since the epoch, as the timestamps are.
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

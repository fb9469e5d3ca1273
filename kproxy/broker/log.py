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
3. Opening reads every batch: what a killed process or a lost write left torn at the end of the last segment is cut off.
   The same anywhere else is damage that nobody may paper over, since offsets behind it were given out: LogCorrupt. That
   a power cut does not look like it, a segment is on the disk before the next one begins, unless `flush` is never.
4. The process that opened the log is the only one that writes to it (the data directory is locked).
5. `producers` and `leader_epochs` are what the batches in the log say, and the epoch a leader has assigned at its end.
6. One thread works on a log; `flush` and `checkpoint` may run in another beside it, and `close` waits for neither.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from codec.primitives import Buffer
from codec.record_batch import NO_TIMESTAMP, RecordBatch, leader_epoch_of
from kproxy.broker.checkpoint import NO_LEADERSHIP, Checkpoint, Leadership, read_checkpoint, write_checkpoint
from kproxy.broker.disk import DiskError, disk_error, sync_directory
from kproxy.broker.leader_epochs import LeaderEpochs
from kproxy.broker.log_options import LogOptions
from kproxy.broker.producer_history import ProducerHistory
from kproxy.broker.producer_state import ProducerStates
from kproxy.broker.retention import removable
from kproxy.broker.segment import SUFFIX, LogFailed, Segment, TimestampAndOffset
from kproxy.broker.validation import check_replicated


class LogCorrupt(LogFailed):
    """A bad batch stands before good ones."""


class Log:
    """One partition's batches on disk. Everything here blocks; `open` for as long as the log is large."""

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
        # Held while a checkpoint is put into its place, and while the log is closed.
        self._closing = threading.Lock()
        # Held while a checkpoint is written.
        self._checkpointing = threading.Lock()

    @classmethod
    def open(cls, directory: Path, *, options: LogOptions | None = None) -> Log:
        """The log in `directory`, created where there is none. Raises LogFailed (LogCorrupt), OSError.

        Of the result, `truncated_bytes` tells how much of a torn tail was cut off; `high_watermark_checkpoint` and
        `leadership` are the last ones written, 0 and NO_LEADERSHIP where there are none.
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
        except BaseException:
            log.close()
            raise
        return log

    def _recover(self) -> None:
        checkpoint = read_checkpoint(self.directory)
        self.high_watermark_checkpoint = checkpoint.high_watermark
        self.leadership = Leadership(checkpoint.obeyed_epoch, checkpoint.fencing_token)
        for following, segment in enumerate(self._segments, start=1):
            self._base_offsets.append(segment.base_offset)
            try:
                bad_bytes = segment.recover(lambda batch: self._note(batch, batch.max_timestamp))
            except ValueError as error:
                raise LogCorrupt(f"{self.directory.name}: {error}, in {segment.path.name}") from error
            if following == len(self._segments):
                if bad_bytes:
                    segment.truncate_tail()
                    self.truncated_bytes = bad_bytes
            elif bad_bytes:
                where = f"{segment.path.name} at byte {segment.size_in_bytes}"
                raise LogCorrupt(f"{self.directory.name}: a bad batch in {where}, with later segments behind it")
            elif self._segments[following].base_offset != segment.next_offset:
                where = f"{segment.path.name} ends at offset {segment.next_offset}"
                raise LogCorrupt(f"{self.directory.name}: {where}, {self._segments[following].path.name} comes next")
        is_empty = bool(self._segments) and self.log_start_offset == self.log_end_offset
        if is_empty and checkpoint.log_end_offset == self.log_end_offset and checkpoint.leader_epoch >= 0:
            self.leader_epochs.assign(checkpoint.leader_epoch, self.log_start_offset)

    def _note(self, batch: RecordBatch, written_ms: int | None = None) -> None:
        """A batch that stands in the log, found there or come from a leader, since `written_ms`, or now."""
        self._producer_history.passes(batch.base_offset, batch.size_in_bytes, self.producers)
        self.leader_epochs.assign(batch.partition_leader_epoch, batch.base_offset)
        self.producers.update(batch, batch.base_offset, written_ms)

    def _create_segment(self, base_offset: int) -> Segment:
        try:
            segment = Segment.create(self.directory, base_offset)
            self._segments.append(segment)
            self._base_offsets.append(base_offset)
            if self.options.flush != "never":
                sync_directory(self.directory)
        except OSError as error:
            raise disk_error(error, self.directory) from error
        return segment

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
        return any(segment.is_dirty for segment in list(self._segments))

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
        self._producer_history.passes(base_offset, len(records), self.producers)
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
                segment = self._roll()
            segment.append(records, batches, base_offset)
        except LogFailed as error:
            self._failure = error
            raise
        except OSError as error:
            if is_full:
                self._undo_roll()
            raise disk_error(error, self.directory) from error
        if self.options.flush == "always":
            self._flush([segment])

    def _roll(self) -> Segment:
        """Begin a new segment, once the last one is on the disk. Raises OSError, LogFailed."""
        if self.options.flush != "never":
            self._flush(self._segments)
        return self._create_segment(self.log_end_offset)

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
        except LogFailed as error:
            self._failure = error
            raise
        except OSError as error:
            raise self._failed(disk_error(error, self.directory)) from error

    def _rebuild_producers(self) -> None:
        """Make `producers` what they were at the log's end."""
        offset, self.producers = self._producer_history.go_back(self.log_end_offset, self.log_start_offset)
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
            fresh = Segment.create(self.directory, offset)
        except OSError as error:
            raise self._failed(disk_error(error, self.directory)) from error
        self._segments[:], self._base_offsets[:] = [fresh], [offset]
        self._producer_history.clear()
        self.producers = ProducerStates()
        self.leader_epochs.truncate_from_end(0)

    def remove_old_segments(self, now_ms: int, high_watermark: int) -> int:
        """Remove what retention lets go, in whole segments below the high watermark; how many.

        Raises OSError, LogFailed. Segments old enough are removed to the last: a new, empty one takes its place then.
        """
        self._check()
        count = removable(self._segments, self.options, now_ms, high_watermark)
        if count == len(self._segments):
            self._roll()
        self._drop_first(count)
        return count

    def advance_log_start(self, offset: int) -> None:
        """The leader's log begins at `offset` now: drop whole segments below. Raises LogFailed."""
        self._check()
        self._drop_first(bisect_right(self._base_offsets, offset) - 1)

    def _drop_first(self, count: int) -> None:
        # One by one, the oldest first: whenever this ends, what is left has no gap.
        for _ in range(count):
            del self._base_offsets[0]
            self._delete(self._segments.pop(0))
        if count > 0:
            self.leader_epochs.truncate_from_start(self.log_start_offset)

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
        """Bring what was appended to the disk. Raises LogFailed: after an error nobody knows what is there."""
        self._check()
        self._flush(list(self._segments))

    def _flush(self, segments: list[Segment]) -> None:
        try:
            for segment in segments:
                segment.flush()
        except OSError as error:
            raise self._failed(disk_error(error, self.directory)) from error

    def checkpoint(self, high_watermark: int, leadership: Leadership) -> None:
        """Remember both beside the log; the leadership never goes back. Raises OSError, LogFailed."""
        with self._checkpointing:
            self._check()
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

    def _failed(self, error: DiskError) -> LogFailed:
        """The log has failed for good."""
        self._failure = error
        return LogFailed(f"{self.directory.name}: {error}")

    def _check(self) -> None:
        if self._failure is not None:
            raise LogFailed(f"{self.directory.name}: {self._failure}") from self._failure

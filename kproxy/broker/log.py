"""A partition's log: segments of record batches as received, with offsets from `log_start_offset` to `log_end_offset`.

States
  open      appended to and read by one thread
  failed    a write failed and could not be undone; every later call raises LogFailed
  closed    nothing more

Invariants
1. log_start_offset <= every offset in the log < log_end_offset; the next batch gets log_end_offset.
2. Bytes are appended only behind the last whole batch, and nothing that was appended is ever changed.
3. Opening reads every batch: what a killed process or a lost write left torn at the end of the last segment is cut off.
   The same anywhere else is damage that nobody may paper over, since offsets behind it were given out: LogCorrupt.
4. The process that opened the log is the only one that writes to it (the data directory is locked).
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from codec.record_batch import NO_TIMESTAMP, RecordBatch
from kproxy.broker.producer_state import ProducerStates
from kproxy.broker.segment import SUFFIX, LogFailed, Segment, TimestampAndOffset

DEFAULT_SEGMENT_BYTES = 1 << 30
NO_LEADER_EPOCH = -1


class LogCorrupt(LogFailed):
    """A bad batch stands before good ones."""


class Log:
    """One partition's batches on disk. Everything here blocks; `open` for as long as the log is large."""

    def __init__(self, directory: Path, segments: list[Segment], producers: ProducerStates, segment_bytes: int) -> None:
        self.directory = directory
        self.producers = producers
        self.truncated_bytes = 0
        self.last_leader_epoch = NO_LEADER_EPOCH
        self._segments = segments
        self._segment_bytes = segment_bytes
        self._base_offsets = [segment.base_offset for segment in segments]
        self._failure: Exception | None = None
        self._closed = False

    @classmethod
    def open(cls, directory: Path, *, segment_bytes: int = DEFAULT_SEGMENT_BYTES) -> Log:
        """The log in `directory`, created where there is none. Raises LogCorrupt, OSError.

        Of the result, `truncated_bytes` tells how much of a torn tail was cut off, `last_leader_epoch` the epoch of
        the last batch found.
        """
        directory.mkdir(parents=True, exist_ok=True)
        producers = ProducerStates()
        last_leader_epoch = NO_LEADER_EPOCH

        def on_batch(batch: RecordBatch) -> None:
            nonlocal last_leader_epoch
            last_leader_epoch = batch.partition_leader_epoch
            producers.update(batch, batch.base_offset)

        segments = [Segment.open(path) for path in sorted(directory.glob(f"*{SUFFIX}"))]
        truncated = 0
        try:
            for segment in segments:
                bad_bytes = segment.recover(on_batch)
                if bad_bytes and segment is not segments[-1]:
                    where = f"{segment.path.name} at byte {segment.size_in_bytes}"
                    raise LogCorrupt(f"{directory.name}: a bad batch in {where}, with later segments behind it")
                if bad_bytes:
                    segment.truncate_tail()
                    truncated = bad_bytes
        except BaseException:
            for segment in segments:
                segment.close()
            raise
        if not segments:
            segments.append(Segment.create(directory, 0))
        log = cls(directory, segments, producers, segment_bytes)
        log.truncated_bytes = truncated
        log.last_leader_epoch = last_leader_epoch
        return log

    @property
    def log_start_offset(self) -> int:
        return self._base_offsets[0]

    @property
    def log_end_offset(self) -> int:
        return self._segments[-1].next_offset

    @property
    def size_in_bytes(self) -> int:
        return sum(segment.size_in_bytes for segment in self._segments)

    def append(self, records: memoryview, batch: RecordBatch) -> None:
        """Write one batch that already carries `log_end_offset` as its base offset. Raises OSError, LogFailed.

        After an OSError the log is as it was. The caller updates `producers` once the append stands.
        """
        self._check()
        segment = self._segments[-1]
        if segment.size_in_bytes and segment.size_in_bytes + len(records) > self._segment_bytes:
            segment = self._roll()
        try:
            segment.append(records, batch, segment.next_offset)
        except LogFailed as error:
            self._failure = error
            raise

    def undo_append(self) -> None:
        """Take back the last append, once. Raises LogFailed."""
        try:
            self._segments[-1].undo_append()
        except LogFailed as error:
            self._failure = error
            raise

    def _roll(self) -> Segment:
        segment = Segment.create(self.directory, self.log_end_offset)
        self._segments.append(segment)
        self._base_offsets.append(segment.base_offset)
        return segment

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Batches from the one that holds `offset` on, from one segment: the first whole, the last perhaps cut short.

        `offset` must lie in the log; at its end the answer is empty. Raises OSError, LogFailed.
        """
        self._check()
        position = max(bisect_right(self._base_offsets, offset) - 1, 0)
        for segment in self._segments[position:]:
            found = segment.read(offset, max_bytes)
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

    def flush(self) -> None:
        """Bring what was appended to the disk. Raises OSError, LogFailed."""
        self._check()
        for segment in self._segments:
            segment.flush()

    def close(self) -> None:
        """Let go of the files; the offsets can still be asked for. May be called twice."""
        if not self._closed:
            self._closed = True
            self._failure = self._failure or LogFailed("the log is closed")
            for segment in self._segments:
                segment.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise LogFailed(f"{self.directory.name}: {self._failure}") from self._failure

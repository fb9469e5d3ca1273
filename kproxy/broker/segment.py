"""One segment file of a log: record batches one behind the other, named after the first offset it may hold.

States
  open      batches are appended, read, cut off at the end
  closed    the file descriptor is gone

Invariants
1. `size_in_bytes` is the file's length up to the last whole batch; bytes behind it are never read. A write that did not
   go through whole is cut off again before anything else happens.
2. Offsets rise from batch to batch; `next_offset` is behind the last one, or the base offset of an empty segment.
3. The index holds a batch about every INDEX_INTERVAL_BYTES: its base offset, its position, and the largest timestamp of
   all batches before it. It lives in memory and is rebuilt by the scan that opening is.
"""

from __future__ import annotations

import mmap
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from codec.errors import CodecError
from codec.record_batch import HEADER_BYTES, NO_TIMESTAMP, RecordBatch, crc_is_valid, parse_batch, parse_header

INDEX_INTERVAL_BYTES = 4096
SUFFIX = ".log"
# Windows translates line ends unless told otherwise; elsewhere there is no such flag.
_OPEN_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class LogFailed(Exception):
    """The log can no longer be trusted to be what its offsets say; `__cause__` is the file system's error, if any."""


class TimestampAndOffset(NamedTuple):
    """Milliseconds since the epoch, and an offset that goes with them."""

    timestamp: int
    offset: int


class Segment:
    """One file of batches. All methods block for as long as the page cache makes them."""

    def __init__(self, path: Path, base_offset: int, fd: int) -> None:
        self.path = path
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.size_in_bytes = 0
        self.max_timestamp = TimestampAndOffset(NO_TIMESTAMP, -1)
        self._fd = fd
        self._offsets = array("q")
        self._positions = array("q")
        self._timestamps_before = array("q")
        self._before_append = (0, base_offset, self.max_timestamp)
        self._dirty = False

    @classmethod
    def create(cls, directory: Path, base_offset: int) -> Segment:
        """An empty segment; OSError as the file system has it."""
        path = directory / f"{base_offset:020d}{SUFFIX}"
        return cls(path, base_offset, os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o644))

    @classmethod
    def open(cls, path: Path) -> Segment:
        """The segment of an existing file, not scanned yet: call `recover`."""
        return cls(path, int(path.name.removesuffix(SUFFIX)), os.open(path, _OPEN_FLAGS))

    def recover(self, on_batch: Callable[[RecordBatch], None]) -> int:
        """Read every batch, CRC included, up to the first bad one; the number of bytes from there to the file's end.

        `on_batch` is called for each good batch. Nothing is cut off: see `truncate_tail`.
        """
        length = os.fstat(self._fd).st_size
        if length == 0:
            return 0
        with mmap.mmap(self._fd, length, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            while self.size_in_bytes < length:
                try:
                    batch = parse_batch(view, self.size_in_bytes)
                except CodecError:
                    break
                if batch.base_offset < self.next_offset or not crc_is_valid(view, batch):
                    break
                self._note(batch, batch.base_offset, batch.last_offset, batch.size_in_bytes)
                on_batch(batch)
        return length - self.size_in_bytes

    def truncate_tail(self) -> None:
        """Cut the file off behind the last whole batch."""
        os.ftruncate(self._fd, self.size_in_bytes)

    def append(self, records: memoryview, batch: RecordBatch, base_offset: int) -> None:
        """Write one batch that carries `base_offset` already.

        OSError leaves the segment as it was; LogFailed means that not even that could be had.
        """
        self._before_append = (self.size_in_bytes, self.next_offset, self.max_timestamp)
        self._dirty = True
        written = 0
        try:
            while written < len(records):
                written += os.write(self._fd, records[written:] if written else records)
        except OSError:
            self._cut_off()
            raise
        self._note(batch, base_offset, base_offset + batch.last_offset_delta, len(records))

    def undo_append(self) -> None:
        """Take back the last append, once. Raises LogFailed."""
        self.size_in_bytes, self.next_offset, self.max_timestamp = self._before_append
        while self._positions and self._positions[-1] >= self.size_in_bytes:
            self._offsets.pop()
            self._positions.pop()
            self._timestamps_before.pop()
        self._cut_off()

    def _cut_off(self) -> None:
        try:
            self.truncate_tail()
        except OSError as error:
            raise LogFailed(f"{self.path}: a write could not be undone: {error}") from error

    def _note(self, batch: RecordBatch, base_offset: int, last_offset: int, size: int) -> None:
        positions = self._positions
        if not positions or self.size_in_bytes - positions[-1] >= INDEX_INTERVAL_BYTES:
            self._offsets.append(base_offset)
            positions.append(self.size_in_bytes)
            self._timestamps_before.append(self.max_timestamp.timestamp)
        self.size_in_bytes += size
        self.next_offset = last_offset + 1
        if batch.max_timestamp > self.max_timestamp.timestamp:
            self.max_timestamp = TimestampAndOffset(batch.max_timestamp, last_offset)

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Bytes from the batch that holds `offset`, or the next one, on: that batch whole, up to `max_bytes` in all.

        The last batch may be cut short, as Kafka's broker sends it. Empty where no such batch is here.
        """
        for batch in self._walk(self._indexed_position(offset)):
            if batch.last_offset >= offset:
                return self._pread(max(batch.size_in_bytes, max_bytes), batch.position)
        return b""

    def find_timestamp(self, timestamp: int) -> TimestampAndOffset | None:
        """The first batch with a record at or after `timestamp`: its own first timestamp and offset."""
        if self.max_timestamp.timestamp < timestamp:
            return None
        # The last entry before which nothing reaches `timestamp`; what is looked for lies behind it.
        entry = max(bisect_left(self._timestamps_before, timestamp) - 1, 0)
        for batch in self._walk(self._positions[entry]):
            if batch.max_timestamp >= timestamp:
                return TimestampAndOffset(batch.base_timestamp, batch.base_offset)
        return None

    def _indexed_position(self, offset: int) -> int:
        entry = bisect_right(self._offsets, offset) - 1
        return self._positions[entry] if entry >= 0 else 0

    def _walk(self, position: int) -> Iterator[RecordBatch]:
        """The headers from `position` on, a window at a time; their positions count in the file."""
        window, window_start = b"", position
        while position < self.size_in_bytes:
            if position + HEADER_BYTES > window_start + len(window):
                window, window_start = self._pread(INDEX_INTERVAL_BYTES + HEADER_BYTES, position), position
            batch = parse_header(window, position - window_start)._replace(position=position)
            yield batch
            position = batch.end

    def _pread(self, length: int, position: int) -> bytes:
        length = min(length, self.size_in_bytes - position)
        if hasattr(os, "pread"):
            return os.pread(self._fd, length, position)
        os.lseek(self._fd, position, os.SEEK_SET)  # Windows has no pread; one thread uses the descriptor
        return os.read(self._fd, length)

    def flush(self) -> None:
        """Bring what was appended to the disk. Raises OSError."""
        if self._dirty:
            os.fsync(self._fd)
            self._dirty = False

    def close(self) -> None:
        os.close(self._fd)

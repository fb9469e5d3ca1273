"""One segment file of a log: record batches one behind the other, named after the first offset it may hold.

States
  open      batches are appended, read, cut off at the end
  closed    the file descriptor is gone

Invariants
1. `size_in_bytes` is the file's length up to the last whole batch; bytes behind it are never read. A write that did not
   go through whole is cut off again before anything else happens.
2. Each batch begins at the offset behind the one before it, and its leader epoch is not lower. `next_offset` is behind
   the last batch, or the base offset of an empty segment.
3. The index holds a batch about every INDEX_INTERVAL_BYTES: its base offset, its position, and the largest timestamp of
   all batches before it. It lives in memory and is rebuilt by the scan that opening is.
4. One thread works on a segment; `flush` alone may run in another one beside it.
"""

from __future__ import annotations

import mmap
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from codec.errors import CodecError
from codec.primitives import Buffer
from codec.record_batch import HEADER_BYTES, NO_TIMESTAMP, RecordBatch, crc_is_valid, parse_batch, parse_header

INDEX_INTERVAL_BYTES = 4096
SUFFIX = ".log"
_sync_data = getattr(os, "fdatasync", os.fsync)
# Windows translates line ends unless told otherwise; elsewhere there is no such flag.
_OPEN_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class LogFailed(Exception):
    """The log can no longer be trusted to be what its offsets say; `__cause__` is the file system's error, if any."""


class TimestampAndOffset(NamedTuple):
    """Milliseconds since the epoch, and an offset that goes with them."""

    timestamp: int
    offset: int


class Segment:
    """One file of batches. Everything blocks for as long as the page cache makes it, `flush` as long as the disk."""

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
        self._last_leader_epoch = -1
        self._before_append = (0, base_offset, self.max_timestamp, -1)
        self._dirty = False
        # Held while the descriptor is let go of or doubled for another thread.
        self._closing = threading.Lock()

    @classmethod
    def create(cls, directory: Path, base_offset: int) -> Segment:
        """An empty segment; OSError as the file system has it."""
        path = directory / f"{base_offset:020d}{SUFFIX}"
        return cls(path, base_offset, os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o644))

    @classmethod
    def open(cls, path: Path) -> Segment:
        """The segment of an existing file, not scanned yet: call `recover`. Raises OSError, LogFailed."""
        base_offset = path.name.removesuffix(SUFFIX)
        if not base_offset.isdecimal():
            raise LogFailed(f"{path} is not a segment: move it elsewhere")
        return cls(path, int(base_offset), os.open(path, _OPEN_FLAGS))

    @property
    def is_dirty(self) -> bool:
        """Whether there are bytes that `flush` has not brought to the disk."""
        return self._dirty

    def recover(self, on_batch: Callable[[RecordBatch], None]) -> int:
        """Read every batch, CRC included, up to the first bad one; the number of bytes from there to the file's end.

        `on_batch` is called for each good batch. Nothing is cut off: see `truncate_tail`.
        """
        length = os.fstat(self._fd).st_size
        # Nobody knows what of it the last process brought to the disk.
        self._dirty = length > 0
        self._scan(length, on_batch, check_crc=True)
        return length - self.size_in_bytes

    def _scan(self, length: int, on_batch: Callable[[RecordBatch], None], *, check_crc: bool) -> None:
        """Build the index anew from the first `length` bytes, up to the first bad batch."""
        self.next_offset, self.size_in_bytes = self.base_offset, 0
        self.max_timestamp, self._last_leader_epoch = TimestampAndOffset(NO_TIMESTAMP, -1), -1
        for column in (self._offsets, self._positions, self._timestamps_before):
            del column[:]
        if length == 0:
            return
        with mmap.mmap(self._fd, length, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            while self.size_in_bytes < length:
                try:
                    batch = parse_batch(view, self.size_in_bytes)
                except CodecError:
                    break
                # The CRC covers neither the offset nor the epoch: that they go on where they stopped has to do.
                if (
                    batch.base_offset != self.next_offset
                    or batch.last_offset_delta < 0
                    or batch.partition_leader_epoch < self._last_leader_epoch
                    or (check_crc and not crc_is_valid(view, batch))
                ):
                    break
                self._note(batch, batch.base_offset, batch.partition_leader_epoch)
                on_batch(batch)

    def truncate_tail(self) -> None:
        """Cut the file off behind the last whole batch."""
        os.ftruncate(self._fd, self.size_in_bytes)

    def append(self, records: Buffer, batches: Sequence[RecordBatch], base_offset: int, leader_epoch: int) -> None:
        """Write whole batches: the first carries `base_offset` and `leader_epoch` already, the others what they say.

        OSError leaves the segment as it was; LogFailed means that not even that could be had.
        """
        self._before_append = (self.size_in_bytes, self.next_offset, self.max_timestamp, self._last_leader_epoch)
        written = 0
        try:
            while written < len(records):
                written += os.write(self._fd, memoryview(records)[written:] if written else records)
        except OSError:
            self._cut_off()
            raise
        # Not before the write: a flush that ends in between must not be taken for one that had it.
        self._dirty = True
        self._note(batches[0], base_offset, leader_epoch)
        for batch in batches[1:]:
            self._note(batch, batch.base_offset, batch.partition_leader_epoch)

    def undo_append(self) -> None:
        """Take back the last append, once. Raises LogFailed."""
        self.size_in_bytes, self.next_offset, self.max_timestamp, self._last_leader_epoch = self._before_append
        while self._positions and self._positions[-1] >= self.size_in_bytes:
            self._offsets.pop()
            self._positions.pop()
            self._timestamps_before.pop()
        self._cut_off()

    def truncate_to(self, offset: int, on_batch: Callable[[RecordBatch], None]) -> None:
        """Drop every batch that reaches to or above `offset`; `on_batch` is called for each one that is left.

        Raises LogFailed.
        """
        self.size_in_bytes = self._position_of(offset)
        self._cut_off()
        self._scan(self.size_in_bytes, on_batch, check_crc=False)

    def walk(self, on_batch: Callable[[RecordBatch], None]) -> None:
        """Call `on_batch` for each batch. Raises OSError."""
        for batch in self._walk(0):
            on_batch(batch)

    def _cut_off(self) -> None:
        self._dirty = True
        try:
            self.truncate_tail()
        except OSError as error:
            raise LogFailed(f"{self.path}: a write could not be undone: {error}") from error

    def _note(self, batch: RecordBatch, base_offset: int, leader_epoch: int) -> None:
        positions = self._positions
        if not positions or self.size_in_bytes - positions[-1] >= INDEX_INTERVAL_BYTES:
            self._offsets.append(base_offset)
            positions.append(self.size_in_bytes)
            self._timestamps_before.append(self.max_timestamp.timestamp)
        self.size_in_bytes += batch.size_in_bytes
        last_offset = base_offset + batch.last_offset_delta
        self.next_offset = last_offset + 1
        self._last_leader_epoch = leader_epoch
        if batch.max_timestamp > self.max_timestamp.timestamp:
            self.max_timestamp = TimestampAndOffset(batch.max_timestamp, last_offset)

    def read(self, offset: int, max_bytes: int, up_to: int | None = None) -> bytes:
        """Bytes from the batch that holds `offset`, or the next one, on: that batch whole, up to `max_bytes` in all.

        Only batches that end below `up_to`. The last batch may be cut short, as Kafka's broker sends it. Empty where no
        such batch is here.
        """
        for batch in self._walk(self._indexed_position(offset)):
            if batch.last_offset >= offset:
                length = max(batch.size_in_bytes, max_bytes)
                if up_to is not None and up_to < self.next_offset:
                    length = min(length, self._position_of(up_to) - batch.position)
                return self._pread(length, batch.position) if length > 0 else b""
        return b""

    def _position_of(self, offset: int) -> int:
        """Where the first batch that reaches to or above `offset` begins; the segment's end where none does."""
        for batch in self._walk(self._indexed_position(offset)):
            if batch.last_offset >= offset:
                return batch.position
        return self.size_in_bytes

    def newest_timestamp(self) -> int:
        """The largest timestamp (ms); when the file was last written to where no batch has one. Raises OSError."""
        if self.max_timestamp.timestamp != NO_TIMESTAMP:
            return self.max_timestamp.timestamp
        return os.fstat(self._fd).st_mtime_ns // 1_000_000

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
        """Bring what was appended to the disk; another thread may append or close meanwhile. Raises OSError.

        After an error nobody knows what is on the disk: the kernel may take the bytes for written and say no more.
        """
        with self._closing:
            if not self._dirty or self._fd < 0:
                return
            fd = os.dup(self._fd)
            self._dirty = False
        try:
            _sync_data(fd)
        finally:
            os.close(fd)

    def delete(self) -> None:
        """Let go of the file and remove it. Raises OSError."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file. May be called twice."""
        with self._closing:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

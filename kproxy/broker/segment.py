"""Read and write one segment file of a log, which holds consecutive record batches.

The file is named after the first offset that it may hold.

States
  open      batches can be appended, read, and cut off at the end
  closed    the file descriptor is closed

Invariants
1. `size_in_bytes` is the file's length up to the last whole batch; bytes behind it are never read. A partial write is
   cut off before anything else happens.
2. Each batch begins at the offset after the previous one, and its leader epoch is not lower. `next_offset` follows the
   last batch; in an empty segment it is the base offset.
3. The index holds a batch about every INDEX_INTERVAL_BYTES: its base offset, its position, and the largest timestamp of
   all batches before it. At opening it comes from a SegmentIndex (`adopt`) or from reading. The newest batch's place is
   kept too: most reads need it.
4. One thread works on a segment; only `flush` and `index_below` may run beside it, each in one other thread at a time.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kproxy.broker.disk import FLUSHES, DiskError
from kproxy.broker.snapshot import INDEX_SUFFIX, SegmentIndex
from kproxy_codec.errors import CodecError
from kproxy_codec.primitives import Buffer
from kproxy_codec.record_batch import HEADER_BYTES, NO_TIMESTAMP, RecordBatch, parse_header
from kproxy_codec.record_crc import crc_is_valid

INDEX_INTERVAL_BYTES = 4096
RECOVERY_WINDOW_BYTES = 1 << 20
SUFFIX = ".log"
_sync_data = getattr(os, "fdatasync", os.fsync)
_OPEN_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC


class LogFailed(Exception):
    """The log is closed, damaged or may no longer match its offsets; `__cause__` is the file system's error, if any."""


class TimestampAndOffset(NamedTuple):
    """A timestamp in milliseconds since the epoch, and its offset."""

    timestamp: int
    offset: int


class _Place(NamedTuple):
    """The position in the file where a batch begins."""

    base_offset: int
    position: int


class Segment:
    """One file of batches. Every method may block on the page cache; `flush` waits for the disk."""

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
        self._newest = _Place(base_offset, 0)
        # Whether `flush` has bytes to write to the disk.
        self.is_dirty = False
        # Whether the segment's index is in a file.
        self.is_indexed = False
        # Held while the descriptor is closed or a flush takes it.
        self._close_lock = threading.Lock()
        # The flush that uses a released descriptor closes it.
        self._is_flushing = False

    @classmethod
    def create(cls, directory: Path, base_offset: int) -> Segment:
        """Create an empty segment. Raises OSError."""
        path = directory / f"{base_offset:020d}{SUFFIX}"
        return cls(path, base_offset, os.open(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o644))

    @classmethod
    def open(cls, path: Path) -> Segment:
        """Open an existing file without scanning it; call `recover` next. Raises OSError, LogFailed."""
        base_offset = path.name.removesuffix(SUFFIX)
        if not base_offset.isdecimal():
            raise LogFailed(f"{path} is not a segment: move it elsewhere")
        return cls(path, int(base_offset), os.open(path, _OPEN_FLAGS))

    def length_in_bytes(self) -> int:
        """Return the length of the file, partial batches included. Raises OSError."""
        return os.fstat(self._fd).st_size

    def adopt(self, index: SegmentIndex) -> bool:
        """Adopt an index before `recover`; False if it describes another file. Raises OSError."""
        stat = os.fstat(self._fd)
        grown = stat.st_size - index.size_in_bytes
        if index.base_offset != self.base_offset or grown < 0 or (not grown and stat.st_mtime_ns != index.modified_ns):
            return False
        if grown and not self._has_newest_of(index):
            return False
        self.size_in_bytes, self.next_offset = index.size_in_bytes, index.next_offset
        self.max_timestamp = TimestampAndOffset(index.max_timestamp, index.max_timestamp_offset)
        self._newest = _Place(index.newest_offset, index.newest_position)
        for into, found in zip((self._offsets, self._positions, self._timestamps_before), index[8:], strict=True):
            into.frombytes(found)
        return True

    def _has_newest_of(self, index: SegmentIndex) -> bool:
        length = index.size_in_bytes - index.newest_position
        if length == 0:
            return True
        found = self._pread(length, index.newest_position, length)
        try:
            batch = parse_header(found)
        except CodecError:
            return False
        is_last = (batch.base_offset, batch.last_offset + 1) == (index.newest_offset, index.next_offset)
        return is_last and batch.end == length and crc_is_valid(found, batch)

    def index_below(self, offset: int) -> SegmentIndex:
        """Return the index of the batches below `offset`, where a batch must end. Raises OSError, LogFailed.

        May run in another thread than appends; meanwhile the caller cuts nothing off below `offset`.
        """
        with self._close_lock:
            if self._fd < 0:
                raise LogFailed(f"{self.path} is closed")
            part = Segment(self.path, self.base_offset, os.dup(self._fd))
        try:
            entries = bisect_left(self._offsets, offset)
            part._offsets, part._positions = self._offsets[:entries], self._positions[:entries]
            part._timestamps_before = self._timestamps_before[:entries]
            end = self.size_in_bytes
            for batch in part._walk(part._positions[-1], end) if entries else ():
                if batch.base_offset >= offset:
                    break
                part._newest = _Place(batch.base_offset, batch.position)
                part.size_in_bytes, part.next_offset = batch.end, batch.last_offset + 1
            if part.next_offset != offset:
                raise LogFailed(f"{self.path} has no batch that ends at offset {offset}")
            part.max_timestamp = part._find_max_timestamp()
            return SegmentIndex(
                part.base_offset,
                part.next_offset,
                part.size_in_bytes,
                os.fstat(part._fd).st_mtime_ns,
                *part._newest,
                *part.max_timestamp,
                part._offsets.tobytes(),
                part._positions.tobytes(),
                part._timestamps_before.tobytes(),
            )
        finally:
            part.close()

    def position_before(self, offset: int) -> int:
        """Return a position at or shortly before that of `offset`, without reading."""
        return self._place_before(offset).position

    def recover(self, on_batch: Callable[[RecordBatch], None], leader_epoch: int, recovery_point: int) -> int:
        """Read every batch with its CRC, from where the adopted index ends, up to the first bad one.

        Return the number of bytes after the good ones. `on_batch` is called for each good batch. See `truncate_tail` to
        remove the rest. `leader_epoch` is the last one of the segment before; everything below `recovery_point` is
        known to be on the disk.
        """
        length = self.length_in_bytes()
        for batch, window in self._scan(length):
            # The CRC covers neither the offset nor the epoch, so these must at least be consecutive.
            if (
                batch.base_offset != self.next_offset
                or batch.last_offset_delta < 0
                or batch.partition_leader_epoch < leader_epoch
                or not crc_is_valid(window, batch)
            ):
                break
            leader_epoch = batch.partition_leader_epoch
            self._note(batch, batch.base_offset)
            on_batch(batch)
        # It is unknown how much of the rest the last process flushed.
        self.is_dirty = length > 0 and self.next_offset > recovery_point
        return length - self.size_in_bytes

    def _scan(self, length: int) -> Iterator[tuple[RecordBatch, memoryview]]:
        """Iterate over the whole batches up to `length` or the first bad header, each with the window that holds it.

        The file is not mapped: an unreadable sector would end the process.
        """
        position = start = self.size_in_bytes
        window = memoryview(b"")
        while position < length:
            if start + len(window) - position < HEADER_BYTES:
                window, start = self._window(position, length, HEADER_BYTES), position
            try:
                batch = parse_header(window, position - start)
            except CodecError:
                return
            if batch.end > len(window):
                if batch.size_in_bytes > length - position:
                    return
                window, start = self._window(position, length, batch.size_in_bytes), position
                batch = batch._replace(position=0)
            yield batch, window
            position = start + batch.end

    def _window(self, position: int, end: int, at_least: int) -> memoryview:
        length = min(max(RECOVERY_WINDOW_BYTES, at_least), end - position)
        return memoryview(self._pread(length, position, at_least))

    def truncate_tail(self) -> None:
        """Cut the file off behind the last whole batch."""
        self.is_dirty = True
        os.ftruncate(self._fd, self.size_in_bytes)

    def append(self, records: Buffer, batches: Sequence[RecordBatch], base_offset: int) -> None:
        """Write whole batches.

        The first carries `base_offset` in its bytes already, whatever `batches` says. After OSError the segment is
        unchanged; LogFailed means that the partial write could not be undone.
        """
        written = 0
        try:
            while written < len(records):
                written += os.write(self._fd, memoryview(records)[written:] if written else records)
        except OSError:
            self._cut_off()
            raise
        # Set after the write: a flush that ends in between does not include it.
        self.is_dirty = True
        self._note(batches[0], base_offset)
        for batch in batches[1:]:
            self._note(batch, batch.base_offset)

    def truncate_to(self, offset: int) -> None:
        """Drop every batch that reaches to or above `offset`. Raises OSError, LogFailed."""
        first = next(self.batches_from(offset), None)
        if first is None:
            return
        self.size_in_bytes, self.next_offset = first.position, first.base_offset
        # The newest batch need not be known: there is nothing to read at the end.
        self._newest = _Place(first.base_offset, first.position)
        while self._positions and self._positions[-1] >= self.size_in_bytes:
            self._offsets.pop()
            self._positions.pop()
            self._timestamps_before.pop()
        if self.max_timestamp.offset >= self.next_offset:
            self.max_timestamp = self._find_max_timestamp()
        self._cut_off()

    def _cut_off(self) -> None:
        try:
            self.truncate_tail()
        except OSError as error:
            raise LogFailed(f"{self.path}: a write could not be undone: {error}") from error

    def _note(self, batch: RecordBatch, base_offset: int) -> None:
        positions = self._positions
        if not positions or self.size_in_bytes - positions[-1] >= INDEX_INTERVAL_BYTES:
            self._offsets.append(base_offset)
            positions.append(self.size_in_bytes)
            self._timestamps_before.append(self.max_timestamp.timestamp)
        self._newest = _Place(base_offset, self.size_in_bytes)
        self.size_in_bytes += batch.size_in_bytes
        last_offset = base_offset + batch.last_offset_delta
        self.next_offset = last_offset + 1
        if batch.max_timestamp > self.max_timestamp.timestamp:
            self.max_timestamp = TimestampAndOffset(batch.max_timestamp, last_offset)

    def read(self, offset: int, max_bytes: int, up_to: int | None = None) -> bytes:
        """Read from the batch that holds `offset`, or the next one.

        That batch is whole; otherwise the result has at most `max_bytes`. Only batches that end below `up_to` are read.
        The last batch may be partial, as in Kafka's answers. The result is empty if there is no such batch.
        """
        place = self._place_before(offset)
        if place.base_offset == offset and up_to is None and max_bytes >= HEADER_BYTES:
            # Followers, and consumers at the end, read this batch: one read is enough unless the batch is larger.
            found = self._pread(min(max_bytes, self.size_in_bytes - place.position), place.position, HEADER_BYTES)
            if found and self._parse_header(found, 0, place.position).size_in_bytes <= len(found):
                return found
        batch = next(self.batches_from(offset), None)
        if batch is None:
            return b""
        length = min(max(batch.size_in_bytes, max_bytes), self.size_in_bytes - batch.position)
        if up_to is not None and up_to < self.next_offset:
            length = min(length, next(self.batches_from(up_to)).position - batch.position)
        return self._pread(length, batch.position, batch.size_in_bytes) if length > 0 else b""

    def batches_from(self, offset: int) -> Iterator[RecordBatch]:
        """Iterate over the batches from the one that holds `offset`, or the next one; positions are in the file."""
        for batch in self._walk(self._place_before(offset).position):
            if batch.last_offset >= offset:
                yield batch

    def newest_timestamp(self) -> int:
        """Return the largest timestamp (ms), or the file's modification time if no batch has one. Raises OSError."""
        if self.max_timestamp.timestamp != NO_TIMESTAMP:
            return self.max_timestamp.timestamp
        return os.fstat(self._fd).st_mtime_ns // 1_000_000

    def find_timestamp(self, timestamp: int) -> TimestampAndOffset | None:
        """Find the first batch with a record at or after `timestamp`; return its first timestamp and offset."""
        if self.max_timestamp.timestamp < timestamp:
            return None
        # The batch follows the last entry before which no batch reaches `timestamp`.
        entry = max(bisect_left(self._timestamps_before, timestamp) - 1, 0)
        for batch in self._walk(self._positions[entry]):
            if batch.max_timestamp >= timestamp:
                return TimestampAndOffset(batch.base_timestamp, batch.base_offset)
        return None

    def _find_max_timestamp(self) -> TimestampAndOffset:
        if not self._positions:
            return TimestampAndOffset(NO_TIMESTAMP, -1)
        last_ones = (batch.max_timestamp for batch in self._walk(self._positions[-1]))
        largest = max(self._timestamps_before[-1], *last_ones)
        entry = max(bisect_left(self._timestamps_before, largest) - 1, 0)
        reaching = (batch for batch in self._walk(self._positions[entry]) if batch.max_timestamp >= largest)
        return TimestampAndOffset(largest, next(reaching).last_offset)

    def _place_before(self, offset: int) -> _Place:
        """Return the last known batch that begins at or before `offset`, or the segment's beginning."""
        if offset >= self._newest.base_offset:
            return self._newest
        entry = bisect_right(self._offsets, offset) - 1
        return _Place(self._offsets[entry], self._positions[entry]) if entry >= 0 else _Place(self.base_offset, 0)

    def _walk(self, position: int, end: int | None = None) -> Iterator[RecordBatch]:
        """Iterate over the headers from `position` to `end` (default: all), reading a window at a time."""
        window, window_start = b"", position
        end = self.size_in_bytes if end is None else end
        while position < end:
            if position + HEADER_BYTES > window_start + len(window):
                length = min(INDEX_INTERVAL_BYTES + HEADER_BYTES, end - position)
                window, window_start = self._pread(length, position, HEADER_BYTES), position
            batch = self._parse_header(window, position - window_start, position)._replace(position=position)
            yield batch
            position = batch.end

    def _parse_header(self, window: bytes, position: int, file_position: int) -> RecordBatch:
        try:
            return parse_header(window, position)
        except CodecError as error:
            raise LogFailed(f"{self.path} is damaged at byte {file_position} ({error})") from error

    def _pread(self, length: int, position: int, at_least: int) -> bytes:
        """Read `length` bytes, or fewer if a sector after `at_least` is unreadable. Raises OSError, LogFailed."""
        found = self._pread_once(length, position)
        while len(found) < min(at_least, length):
            more = self._pread_once(length - len(found), position + len(found))
            if not more:
                raise LogFailed(f"{self.path} ends at byte {position + len(found)}, within a batch")
            found += more
        return found

    def _pread_once(self, length: int, position: int) -> bytes:
        try:
            return os.pread(self._fd, length, position)
        except OSError as error:
            message = f"{self.path} cannot be read at byte {position} ({error.strerror})"
            raise DiskError(error.errno, message) from error

    def flush(self) -> None:
        """Flush appended bytes to the disk. Raises OSError.

        Meanwhile another thread may append or close, not flush. After an error the contents of the disk are unknown:
        the kernel may treat the bytes as written. So a flush must not be retried. It needs no new descriptor, so that a
        process without free ones loses no log.
        """
        with self._close_lock:
            if not self.is_dirty or self._fd < 0:
                return
            fd, self.is_dirty, self._is_flushing = self._fd, False, True
        try:
            with FLUSHES.timed():
                _sync_data(fd)
        finally:
            with self._close_lock:
                self._is_flushing = False
                if self._fd < 0:
                    os.close(fd)

    def delete(self) -> None:
        """Close and remove the file, and remove its index. Raises OSError."""
        self.close()
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(INDEX_SUFFIX).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file without waiting for the disk. May be called twice."""
        with self._close_lock:
            fd, self._fd = self._fd, -1
            if fd >= 0 and not self._is_flushing:
                os.close(fd)

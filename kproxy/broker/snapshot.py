"""Read and write index and snapshot files beside a log, so that opening the log need not read most of it.

  {base offset}.index   the index of a whole segment, to which no more batches are appended
  log.snapshot          the log's state up to an offset: leader epochs, producers, and the index of the segment that
                        holds the offset, up to the offset

Opening reads the log after the snapshot, and every earlier segment without an index. A snapshot is written when
the log has grown by about INTERVAL_BYTES, or by about HISTORY_INTERVAL_BYTES into a new segment, and at a stop.

Invariants
1. A file covers only batches below the high watermark in the checkpoint: these are on the disk and never removed from
   the end, so that the file stays valid whenever the process ends. A file that covers more is not used: then an
   operator has removed the checkpoint, and so accepted a loss of records.
2. A file that is damaged, of another version or of another segment is not used: the segment is read. A segment matches
   if it has the same length and modification time, or has grown and still has the index's last batch.
3. A file that is not used is removed, and its removal flushed, before the log is written to.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from crc32c import crc32c

from kproxy.broker.disk import read_file, write_file
from kproxy.broker.producer_state import ProducerStates

INTERVAL_BYTES = 64 << 20
INDEX_SUFFIX = ".index"
_SNAPSHOT_FILE = "log.snapshot"
_VERSION = 1
_CRC_BYTES = 4


class SegmentIndex(NamedTuple):
    """An index of the first `size_in_bytes` of a segment; the last three fields are arrays of int64, as bytes."""

    base_offset: int
    next_offset: int
    size_in_bytes: int
    modified_ns: int
    newest_offset: int
    newest_position: int
    max_timestamp: int
    max_timestamp_offset: int
    offsets: bytes
    positions: bytes
    timestamps_before: bytes


class LogState(NamedTuple):
    """The state from a log's batches below `offset`, except for the segments' indexes."""

    offset: int
    leader_epochs: list[tuple[int, int]]
    producers: ProducerStates


def index_path(directory: Path, base_offset: int) -> Path:
    return directory / f"{base_offset:020d}{INDEX_SUFFIX}"


def snapshot_path(directory: Path) -> Path:
    return directory / _SNAPSHOT_FILE


def read_index(directory: Path, base_offset: int, high_watermark: int) -> SegmentIndex | None:
    """Return a segment's index; None without a usable one. Raises OSError."""
    found = _read(index_path(directory, base_offset))
    index = _index_of(*found) if found is not None else None
    return index if index is not None and index.next_offset <= high_watermark else None


def write_index(directory: Path, index: SegmentIndex, replacing: AbstractContextManager[object]) -> None:
    """Write a segment's index, as `write_file` does. Raises OSError."""
    _write(index_path(directory, index.base_offset), index, {}, b"", replacing)


def read_snapshot(directory: Path, high_watermark: int) -> tuple[SegmentIndex, LogState] | None:
    """Return the log's snapshot: a state, and the index of the segment that holds its offset.

    None without a usable one. Raises OSError.
    """
    found = _read(snapshot_path(directory))
    if found is None or found[0]["index"][1] > high_watermark:
        return None
    index = _index_of(*found)
    fields, arrays = found
    epochs = [(epoch, start) for epoch, start in fields["leader_epochs"]]
    producers = ProducerStates.from_bytes(arrays[sum(fields["lengths"]) :])
    return index, LogState(index.next_offset, epochs, producers)


def write_snapshot(
    directory: Path, index: SegmentIndex, state: LogState, replacing: AbstractContextManager[object]
) -> None:
    """Write the log's snapshot, as `write_file` does. Raises OSError."""
    fields = {"leader_epochs": state.leader_epochs}
    _write(snapshot_path(directory), index, fields, state.producers.to_bytes(), replacing)


def _write(
    path: Path, index: SegmentIndex, more: dict[str, Any], rest: bytes, replacing: AbstractContextManager[object]
) -> None:
    numbers, arrays = index[:8], index[8:]
    fields = {"index": numbers, "lengths": [len(each) for each in arrays], **more}
    head = json.dumps({"version": _VERSION, "byteorder": sys.byteorder, **fields}).encode()
    content = b"".join((head, b"\n", *arrays, rest))
    write_file(path, crc32c(content).to_bytes(_CRC_BYTES, "big") + content, replacing)


def _read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """Return the fields of the file's head and the bytes after it; None without a valid file of this version."""
    found = read_file(path)
    if found is None or crc32c(found[_CRC_BYTES:]) != int.from_bytes(found[:_CRC_BYTES], "big"):
        return None
    head, _, arrays = found[_CRC_BYTES:].partition(b"\n")
    fields = json.loads(head) if head else {}
    if (fields.get("version"), fields.get("byteorder")) != (_VERSION, sys.byteorder):
        return None
    return fields, arrays


def _index_of(fields: dict[str, Any], arrays: bytes) -> SegmentIndex:
    parts = []
    for length in fields["lengths"]:
        parts.append(arrays[:length])
        arrays = arrays[length:]
    return SegmentIndex(*fields["index"], *parts)

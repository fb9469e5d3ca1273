"""Tamper with logs: remove batches from the middle or the end, or append them once more.

The files are those of a broker that has stopped, of the reference broker or of Apache Kafka: both store batches as
sent, and no CRC covers their offsets.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kproxy_codec.record_batch import RecordBatch, assign_offsets, iterate_batches, leader_epoch_of


class Offsets(NamedTuple):
    """A range of offsets, both ends included."""

    first: int
    last: int

    @property
    def records(self) -> int:
        return self.last - self.first + 1


def cut_out(directory: Path, ordinal: int) -> Offsets:
    """Remove a batch, counted from 0, from the middle of the log in that directory."""
    segment, content, batches = _read(directory)
    batch = batches[ordinal]
    _write(segment, content[: batch.position] + content[batch.end :])
    return Offsets(batch.base_offset, batch.last_offset)


def cut_off(directory: Path, count: int) -> Offsets:
    """Remove the last `count` batches and declare the loss, because a single replica would not open such a log."""
    segment, content, batches = _read(directory)
    (directory / "checkpoint.json").unlink()
    _write(segment, content[: batches[-count].position])
    return Offsets(batches[-count].base_offset, batches[-1].last_offset)


def append_again(directory: Path, ordinal: int) -> tuple[Offsets, Offsets]:
    """Append a batch of the log again at its end; return its offsets in both places."""
    segment, content, batches = _read(directory)
    batch, base_offset = batches[ordinal], batches[-1].last_offset + 1
    copy = content[batch.position : batch.end]
    last_epoch = leader_epoch_of(content[batches[-1].position :])
    assign_offsets(copy, batch._replace(position=0), base_offset, last_epoch)
    _write(segment, content + copy)
    copied = Offsets(base_offset, base_offset + batch.last_offset - batch.base_offset)
    return Offsets(batch.base_offset, batch.last_offset), copied


def _read(directory: Path) -> tuple[Path, bytearray, list[RecordBatch]]:
    """The only segment of a log, its content, and its batches."""
    (segment,) = directory.glob("*.log")
    content = bytearray(segment.read_bytes())
    return segment, content, list(iterate_batches(content))


def _write(segment: Path, content: bytearray) -> None:
    segment.write_bytes(content)
    # Apache Kafka writes these indexes again from the log.
    for index in ("index", "timeindex"):
        segment.with_suffix(f".{index}").unlink(missing_ok=True)

"""Opening a log with damaged files repairs the possible effects of a power cut, and reports any other damage.

The recovery point, the last stored high watermark, separates the two. Files beside the segments that do not match them
change only the amount to read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kproxy.broker.config import LogOptions
from kproxy.broker.log import Log, LogCorrupt
from kproxy.broker.segment import LogFailed, Segment
from kproxy_codec.record_batch import RecordBatch
from tests.support.brokers.broker_logs import assert_reads_alike, copied, leader_batches, offsets, read_all
from tests.unit.broker.replicas import reopened

START = 100
BATCHES, RECORDS = 5, 4
OPTIONS = LogOptions(segment_bytes=600)
# In a batch: bytes before the CRC, the CRC, and the bytes that it covers.
OFFSET, LENGTH, LEADER_EPOCH, MAGIC, CRC, ATTRIBUTES, FIRST_RECORD = 0, 8, 12, 16, 17, 21, 61
END = 160


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A closed log of three segments of five batches of four records; the leader epochs are 4, 5 and 6."""
    log = Log.open(tmp_path / "t-0", options=OPTIONS)
    log.reset_to(START)
    for leader_epoch in (4, 5, 6):
        log.append_replicated(leader_batches(log.log_end_offset, *[RECORDS] * BATCHES, leader_epoch=leader_epoch))
    log.close()
    assert [int(path.stem) for path in segment_files(log.directory)] == [100, 120, 140]
    return log.directory


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


def recover_from(directory: Path, recovery_point: int) -> None:
    """Store a high watermark, below which all records were on the disk."""
    log = Log.open(directory, options=OPTIONS)
    log.checkpoint(recovery_point, log.leadership)
    log.close()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in segment_files(directory)}


def flip(path: Path, batch: int, position: int, mask: int) -> bytes:
    """Flip bits in one byte of a batch; return the file's new content."""
    data = bytearray(path.read_bytes())
    data[len(data) // BATCHES * batch + position] ^= mask
    path.write_bytes(data)
    return bytes(data)


FLIPS = [
    pytest.param(OFFSET + 7, 1, id="offset"),
    pytest.param(OFFSET, 0x40, id="offset, far off"),
    pytest.param(LENGTH, 0x80, id="length, below zero"),
    pytest.param(LENGTH + 1, 0x40, id="length, beyond the file"),
    pytest.param(LENGTH + 3, 1, id="length, into the next batch"),
    pytest.param(LEADER_EPOCH + 3, 4, id="leader epoch, a lower one"),
    pytest.param(MAGIC, 1, id="magic"),
    pytest.param(CRC, 1, id="crc"),
    pytest.param(ATTRIBUTES, 1, id="attributes"),
    pytest.param(FIRST_RECORD, 1, id="record"),
]


@pytest.mark.parametrize(("position", "mask"), FLIPS)
@pytest.mark.parametrize("batch", [1, 4])
def test_flipped_bit_in_last_segment_truncates_it(directory: Path, batch: int, position: int, mask: int) -> None:
    whole = b"".join(path.read_bytes() for path in segment_files(directory))
    flip(segment_files(directory)[-1], batch, position, mask)
    log = Log.open(directory, options=OPTIONS)
    end_offset = 140 + batch * RECORDS
    assert log.log_end_offset == end_offset
    assert log.truncated_bytes == len(whole) // (3 * BATCHES) * (BATCHES - batch)
    assert read_all(log) == whole[: -log.truncated_bytes]
    assert log.leader_epochs.entries() == [(4, 100), (5, 120), (6, 140)]
    assert log.append_replicated(leader_batches(end_offset, 3, leader_epoch=7)) == end_offset + 3
    log.close()


@pytest.mark.parametrize(("position", "mask"), FLIPS)
@pytest.mark.parametrize(("segment", "batch"), [(0, 0), (0, 4), (1, 2)])
def test_flipped_bit_in_earlier_segment_changes_nothing(
    directory: Path, segment: int, batch: int, position: int, mask: int
) -> None:
    """Offsets after it were assigned and committed, so only a person may decide to cut them off."""
    path = segment_files(directory)[segment]
    if segment == batch == 0 and position == LEADER_EPOCH + 3:
        mask = 0x80  # the first offset has no lower one
    recover_from(directory, START + (segment * BATCHES + batch + 1) * RECORDS + 1)
    flip(path, batch, position, mask)
    damaged = contents(directory)
    with pytest.raises(LogCorrupt, match=directory.name):
        Log.open(directory, options=OPTIONS)
    assert contents(directory) == damaged


def a_flipped_bit(directory: Path) -> None:
    flip(segment_files(directory)[1], 2, FIRST_RECORD, 1)


def an_epoch_that_goes_back(directory: Path) -> None:
    flip(segment_files(directory)[1], 0, LEADER_EPOCH + 3, 4)


def an_epoch_that_goes_back_behind_the_segment_before(directory: Path) -> None:
    flip(segment_files(directory)[2], 0, LEADER_EPOCH + 3, 4)


def a_segment_that_lost_batches(directory: Path) -> None:
    path = segment_files(directory)[1]
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // BATCHES * 3])


def a_segment_that_lost_all(directory: Path) -> None:
    segment_files(directory)[1].write_bytes(b"")


def a_segment_of_zeros(directory: Path) -> None:
    """Fill a segment with zeros, as after a power cut between the writes of its length and its bytes."""
    path = segment_files(directory)[1]
    path.write_bytes(bytes(len(path.read_bytes())))


def a_missing_segment(directory: Path) -> None:
    segment_files(directory)[1].unlink()


# Each damage, and how many of the remaining bytes are lost.
IN_THE_MIDDLE = [
    pytest.param(a_flipped_bit, 128, id="a flipped bit"),
    pytest.param(an_epoch_that_goes_back, 120, id="an epoch that goes back"),
    pytest.param(an_epoch_that_goes_back_behind_the_segment_before, 140, id="from one segment to the next"),
    pytest.param(a_segment_that_lost_batches, 132, id="a segment that lost batches"),
    pytest.param(a_segment_that_lost_all, 120, id="a segment that lost all"),
    pytest.param(a_segment_of_zeros, 120, id="a segment of zeros"),
    pytest.param(a_missing_segment, 120, id="a missing segment"),
]


@pytest.mark.parametrize(("damage", "left"), IN_THE_MIDDLE)
def test_damage_above_recovery_point_truncates_the_log(
    directory: Path, damage: Callable[[Path], None], left: int
) -> None:
    """Segments begin before earlier ones are flushed: a power cut may remove any and leave later ones."""
    whole = b"".join(contents(directory).values())
    recover_from(directory, left)
    damage(directory)
    found = sum(map(len, contents(directory).values()))
    log = Log.open(directory, options=OPTIONS)
    assert log.log_end_offset == left
    assert read_all(log) == whole[: len(whole) * (left - START) // (END - START)]
    assert log.truncated_bytes == found - log.size_in_bytes
    assert max(int(path.stem) for path in segment_files(directory)) <= left
    assert log.append_replicated(leader_batches(left, 3, leader_epoch=7)) == left + 3
    with reopened(log) as again:
        assert (again.truncated_bytes, again.log_end_offset) == (0, left + 3)


@pytest.mark.parametrize(("damage", "left"), IN_THE_MIDDLE)
def test_damage_below_recovery_point_changes_nothing(
    directory: Path, damage: Callable[[Path], None], left: int
) -> None:
    recover_from(directory, left + 1)
    damage(directory)
    damaged = contents(directory)
    with pytest.raises(LogCorrupt, match=f"below offset {left + 1}"):
        Log.open(directory, options=OPTIONS)
    assert contents(directory) == damaged


@pytest.mark.parametrize(("version", "reason"), [(2, "version 2; this release reads 1"), (None, "is damaged")])
def test_checkpoint_of_other_version_is_refused(directory: Path, version: int | None, reason: str) -> None:
    recover_from(directory, END)
    path = directory / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
    with pytest.raises(LogFailed, match=reason):
        Log.open(directory, options=OPTIONS)


@pytest.mark.parametrize(("recovery_point", "is_dirty"), [(0, True), (END - 1, True), (END, False)])
def test_flushed_segments_are_not_flushed_again(directory: Path, recovery_point: int, is_dirty: bool) -> None:
    recover_from(directory, recovery_point)
    log = Log.open(directory, options=OPTIONS)
    assert (log.is_dirty, log.flushed_offset) == (is_dirty, recovery_point)
    log.close()


def test_first_segments_may_be_missing_after_retention(directory: Path) -> None:
    segment_files(directory)[0].unlink()
    log = Log.open(directory, options=OPTIONS)
    assert (log.log_start_offset, log.log_end_offset, log.leader_epochs.entries()) == (120, 160, [(5, 120), (6, 140)])
    log.close()


def test_emptied_last_segment_keeps_its_base_offset(directory: Path) -> None:
    segment_files(directory)[-1].write_bytes(b"\x00" * 50)
    log = Log.open(directory, options=OPTIONS)
    assert (log.log_end_offset, log.truncated_bytes) == (140, 50)
    log.append_replicated(leader_batches(140, 1, leader_epoch=9))
    assert offsets(log.read(140, 100)) == [140]
    log.close()


def test_file_that_is_not_a_segment_is_named(directory: Path) -> None:
    (directory / "notes.log").write_text("mine")
    with pytest.raises(LogFailed, match=r"notes\.log is not a segment"):
        Log.open(directory, options=OPTIONS)


class Told(NamedTuple):
    """A closed log of three segments; the files beside them as `now`, and as of the end at 152 (`before`)."""

    now: Path
    before: Path

    def put_back(self, name: str) -> None:
        shutil.copy2(self.before / name, self.now)


@pytest.fixture
def told(directory: Path, tmp_path: Path) -> Told:
    producer = {"producer_id": 9, "producer_epoch": 0}
    log = Log.open(directory, options=OPTIONS)
    log.truncate_to(148)
    log.append_replicated(leader_batches(148, RECORDS, leader_epoch=6, **producer, base_sequence=0))
    log.checkpoint(152, log.leadership, log.state_below(152, is_last=True))
    copied(directory, tmp_path / "before")
    log.append_replicated(leader_batches(152, RECORDS, leader_epoch=6, **producer, base_sequence=4))
    log.append_replicated(leader_batches(156, RECORDS, leader_epoch=7))
    log.checkpoint(END, log.leadership, log.state_below(END, is_last=True))
    log.close()
    return Told(directory, tmp_path / "before")


def touch(told: Told, base_offset: int) -> None:
    os.utime(told.now / f"{base_offset:020d}.log", ns=(1, 1))


def take_index_of_another(told: Told) -> None:
    shutil.copy2(told.now / f"{100:020d}.index", told.now / f"{120:020d}.index")


def take_snapshot_for_index(told: Told) -> None:
    shutil.copy2(told.now / "log.snapshot", told.now / f"{120:020d}.index")


def write_another_tail(told: Told) -> None:
    """Write more than the snapshot covers, with other batches."""
    path = told.now / f"{140:020d}.log"
    path.write_bytes(leader_batches(140, 7, 7, 7, 7, 7, leader_epoch=8))


def lose_last_segment(told: Told) -> None:
    segment_files(told.now)[-1].unlink()


# The files on the disk after a power cut, and the segments that recovery then reads.
MIXED = [
    pytest.param(lambda told: None, [], id="nothing"),
    pytest.param(lambda told: told.put_back("log.snapshot"), [140], id="older snapshot"),
    pytest.param(lambda told: told.put_back("checkpoint.json"), [100, 120, 140], id="older checkpoint"),
    pytest.param(lambda told: told.put_back(f"{140:020d}.log"), [100, 120, 140], id="older last segment"),
    pytest.param(lambda told: touch(told, 120), [120], id="segment changed"),
    pytest.param(lambda told: touch(told, 140), [100, 120, 140], id="last segment changed"),
    pytest.param(take_index_of_another, [120], id="index of another segment"),
    pytest.param(take_snapshot_for_index, [120], id="snapshot instead of index"),
    pytest.param(lambda told: (told.now / f"{100:020d}.index").unlink(), [100], id="index missing"),
    pytest.param(lambda told: os.truncate(told.now / f"{100:020d}.index", 90), [100], id="index torn"),
    pytest.param(lambda told: os.truncate(told.now / "log.snapshot", 90), [100, 120, 140], id="snapshot torn"),
    pytest.param(write_another_tail, [100, 120, 140], id="other records in last segment"),
    pytest.param(lose_last_segment, [100, 120], id="last segment missing"),
]


@pytest.mark.parametrize(("mix", "read"), MIXED)
def test_log_of_mixed_files_opens_by_its_segments(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mix: Callable[[Told], None], read: list[int]
) -> None:
    mix(told)
    whole = Log.open(copied(told.now, tmp_path / "whole" / told.now.name, is_told=False), options=OPTIONS)
    scanned = []
    usual = Segment._scan

    def scan(self: Segment, length: int) -> Iterator[tuple[RecordBatch, memoryview]]:
        for number, found in enumerate(usual(self, length)):
            if number == 0:
                scanned.append(self.base_offset)
            yield found

    monkeypatch.setattr(Segment, "_scan", scan)
    for expected in (read, None):
        log = Log.open(told.now, options=OPTIONS)
        assert_reads_alike(log, whole)
        assert expected is None or scanned == expected
        log.close()
    whole.close()

"""Opening a log with damaged files: the possible effects of a power cut are cut off, any other damage is reported.

The line between the two is the recovery point: the high watermark that was written down last.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kproxy.broker.config import LogOptions
from kproxy.broker.log import Log, LogCorrupt
from kproxy.broker.segment import LogFailed
from tests.support.brokers.broker_logs import leader_batches, offsets, read_all

START = 100
BATCHES, RECORDS = 5, 4
OPTIONS = LogOptions(segment_bytes=600)
# In a batch: what the CRC does not cover, the CRC, and what it covers.
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
    """A high watermark is written down: below it all was on the disk."""
    log = Log.open(directory, options=OPTIONS)
    log.checkpoint(recovery_point, log.leadership)
    log.close()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in segment_files(directory)}


def flip(path: Path, batch: int, position: int, mask: int) -> bytes:
    """Change bits of one byte of a batch; the file's content then."""
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
def test_a_flipped_bit_in_the_last_segment_ends_the_log_there(
    directory: Path, batch: int, position: int, mask: int
) -> None:
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
def test_a_flipped_bit_in_an_earlier_segment_is_told_and_nothing_is_touched(
    directory: Path, segment: int, batch: int, position: int, mask: int
) -> None:
    """Offsets behind it were given out, and committed: cutting them off is for a person to decide."""
    path = segment_files(directory)[segment]
    if segment == batch == 0 and position == LEADER_EPOCH + 3:
        mask = 0x80  # there is no lower one at the very beginning
    recover_from(directory, START + (segment * BATCHES + batch + 1) * RECORDS + 1)
    flip(path, batch, position, mask)
    damaged = contents(directory)
    with pytest.raises(LogCorrupt, match=directory.name):
        Log.open(directory, options=OPTIONS)
    assert contents(directory) == damaged


def no_damage(directory: Path) -> None: ...


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
    """As a file is after a power cut whose length was on the disk before its bytes."""
    path = segment_files(directory)[1]
    path.write_bytes(bytes(len(path.read_bytes())))


def a_missing_segment(directory: Path) -> None:
    segment_files(directory)[1].unlink()


# How many bytes of the rest are gone is for each damage to tell.
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
def test_damage_above_the_recovery_point_ends_the_log_there(
    directory: Path, damage: Callable[[Path], None], left: int
) -> None:
    """Segments begin before the one before is on the disk: a power cut may take any, and leave later ones."""
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
    log.close()
    again = Log.open(directory, options=OPTIONS)
    assert (again.truncated_bytes, again.log_end_offset) == (0, left + 3)
    again.close()


@pytest.mark.parametrize(("damage", "left"), IN_THE_MIDDLE)
def test_damage_below_the_recovery_point_is_told_and_nothing_is_touched(
    directory: Path, damage: Callable[[Path], None], left: int
) -> None:
    recover_from(directory, left + 1)
    damage(directory)
    damaged = contents(directory)
    with pytest.raises(LogCorrupt, match=f"below offset {left + 1}"):
        Log.open(directory, options=OPTIONS)
    assert contents(directory) == damaged


@pytest.mark.parametrize(("damage", "left"), [(no_damage, END), *IN_THE_MIDDLE[:1]])
@pytest.mark.parametrize("recovery_point", [110, 150])
def test_a_checkpoint_of_the_release_before_versions_means_the_same(
    directory: Path, damage: Callable[[Path], None], left: int, recovery_point: int
) -> None:
    recover_from(directory, recovery_point)
    path = directory / "checkpoint.json"
    old = json.loads(path.read_text())
    assert old.pop("version") == 1
    path.write_text(json.dumps(old))
    damage(directory)
    if left < recovery_point:
        with pytest.raises(LogCorrupt):
            Log.open(directory, options=OPTIONS)
        return
    log = Log.open(directory, options=OPTIONS)
    assert (log.log_end_offset, log.high_watermark_checkpoint) == (left, recovery_point)
    log.close()


def test_a_checkpoint_of_a_later_release_is_not_guessed_at(directory: Path) -> None:
    recover_from(directory, END)
    path = directory / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(LogFailed, match="version 2"):
        Log.open(directory, options=OPTIONS)


@pytest.mark.parametrize(("recovery_point", "is_dirty"), [(0, True), (END - 1, True), (END, False)])
def test_what_is_known_to_be_on_the_disk_is_not_brought_there_again(
    directory: Path, recovery_point: int, is_dirty: bool
) -> None:
    recover_from(directory, recovery_point)
    log = Log.open(directory, options=OPTIONS)
    assert (log.is_dirty, log.flushed_offset) == (is_dirty, recovery_point)
    log.close()


def test_the_first_segments_may_be_missing_as_retention_leaves_them(directory: Path) -> None:
    segment_files(directory)[0].unlink()
    log = Log.open(directory, options=OPTIONS)
    assert (log.log_start_offset, log.log_end_offset, log.leader_epochs.entries()) == (120, 160, [(5, 120), (6, 140)])
    log.close()


def test_a_last_segment_that_lost_all_keeps_its_place(directory: Path) -> None:
    segment_files(directory)[-1].write_bytes(b"\x00" * 50)
    log = Log.open(directory, options=OPTIONS)
    assert (log.log_end_offset, log.truncated_bytes) == (140, 50)
    log.append_replicated(leader_batches(140, 1, leader_epoch=9))
    assert offsets(log.read(140, 100)) == [140]
    log.close()


def test_committed_records_that_are_gone_can_be_told_from_the_checkpoint(directory: Path) -> None:
    recover_from(directory, 150)
    path = segment_files(directory)[-1]
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // BATCHES])
    again = Log.open(directory, options=OPTIONS)
    assert (again.log_end_offset, again.high_watermark_checkpoint) == (144, 150)
    again.close()


def test_a_file_that_is_no_segment_is_named(directory: Path) -> None:
    (directory / "notes.log").write_text("mine")
    with pytest.raises(LogFailed, match=r"notes\.log is not a segment"):
        Log.open(directory, options=OPTIONS)

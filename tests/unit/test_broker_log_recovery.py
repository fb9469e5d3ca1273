"""What opening a log makes of damaged files: what may have been torn is cut off, anything else is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kproxy.broker.log import Log, LogCorrupt
from kproxy.broker.log_options import LogOptions
from kproxy.broker.segment import LogFailed
from tests.support.broker_logs import leader_batches, offsets, read_all

START = 100
BATCHES, RECORDS = 5, 4
OPTIONS = LogOptions(segment_bytes=600)
# In a batch: what the CRC does not cover, the CRC, and what it covers.
OFFSET, LENGTH, LEADER_EPOCH, MAGIC, CRC, ATTRIBUTES, FIRST_RECORD = 0, 8, 12, 16, 17, 21, 61


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
    """Offsets behind it were given out, and acknowledged: cutting them off is for a person to decide."""
    path = segment_files(directory)[segment]
    if segment == batch == 0 and position == LEADER_EPOCH + 3:
        mask = 0x80  # there is no lower one at the very beginning
    damaged = flip(path, batch, position, mask)
    names = segment_files(directory)
    with pytest.raises(LogCorrupt, match=directory.name):
        Log.open(directory, options=OPTIONS)
    assert path.read_bytes() == damaged
    assert segment_files(directory) == names


def test_an_epoch_that_goes_back_from_one_segment_to_the_next_is_told(directory: Path) -> None:
    flip(segment_files(directory)[-1], 0, LEADER_EPOCH + 3, 4)
    with pytest.raises(LogCorrupt, match="leader epoch 2 at offset 140, behind epoch 5"):
        Log.open(directory, options=OPTIONS)


@pytest.mark.parametrize("segment", [0, 1])
def test_an_earlier_segment_that_lost_batches_or_all_of_them_is_told(directory: Path, segment: int) -> None:
    path = segment_files(directory)[segment]
    whole = path.read_bytes()
    for left in (0, len(whole) // BATCHES * 3):
        path.write_bytes(whole[:left])
        with pytest.raises(LogCorrupt, match="comes next"):
            Log.open(directory, options=OPTIONS)


def test_a_missing_segment_is_told(directory: Path) -> None:
    segment_files(directory)[1].unlink()
    with pytest.raises(LogCorrupt, match=r"ends at offset 120, 00000000000000000140\.log comes next"):
        Log.open(directory, options=OPTIONS)


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
    log = Log.open(directory, options=OPTIONS)
    log.checkpoint(150, log.leadership)
    log.close()
    flip(segment_files(directory)[-1], 1, FIRST_RECORD, 1)
    again = Log.open(directory, options=OPTIONS)
    assert (again.log_end_offset, again.high_watermark_checkpoint) == (144, 150)
    again.close()


def test_a_file_that_is_no_segment_is_named(directory: Path) -> None:
    (directory / "notes.log").write_text("mine")
    with pytest.raises(LogFailed, match=r"notes\.log is not a segment"):
        Log.open(directory, options=OPTIONS)

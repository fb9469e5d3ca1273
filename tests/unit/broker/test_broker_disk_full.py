"""A full disk: the refusal names the disk, leaves nothing behind, and the batch is accepted once there is room."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kproxy.broker.config import FlushPolicy, LogOptions
from kproxy.broker.data_dir import DataDir
from kproxy.broker.disk import DiskError, disk_error
from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.log import Log
from tests.support.brokers.broker_logs import append_values, leader_batches, read_all
from tests.support.brokers.small_disk import SmallDisk, small_disk
from tests.unit.broker.replicas import reopened

OPTIONS = LogOptions(segment_bytes=10_000)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 256 << 10) as disk:
        yield disk


@pytest.fixture(params=["always", "interval"])
def log(disk: SmallDisk, request: pytest.FixtureRequest) -> Iterator[Log]:
    flush: FlushPolicy = request.param
    opened = Log.open(disk.path / "t-0", options=LogOptions(OPTIONS.segment_bytes, flush))
    append_values(opened, *[1000] * 5)
    opened.checkpoint(2, Leadership(0, 7))
    yield opened
    opened.close()


def files(log: Log) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in log.directory.iterdir()}


def append_as_leader(log: Log) -> None:
    append_values(log, 4500)


def append_as_leader_into_a_new_segment(log: Log) -> None:
    append_values(log, 9000)


def append_as_follower(log: Log) -> None:
    log.append_replicated(leader_batches(5, *[160] * 2))


def append_as_follower_into_a_new_segment(log: Log) -> None:
    log.append_replicated(leader_batches(5, 700))


def write_a_checkpoint(log: Log) -> None:
    log.checkpoint(5, Leadership(0, 9))


OPERATIONS = [
    append_as_leader,
    append_as_leader_into_a_new_segment,
    append_as_follower,
    append_as_follower_into_a_new_segment,
    write_a_checkpoint,
]


def test_disk_of_relative_directory_is_named(disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk.path / "data").mkdir()
    monkeypatch.chdir(disk.path)
    told = [str(disk_error(OSError(errno.ENOSPC, "full"), each)) for each in (Path("data"), disk.path / "data")]
    assert [each.split(" has no room")[0] for each in told] == [told[1].split(" has no room")[0]] * 2
    assert "mounted at ." not in told[0]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_batch_is_refused_whole_until_disk_has_room(
    disk: SmallDisk, log: Log, operation: Callable[[Log], None]
) -> None:
    before, records = files(log), read_all(log)
    disk.fill()
    for _ in range(3):
        with pytest.raises(DiskError) as refused:
            operation(log)
    disk.free()
    assert str(log.directory) in str(refused.value)
    assert f"the disk mounted at {disk.path if disk.path.is_mount() else '/'}" in str(refused.value)
    assert files(log) == before, "something was left behind"
    assert (log.failure, log.log_end_offset, log.high_watermark_checkpoint, log.leadership) == (None, 5, 2, (0, 7))
    assert read_all(log) == records
    operation(log)
    assert files(log) != before
    with reopened(log) as again:
        assert (again.truncated_bytes, again.log_end_offset) == (0, log.log_end_offset)
        assert (again.high_watermark_checkpoint, again.leadership) in ((2, (0, 7)), (5, (0, 9)))


def test_partition_without_room_begins_later(disk: SmallDisk) -> None:
    data_dir = DataDir.open(disk.path / "data", 1)
    disk.fill()
    for _ in range(3):
        with pytest.raises(DiskError, match=str(disk.path / "data")):
            data_dir.open_log("t", 0, uuid.UUID(int=1))
    disk.free()
    log = data_dir.open_log("t", 0, uuid.UUID(int=1))
    append_values(log, 4000)
    log.close()
    assert {path.name for path in data_dir.path.iterdir()} == {".lock", "broker.json", "log-ids", "t-0"}, (
        "something was left"
    )
    data_dir.close()


def test_follower_keeps_whole_batches_before_full_disk(disk: SmallDisk, log: Log) -> None:
    log.options = LogOptions(segment_bytes=100_000)
    if not disk.path.is_mount():
        disk.fill()
    with pytest.raises(DiskError):
        log.append_replicated(leader_batches(5, *[400] * 100))
    taken = log.log_end_offset
    assert (taken - 5) % 400 == 0
    disk.free()
    assert log.append_replicated(leader_batches(taken, 400)) == taken + 400
    whole = read_all(log)
    with reopened(log) as again:
        assert (again.truncated_bytes, read_all(again)) == (0, whole)


def test_truncation_and_retention_free_a_full_disk(disk: SmallDisk, log: Log) -> None:
    append_values(log, *[4000] * 10)
    log.flush()
    disk.fill()
    assert log.remove_old_segments(10_000_000, log.log_end_offset) == 0
    log.options = LogOptions(OPTIONS.segment_bytes, retention_bytes=20_000)
    assert log.remove_old_segments(10_000_000, log.log_end_offset) > 0
    log.truncate_to(log.log_end_offset - 1)
    disk.free()
    append_values(log, 4000)
    assert log.failure is None

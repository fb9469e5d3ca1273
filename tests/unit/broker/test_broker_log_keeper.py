"""The periodic work on logs, on real files: flushing, checkpoints, retention, and their failures."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kproxy.broker import log_maintenance
from kproxy.broker.config import FLUSH_POLICIES, FlushPolicy, LogOptions
from kproxy.broker.leader_epochs import NO_LEADERSHIP, Leadership
from kproxy.broker.log import Log, write_checkpoint
from kproxy.broker.log_maintenance import LogMaintenance
from kproxy.broker.partition import Partition
from kproxy.broker.segment import LogFailed
from kproxy_codec import error_codes
from tests.support.brokers.broker_logs import append_values, leader_batches
from tests.support.brokers.replica_group import Group, append
from tests.support.brokers.small_disk import small_disk
from tests.unit.broker.replicas import fetch, reopened
from tests.unit.broker.slow_disk import SlowDisk

NOW_MS = 1_000_000


@dataclass
class Hosted:
    """The part of a partition that its log keeper uses."""

    log: Log
    log_fields: dict[str, object]
    high_watermark: int = 0
    leadership: Leadership = NO_LEADERSHIP
    is_at_rest: bool = False

    def note_at_rest(self) -> None:
        self.is_at_rest = True

    def log_shortened(self) -> None:
        """Do nothing, because nobody waits for it."""


class Broker:
    """Logs and their keeper."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hosted: list[Hosted] = []
        self.told: Sequence[Mapping[str, Any]] = []
        self.keeper = LogMaintenance(
            lambda: self.hosted,
            flush_interval_s=0.01,
            retention_check_interval_s=0.01,
            now_ms=lambda: NOW_MS,
        )

    @property
    def failed(self) -> list[str]:
        """The topics whose logs were reported as failed."""
        return [event["topic"] for event in self.told if event["event"] == "log failed"]

    def host(self, topic: str = "t", **options: object) -> Hosted:
        log = Log.open(self.directory / topic, options=LogOptions(**{"segment_bytes": 5000, **options}))
        self.hosted.append(Hosted(log, {"topic": topic, "partition": 0}))
        return self.hosted[-1]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path)
    with capture_logs() as broker.told:
        yield broker
    broker.keeper.close()
    for hosted in broker.hosted:
        hosted.log.close()


def break_disk_of(log: Log) -> None:
    """Replace the log's last file with one that accepts writes but cannot be flushed."""
    path = max(log.directory.glob("*.log"))
    (fd,) = (int(each.name) for each in Path("/proc/self/fd").iterdir() if each.resolve() == path)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, fd)
    os.close(nowhere)


# Flushing


@pytest.mark.parametrize(("flush", "by_keeper"), [("always", 0), ("interval", 1), ("never", 0)])
async def test_keeper_flushes_as_the_policy_says(
    broker: Broker, disk: SlowDisk, flush: FlushPolicy, by_keeper: int
) -> None:
    """With `always` the partition flushes, because others wait for it: see test_broker_flusher."""
    log = broker.host(flush=flush).log
    append_values(log, 10, 10)
    log.append_replicated(leader_batches(2, 1, 1))
    assert (disk.syncs, log.flushed_offset) == (0, 0)
    await broker.keeper.flush()
    await broker.keeper.flush()
    assert (disk.syncs, log.flushed_offset) == (by_keeper, 4 * by_keeper)
    log.flush()
    assert (disk.syncs, log.flushed_offset, log.is_dirty) == (1, 4, False)


@pytest.mark.parametrize("flush", FLUSH_POLICIES)
def test_append_never_waits_for_the_disk(
    broker: Broker, disk: SlowDisk, flush: FlushPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does any other work on a log on the event loop."""
    log = broker.host(flush=flush, retention_ms=1000).log
    append_values(log, *[4000] * 3, timestamp=NOW_MS - 2000)
    log.flush()

    def hang(_: object = None) -> None:
        raise AssertionError("the disk is waited for")

    disk.before_sync = hang
    monkeypatch.setattr("os.fsync", hang)
    append_values(log, 4000, 4000, timestamp=NOW_MS - 2000)
    log.undo_append()
    log.append_replicated(leader_batches(4, 70, 70))
    assert len(list(log.directory.glob("*.log"))) > 4
    assert log.remove_old_segments(NOW_MS, log.log_end_offset) > 0
    log.advance_log_start(3)
    log.truncate_to(4)
    log.reset_to(1000)
    log.close()


async def test_truncated_records_do_not_count_as_flushed(broker: Broker, disk: SlowDisk) -> None:
    """Records written over them while the disk was busy are not flushed yet."""
    log = broker.host(flush="always").log
    append_values(log, 10, 10, 10)
    log.flush()
    append_values(log, 10)
    async with disk.at_work(asyncio.to_thread(log.flush)):
        log.truncate_to(2)
        append_values(log, 10, 10, 10, leader_epoch=1)
        assert log.flushed_offset == 2
    assert (log.flushed_offset, log.counted_end_offset, log.log_end_offset) == (2, 2, 5)
    log.flush()
    assert log.flushed_offset == 5
    log.reset_to(3)
    assert log.flushed_offset == 0, "of the new segment not even the name is there"
    log.flush()
    assert log.flushed_offset == 3


def synced_paths(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths of all that is synced from now on, apart from segments."""
    synced, sync = list[Path](), os.fsync
    monkeypatch.setattr("os.fsync", lambda fd: (synced.append(Path(f"/proc/self/fd/{fd}").resolve()), sync(fd)))
    return synced


async def test_segment_names_are_flushed_to_disk(
    broker: Broker, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted, synced = broker.host(), synced_paths(monkeypatch)
    append_values(hosted.log, 4000)
    await broker.keeper.flush()
    assert synced == []
    append_values(hosted.log, 4000, 4000)
    assert hosted.log.is_dirty
    for _ in range(2):
        await broker.keeper.flush()
        assert (synced, hosted.log.is_dirty) == ([hosted.log.directory], False)


async def test_names_that_killed_process_left_reach_the_disk(
    broker: Broker, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = broker.host().log
    append_values(killed, 4000, 4000)
    broker.hosted.clear()
    killed.close()  # does not flush
    hosted, synced = broker.host(), synced_paths(monkeypatch)
    assert hosted.log.directory == killed.directory
    await broker.keeper.flush()
    assert (synced, hosted.log.flushed_offset) == ([hosted.log.directory], 2)


def test_unflushable_names_fail_the_log(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    log = broker.host().log
    append_values(log, 4000, 4000)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(LogFailed):
        log.flush()
    assert (log.failure is not None, log.flushed_offset) == (True, 0)


async def test_append_during_a_flush_is_flushed_next(broker: Broker, disk: SlowDisk) -> None:
    log = broker.host().log
    append_values(log, 10)
    async with disk.at_work(broker.keeper.flush()):
        append_values(log, 10)
    assert log.is_dirty
    await broker.keeper.flush()
    assert (disk.syncs, log.is_dirty) == (2, False)


@pytest.mark.parametrize("policy", FLUSH_POLICIES)
async def test_stopping_broker_flushes_every_log(broker: Broker, disk: SlowDisk, policy: FlushPolicy) -> None:
    log = broker.host(flush=policy).log
    append_values(log, 10)
    await broker.keeper.flush(whatever_the_policy=True)
    assert (disk.syncs, log.is_dirty) == (1, False)


@pytest.mark.parametrize("removed", [False, True])
async def test_log_closed_during_a_flush_is_no_failure(broker: Broker, disk: SlowDisk, removed: bool) -> None:
    hosted, other = broker.host("t"), broker.host("u")
    append_values(hosted.log, 10)
    append_values(other.log, 10)
    async with disk.at_work(broker.keeper.flush()):
        hosted.log.close()
        if removed:
            broker.hosted.remove(hosted)
            hosted.log.directory.rename(broker.directory / "#deleted")
    await broker.keeper.flush()
    assert (broker.failed, disk.syncs, other.log.is_dirty) == ([], 2, False)


async def test_segment_removed_during_a_flush_is_no_failure(broker: Broker, disk: SlowDisk) -> None:
    log = broker.host(flush="never").log
    append_values(log, 4000, 4000)
    async with disk.at_work(asyncio.to_thread(log.flush)):
        log.truncate_to(1)
    assert (log.failure, disk.syncs) == (None, 1)


@pytest.mark.parametrize("fails", [False, True])
async def test_unfinished_flush_does_not_count_for_others(broker: Broker, disk: SlowDisk, fails: bool) -> None:
    """Otherwise an append would be acknowledged before it is on the disk."""
    log = broker.host().log
    append_values(log, 10)
    disk.hang()
    disk.fails = fails
    first = asyncio.create_task(asyncio.to_thread(log.flush))
    await disk.is_waited_for()
    second = asyncio.create_task(asyncio.to_thread(log.flush))
    too_early, _ = await asyncio.wait([second], timeout=0.2)
    disk.go_on()
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert not too_early
    assert [isinstance(outcome, LogFailed) for outcome in outcomes] == [fails, fails]


def test_process_without_spare_descriptors_loses_no_log(broker: Broker, disk: SlowDisk) -> None:
    log = broker.host().log
    append_values(log, 4000, 4000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (disk.syncs, log.is_dirty, log.failure) == (2, False, None)


@pytest.mark.parametrize("closed_meanwhile", [False, True])
async def test_closed_log_holds_no_file_after_the_flush(broker: Broker, disk: SlowDisk, closed_meanwhile: bool) -> None:
    log = broker.host().log
    append_values(log, 10)
    disk.before_sync = log.close if closed_meanwhile else lambda: None
    with pytest.raises(LogFailed) if closed_meanwhile else nullcontext():
        await asyncio.to_thread(log.flush)
    log.close()
    held = [path for each in Path("/proc/self/fd").iterdir() if (path := each.resolve()).is_relative_to(log.directory)]
    assert (disk.syncs, held) == (1, [])


async def test_log_of_killed_broker_is_flushed(broker: Broker, disk: SlowDisk) -> None:
    append_values(broker.host().log, 10)
    broker.hosted.clear()
    log = broker.host().log
    assert log.is_dirty, "who else would have done it?"
    await broker.keeper.flush()
    assert disk.syncs == 1


async def test_log_with_failed_flush_is_no_longer_read(broker: Broker) -> None:
    """The kernel may count data as written that it could not write, so a flush must not be repeated."""
    broken, well = broker.host("broken"), broker.host("well")
    for hosted in (broken, well):
        append_values(hosted.log, 10)
    break_disk_of(broken.log)
    for _ in range(3):
        await broker.keeper.flush()
    assert broker.failed == ["broken"], "not told, or told more than once"
    assert str(broken.log.directory) in str(broken.log.failure)
    with pytest.raises(LogFailed, match="does not take what is written"):
        append_values(broken.log, 10)
    with pytest.raises(LogFailed):
        broken.log.read(0, 100)
    assert (well.log.is_dirty, well.log.failure) == (False, None)


# Checkpoints


async def test_moved_high_watermarks_are_written_down(broker: Broker) -> None:
    moved, still = broker.host("moved"), broker.host("still")
    append_values(moved.log, 10, 10)
    moved.high_watermark = 2
    moved.log.checkpoint(1, NO_LEADERSHIP)
    led = broker.host("led")
    led.leadership = Leadership(0, 7)
    await broker.keeper.checkpoint()
    assert not (still.log.directory / "checkpoint.json").exists()
    with reopened(moved.log) as again:
        assert (again.high_watermark_checkpoint, again.leadership) == (2, NO_LEADERSHIP)
    assert led.log.leadership == (0, 7), "whom a replica obeys is written down too"


@pytest.mark.parametrize(("flush", "written"), [("always", 2), ("interval", 2), ("never", 0)])
async def test_high_watermark_is_written_only_over_flushed_records(
    broker: Broker, flush: FlushPolicy, written: int
) -> None:
    """Otherwise a power cut at all replicas could take committed records from each, and none could lead."""
    hosted = broker.host(flush=flush)
    append_values(hosted.log, 10, 10)
    hosted.high_watermark = 2
    await broker.keeper.checkpoint()
    assert (hosted.log.high_watermark_checkpoint, hosted.log.is_dirty) == (written, flush == "never")
    await broker.keeper.flush(whatever_the_policy=True)
    await broker.keeper.checkpoint(is_last=True)
    assert hosted.log.high_watermark_checkpoint == 2


async def settle(keeper: LogMaintenance) -> None:
    """Run rounds of each kind until all logs are written."""
    for _ in range(3):
        await keeper.flush()
        await keeper.checkpoint()


def touch_in_every_way(group: Group) -> Iterator[tuple[str, Partition]]:
    """Change replica 1, which leads, and replica 2, which follows it."""
    leader, follower = group.replicas[1], group.replicas[2]
    append(leader, acks=1)
    yield "appended", leader
    group.fetch(2)
    yield "fetched", follower
    fetch(group, 2, 3, 3)
    yield "committed", leader
    group.fetch(2)
    yield "told", follower
    leader.log_shortened()
    yield "shortened", leader
    group.epoch += 1
    follower.become_follower(3, group.leadership)
    yield "led by another", follower
    os.truncate(max(leader.log.directory.glob("*.log")), 0)
    assert leader.read(0, 100).error_code == error_codes.KAFKA_STORAGE_ERROR
    yield "unreadable", leader


@pytest.mark.parametrize("flush", ["interval", "never"])
async def test_unchanged_replica_is_not_flushed_again(tmp_path: Path, flush: FlushPolicy) -> None:
    group = Group(tmp_path, flush=flush)
    replicas = group.replicas.values()
    keeper = LogMaintenance(lambda: replicas, flush_interval_s=1.0, retention_check_interval_s=1.0)
    assert not any(each.is_at_rest for each in replicas)
    await settle(keeper)
    assert all(each.is_at_rest for each in replicas)
    group.elect(1)
    assert not any(each.is_at_rest for each in replicas)
    await settle(keeper)
    assert all(each.is_at_rest for each in replicas)
    for step, changed in touch_in_every_way(group):
        assert not changed.is_at_rest, step
        await settle(keeper)
        assert changed.is_at_rest == (step != "unreadable"), step
    group.close()
    keeper.close()


async def test_rounds_skip_unchanged_replicas(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    for topic in ("t", "u", "v"):
        broker.host(topic)
    await settle(broker.keeper)
    looked_at: list[Log] = []
    monkeypatch.setattr(Log, "is_dirty", property(lambda log: looked_at.append(log) or True))
    monkeypatch.setattr(Log, "state_below", lambda log, *_, **__: looked_at.append(log))
    await settle(broker.keeper)
    assert looked_at == []
    busy = broker.hosted[1]
    busy.is_at_rest = False
    await broker.keeper.checkpoint()
    assert set(looked_at) == {busy.log}


async def test_never_flushed_log_needs_no_rounds(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = broker.host(flush="never")
    append_values(hosted.log, 10, 10)
    hosted.high_watermark = 2
    written: list[int] = []
    monkeypatch.setattr(Log, "checkpoint", lambda log, high_watermark, *_: written.append(high_watermark))
    await broker.keeper.checkpoint()
    assert (written, hosted.is_at_rest) == ([], True)


async def test_late_checkpoint_does_not_enter_successor_log(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic is deleted and created again while the disk is slow."""
    log = broker.host().log
    at_work, go_on = threading.Event(), threading.Event()
    sync = os.fsync

    def wait(fd: int) -> None:
        at_work.set()
        assert go_on.wait(60)
        sync(fd)

    monkeypatch.setattr("kproxy.broker.disk.os.fsync", wait)
    writing = asyncio.create_task(asyncio.to_thread(log.checkpoint, 0, Leadership(9, 77)))
    await asyncio.to_thread(at_work.wait, 60)
    log.close()
    go_on.set()
    with pytest.raises(LogFailed):
        await writing
    assert [path.suffix for path in log.directory.iterdir()] == [".log"]


async def test_topic_deleted_during_checkpoint_is_no_error(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = broker.host()
    hosted.high_watermark = 1

    def delete_first(*args: Any) -> None:
        hosted.log.close()
        hosted.log.directory.rename(broker.directory / "#deleted")
        write_checkpoint(*args)

    monkeypatch.setattr("kproxy.broker.log.write_checkpoint", delete_first)
    await broker.keeper.checkpoint()
    assert broker.told == []


async def test_removed_log_does_not_block_other_checkpoints(broker: Broker) -> None:
    gone, well = broker.host("gone"), broker.host("well")
    for hosted in (gone, well):
        append_values(hosted.log, 10)
        hosted.high_watermark = 1
    gone.log.directory.rename(broker.directory / "#deleted")
    await broker.keeper.checkpoint()
    assert (gone.log.high_watermark_checkpoint, well.log.high_watermark_checkpoint) == (0, 1)
    assert (broker.failed, gone.log.failure) == ([], None)


# Retention


async def test_retention_respects_high_watermark_and_keeps_epoch(broker: Broker) -> None:
    hosted = broker.host(retention_ms=1000)
    append_values(hosted.log, *[2000] * 6, timestamp=NOW_MS - 1001, leader_epoch=4)
    await broker.keeper.flush()
    hosted.high_watermark = 4
    await broker.keeper.remove_old_segments()
    assert (hosted.log.log_start_offset, hosted.log.log_end_offset) == (4, 6)
    hosted.high_watermark = 6
    for start in (4, 6):
        await broker.keeper.remove_old_segments()
        assert (hosted.log.log_start_offset, hosted.log.log_end_offset) == (start, 6)
        await broker.keeper.flush()
    with reopened(hosted.log) as again:
        assert (again.log_start_offset, again.leader_epochs.entries()) == (6, [(4, 6)])


async def test_topic_options_may_change_while_hosted(broker: Broker) -> None:
    hosted = broker.host()
    append_values(hosted.log, *[2000] * 6)
    hosted.high_watermark = 6
    await broker.keeper.flush()
    await broker.keeper.remove_old_segments()
    assert hosted.log.log_start_offset == 0
    hosted.log.options = LogOptions(5000, retention_bytes=5000)
    await broker.keeper.remove_old_segments()
    assert hosted.log.log_start_offset == 2


async def test_full_disk_stops_no_round(broker: Broker, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 128 << 10) as small:
        broker.directory = small.path
        full = broker.host("full", retention_ms=1000)
        append_values(full.log, *[2000] * 4, timestamp=NOW_MS - 2000)
        full.high_watermark = 4
        small.fill()
        await broker.keeper.checkpoint()
        small.free()
        assert (full.log.high_watermark_checkpoint, full.log.failure, broker.failed) == (0, None, [])
        await broker.keeper.checkpoint()
        assert full.log.high_watermark_checkpoint == 4
        full.log.close()


async def test_keeper_runs_its_rounds_by_itself(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_maintenance, "CHECKPOINT_INTERVAL_S", 0.01)
    hosted = broker.host(retention_bytes=5000)
    running = asyncio.create_task(broker.keeper.run())
    append_values(hosted.log, *[2000] * 6)
    hosted.high_watermark = 6
    async with asyncio.timeout(60):
        while hosted.log.is_dirty or not hosted.log.log_start_offset or not hosted.log.high_watermark_checkpoint:
            assert not running.done()
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

"""The disk watch decides whether a fault affects one replica or all, and when the fault is over."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kproxy.broker.disk import probe_disk
from kproxy.broker.disk_threads import DiskThreads
from kproxy.broker.disk_watch import DiskWatch
from kproxy.broker.keys import PartitionKey
from kproxy.broker.log_maintenance import LogMaintenance
from kproxy.broker.partition import DiskTrouble, Unreadable
from tests.support.brokers.replica_group import Group
from tests.support.brokers.small_disk import small_disk

PATIENCE_S = 0.4
HANG_LIMIT_S = 30.0
KEY = PartitionKey("t", 0)


class Replica:
    trouble: DiskTrouble | None = None
    disk_fails = False

    def disk_trouble(self) -> DiskTrouble | None:
        return self.trouble


class Stage:
    """Two replicas, and a disk whose probe has the result that the test sets."""

    def __init__(self) -> None:
        self.one, self.other = Replica(), Replica()
        self.probes = 0
        self.error: OSError | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.mended = 0
        self.watch = DiskWatch(lambda: [self.one, self.other], self._probe, PATIENCE_S, self._on_mended)

    def _probe(self) -> None:
        self.probes += 1
        assert self.answers.wait(HANG_LIMIT_S)
        if self.error is not None:
            raise self.error

    def _on_mended(self) -> None:
        self.mended += 1

    @property
    def faults(self) -> list[str]:
        return [self.watch.fault_of(each) for each in (self.one, self.other)]

    async def look_until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(HANG_LIMIT_S):
            while not condition():
                self.watch.look()
                await asyncio.sleep(self.watch.interval_s / 4)

    async def look_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        await self.look_until(lambda: time.monotonic() > end)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.answers.set()
    stage.watch.close()


async def test_lasting_failure_is_fault_of_its_replica(stage: Stage) -> None:
    stage.one.trouble = DiskTrouble("a bad sector")
    stage.watch.look()
    assert stage.faults == ["", ""], "at once"
    await stage.look_until(lambda: stage.faults == ["a bad sector", ""])
    assert stage.probes > 0
    assert (stage.watch.failure, stage.watch.stands_back(KEY)) == ("", False)
    stage.one.trouble = None
    stage.watch.look()
    assert stage.faults == ["", ""]
    assert stage.mended == 1


async def test_long_series_of_flushes_is_no_fault(stage: Stage) -> None:
    async def flush() -> None:
        for number in range(1, 1000):
            stage.one.trouble = DiskTrouble("flush", number)
            await asyncio.sleep(0.01)

    flushing = asyncio.create_task(flush())
    await stage.look_for(2 * PATIENCE_S)
    flushing.cancel()
    assert stage.faults == ["", ""]
    assert (stage.probes, stage.mended) == (0, 0)


@pytest.mark.parametrize("hangs", [False, True])
async def test_failing_probe_is_fault_of_all_replicas(stage: Stage, hangs: bool) -> None:
    stage.error = OSError(errno.EIO, "Input/output error")
    if hangs:
        stage.answers.clear()
    stage.one.trouble = DiskTrouble("a write fails")
    await stage.look_until(lambda: all(stage.faults))
    assert stage.watch.stands_back(KEY)
    stage.one.trouble = None
    await stage.look_for(PATIENCE_S)
    assert all(stage.faults), "it is over when a probe says so"
    assert (stage.probes == 1) is hangs
    stage.error = None
    stage.answers.set()
    await stage.look_until(lambda: stage.faults == ["", ""])
    assert not stage.watch.stands_back(KEY)


async def test_broker_does_not_retake_abandoned_partition(stage: Stage) -> None:
    stage.watch.gave_up(KEY)
    assert stage.watch.stands_back(KEY)
    assert not stage.watch.stands_back(PartitionKey("t", 1))
    await stage.look_until(lambda: stage.probes)


async def test_replica_reopened_after_failed_read_is_followed_again(stage: Stage, tmp_path: Path) -> None:
    """Its fetcher had dropped it and never asked for it again, so it stayed out of the ISR."""
    group = Group(tmp_path)
    follower = group.replicas[2]
    follower.become_follower(1, group.leadership)
    follower.unreadable = Unreadable(0, 100)
    assert follower.next_fetch() is None
    keeper = LogMaintenance(lambda: [follower], flush_interval_s=1.0, retention_check_interval_s=1.0)
    for _ in range(3):
        await keeper.checkpoint()
    watch = DiskWatch(lambda: [follower], lambda: None, PATIENCE_S, stage._on_mended)
    watch.look()
    assert (stage.mended, follower.unreadable) == (1, None)
    assert follower.next_fetch() is not None
    watch.look()
    assert stage.mended == 1
    watch.close()
    keeper.close()
    group.close()


def test_probe_needs_room_for_largest_batch(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 512 << 10) as disk:
        disk.confine(0)
        with pytest.raises(OSError, match="the disk mounted at"):
            probe_disk(disk.path)
        assert list(disk.path.iterdir()) == []
        disk.free()
        probe_disk(disk.path)
        assert [path for path in disk.path.iterdir() if path.name != "filler"] == []


def test_hanging_work_keeps_no_more_threads_than_allowed() -> None:
    go_on = threading.Event()
    threads = DiskThreads(2, "hanging")
    before = threading.active_count()
    hanging = [threads.submit(go_on.wait, HANG_LIMIT_S) for _ in range(10)]
    assert threading.active_count() - before == 2
    threads.shutdown()
    assert sum(each.cancelled() for each in hanging) == 8
    go_on.set()
    assert [each.result(HANG_LIMIT_S) for each in hanging if not each.cancelled()] == [True, True]
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(int)

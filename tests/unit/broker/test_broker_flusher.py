"""Replicas that flush records to the disk (`--flush always`), with a disk whose speed the test sets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kproxy.broker.config import LogOptions
from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.log import Log
from kproxy.broker.partition import ACKS_ALL, AppendResult, Partition
from kproxy_codec import error_codes
from kproxy_codec.record_batch import parse_batch
from tests.support.brokers.replica_group import Fence, fetch_as_replica
from tests.support.wire.record_batches import build_batch
from tests.unit.broker.replicas import lead, replica
from tests.unit.broker.slow_disk import PATIENCE_S, SlowDisk

LEADER, FOLLOWER = 1, 2
OPTIONS = LogOptions(segment_bytes=1000, flush="always")


@pytest.fixture
def fence() -> Fence:
    return Fence()


def flushing(directory: Path, node_id: int) -> Partition:
    return replica(directory / str(node_id) / "t-0", node_id, segment_bytes=1000, flush="always")


@pytest.fixture
async def leader(tmp_path: Path, disk: SlowDisk, fence: Fence) -> AsyncIterator[Partition]:
    partition = lead(flushing(tmp_path, LEADER), epoch=3, fence=fence)
    yield partition
    disk.go_on()
    partition.close()


def append(partition: Partition, records: bytearray | None = None, acks: int = 1) -> AppendResult:
    view = memoryview(records or build_batch([b"v"]))
    return partition.append_as_leader(view, parse_batch(view), acks)


async def answered(waits: Awaitable[int]) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return await waits


def waits_for(partition: Partition, acks: int) -> Callable[[int, float], Awaitable[int]]:
    return partition.wait_for_isr if acks == ACKS_ALL else partition.wait_for_disk


@pytest.mark.parametrize("acks", [1, ACKS_ALL])
async def test_answer_waits_only_for_its_own_disk(leader: Partition, disk: SlowDisk, acks: int) -> None:
    disk.hang()
    result = append(leader, acks=acks)
    assert (result.error_code, result.last_offset) == (0, 0)
    answer = asyncio.ensure_future(waits_for(leader, acks)(0, PATIENCE_S))
    await disk.is_waited_for()
    again = append(leader, acks=acks)
    assert (again.base_offset, leader.log_end_offset) == (1, 2), "others go on"
    assert (leader.is_on_disk(0), leader.is_committed(0), leader.high_watermark) == (False, False, 0)
    assert leader.read(0, 1000).records == b"", "what is not on the disk is read"
    assert not answer.done()
    disk.go_on()
    assert await answered(answer) == error_codes.NONE
    assert leader.is_on_disk(0)
    assert await answered(waits_for(leader, acks)(1, PATIENCE_S)) == error_codes.NONE
    assert await answered(leader.wait_for_isr(1, PATIENCE_S)) == error_codes.NONE


async def test_all_waiters_share_two_flushes(leader: Partition, disk: SlowDisk) -> None:
    disk.hang()
    append(leader)
    await disk.is_waited_for()
    before = disk.syncs
    results = [append(leader) for _ in range(5)]
    segments = len(list(leader.log.directory.glob("*.log")))
    assert segments == 1
    answers = [asyncio.ensure_future(leader.wait_for_disk(each.last_offset, PATIENCE_S)) for each in results]
    disk.go_on()
    assert [await answered(answer) for answer in answers] == [error_codes.NONE] * 5
    assert disk.syncs - before == 2


async def test_segments_begin_while_the_disk_hangs(leader: Partition, disk: SlowDisk) -> None:
    disk.hang()
    for offset in range(5):
        assert append(leader, build_batch([b"x" * 900])).base_offset == offset
    answer = asyncio.ensure_future(leader.wait_for_disk(4, PATIENCE_S))
    await disk.is_waited_for()
    disk.go_on()
    assert await answered(answer) == error_codes.NONE
    assert len(list(leader.log.directory.glob("*.log"))) == 5
    assert (leader.log.flushed_offset, leader.log.is_dirty) == (5, False)


@pytest.mark.parametrize("acks", [1, ACKS_ALL])
async def test_batch_that_may_be_flushed_is_not_refused(leader: Partition, disk: SlowDisk, acks: int) -> None:
    """The batch is in the file, and is read again after a reopening: a resend would duplicate it."""
    disk.hang()
    results = [append(leader, acks=acks) for _ in range(3)]
    answers = [asyncio.ensure_future(waits_for(leader, acks)(each.last_offset, PATIENCE_S)) for each in results]
    disk.fails = True
    disk.go_on()
    assert [await answered(answer) for answer in answers] == [error_codes.REQUEST_TIMED_OUT] * 3
    assert append(leader).error_code == error_codes.KAFKA_STORAGE_ERROR, "of this one nothing was written"
    assert (leader.high_watermark, leader.log.flushed_offset) == (0, 0)
    leader.close()
    with contextlib.closing(Log.open(leader.log.directory)) as log:
        assert log.log_end_offset == 3


@pytest.mark.parametrize("acks", [1, ACKS_ALL])
async def test_slow_disk_exceeds_the_producers_timeout(leader: Partition, disk: SlowDisk, acks: int) -> None:
    disk.hang()
    append(leader, acks=acks)
    assert await answered(waits_for(leader, acks)(0, 0.05)) == error_codes.REQUEST_TIMED_OUT
    disk.go_on()
    assert await answered(waits_for(leader, acks)(0, PATIENCE_S)) == error_codes.NONE


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("acks", [1, ACKS_ALL])
async def test_broker_losing_lease_during_flush_stays_silent(
    leader: Partition, disk: SlowDisk, fence: Fence, acks: int, closed: bool
) -> None:
    disk.hang()
    append(leader, acks=acks)
    answer = asyncio.ensure_future(waits_for(leader, acks)(0, PATIENCE_S))
    await disk.is_waited_for()
    fence.live = False
    if closed:
        leader.close()
        assert await answered(answer) == error_codes.REQUEST_TIMED_OUT, "it waits for the disk"
    disk.go_on()
    assert await answered(answer) == error_codes.REQUEST_TIMED_OUT


async def test_resend_of_unflushed_batch_waits_too(leader: Partition, disk: SlowDisk) -> None:
    def batch() -> bytearray:
        return build_batch([b"v"], producer_id=1, producer_epoch=0, base_sequence=0)

    disk.hang()
    results = [append(leader, batch()) for _ in range(2)]
    assert results[0] == results[1] == (0, 0, None, 0)
    assert not leader.is_on_disk(results[1].last_offset)


async def test_write_under_dying_fence_is_undone(
    leader: Partition, disk: SlowDisk, fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.hang()
    append(leader)
    await disk.is_waited_for()
    lives = iter((True, False))
    with monkeypatch.context() as patch:
        patch.setattr(fence, "is_live", lambda: next(lives))
        assert append(leader, build_batch([b"slipped"])).error_code == error_codes.NOT_LEADER_OR_FOLLOWER
    assert leader.log_end_offset == 1
    assert append(leader, build_batch([b"other"])).base_offset == 1
    answer = asyncio.ensure_future(leader.wait_for_disk(1, PATIENCE_S))
    disk.go_on()
    assert await answered(answer) == error_codes.NONE


async def test_log_of_killed_broker_is_flushed_before_counting(tmp_path: Path, disk: SlowDisk) -> None:
    log = Log.open(tmp_path / "t-0", options=LogOptions())
    view = memoryview(build_batch([b"v"]))
    log.append(view, parse_batch(view))
    log.close()
    before = disk.syncs
    with contextlib.closing(Log.open(tmp_path / "t-0", options=OPTIONS)) as again:
        assert (disk.syncs, again.counted_end_offset) == (before + 1, 1)


# Followers


async def test_follower_fetches_only_after_its_flush(
    leader: Partition, tmp_path: Path, disk: SlowDisk, fence: Fence
) -> None:
    leader.close()
    leader = lead(flushing(tmp_path / "other", LEADER), LEADER, FOLLOWER, epoch=3, fence=fence)
    follower = flushing(tmp_path, FOLLOWER)
    follower.become_follower(LEADER, Leadership(3, 1))
    try:
        append(leader, acks=ACKS_ALL)
        assert await answered(leader.wait_for_disk(0, PATIENCE_S)) == error_codes.NONE
        asked = follower.next_fetch()
        assert asked is not None
        disk.hang()
        assert follower.take_fetched(asked, fetch_as_replica(leader, FOLLOWER, asked, 1 << 20))
        assert (follower.log_end_offset, follower.is_flushing, follower.next_fetch()) == (1, True, None)
        assert leader.high_watermark == 0, "it counts what the follower may lose"
        flushed = asyncio.Event()
        follower.when_flushed(flushed.set)
        disk.go_on()
        await asyncio.wait_for(flushed.wait(), PATIENCE_S)
        asked = follower.next_fetch()
        assert asked is not None
        assert (asked.fetch_offset, follower.is_flushing) == (1, False)
        fetch_as_replica(leader, FOLLOWER, asked, 1 << 20)
        assert leader.high_watermark == 1
    finally:
        follower.close()
        leader.close()


async def test_leader_with_slow_disk_does_not_count_itself(tmp_path: Path, disk: SlowDisk, fence: Fence) -> None:
    leader = lead(flushing(tmp_path, LEADER), LEADER, FOLLOWER, epoch=3, fence=fence)
    follower = flushing(tmp_path, FOLLOWER)
    follower.become_follower(LEADER, Leadership(3, 1))
    follower.log.options = LogOptions(flush="interval")
    try:
        disk.hang()
        append(leader, acks=ACKS_ALL)
        for _ in range(2):
            asked = follower.next_fetch()
            assert asked is not None
            assert follower.take_fetched(asked, fetch_as_replica(leader, FOLLOWER, asked, 1 << 20))
        assert (follower.log_end_offset, leader.replication.follower_progress()[FOLLOWER][0]) == (1, 1)
        assert leader.high_watermark == 0
        answer = asyncio.ensure_future(leader.wait_for_isr(0, PATIENCE_S))
        disk.go_on()
        assert await answered(answer) == error_codes.NONE
        assert leader.high_watermark == 1
    finally:
        follower.close()
        leader.close()


async def test_follower_with_failed_disk_fetches_nothing(tmp_path: Path, disk: SlowDisk, fence: Fence) -> None:
    leader = lead(flushing(tmp_path, LEADER), LEADER, FOLLOWER, epoch=3, fence=fence)
    follower = flushing(tmp_path, FOLLOWER)
    follower.become_follower(LEADER, Leadership(3, 1))
    try:
        append(leader)
        assert await answered(leader.wait_for_disk(0, PATIENCE_S)) == error_codes.NONE
        asked = follower.next_fetch()
        assert asked is not None
        disk.fails = True
        flushed = asyncio.Event()
        follower.when_flushed(flushed.set)
        assert follower.take_fetched(asked, fetch_as_replica(leader, FOLLOWER, asked, 1 << 20))
        await asyncio.wait_for(flushed.wait(), PATIENCE_S)
        assert (follower.next_fetch(), follower.is_flushing, follower.log.failure is None) == (None, False, False)
    finally:
        follower.close()
        leader.close()

"""A leader's partition with a real log: the effects of fence, role and producer state, and its answers' meaning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy.broker.partition import AppendResult, Partition
from kproxy.etcd.lease import MARGIN_FRACTION, LeaseFence
from kproxy_codec import error_codes
from kproxy_codec.record_batch import iterate_batches, parse_batch
from tests.support.wire.record_batches import build_batch
from tests.unit.broker.replicas import lead, replica

TTL_S = 10
LIVE_FOR_S = TTL_S * (1 - MARGIN_FRACTION)


class Clock:
    """Seconds as the test sets them; `steps` are added after each reading, to let time pass inside a call."""

    def __init__(self) -> None:
        self.now = 100.0
        self.steps: list[float] = []

    def __call__(self) -> float:
        now = self.now
        self.now += self.steps.pop(0) if self.steps else 0.0
        return now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fence(clock: Clock) -> LeaseFence:
    fence = LeaseFence(1, clock)
    fence.renew(clock.now, TTL_S)
    return fence


@pytest.fixture
def partition(tmp_path: Path, clock: Clock, fence: LeaseFence) -> Iterator[Partition]:
    partition = lead(replica(tmp_path / "t-0", clock=clock), epoch=7, fence=fence)
    yield partition
    partition.close()


def append(partition: Partition, records: bytearray | None = None) -> AppendResult:
    view = memoryview(records or build_batch([b"v"]))
    return partition.append_as_leader(view, parse_batch(view))


def test_append_gets_next_offset_and_leader_epoch(partition: Partition) -> None:
    assert [append(partition, build_batch([b"a", b"b"])).base_offset for _ in range(2)] == [0, 2]
    stored = list(iterate_batches(partition.read(0, 1 << 20).records))
    assert [(batch.base_offset, batch.partition_leader_epoch) for batch in stored] == [(0, 7), (2, 7)]
    assert (partition.high_watermark, partition.log_end_offset) == (4, 4)


def test_dead_fence_refuses_appends(partition: Partition, clock: Clock) -> None:
    clock.now += LIVE_FOR_S
    assert append(partition).error_code == error_codes.NOT_LEADER_OR_FOLLOWER
    assert not partition.serves_reads()
    assert partition.log_end_offset == 0


def test_write_under_dying_fence_is_undone(partition: Partition, clock: Clock, fence: LeaseFence) -> None:
    """The broker stops between the check and the write: nobody may read the written batch, and its offset is reused."""
    append(partition)
    sent = build_batch([b"slipped"], producer_id=3, producer_epoch=0, base_sequence=0)
    clock.steps = [LIVE_FOR_S]  # passes between the first and the second check
    assert append(partition, sent).error_code == error_codes.NOT_LEADER_OR_FOLLOWER
    assert (partition.log_end_offset, partition.high_watermark) == (1, 1)
    fence.renew(clock.now, TTL_S)
    again = append(partition, build_batch([b"slipped"], producer_id=3, producer_epoch=0, base_sequence=0))
    assert (again.error_code, again.base_offset) == (0, 1), "the refused write was remembered as written"


def test_resigned_partition_serves_reads_and_refuses_writes(partition: Partition) -> None:
    append(partition)
    partition.resign()
    assert append(partition).error_code == error_codes.NOT_LEADER_OR_FOLLOWER
    assert partition.serves_reads()
    assert len(partition.read(0, 100).records) > 0


def test_closed_partition_refuses_and_wakes_waiters(partition: Partition) -> None:
    woken: list[str] = []
    partition.add_waiter(lambda: woken.append("first"))
    partition.close()
    partition.close()
    assert woken == ["first"]
    assert append(partition).error_code == error_codes.NOT_LEADER_OR_FOLLOWER
    assert not partition.serves_reads()


def test_append_wakes_waiters_once_and_refusal_does_not(partition: Partition) -> None:
    woken: list[int] = []
    partition.add_waiter(lambda: woken.append(1))
    append(partition, build_batch([b"v"], producer_id=1, producer_epoch=0, base_sequence=0))
    append(partition)
    assert woken == [1]
    partition.add_waiter(lambda: woken.append(2))
    append(partition, build_batch([b"v"], producer_id=1, producer_epoch=0, base_sequence=9))
    assert woken == [1], "a gap is not news"


def test_idempotent_resend_gets_the_first_answer(partition: Partition) -> None:
    def batch() -> bytearray:
        return build_batch([b"v", b"w"], producer_id=1, producer_epoch=0, base_sequence=0)

    append(partition)
    assert append(partition, batch()) == (0, 1, None, 2)
    assert append(partition, batch()) == (0, 1, None, 2)
    assert partition.log_end_offset == 3


@pytest.mark.parametrize(
    ("offset", "error_code"),
    [(-1, error_codes.OFFSET_OUT_OF_RANGE), (0, 0), (1, 0), (2, error_codes.OFFSET_OUT_OF_RANGE)],
)
def test_reads_stay_within_the_log(partition: Partition, offset: int, error_code: int) -> None:
    append(partition)
    assert partition.read(offset, 100).error_code == error_code


@pytest.mark.parametrize(
    ("believed", "error_code"),
    [(-1, 0), (7, 0), (6, error_codes.FENCED_LEADER_EPOCH), (8, error_codes.UNKNOWN_LEADER_EPOCH)],
)
def test_leader_epochs_are_compared(partition: Partition, believed: int, error_code: int) -> None:
    assert partition.check_leader_epoch(believed) == error_code


# The fence


def test_fence_lives_from_send_time_of_keepalive(clock: Clock) -> None:
    fence = LeaseFence(1, clock)
    assert not fence.is_live(), "nothing was answered yet"
    sent_at = clock.now
    clock.now += 4
    fence.renew(sent_at, TTL_S)
    clock.now = sent_at + LIVE_FOR_S - 0.001
    assert fence.is_live()
    clock.now = sent_at + LIVE_FOR_S
    assert not fence.is_live()


def test_overtaken_answers_do_not_shorten_a_fence(clock: Clock) -> None:
    fence = LeaseFence(1, clock)
    fence.renew(clock.now, TTL_S)
    fence.renew(clock.now - 5, TTL_S)
    clock.now += LIVE_FOR_S - 0.001
    assert fence.is_live()


def test_broken_fence_stays_broken(clock: Clock) -> None:
    fence = LeaseFence(1, clock)
    fence.renew(clock.now, TTL_S)
    fence.break_for_good()
    fence.renew(clock.now, TTL_S)
    assert not fence.is_live()

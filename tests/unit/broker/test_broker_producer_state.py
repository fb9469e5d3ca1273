"""A broker recognizes resent, out-of-order and fenced batches of idempotent producers."""

from __future__ import annotations

import tracemalloc

import pytest
from structlog.testing import capture_logs

from kproxy.broker.producer_state import (
    BYTES_EACH,
    EXPIRATION_MS,
    GRACE_MS,
    HISTORY_COPIES,
    MAX_PRODUCERS,
    RETAINED_BATCHES,
    BatchVerdict,
    ProducerHistory,
    ProducerStates,
)
from kproxy_codec.record_batch import RecordBatch, parse_batch
from tests.support.wire.record_batches import build_batch


def batch(sequence: int, count: int = 1, *, epoch: int = 0, producer_id: int = 1) -> RecordBatch:
    values = [b"v"] * count
    return parse_batch(build_batch(values, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence))


def states_after(*written: RecordBatch) -> ProducerStates:
    states, offset = ProducerStates(), 100
    for each in written:
        assert states.judge(each).verdict is BatchVerdict.ACCEPTED
        states.update(each, offset)
        offset += each.record_count
    return states


@pytest.mark.parametrize(
    ("written", "next_batch", "verdict", "base_offset"),
    [
        pytest.param([], batch(0), BatchVerdict.ACCEPTED, -1, id="first batch"),
        pytest.param([], batch(17), BatchVerdict.ACCEPTED, -1, id="unknown producer may begin anywhere"),
        pytest.param([batch(0, 3)], batch(3), BatchVerdict.ACCEPTED, -1, id="next in order"),
        pytest.param([batch(0, 3)], batch(0, 3), BatchVerdict.DUPLICATE, 100, id="resend of the last"),
        pytest.param(
            [batch(n) for n in range(5)], batch(0), BatchVerdict.DUPLICATE, 100, id="resend of the fifth last"
        ),
        pytest.param(
            [batch(n) for n in range(6)], batch(0), BatchVerdict.OUT_OF_ORDER, -1, id="resend of the sixth last"
        ),
        pytest.param([batch(0, 3)], batch(0, 2), BatchVerdict.OUT_OF_ORDER, -1, id="same start, other end"),
        pytest.param([batch(0)], batch(2), BatchVerdict.OUT_OF_ORDER, -1, id="gap"),
        pytest.param([batch(0, epoch=1)], batch(1, epoch=0), BatchVerdict.FENCED, -1, id="older epoch"),
        pytest.param([batch(0, epoch=1)], batch(0, epoch=0), BatchVerdict.FENCED, -1, id="older epoch, same sequences"),
        pytest.param([batch(5)], batch(0, epoch=1), BatchVerdict.ACCEPTED, -1, id="new epoch begins at 0"),
        pytest.param([batch(5)], batch(6, epoch=1), BatchVerdict.OUT_OF_ORDER, -1, id="new epoch cannot go on"),
        pytest.param([batch(2**31 - 2, 2)], batch(0), BatchVerdict.ACCEPTED, -1, id="sequence wraps between batches"),
        pytest.param([batch(2**31 - 2, 4)], batch(2), BatchVerdict.ACCEPTED, -1, id="sequence wraps inside a batch"),
        pytest.param(
            [batch(2**31 - 2, 4)], batch(2**31 - 2, 4), BatchVerdict.DUPLICATE, 100, id="resend across the wrap"
        ),
        pytest.param(
            [batch(0), batch(0, producer_id=2)], batch(1), BatchVerdict.ACCEPTED, -1, id="producers are separate"
        ),
    ],
)
def test_next_batch_gets_the_expected_verdict(
    written: list[RecordBatch], next_batch: RecordBatch, verdict: BatchVerdict, base_offset: int
) -> None:
    judgement = states_after(*written).judge(next_batch)
    assert (judgement.verdict, judgement.base_offset) == (verdict, base_offset)


def test_batches_without_a_producer_id_are_always_accepted() -> None:
    plain = parse_batch(build_batch())
    assert states_after(plain, plain).judge(plain).verdict is BatchVerdict.ACCEPTED
    assert len(states_after(plain)) == 0


def test_least_recent_producer_is_forgotten_first() -> None:
    states = ProducerStates(max_producers=2)
    states.update(batch(0, producer_id=1), 0)
    states.update(batch(0, producer_id=2), 1)
    states.update(batch(1, producer_id=1), 2)
    states.update(batch(0, producer_id=3), 3)
    assert len(states) == 2
    assert states.judge(batch(1, producer_id=1)).verdict is BatchVerdict.DUPLICATE
    assert states.judge(batch(0, producer_id=2)).verdict is BatchVerdict.ACCEPTED, "2 was kept, 1 dropped"


class Clock:
    """Wall time in milliseconds."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now


def remembered(states: ProducerStates, producer_id: int) -> bool:
    return states.judge(batch(0, producer_id=producer_id)).verdict is BatchVerdict.DUPLICATE


def test_producer_idle_for_a_day_expires_on_writes() -> None:
    """It expires by the time of its last append; the producer's timestamps do not count."""
    clock = Clock()
    states = ProducerStates(clock=clock)
    states.update(batch(0, producer_id=1), 0)
    clock.now += EXPIRATION_MS - 1
    states.update(batch(0, producer_id=2), 1)
    assert (remembered(states, 1), states.expired) == (True, 0)
    clock.now += 1
    states.update(batch(1, producer_id=2), 2)
    assert (len(states), remembered(states, 1), states.expired, states.evicted) == (1, False, 1, 0)
    assert states.judge(batch(1, producer_id=2)).verdict is BatchVerdict.DUPLICATE


def test_producer_read_from_a_log_expires_by_timestamp() -> None:
    """A resend may follow a restart or a new leader at once, whatever timestamps its producer chooses."""
    clock = Clock()
    states = ProducerStates(clock=clock)
    old, ahead, none = clock.now - 2 * EXPIRATION_MS, clock.now + 9 * EXPIRATION_MS, -1
    for producer_id, written_ms in enumerate((old, ahead, none), start=1):
        states.update(batch(0, producer_id=producer_id), producer_id, written_ms)
    clock.now += GRACE_MS - 1
    states.update(batch(0, producer_id=4), 4)
    assert remembered(states, 1)
    clock.now += 1
    states.update(batch(1, producer_id=4), 5)
    assert [remembered(states, producer_id) for producer_id in (1, 2, 3)] == [False, True, True]
    # A batch with a future timestamp is dated by the time when it was read.
    clock.now += EXPIRATION_MS - GRACE_MS
    states.update(batch(2, producer_id=4), 6)
    assert (len(states), states.expired, states.evicted) == (1, 3, 0)


def test_simultaneously_expiring_producers_are_forgotten_gradually() -> None:
    clock = Clock()
    states = ProducerStates(clock=clock)
    for producer_id in range(1, 1001):
        states.update(batch(0, producer_id=producer_id), producer_id)
    clock.now += EXPIRATION_MS
    sizes = []
    for sequence in range(200):
        states.update(batch(sequence, producer_id=9999), 2000 + sequence)
        sizes.append(len(states))
    assert (sizes[0], sizes[-1], states.expired) == (1001 - 8, 1, 1000)


def test_excess_producers_are_counted_and_logged() -> None:
    clock = Clock()
    states = ProducerStates(max_producers=2, clock=clock)
    with capture_logs() as logs:
        for producer_id in range(1, 8):
            states.update(batch(0, producer_id=producer_id), producer_id)
    assert (len(states), states.evicted, states.expired) == (2, 5, 0)
    assert [line["evicted"] for line in logs] == [1, 2, 4], "not a line for each"
    # An old log holds batches of many producers, most of which stopped long ago.
    read = ProducerStates(max_producers=2, clock=clock)
    for producer_id in range(1, 8):
        read.update(batch(0, producer_id=producer_id), producer_id, clock.now - EXPIRATION_MS)
    assert (len(read), read.evicted, read.expired) == (2, 0, 5)


def test_copy_changes_independently() -> None:
    states = states_after(batch(0), batch(1))
    copied = states.copy()
    states.update(batch(2), 102)
    assert copied.judge(batch(2)).verdict is BatchVerdict.ACCEPTED
    copied.update(batch(0, epoch=1), 102)
    assert states.judge(batch(2)).verdict is BatchVerdict.DUPLICATE


def test_hundred_thousand_producers_fit_their_memory() -> None:
    """The bound was 5,000: with more writers there were duplicates, without any report."""
    count = 20_000
    states, history = ProducerStates(), ProducerHistory()
    five = [batch(sequence) for sequence in range(RETAINED_BATCHES)]
    tracemalloc.start()
    try:
        for producer_id in range(count):
            for sequence, each in enumerate(five):
                states.update(each._replace(producer_id=producer_id + (1 << 40)), (1 << 40) + sequence)
        for offset in range(HISTORY_COPIES):
            history.note_batch(offset, 1 << 40, states)
        bytes_each = tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()
    assert (len(states), states.evicted) == (count, 0)
    assert bytes_each < BYTES_EACH
    assert MAX_PRODUCERS > 100_000
    assert states.judge(five[0]._replace(producer_id=1 << 40)).verdict is BatchVerdict.DUPLICATE
    print(f"{bytes_each:.0f} bytes for each producer, {HISTORY_COPIES} copies included")

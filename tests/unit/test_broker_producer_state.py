"""Idempotent producers: what is a resend, what is a gap, what is fenced."""

from __future__ import annotations

import pytest

from codec.record_batch import RecordBatch, parse_batch
from kproxy.broker.producer_state import ProducerStates, Verdict
from tests.support.record_batches import build_batch


def batch(sequence: int, count: int = 1, *, epoch: int = 0, producer_id: int = 1) -> RecordBatch:
    values = [b"v"] * count
    return parse_batch(build_batch(values, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence))


def states_after(*written: RecordBatch) -> ProducerStates:
    states, offset = ProducerStates(), 100
    for each in written:
        assert states.judge(each).verdict is Verdict.ACCEPTED
        states.update(each, offset)
        offset += each.record_count
    return states


@pytest.mark.parametrize(
    ("written", "next_batch", "verdict", "base_offset"),
    [
        pytest.param([], batch(0), Verdict.ACCEPTED, -1, id="first batch"),
        pytest.param([], batch(17), Verdict.ACCEPTED, -1, id="unknown producer may begin anywhere"),
        pytest.param([batch(0, 3)], batch(3), Verdict.ACCEPTED, -1, id="next in order"),
        pytest.param([batch(0, 3)], batch(0, 3), Verdict.DUPLICATE, 100, id="resend of the last"),
        pytest.param([batch(n) for n in range(5)], batch(0), Verdict.DUPLICATE, 100, id="resend of the fifth last"),
        pytest.param([batch(n) for n in range(6)], batch(0), Verdict.OUT_OF_ORDER, -1, id="resend of the sixth last"),
        pytest.param([batch(0, 3)], batch(0, 2), Verdict.OUT_OF_ORDER, -1, id="same start, other end"),
        pytest.param([batch(0)], batch(2), Verdict.OUT_OF_ORDER, -1, id="gap"),
        pytest.param([batch(0, epoch=1)], batch(1, epoch=0), Verdict.FENCED, -1, id="older epoch"),
        pytest.param([batch(0, epoch=1)], batch(0, epoch=0), Verdict.FENCED, -1, id="older epoch, same sequences"),
        pytest.param([batch(5)], batch(0, epoch=1), Verdict.ACCEPTED, -1, id="new epoch begins at 0"),
        pytest.param([batch(5)], batch(6, epoch=1), Verdict.OUT_OF_ORDER, -1, id="new epoch cannot go on"),
        pytest.param([batch(2**31 - 2, 2)], batch(0), Verdict.ACCEPTED, -1, id="sequence wraps between batches"),
        pytest.param([batch(2**31 - 2, 4)], batch(2), Verdict.ACCEPTED, -1, id="sequence wraps inside a batch"),
        pytest.param([batch(2**31 - 2, 4)], batch(2**31 - 2, 4), Verdict.DUPLICATE, 100, id="resend across the wrap"),
        pytest.param([batch(0), batch(0, producer_id=2)], batch(1), Verdict.ACCEPTED, -1, id="producers are separate"),
    ],
)
def test_verdicts(written: list[RecordBatch], next_batch: RecordBatch, verdict: Verdict, base_offset: int) -> None:
    judgement = states_after(*written).judge(next_batch)
    assert (judgement.verdict, judgement.base_offset) == (verdict, base_offset)


def test_batches_without_a_producer_id_are_always_accepted() -> None:
    plain = parse_batch(build_batch())
    assert states_after(plain, plain).judge(plain).verdict is Verdict.ACCEPTED
    assert len(states_after(plain)) == 0


def test_the_producer_that_wrote_longest_ago_is_forgotten_first() -> None:
    states = ProducerStates(max_producers=2)
    states.update(batch(0, producer_id=1), 0)
    states.update(batch(0, producer_id=2), 1)
    states.update(batch(1, producer_id=1), 2)
    states.update(batch(0, producer_id=3), 3)
    assert len(states) == 2
    assert states.judge(batch(1, producer_id=1)).verdict is Verdict.DUPLICATE
    assert states.judge(batch(0, producer_id=2)).verdict is Verdict.ACCEPTED, "2 was kept, 1 dropped"

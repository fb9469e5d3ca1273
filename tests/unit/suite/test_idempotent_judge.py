"""How the log of an idempotent writer is judged: see tests/support/clients/idempotent_writers.py."""

from __future__ import annotations

from itertools import count

import pytest

from kproxy_codec.record_batch import assign_offsets, iterate_batches
from tests.support.clients.idempotent_writers import judge
from tests.support.wire.record_batches import build_batch

TOLD = dict(enumerate(range(6)))
Batches = list[tuple[int, range]]


def log_of(batches: Batches) -> bytes:
    """A log of batches, each with an epoch and numbers."""
    log, end = bytearray(), 0
    sequences: dict[int, count[int]] = {}
    for epoch, numbers in batches:
        values = [b"%d" % number for number in numbers]
        sequence = next(sequences.setdefault(epoch, count()))
        records = build_batch(values, producer_id=1, producer_epoch=epoch, base_sequence=sequence)
        (header,) = iterate_batches(records)
        assign_offsets(records, header, end, 0)
        log += records
        end += len(values)
    return bytes(log)


@pytest.mark.parametrize(
    ("batches", "may_repeat"),
    [
        pytest.param([(0, range(5))], True, id="the last is lost"),
        pytest.param([(0, range(1, 6))], True, id="the first is lost"),
        pytest.param([(0, range(2)), (0, range(3, 6))], True, id="one is lost"),
        pytest.param([(0, range(2)), (1, range(3, 6))], True, id="one is lost at a new epoch"),
        pytest.param([(0, range(6)), (1, range(3, 5))], True, id="the last does not come again"),
        pytest.param([(0, range(7))], True, id="one too many"),
        pytest.param([(0, range(3)), (0, range(2, 6))], True, id="twice in an epoch"),
        pytest.param([(0, range(3)), (1, range(2, 6))], False, id="twice in two epochs"),
        pytest.param([(0, range(3)), (1, range(1, 5)), (1, range(4, 6))], True, id="twice in a new epoch"),
        pytest.param([(1, range(3)), (0, range(3, 6))], True, id="an epoch goes back"),
        pytest.param([(0, range(2, 4)), (0, range(2)), (0, range(4, 6))], True, id="reordered"),
    ],
)
def test_judge_rejects_a_wrong_log(batches: Batches, may_repeat: bool) -> None:
    with pytest.raises(AssertionError, match="6 acknowledged"):
        judge(log_of(batches), dict.fromkeys(TOLD), may_repeat=may_repeat)


@pytest.mark.parametrize(("told", "is_right"), [(2, True), (4, True), (None, True), (3, False)])
def test_either_offset_of_a_duplicate_is_accepted(told: int | None, is_right: bool) -> None:
    log = log_of([(0, range(4)), (1, range(2, 6))])
    offsets = {**dict.fromkeys(TOLD), 2: told}
    if is_right:
        assert judge(log, offsets, may_repeat=True) == 2
        return
    with pytest.raises(AssertionError, match="told other offsets"):
        judge(log, offsets, may_repeat=True)

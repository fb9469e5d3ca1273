"""Refused batches put later batches of their lane out of order, until their client sends them again."""

from __future__ import annotations

import pytest

from kproxy.routing.refused import Place, Refused

LAST = (1 << 31) - 1
MAX_LANES = 4_096


def test_sequences_begin_again_behind_the_last() -> None:
    assert Place(7, 0, 0).is_behind(Place(7, 0, LAST))
    assert not Place(7, 0, LAST).is_behind(Place(7, 0, 0))


def test_nearer_half_of_sequences_follows() -> None:
    for first in (0, 5, LAST):
        for distance, is_behind in ((0, False), (1, True), (LAST >> 1, True), ((LAST >> 1) + 1, False), (LAST, False)):
            sequence = (first + distance) & LAST
            assert Place(7, 0, sequence).is_behind(Place(7, 0, first)) is is_behind, (first, distance)


@pytest.mark.parametrize("order", [(5, 6, 7), (7, 6, 5), (6, 7, 5)])
def test_batches_behind_refused_first_are_misled_in_order(order: tuple[int, ...]) -> None:
    refused = Refused()
    for sequence in order:
        refused.note("a", Place(7, 0, sequence))
    assert [each for each in range(4, 10) if refused.misleads("a", Place(7, 0, each))] == [6, 7, 8, 9]


@pytest.mark.parametrize(
    ("place", "misled"),
    [
        (Place(7, 0, 8), True),
        (Place(7, 0, 7), False),
        (Place(7, 0, 5), False),
        (Place(7, 0, 4), False),
        (Place(7, 1, 8), False),
    ],
    ids=["what follows", "the last again", "the first again", "what was before", "another epoch"],
)
def test_resent_batch_ends_the_misleading(place: Place, misled: bool) -> None:
    refused = Refused()
    for sequence in (5, 7):
        refused.note("a", Place(7, 0, sequence))
    refused.arrived("a", place)
    assert refused.misleads("a", Place(7, 0, 9)) is misled


def test_last_refused_of_several_epochs_counts() -> None:
    refused = Refused()
    refused.note("a", Place(7, 0, 5))
    refused.note("a", Place(7, 1, 0))
    assert not refused.misleads("a", Place(7, 0, 6))
    assert refused.misleads("a", Place(7, 1, 1))


def test_latest_lanes_are_remembered() -> None:
    refused = Refused()
    for lane in range(MAX_LANES):
        refused.note(lane, Place(7, 0, 5))
    refused.note(0, Place(7, 0, 5))
    refused.note("one more", Place(7, 0, 5))
    known = [lane for lane in (*range(MAX_LANES), "one more") if refused.misleads(lane, Place(7, 0, 6))]
    assert known == [0, *range(2, MAX_LANES), "one more"]

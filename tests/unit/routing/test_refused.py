"""Batches behind a refused one of their lane are refused until their client sends the refused ones again."""

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


def is_refused(refused: Refused, place: Place) -> bool:
    return "a" in refused.lanes and refused.arrived("a", place)


@pytest.mark.parametrize("order", [(5, 6, 7), (7, 6, 5), (6, 7, 5)])
def test_batches_behind_last_refused_come_too_early(order: tuple[int, ...]) -> None:
    refused = Refused()
    for sequence in order:
        refused.note("a", Place(7, 0, sequence))
    assert [each for each in (9, 8, 7, 8) if is_refused(refused, Place(7, 0, each))] == [9, 8]


@pytest.mark.parametrize(
    ("place", "is_early"),
    [
        (Place(7, 0, 8), True),
        (Place(7, 0, 7), False),
        (Place(7, 0, 5), False),
        (Place(7, 0, 4), False),
        (Place(7, 1, 8), False),
    ],
    ids=["what follows", "the last again", "the first again", "what was before", "another epoch"],
)
def test_resent_batch_lets_later_ones_pass(place: Place, is_early: bool) -> None:
    refused = Refused()
    for sequence in (5, 7):
        refused.note("a", Place(7, 0, sequence))
    assert is_refused(refused, place) is is_early
    assert is_refused(refused, Place(7, 0, 9)) is is_early


def test_last_refused_of_several_epochs_counts() -> None:
    refused = Refused()
    refused.note("a", Place(7, 0, 5))
    refused.note("a", Place(7, 1, 0))
    assert is_refused(refused, Place(7, 1, 1))
    assert not is_refused(refused, Place(7, 0, 6))


def test_latest_lanes_are_remembered() -> None:
    refused = Refused()
    for lane in range(MAX_LANES):
        refused.note(lane, Place(7, 0, 5))
    refused.note(0, Place(7, 0, 5))
    refused.note("one more", Place(7, 0, 5))
    assert list(refused.lanes) == [*range(2, MAX_LANES), 0, "one more"]

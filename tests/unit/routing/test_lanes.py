"""Lanes without the core, for rules that messages cannot distinguish."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kproxy.routing.lanes import Item, Lanes, Pause, Release
from kproxy.routing.merge import Exchange
from kproxy_codec.produce import PRODUCE_API
from tests.support.wire.messages import PRODUCE, head_of, request_body, request_frame, sample_request

KEY = (b"t", 0)
ID = (bytes(16), 0)


def item(sequence: int) -> Item:
    frame = request_frame(PRODUCE, 9, request_body(PRODUCE, 9, sample_request(PRODUCE, {"t": [0]})))
    request = PRODUCE_API.parse_request(frame, head_of(frame))
    return Item(Exchange(PRODUCE_API, request, sequence, 10.0), (0, 0), 6)


@pytest.mark.parametrize(
    ("earlier_waits", "appended", "sent"),
    [
        pytest.param(True, True, False, id="an earlier one, behind an appended one"),
        pytest.param(True, False, True, id="an earlier one, behind one that was refused for good"),
        pytest.param(False, True, True, id="a later one"),
    ],
)
def test_batch_waiting_before_appended_one_is_not_sent(earlier_waits: bool, appended: bool, sent: bool) -> None:
    lanes = Lanes()
    lanes.probe(KEY, 2)
    waiting = item(1 if earlier_waits else 3)
    lanes.refused(KEY, waiting, Pause(0.0, 0.0, 0), ())
    release = lanes.settled(KEY, 2, appended=appended, given_up=False)
    assert release == (([waiting], []) if sent else ([], [waiting]))
    assert len(lanes) == 0


def test_lane_has_one_timer_entry_for_each_time() -> None:
    """Even if it changes often, because many requests may queue behind a waiting one."""
    lanes = Lanes()
    lanes.refused(KEY, item(1), Pause(9.0, 4.0, 0), [2, 3])
    for sequence in (2, 3):
        lanes.refused(KEY, item(sequence), None, ())
        lanes.queue(KEY, item(10 + sequence))
        lanes.drop(lambda exchange: False)
    assert [due for due, *_ in lanes._by_due] == [9.0]
    lanes.hasten(lambda *_: True)
    lanes.drop(lambda exchange: False)
    assert sorted(due for due, *_ in lanes._by_due) == [4.0, 9.0]
    assert lanes.next_due() == 4.0


def both(named: Callable[[Lanes], None], by_id: Callable[[Lanes], None]) -> Lanes:
    """The lane of a topic's name, after the lane of its id was merged into it."""
    lanes = Lanes()
    lanes.block(KEY, [90])
    named(lanes)
    lanes.block(ID, [91])
    by_id(lanes)
    lanes.rename(ID, KEY)
    assert list(lanes.table) == [KEY]
    return lanes


def answered(lanes: Lanes, *sequences: int) -> list[Release]:
    return [lanes.settled(KEY, each, appended=False, given_up=False) for each in sequences]


def test_merged_lanes_wait_for_requests_of_both() -> None:
    lanes = both(lambda lanes: lanes.queue(KEY, item(92)), lambda lanes: lanes.queue(ID, item(93)))
    for sequence in (90, 91):
        assert lanes.next_due() is None
        answered(lanes, sequence)
    assert lanes.next_due() is not None
    assert [each.exchange.sequence for each in lanes.ready(0.0, 9)] == [92]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_first_batch_of_either_lane_is_awaited(order: tuple[int, int]) -> None:
    lanes = Lanes()
    lanes.probe(KEY, 2)
    lanes.probe(ID, 1)
    lanes.queue(ID, item(3))
    lanes.rename(ID, KEY)
    assert not lanes.is_probing(KEY, 1)
    assert not lanes.is_probing(KEY, 2)
    answered(lanes, order[0])
    assert lanes.next_due() is None
    answered(lanes, order[1])
    assert lanes.next_due() is not None


@pytest.mark.parametrize("later", [KEY, ID])
def test_merged_lanes_waiting_for_time_take_the_later(later: tuple[bytes, int]) -> None:
    lanes = Lanes()
    for sequence, key in enumerate((KEY, ID), 1):
        due = 9.0 if key == later else 8.0
        lanes.refused(key, item(sequence), Pause(due, due, 0), ())
    lanes.rename(ID, KEY)
    assert lanes.next_due() == 9.0
    assert [each.exchange.sequence for each in lanes.ready(9.0, 9)] == [1]


@pytest.mark.parametrize("later", [KEY, ID])
def test_merged_lanes_end_early_at_later_time(later: tuple[bytes, int]) -> None:
    def refuse(lanes: Lanes, key: tuple[bytes, int], sequence: int) -> None:
        pause = Pause(9.0, 4.0, 7) if key == later else Pause(8.0, 3.0, 6)
        lanes.refused(key, item(sequence), pause, ())

    lanes = both(lambda lanes: refuse(lanes, KEY, 92), lambda lanes: refuse(lanes, ID, 93))
    answered(lanes, 90, 91)
    assert lanes.next_due() == 9.0
    lanes.hasten(lambda item, routed_at: routed_at == 7)
    assert lanes.next_due() == 4.0


def give_up(lanes: Lanes, key: tuple[bytes, int], sequence: int, up_to: int) -> None:
    assert lanes.give_up(key, sequence, up_to, ()) == []


def test_merged_lanes_remember_abandoned_batches_of_both() -> None:
    lanes = both(lambda lanes: give_up(lanes, KEY, 5, 7), lambda lanes: give_up(lanes, ID, 3, 6))
    assert [lanes.is_given_up(KEY, sequence) for sequence in range(2, 9)] == [
        False,
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    quiet = both(lambda lanes: give_up(lanes, KEY, 5, 7), lambda lanes: None)
    assert [sequence for sequence in range(10) if quiet.is_given_up(KEY, sequence)] == [6, 7]


def test_batch_behind_other_lanes_abandoned_is_given_up() -> None:
    lanes = Lanes()
    lanes.block(KEY, [90])
    give_up(lanes, KEY, 91, 93)
    lanes.block(ID, [89])
    for sequence in (91, 92, 93, 94):
        lanes.queue(ID, item(sequence))
    assert [each.exchange.sequence for each in lanes.rename(ID, KEY)] == [92, 93]
    answered(lanes, 89, 90)
    assert [each.exchange.sequence for each in lanes.ready(0.0, 9)] == [91]


def test_merged_empty_lanes_are_removed() -> None:
    lanes = both(lambda lanes: None, lambda lanes: None)
    answered(lanes, 90, 91)
    assert len(lanes) == 0

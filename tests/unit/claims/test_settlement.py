"""A partition becomes unsettled by a lost write or a dead member, and settles by an answer or in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kproxy.claims.inflight_writes import ALL, EVERYTHING, MAX_PARTITIONS, InflightWrites, LastWrites, Place, covers
from kproxy_codec.own import WHOLE_GROUP

PATIENCE_S = 60.0
A, B = ("t", 0), ("t", 1)


class Situation:
    """Unsettled writes, their clock, and what they reported after each change."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.unsettled = InflightWrites({"t": "writers", "u": "others"}, lambda: self.now, unsettled_s=PATIENCE_S)
        self.told: list[list[Place]] = []
        self.unsettled.on_change = lambda: self.told.append(self.unsettled.places())

    def after(self, seconds: float) -> list[Place]:
        self.now += seconds
        self.unsettled.expire()
        return self.unsettled.places()


@pytest.fixture
def situation() -> Situation:
    return Situation()


def lose(unsettled: InflightWrites) -> None:
    unsettled.note_written_lost(*A)


def begin(unsettled: InflightWrites) -> None:
    unsettled.begin(*A)


def die(unsettled: InflightWrites) -> None:
    unsettled.note_member_gone("m", [("writers", "t/0")])


def die_before_saying_so(unsettled: InflightWrites) -> None:
    unsettled.note_member("m", 7, [A])
    unsettled.note_member_gone("m", [])


def die_before_seeing_it(unsettled: InflightWrites) -> None:
    unsettled.note_member("m", 7, [])
    unsettled.note_taken("m", "writers", "t/0", 8)
    unsettled.note_member("m", 7, [])
    unsettled.note_member_gone("m", [])


def restore(unsettled: InflightWrites) -> None:
    unsettled.note_member("m", 7, [A])
    unsettled.note_restored()


@pytest.mark.parametrize("event", [lose, begin, die, die_before_saying_so, die_before_seeing_it, restore])
def test_partition_is_unsettled_only_for_its_time(
    situation: Situation, event: Callable[[InflightWrites], None]
) -> None:
    event(situation.unsettled)
    assert situation.unsettled.places() == [A]
    assert situation.after(PATIENCE_S - 1) == [A]
    assert situation.after(2) == []
    assert situation.told == [[A], []]
    assert situation.after(PATIENCE_S) == []
    assert len(situation.told) == 2


def test_answered_write_settles_at_once(situation: Situation) -> None:
    hold = situation.unsettled.begin(*A)
    situation.unsettled.begin(*B)
    situation.unsettled.done(hold)
    assert situation.unsettled.places() == [B]
    assert situation.told == [[A], [A, B], [B]]


def test_partition_is_held_until_the_last_answer(situation: Situation) -> None:
    first, second = situation.unsettled.begin(*A), situation.unsettled.begin(*A)
    situation.unsettled.done(first)
    situation.unsettled.done(first)
    assert situation.unsettled.places() == [A]
    situation.unsettled.done(second)
    assert situation.unsettled.places() == []
    assert situation.told == [[A], []]


def test_answer_does_not_settle_a_lost_write(situation: Situation) -> None:
    """The batch was sent again, and its first copy may arrive after the answer."""
    hold = situation.unsettled.begin(*A)
    situation.unsettled.note_written_lost(*A)
    situation.unsettled.done(hold)
    assert situation.unsettled.places() == [A]
    assert situation.after(PATIENCE_S) == []


def test_time_counts_from_the_last_event(situation: Situation) -> None:
    situation.unsettled.note_written_lost(*A)
    situation.after(40)
    situation.unsettled.note_written_lost(*A)
    assert situation.after(40) == [A]
    assert situation.after(20) == []
    assert situation.told == [[A], []]


def test_answer_after_its_time_changes_nothing(situation: Situation) -> None:
    late = situation.unsettled.begin(*A)
    situation.after(PATIENCE_S)
    hold = situation.unsettled.begin(*A)
    situation.unsettled.done(late)
    assert situation.unsettled.places() == [A]
    situation.unsettled.done(hold)
    assert situation.unsettled.places() == []


def test_partition_lost_again_before_expiry_stays_unsettled(situation: Situation) -> None:
    situation.unsettled.note_written_lost(*A)
    situation.now += PATIENCE_S
    situation.unsettled.note_written_lost(*A)
    assert situation.after(0) == [A]


def test_member_that_confirmed_leaves_nothing_behind(situation: Situation) -> None:
    unsettled = situation.unsettled
    unsettled.note_member("m", 7, [A])
    unsettled.note_taken("m", "writers", "t/1", 8)
    unsettled.note_member("m", 8, [])
    unsettled.note_member_gone("m", [])
    assert situation.told == []


def test_resource_of_dead_member_is_unsettled_only_once(situation: Situation) -> None:
    unsettled = situation.unsettled
    unsettled.note_member("m", 7, [])
    unsettled.note_member_gone("m", [("writers", "t/0")])
    situation.after(PATIENCE_S)
    unsettled.note_taken("m", "writers", "t/0", 9)
    unsettled.note_member_gone("m", [])
    assert unsettled.places() == []


@pytest.mark.parametrize(
    ("listed", "place", "covered"),
    [
        ([], A, False),
        ([A], A, True),
        ([A], B, False),
        ([A], ("u", 0), False),
        ([("t", ALL)], A, True),
        ([("u", ALL)], A, False),
        ([EVERYTHING], A, True),
        # A claim of a whole group claims every partition of its topics.
        ([A], ("t", ALL), True),
        ([A], ("u", ALL), False),
        ([EVERYTHING], ("u", ALL), True),
    ],
)
def test_listed_partition_blocks_claims_that_cover_it(listed: list[Place], place: Place, covered: bool) -> None:
    assert covers(listed, *place) is covered


@pytest.mark.parametrize(
    ("group", "resource", "places"),
    [
        ("writers", "t/0", [A]),
        ("writers", WHOLE_GROUP, [("t", ALL)]),
        ("others", "t/0", []),
        ("others", WHOLE_GROUP, [("u", ALL)]),
        ("readers", "t/0", []),
        ("readers", WHOLE_GROUP, []),
        ("writers", "t", []),
        ("writers", "t/01", []),
        ("writers", "v/0", []),
    ],
)
def test_claim_covers_partitions_only_its_group_writes(
    situation: Situation, group: str, resource: str, places: list[Place]
) -> None:
    unsettled = situation.unsettled
    assert unsettled.places_of(group, resource) == places
    unsettled.note_member_gone("m", [(group, resource)])
    assert unsettled.places() == places
    assert unsettled.blocks(group, resource, unsettled.places()) is bool(places)
    assert not unsettled.blocks(group, resource, [("elsewhere", 0)])


def test_writes_beyond_the_bound_unsettle_more(situation: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    unsettled, most = situation.unsettled, 100
    # Every change goes to all places; with the product's bound the test would take half a minute.
    monkeypatch.setattr("kproxy.claims.inflight_writes.MAX_PARTITIONS", most)
    places = [(f"topic-{number}", index) for number in range(2 * most) for index in (0, 1)]
    holds = [unsettled.begin(*place) for place in places]
    listed = unsettled.places()
    assert len(listed) == 2 * most + 1
    assert all(covers(listed, *place) for place in places)
    for hold in holds:
        unsettled.done(hold)
    assert unsettled.places() == []


def test_topic_of_many_partitions_is_unsettled_whole(situation: Situation) -> None:
    unsettled = situation.unsettled
    unsettled.note_member_gone("m", [("writers", f"t/{index}") for index in range(3 * MAX_PARTITIONS)])
    listed = unsettled.places()
    assert len(listed) == MAX_PARTITIONS + 1
    assert covers(listed, "t", 2 * MAX_PARTITIONS)
    assert not covers(listed, "u", 0)


def test_many_resources_taken_from_member_are_remembered(situation: Situation) -> None:
    unsettled = situation.unsettled
    unsettled.note_member("m", 7, [])
    for index in range(2 * MAX_PARTITIONS):
        unsettled.note_taken("m", "writers", f"t/{index}", 8 + index)
    unsettled.note_member("m", 7 + 2 * MAX_PARTITIONS - 1, [])
    unsettled.note_member_gone("m", [])
    assert covers(unsettled.places(), "t", 2 * MAX_PARTITIONS - 1)


async def test_end_of_connection_waits_for_last_write() -> None:
    last_writes = LastWrites(InflightWrites({"t": "g"}, lambda: 0.0, unsettled_s=10.0))
    last_writes.hold(1, [(b"t", 0)])
    last_writes.let_go(1)
    last_writes.hold(2, [(b"t", 0)])
    waiting = asyncio.create_task(last_writes.wait(60.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    last_writes.let_go(2)
    await asyncio.wait_for(waiting, 60.0)


async def test_hurried_end_of_connection_waits_for_no_write() -> None:
    last_writes = LastWrites(InflightWrites({"t": "g"}, lambda: 0.0, unsettled_s=10.0))
    last_writes.hold(1, [(b"t", 0)])
    waiting = asyncio.create_task(last_writes.wait(60.0))
    await asyncio.sleep(0)
    last_writes.stop_waiting()
    await asyncio.wait_for(waiting, 60.0)
    await asyncio.wait_for(last_writes.wait(60.0), 60.0)

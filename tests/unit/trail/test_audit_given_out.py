"""An offset that is assigned twice is reported, with both owners; a resent batch, real or apparent, is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.trail import overlaps
from kproxy.trail.acknowledgements import OpenChunk
from kproxy.trail.overlaps import Origin, Overlap, OverlapDetector, PartitionKey
from kproxy.trail.spans import Chunk, Intervals, spans_of
from tests.support.rules import examples

OLD = Origin(owner=1, revision=10, connection=1, client="a@h:1")
NEW = Origin(owner=2, revision=20, connection=2, client="b@h:2")
TOPIC_ID = bytes(range(200, 216))
MAX_SEQUENCE = 2**31 - 1


def chunk(*spans: int, producer_id: int = -1, epoch: int = 0, sequence: int = 0) -> Chunk:
    count = sum(spans[1::2])
    return Chunk(producer_id, epoch, sequence if producer_id >= 0 else -1, spans_of(spans), count, 1, 100)


def writer(origin: Origin, topic_id: bytes | None = TOPIC_ID, partition: int = 0) -> OpenChunk:
    return OpenChunk(PartitionKey("t", topic_id, partition), origin, [])


def judged(*looks: Sequence[tuple[Origin, Chunk]], topic_id: bytes | None = TOPIC_ID) -> list[Overlap]:
    """The overlaps reported for one partition; each look sees some chunks."""
    given = OverlapDetector()
    overlaps = []
    writers = {origin: writer(origin, topic_id) for look in looks for origin, _ in look}
    for look in looks:
        for origin, each in look:
            # Pass a copy, because the detector changes its argument.
            given.add(writers[origin], each.copy())
        overlaps += given.judge()
    return overlaps


def told(*looks: Sequence[tuple[Origin, Chunk]]) -> list[tuple[int, int, int, int | None]]:
    """(first offset, last offset, owner, earlier owner) of each overlap."""
    return [
        (each.first_offset, each.last_offset, each.origin.owner, each.earlier.owner if each.earlier else None)
        for each in judged(*looks)
    ]


def test_both_owners_of_the_same_offsets_are_named() -> None:
    (overlap,) = judged([(OLD, chunk(10, 5))], [(NEW, chunk(12, 6))])
    assert overlap == Overlap("t", 0, 12, 14, NEW, OLD)


CLEAN = {
    "one behind the other": ([(OLD, chunk(0, 5))], [(NEW, chunk(5, 5))]),
    "with a gap": ([(OLD, chunk(0, 5))], [(NEW, chunk(100, 5))]),
    "two clients by turns": ([(OLD, chunk(0, 2, 4, 2)), (OLD, chunk(2, 2, 6, 2))],),
    "two clients by turns, in two looks": ([(OLD, chunk(0, 2, 4, 2))], [(OLD, chunk(2, 2, 6, 2))]),
    "answers that come late": ([(OLD, chunk(10, 5))], [(OLD, chunk(3, 7))], [(OLD, chunk(0, 3))]),
    "a resend to the same owner": (
        [(OLD, chunk(4, 3, producer_id=7, sequence=4))],
        [(OLD, chunk(5, 2, producer_id=7, sequence=5))],
    ),
    "a resend to the next owner": (
        [(OLD, chunk(4, 3, producer_id=7, sequence=4))],
        [(NEW, chunk(4, 3, producer_id=7, sequence=4))],
    ),
    "a resend and what follows it": (
        [(OLD, chunk(4, 3, producer_id=7))],
        [(NEW, chunk(4, 3, 7, 2, producer_id=7))],
    ),
    "a resend where sequences wrap": (
        [(OLD, chunk(4, 3, producer_id=7, sequence=MAX_SEQUENCE - 1))],
        [(OLD, chunk(6, 1, producer_id=7, sequence=0))],
    ),
    "a resend of one among others'": (
        [(OLD, chunk(0, 1, 2, 1, 4, 1, producer_id=7)), (OLD, chunk(1, 1, 3, 1, producer_id=8))],
        [(NEW, chunk(2, 1, 4, 1, producer_id=7, sequence=1))],
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_offset_given_once_is_not_reported(name: str) -> None:
    assert told(*CLEAN[name]) == []


TWICE = {
    "by one owner": (([(OLD, chunk(1, 5))], [(OLD, chunk(4, 5))]), [(4, 5, 1, 1)]),
    "within one look": (([(OLD, chunk(1, 5)), (NEW, chunk(3, 1))],), [(3, 3, 2, 1)]),
    "another producer's": (
        ([(OLD, chunk(1, 3, producer_id=7))], [(NEW, chunk(1, 3, producer_id=8))]),
        [(1, 3, 2, 1)],
    ),
    "another epoch's": (
        ([(OLD, chunk(1, 3, producer_id=7))], [(NEW, chunk(1, 3, producer_id=7, epoch=1))]),
        [(1, 3, 2, 1)],
    ),
    "the same producer's next": (
        ([(OLD, chunk(1, 3, producer_id=7))], [(NEW, chunk(1, 3, producer_id=7, sequence=3))]),
        [(1, 3, 2, 1)],
    ),
    "of two owners before": (
        ([(OLD, chunk(1, 3))], [(NEW, chunk(4, 3))], [(OLD, chunk(2, 4))]),
        [(2, 3, 1, 1), (4, 5, 1, 2)],
    ),
    "a third time": (
        ([(OLD, chunk(1, 3))], [(NEW, chunk(2, 1))], [(NEW, chunk(2, 1))]),
        [(2, 2, 2, 1), (2, 2, 2, 1)],
    ),
    "with a hole before": (([(OLD, chunk(1, 2, 5, 2))], [(NEW, chunk(2, 4))]), [(2, 2, 2, 1), (5, 5, 2, 1)]),
}


@pytest.mark.parametrize("name", TWICE)
def test_offset_given_twice_is_reported(name: str) -> None:
    looks, expected = TWICE[name]
    assert told(*looks) == expected


def test_recreated_topic_has_no_duplicates() -> None:
    given = OverlapDetector()
    for topic_id in (TOPIC_ID, TOPIC_ID[::-1]):
        given.add(writer(OLD, topic_id), chunk(0, 5))
    assert given.judge() == []
    # Where topics have no ids, offset 0 marks a new topic.
    old, new = writer(OLD, None), writer(NEW, None)
    for each in (old, new):
        given.add(each, chunk(0, 5))
        assert given.judge() == []
    given.add(old, chunk(3, 1))
    assert len(given.judge()) == 1


def test_resent_first_batch_does_not_renew_topic() -> None:
    given = OverlapDetector()
    first, more = chunk(0, 2, producer_id=7), chunk(2, 8, producer_id=7, sequence=2)
    old = writer(OLD, None)
    for each in (first, more, first):
        given.add(old, each.copy())
        assert given.judge() == []
    given.add(writer(NEW, None), chunk(9, 1))
    assert len(given.judge()) == 1


def test_remembered_ranges_are_bounded_and_forgotten_unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlaps, "MAX_INTERVALS", 4)
    looks = [[(OLD, chunk(10 * number, 5))] for number in range(10)]
    assert told(*looks, [(NEW, chunk(3, 1))]) == []
    assert told(*looks, [(NEW, chunk(93, 1))]) == [(93, 93, 2, 1)]
    monkeypatch.setattr(overlaps, "MAX_PARTITIONS", 2)
    given = OverlapDetector()
    writers = [writer(OLD, partition=partition) for partition in range(3)]
    for partition in (0, 1, 2, 0):
        given.add(writers[partition], chunk(5, 1))
    assert given.judge() == []
    # Writers may refer to forgotten partitions for a long time.
    assert writers[1].partition not in given.partitions.values()
    assert writers[1].partition.intervals.starts == writers[1].partition._last_writes.writes == []


def test_intervals_below_the_highest_are_forgotten() -> None:
    intervals = Intervals()
    assert intervals.take([(None, chunk(4, 2, 10, 2)), (None, chunk(12, 3))], 1)
    assert (intervals.floor, intervals.starts, intervals.ends, intervals.high) == (6, [10], [15], 15)
    # One is below the floor, one in an interval, one given twice.
    for refused in (chunk(5, 1, 20, 1), chunk(14, 1), chunk(20, 2, 21, 1)):
        assert not intervals.take([(None, refused)], 1)
        assert (intervals.floor, intervals.starts, intervals.ends) == (6, [10], [15])


def by_turns(producers: int, looks: int) -> list[list[tuple[Origin, Chunk]]]:
    """For each look, a batch of each producer, on a connection of its own."""
    return [
        [
            (
                OLD._replace(connection=number),
                chunk(look * producers + number, 1, producer_id=number, sequence=look),
            )
            for number in range(producers)
        ]
        for look in range(looks)
    ]


@pytest.mark.parametrize("producers", [20, 100])
def test_resent_batch_is_recognised_behind_other_writers(producers: int) -> None:
    looks = by_turns(producers, 100)
    # The first producer's last five; its reports are lost, and the others continue.
    for look in looks[50:]:
        del look[0]
    again = [(NEW._replace(owner=1), looks[number][0][1]) for number in range(45, 50)]
    assert told(*looks, *([each] for each in again)) == []
    assert told(*looks, [(NEW, chunk(45 * producers, 1, producer_id=999))]) == [(45 * producers, 45 * producers, 2, 1)]


def test_remembered_producers_are_bounded() -> None:
    given = OverlapDetector()
    writers = [writer(OLD._replace(connection=number)) for number in range(300)]
    for look in by_turns(300, 100):
        for each_writer, (_, each) in zip(writers, look, strict=True):
            given.add(each_writer, each)
        given.judge()
    (partition,) = given.partitions.values()
    remembered = partition._last_writes.writes
    assert len(remembered) == overlaps.MAX_REMEMBERED
    assert sum(len(each.spans) // 2 for _, each in remembered) <= overlaps.MAX_SPANS_TOGETHER


def test_forgotten_earlier_owner_is_called_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    writes = overlaps.MAX_REMEMBERED + overlaps.MAX_ADDED + 3
    many = [[(OLD._replace(connection=number), chunk(10 * number, 10))] for number in range(writes)]
    assert told(*many, [(NEW, chunk(4, 1))]) == [(4, 4, 2, None)]


spans = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=3).map(
    lambda pairs: [number for pair in pairs for number in pair]
)
# No producer id, so that nothing counts as a resend.
histories = st.lists(st.lists(st.builds(lambda each: (OLD, chunk(*each)), spans), min_size=1, max_size=3), max_size=6)


@given(histories)
@settings(max_examples=examples(400))
def test_every_repeated_offset_is_reported_each_time(looks: list[list[tuple[Origin, Chunk]]]) -> None:
    counts: dict[int, int] = {}
    for look in looks:
        for _, each in look:
            for first, count in zip(each.spans[0::2], each.spans[1::2], strict=True):
                for offset in range(first, first + count):
                    counts[offset] = counts.get(offset, 0) + 1
    again: dict[int, int] = {}
    for overlap in judged(*looks):
        for offset in range(overlap.first_offset, overlap.last_offset + 1):
            again[offset] = again.get(offset, 0) + 1
    assert again == {offset: count - 1 for offset, count in counts.items() if count > 1}

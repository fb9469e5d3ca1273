"""Acknowledged batches, combined into rows: no other batch is included, and none is left out."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from struct import Struct
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.routing.merge import Exchange
from kproxy.routing.topology import Topology
from kproxy.trail import trail as trail_module
from kproxy.trail.acknowledgements import Acked, ConnectionAcks
from kproxy.trail.overlaps import Origin, Overlap
from kproxy.trail.rows import Begin, End, Mark, Range, Row, decode_page, encode_row
from kproxy.trail.signature import chained, digest
from kproxy.trail.spans import MAX_SPANS, Chunk
from kproxy.trail.trail import LOOK_S, MARK_S, STEP_S, Trail
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.partitioned import PartitionedRequest
from kproxy_codec.produce import PRODUCE_API, parse_produce
from tests.support.wire.messages import head_of, request_body, request_frame, sample_request

MAX_SEQUENCE = 2**31 - 1
# By the clock of a test that begins at 1,000 s: 2 ms after the first byte of a request with a timeout of 30 s.
DEADLINE = 1_000 + 27 - 0.002
_BATCH = Struct(">qiibIhiqqqhii")


class Given(NamedTuple):
    """An acknowledged batch: its offset, and the values of its header."""

    base: int
    count: int = 1
    producer_id: int = -1
    epoch: int = -1
    sequence: int = -1
    size: int = 100


class Place(NamedTuple):
    """A partition's recorded batches, and what wakes its readers."""

    trail: Trail
    acked: Acked


def place(topology: Topology | None = None) -> Place:
    trail = Trail(
        "p", "i", clock=lambda: 0.0, wall_ms=lambda: 0, deadline_cap_ms=1_000, interval_s=1.0, offer=lambda *page: None
    )
    acked = Acked(trail, b"t", None, 0, Origin(1, 1, 1, ""), "", "")
    return Place(trail, acked)


@functools.lru_cache
def _frame(topic: str, acks: int, size: int) -> bytes:
    """A request with `size` bytes of records, all ones."""
    request = sample_request(PRODUCE, {topic: [0]}, timeout_ms=30_000, acks=acks)
    request["topic_data"][0]["partition_data"][0]["records"] = b"\xff" * size
    return bytes(request_frame(PRODUCE, 9, request_body(PRODUCE, 9, request)))


def note(acked: Acked, batch: Given, *, magic: int = 2, acks: int = -1, topic: str = "t") -> None:
    """Record an answer to a request with only this batch."""
    frame = bytearray(_frame(topic, acks, batch.size))
    ids = batch.producer_id, batch.epoch, batch.sequence
    start = frame.index(b"\xff" * batch.size)
    _BATCH.pack_into(frame, start, 0, 0, 0, magic, 0, 0, batch.count - 1, 0, 0, *ids, 0)
    view = memoryview(frame)
    exchange = Exchange(PRODUCE_API, parse_produce(view, head_of(view)), 1, DEADLINE)
    acked.add(exchange, view, start, batch.base, batch.size)


def folded(batches: Sequence[Given]) -> list[Chunk]:
    one = place()
    for each in batches:
        note(one.acked, each)
    assert one.acked.unread == 0
    return [*one.acked.take()]


def idempotent(*batches: tuple[int, int], first_sequence: int = 0, producer_id: int = 7, epoch: int = 0) -> list[Given]:
    """(offset, records) of one producer's consecutive batches."""
    given = []
    for base, count in batches:
        given.append(Given(base, count, producer_id, epoch, first_sequence))
        first_sequence = (first_sequence + count) & MAX_SEQUENCE
    return given


FOLDED = {
    "one batch": ([Given(5, 3)], [(-1, [5, 3])]),
    "batches without a gap": (idempotent((0, 2), (2, 3), (5, 1), (6, 4), (10, 1)), [(0, [0, 11])]),
    "few of them": (idempotent((0, 2), (2, 3)), [(0, [0, 5])]),
    "another producer's in between": (
        idempotent((0, 2), (4, 3), (9, 1), (10, 1), (20, 2)),
        [(0, [0, 2, 4, 3, 9, 2, 20, 2])],
    ),
    "few, with others in between": (idempotent((0, 2), (4, 3)), [(0, [0, 2, 4, 3])]),
    "a sequence left out": (idempotent((0, 2)) + idempotent((2, 1), first_sequence=3), [(0, [0, 2]), (3, [2, 1])]),
    "a sequence left out of many": (
        idempotent((0, 1), (1, 1), (2, 1)) + idempotent((3, 1), (4, 1), first_sequence=4),
        [(0, [0, 3]), (4, [3, 2])],
    ),
    "sequences that wrap": (idempotent((0, 2), (2, 3), first_sequence=MAX_SEQUENCE - 1), [(MAX_SEQUENCE - 1, [0, 5])]),
    "sequences of many that wrap": (
        idempotent((0, 2), (2, 3), (5, 1), (6, 1), first_sequence=MAX_SEQUENCE - 1),
        [(MAX_SEQUENCE - 1, [0, 7])],
    ),
    "a new epoch": (idempotent((0, 1)) + idempotent((1, 1), epoch=1), [(0, [0, 1]), (0, [1, 1])]),
    "without idempotence": ([Given(0, 1), Given(1, 4), Given(7, 1), Given(8, 1)], [(-1, [0, 5, 7, 2])]),
    "a sequence that says nothing": ([Given(0, 1, sequence=0), Given(1, 1, sequence=0)], [(-1, [0, 2])]),
    "answers in another order": (idempotent((4, 1), (5, 1), (2, 1), (9, 1)), [(0, [4, 2, 2, 1, 9, 1])]),
}


@pytest.mark.parametrize("name", FOLDED)
def test_consecutive_batches_are_merged(name: str) -> None:
    batches, expected = FOLDED[name]
    chunks = folded(batches)
    assert [(chunk.first_sequence, chunk.spans.tolist()) for chunk in chunks] == expected
    assert sum(chunk.record_count for chunk in chunks) == sum(each.count for each in batches)
    assert sum(chunk.batches for chunk in chunks) == len(batches)
    assert sum(chunk.bytes for chunk in chunks) == sum(each.size for each in batches)


@pytest.mark.parametrize(("magic", "count"), [(1, 1), (0, 1), (2, 0), (2, -5)])
def test_invalid_batch_is_not_reported_or_counted(magic: int, count: int) -> None:
    one = place()
    note(one.acked, Given(3, count), magic=magic)
    assert [*one.acked.take()] == []
    assert one.acked.unread == 1


@pytest.mark.parametrize("first", [[], idempotent((3, 1))])
def test_batch_without_offset_is_not_reported(first: list[Given]) -> None:
    """Its broker has recognised it as an old duplicate."""
    one = place()
    for each in (*first, *idempotent((-1, 1), first_sequence=len(first))):
        note(one.acked, each)
    assert [chunk.spans.tolist() for chunk in one.acked.take()] == [[3, 1]] * len(first)


def test_entry_without_records_is_skipped() -> None:
    """Null records and tagged fields at the end of a request: there is no header to read."""
    tags = b"\x01\x09" + bytes([70]) + bytes(70)
    partitions = b"\x02" + bytes(4) + b"\x00" + tags
    body = b"\x00" + bytes(2) + bytes(4) + b"\x02" + b"\x02t" + partitions + b"\x00" + b"\x00"
    frame = request_frame(PRODUCE, 9, body)
    exchange = Exchange(PRODUCE_API, parse_produce(frame, head_of(frame)), 1, DEADLINE)
    site = Site()
    site.connection.note(exchange, (0, 0), 3, 1 << 62, bytes(30))
    acked = site.connection._find(frame, b"t", 0, 3, 1 << 62)
    assert acked is not None
    assert [*acked.take()] == []
    assert acked.unread == 0


def test_impossible_counts_are_not_reported() -> None:
    """A batch that continues the sequence, but claims a negative number of records."""
    one = place()
    for each in (*idempotent((3, 4)), Given(9, -3, 7, 0, 4), Given(20, 1, 7, 0, 1)):
        note(one.acked, each)
    chunks = one.acked.take()
    assert one.acked.unread > 0
    assert all(min(chunk.spans[1::2]) > 0 for chunk in chunks)


batches = st.lists(
    st.builds(
        Given,
        base=st.integers(0, 30),
        count=st.integers(1, 3),
        producer_id=st.sampled_from([-1, 7, 7, 7, 8]),
        epoch=st.sampled_from([0, 0, 0, 1]),
        sequence=st.sampled_from([0, 1, 2, 3, MAX_SEQUENCE]),
        size=st.sampled_from([80, 100]),
    ),
    min_size=1,
    max_size=12,
)


def records_of(chunks: Sequence[Chunk]) -> list[tuple[int, int, int, int]]:
    """Each record: (offset, producer_id, epoch, sequence)."""
    records = []
    for chunk in chunks:
        sequence = chunk.first_sequence
        for first, count in zip(chunk.spans[0::2], chunk.spans[1::2], strict=True):
            for offset in range(first, first + count):
                records.append((offset, chunk.producer_id, chunk.producer_epoch, sequence))
                sequence = (sequence + 1) & MAX_SEQUENCE if chunk.producer_id >= 0 else -1
    return records


@given(batches)
@settings(max_examples=300)
def test_merging_batches_neither_loses_nor_adds_records(given: list[Given]) -> None:
    chunks = folded(given)
    expected = []
    for each in given:
        for place in range(each.count):
            sequence = (each.sequence + place) & MAX_SEQUENCE if each.producer_id >= 0 else -1
            expected.append((each.base + place, each.producer_id, each.epoch, sequence))
    assert records_of(chunks) == expected
    assert sum(chunk.bytes for chunk in chunks) == sum(each.size for each in given)


class Site:
    """A trail on the test's clock, and one connection whose acknowledgements it records."""

    def __init__(self, *, begun: bool = True) -> None:
        self.now = 1_000.0
        self.wall = 0.0
        self.pages: list[tuple[bytes, int, int]] = []
        self.overlaps: list[Overlap] = []
        self.trail = Trail(
            "proxy:9092",
            "cafe",
            clock=lambda: self.now,
            wall_ms=lambda: round((self.now + self.wall) * 1000),
            deadline_cap_ms=120_000,
            interval_s=2.0,
            offer=self.offer,
            left_out=[b"left-out"],
            on_overlap=self.overlaps.append,
        )
        self.topology = Topology()
        self.topology.set_owner(b"t", 0, 3, revision=40)
        self.connection = self.trail.connection(self.topology)
        self.connection.peer = "client:1"
        if begun:
            self.trail.begin()

    def offer(self, page: bytes, first: int, last: int) -> None:
        assert page.count(b"\n") == last - first, "a page has a row for each sequence number"
        self.pages.append((page, first, last))

    def acknowledge(
        self, *batches: Given, topic: str = "t", partition: int = 0, magic: int = 2, acks: int = -1
    ) -> None:
        acked = self.connection._find(_request(topic).frame, topic.encode(), partition, 3, 1 << 62)
        if acked is not None:
            for each in batches:
                note(acked, each, magic=magic, acks=acks, topic=topic)

    def acknowledge_in(self, partitions: int) -> None:
        """One record in each of so many partitions."""
        for partition in range(partitions):
            self.acknowledge(Given(0), partition=partition)

    def look(self, after_s: float = LOOK_S) -> None:
        self.now += after_s
        self.trail.look()

    @property
    def rows(self) -> list[Row]:
        pages = [(decode_page(page), page) for page, _, _ in self.pages]
        previous = ""
        for rows, page in pages:
            for row, line in zip(rows, page.split(b"\n"), strict=True):
                previous = "" if isinstance(row, Begin) else previous
                # Rows of acknowledgements have an encoder of their own.
                assert line == chained(encode_row(row), previous)
                previous = digest(line)
        return [row for rows, _ in pages for row in rows]

    @property
    def ranges(self) -> list[Range]:
        return [row for row in self.rows if isinstance(row, Range)]

    @property
    def sequences(self) -> list[int]:
        return [row.sequence for row in self.rows]


def _request(topic: str) -> PartitionedRequest:
    frame = request_frame(PRODUCE, 9, request_body(PRODUCE, 9, sample_request(PRODUCE, {topic: [0]})))
    return parse_produce(frame, head_of(frame))


def test_other_sink_gets_a_trail_of_its_own() -> None:
    site = Site()
    site.acknowledge(*idempotent((10, 2)))
    site.trail.go_on_as("babe", interval_s=2.0, offer=site.offer, key=None, left_out=set())
    site.acknowledge(*idempotent((12, 1)))
    site.trail.end()
    told = [(type(row), row.incarnation, row.sequence) for row in site.rows]
    kinds = list(enumerate((Begin, Range, End)))
    assert told == [(kind, name, number) for name in ("cafe", "babe") for number, kind in kinds]
    assert [row.base_offset for row in site.ranges] == [10, 12]


def test_row_describes_all_acknowledged_records() -> None:
    site = Site()
    site.acknowledge(*idempotent((10, 2), (12, 1)))
    site.look()
    site.acknowledge(*idempotent((13, 4), first_sequence=3))
    site.look()
    site.look(1.0)
    (row,) = site.ranges
    assert (row.proxy, row.incarnation, row.sequence) == ("proxy:9092", "cafe", 1)
    assert (row.topic, row.topic_id, row.partition, row.owner, row.revision) == ("t", None, 0, 3, 40)
    assert (row.peer, row.connection, row.acks, row.principal) == ("client:1", 1, -1, None)
    assert (row.producer_id, row.producer_epoch, row.first_sequence) == (7, 0, 0)
    assert (row.base_offset, row.record_count, row.batches, row.bytes) == (10, 7, 3, 300)
    assert row.spans == [10, 7]
    assert (row.first_acked_at, row.last_acked_at, row.at) == (1_000_000, 1_001_000, 1_002_000)
    assert row.latency_us == [2_000, 502_000]


def test_rows_are_numbered_and_pages_state_their_range() -> None:
    site = Site()
    for base in (0, 5):
        site.acknowledge(Given(base))
        site.look(2.0)
    site.trail.end()
    assert [type(row) for row in site.rows] == [Begin, Range, Range, End]
    assert site.sequences == [0, 1, 2, 3]
    for page, first, last in site.pages:
        sequences = [row.sequence for row in decode_page(page)]
        assert (first, last) == (sequences[0], sequences[-1])


def test_row_is_closed_within_the_promised_interval() -> None:
    site = Site()
    begin = site.rows[0]
    assert isinstance(begin, Begin)
    for base in range(40):
        site.acknowledge(Given(base))
        site.look()
    assert len(site.ranges) > 5
    assert all(row.at - row.first_acked_at <= begin.interval_ms for row in site.ranges)
    assert all(row.first_acked_at < row.last_acked_at <= row.at for row in site.ranges)


BREAKS = {
    "another producer": idempotent((1, 1), producer_id=8),
    "another epoch": idempotent((1, 1), epoch=1),
    "a sequence left out": idempotent((1, 1), first_sequence=2),
}


@pytest.mark.parametrize("name", BREAKS)
def test_row_ends_where_producers_order_breaks(name: str) -> None:
    site = Site()
    site.acknowledge(*idempotent((0, 1)))
    site.look()
    site.acknowledge(*BREAKS[name])
    site.look()
    assert [row.spans for row in site.ranges] == [[0, 1]]
    site.trail.end()
    assert [row.spans for row in site.ranges] == [[0, 1], [1, 1]]


def test_row_ends_at_new_acks_or_span_limit() -> None:
    site = Site()
    site.acknowledge(Given(0))
    site.look()
    site.acknowledge(Given(1), acks=1)
    site.look()
    assert [(row.acks, row.spans) for row in site.ranges] == [(-1, [0, 1])]
    site.acknowledge(*(Given(2 * number) for number in range(1, MAX_SPANS + 1)), acks=1)
    site.look()
    site.acknowledge(Given(5_000), acks=1)
    site.trail.end()
    assert [row.record_count for row in site.ranges] == [1, MAX_SPANS + 1, 1]


def test_one_look_gives_rows_of_bounded_size() -> None:
    site = Site()
    site.acknowledge(*idempotent(*((2 * number, 1) for number in range(3 * MAX_SPANS))))
    site.trail.end()
    assert max(len(row.spans) for row in site.ranges) <= 4 * MAX_SPANS
    assert [row.first_sequence for row in site.ranges] == [0, MAX_SPANS, 2 * MAX_SPANS]
    assert [offset for row in site.ranges for offset in row.spans[0::2]] == [*range(0, 6 * MAX_SPANS, 2)]


def test_idle_proxy_reports_periodically() -> None:
    site = Site()
    for _ in range(round(3.5 * MARK_S / LOOK_S)):
        site.look()
    assert [type(row) for row in site.rows] == [Begin, Mark, Mark, Mark]
    # A mark says that all earlier rows are written, so there is none while a row is open.
    site.acknowledge(Given(0))
    site.look(3 * MARK_S)
    assert [type(row) for row in site.rows[4:]] == [Range]


def test_end_of_trail_is_reported_once_soon() -> None:
    site = Site()
    site.acknowledge(Given(0))
    for _ in range(round(0.9 * MARK_S / LOOK_S)):
        site.look()
    begin, row, mark = site.rows
    assert isinstance(begin, Begin)
    assert isinstance(row, Range)
    assert isinstance(mark, Mark)
    assert mark.at - row.at <= begin.interval_ms


def test_unreadable_entry_leaves_a_gap_only() -> None:
    site = Site()
    site.acknowledge(Given(0))
    site.look()
    site.acknowledge(Given(1), magic=1)
    site.look()
    site.acknowledge(Given(2))
    site.trail.end()
    assert site.sequences == [0, 2, 3]
    assert [row.spans for row in site.ranges] == [[0, 1, 2, 1]]


def test_failed_partition_leaves_a_gap_only(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()

    judge = site.trail._overlaps.add

    def failing(acked: Acked, chunk: Chunk) -> None:
        if acked.key.partition == 0:
            raise ArithmeticError
        judge(acked, chunk)

    detector = mock.Mock(site.trail._overlaps, add=failing, has_added=False)
    monkeypatch.setattr(site.trail, "_overlaps", detector)
    site.acknowledge(Given(1))
    site.acknowledge(Given(7), partition=1)
    site.look()
    site.trail.end()
    assert site.sequences == [0, 2, 3]
    assert [row.partition for row in site.ranges] == [1]


async def test_failed_look_leaves_a_gap_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail_module, "LOOK_S", 0.001)
    site = Site()
    mark = site.trail._mark

    def failing() -> None:
        monkeypatch.setattr(site.trail, "_mark", mark)
        raise ArithmeticError

    # The failing look has already closed a row.
    site.acknowledge(Given(9))
    site.look()
    site.now += 3.0
    monkeypatch.setattr(site.trail, "_mark", failing)
    looking = asyncio.create_task(site.trail.keep_looking())
    while site.trail._mark is not mark:
        await asyncio.sleep(0.001)
    site.acknowledge(Given(0))
    await asyncio.sleep(0.01)
    looking.cancel()
    site.trail.end()
    assert site.sequences == [0, 1, 3, 4]


async def test_look_yields_and_survives_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail_module, "LOOK_S", 0.001)
    monkeypatch.setattr(trail_module, "MAX_STEP", 2)
    site = Site()
    site.acknowledge_in(9)
    looking = asyncio.create_task(site.trail.keep_looking())
    while len(site.trail._taking) not in range(1, 8):
        await asyncio.sleep(0)
    # During a look: it has already passed the first of these, and no mark follows.
    site.now += 20
    for partition in (0, 8):
        site.acknowledge(Given(1), partition=partition)
    while site.trail._taking:
        await asyncio.sleep(0)
    assert not any(isinstance(row, Mark) for row in site.rows)
    site.acknowledge(*(Given(number) for number in (2, 3)), partition=1)
    looking.cancel()
    site.trail.end()
    told = Counter[int]()
    for row in site.ranges:
        told[row.partition] += row.record_count
    assert told == {0: 2, 1: 3, 8: 2} | dict.fromkeys(range(2, 8), 1)
    assert site.sequences == list(range(len(site.rows)))


class SlowSite(Site):
    """A trail whose clock advances by a millisecond at each reading."""

    @property
    def now(self) -> float:
        self._now += 0.001
        return self._now

    @now.setter
    def now(self, now: float) -> None:
        self._now = now


def test_step_of_a_look_ends_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few partitions it has covered, because each may have thousands of spans."""
    monkeypatch.setattr(trail_module, "AT_ONCE", 1)
    site = SlowSite()
    site.acknowledge_in(40)
    trail, judged = site.trail, site.trail._overlaps.added
    site.now = site.now + 5
    left = []
    for _ in trail._look():
        left.append((len(trail._taking), len(judged), len(trail._open)))
        # Rows of these are due now, instead of at a later look.
        trail._interval_s = 0.0
    for kind in zip(*left, strict=True):
        handled = [before - after for before, after in pairwise((*kind, 0)) if before > after]
        assert len(handled) >= 40 / (1000 * STEP_S + 1) - 1
        assert max(handled) <= 1000 * STEP_S + 1
    assert len(site.ranges) == 40


async def test_rest_of_cancelled_look_is_reported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail_module, "LOOK_S", 0.001)
    monkeypatch.setattr(trail_module, "MAX_STEP", 2)
    site = Site()
    site.acknowledge_in(9)
    looking = asyncio.create_task(site.trail.keep_looking())
    while not site.trail._taking:
        await asyncio.sleep(0)
    looking.cancel()
    site.trail.end()
    assert sorted(row.partition for row in site.ranges) == list(range(9))


def test_clock_set_back_does_not_lower_times() -> None:
    site = Site()
    site.acknowledge(Given(0))
    site.look()
    site.wall = -3_600.0
    site.acknowledge(Given(1))
    site.look(2.0)
    site.trail.end()
    times = [row.at for row in site.rows]
    assert times == sorted(times)


def test_clock_set_back_delays_no_row_or_mark() -> None:
    site = Site()
    site.look()
    site.wall = -3_600.0
    for base in range(12):
        site.acknowledge(Given(base))
        site.look()
    assert len(site.ranges) >= 2
    for _ in range(round(1.5 * MARK_S / LOOK_S)):
        site.look()
    assert sum(row.record_count for row in site.ranges) == 12
    assert isinstance(site.rows[-1], Mark)


def test_first_acknowledgement_is_not_before_serving() -> None:
    site = Site(begun=False)
    site.now += 300
    site.trail.begin()
    site.acknowledge(Given(0))
    site.look()
    site.trail.end()
    begin, row, _ = site.rows
    assert isinstance(row, Range)
    assert row.first_acked_at >= begin.at


def test_unclosed_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail_module, "MAX_OPEN_ROWS", 5)
    site = Site()
    site.acknowledge_in(8)
    site.look()
    assert [row.partition for row in site.ranges] == [0, 1, 2]


def test_page_fits_a_maximum_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail_module, "MAX_PAGE_BYTES", 2_000)
    site = Site()
    site.acknowledge_in(20)
    site.trail.end()
    assert all(len(page) <= 2_000 for page, _, _ in site.pages)
    assert site.sequences == list(range(22))
    assert [first for _, first, _ in site.pages[1:]] == [last + 1 for _, _, last in site.pages[:-1]]


def test_audit_topic_is_not_in_the_trail() -> None:
    site = Site()
    site.acknowledge(Given(0), topic="left-out")
    site.trail.end()
    assert site.ranges == []


def test_offsets_before_the_trail_are_judged_only() -> None:
    site = Site(begun=False)
    for _ in range(2):
        site.acknowledge(Given(1, 3))
        site.look()
    assert [(each.topic, each.first_offset, each.last_offset) for each in site.overlaps] == [("t", 1, 3)]
    site.trail.end()
    assert site.pages == []


def test_connection_to_many_partitions_is_remembered_boundedly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy.trail.acknowledgements.MAX_PARTITIONS", 3)
    site = Site()
    site.acknowledge_in(10)
    assert isinstance(site.connection, ConnectionAcks)
    assert len(site.connection._acked) <= 3
    site.trail.end()
    assert [row.partition for row in site.ranges] == list(range(10))

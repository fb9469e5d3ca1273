"""What the compiled classes do with acknowledged offsets and with overlaps is the same as in Python."""

from __future__ import annotations

import importlib.util
import struct
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kproxy.plain
from kproxy.plain import compiled
from kproxy.trail import acknowledgements
from kproxy.trail import overlaps as overlaps_module
from kproxy.trail import spans as spans_module
from kproxy.trail.overlaps import Origin, Overlap, PartitionKey
from kproxy.trail.spans import Spans, spans_of
from tests.support.rules import examples

pytestmark = pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")


def in_python(module: ModuleType) -> Any:
    """The module again, as where nothing is compiled."""
    spec = importlib.util.spec_from_file_location(module.__name__, str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    with mock.patch.object(kproxy.plain, "compiled", None):
        spec.loader.exec_module(again)
    return again


python = in_python(spans_module)
with mock.patch.multiple(spans_module, Chunk=python.Chunk, Intervals=python.Intervals):
    python_overlaps = in_python(overlaps_module)

# Few offsets, so that many intervals meet or overlap; and some that no smaller integer holds.
starts = st.integers(0, 60) | st.integers(1 << 61, (1 << 61) + 60)
span = st.tuples(starts, st.integers(1, 4))
chunks = st.lists(st.lists(span, min_size=1, max_size=8).map(lambda pairs: spans_of(sum(pairs, ()))), min_size=1)


@st.composite
def disjoint(draw: st.DrawFn) -> list[Spans]:
    """Batches of several connections as brokers place them: each after the last, most without a gap."""
    found: list[list[int]] = [[] for _ in range(draw(st.integers(1, 5)))]
    offset = draw(starts)
    for writer, count, gap in draw(
        st.lists(st.tuples(st.sampled_from(found), st.integers(1, 4), st.sampled_from((0, 0, 0, 1))), min_size=1)
    ):
        offset += gap
        writer += (offset, count)
        offset += count
    return [spans_of(each) for each in draw(st.permutations(found)) if each]


def chunk_of(kind: Any, spans: Spans) -> Any:
    return kind(-1, 0, -1, spans[:], sum(spans[1::2]), 1, 100)


@settings(max_examples=examples(500))
@given(chunks | disjoint(), st.integers(0, 20), st.integers(1, 6))
def test_intervals_are_equal_compiled_and_in_python(added: list[Spans], floor: int, most: int) -> None:
    both = spans_module.Intervals(), python.Intervals()
    for one in both:
        one.replace(floor, [], [])
    # By halves, so that there are intervals already.
    for half in (added[::2], added[1::2]):
        if half:
            one, two = both
            took = one.take([(None, chunk_of(spans_module.Chunk, each)) for each in half], most)
            assert took == two.take([(None, chunk_of(python.Chunk, each)) for each in half], most)
            assert (one.floor, one.starts, one.ends, one.high) == (two.floor, two.starts, two.ends, two.high)


def fields(chunk: Any) -> tuple[Any, ...]:
    """Everything that a chunk has."""
    names = ("producer_id", "producer_epoch", "first_sequence", "next_sequence", "record_count", "batches", "bytes")
    return *(getattr(chunk, name) for name in names), chunk.spans, chunk.base_offset


numbers = st.sampled_from((-1, 0, 7, (1 << 31) - 3))
KINDS = (spans_module.Chunk, python.Chunk)


@given(chunks, st.lists(st.tuples(numbers, numbers, st.booleans(), st.booleans()), min_size=1), st.integers(0, 5))
def test_chunks_extend_and_shorten_alike(
    added: list[Spans], given: list[tuple[int, int, bool, bool]], most: int
) -> None:
    made = [[kind(7, 0, given[0][1], added[0][:], sum(added[0][1::2]), 1, 100) for kind in KINDS]]
    for spans, (producer_id, sequence, continues, meets) in zip(added[1:], given[1:], strict=False):
        last = made[0][0]
        if meets:
            spans[0] = last.spans[-2] + last.spans[-1]
        ids = (7, 0, last.next_sequence) if continues else (producer_id, 0, sequence)
        made.append([kind(*ids, spans[:], sum(spans[1::2]), 2, 50) for kind in KINDS])
        took = [one.extend(more) for one, more in zip(made[0], made[-1], strict=True)]
        assert took[0] == took[1]
        assert took[0] or not continues
    for compiled_one, python_one in made:
        assert fields(compiled_one) == fields(python_one)
        copies = [compiled_one.copy(), python_one.copy()]
        for copy in copies:
            copy.shorten(most)
            assert len(copy.spans) <= max(2 * most, 0)
        assert len(copies[0].spans) == 0 or fields(copies[0]) == fields(copies[1])
        assert copies[0].spans == copies[1].spans
        assert fields(compiled_one) == fields(python_one)


@given(
    st.lists(st.tuples(starts, st.integers(0, 3)), max_size=40),
    st.tuples(starts, st.integers(0, 3)),
    st.tuples(st.sampled_from((-1, 0, 7, 1 << 62)), st.integers(-1, 3)),
    st.booleans(),
    st.integers(0, 3),
)
def test_open_chunks_finish_alike(
    spans: list[tuple[int, int]], last: tuple[int, int], producer: tuple[int, int], counts: bool, batches: int
) -> None:
    found = []
    kinds: list[Any] = [acknowledgements._OpenChunk, compiled.OpenChunk]  # type: ignore[union-attr]
    for kind in kinds:
        chunk = kind(None, None, [])
        chunk.producer, chunk.counts_sequences = struct.pack(">qh", *producer), counts
        chunk.first_sequence, chunk.next_sequence = 5, 9
        chunk.spans, chunk.unread = spans_of(), 1
        for chunk.first_offset, chunk.next_offset in [(first, first + count) for first, count in spans]:
            chunk.add_span()
        assert chunk.spans == spans_of(sum(spans, ()))
        chunk.first_offset, chunk.next_offset = last[0], sum(last)
        chunk.volume = batches * (acknowledgements.ONE_BATCH + 100)
        chunk.finish()
        left = chunk.producer, chunk.volume, chunk.spans, chunk.unread, chunk.is_full()
        found.append(([fields(each) for each in chunk.take()], left, chunk.is_idle, [*chunk.take()]))
    assert found[0] == found[1]
    has_records = all(count for _, count in [*spans, last])
    assert bool(found[0][0]) == (batches > 0 and has_records)
    assert found[0][1][-2] == 1 + (0 if has_records else batches)


@given(
    st.lists(st.tuples(st.lists(span, min_size=1, max_size=8), st.sampled_from((0, 0, 0, 1)), st.booleans())),
    st.lists(st.floats(0, 100) | st.integers(0, 9).map(lambda half: half / 1e6 + 5e-7), max_size=40),
)
def test_open_rows_go_on_alike(given: list[tuple[list[tuple[int, int]], int, bool]], latencies: list[float]) -> None:
    rows = []
    for kind in (spans_module, python):
        first = chunk_of(kind.Chunk, spans_of((4, 2)))
        row = kind.OpenRow(first, 1, 0.5, 10, 11)
        took = []
        for at, (pairs, acks, is_long) in enumerate(given, 12):
            # Up to the most spans of a row, and beyond.
            spans = spans_of(sum(pairs, ()) * (spans_module.MAX_SPANS // 4 if is_long else 1))
            took.append(row.take(chunk_of(kind.Chunk, spans), 1 - acks, at))
        for latency in latencies:
            row.sample(latency)
        times = row.began, row.first_acked_at, row.last_acked_at, row.acks
        rows.append((fields(row), times, row.latency_us, row.as_json(), took))
        assert first.spans == spans_of((4, 2))
    assert rows[0] == rows[1]


any_number = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-130, 130)
# From before and behind a number of digits more.
ascending = st.builds(
    lambda power, before, steps: [(first - before, 1) for first in accumulate(steps, initial=10**power)],
    st.integers(0, 18),
    st.integers(0, 20_000),
    st.lists(st.sampled_from((0, 1, 9, 99, 101, 9_999, 10_000)) | st.integers(0, 12_000)),
)


@given(st.lists(st.tuples(any_number, any_number), min_size=1) | ascending, any_number)
def test_rows_have_the_same_json(spans: list[tuple[int, int]], number: int) -> None:
    texts = []
    for kind in (spans_module, python):
        row = kind.OpenRow(kind.Chunk(number, 7, -1, spans_of(sum(spans, ())), 1, 1, number), 1, 0.5, number, 11)
        for latency in range(len(spans)):
            row.sample(latency / 1000)
        texts.append(row.as_json())
    assert texts[0] == texts[1]


class Written(NamedTuple):
    """Batches of a producer that a writer of a partition gets acknowledged in one look."""

    partition: int
    connection: int
    producer_id: int
    # Where its offsets begin, and its sequence.
    move: str
    spans: int
    count: int


MOVES = (*6 * ("on",), *3 * ("sequence left out",), "gap", "behind", "zero", "resend")
written = st.builds(
    Written,
    st.sampled_from((0, 0, 0, 0, 1, 1, 1, 2)),
    st.integers(0, 3),
    st.sampled_from((7, 7, 8, -1)),
    st.sampled_from(MOVES),
    st.sampled_from((1, 1, 2, 2, 9, 80)),
    st.sampled_from((1, 2, 300)),
)
# Of each look how many partitions are judged before it is abandoned.
looks = st.lists(st.tuples(st.lists(written, min_size=4, max_size=9), st.sampled_from((9, 9, 9, 1, 0))), min_size=9)
ID = bytes(16)


class Partitions:
    """What a broker would give to the batches of a script, and to some of them by mistake."""

    def __init__(self) -> None:
        self._next = [0, 0, 0]
        self._sequences: dict[tuple[int, int], int] = {}
        self._last: dict[tuple[int, int], tuple[int, list[int]]] = {}

    def acknowledge(self, look: list[Written]) -> list[tuple[Written, int, Spans]]:
        """Of each its first sequence and spans."""
        found: list[list[int]] = [[] for _ in look]
        for turn in range(max((each.spans for each in look), default=0)):
            for each, spans in zip(look, found, strict=True):
                if turn < each.spans:
                    self._next[each.partition] += self._jump(each, turn)
                    spans += (self._next[each.partition], each.count)
                    self._next[each.partition] += each.count
        return [(each, *self._numbered(each, spans)) for each, spans in zip(look, found, strict=True)]

    def _jump(self, each: Written, turn: int) -> int:
        if each.move == "gap":
            return 3
        if turn or each.move not in ("behind", "zero"):
            return 0
        return -min(self._next[each.partition], 5 if each.move == "behind" else 1 << 40)

    def _numbered(self, each: Written, spans: list[int]) -> tuple[int, Spans]:
        producer = each.partition, each.producer_id
        if each.move == "resend" and producer in self._last:
            sequence, spans = self._last[producer]
        else:
            sequence = self._sequences.get(producer, 0) + (each.move == "sequence left out")
        self._last[producer] = sequence, spans
        self._sequences[producer] = sequence + sum(spans[1::2])
        return (sequence if each.producer_id >= 0 else -1), spans_of(spans)


class Detector:
    """A detector and its writers, compiled or in Python."""

    def __init__(self, overlaps: Any, chunk: Any, writer: Any) -> None:
        self._chunk = chunk
        self._detector = overlaps.OverlapDetector()
        # Topics with and without an id.
        self._writers = {
            (partition, connection): writer(
                PartitionKey("t", None if partition else ID, partition), Origin(1, 1, connection, ""), []
            )
            for partition in range(3)
            for connection in range(4)
        }

    def look(self, given: list[tuple[Written, int, Spans]], judged: int) -> list[Overlap]:
        for each, sequence, spans in given:
            chunk = self._chunk(each.producer_id, 0, sequence, spans[:], sum(spans[1::2]), each.spans, 100)
            self._detector.add(self._writers[each[:2]], chunk)
        found: list[Overlap] = self._detector.judge(judged)
        return found

    def state(self) -> list[Any]:
        found: list[Any] = [writer.place for writer in self._writers.values()]
        for key, partition in self._detector.partitions.items():
            intervals, last = partition.intervals, partition._last_writes
            writes = [(origin, *fields(chunk)) for origin, chunk in last.writes]
            found.append((key, intervals.floor, intervals.starts, intervals.ends, last.most, writes))
            found.append([(writer.origin, *fields(chunk)) for writer, chunk in partition.added])
        return found


# Without shrinking, which would take minutes.
@settings(max_examples=examples(15), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(looks, st.sampled_from((2, 3, 3)))
def test_both_detectors_find_and_keep_same_overlaps(looks: list[tuple[list[Written], int]], most: int) -> None:
    given = Partitions()
    kinds = (
        (overlaps_module, spans_module.Chunk, compiled.OpenChunk),  # type: ignore[union-attr]
        (python_overlaps, python.Chunk, acknowledgements._OpenChunk),
    )
    bounds = (mock.patch.object(module, "MAX_PARTITIONS", most) for module, _, _ in kinds)
    with next(bounds), next(bounds):
        one, two = (Detector(*kind) for kind in kinds)
        for look, judged in looks:
            acknowledged = given.acknowledge(look)
            assert one.look(acknowledged, judged) == two.look(acknowledged, judged)
            assert one.state() == two.state()

"""The compiled code handles acknowledged offsets in the same way as Python's."""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.plain import compiled
from kproxy.trail import acknowledgements
from kproxy.trail import spans as spans_module
from kproxy.trail.spans import Spans, spans_of
from tests.support.rules import examples

pytestmark = pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")


# A small range of offsets, so that many intervals meet or overlap; and offsets that need 64 bits.
starts = st.integers(0, 60) | st.integers(1 << 61, (1 << 61) + 60)
span = st.tuples(starts, st.integers(1, 4))
chunks = st.lists(st.lists(span, min_size=1, max_size=8).map(lambda pairs: spans_of(sum(pairs, ()))), min_size=1)


@st.composite
def disjoint(draw: st.DrawFn) -> list[Spans]:
    """Batches of several connections in the order of a broker's log, most without a gap."""
    found: list[list[int]] = [[] for _ in range(draw(st.integers(1, 5)))]
    offset = draw(starts)
    for writer, count, gap in draw(
        st.lists(st.tuples(st.sampled_from(found), st.integers(1, 4), st.sampled_from((0, 0, 0, 1))), min_size=1)
    ):
        offset += gap
        writer += (offset, count)
        offset += count
    return [spans_of(each) for each in draw(st.permutations(found)) if each]


KINDS: tuple[Any, Any] = spans_module.Chunk, spans_module._Chunk


def chunk_of(kind: Any, spans: Spans) -> Any:
    return kind(-1, 0, -1, spans[:], sum(spans[1::2]), 1, 100)


@settings(max_examples=examples(500))
@given(chunks | disjoint())
def test_offsets_join_alike_compiled_and_in_python(added: list[Spans]) -> None:
    # In two halves, so that the second finds intervals.
    intervals: tuple[list[int], list[int]] = [], []
    for half in (added[::2], added[1::2]):
        if half:
            before = [*intervals[0]], [*intervals[1]]
            joined = compiled.join(*intervals, [chunk_of(KINDS[0], each) for each in half])  # type: ignore[union-attr]
            assert joined == spans_module._join(*intervals, [chunk_of(KINDS[1], each) for each in half])
            assert intervals == before
            intervals = joined or intervals


def fields(chunk: Any) -> tuple[Any, ...]:
    """All fields of a chunk."""
    names = ("producer_id", "producer_epoch", "first_sequence", "next_sequence", "record_count", "batches", "bytes")
    return *(getattr(chunk, name) for name in names), chunk.spans, chunk.base_offset


numbers = st.sampled_from((-1, 0, 7, (1 << 31) - 3))


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
        assert {one.span_count for one in copies} == {len(copies[0].spans) // 2}
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


any_number = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-130, 130)
# Numbers around a power of ten, where their length changes.
ascending = st.builds(
    lambda power, before, steps: [(first - before, 1) for first in accumulate(steps, initial=10**power)],
    st.integers(0, 18),
    st.integers(0, 20_000),
    st.lists(st.sampled_from((0, 1, 9, 99, 101, 9_999, 10_000)) | st.integers(0, 12_000)),
)


@given(st.lists(st.tuples(any_number, any_number), min_size=1) | ascending)
def test_spans_have_same_json_compiled_and_in_python(spans: list[tuple[int, int]]) -> None:
    texts = [kind(7, 0, -1, spans_of(sum(spans, ())), 1, 1, 100).spans_as_json() for kind in KINDS]
    assert texts[0] == texts[1] == ",".join(str(number) for span in spans for number in span).encode()

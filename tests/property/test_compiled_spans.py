"""The compiled functions over spans of acknowledged offsets return the same results as those in Python."""

from __future__ import annotations

import runpy
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kproxy.plain
from kproxy.plain import compiled
from kproxy.trail import acknowledgements
from kproxy.trail import spans as spans_module
from kproxy.trail.spans import Spans, spans_of

pytestmark = pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")

with mock.patch.object(kproxy.plain, "compiled", None):
    python: dict[str, Any] = runpy.run_path(str(Path(spans_module.__file__)))

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


@settings(max_examples=500)
@given(chunks | disjoint(), st.integers(0, 20), st.integers(1, 6))
def test_the_same_union(added: list[Spans], floor: int, most: int) -> None:
    # By halves, so that there are intervals already.
    state: Any = (floor, [], [])
    for half in (added[::2], added[1::2]):
        if half and state is not None:
            copies = [each[:] for each in half]
            found = spans_module.union(*state, half, most)
            assert found == python["union"](*state, half, most)
            assert half == copies
            state = found


def fields(chunk: Any) -> tuple[Any, ...]:
    """Everything that a chunk has."""
    names = ("producer_id", "producer_epoch", "first_sequence", "next_sequence", "record_count", "batches", "bytes")
    return *(getattr(chunk, name) for name in names), chunk.spans


numbers = st.sampled_from((-1, 0, 7, (1 << 31) - 3))
KINDS = (spans_module.Chunk, python["Chunk"])


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
        assert fields(copies[0]) == fields(copies[1])
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
    for kind in (acknowledgements._OpenChunk, compiled.OpenChunk):  # type: ignore[union-attr]
        chunk = kind()
        chunk.producer, chunk.counts_sequences = struct.pack(">qh", *producer), counts
        chunk.first_sequence, chunk.next_sequence = 5, 9
        chunk.spans, chunk.unread = spans_of(), 1
        for chunk.first_offset, chunk.next_offset in [(first, first + count) for first, count in spans]:
            chunk.add_span()
        assert chunk.spans == spans_of(sum(spans, ()))
        chunk.first_offset, chunk.next_offset = last[0], sum(last)
        chunk.volume = batches * (acknowledgements.ONE_BATCH + 100)
        finished = chunk.finished()
        left = chunk.producer, chunk.volume, chunk.spans, chunk.finished(), chunk.unread, chunk.is_full()
        found.append((finished and fields(finished), left))
    assert found[0] == found[1]
    has_records = all(count for _, count in [*spans, last])
    assert (found[0][0] is not None) == (batches > 0 and has_records)
    assert found[0][1][-2] == 1 + (0 if has_records else batches)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_the_same_json(numbers: list[int]) -> None:
    spans = spans_of(numbers)
    assert spans_module.to_json(spans) == python["to_json"](spans)

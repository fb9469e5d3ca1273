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


@given(chunks, st.booleans())
def test_the_same_extension(added: list[Spans], meets: bool) -> None:
    first, *following = added
    for more in following:
        if meets:
            more[0] = first[-2] + first[-1]
        found = []
        for extend in (spans_module.extend_spans, python["extend_spans"]):
            spans, copy = first[:], more[:]
            extend(spans, copy)
            found.append((spans, copy))
        assert found[0] == found[1]
        assert found[0][1] == more
        first = found[0][0]
    empty = spans_of()
    spans_module.extend_spans(empty, first)
    assert empty == first


@given(
    st.lists(st.tuples(starts, st.integers(0, 3)), max_size=6),
    st.tuples(starts, st.integers(0, 3)),
    st.tuples(st.sampled_from((-1, 0, 7, 1 << 62)), st.integers(-1, 3)),
    st.booleans(),
    st.integers(0, 3),
)
def test_the_same_finished_chunk(
    spans: list[tuple[int, int]], last: tuple[int, int], producer: tuple[int, int], counts: bool, batches: int
) -> None:
    found = []
    for kind in (acknowledgements._OpenChunk, compiled.OpenChunk):  # type: ignore[union-attr]
        chunk = kind()
        chunk.producer, chunk.counts_sequences = struct.pack(">qh", *producer), counts
        chunk.first_sequence, chunk.next_sequence = 5, 9
        chunk.spans, chunk.first_offset, chunk.next_offset = spans_of(sum(spans, ())), last[0], sum(last)
        chunk.volume = batches * (acknowledgements.ONE_BATCH + 100)
        found.append((chunk.finished(), chunk.producer, chunk.volume, len(chunk.spans), chunk.finished()))
    assert found[0] == found[1]
    assert (found[0][0] is None) == (batches == 0)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_the_same_json(numbers: list[int]) -> None:
    spans = spans_of(numbers)
    assert spans_module.to_json(spans) == python["to_json"](spans)

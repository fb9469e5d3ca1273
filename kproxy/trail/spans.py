"""Spans of acknowledged offsets: a first offset and a number of records, alternating, in an array of 64-bit integers.

Where many connections write to a partition, nearly every batch is a span of its own. The compiled plain path
(kproxy.plain) has twins of `extend_spans`, `to_json` and `union`, which are used instead where it is built.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import add, eq, le
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from kproxy.plain import compiled

Spans: TypeAlias = "array[int]"


def spans_of(numbers: Iterable[int] = ()) -> Spans:
    """Spans by first offsets and numbers of records, alternating."""
    return array("q", numbers)


def extend_spans(spans: Spans, more: Spans) -> None:
    """Append spans.

    Join the first of them to the last one if it begins where that ends.
    """
    if spans and spans[-2] + spans[-1] == more[0]:
        spans[-1] += more[1]
        spans.extend(more[2:])
    else:
        spans.extend(more)


def record_count(spans: Spans) -> int:
    """The number of records in all spans; 0 if one of them has none."""
    counts = spans[1::2]
    return sum(counts) if min(counts) > 0 else 0


def to_json(spans: Spans) -> bytes:
    """The numbers as an array in JSON, without blanks."""
    return msgspec.json.encode(spans.tolist())


def union(
    floor: int, starts: list[int], ends: list[int], added: Sequence[Spans], most: int
) -> tuple[int, list[int], list[int]] | None:
    """The highest `most` intervals of the given ones and all spans together, by their starts and ends, in order.

    Neighbours are joined. Offsets below the returned floor, which is `floor` or the end of an interval left out, are
    not in the intervals. None if an offset is below `floor`, or in two of the intervals and spans.
    """
    starts, ends = starts.copy(), ends.copy()
    for spans in added:
        firsts = spans[0::2]
        starts += firsts
        ends += map(add, firsts, spans[1::2])
    # The spans of each connection are in order already, so sorting is cheap.
    starts.sort()
    ends.sort()
    # An offset lies in as many intervals as begin up to it, less those that end up to it. So the intervals are
    # disjoint exactly if each start after the first is at or behind the end of the same rank.
    behind = starts[1:]
    if starts[0] < floor or not all(map(le, ends, behind)):
        return None
    if behind == ends[:-1]:
        return floor, starts[:1], ends[-1:]
    joins = list(map(eq, behind, ends))
    left = [starts[0], *(start for start, joined in zip(behind, joins, strict=True) if not joined)]
    right = [*(end for end, joined in zip(ends, joins, strict=False) if not joined), ends[-1]]
    excess = len(left) - most
    return (floor, left, right) if excess <= 0 else (right[excess - 1], left[excess:], right[excess:])


if not TYPE_CHECKING and compiled is not None:
    extend_spans, to_json, union = compiled.extend_spans, compiled.to_json, compiled.union

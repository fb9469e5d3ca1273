"""Spans of acknowledged offsets, and the chunks of batches that they are the offsets of.

Spans are a first offset and a number of records, alternating, in an array of 64-bit integers. Where many connections
write to a partition, nearly every batch is a span of its own. The compiled plain path (kproxy.plain) has twins of
`Chunk`, `to_json` and `union`, which are used instead where it is built.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import add, eq, le
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from kproxy.plain import compiled
from kproxy_codec.record_batch import NO_SEQUENCE, add_sequence

Spans: TypeAlias = "array[int]"


def spans_of(numbers: Iterable[int] = ()) -> Spans:
    """Spans by first offsets and numbers of records, alternating."""
    return array("q", numbers)


def record_count(spans: Spans) -> int:
    """The number of records in all spans; 0 if one of them has none."""
    counts = spans[1::2]
    return sum(counts) if min(counts) > 0 else 0


class _Chunk:
    """Acknowledged batches of one producer without a gap in their sequence numbers; fields as in `rows.Range`.

    `next_sequence` is the base_sequence of the producer's next batch.
    """

    __slots__ = (
        "batches",
        "bytes",
        "first_sequence",
        "next_sequence",
        "producer_epoch",
        "producer_id",
        "record_count",
        "spans",
    )

    def __init__(
        self,
        producer_id: int,
        producer_epoch: int,
        first_sequence: int,
        spans: Spans,
        record_count: int,
        batches: int,
        bytes: int,  # noqa: A002 -- as the field of the row
    ) -> None:
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.first_sequence = first_sequence
        self.next_sequence = add_sequence(first_sequence, record_count) if first_sequence >= 0 else NO_SEQUENCE
        self.spans = spans
        self.record_count = record_count
        self.batches = batches
        self.bytes = bytes

    def copy(self) -> _Chunk:
        """A chunk that can be extended, while this one stays as it is."""
        return _Chunk(
            self.producer_id,
            self.producer_epoch,
            self.first_sequence,
            self.spans[:],
            self.record_count,
            self.batches,
            self.bytes,
        )

    def extend(self, more: _Chunk) -> bool:
        """Take in a chunk that continues this one; False if it does not. Without idempotence every chunk does."""
        if (
            more.first_sequence != self.next_sequence
            or more.producer_id != self.producer_id
            or more.producer_epoch != self.producer_epoch
        ):
            return False
        spans, added = self.spans, more.spans
        if spans and spans[-2] + spans[-1] == added[0]:
            spans[-1] += added[1]
            spans.extend(added[2:])
        else:
            spans.extend(added)
        self.next_sequence = more.next_sequence
        self.record_count += more.record_count
        self.batches += more.batches
        self.bytes += more.bytes
        return True

    def shorten(self, most: int) -> None:
        """Forget the first spans, and where they begin; leave at most `most` of them. The sums stay."""
        excess = 2 * (len(self.spans) // 2 - most)
        if excess > 0:
            if self.first_sequence >= 0:
                self.first_sequence = add_sequence(self.first_sequence, sum(self.spans[1:excess:2]))
            del self.spans[:excess]


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


if TYPE_CHECKING:
    Chunk = _Chunk
elif compiled is not None:
    Chunk, to_json, union = compiled.Chunk, compiled.to_json, compiled.union
else:
    Chunk = _Chunk

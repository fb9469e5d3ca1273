"""Detect offsets of a partition that were assigned twice.

It knows the offsets that this process has seen acknowledged.

Two owners of one partition cause that (split brain), and so does a new owner that lacks records which an earlier owner
had acknowledged. An idempotent batch that is sent again gets its first offset again; that is no overlap.

Invariants
1. The intervals of a partition are disjoint and in order, neighbours are joined, and there are at most MAX_INTERVALS:
   the lowest go first. Offsets below `floor` are forgotten and not judged.
2. An offset is reported once for each time it is assigned again.
3. A partition of a recreated topic is another partition. For topics without ids, offset 0 tells that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from typing import Final, NamedTuple

from kproxy.trail.spans import Spans, extend_spans, union
from kproxy_codec.record_batch import NO_PRODUCER_ID, NO_SEQUENCE, add_sequence


class Chunk(NamedTuple):
    """Acknowledged batches of one producer without a gap in their sequence numbers; fields as in `rows.Range`."""

    producer_id: int
    producer_epoch: int
    first_sequence: int
    spans: Spans
    record_count: int
    batches: int
    bytes: int

    @property
    def next_sequence(self) -> int:
        """The base_sequence of the producer's next batch."""
        return add_sequence(self.first_sequence, self.record_count) if self.first_sequence >= 0 else NO_SEQUENCE


MAX_INTERVALS: Final = 64
# For each partition this much is remembered, to name the first origin of an offset and to recognize resent batches: the
# last writes of MAX_REMEMBERED producers, MAX_SPANS_REMEMBERED spans of each, MAX_SPANS_TOGETHER in all. Each keeps its
# last LEAST_SPANS_REMEMBERED: a producer sends at most five batches again, and other producers' writes must not push
# them out.
MAX_REMEMBERED: Final = 128
MAX_SPANS_REMEMBERED: Final = 64
MAX_SPANS_TOGETHER: Final = 2048
LEAST_SPANS_REMEMBERED: Final = 8
# The number of partitions remembered; the one written to longest ago is forgotten first.
MAX_PARTITIONS: Final = 20_000
_SEQUENCES = 1 << 31


class Origin(NamedTuple):
    """The broker that assigned offsets, its revision, the client's connection."""

    owner: int
    revision: int
    connection: int
    client: str


class Overlap(NamedTuple):
    """Offsets from `first_offset` to `last_offset` that were assigned before.

    `earlier` None: it is not known any more which broker did.
    """

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    origin: Origin
    earlier: Origin | None


class _Remembered:
    """A chunk, and the chunks that continued it. `number` counts those of the partition before it."""

    __slots__ = ("next_sequence", "number", "origin", "producer", "spans")

    def __init__(self, chunk: Chunk, origin: Origin, number: int = 0) -> None:
        self.producer = (chunk.producer_id, chunk.producer_epoch)
        self.origin = origin
        self.number = number
        self.spans = chunk.spans[-2 * MAX_SPANS_REMEMBERED :]
        self.next_sequence = chunk.next_sequence

    @property
    def key(self) -> Hashable:
        """The `_key_of` a chunk that continues this one."""
        return (self.origin, self.producer, self.next_sequence)

    def extend(self, chunk: Chunk) -> None:
        extend_spans(self.spans, chunk.spans)
        del self.spans[: -2 * MAX_SPANS_REMEMBERED]
        self.next_sequence = chunk.next_sequence

    def covers(self, offset: int) -> bool:
        return any(first <= offset < first + count for first, count in _pairs(self.spans))

    def shift(self, offset: int) -> int | None:
        """Offset minus sequence number there: the same for a batch and its resend. None without a producer id."""
        if self.producer[0] == NO_PRODUCER_ID:
            return None
        # Count from the end, as the first spans may be forgotten.
        sequence = self.next_sequence
        for first, count in reversed(list(_pairs(self.spans))):
            sequence -= count
            if first <= offset < first + count:
                return (first - sequence) % _SEQUENCES
        return None


class OverlapDetector:
    """The assigned offsets of all partitions.

    `add` the chunks of a look, then `judge` them.
    """

    def __init__(self) -> None:
        # In the order of their last write.
        self._partitions: dict[Hashable, _Partition] = {}
        self._added: dict[_Partition, None] = {}

    def add(self, topic: str, topic_id: bytes | None, partition: int, origin: Origin, chunk: Chunk) -> None:
        """Take acknowledged offsets; `topic_id` is None where topics have none."""
        key = (topic, topic_id, partition)
        found = self._partitions.pop(key, None)
        if found is None:
            found = _Partition(topic, partition)
            if len(self._partitions) >= MAX_PARTITIONS:
                del self._partitions[next(iter(self._partitions))]
        elif topic_id is None and chunk.spans[0] == 0 and found.high > 0 and not found.is_resend(chunk):
            found = _Partition(topic, partition)
        self._partitions[key] = found
        self._added[found] = None
        found.add(chunk, origin)

    @property
    def has_added(self) -> bool:
        """Whether there is something to judge."""
        return bool(self._added)

    def judge(self, most: int = MAX_PARTITIONS) -> list[Overlap]:
        """Judge the added chunks of at most so many partitions.

        Return the overlaps.
        """
        overlaps: list[Overlap] = []
        for partition in list(islice(self._added, most)):
            # Removed first: an error in one partition must not recur at every look.
            del self._added[partition]
            overlaps += partition.judge()
        return overlaps


class _Partition:
    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.floor = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        # By `key`, in the order of their last write.
        self._remembered: dict[Hashable, _Remembered] = {}
        self._remembered_spans = 0
        self._number = 0
        self._added: list[tuple[Chunk, Origin]] = []

    @property
    def high(self) -> int:
        """One more than the highest offset assigned."""
        return self._ends[-1] if self._ends else self.floor

    def is_resend(self, chunk: Chunk) -> bool:
        """Whether the chunk's first batch is remembered at the very same offset."""
        return self._first_had(chunk.spans[0], _Remembered(chunk, _NOBODY)) is None

    def add(self, chunk: Chunk, origin: Origin) -> None:
        self._added.append((chunk, origin))

    def judge(self) -> list[Overlap]:
        added, self._added = self._added, []
        if len(added) == 1 and len(added[0][0].spans) == 2 and added[0][0].spans[0] >= self.high:
            self._append(*added[0][0].spans)
        elif not self._merge(added):
            return self._judge_singly(added)
        for chunk, origin in added:
            self._remember(chunk, origin)
        return []

    def _append(self, first: int, count: int) -> None:
        if self._ends and self._ends[-1] == first:
            self._ends[-1] += count
        else:
            self._starts.append(first)
            self._ends.append(first + count)
            self._forget()

    def _merge(self, added: Sequence[tuple[Chunk, Origin]]) -> bool:
        """Take all chunks in if none of their offsets was assigned before; whether it did."""
        merged = union(self.floor, self._starts, self._ends, [chunk.spans for chunk, _ in added], MAX_INTERVALS)
        if merged is None:
            return False
        self.floor, self._starts, self._ends = merged
        return True

    def _forget(self) -> None:
        excess = len(self._starts) - MAX_INTERVALS
        if excess > 0:
            self.floor = self._ends[excess - 1]
            del self._starts[:excess]
            del self._ends[:excess]

    def _judge_singly(self, added: Sequence[tuple[Chunk, Origin]]) -> list[Overlap]:
        overlaps: list[Overlap] = []
        for chunk, origin in added:
            now = _Remembered(chunk, origin)
            for first, count in _pairs(chunk.spans):
                for start, end in self._known(first, first + count):
                    earlier = self._first_had(start, now)
                    if earlier is not None:
                        named = None if earlier is _NOBODY else earlier
                        overlaps.append(Overlap(self.topic, self.partition, start, end - 1, origin, named))
                self._cover(first, first + count)
            self._remember(chunk, origin)
        self._forget()
        return overlaps

    def _known(self, first: int, end: int) -> list[tuple[int, int]]:
        """The parts of an interval that were assigned before, cut where their origins differ."""
        low = bisect_right(self._ends, first)
        high = bisect_left(self._starts, end)
        pairs = zip(self._starts[low:high], self._ends[low:high], strict=True)
        cuts = [
            first,
            *(edge for each in self._remembered.values() for edge in _edges(each.spans) if first < edge < end),
            end,
        ]
        parts = []
        for start, stop in ((max(first, start), min(end, stop)) for start, stop in pairs):
            inner = sorted({start, stop, *(cut for cut in cuts if start < cut < stop)})
            parts += list(pairwise(inner))
        return parts

    def _first_had(self, offset: int, now: _Remembered) -> Origin | None:
        """The first origin of the offset; None if it was this very batch, _NOBODY if it is forgotten."""
        holders = [each for each in self._remembered.values() if each.covers(offset)]
        shift = now.shift(offset)
        for each in holders:
            if shift is not None and each.producer == now.producer and each.shift(offset) == shift:
                return None
        return min(holders, key=attrgetter("number")).origin if holders else _NOBODY

    def _cover(self, first: int, end: int) -> None:
        low = bisect_left(self._ends, first)
        high = bisect_right(self._starts, end)
        if low < high:
            first = min(first, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [first]
        self._ends[low:high] = [end]

    def _remember(self, chunk: Chunk, origin: Origin) -> None:
        each = self._take_out(_key_of(chunk, origin))
        if each is None:
            self._number += 1
            each = _Remembered(chunk, origin, self._number)
        else:
            each.extend(chunk)
        # A resent chunk with the same end replaces the first.
        self._take_out(each.key)
        if len(self._remembered) >= MAX_REMEMBERED:
            self._take_out(next(iter(self._remembered)))
        self._remembered[each.key] = each
        self._remembered_spans += len(each.spans) // 2
        if self._remembered_spans > MAX_SPANS_TOGETHER:
            self._shorten()

    def _take_out(self, key: Hashable) -> _Remembered | None:
        each = self._remembered.pop(key, None)
        if each is not None:
            self._remembered_spans -= len(each.spans) // 2
        return each

    def _shorten(self) -> None:
        """Forget the first spans of those written to longest ago, until half of MAX_SPANS_TOGETHER are left."""
        for each in self._remembered.values():
            before = len(each.spans)
            del each.spans[: -2 * LEAST_SPANS_REMEMBERED]
            self._remembered_spans -= (before - len(each.spans)) // 2
            if self._remembered_spans <= MAX_SPANS_TOGETHER // 2:
                return


def _key_of(chunk: Chunk, origin: Origin) -> Hashable:
    return (origin, (chunk.producer_id, chunk.producer_epoch), chunk.first_sequence)


_NOBODY = Origin(-1, 0, 0, "")


def _pairs(spans: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(spans[0::2], spans[1::2], strict=True)


def _edges(spans: Sequence[int]) -> Iterable[int]:
    for first, count in _pairs(spans):
        yield first
        yield first + count

"""Detect offsets of a partition that were assigned twice.

The detector knows the offsets that this process has seen acknowledged.

Two owners of one partition cause that (split brain), and so does a new owner that lacks records which an earlier owner
had acknowledged. An idempotent batch that is sent again gets its first offset again; that is no overlap.

Invariants
1. The intervals of a partition are disjoint and in order, neighbours are joined, and there are at most MAX_INTERVALS:
   the lowest go first. Offsets below `floor` are forgotten and not judged.
2. An offset is reported once for each time it is assigned again.
3. A partition of a recreated topic is another partition. For topics without ids, offset 0 shows that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from operator import itemgetter
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
# last writes of MAX_REMEMBERED producers, MAX_SPANS_REMEMBERED spans of each, MAX_SPANS_TOGETHER of all. Each keeps its
# last LEAST_SPANS_REMEMBERED: a producer sends at most five batches again, and other producers' writes must not push
# them out. MAX_ADDED chunks may come in addition before the excess is forgotten.
MAX_REMEMBERED: Final = 128
MAX_ADDED: Final = 24
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


class _Write:
    """What is remembered of chunks that continue one another: the fields of the first, and the spans of all."""

    __slots__ = ("first_sequence", "next_sequence", "origin", "producer", "spans")

    def __init__(self, chunk: Chunk, origin: Origin) -> None:
        self.producer = chunk[:2]
        self.first_sequence = chunk.first_sequence
        self.next_sequence = chunk.next_sequence
        # A copy: these grow, and get shorter.
        self.spans = chunk.spans[:]
        self.origin = origin

    def covers(self, offset: int) -> bool:
        return any(first <= offset < first + count for first, count in _pairs(self.spans))

    def shorten(self, most: int) -> None:
        """Forget the first spans; leave at most `most` of them."""
        excess = 2 * (len(self.spans) // 2 - most)
        if excess > 0:
            if self.first_sequence >= 0:
                self.first_sequence = add_sequence(self.first_sequence, sum(self.spans[1:excess:2]))
            del self.spans[:excess]


class _LastWrites:
    """The last chunks written to a partition, in the order of arrival.

    A chunk that continues its producer's last one is added to that one.
    """

    def __init__(self) -> None:
        self._writes: list[_Write] = []
        self._latest: dict[Hashable, _Write] = {}
        self._spans = 0
        self._most = MAX_ADDED

    def __iter__(self) -> Iterator[_Write]:
        return iter(self._writes)

    def add(self, added: Sequence[tuple[Chunk, Origin]]) -> None:
        latest = self._latest
        for chunk, origin in added:
            key = (origin, chunk.producer_id, chunk.producer_epoch)
            write = latest.get(key)
            if write is not None and write.next_sequence == chunk.first_sequence:
                before = len(write.spans)
                extend_spans(write.spans, chunk.spans)
                write.next_sequence = chunk.next_sequence
                self._spans += (len(write.spans) - before) // 2
            else:
                latest[key] = write = _Write(chunk, origin)
                self._writes.append(write)
                self._spans += len(write.spans) // 2
        if len(self._writes) > self._most or self._spans > MAX_SPANS_TOGETHER:
            self._shorten()

    def first_origin(self, offset: int, now: Chunk) -> Origin | None:
        """The first origin of the offset; None if it was this very batch of `now`, _NOBODY if it is forgotten."""
        holders = [write for write in self._writes if write.covers(offset)]
        shift = _shift(now[0], now.first_sequence, now.spans, offset)
        if shift is not None:
            for write in holders:
                if write.producer == now[:2] and _shift(now[0], write.first_sequence, write.spans, offset) == shift:
                    return None
        return holders[0].origin if holders else _NOBODY

    def _shorten(self) -> None:
        """Forget the spans beyond the limits.

        Half of MAX_SPANS_TOGETHER is left. If there is not enough for all producers, those that wrote last get it.
        """
        newest_first: dict[Hashable, list[tuple[int, _Write]]] = {}
        for age, write in enumerate(reversed(self._writes)):
            newest_first.setdefault((write.origin, write.producer), []).append((age, write))
        spare = MAX_SPANS_TOGETHER // 2 - LEAST_SPANS_REMEMBERED * min(len(newest_first), MAX_REMEMBERED)
        kept: list[tuple[int, _Write]] = []
        for writes in islice(newest_first.values(), MAX_REMEMBERED):
            more = min(spare, MAX_SPANS_REMEMBERED - LEAST_SPANS_REMEMBERED)
            room = LEAST_SPANS_REMEMBERED + more
            for age, write in writes:
                write.shorten(room)
                kept.append((age, write))
                room -= len(write.spans) // 2
                if room <= 0:
                    break
            spare -= max(0, more - room)
        kept.sort(key=itemgetter(0), reverse=True)
        self._writes = [write for _, write in kept]
        self._latest = {(write.origin, *write.producer): write for write in self._writes}
        self._spans = sum(len(write.spans) // 2 for write in self._writes)
        self._most = len(self._writes) + MAX_ADDED


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
        found = self._partitions.get(key)
        if found is None:
            found = _Partition(topic, partition)
            if len(self._partitions) >= MAX_PARTITIONS:
                del self._partitions[next(iter(self._partitions))]
        elif topic_id is None and chunk.spans[0] == 0 and found.high > 0 and not found.is_resend(chunk):
            found = _Partition(topic, partition)
        if found not in self._added:
            self._added[found] = None
            # Now it is the last one written to.
            self._partitions.pop(key, None)
            self._partitions[key] = found
        found.added.append((chunk, origin))

    @property
    def has_added(self) -> bool:
        """Whether there is something to judge."""
        return bool(self._added)

    def judge(self, most: int = MAX_PARTITIONS) -> list[Overlap]:
        """Judge the added chunks of at most `most` partitions.

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
        self._last_writes = _LastWrites()
        self.added: list[tuple[Chunk, Origin]] = []

    @property
    def high(self) -> int:
        """One more than the highest offset assigned."""
        return self._ends[-1] if self._ends else self.floor

    def is_resend(self, chunk: Chunk) -> bool:
        """Whether the chunk's first batch is remembered at the very same offset."""
        return self._last_writes.first_origin(chunk.spans[0], chunk) is None

    def judge(self) -> list[Overlap]:
        added, self.added = self.added, []
        if len(added) == 1 and len(added[0][0].spans) == 2 and added[0][0].spans[0] >= self.high:
            self._append(*added[0][0].spans)
        elif not self._merge(added):
            return self._judge_singly(added)
        self._last_writes.add(added)
        return []

    def _append(self, first: int, count: int) -> None:
        if self._ends and self._ends[-1] == first:
            self._ends[-1] += count
        else:
            self._starts.append(first)
            self._ends.append(first + count)
            self._forget()

    def _merge(self, added: Sequence[tuple[Chunk, Origin]]) -> bool:
        """Take all chunks in if none of their offsets was assigned before; return whether it did."""
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
            for first, count in _pairs(chunk.spans):
                for start, end in self._known(first, first + count):
                    earlier = self._last_writes.first_origin(start, chunk)
                    if earlier is not None:
                        named = None if earlier is _NOBODY else earlier
                        overlaps.append(Overlap(self.topic, self.partition, start, end - 1, origin, named))
                self._cover(first, first + count)
            self._last_writes.add(((chunk, origin),))
        self._forget()
        return overlaps

    def _known(self, first: int, end: int) -> list[tuple[int, int]]:
        """The parts of an interval that were assigned before, cut where their origins differ."""
        low = bisect_right(self._ends, first)
        high = bisect_left(self._starts, end)
        pairs = zip(self._starts[low:high], self._ends[low:high], strict=True)
        cuts = [
            first,
            *(edge for write in self._last_writes for edge in _edges(write.spans) if first < edge < end),
            end,
        ]
        parts = []
        for start, stop in ((max(first, start), min(end, stop)) for start, stop in pairs):
            inner = sorted({start, stop, *(cut for cut in cuts if start < cut < stop)})
            parts += list(pairwise(inner))
        return parts

    def _cover(self, first: int, end: int) -> None:
        low = bisect_left(self._ends, first)
        high = bisect_right(self._starts, end)
        if low < high:
            first = min(first, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [first]
        self._ends[low:high] = [end]


_NOBODY = Origin(-1, 0, 0, "")


def _shift(producer_id: int, first_sequence: int, spans: Spans, offset: int) -> int | None:
    """Offset minus sequence number there: the same for a batch and its resend. None without a producer id."""
    if producer_id == NO_PRODUCER_ID:
        return None
    sequence = first_sequence
    for first, count in _pairs(spans):
        if first <= offset < first + count:
            return (first - sequence) % _SEQUENCES
        sequence += count
    return None


def _pairs(spans: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(spans[0::2], spans[1::2], strict=True)


def _edges(spans: Sequence[int]) -> Iterable[int]:
    for first, count in _pairs(spans):
        yield first
        yield first + count

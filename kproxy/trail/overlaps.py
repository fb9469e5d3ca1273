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
from typing import Final, NamedTuple, TypeAlias

from kproxy.trail.spans import Chunk, union
from kproxy_codec.record_batch import NO_PRODUCER_ID

MAX_INTERVALS: Final = 64
# For each partition this much is remembered, to name the first origin of an offset and to recognize resent batches: the
# last writes of MAX_REMEMBERED producers, MAX_SPANS_REMEMBERED spans of each (which grow to twice as many before the
# first of them are forgotten), MAX_SPANS_TOGETHER of all. Each keeps its last LEAST_SPANS_REMEMBERED: a producer sends
# at most five batches again, and other producers' writes must not push them out. MAX_ADDED chunks may come in addition
# before the excess is forgotten.
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


class PartitionKey(NamedTuple):
    """A partition of a topic; `topic_id` is None where topics have none."""

    topic: str
    topic_id: bytes | None
    partition: int


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


_Write: TypeAlias = tuple[Origin, Chunk]


class _LastWrites:
    """The last chunks written to a partition, in the order of arrival.

    A chunk that continues its producer's last one is added to that one.
    """

    def __init__(self) -> None:
        self._writes: list[_Write] = []
        self._latest: dict[Hashable, Chunk] = {}
        # At least the number of spans in them.
        self._spans = 0
        self._most = MAX_ADDED

    def __iter__(self) -> Iterator[_Write]:
        return iter(self._writes)

    def add(self, added: Iterable[_Write]) -> None:
        """Remember chunks; they are extended here from now on."""
        latest = self._latest
        for write in added:
            origin, chunk = write
            key = (origin, chunk.producer_id, chunk.producer_epoch)
            last = latest.get(key)
            if last is None or not last.extend(chunk):
                latest[key] = chunk
                self._writes.append(write)
            elif len(last.spans) > 4 * MAX_SPANS_REMEMBERED:
                last.shorten(MAX_SPANS_REMEMBERED)
            self._spans += len(chunk.spans) // 2
        if len(self._writes) > self._most or (self._spans > MAX_SPANS_TOGETHER and self._count() > MAX_SPANS_TOGETHER):
            self._shorten()

    def _count(self) -> int:
        self._spans = sum(len(chunk.spans) // 2 for _, chunk in self._writes)
        return self._spans

    def first_origin(self, offset: int, now: Chunk) -> Origin | None:
        """The first origin of the offset; None if it was this very batch of `now`, _NOBODY if it is forgotten."""
        holders = [write for write in self._writes if _covers(write[1], offset)]
        shift = _shift(now, offset)
        if shift is not None:
            producer = _producer(now)
            for _, chunk in holders:
                if _producer(chunk) == producer and _shift(chunk, offset) == shift:
                    return None
        return holders[0][0] if holders else _NOBODY

    def _shorten(self) -> None:
        """Forget the spans beyond the limits.

        Half of MAX_SPANS_TOGETHER is left. If there is not enough for all producers, those that wrote last get it.
        """
        newest_first: dict[Hashable, list[tuple[int, _Write]]] = {}
        for age, write in enumerate(reversed(self._writes)):
            newest_first.setdefault((write[0], *_producer(write[1])), []).append((age, write))
        spare = MAX_SPANS_TOGETHER // 2 - LEAST_SPANS_REMEMBERED * min(len(newest_first), MAX_REMEMBERED)
        kept: list[tuple[int, _Write]] = []
        for writes in islice(newest_first.values(), MAX_REMEMBERED):
            more = min(spare, MAX_SPANS_REMEMBERED - LEAST_SPANS_REMEMBERED)
            room = LEAST_SPANS_REMEMBERED + more
            for age, write in writes:
                write[1].shorten(room)
                kept.append((age, write))
                room -= len(write[1].spans) // 2
                if room <= 0:
                    break
            spare -= max(0, more - room)
        kept.sort(key=itemgetter(0), reverse=True)
        self._writes = [write for _, write in kept]
        self._latest = {(origin, *_producer(chunk)): chunk for origin, chunk in self._writes}
        self._count()
        self._most = len(self._writes) + MAX_ADDED


class OverlapDetector:
    """The assigned offsets of all partitions.

    `add` the chunks of a look, then `judge` them.
    """

    def __init__(self) -> None:
        # In the order of their last write.
        self._partitions: dict[PartitionKey, _Partition] = {}
        # Those with something to judge.
        self._added: dict[_Partition, None] = {}

    def add(self, key: PartitionKey, origin: Origin, chunk: Chunk) -> None:
        """Take acknowledged offsets; the chunk is extended here from now on."""
        found = self._partitions.get(key)
        if found is None:
            found = _Partition(key)
            if len(self._partitions) >= MAX_PARTITIONS:
                del self._partitions[next(iter(self._partitions))]
        elif key.topic_id is None and chunk.spans[0] == 0 and found.high > 0 and not found.is_resend(chunk):
            found = _Partition(key)
        if not found.added:
            self._added[found] = None
            # Now it is the last one written to.
            self._partitions.pop(key, None)
            self._partitions[key] = found
        found.added.append((origin, chunk))

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
    def __init__(self, key: PartitionKey) -> None:
        self.key = key
        self.floor = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._last_writes = _LastWrites()
        self.added: list[_Write] = []

    @property
    def high(self) -> int:
        """One more than the highest offset assigned."""
        return self._ends[-1] if self._ends else self.floor

    def is_resend(self, chunk: Chunk) -> bool:
        """Whether the chunk's first batch is remembered at the very same offset."""
        return self._last_writes.first_origin(chunk.spans[0], chunk) is None

    def judge(self) -> list[Overlap]:
        added, self.added = self.added, []
        if len(added) == 1 and len(added[0][1].spans) == 2 and added[0][1].spans[0] >= self.high:
            self._append(*added[0][1].spans)
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

    def _merge(self, added: Sequence[_Write]) -> bool:
        """Take all chunks in if none of their offsets was assigned before; return whether it did."""
        merged = union(self.floor, self._starts, self._ends, [chunk.spans for _, chunk in added], MAX_INTERVALS)
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

    def _judge_singly(self, added: Sequence[_Write]) -> list[Overlap]:
        overlaps: list[Overlap] = []
        for write in added:
            origin, chunk = write
            for first, count in _pairs(chunk.spans):
                for start, end in self._known(first, first + count):
                    earlier = self._last_writes.first_origin(start, chunk)
                    if earlier is not None:
                        named = None if earlier is _NOBODY else earlier
                        overlaps.append(Overlap(self.key.topic, self.key.partition, start, end - 1, origin, named))
                self._cover(first, first + count)
            self._last_writes.add((write,))
        self._forget()
        return overlaps

    def _known(self, first: int, end: int) -> list[tuple[int, int]]:
        """The parts of an interval that were assigned before, cut where their origins differ."""
        low = bisect_right(self._ends, first)
        high = bisect_left(self._starts, end)
        pairs = zip(self._starts[low:high], self._ends[low:high], strict=True)
        cuts = [
            first,
            *(edge for _, chunk in self._last_writes for edge in _edges(chunk.spans) if first < edge < end),
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


def _covers(chunk: Chunk, offset: int) -> bool:
    return any(first <= offset < first + count for first, count in _pairs(chunk.spans))


def _producer(chunk: Chunk) -> tuple[int, int]:
    return chunk.producer_id, chunk.producer_epoch


def _shift(chunk: Chunk, offset: int) -> int | None:
    """Offset minus sequence number there: the same for a batch and its resend. None without a producer id."""
    if chunk.producer_id == NO_PRODUCER_ID:
        return None
    sequence = chunk.first_sequence
    for first, count in _pairs(chunk.spans):
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

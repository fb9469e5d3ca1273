"""Detect offsets of a partition that brokers have assigned twice, among those that this process saw acknowledged.

The cause is two owners of one partition (split brain), or a new owner that lacks records acknowledged by an earlier
one. An idempotent batch that is sent again gets its first offset again; that is not an overlap.

Invariants
1. The intervals of a partition are disjoint and in order, neighbours are joined, and there are at most MAX_INTERVALS:
   the lowest go first. Offsets below `floor` are forgotten and not judged.
2. An offset is reported once for each time it is assigned again.
3. A partition of a recreated topic is another partition. For topics without ids, offset 0 shows that.
4. A writer's references are checked before use: the detector must still have the partition, and the write at its place
   must be the writer's own. A forgotten partition keeps nothing once it is judged, so that any number of writers keep
   no more than the detector.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice, pairwise
from operator import itemgetter
from typing import Final, NamedTuple, Protocol, TypeAlias

from kproxy.trail.spans import Chunk, Intervals
from kproxy_codec.record_batch import NO_PRODUCER_ID

MAX_INTERVALS: Final = 64
# The memory of each partition, used to name the first origin of an offset and to recognise resent batches: the last
# writes of MAX_REMEMBERED producers, MAX_SPANS_REMEMBERED spans of each (which grow to twice as many before the first
# of them are forgotten), MAX_SPANS_TOGETHER of all. Each keeps its last LEAST_SPANS_REMEMBERED: a producer sends at
# most five batches again, and other producers' writes must not push them out. MAX_ADDED chunks may come in addition
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
    """The broker that assigned offsets, the revision of its ownership, and the client's connection."""

    owner: int
    revision: int
    connection: int
    client: str


class PartitionKey(NamedTuple):
    """A partition of a topic; `topic_id` is None if topics have none."""

    topic: str
    topic_id: bytes | None
    partition: int


class Overlap(NamedTuple):
    """Offsets from `first_offset` to `last_offset` that were assigned before.

    `earlier`: the first origin; None if it is no longer known.
    """

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    origin: Origin
    earlier: Origin | None


class Writer(Protocol):
    """A client connection that writes to a partition under one ownership.

    It caches lookups of the detector: its `partition`, and `place`, the position of its own last write there. Either
    may be out of date.
    """

    key: PartitionKey
    origin: Origin
    partition: _Partition | None
    place: int


_Write: TypeAlias = tuple[Origin, Chunk]
_Added: TypeAlias = tuple[Writer, Chunk]


class _LastWrites:
    """The last chunks written to a partition, in the order of arrival.

    A chunk that continues its producer's last one is added to that one.
    """

    __slots__ = ("_spans", "most", "writes")

    def __init__(self) -> None:
        self.writes: list[_Write] = []
        # Limit of writes before the first are forgotten.
        self.most = MAX_ADDED
        # At least the number of their spans.
        self._spans = 0

    def add(self, added: Iterable[_Added]) -> bool:
        """Remember chunks, which are extended here from now on; return whether the excess must be forgotten."""
        for writer, chunk in added:
            last = self._last(writer, chunk)
            if last is None or not last.extend(chunk):
                writer.place = len(self.writes)
                self.writes.append((writer.origin, chunk))
            elif last.span_count > 2 * MAX_SPANS_REMEMBERED:
                last.shorten(MAX_SPANS_REMEMBERED)
            self._spans += chunk.span_count
        return len(self.writes) > self.most or (self._spans > MAX_SPANS_TOGETHER and self.count() > MAX_SPANS_TOGETHER)

    def count(self) -> int:
        """Return the number of spans."""
        self._spans = sum(chunk.span_count for _, chunk in self.writes)
        return self._spans

    def _last(self, writer: Writer, chunk: Chunk) -> Chunk | None:
        """Return the last write of the chunk's producer by this writer."""
        producer = _producer(chunk)
        if writer.place < len(self.writes):
            origin, last = self.writes[writer.place]
            if origin is writer.origin and _producer(last) == producer:
                return last
        for place in range(len(self.writes) - 1, -1, -1):
            origin, last = self.writes[place]
            if origin is writer.origin and _producer(last) == producer:
                writer.place = place
                return last
        return None

    def first_origin(self, offset: int, now: Chunk) -> Origin | None:
        """Return the first origin of the offset; None if it was the batch `now`, _NOBODY if it is forgotten."""
        holders = [write for write in self.writes if _covers(write[1], offset)]
        shift = _shift(now, offset)
        if shift is not None:
            producer = _producer(now)
            for _, chunk in holders:
                if _producer(chunk) == producer and _shift(chunk, offset) == shift:
                    return None
        return holders[0][0] if holders else _NOBODY

    def forget_excess(self) -> None:
        """Forget the spans beyond the limits.

        Half of MAX_SPANS_TOGETHER is left. If that is not enough for all producers, those that wrote last keep theirs.
        """
        newest_first: dict[Hashable, list[tuple[int, _Write]]] = {}
        for age, write in enumerate(reversed(self.writes)):
            newest_first.setdefault((write[0], *_producer(write[1])), []).append((age, write))
        spare = MAX_SPANS_TOGETHER // 2 - LEAST_SPANS_REMEMBERED * min(len(newest_first), MAX_REMEMBERED)
        kept: list[tuple[int, _Write]] = []
        for writes in islice(newest_first.values(), MAX_REMEMBERED):
            more = min(spare, MAX_SPANS_REMEMBERED - LEAST_SPANS_REMEMBERED)
            room = LEAST_SPANS_REMEMBERED + more
            for age, write in writes:
                write[1].shorten(room)
                kept.append((age, write))
                room -= write[1].span_count
                if room <= 0:
                    break
            spare -= max(0, more - room)
        kept.sort(key=itemgetter(0), reverse=True)
        self.writes = [write for _, write in kept]
        self.count()
        self.most = len(self.writes) + MAX_ADDED


class OverlapDetector:
    """The assigned offsets of all partitions.

    `add` the chunks of a look, then `judge` them.
    """

    __slots__ = ("added", "partitions")

    def __init__(self) -> None:
        # In the order of their last write.
        self.partitions: dict[PartitionKey, _Partition] = {}
        # Partitions with chunks to judge.
        self.added: deque[_Partition] = deque()

    def add(self, writer: Writer, chunk: Chunk) -> None:
        """Add acknowledged offsets; the chunk is extended here from now on."""
        found = writer.partition
        if found is None or not found.is_kept:
            found = writer.partition = self._find(writer.key)
        if not chunk.base_offset and found.is_recreated(chunk):
            found = writer.partition = self._begin(writer.key)
        if not found.added:
            self.added.append(found)
            # Move it to the end: it is the last partition written to.
            del self.partitions[writer.key]
            self.partitions[writer.key] = found
        found.added.append((writer, chunk))

    def _find(self, key: PartitionKey) -> _Partition:
        found = self.partitions.get(key)
        if found is not None:
            return found
        if len(self.partitions) >= MAX_PARTITIONS:
            self.partitions.pop(next(iter(self.partitions))).forget()
        return self._begin(key)

    def _begin(self, key: PartitionKey) -> _Partition:
        earlier = self.partitions.get(key)
        if earlier is not None:
            earlier.forget()
        found = self.partitions[key] = _Partition(key)
        return found

    @property
    def has_added(self) -> bool:
        """Whether there are chunks to judge."""
        return bool(self.added)

    def judge(self, most: int = MAX_PARTITIONS) -> list[Overlap]:
        """Judge the added chunks of at most `most` partitions.

        Return the overlaps.
        """
        overlaps: list[Overlap] = []
        for _ in range(min(most, len(self.added))):
            # Removed first: an error in one partition must not recur at every look.
            overlaps += self.added.popleft().judge()
        return overlaps


class _Partition:
    """A partition; the chunks that are `added` to it are judged together.

    `is_kept`: the detector still has it; writers may refer to it for longer.
    """

    __slots__ = ("_last_writes", "added", "intervals", "is_kept", "key")

    def __init__(self, key: PartitionKey) -> None:
        self.key = key
        self.is_kept = True
        self.intervals = Intervals()
        self.added: list[_Added] = []
        self._last_writes = _LastWrites()

    def is_recreated(self, chunk: Chunk) -> bool:
        """Return whether a chunk that begins with offset 0 is in another topic of the same name.

        If its first batch is remembered at offset 0 it is a resend, in the same topic.
        """
        if self.key.topic_id is not None or not self.intervals.high:
            return False
        return self._last_writes.first_origin(0, chunk) is not None

    def forget(self) -> None:
        """Leave the detector once the added chunks are judged."""
        self.is_kept = False
        if not self.added:
            self.intervals, self._last_writes = Intervals(), _LastWrites()

    def judge(self) -> list[Overlap]:
        added, self.added = self.added, []
        overlaps: list[Overlap] = []
        if not self.intervals.take(added, MAX_INTERVALS):
            overlaps = self._judge_singly(added)
        elif self._last_writes.add(added):
            self._last_writes.forget_excess()
        if not self.is_kept:
            self.forget()
        return overlaps

    def _judge_singly(self, added: Sequence[_Added]) -> list[Overlap]:
        overlaps: list[Overlap] = []
        starts, ends = self.intervals.starts, self.intervals.ends
        for writer, chunk in added:
            for first, count in _pairs(chunk.spans):
                for start, end in self._known(starts, ends, first, first + count):
                    earlier = self._last_writes.first_origin(start, chunk)
                    if earlier is not None:
                        named = None if earlier is _NOBODY else earlier
                        overlap = Overlap(self.key.topic, self.key.partition, start, end - 1, writer.origin, named)
                        overlaps.append(overlap)
                _cover(starts, ends, first, first + count)
            if self._last_writes.add([(writer, chunk)]):
                self._last_writes.forget_excess()
        excess = len(starts) - MAX_INTERVALS
        floor = ends[excess - 1] if excess > 0 else self.intervals.floor
        self.intervals.replace(floor, starts[max(excess, 0) :], ends[max(excess, 0) :])
        return overlaps

    def _known(self, starts: list[int], ends: list[int], first: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of an interval that were assigned before, split where their origins differ."""
        low = bisect_right(ends, first)
        high = bisect_left(starts, end)
        pairs = zip(starts[low:high], ends[low:high], strict=True)
        cuts = [
            first,
            *(edge for _, chunk in self._last_writes.writes for edge in _edges(chunk.spans) if first < edge < end),
            end,
        ]
        parts = []
        for start, stop in ((max(first, start), min(end, stop)) for start, stop in pairs):
            inner = sorted({start, stop, *(cut for cut in cuts if start < cut < stop)})
            parts += list(pairwise(inner))
        return parts


def _cover(starts: list[int], ends: list[int], first: int, end: int) -> None:
    low = bisect_left(ends, first)
    high = bisect_right(starts, end)
    if low < high:
        first = min(first, starts[low])
        end = max(end, ends[high - 1])
    starts[low:high] = [first]
    ends[low:high] = [end]


_NOBODY = Origin(-1, 0, 0, "")


def _covers(chunk: Chunk, offset: int) -> bool:
    return any(first <= offset < first + count for first, count in _pairs(chunk.spans))


def _producer(chunk: Chunk) -> tuple[int, int]:
    return chunk.producer_id, chunk.producer_epoch


def _shift(chunk: Chunk, offset: int) -> int | None:
    """Return offset minus sequence number, equal for a batch and its resend; None without a producer id."""
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

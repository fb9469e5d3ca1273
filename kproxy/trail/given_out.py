"""The offsets of a partition that this process has seen given out: an offset that is given out twice is told at once.

That is what two owners of one partition do to it (split brain), and a new owner that lacks what an earlier one had
acknowledged. An idempotent batch that is sent again gets its first offset again, and that is none.

Invariants
1. The intervals are disjoint and in order, neighbours are one, and there are at most MAX_INTERVALS of them: the lowest
   go first. What lies below `floor` is not known any more, and not judged.
2. An offset is reported once for each time it is given out again.
3. A partition of a topic that was made anew is another partition. Where topics have no ids, offset 0 tells that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice, pairwise
from operator import add, attrgetter, eq, le
from typing import Final, NamedTuple

from kproxy.trail.chunks import Chunk, extend_spans
from kproxy_codec.record_batch import NO_PRODUCER_ID

MAX_INTERVALS: Final = 64
# What is remembered of a partition, to name who had an offset first and to know what is sent again: what so many
# producers wrote last, so many spans of each. All together have fewer where they are many, but each the last few: a
# producer sends at most five batches again, and what others wrote meanwhile must not let them be forgotten.
MAX_REMEMBERED: Final = 128
MAX_SPANS_REMEMBERED: Final = 64
MAX_SPANS_TOGETHER: Final = 2048
LEAST_SPANS_REMEMBERED: Final = 8
# So many partitions are remembered; the one that was written to longest ago goes first.
MAX_PARTITIONS: Final = 20_000
_SEQUENCES = 1 << 31


class Giver(NamedTuple):
    """Who gave out offsets, to whom: the broker, the revision of its ownership, and the client's connection."""

    owner: int
    revision: int
    connection: int
    client: str


class Overlap(NamedTuple):
    """Offsets from `first_offset` to `last_offset` that were given out before.

    `earlier` None: they were, but it is not known any more by whom.
    """

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    giver: Giver
    earlier: Giver | None


class _Remembered:
    """A chunk that was noted, and what went on with it, for as long as it may have to be named.

    `number`: how many of the partition came before it.
    """

    __slots__ = ("giver", "next_sequence", "number", "producer", "spans")

    def __init__(self, chunk: Chunk, giver: Giver, number: int = 0) -> None:
        self.producer = (chunk.producer_id, chunk.producer_epoch)
        self.giver = giver
        self.number = number
        self.spans = chunk.spans[-2 * MAX_SPANS_REMEMBERED :]
        self.next_sequence = chunk.next_sequence

    @property
    def key(self) -> Hashable:
        """What a chunk begins with that is more of the same (`_key_of`)."""
        return (self.giver, self.producer, self.next_sequence)

    def extend(self, chunk: Chunk) -> None:
        extend_spans(self.spans, chunk.spans)
        del self.spans[: -2 * MAX_SPANS_REMEMBERED]
        self.next_sequence = chunk.next_sequence

    def covers(self, offset: int) -> bool:
        return any(first <= offset < first + count for first, count in _pairs(self.spans))

    def shift(self, offset: int) -> int | None:
        """How far the sequence number is behind the offset there: the same for a batch and its resend. None: no id."""
        if self.producer[0] == NO_PRODUCER_ID:
            return None
        # Counted from the end, as the first spans may be forgotten.
        sequence = self.next_sequence
        for first, count in reversed(list(_pairs(self.spans))):
            sequence -= count
            if first <= offset < first + count:
                return (first - sequence) % _SEQUENCES
        return None


class GivenOut:
    """What was given out of all partitions. `add` what a look has found, then `judge` all of it."""

    def __init__(self) -> None:
        # The one that was written to last comes last.
        self._partitions: dict[Hashable, _Partition] = {}
        self._added: dict[_Partition, None] = {}

    def add(self, topic: str, topic_id: bytes | None, partition: int, giver: Giver, chunk: Chunk) -> None:
        """These offsets have been given out; `topic_id` None where topics have none."""
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
        found.add(chunk, giver)

    @property
    def has_added(self) -> bool:
        """Whether there is something to judge."""
        return bool(self._added)

    def judge(self, most: int = MAX_PARTITIONS) -> list[Overlap]:
        """What of that which was added was given out before, of so many partitions at most."""
        overlaps: list[Overlap] = []
        for partition in list(islice(self._added, most)):
            # Taken out first: what goes wrong with one of them must not do so again at every look.
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
        # By what goes on with each; the one that was written to last comes last.
        self._remembered: dict[Hashable, _Remembered] = {}
        self._remembered_spans = 0
        self._number = 0
        self._added: list[tuple[Chunk, Giver]] = []

    @property
    def high(self) -> int:
        """Behind the highest offset that was given out."""
        return self._ends[-1] if self._ends else self.floor

    def is_resend(self, chunk: Chunk) -> bool:
        """Whether the chunk's first batch is one that is remembered at the very same offset."""
        return self._first_had(chunk.spans[0], _Remembered(chunk, _NOBODY)) is None

    def add(self, chunk: Chunk, giver: Giver) -> None:
        self._added.append((chunk, giver))

    def judge(self) -> list[Overlap]:
        added, self._added = self._added, []
        if len(added) == 1 and len(added[0][0].spans) == 2 and added[0][0].spans[0] >= self.high:
            self._append(*added[0][0].spans)
        elif not self._merge(added):
            return self._judge_singly(added)
        for chunk, giver in added:
            self._remember(chunk, giver)
        return []

    def _append(self, first: int, count: int) -> None:
        if self._ends and self._ends[-1] == first:
            self._ends[-1] += count
        else:
            self._starts.append(first)
            self._ends.append(first + count)
            self._forget()

    def _merge(self, added: Sequence[tuple[Chunk, Giver]]) -> bool:
        """Take all of them in, if nothing of them was given out before."""
        starts, ends = self._starts.copy(), self._ends.copy()
        for chunk, _ in added:
            firsts = chunk.spans[0::2]
            starts += firsts
            ends += map(add, firsts, chunk.spans[1::2])
        # Each connection's are in order already, which makes this cheap.
        starts.sort()
        ends.sort()
        # How many intervals an offset lies in is how many begin up to it, less how many end. So all are disjoint just
        # where of those in order the second begins behind the first end, the third behind the second, and so on.
        behind = starts[1:]
        if starts[0] < self.floor or not all(map(le, ends, behind)):
            return False
        if behind == ends[:-1]:
            left, right = starts[:1], ends[-1:]
        else:
            joins = list(map(eq, behind, ends))
            left = [starts[0], *(start for start, joined in zip(behind, joins, strict=True) if not joined)]
            right = [*(end for end, joined in zip(ends, joins, strict=False) if not joined), ends[-1]]
        self._starts, self._ends = left, right
        self._forget()
        return True

    def _forget(self) -> None:
        excess = len(self._starts) - MAX_INTERVALS
        if excess > 0:
            self.floor = self._ends[excess - 1]
            del self._starts[:excess]
            del self._ends[:excess]

    def _judge_singly(self, added: Sequence[tuple[Chunk, Giver]]) -> list[Overlap]:
        overlaps: list[Overlap] = []
        for chunk, giver in added:
            now = _Remembered(chunk, giver)
            for first, count in _pairs(chunk.spans):
                for start, end in self._known(first, first + count):
                    earlier = self._first_had(start, now)
                    if earlier is not None:
                        named = None if earlier is _NOBODY else earlier
                        overlaps.append(Overlap(self.topic, self.partition, start, end - 1, giver, named))
                self._cover(first, first + count)
            self._remember(chunk, giver)
        self._forget()
        return overlaps

    def _known(self, first: int, end: int) -> list[tuple[int, int]]:
        """The parts of an interval that were given out, by whom each."""
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

    def _first_had(self, offset: int, now: _Remembered) -> Giver | None:
        """Who was given the offset before; None where it was this very batch, and _NOBODY where it is not known."""
        holders = [each for each in self._remembered.values() if each.covers(offset)]
        shift = now.shift(offset)
        for each in holders:
            if shift is not None and each.producer == now.producer and each.shift(offset) == shift:
                return None
        return min(holders, key=attrgetter("number")).giver if holders else _NOBODY

    def _cover(self, first: int, end: int) -> None:
        low = bisect_left(self._ends, first)
        high = bisect_right(self._starts, end)
        if low < high:
            first = min(first, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [first]
        self._ends[low:high] = [end]

    def _remember(self, chunk: Chunk, giver: Giver) -> None:
        each = self._take_out(_key_of(chunk, giver))
        if each is None:
            self._number += 1
            each = _Remembered(chunk, giver, self._number)
        else:
            each.extend(chunk)
        # The same once more, sent again and ending alike, takes the first one's place.
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
        """Of those that were written to longest ago the first spans are forgotten, until half of all are left."""
        for each in self._remembered.values():
            before = len(each.spans)
            del each.spans[: -2 * LEAST_SPANS_REMEMBERED]
            self._remembered_spans -= (before - len(each.spans)) // 2
            if self._remembered_spans <= MAX_SPANS_TOGETHER // 2:
                return


def _key_of(chunk: Chunk, giver: Giver) -> Hashable:
    return (giver, (chunk.producer_id, chunk.producer_epoch), chunk.first_sequence)


_NOBODY = Giver(-1, 0, 0, "")


def _pairs(spans: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(spans[0::2], spans[1::2], strict=True)


def _edges(spans: Sequence[int]) -> Iterable[int]:
    for first, count in _pairs(spans):
        yield first
        yield first + count

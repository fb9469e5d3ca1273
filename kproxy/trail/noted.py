"""What is noted of acknowledgements on the path of a request: the offset that a broker gave a batch, from its answer,
and three fields of the batch's header, from the request, each where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, Protocol

from kproxy.routing.merge import Exchange
from kproxy.routing.split import Entry, Selection
from kproxy.routing.topology import Topology
from kproxy.trail.acked import MOST_FINISHED, ONE_BATCH, Acked, Asked
from kproxy.trail.given_out import Giver
from kproxy_codec.framing import client_id
from kproxy_codec.partitioned import PartitionedRequest, PlainAnswer
from kproxy_codec.primitives import INT64, Buffer
from kproxy_codec.produce import records_span
from kproxy_codec.record_batch import HEADER_BYTES

if TYPE_CHECKING:
    from kproxy.trail.trail import Trail

# A client may write to any number of partitions, and call itself anything.
MAX_PARTITIONS = 10_000
MAX_CLIENT_ID_BYTES = 255
# Higher than any revision.
_NOW = 1 << 63
# In a partition's result: behind its index and error code.
_BASE_OFFSET = 6
# The shortest entry with a record in it.
_LEAST = 4 + 4 + HEADER_BYTES
# How long a partition's entry is at most that says the length of its records in one byte, in two and in three: with
# its index, 4 bytes, and no tagged field, 1 byte.
_ONE = 4 + 1 + (1 << 7) - 2 + 1
_TWO = 4 + 2 + (1 << 14) - 2 + 1
_THREE = 4 + 3 + (1 << 21) - 2 + 1
# last_offset_delta, producer_id and producer_epoch together, base_sequence
_head = Struct(">23xi16x10si").unpack_from
_base = INT64.unpack_from


class Connection(Protocol):
    """What leads to a broker."""

    owner: int


class Noted(Protocol):
    """What there is to note of the answers to one part of a plan (kproxy.routing.routes)."""

    def note(self, asked: Asked, answer: memoryview) -> None:
        """All of the part was acknowledged, by this plain answer."""
        ...


class NotedEntry:
    """A part of one entry, or one of several."""

    __slots__ = ("_acked", "_ordinal", "_place", "_topic_place")

    def __init__(self, acked: Acked, topic_place: int, ordinal: int, place: int) -> None:
        """Where the entry lies: in the request, and where its base_offset stands in the answer."""
        self._acked = acked
        self._topic_place = topic_place
        self._ordinal = ordinal
        self._place = place

    def note(self, asked: Asked, answer: memoryview) -> None:
        request = asked.request
        frame = request.frame
        topic = request.topics[self._topic_place]
        start = topic.starts[self._ordinal]
        size = topic.ends[self._ordinal] - start
        flexible = request.flexible
        # Nearly all are like this.
        if flexible and _ONE < size <= _TWO:
            start += 6
            size -= 7
        elif size < _LEAST:
            return
        elif not flexible:
            start += 8
            size -= 8
        elif _TWO < size <= _THREE:
            start += 7
            size -= 8
        else:
            # What is no header's length may be tagged fields: nothing says how much of the frame lies behind it.
            start, end = records_span(request, topic, self._ordinal)
            size = end - start
            if size < HEADER_BYTES:
                return
        delta, producer, sequence = _head(frame, start)
        (base_offset,) = _base(answer, self._place)
        acked = self._acked
        if sequence == acked.next_sequence and producer == acked.producer:
            count = delta + 1
            if base_offset != acked.next_offset:
                spans = acked.spans
                if base_offset < 0 or len(spans) >= MOST_FINISHED:
                    acked.turn(asked, frame, start, base_offset, size)
                    return
                spans += (acked.first_offset, acked.next_offset - acked.first_offset)
                acked.first_offset = base_offset
            acked.next_offset = base_offset + count
            if acked.counts_sequences:
                acked.next_sequence = sequence + count
            acked.volume += size + ONE_BATCH
        else:
            acked.turn(asked, frame, start, base_offset, size)


class NotedEntries:
    """A part of several entries, each of which may be told by itself."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Sequence[NotedEntry]) -> None:
        self._entries = tuple(entries)

    def note(self, asked: Asked, answer: memoryview) -> None:
        for entry in self._entries:
            entry.note(asked, answer)


class ConnectionAcks:
    """One client connection's part of the trail."""

    def __init__(self, trail: Trail, topology: Topology, connection: int) -> None:
        self.peer = "?"
        self._trail = trail
        self._topology = topology
        self._connection = connection
        self._acked: dict[tuple[bytes, int], Acked] = {}

    def part(
        self,
        connection: Connection,
        request: PartitionedRequest,
        selection: Selection,
        plain: PlainAnswer | None,
        routed_at: int = _NOW,
    ) -> Noted | None:
        """What is to be noted of this part of every request of this form; None where there is nothing.

        `routed_at` is the table's revision when it was sent. What the owner's own was then is known where it is not
        above that; where the partition has moved since, the table's stands for it.
        """
        if plain is None:
            return None
        entries = []
        following = iter(plain.gaps)
        for topic_place, ordinals in selection:
            topic = request.topics[topic_place]
            for ordinal in ordinals:
                place = next(following)
                partition = topic.partitions[ordinal]
                acked = self._find(request, topic.name, partition, connection.owner, routed_at)
                if acked is not None:
                    entries.append(NotedEntry(acked, topic_place, ordinal, place))
        if len(entries) == 1:
            return entries[0]
        return NotedEntries(entries) if entries else None

    def note(self, exchange: Exchange, entry: Entry, owner: int, routed_at: int, result: Buffer) -> None:
        """One entry was acknowledged; `result` is its part of the answer, `routed_at` as in `part`."""
        request = exchange.request
        acked = self._find(request, *exchange.partition(entry), owner, routed_at)
        start, end = records_span(request, exchange.topic(entry), entry[1])
        if acked is not None and end - start >= HEADER_BYTES:
            acked.turn(exchange, request.frame, start, _base(result, _BASE_OFFSET)[0], end - start)

    def _find(
        self, request: PartitionedRequest, topic: bytes, partition: int, owner: int, routed_at: int
    ) -> Acked | None:
        if topic in self._trail.left_out:
            return None
        revision = min(self._topology.owner_revision(topic, partition), routed_at)
        topic_id = self._topology.topic_ids.get(topic)
        found = self._acked.get((topic, partition))
        if found is None or found.giver[:2] != (owner, revision) or found.topic_id != topic_id:
            if found is None and len(self._acked) >= MAX_PARTITIONS:
                self._acked.clear()
            client = (client_id(request.frame) or b"")[:MAX_CLIENT_ID_BYTES].decode(errors="replace")
            giver = Giver(owner, revision, self._connection, f"{client}@{self.peer}")
            found = Acked(self._trail, topic, topic_id, partition, giver, self.peer, client)
            self._acked[topic, partition] = found
        return found

"""What is noted of acknowledgements on the path of a request: the offset that a broker gave a batch, from its answer,
and three fields of the batch's header, from the request, each where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, Protocol

from codec.headers import client_id
from codec.partitioned import PartitionedRequest, PlainAnswer
from codec.primitives import INT64, Buffer
from codec.produce import records_span
from codec.record_batch import HEADER_BYTES
from kproxy.observe.audit.acked import MOST_FINISHED, ONE_BATCH, Acked
from kproxy.observe.audit.given_out import Giver
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Entry, Selection
from kproxy.routing.topology import Topology

if TYPE_CHECKING:
    from kproxy.observe.audit.trail import Trail

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


class NotedPart:
    """What there is to note of the answers to one part of a plan (kproxy.routing.routes): where each entry lies."""

    __slots__ = ("_places",)

    def __init__(self, places: Sequence[tuple[Acked, int, int, int]]) -> None:
        """Of each entry: its partition's, topic's place, ordinal, and where its base_offset stands in the answer."""
        self._places = tuple(places)

    def note(self, exchange: Exchange, answer: memoryview) -> None:
        """All of the part was acknowledged, by this plain answer."""
        request = exchange.request
        frame, topics, flexible = request.frame, request.topics, request.flexible
        for acked, topic_place, ordinal, place in self._places:
            topic = topics[topic_place]
            start, end = topic.starts[ordinal], topic.ends[ordinal]
            size = end - start
            # Nearly all are like this.
            if flexible and _ONE < size <= _TWO:
                start += 6
                end -= 1
            elif size < _LEAST:
                continue
            elif not flexible:
                start += 8
            elif _TWO < size <= _THREE:
                start += 7
                end -= 1
            else:
                # What is no header's length may be tagged fields: nothing says how much of the frame lies behind it.
                start, end = records_span(request, topic, ordinal)
                if end - start < HEADER_BYTES:
                    continue
            delta, producer, sequence = _head(frame, start)
            base_offset = _base(answer, place)[0]
            if sequence == acked.next_sequence and producer == acked.producer:
                if base_offset != acked.next_offset:
                    spans = acked.spans
                    if base_offset < 0 or len(spans) >= MOST_FINISHED:
                        acked.turn(exchange, frame, start, base_offset, end - start)
                        continue
                    spans += (acked.first_offset, acked.next_offset - acked.first_offset)
                    acked.first_offset = base_offset
                acked.next_offset = base_offset + delta + 1
                if acked.counts_sequences:
                    acked.next_sequence = sequence + delta + 1
                acked.volume += end - start + ONE_BATCH
            else:
                acked.turn(exchange, frame, start, base_offset, end - start)


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
    ) -> NotedPart | None:
        """What is to be noted of this part of every request of this form; None where there is nothing.

        `routed_at` is the table's revision when it was sent. What the owner's own was then is known where it is not
        above that; where the partition has moved since, the table's stands for it.
        """
        if plain is None:
            return None
        places = []
        following = iter(plain.gaps)
        for topic_place, ordinals in selection:
            topic = request.topics[topic_place]
            for ordinal in ordinals:
                place = next(following)
                partition = topic.partitions[ordinal]
                acked = self._find(request, topic.name, partition, connection.owner, routed_at)
                if acked is not None:
                    places.append((acked, topic_place, ordinal, place))
        return NotedPart(places) if places else None

    def note(self, exchange: Exchange, entry: Entry, owner: int, routed_at: int, result: Buffer) -> None:
        """One entry was acknowledged; `result` is its part of the answer, `routed_at` as in `part`."""
        request = exchange.request
        if exchange.is_silent or not exchange.is_open(entry):
            return
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

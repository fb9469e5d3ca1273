"""Batches of one client connection that one owner of a partition has acknowledged, put together as they come.

On the path of a request nearly all of it happens in `NotedEntry.note` (kproxy.trail.noted): a batch that goes
on where its producer's last one ended moves some numbers on here. Whatever else comes takes a `turn`.

States
  idle   nothing has come since the last look
  open   a chunk is open: `volume` is not 0

Transitions
  idle -> open   `turn`, which wakes the trail
  open -> open   a batch goes on; or the chunk is finished, and another one is open with the batch that came
  open -> idle   `take`, by the trail's look

Invariants
1. A chunk is one producer's, in one epoch, and its sequence numbers have no gap (wrapping behind 2^31-1).
2. `spans` are those that are finished; the last one is from `first_offset` to before `next_offset`.
3. While idle no batch goes on: no header has a `producer` that is empty.
4. A chunk has at most MAX_SPANS spans.
5. `volume` is the sum of the batches' sizes and of ONE_BATCH for each: one sum costs less than two.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol

from kproxy.trail.chunks import Chunk
from kproxy.trail.given_out import Giver
from kproxy_codec.partitioned import PartitionedRequest
from kproxy_codec.record_batch import MAGIC, NO_PRODUCER_ID, NO_SEQUENCE, add_sequence

if TYPE_CHECKING:
    from kproxy.trail.trail import Trail

MAX_SPANS: Final = 500
# As long as `spans` may be with one more that is open: two numbers each.
MOST_FINISHED: Final = 2 * (MAX_SPANS - 1)
# More than any chunk has bytes: what one connection sends between two looks.
ONE_BATCH: Final = 1 << 48
_NOBODY: Final = b""
# magic, last_offset_delta, producer_id and producer_epoch together, base_sequence
_HEAD = Struct(">16xb6xi16x10si")
_PRODUCER = Struct(">qh")


class Asked(Protocol):
    """A request that was acknowledged; `deadline` in seconds of the proxy's clock."""

    @property
    def request(self) -> PartitionedRequest: ...

    @property
    def deadline(self) -> float: ...


class Acked:
    """`acks` are the latest; `latencies_s` samples of how long an acknowledgement took.

    `unread` is how many batches were acknowledged that cannot be told of.
    """

    __slots__ = (
        "acks",
        "chunks",
        "client",
        "counts_sequences",
        "first_offset",
        "first_sequence",
        "giver",
        "latencies_s",
        "next_offset",
        "next_sequence",
        "partition",
        "peer",
        "producer",
        "spans",
        "topic",
        "topic_id",
        "trail",
        "unread",
        "volume",
    )

    def __init__(
        self, trail: Trail, topic: bytes, topic_id: bytes | None, partition: int, giver: Giver, peer: str, client: str
    ) -> None:
        self.trail = trail
        # One whose name nobody knows goes by its id.
        self.topic = topic.decode() if topic.isascii() else topic.hex()
        self.topic_id = topic_id
        self.partition = partition
        self.giver = giver
        self.peer = peer
        self.client = client
        self.acks = -1
        self.latencies_s: list[float] = []
        self.chunks: list[Chunk] = []
        self.unread = 0
        # The open chunk.
        self.producer = _NOBODY
        self.counts_sequences = False
        self.first_sequence = 0
        # With what the next batch begins; it may be beyond 2^31-1, and without idempotence it is what all have.
        self.next_sequence = 0
        self.first_offset = 0
        self.next_offset = 0
        self.spans: list[int] = []
        self.volume = 0

    def turn(self, asked: Asked, frame: memoryview, start: int, base_offset: int, size: int) -> None:
        """Take a batch that is not known to go on. Its header lies at `start` of the request's `frame`."""
        # A broker that had the batch long ago acknowledges it without an offset.
        if base_offset < 0:
            return
        if not (self.volume or self.chunks or self.unread):
            self.trail.woken(self, asked)
            self.acks = asked.request.acks
        magic, delta, producer, sequence = _HEAD.unpack_from(frame, start)
        if magic != MAGIC or delta < 0:
            self.unread += 1
            return
        count = delta + 1
        goes_on = (
            producer == self.producer
            and sequence == add_sequence(self.next_sequence, 0)
            and len(self.spans) < MOST_FINISHED
        )
        if not goes_on:
            self._finish()
            self.producer, self.first_sequence = producer, sequence
            self.counts_sequences = _PRODUCER.unpack(producer)[0] != NO_PRODUCER_ID
            self.first_offset = self.next_offset = base_offset
        elif base_offset != self.next_offset:
            self.spans += (self.first_offset, self.next_offset - self.first_offset)
            self.first_offset = base_offset
        self.next_offset = base_offset + count
        self.next_sequence = sequence + count if self.counts_sequences else sequence
        self.volume += size + ONE_BATCH

    def take(self) -> tuple[list[Chunk], int, list[float]]:
        """All since the last look: chunks in the order of the answers, what could not be read, and latencies."""
        self._finish()
        taken = self.chunks, self.unread, self.latencies_s
        self.chunks, self.unread, self.latencies_s = [], 0, []
        return taken

    def _finish(self) -> None:
        if not self.volume:
            return
        batches, size = divmod(self.volume, ONE_BATCH)
        spans, self.spans = [*self.spans, self.first_offset, self.next_offset - self.first_offset], []
        counts = spans[1::2]
        if min(counts) > 0:
            # Clients that are not idempotent write what they like where the sequence stands.
            first_sequence = self.first_sequence if self.counts_sequences else NO_SEQUENCE
            producer_id, producer_epoch = _PRODUCER.unpack(self.producer)
            self.chunks.append(Chunk(producer_id, producer_epoch, first_sequence, spans, sum(counts), batches, size))
        else:
            self.unread += batches
        self.producer = _NOBODY
        self.volume = 0

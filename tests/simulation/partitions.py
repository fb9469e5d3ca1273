"""Simulate partitions and the batches in them, with Kafka's rules for appending to a log."""

from __future__ import annotations

from collections import deque
from typing import Final

from tests.simulation import wire

OUT_OF_ORDER: Final = 45
POLICY_VIOLATION: Final = 44
# Kafka remembers five batches of each producer.
RETAINED_BATCHES: Final = 5


class Batch:
    """One batch of one client, and its outcome: `places` are its offsets in the log."""

    __slots__ = (
        "acks",
        "appended_of",
        "arrivals",
        "client",
        "codes",
        "connection",
        "count",
        "first_arrived_at",
        "id",
        "is_excused",
        "is_late",
        "number",
        "offset",
        "partition",
        "places",
        "producer",
        "records",
        "sends",
        "sequence",
        "taken_at",
        "written_at",
    )

    def __init__(self, batch_id: int, client: int, partition: Partition, number: int, count: int) -> None:
        self.id = batch_id
        self.client = client
        self.partition = partition
        self.number = number
        self.count = count
        self.records = b""
        self.producer = -1
        self.sequence = -1
        self.acks = -1
        # The client's connection on which it was sent last, how often it was sent, and the answers, None for a missing
        # one.
        self.connection = -1
        self.sends = 0
        self.codes: list[int | None] = []
        self.offset = -1
        # The number of its arrivals at brokers.
        self.arrivals = 0
        self.places: list[int] = []
        # When the proxy last had it whole, when the proxy had received the one that was appended first, and when it
        # first arrived at a broker, if that was its first sending. -1 for never.
        self.taken_at = -1.0
        self.appended_of = -1.0
        self.first_arrived_at = -1.0
        # When the proxy last wrote it to a broker.
        self.written_at = -1.0
        # With acks=0: its loss is not an error.
        self.is_excused = False
        # Whether it was appended after its connection had ended.
        self.is_late = False

    def arrive(self, now: float, written_at: float) -> None:
        """Record the arrival at a broker."""
        self.arrivals += 1
        self.written_at = written_at
        if self.arrivals == 1 and self.sends == 1:
            self.first_arrived_at = now

    def __str__(self) -> str:
        return (
            f"batch {self.number} of client {self.client} for {self.partition}, sent {self.sends} times, "
            f"answers {self.codes[-8:]}"
        )


class Fence:
    """The fence of a partition, if brokers keep fences. Like the reference broker's it is kept with the log."""

    __slots__ = ("fence", "is_owned")

    def __init__(self) -> None:
        self.fence = 0
        self.is_owned = False

    def lets(self, bound: int | None) -> bool:
        """Whether a connection that is bound to that fence, or to none, may write."""
        return bound == self.fence if self.is_owned or bound else True

    def keep(self, fence: int, *, is_released: bool) -> int:
        """Bind or release a fence; return the error code."""
        if fence < self.fence and not is_released:
            return POLICY_VIOLATION
        if fence > self.fence or not is_released:
            self.fence, self.is_owned = max(fence, self.fence), not is_released
        return 0


class Partition:
    """One partition: its log, its owner according to the authority, and the broker that serves it."""

    __slots__ = (
        "end",
        "fence",
        "index",
        "known",
        "latest",
        "log",
        "number",
        "owner",
        "refreshes",
        "revision",
        "serving",
        "topic",
        "topic_id",
    )

    def __init__(self, number: int, topic: bytes, topic_id: bytes, index: int, owner: int) -> None:
        self.number = number
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.owner = owner
        self.revision = 0
        # The serving broker, 0 for none, and the broker that served it last.
        self.serving = owner
        self.latest = owner
        self.log: list[Batch] = []
        self.end = 0
        # By producer id: (base_sequence, next sequence, offset) of its last batches.
        self.known: dict[int, deque[tuple[int, int, int]]] = {}
        self.refreshes = 0
        self.fence = Fence()

    def __str__(self) -> str:
        return f"{self.topic.decode()}/{self.index}"

    def append(self, batch: Batch) -> tuple[int, int]:
        """Append a batch or refuse it; return the error code and the base offset."""
        if batch.producer >= 0:
            known = self.known.get(batch.producer)
            if known is None:
                known = self.known[batch.producer] = deque(maxlen=RETAINED_BATCHES)
            for sequence, _, offset in known:
                if sequence == batch.sequence:
                    return 0, offset
            if known and batch.sequence != known[-1][1]:
                return OUT_OF_ORDER, wire.NO_OFFSET
            known.append((batch.sequence, batch.sequence + batch.count, self.end))
        offset = self.end
        if not batch.places:
            batch.appended_of = batch.taken_at
        batch.places.append(offset)
        self.log.append(batch)
        self.end += batch.count
        return 0, offset

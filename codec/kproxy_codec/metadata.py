"""Read the leaders in Metadata answers in portions.

An answer about all topics of a large cluster may have megabytes: decoding it with `control` would block the event loop
for too long. With this reader the caller chooses how much it reads in one step. It keeps a few integers for each
partition, and skips replicas and other fields that routing does not need.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from struct import Struct, error
from typing import NamedTuple

from kproxy_codec.errors import Truncated, UnsupportedVersion
from kproxy_codec.primitives import INT16, INT32, Buffer, read_count, skip_tagged_fields
from kproxy_codec.walk import Walk

HIGHEST_VERSION = 12
TOPICS_BY_ID_FROM = 12

# The versions from which fields exist; kproxy_codec.cluster uses them too.
BROKER_TAIL_FROM = 1
CLUSTER_ID_FROM = 2
THROTTLE_FROM = 3
OFFLINE_REPLICAS_FROM = 5
LEADER_EPOCH_FROM = 7
OPERATIONS_FROM = 8
CLUSTER_OPERATIONS_TO = 10
_FLEXIBLE_FROM = 9
TOPIC_ID_FROM = 10

# A partition's error code, index, leader, and leader epoch.
WITH_EPOCH = Struct(">hiii")
WITHOUT_EPOCH = Struct(">hii")
_TOPIC_ID_BYTES = 16
_NO_TOPIC_ID = bytes(_TOPIC_ID_BYTES)
LEAST_BROKER_BYTES = 10
LEAST_TOPIC_BYTES = 5
LEAST_PARTITION_BYTES = 12
NO_EPOCH = -1
# Partitions to read or apply at once, which takes two or three milliseconds.
PORTION = 1_000


class BrokerAddress(NamedTuple):
    """A broker's listener as the answer names it."""

    node_id: int
    host: str
    port: int


class TopicLeaders(NamedTuple):
    """`name` is None if a topic was requested by an unknown id, `topic_id` is None if the topic has none."""

    error_code: int
    name: bytes | None
    topic_id: bytes | None
    numbers: array[int]
    """Four per partition: error code, partition index, leader id, and leader epoch (-1 if the version has none)."""

    @property
    def partition_count(self) -> int:
        return len(self.numbers) // 4

    def partitions(self) -> Iterator[tuple[int, int, int, int]]:
        """Error code, index, leader id and leader epoch of each partition."""
        numbers = iter(self.numbers)
        return zip(numbers, numbers, numbers, numbers, strict=True)


class MetadataReader:
    """Reads the body of one answer.

    `topics` is complete and valid only after `read_some` returned True.

    The constructor and `read_some` raise CodecError for bytes that are not an answer.
    """

    def __init__(self, body: Buffer, version: int) -> None:
        if not 0 <= version <= HIGHEST_VERSION:
            raise UnsupportedVersion(f"unknown Metadata v{version}; expected a version up to {HIGHEST_VERSION}")
        self._walk = walk = Walk(body, compact=version >= _FLEXIBLE_FROM)
        self._version = version
        self._arrays = (False,) * (2 + (version >= OFFLINE_REPLICAS_FROM))
        self.topics: list[TopicLeaders] = []
        self.cluster_id: str | None = None
        if version >= THROTTLE_FROM:
            walk.skip(INT32.size)
        self.brokers = [self._read_broker() for _ in range(walk.count(LEAST_BROKER_BYTES))]
        if version >= CLUSTER_ID_FROM:
            self.cluster_id = walk.text(nullable=True)
        if version >= BROKER_TAIL_FROM:
            walk.skip(INT32.size)
        self._topics_left = walk.count(LEAST_TOPIC_BYTES)
        self._partitions_left = -1

    def read_some(self, partitions: int) -> bool:
        """Read up to this number of partitions or topics; return whether the answer is complete."""
        room = partitions
        while room > 0:
            if self._partitions_left > 0:
                portion = min(room, self._partitions_left)
                self._read_partitions(portion)
                room -= portion
            elif self._partitions_left == 0:
                self._end_topic()
            elif self._topics_left:
                self._begin_topic()
                room -= 1
            else:
                if OPERATIONS_FROM <= self._version <= CLUSTER_OPERATIONS_TO:
                    self._walk.skip(INT32.size)
                self._walk.end()
                return True
        return False

    def _read_broker(self) -> BrokerAddress:
        walk = self._walk
        broker = BrokerAddress(walk.fixed(INT32), walk.text() or "", walk.fixed(INT32))
        if self._version >= BROKER_TAIL_FROM:
            walk.string(nullable=True)
        walk.tags()
        return broker

    def _begin_topic(self) -> None:
        walk = self._walk
        error_code = walk.fixed(INT16)
        name = walk.string(nullable=self._version >= TOPICS_BY_ID_FROM)
        topic_id = bytes(walk.skip(_TOPIC_ID_BYTES)) if self._version >= TOPIC_ID_FROM else _NO_TOPIC_ID
        walk.skip(int(self._version >= BROKER_TAIL_FROM))  # is_internal
        self._partitions_left = walk.count(LEAST_PARTITION_BYTES)
        self._topics_left -= 1
        known_id = topic_id if topic_id != _NO_TOPIC_ID else None
        self.topics.append(TopicLeaders(error_code, name, known_id, array("i")))

    def _read_partitions(self, count: int) -> None:
        extend = self.topics[-1].numbers.extend
        if self._version >= LEADER_EPOCH_FROM:
            read_partitions(self._walk, WITH_EPOCH, self._arrays, count, extend)
        else:
            read_partitions(self._walk, WITHOUT_EPOCH, self._arrays, count, lambda each: extend((*each, NO_EPOCH)))
        self._partitions_left -= count

    def _end_topic(self) -> None:
        if self._version >= OPERATIONS_FROM:
            self._walk.skip(INT32.size)
        self._walk.tags()
        self._partitions_left = -1


def read_partitions(
    walk: Walk, form: Struct, arrays: Sequence[bool], count: int, take: Callable[[tuple[int, ...]], object]
) -> None:
    """Read the next `count` partitions of a topic: `take` gets the fields of `form` of each.

    Arrays of node ids follow them, which may be null where `arrays` says so. Inlined, because most of an answer is
    partitions. Raises CodecError.
    """
    body, at, limit, compact = walk.body, walk.at, walk.limit, walk.compact
    unpack, size = form.unpack_from, form.size
    try:
        for _ in range(count):
            take(unpack(body, at))
            at += size
            for nullable in arrays:
                if compact and 0 < body[at] < 0x80:
                    at += 4 * body[at] - 3
                else:
                    nodes, at = read_count(body, at, limit, compact=compact, least_bytes=4, nullable=nullable)
                    at += 4 * max(nodes, 0)
            if compact:
                at = at + 1 if body[at] == 0 else skip_tagged_fields(body, at, limit)
    except (error, IndexError) as cause:
        raise Truncated("the answer ends among the partitions of a topic") from cause
    if at > limit:
        raise Truncated(f"the answer ends at {limit}, a partition of it at {at}")
    walk.at = at

"""Read the leaders in Metadata answers in portions.

An answer about all topics of a large cluster has megabytes, and decoding it with `control` would block the event loop
for too long. With this reader the caller chooses how much it reads in one step. It keeps a few integers for each
partition, and skips replicas and other fields that routing does not need.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from struct import Struct, error
from typing import NamedTuple

from kproxy_codec.errors import InvalidField, Truncated, UnsupportedVersion
from kproxy_codec.primitives import (
    INT16,
    INT32,
    Buffer,
    read_count,
    read_fixed,
    skip_string,
    skip_tagged_fields,
)

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

_WITH_EPOCH = Struct(">hiii")
_WITHOUT_EPOCH = Struct(">hii")
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
            raise UnsupportedVersion(f"Metadata v{version}: versions up to {HIGHEST_VERSION} are read")
        self._body = body
        self._limit = len(body)
        self._version = version
        self._compact = version >= _FLEXIBLE_FROM
        self._arrays = 2 + (version >= OFFLINE_REPLICAS_FROM)
        self._form = _WITH_EPOCH if version >= LEADER_EPOCH_FROM else _WITHOUT_EPOCH
        self.topics: list[TopicLeaders] = []
        self.cluster_id: str | None = None
        at = 4 if version >= THROTTLE_FROM else 0
        self.brokers, at = self._read_brokers(at)
        if version >= CLUSTER_ID_FROM:
            self.cluster_id, at = self._read_text(at, nullable=True)
        if version >= BROKER_TAIL_FROM:
            _, at = read_fixed(INT32, body, at, self._limit)
        self._topics_left, self._at = self._read_count(at, LEAST_TOPIC_BYTES)
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
                self._end()
                return True
        return False

    def _read_brokers(self, at: int) -> tuple[list[BrokerAddress], int]:
        count, at = self._read_count(at, LEAST_BROKER_BYTES)
        brokers = []
        for _ in range(count):
            node_id, at = read_fixed(INT32, self._body, at, self._limit)
            host, at = self._read_text(at)
            port, at = read_fixed(INT32, self._body, at, self._limit)
            if self._version >= BROKER_TAIL_FROM:
                _, at = self._read_text(at, nullable=True)
            at = self._skip_tags(at)
            brokers.append(BrokerAddress(node_id, host or "", port))
        return brokers, at

    def _begin_topic(self) -> None:
        error_code, at = read_fixed(INT16, self._body, self._at, self._limit)
        nullable = self._version >= TOPICS_BY_ID_FROM
        start, end, at = skip_string(self._body, at, self._limit, compact=self._compact, nullable=nullable)
        name = bytes(self._body[start:end]) if start >= 0 else None
        topic_id = None
        if self._version >= TOPIC_ID_FROM:
            found = bytes(self._body[at : at + _TOPIC_ID_BYTES])
            topic_id = found if found != _NO_TOPIC_ID else None
            at += _TOPIC_ID_BYTES
        at += self._version >= BROKER_TAIL_FROM  # is_internal
        self._partitions_left, self._at = self._read_count(at, LEAST_PARTITION_BYTES)
        self._topics_left -= 1
        self.topics.append(TopicLeaders(error_code, name, topic_id, array("i")))

    def _read_partitions(self, count: int) -> None:
        """Read the next partitions of the current topic. Inlined, because most of an answer is partitions."""
        body, at, limit, compact = self._body, self._at, self._limit, self._compact
        unpack, size, arrays = self._form.unpack_from, self._form.size, range(self._arrays)
        extend = self.topics[-1].numbers.extend
        has_epoch = self._form is _WITH_EPOCH
        try:
            for _ in range(count):
                extend(unpack(body, at) if has_epoch else (*unpack(body, at), NO_EPOCH))
                at += size
                for _ in arrays:
                    if compact and 0 < body[at] < 0x80:
                        at += 4 * body[at] - 3
                    else:
                        nodes, at = read_count(body, at, limit, compact=compact, least_bytes=4)
                        at += 4 * nodes
                if compact:
                    at = at + 1 if body[at] == 0 else skip_tagged_fields(body, at, limit)
        except (error, IndexError) as cause:
            raise Truncated(f"the answer ends among the partitions of {self.topics[-1].name!r}") from cause
        self._at = at
        self._partitions_left -= count

    def _end_topic(self) -> None:
        if self._version >= OPERATIONS_FROM:
            _, self._at = read_fixed(INT32, self._body, self._at, self._limit)
        self._at = self._skip_tags(self._at)
        self._partitions_left = -1

    def _end(self) -> None:
        if OPERATIONS_FROM <= self._version <= CLUSTER_OPERATIONS_TO:
            _, self._at = read_fixed(INT32, self._body, self._at, self._limit)
        self._at = self._skip_tags(self._at)
        if self._at != self._limit:
            raise InvalidField(f"a Metadata answer of {self._limit} bytes ends at {self._at}")

    def _read_count(self, at: int, least_bytes: int) -> tuple[int, int]:
        return read_count(self._body, at, self._limit, compact=self._compact, least_bytes=least_bytes)

    def _read_text(self, at: int, *, nullable: bool = False) -> tuple[str | None, int]:
        start, end, at = skip_string(self._body, at, self._limit, compact=self._compact, nullable=nullable)
        if start < 0:
            return None, at
        try:
            return str(self._body[start:end], "utf-8"), at
        except UnicodeDecodeError as cause:
            raise InvalidField(f"the text at {start} is not UTF-8") from cause

    def _skip_tags(self, at: int) -> int:
        return skip_tagged_fields(self._body, at, self._limit) if self._compact else at

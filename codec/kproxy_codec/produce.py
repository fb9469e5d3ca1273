"""Index produce requests: find where each partition's bytes are.

Versions 3–13. Body: transactional_id, acks INT16, timeout_ms INT32, topics of {name, partitions of {index INT32,
records BYTES}}; flexible from 9; from 13 the topic's id, a UUID, replaces its name (KIP-516). Version 12 has the form
of 11; a transactional client uses it to show that its transactions are of the second kind (KIP-890). Records stay
opaque.
"""

from __future__ import annotations

from struct import Struct

from kproxy_codec.api_keys import FLEXIBLE_FROM, PRODUCE
from kproxy_codec.errors import Truncated, UnsupportedVersion
from kproxy_codec.headers import RequestHeader
from kproxy_codec.partitioned import PartitionedRequest, TopicSpan, expect_end, parse_topics
from kproxy_codec.primitives import read_uvarint, skip_bytes, skip_string, skip_tagged_fields

MIN_VERSION = 3
MAX_VERSION = 13
# From here on topics are named by their ids.
TOPIC_IDS_FROM = 13

_ACKS_TIMEOUT = Struct(">hi")
_ACKS = Struct(">h")
_INDEX_LENGTH = Struct(">ii")
# partition_index, and as much of a varint as nearly all lengths need
_INDEX_AND_VARINT = Struct(">iBBB")
_INDEX_BYTES = 4
_FLEXIBLE_FROM = FLEXIBLE_FROM[PRODUCE]


def parse_produce(frame: memoryview, header: RequestHeader) -> PartitionedRequest:
    """Index a produce request. Raises CodecError."""
    version = header.api_version
    if not MIN_VERSION <= version <= MAX_VERSION:
        raise UnsupportedVersion(f"Produce v{version}: versions {MIN_VERSION} to {MAX_VERSION} are read")
    flexible = version >= _FLEXIBLE_FROM
    limit = len(frame)
    offset = header.body_offset
    if flexible and offset < limit and frame[offset] == 0:
        # A null transactional_id, as nearly all are.
        offset += 1
    else:
        _, _, offset = skip_string(frame, offset, limit, compact=flexible, nullable=True)
    if offset + _ACKS_TIMEOUT.size > limit:
        raise Truncated(f"acks and timeout_ms wanted at {offset}, the message ends at {limit}")
    request = PartitionedRequest(frame, header, flexible=flexible)
    request.acks, request.timeout_ms = _ACKS_TIMEOUT.unpack_from(frame, offset)
    request.topics_start = offset = offset + _ACKS_TIMEOUT.size
    request.topics, offset = parse_topics(
        frame,
        offset,
        flexible=flexible,
        least_bytes=_INDEX_BYTES + 1,
        read_entries=_flexible_partitions if flexible else _plain_partitions,
        by_id=version >= TOPIC_IDS_FROM,
    )
    request.by_id = version >= TOPIC_IDS_FROM
    request.topics_end = offset
    if flexible:
        offset = offset + 1 if offset < limit and frame[offset] == 0 else skip_tagged_fields(frame, offset, limit)
    if offset != limit:
        expect_end(frame, offset)
    return request


def _plain_partitions(frame: memoryview, offset: int, limit: int, topic: TopicSpan, count: int) -> int:
    for _ in range(count):
        if offset + _INDEX_LENGTH.size > limit:
            raise Truncated(f"a partition wanted at {offset}, the message ends at {limit}")
        partition_index, length = _INDEX_LENGTH.unpack_from(frame, offset)
        end = offset + _INDEX_LENGTH.size + (length if length > 0 else 0)
        if end > limit or length < -1:
            raise Truncated(f"records of {length} bytes at {offset}, the message ends at {limit}")
        topic.partitions.append(partition_index)
        topic.starts.append(offset)
        topic.ends.append(end)
        offset = end
    return offset


def _flexible_partitions(frame: memoryview, offset: int, limit: int, topic: TopicSpan, count: int) -> int:
    unpack = _INDEX_AND_VARINT.unpack_from
    for _ in range(count):
        start = offset
        # Behind a partition there are two sections of tagged fields, so even an empty one has this many bytes left.
        if offset + _INDEX_AND_VARINT.size > limit:
            raise Truncated(f"a partition wanted at {offset}, the message ends at {limit}")
        partition_index, first, second, third = unpack(frame, offset)
        offset += _INDEX_BYTES
        # Lengths of one to three bytes, up to 2 MiB, without another call.
        if first < 0x80:
            offset += first or 1
        elif second < 0x80:
            offset += 1 + (first & 0x7F | second << 7 or 1)
        elif third < 0x80:
            offset += 2 + (first & 0x7F | (second & 0x7F) << 7 | third << 14 or 1)
        else:
            length, offset = read_uvarint(frame, offset, limit)
            offset += (length or 1) - 1
        if offset >= limit:
            raise Truncated(f"records up to {offset} at {start}, the message ends at {limit}")
        # Almost always there is no tagged field, which is one zero byte.
        offset = offset + 1 if frame[offset] == 0 else skip_tagged_fields(frame, offset, limit)
        topic.partitions.append(partition_index)
        topic.starts.append(start)
        topic.ends.append(offset)
    return offset


def set_acks(request: PartitionedRequest, acks: int) -> None:
    """Replace the client's acks in place."""
    _ACKS.pack_into(request.frame, request.topics_start - _ACKS_TIMEOUT.size, acks)
    request.acks = acks


def records_span(request: PartitionedRequest, topic: TopicSpan, ordinal: int) -> tuple[int, int]:
    """The span of one partition's records in the frame: (start, end); empty if they are null."""
    start, end, _ = skip_bytes(
        request.frame, topic.starts[ordinal] + _INDEX_BYTES, topic.ends[ordinal], compact=request.flexible
    )
    return (start, end) if start >= 0 else (topic.ends[ordinal], topic.ends[ordinal])


def records_of(request: PartitionedRequest, topic: TopicSpan, ordinal: int) -> memoryview:
    """One partition's records, as a slice of the request."""
    start, end = records_span(request, topic, ordinal)
    return request.frame[start:end]


def transactional_id(request: PartitionedRequest) -> bytes | None:
    """The request's transactional_id."""
    start, end, _ = skip_string(
        request.frame, request.header.body_offset, request.topics_start, compact=request.flexible, nullable=True
    )
    return bytes(request.frame[start:end]) if start >= 0 else None

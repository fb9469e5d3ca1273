"""Index produce requests, parse their answers, and encode entries of merged answers.

Versions 3–13. Request: transactional_id, acks INT16, timeout_ms INT32, topics of {name, partitions of {index INT32,
records BYTES}}; flexible from 9; from 13 the topic's id, a UUID, replaces its name (KIP-516). Version 12 has the form
of 11; a client uses it to show that its transactions are of version 2 (KIP-890). Records are not parsed.

Answer: topics of {name (its id from 13), partitions of {index INT32, error_code INT16, base_offset INT64,
log_append_time_ms INT64, log_start_offset INT64 (v5), record_errors (v8), error_message (v8), tags (v9: current leader
from 10)}}, throttle_time_ms INT32, tags (v9: node endpoints from 10).
"""

from __future__ import annotations

from struct import Struct

from kproxy_codec.api_keys import FLEXIBLE_FROM, PRODUCE, is_flexible
from kproxy_codec.errors import Truncated, UnsupportedVersion
from kproxy_codec.framing import RequestHeader, response_body_offset
from kproxy_codec.partitioned import (
    PartitionedRequest,
    PartitionedResponse,
    Tag,
    TopicSpan,
    blank_current_leader,
    expect_end,
    parse_topics,
    response_tags,
)
from kproxy_codec.primitives import (
    INT32,
    MAX_STRING_BYTES,
    Buffer,
    encode_count,
    encode_string,
    encode_tagged_fields,
    read_count,
    read_fixed,
    read_uvarint,
    skip_bytes,
    skip_string,
    skip_tagged_fields,
)

MIN_VERSION = 3
MAX_VERSION = 13
# From this version on topics are named by their ids.
TOPIC_IDS_FROM = 13

_ACKS_TIMEOUT = Struct(">hi")
_ACKS = Struct(">h")
_INDEX_LENGTH = Struct(">ii")
# partition_index, and the three bytes of a varint that suffice for nearly all lengths
_INDEX_AND_VARINT = Struct(">iBBB")
_INDEX_BYTES = 4
_FLEXIBLE_FROM = FLEXIBLE_FROM[PRODUCE]


def parse_produce(frame: memoryview, header: RequestHeader) -> PartitionedRequest:
    """Index a produce request. Raises CodecError."""
    version = header.api_version
    if not MIN_VERSION <= version <= MAX_VERSION:
        raise UnsupportedVersion(f"unknown Produce v{version}; expected version {MIN_VERSION} to {MAX_VERSION}")
    flexible = version >= _FLEXIBLE_FROM
    limit = len(frame)
    offset = header.body_offset
    if flexible and offset < limit and frame[offset] == 0:
        # Nearly all requests have a null transactional_id.
        offset += 1
    else:
        _, _, offset = skip_string(frame, offset, limit, compact=flexible, nullable=True)
    if offset + _ACKS_TIMEOUT.size > limit:
        raise Truncated(f"no room for acks and timeout_ms at byte {offset}: the message ends at {limit}")
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
            raise Truncated(f"no room for a partition at byte {offset}: the message ends at {limit}")
        partition_index, length = _INDEX_LENGTH.unpack_from(frame, offset)
        end = offset + _INDEX_LENGTH.size + (length if length > 0 else 0)
        if end > limit or length < -1:
            raise Truncated(f"no room for records of {length} bytes at byte {offset}: the message ends at {limit}")
        topic.partitions.append(partition_index)
        topic.starts.append(offset)
        topic.ends.append(end)
        offset = end
    return offset


def _flexible_partitions(frame: memoryview, offset: int, limit: int, topic: TopicSpan, count: int) -> int:
    unpack = _INDEX_AND_VARINT.unpack_from
    for _ in range(count):
        start = offset
        # Two sections of tagged fields follow each partition, so even after an empty one this many bytes are left.
        if offset + _INDEX_AND_VARINT.size > limit:
            raise Truncated(f"no room for a partition at byte {offset}: the message ends at {limit}")
        partition_index, first, second, third = unpack(frame, offset)
        offset += _INDEX_BYTES
        # Read lengths of one to three bytes, up to 2 MiB, without another call.
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
            raise Truncated(f"records reach from byte {start} to {offset}, but the message ends at {limit}")
        # Almost always there are no tagged fields: one zero byte.
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


# partition_index, error_code, base_offset, log_append_time_ms
_ENTRY = Struct(">ihqq")
_INDEX_AND_ERROR_CODE = Struct(">ih")
_BASE_OFFSET = Struct(">q")
# No record errors, no message, no tagged fields.
_PLAIN_END = b"\x01\x00\x00"
_PLAIN_END_V8 = b"\x00\x00\x00\x00\xff\xff"
_INT64_BYTES = 8
_CURRENT_LEADER_TAG = 0
_NODE_ENDPOINTS_TAG = 0
# The UTF-8 of this many characters always fits into a string.
_MAX_MESSAGE_CHARACTERS = MAX_STRING_BYTES // 4


def _read_entries(frame: memoryview, offset: int, limit: int, api_version: int, topic: TopicSpan, count: int) -> int:
    """Read the results of one topic into `topic`; return the offset after them."""
    fixed_bytes = _ENTRY.size + (_INT64_BYTES if api_version >= 5 else 0)
    plain_end = _PLAIN_END if api_version >= 9 else _PLAIN_END_V8 if api_version == 8 else b""
    plain_bytes = len(plain_end)
    for _ in range(count):
        end = offset + fixed_bytes
        if end > limit:
            raise Truncated(f"no room for a partition's result at byte {offset}: the message ends at {limit}")
        partition_index, error_code = _INDEX_AND_ERROR_CODE.unpack_from(frame, offset)
        topic.partitions.append(partition_index)
        topic.error_codes.append(error_code)
        topic.starts.append(offset)
        # Almost always nothing follows the fixed part.
        if frame[end : end + plain_bytes] == plain_end:
            offset = end + plain_bytes
        else:
            offset = _skip_rest(frame, end, limit, api_version)
        topic.ends.append(offset)
    return offset


def _skip_rest(frame: memoryview, offset: int, limit: int, api_version: int) -> int:
    """The offset after record errors, error message and tagged fields."""
    flexible = api_version >= 9
    if api_version >= 8:
        count, offset = read_count(frame, offset, limit, compact=flexible, least_bytes=5)
        for _ in range(count):
            _, offset = read_fixed(INT32, frame, offset, limit)
            _, _, offset = skip_string(frame, offset, limit, compact=flexible, nullable=True)
            if flexible:
                offset = skip_tagged_fields(frame, offset, limit)
        _, _, offset = skip_string(frame, offset, limit, compact=flexible, nullable=True)
    if flexible:
        offset = blank_current_leader(frame, offset, limit, _CURRENT_LEADER_TAG)
    return offset


def base_offset_of(entry: Buffer) -> int:
    """The base offset in one partition's encoded entry of an answer; -1 for none."""
    offset: int = _BASE_OFFSET.unpack_from(entry, _INDEX_AND_ERROR_CODE.size)[0]
    return offset


class ProduceApi:
    """Produce as a partitioned API (see `PartitionedApi`)."""

    api_key = PRODUCE
    min_version = MIN_VERSION
    max_version = MAX_VERSION

    def parse_request(self, frame: memoryview, header: RequestHeader) -> PartitionedRequest:
        return parse_produce(frame, header)

    def parse_response(self, frame: memoryview, api_version: int) -> PartitionedResponse:
        """Parse an answer; blank current-leader hints in place (KIP-951). Raises CodecError."""
        flexible = api_version >= 9
        response = PartitionedResponse(frame)
        limit = len(frame)

        offset = response_body_offset(frame, PRODUCE, api_version)

        def read(frame: memoryview, offset: int, limit: int, topic: TopicSpan, count: int) -> int:
            return _read_entries(frame, offset, limit, api_version, topic, count)

        response.topics, offset = parse_topics(
            frame,
            offset,
            flexible=flexible,
            least_bytes=_ENTRY.size,
            read_entries=read,
            by_id=api_version >= TOPIC_IDS_FROM,
        )
        response.throttle_time_ms, offset = read_fixed(INT32, frame, offset, limit)
        if flexible:
            offset = response_tags(response, offset, _NODE_ENDPOINTS_TAG)
        expect_end(frame, offset)
        return response

    def error_entry(self, api_version: int, partition_index: int, error_code: int) -> bytes:
        """Encode base_offset, log_append_time_ms and log_start_offset as -1: the proxy assigns no offset."""
        return result_entry(api_version, partition_index, error_code, base_offset=-1, log_start_offset=-1)

    def response_ends(
        self, api_version: int, throttle_time_ms: int, tags: list[tuple[int, bytes]]
    ) -> tuple[bytes, bytes]:
        tail = INT32.pack(throttle_time_ms)
        return b"", tail + encode_tagged_fields(tags) if api_version >= 9 else tail

    def piece_preamble(self, request: PartitionedRequest, pieces: int, least_bytes: int) -> Buffer | None:
        """Return None: the request's own preamble is kept."""
        return None

    def admit(self, request: PartitionedRequest) -> None:
        """Change nothing: the request is forwarded as received."""


def result_entry(
    api_version: int,
    partition_index: int,
    error_code: int,
    *,
    base_offset: int,
    log_start_offset: int,
    log_append_time_ms: int = -1,
    error_message: str | None = None,
    current_leader: tuple[int, int] | None = None,
) -> bytes:
    """One partition's entry of a produce answer.

    `error_message` is included from version 8, `current_leader` (leader_id, leader_epoch) from 10. A message that is
    too long for a Kafka string is cut short.
    """
    flexible = is_flexible(PRODUCE, api_version)
    entry = _ENTRY.pack(partition_index, error_code, base_offset, log_append_time_ms)
    if api_version >= 5:
        entry += log_start_offset.to_bytes(_INT64_BYTES, "big", signed=True)
    if api_version >= 8:
        entry += encode_count(0, compact=flexible)
        message = None if error_message is None else error_message[:_MAX_MESSAGE_CHARACTERS].encode(errors="replace")
        entry += encode_string(message, compact=flexible)
    if not flexible:
        return entry
    tags: list[Tag] = []
    if current_leader is not None and api_version >= 10:
        leader = INT32.pack(current_leader[0]) + INT32.pack(current_leader[1]) + encode_tagged_fields([])
        tags.append((_CURRENT_LEADER_TAG, leader))
    return entry + encode_tagged_fields(tags)


PRODUCE_API = ProduceApi()

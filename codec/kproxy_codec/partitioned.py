"""Parse and encode the wire format that Produce, Fetch and ListOffsets have in common.

A request of these APIs, and an answer, is a header, a preamble, an array of topics with an array of partitions each,
and a trailer. Parsing finds the position of each partition's bytes and copies none of them. A part of a request is
encoded from slices of the request, so that bytes unknown to this codec, such as tagged fields, stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Protocol

from kproxy_codec.errors import InvalidField, Truncated
from kproxy_codec.framing import CORRELATION_ID_OFFSET, LENGTH_BYTES, RESPONSE_CORRELATION_ID_OFFSET, RequestHeader
from kproxy_codec.primitives import (
    INT16,
    INT32,
    Buffer,
    encode_count,
    encode_tagged_fields,
    read_count,
    read_tagged_fields,
    skip_string,
    skip_tagged_fields,
)

MAX_PARTITIONS = 4096
"""The limit of partitions, and of topics, in a request that is served; in a larger one each gets an error."""
MAX_READ_PARTITIONS = 8 * MAX_PARTITIONS
"""The limit of partitions, and of topics, in a message that is parsed."""
TOPIC_ID_BYTES = 16

Place = tuple[int, int]
"""One entry of a request: a topic's place in the request, and a partition's ordinal within the topic."""
Places = Sequence[tuple[int, Sequence[int]]]
"""Entries of a request by place: a topic's place in the request, and the ordinals of its partitions, ascending."""
# A tagged field: its number and its value.
Tag = tuple[int, bytes]
# (frame, offset, limit) -> (partition_index, next offset)
SkipPartition = Callable[[memoryview, int, int], tuple[int, int]]
# (frame, offset, limit, topic to fill, number of entries) -> offset after them
ReadEntries = Callable[[memoryview, int, int, "TopicSpan", int], int]


class TopicSpan:
    """The positions of one topic's parts in a request or an answer.

    `wire` is the topic as the message names it: by its name, or by the bytes of its id. `name` equals `wire` until a
    caller replaces an id by the topic's name. `head` is the encoded `wire`, `starts` and `ends` bound each partition's
    entry, `tail` is the part after the partitions (tagged fields). `error_codes` is filled only in answers, and `sizes`
    (the bytes of records of each entry) only in answers to a fetch.
    """

    __slots__ = (
        "ends",
        "error_codes",
        "head_end",
        "head_start",
        "name",
        "partitions",
        "sizes",
        "starts",
        "tail_end",
        "tail_start",
        "wire",
    )

    def __init__(self, name: bytes, head_start: int, head_end: int) -> None:
        self.name = self.wire = name
        self.head_start = head_start
        self.head_end = head_end
        self.partitions: list[int] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.error_codes: list[int] = []
        self.sizes: list[int] = []
        self.tail_start = 0
        self.tail_end = 0


class PartitionedRequest:
    """A parsed request.

    `topics_start` and `topics_end` bound the topics array, its count included. `by_id`: ids name the topics.
    """

    __slots__ = ("acks", "by_id", "flexible", "frame", "header", "timeout_ms", "topics", "topics_end", "topics_start")

    def __init__(self, frame: memoryview, header: RequestHeader, *, flexible: bool) -> None:
        self.frame = frame
        self.header = header
        self.flexible = flexible
        self.topics: list[TopicSpan] = []
        self.topics_start = header.body_offset
        self.topics_end = len(frame)
        self.by_id = False
        # Only Produce changes these; the other APIs always have an answer and keep -1 (all) and 0.
        self.acks = -1
        self.timeout_ms = 0

    @property
    def is_too_large(self) -> bool:
        """Whether it has too many partitions or topics to serve; topics without partitions have a cost as well."""
        return self.partition_count > MAX_PARTITIONS or len(self.topics) > MAX_PARTITIONS

    @property
    def partition_count(self) -> int:
        if len(self.topics) == 1:
            return len(self.topics[0].partitions)
        return sum(len(topic.partitions) for topic in self.topics)

    def repeats_a_partition(self) -> bool:
        """Whether some partition is in the request twice."""
        if len(self.topics) == 1:
            partitions = self.topics[0].partitions
            return len(set(partitions)) != len(partitions)
        seen = {(topic.name, partition) for topic in self.topics for partition in topic.partitions}
        return len(seen) != self.partition_count

    def is_nameless(self, topic: TopicSpan) -> bool:
        """Whether only the id of a topic is known."""
        return self.by_id and topic.name is topic.wire

    def take_out(self) -> None:
        """Copy the request out of a much larger receive buffer, which it would keep in memory while it waits."""
        buffer = self.frame.obj
        if isinstance(buffer, bytearray) and len(self.frame) < len(buffer) // 2:
            self.frame = memoryview(bytearray(self.frame))

    def let_go(self) -> None:
        """Release the request's bytes. The request can then not be encoded again, whole or in parts."""
        self.frame = memoryview(b"")

    def entry(self, topic_place: int, ordinal: int) -> memoryview:
        """One partition's bytes."""
        topic = self.topics[topic_place]
        return self.frame[topic.starts[ordinal] : topic.ends[ordinal]]

    def topic_head(self, topic: TopicSpan) -> memoryview:
        """A topic and the number of its partitions as encoded; the topic in the answer begins with the same bytes."""
        return self.frame[topic.head_start : topic.starts[0] if topic.starts else topic.tail_start]


class PartitionedResponse:
    """A parsed answer; `other_tags` are its own tagged fields except those that name brokers."""

    __slots__ = ("error_code", "frame", "names_brokers", "other_tags", "payload_bytes", "throttle_time_ms", "topics")

    def __init__(self, frame: memoryview) -> None:
        self.frame = frame
        self.topics: list[TopicSpan] = []
        self.throttle_time_ms = 0
        self.error_code = 0
        self.names_brokers = False
        self.payload_bytes = 0
        self.other_tags: list[Tag] = []


class PartitionedApi(Protocol):
    """An API whose requests kproxy.routing splits, forwards and merges by partition."""

    api_key: int
    min_version: int
    max_version: int

    def parse_request(self, frame: memoryview, header: RequestHeader) -> PartitionedRequest:
        """Parse a request. Raises CodecError."""
        ...

    def parse_response(self, frame: memoryview, api_version: int) -> PartitionedResponse:
        """Parse an answer; blank leader hints in the entries in place (KIP-951). Raises CodecError."""
        ...

    def error_entry(self, api_version: int, partition_index: int, error_code: int) -> bytes:
        """One partition's entry of an answer with `error_code`."""
        ...

    def response_ends(
        self, api_version: int, throttle_time_ms: int, tags: list[tuple[int, bytes]]
    ) -> tuple[bytes, bytes]:
        """The bytes before and after the topics array of a merged answer."""
        ...

    def piece_preamble(self, request: PartitionedRequest, pieces: int, least_bytes: int) -> Buffer | None:
        """The preamble of one of `pieces` parts of a request; None for the request's own.

        A broker lets a read wait until it has `least_bytes` of records.
        """
        ...

    def admit(self, request: PartitionedRequest) -> None:
        """Change in place the fields that must not reach a broker as the client sent them; called before it is sent."""
        ...


def parse_topics(
    frame: memoryview, offset: int, *, flexible: bool, least_bytes: int, read_entries: ReadEntries, by_id: bool = False
) -> tuple[list[TopicSpan], int]:
    """Parse the topics array at `offset`; return also the offset after it.

    `least_bytes` is a partition entry's smallest size; `by_id`: ids name the topics (KIP-516).
    """
    limit = len(frame)
    if flexible and offset < limit and 0 < frame[offset] < 0x80:
        # Nearly all counts have one byte. So a few topics need no check before the first one.
        topic_count = frame[offset] - 1
        offset += 1
    else:
        topic_count, offset = read_topic_count(frame, offset, limit, flexible=flexible)
    topics: list[TopicSpan] = []
    partitions_left = MAX_READ_PARTITIONS
    while topic_count > 0:
        topic_count -= 1
        if by_id:
            topic, count, offset = _begin_topic_by_id(frame, offset, limit, least_bytes)
        else:
            topic, count, offset = begin_topic(frame, offset, limit, flexible, least_bytes)
        partitions_left -= count
        if partitions_left < 0:
            raise InvalidField(f"the message has too many partitions; expected at most {MAX_READ_PARTITIONS}")
        topic.tail_start = offset = read_entries(frame, offset, limit, topic, count)
        if flexible:
            offset = offset + 1 if offset < limit and frame[offset] == 0 else skip_tagged_fields(frame, offset, limit)
        topic.tail_end = offset
        topics.append(topic)
    return topics, offset


def one_by_one(skip_partition: SkipPartition) -> ReadEntries:
    """Return a function that reads a topic's entries by finding the end of each."""

    def read(frame: memoryview, offset: int, limit: int, topic: TopicSpan, count: int) -> int:
        for _ in range(count):
            topic.starts.append(offset)
            partition_index, offset = skip_partition(frame, offset, limit)
            topic.partitions.append(partition_index)
            topic.ends.append(offset)
        return offset

    return read


def of_fixed_size(entry_bytes: int, *, flexible: bool, named: str = "a partition") -> ReadEntries:
    """Return a function that reads entries of this size, each with its partition index first."""

    def skip(frame: memoryview, offset: int, limit: int) -> tuple[int, int]:
        end = offset + entry_bytes
        if end > limit:
            raise Truncated(f"no room for {named} at byte {offset}: the message ends at {limit}")
        partition_index: int = INT32.unpack_from(frame, offset)[0]
        return partition_index, skip_tagged_fields(frame, end, limit) if flexible else end

    return one_by_one(skip)


def read_topic_count(frame: memoryview, offset: int, limit: int, *, flexible: bool) -> tuple[int, int]:
    """Read the number of topics, which has the same limit as that of partitions.

    A topic without partitions requests nothing, but costs the sender three bytes and this process hundreds.
    """
    count, offset = read_count(frame, offset, limit, compact=flexible, least_bytes=2)
    if count > MAX_READ_PARTITIONS:
        raise InvalidField(f"the message has {count} topics; expected at most {MAX_READ_PARTITIONS}")
    return count, offset


def begin_topic(
    frame: memoryview,
    offset: int,
    limit: int,
    flexible: bool,
    least_bytes: int,
) -> tuple[TopicSpan, int, int]:
    """Read a topic's name and partition count: (span, count, offset of the first partition)."""
    if flexible and offset < limit and 0 < (length := frame[offset]) < 0x80 and offset + length < limit:
        start, end = offset + 1, offset + length
        count = frame[end] - 1
        first = end + 1
        if 0 <= count < 0x7F:
            # Nearly all names and counts have lengths of one byte. So a few entries need no check before the first one.
            name = bytes(frame[start:end])
            if not name.isascii():
                _expect_utf8(name)
            return TopicSpan(name, offset, end), count, first
    start, end, after = skip_string(frame, offset, limit, compact=flexible)
    count, first = read_count(frame, after, limit, compact=flexible, least_bytes=least_bytes)
    name = bytes(frame[start:end])
    if not name.isascii():
        _expect_utf8(name)
    return TopicSpan(name, offset, after), count, first


def _begin_topic_by_id(frame: memoryview, offset: int, limit: int, least_bytes: int) -> tuple[TopicSpan, int, int]:
    """Read a topic's id and partition count, like `begin_topic`; all messages with ids are flexible."""
    end = offset + TOPIC_ID_BYTES
    if end > limit:
        raise Truncated(f"no room for a topic's id at byte {offset}: the message ends at {limit}")
    count, first = read_count(frame, end, limit, compact=True, least_bytes=least_bytes)
    return TopicSpan(bytes(frame[offset:end]), offset, end), count, first


def _expect_utf8(name: bytes) -> None:
    # A broker would read other bytes as U+FFFD and answer for a topic that was not requested.
    try:
        name.decode()
    except UnicodeDecodeError as error:
        raise InvalidField(f"a topic's name is not UTF-8: {error}") from error


def expect_end(frame: memoryview, offset: int) -> None:
    """Raise InvalidField if bytes follow the message."""
    if offset != len(frame):
        raise InvalidField(f"{len(frame) - offset} bytes follow the end of the message")


_INDEX_AND_ERROR_CODE = Struct(">ih")


def fill_error_codes(response: PartitionedResponse) -> None:
    """Read each entry's error_code, which is after the partition index in each of these APIs."""
    for topic in response.topics:
        topic.error_codes = [_INDEX_AND_ERROR_CODE.unpack_from(response.frame, start)[1] for start in topic.starts]


def response_tags(response: PartitionedResponse, offset: int, broker_tag: int) -> int:
    """Read an answer's own tagged fields and return the offset after them.

    `broker_tag`, KIP-951's node endpoints, is dropped.
    """
    fields, offset = read_tagged_fields(response.frame, offset, len(response.frame))
    for tag, start, end in fields:
        if tag == broker_tag:
            response.names_brokers = True
        else:
            response.other_tags.append((tag, bytes(response.frame[start:end])))
    return offset


_NO_LEADER = INT32.pack(-1) * 2


def blank_current_leader(frame: memoryview, offset: int, limit: int, leader_tag: int) -> int:
    """Set the current leader in an entry's tagged fields to unknown (KIP-951).

    Returns the offset after them. A client that gets the real leader would bypass the proxy.
    """
    if offset < limit and frame[offset] == 0:
        return offset + 1
    fields, after = read_tagged_fields(frame, offset, limit)
    for tag, start, end in fields:
        if tag == leader_tag and end - start >= len(_NO_LEADER):
            frame[start : start + len(_NO_LEADER)] = _NO_LEADER
    return after


def blank_epochs(frame: memoryview, topics: Iterable[TopicSpan], epoch_offset: int) -> None:
    """Set the leader epoch, `epoch_offset` bytes into each entry, to -1 in place.

    Clients of the proxy get no leader epochs, so they cannot send the broker's: librdkafka 2.16 sends 0 after it got
    -1, and a broker would fence it.
    """
    for topic in topics:
        for start in topic.starts:
            INT32.pack_into(frame, start + epoch_offset, -1)


def set_correlation_id(frame: memoryview, correlation_id: int) -> None:
    """Set the correlation_id of a request in place."""
    INT32.pack_into(frame, CORRELATION_ID_OFFSET, correlation_id)


def set_response_correlation_id(frame: memoryview, correlation_id: int) -> None:
    """Set the correlation_id of an answer in place."""
    INT32.pack_into(frame, RESPONSE_CORRELATION_ID_OFFSET, correlation_id)


# length, api_key, api_version, correlation_id
_START = Struct(">ihhi")


class Splitter:
    """Encode parts of a request, each with some of its entries.

    Header, trailer, tagged fields and entries are the request's own bytes. Records are slices of the request, adjacent
    records one slice. Small parts are copied, which costs less than writing another buffer. `preamble` None keeps the
    request's own preamble.
    """

    __slots__ = ("_lead", "_request", "_trailer")

    def __init__(self, request: PartitionedRequest, preamble: Buffer | None) -> None:
        frame = request.frame
        self._request = request
        if preamble is None:
            self._lead = bytes(frame[LENGTH_BYTES + 8 : request.topics_start])
        else:
            self._lead = bytes(frame[LENGTH_BYTES + 8 : request.header.body_offset]) + preamble
        self._trailer = bytes(frame[request.topics_end :])

    def part(self, selection: Places, correlation_id: int) -> list[Buffer]:
        """The request with only the selected entries, as buffers to be written one after another."""
        request = self._request
        frame, header, flexible = request.frame, request.header, request.flexible
        small = self._lead + encode_count(len(selection), compact=flexible)
        parts: list[Buffer] = []
        length = len(self._trailer) - LENGTH_BYTES
        for topic_place, ordinals in selection:
            topic = request.topics[topic_place]
            small += frame[topic.head_start : topic.head_end]
            small += encode_count(len(ordinals), compact=flexible)
            parts.append(small)
            length += len(small)
            starts, ends = topic.starts, topic.ends
            start = end = -1
            for ordinal in ordinals:
                if starts[ordinal] != end:
                    if end >= 0:
                        parts.append(frame[start:end])
                        length += end - start
                    start = starts[ordinal]
                end = ends[ordinal]
            if end >= 0:
                parts.append(frame[start:end])
                length += end - start
            small = bytes(frame[topic.tail_start : topic.tail_end])
        length += len(small) + _START.size
        parts.append(small + self._trailer)
        parts[0] = _START.pack(length, header.api_key, header.api_version, correlation_id) + parts[0]
        return parts


def encode_topics(
    topics: Sequence[tuple[bytes, Sequence[Buffer], int]], *, flexible: bool, by_id: bool = False
) -> list[Buffer]:
    """The topics array of an answer from (name or id, buffers of its entries, number of entries)."""
    parts: list[Buffer] = [encode_count(len(topics), compact=flexible)]
    tail = encode_tagged_fields([]) if flexible else b""
    for name, buffers, entries in topics:
        length = b"" if by_id else encode_count(len(name), compact=True) if flexible else INT16.pack(len(name))
        parts.append(length + name)
        parts.append(encode_count(entries, compact=flexible))
        parts.extend(buffers)
        if tail:
            parts.append(tail)
    return parts


def with_length(parts: list[Buffer]) -> list[Buffer]:
    """The parts of one message with the 4-byte length before them."""
    return [INT32.pack(sum(map(len, parts))), *parts]

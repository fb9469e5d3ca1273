"""Write and read the few Kafka messages of a simulated world, records and reads fast and without `kproxy_codec`.

Produce 3-13, Fetch 11, ListOffsets 5, Own 1, BindFences 0. A batch is a header of version 2, followed by some bytes
instead of records; its base_timestamp is its number in its world.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, error
from typing import Final, NamedTuple

from kproxy_codec.errors import CodecError
from kproxy_codec.framing import parse_request_header, request_header, response_correlation_id
from kproxy_codec.own import (
    OWN_MAX_VERSION,
    BoundFence,
    OwnRequest,
    OwnResource,
    encode_bind_fences_response,
    encode_own_request,
    parse_bind_fences_request,
    parse_own_response,
)

PRODUCE: Final = 0
FETCH: Final = 1
LIST_OFFSETS: Final = 2
API_VERSIONS: Final = 18
OWN: Final = 20311
BIND_FENCES: Final = 20312
FETCH_VERSION: Final = 11
LIST_OFFSETS_VERSION: Final = 5
FLEXIBLE_FROM: Final = 9
LEADER_HINTS_FROM: Final = 10
TOPIC_IDS_FROM: Final = 13
NO_OFFSET: Final = -1

_INT16, _INT32 = Struct(">h"), Struct(">i")
_HEAD = Struct(">hhih")
_ACKS_TIMEOUT = Struct(">hi")
_INDEX_LENGTH = Struct(">ii")
_BATCH = Struct(">qiibIhiqqqhii")
_BATCH_ID = Struct(">q")
_BATCH_ID_OFFSET = 27
_BATCH_OVERHEAD = 12
_TRANSACTIONAL = 0x10
_RESULT = Struct(">ihq")
_FETCH = Struct(">iiiibiii")
_FETCH_PARTITION = Struct(">iiqqi")
_FETCHED = Struct(">ihqqqiii")
_LIST_OFFSETS_PARTITION = Struct(">iiq")
_LISTED = Struct(">ihqqi")

# Topics as the message names them, each with (partition_index, records).
Asked = list[tuple[bytes, list[tuple[int, bytes]]]]
# (partition_index, error_code, base_offset)
Results = list[tuple[bytes, list[tuple[int, int, int]]]]


class NoMessage(ValueError):
    """The bytes are not the expected message."""


class ProduceRequest(NamedTuple):
    """A produce request as a broker reads it."""

    version: int
    correlation_id: int
    acks: int
    topics: Asked


def batch(
    batch_id: int, count: int, padding: bytes, producer: tuple[int, int, int] = (-1, -1, -1), *, transactional: bool
) -> bytes:
    """`count` records in `padding`; `producer` has its id, its epoch, and the first record's sequence number."""
    length = _BATCH.size - _BATCH_OVERHEAD + len(padding)
    attributes = _TRANSACTIONAL if transactional else 0
    return _BATCH.pack(0, length, -1, 2, 0, attributes, count - 1, batch_id, batch_id, *producer, count) + padding


def batch_id_of(records: bytes) -> int:
    """Return the number of a batch. Raise NoMessage."""
    if len(records) < _BATCH.size:
        raise NoMessage(f"no batch: {records!r}")
    batch_id: int = _BATCH_ID.unpack_from(records, _BATCH_ID_OFFSET)[0]
    return batch_id


_SHORT: Final = [bytes((number,)) for number in range(0x80)]


def _uvarint(number: int) -> bytes:
    if number < 0x80:
        return _SHORT[number]
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))


def _read_uvarint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = data[at], 0
    if value < 0x80:
        return value, at + 1
    value = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _framed(parts: Sequence[bytes]) -> bytes:
    message = b"".join(parts)
    return _INT32.pack(len(message)) + message


def produce_request(
    version: int,
    correlation_id: int,
    client_id: bytes,
    transactional_id: bytes | None,
    acks: int,
    timeout_ms: int,
    topics: Asked,
) -> bytes:
    head = _HEAD.pack(PRODUCE, version, correlation_id, len(client_id)) + client_id
    if version < FLEXIBLE_FROM:
        named = b"\xff\xff" if transactional_id is None else _INT16.pack(len(transactional_id)) + transactional_id
        parts = [head, named, _ACKS_TIMEOUT.pack(acks, timeout_ms), _INT32.pack(len(topics))]
        for topic, partitions in topics:
            parts += (_INT16.pack(len(topic)), topic, _INT32.pack(len(partitions)))
            for index, records in partitions:
                parts += (_INDEX_LENGTH.pack(index, len(records)), records)
        return _framed(parts)
    named = b"\0" if transactional_id is None else _uvarint(len(transactional_id) + 1) + transactional_id
    parts = [head, b"\0", named, _ACKS_TIMEOUT.pack(acks, timeout_ms), _uvarint(len(topics) + 1)]
    for topic, partitions in topics:
        called = topic if version >= TOPIC_IDS_FROM else _uvarint(len(topic) + 1) + topic
        parts += (called, _uvarint(len(partitions) + 1))
        for index, records in partitions:
            parts += (_INT32.pack(index), _uvarint(len(records) + 1), records, b"\0")
        parts.append(b"\0")
    parts.append(b"\0")
    return _framed(parts)


def head_of(frame: bytes) -> tuple[int, int, int, int]:
    """api_key, api_version, correlation_id, and the end of the client_id."""
    key, version, correlation_id, length = _HEAD.unpack_from(frame, 4)
    return key, version, correlation_id, 14 + max(0, length)


def read_produce_request(frame: bytes) -> ProduceRequest:
    """Raises NoMessage."""
    try:
        return _read_produce_request(frame)
    except (IndexError, error) as reason:
        raise NoMessage(f"no produce request: {frame!r}") from reason


def _read_produce_request(frame: bytes) -> ProduceRequest:
    _, version, correlation_id, at = head_of(frame)
    flexible = version >= FLEXIBLE_FROM
    if flexible:
        length, at = _read_uvarint(frame, at + 1)
        at += max(0, length - 1)
    else:
        at += 2 + max(0, _INT16.unpack_from(frame, at)[0])
    acks, _ = _ACKS_TIMEOUT.unpack_from(frame, at)
    at += _ACKS_TIMEOUT.size
    topics: Asked = []
    count, at = _read_count(frame, at, flexible=flexible)
    for _ in range(count):
        topic, at = _read_topic(frame, at, version)
        partitions = []
        listed, at = _read_count(frame, at, flexible=flexible)
        for _ in range(listed):
            if flexible:
                index = _INT32.unpack_from(frame, at)[0]
                length, at = _read_uvarint(frame, at + 4)
                end = at + length - 1
                partitions.append((index, frame[at:end]))
                at = end + 1
            else:
                index, length = _INDEX_LENGTH.unpack_from(frame, at)
                at += _INDEX_LENGTH.size
                partitions.append((index, frame[at : at + length]))
                at += length
        at += flexible
        topics.append((topic, partitions))
    at += flexible
    if at != len(frame):
        raise NoMessage(f"{len(frame) - at} bytes too many")
    return ProduceRequest(version, correlation_id, acks, topics)


def _read_topic(frame: bytes, at: int, version: int) -> tuple[bytes, int]:
    """A topic's name, or its id, and the position after it."""
    if version >= TOPIC_IDS_FROM:
        return frame[at : at + 16], at + 16
    if version >= FLEXIBLE_FROM:
        length, at = _read_uvarint(frame, at)
        length -= 1
    else:
        length, at = _INT16.unpack_from(frame, at)[0], at + 2
    return frame[at : at + length], at + length


def _read_count(frame: bytes, at: int, *, flexible: bool) -> tuple[int, int]:
    if flexible:
        count, at = _read_uvarint(frame, at)
        return count - 1, at
    return _INT32.unpack_from(frame, at)[0], at + 4


_LOG_APPEND_TIME: Final = b"\xff" * 8
_ENDS: Final = {
    version: (_LOG_APPEND_TIME if version >= 2 else b"")
    + (b"\0" * 8 if version >= 5 else b"")
    + (b"\1\0" if version >= FLEXIBLE_FROM else b"\0\0\0\0\xff\xff" if version == 8 else b"")
    for version in range(3, 14)
}


def produce_response(
    version: int, correlation_id: int, results: Results, leader: int | None = None, throttle_ms: int = 0
) -> bytes:
    """`leader`: the broker that a refusal with NOT_LEADER_OR_FOLLOWER names as the leader (KIP-951)."""
    flexible = version >= FLEXIBLE_FROM
    end = _ENDS[version]
    if flexible:
        parts = [_INT32.pack(correlation_id), b"\0", _uvarint(len(results) + 1)]
    else:
        parts = [_INT32.pack(correlation_id), _INT32.pack(len(results))]
    named = False
    for topic, entries in results:
        if version >= TOPIC_IDS_FROM:
            parts += (topic, _uvarint(len(entries) + 1))
        elif flexible:
            parts += (_uvarint(len(topic) + 1), topic, _uvarint(len(entries) + 1))
        else:
            parts += (_INT16.pack(len(topic)), topic, _INT32.pack(len(entries)))
        for index, code, offset in entries:
            parts += (_RESULT.pack(index, code, offset), end)
            if code == 6 and leader is not None and version >= LEADER_HINTS_FROM:
                named = True
                parts += (b"\1\0\x09", _INT32.pack(leader), _INT32.pack(3), b"\0")
            elif flexible:
                parts.append(b"\0")
        if flexible:
            parts.append(b"\0")
    parts.append(_INT32.pack(throttle_ms))
    if named and leader is not None:
        # node_id, host, port, rack
        endpoint = _INT32.pack(leader) + b"\x05host" + _INT32.pack(9092) + b"\0\0"
        parts += (b"\1\0", _uvarint(len(endpoint) + 1), b"\2", endpoint)
    elif flexible:
        parts.append(b"\0")
    return _framed(parts)


def read_produce_response(frame: bytes, version: int) -> tuple[int, Results]:
    """The correlation_id and the results. Raises NoMessage, also for an answer that names a broker."""
    try:
        return _read_produce_response(frame, version)
    except (IndexError, error) as reason:
        raise NoMessage(f"no answer of version {version}: {frame!r}") from reason


def _read_produce_response(frame: bytes, version: int) -> tuple[int, Results]:
    flexible = version >= FLEXIBLE_FROM
    correlation_id = _INT32.unpack_from(frame, 4)[0]
    at = 8 + flexible
    results: Results = []
    count, at = _read_count(frame, at, flexible=flexible)
    end = _ENDS[version]
    for _ in range(count):
        topic, at = _read_topic(frame, at, version)
        entries = []
        listed, at = _read_count(frame, at, flexible=flexible)
        for _ in range(listed):
            index, code, offset = _RESULT.unpack_from(frame, at)
            entries.append((index, code, offset))
            at += _RESULT.size + len(end)
            if flexible:
                at = _skip_tags(frame, at)
        if flexible:
            at = _skip_tags(frame, at)
        results.append((topic, entries))
    at += 4
    if flexible:
        at = _skip_tags(frame, at)
    if at != len(frame):
        raise NoMessage(f"{len(frame) - at} bytes too many in an answer")
    return correlation_id, results


def _skip_tags(frame: bytes, at: int) -> int:
    if frame[at] == 0:
        return at + 1
    count, at = _read_uvarint(frame, at)
    for _ in range(count):
        tag, at = _read_uvarint(frame, at)
        length, at = _read_uvarint(frame, at)
        # In a proxy's answer a leader's hint (KIP-951) is blank: id -1, epoch -1; it has no endpoints.
        if tag == 0 and frame[at : at + min(8, length)] != b"\xff" * 8 and frame[at : at + length] != b"\1":
            raise NoMessage(f"an answer names a broker: {frame[at : at + length]!r}")
        at += length
    return at


# Reads, in one version each: the partition indexes by topic


def read_request(api_key: int, correlation_id: int, client_id: bytes, topics: dict[bytes, list[int]]) -> bytes:
    """Write a Fetch from the beginning, or a ListOffsets for the latest offset."""
    version = FETCH_VERSION if api_key == FETCH else LIST_OFFSETS_VERSION
    head = _HEAD.pack(api_key, version, correlation_id, len(client_id)) + client_id
    parts = [head, _FETCH.pack(-1, 50, 1, 1 << 20, 0, 0, -1, len(topics)) if api_key == FETCH else b"\xff" * 4 + b"\0"]
    if api_key == LIST_OFFSETS:
        parts.append(_INT32.pack(len(topics)))
    for topic, indexes in topics.items():
        parts += (_INT16.pack(len(topic)), topic, _INT32.pack(len(indexes)))
        for index in indexes:
            if api_key == FETCH:
                parts.append(_FETCH_PARTITION.pack(index, -1, 0, -1, 1 << 16))
            else:
                parts.append(_LIST_OFFSETS_PARTITION.pack(index, -1, -1))
    if api_key == FETCH:
        parts.append(b"\0\0\0\0\0\0")
    return _framed(parts)


def read_read_request(frame: bytes) -> tuple[int, int, dict[bytes, list[int]]]:
    """Return api_key, correlation_id, and the requested partition indexes by topic."""
    key, _, correlation_id, at = head_of(frame)
    at += _FETCH.size - 4 if key == FETCH else 5
    size = (_FETCH_PARTITION if key == FETCH else _LIST_OFFSETS_PARTITION).size
    topics: dict[bytes, list[int]] = {}
    count, at = _INT32.unpack_from(frame, at)[0], at + 4
    for _ in range(count):
        length = _INT16.unpack_from(frame, at)[0]
        topic, at = frame[at + 2 : at + 2 + length], at + 2 + length
        listed, at = _INT32.unpack_from(frame, at)[0], at + 4
        topics[topic] = [_INT32.unpack_from(frame, at + size * place)[0] for place in range(listed)]
        at += size * listed
    return key, correlation_id, topics


def read_response(api_key: int, correlation_id: int, results: Results) -> bytes:
    """Write the answer to a read. The third value of each result is the high watermark, or the offset."""
    parts = [_INT32.pack(correlation_id), b"\0" * (10 if api_key == FETCH else 4), _INT32.pack(len(results))]
    for topic, entries in results:
        parts += (_INT16.pack(len(topic)), topic, _INT32.pack(len(entries)))
        for index, code, offset in entries:
            if api_key == FETCH:
                parts.append(_FETCHED.pack(index, code, offset, offset, 0, -1, -1, 0))
            else:
                parts.append(_LISTED.pack(index, code, -1, offset, -1))
    return _framed(parts)


def read_read_response(api_key: int, frame: bytes) -> tuple[int, Results]:
    """Read an answer that `read_response` wrote. Raise NoMessage."""
    try:
        correlation_id = _INT32.unpack_from(frame, 4)[0]
        at = 18 if api_key == FETCH else 12
        count, at = _INT32.unpack_from(frame, at)[0], at + 4
        results: Results = []
        for _ in range(count):
            length = _INT16.unpack_from(frame, at)[0]
            topic, at = frame[at + 2 : at + 2 + length], at + 2 + length
            listed, at = _INT32.unpack_from(frame, at)[0], at + 4
            entries = []
            for _ in range(listed):
                if api_key == FETCH:
                    index, code, offset, *_ = _FETCHED.unpack_from(frame, at)
                    at += _FETCHED.size
                else:
                    index, code, _, offset, _ = _LISTED.unpack_from(frame, at)
                    at += _LISTED.size
                entries.append((index, code, offset))
            results.append((topic, entries))
    except error as reason:
        raise NoMessage(f"no answer to a read: {frame!r}") from reason
    if at != len(frame):
        raise NoMessage(f"{len(frame) - at} bytes too many in an answer to a read")
    return correlation_id, results


# Claims, which are few: by the codec, whose bytes test_codec_own compares with its own


def own_request(correlation_id: int, client_id: bytes, group: str, resources: list[tuple[str, int]] | None) -> bytes:
    """Claim these resources, each with its generation; None claims the whole group."""
    claimed = None if resources is None else tuple(OwnResource(*each) for each in resources)
    body = encode_own_request(OwnRequest(group, claimed))
    return _framed([request_header(OWN, OWN_MAX_VERSION, correlation_id, client_id), body])


def read_own_response(frame: bytes, group: str) -> tuple[int, Results]:
    """Return one entry for each resource, with its error code and fence; none if all was refused. Raise NoMessage."""
    try:
        response = parse_own_response(frame, OWN_MAX_VERSION)
    except CodecError as reason:
        raise NoMessage(f"no answer to a claim: {frame!r}") from reason
    results: Results = [(each.resource.encode(), [(0, each.error_code, each.fence)]) for each in response.resources]
    if response.group != group or bool(response.error_code) is bool(results):
        raise NoMessage(f"no answer to a claim: {frame!r}")
    return response_correlation_id(frame), results


def read_bind_request(frame: bytes) -> tuple[int, list[tuple[bytes, int, int, bool]]]:
    """Return the correlation_id and the bindings: topic, partition index, fence, and whether it is a release."""
    header = parse_request_header(frame)
    bindings = parse_bind_fences_request(frame, header)
    return header.correlation_id, [
        (each.topic.encode(), each.partition_index, each.fence, each.is_released) for each in bindings
    ]


def bind_response(correlation_id: int, bound: list[tuple[bytes, int, int, int]]) -> bytes:
    """Write an error code and the highest fence for each topic and partition index."""
    fences = [BoundFence(topic.decode(), index, code, fence) for topic, index, code, fence in bound]
    return _framed([_INT32.pack(correlation_id), b"\0", encode_bind_fences_response(fences)])

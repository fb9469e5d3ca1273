"""Parse and encode Fetch requests and answers.

Versions 4–18; flexible from 12. Request: replica_id INT32 (to 14), max_wait_ms INT32, min_bytes INT32, max_bytes INT32,
isolation_level INT8, session_id INT32 (v7), session_epoch INT32 (v7), topics of {name, partitions of {index INT32,
current_leader_epoch INT32 (v9), fetch_offset INT64, last_fetched_epoch INT32 (v12), log_start_offset INT64 (v5),
partition_max_bytes INT32}}, forgotten topics (v7), rack_id (v11), tag 1 replica_state {replica_id INT32, replica_epoch
INT64} (v15, KIP-903). Answer: throttle_time_ms INT32, error_code INT16 (v7), session_id INT32 (v7), topics of {name,
partitions of {index INT32, error_code INT16, high_watermark INT64, last_stable_offset INT64, log_start_offset INT64
(v5), aborted_transactions, preferred_read_replica INT32 (v11), records, tag 0 diverging_epoch {epoch INT32, end_offset
INT64} (v12, KIP-595), tag 1 current leader (v12)}}, tag 0 node endpoints (v16, KIP-951). From 13 on a topic's id, a
UUID, replaces its name (KIP-516). A follower names its log in tag 0 of a partition: replica_directory_id UUID
(KIP-853). Other tagged fields, such as a request's cluster_id and a partition's high_watermark (v18), count only
between brokers.

Clients have no fetch sessions (KIP-227): every answer has session 0, so that they send whole requests. Followers leave
their requests open (OPEN_EPOCH). `kproxy_codec.replica_fetch` is the follower's side.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from struct import Struct, unpack_from
from typing import NamedTuple

from kproxy_codec.api_keys import FETCH, is_flexible
from kproxy_codec.error_codes import NONE
from kproxy_codec.errors import InvalidField, Truncated, UnsupportedVersion
from kproxy_codec.framing import LENGTH_BYTES, RequestHeader, response_body_offset
from kproxy_codec.partitioned import (
    TOPIC_ID_BYTES,
    PartitionedRequest,
    PartitionedResponse,
    Place,
    Tag,
    blank_current_leader,
    blank_epochs,
    expect_end,
    fill_error_codes,
    of_fixed_size,
    one_by_one,
    parse_topics,
    read_topic_count,
    response_tags,
)
from kproxy_codec.primitives import (
    INT16,
    INT32,
    INT64,
    Buffer,
    encode_count,
    encode_tagged_fields,
    read_count,
    read_fixed,
    read_tagged_fields,
    skip_bytes,
    skip_string,
    skip_tagged_fields,
)

MIN_VERSION = 4
MAX_VERSION = 18
# From this version on topics are named by their ids.
TOPIC_IDS_FROM = 13
_REPLICA_STATE_FROM = 15
NO_SESSION = 0
# The epochs of a request that belongs to no session (KIP-227): to ask for a session, and to ask for none.
INITIAL_EPOCH, FINAL_EPOCH = 0, -1
# The epoch of a follower's request, which stays open on its connection, without a session, until it is answered.
OPEN_EPOCH = 0

# replica_id, max_wait_ms, min_bytes, max_bytes, isolation_level; and with session_id, session_epoch from version 7
_PREAMBLE = Struct(">iiiib")
SESSION_PREAMBLE = Struct(">iiiibii")
_WITHOUT_REPLICA = Struct(">iiibii")
DIVERGING_EPOCH_TAG = 0
# A tag in a partition of a request; Apache Kafka has it from version 17 on.
REPLICA_DIRECTORY_ID_TAG = 0
_REPLICA_STATE_TAG = 1
_CURRENT_LEADER_TAG = 1
_NODE_ENDPOINTS_TAG = 0
# partition_index, current_leader_epoch (v9), fetch_offset, last_fetched_epoch (v12), log_start_offset (v5), max_bytes
PARTITION_FETCH = Struct(">iiqiqi")
_V9, _V5, _V4 = Struct(">iiqqi"), Struct(">iqqi"), Struct(">iqi")
EPOCH_END = Struct(">iq")
# Of a result: the offsets are after its partition_index and error_code.
_OFFSETS_AT = 6


class EpochEnd(NamedTuple):
    """A leader epoch and the offset after its last record; -1 and -1 if there is none (KIP-279)."""

    leader_epoch: int
    end_offset: int


class PartitionFetch(NamedTuple):
    """The part of a request for one partition.

    Epochs are -1 if the fetcher claims none (KIP-320, KIP-595). `replica_directory_id` is the follower's log id, 16
    bytes (KIP-853).
    """

    partition_index: int
    current_leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    log_start_offset: int
    max_bytes: int
    replica_directory_id: bytes = b""


class PartitionFetched(NamedTuple):
    """An answer's part for one partition. `diverging_epoch` is where a follower's log diverges from the leader's."""

    partition_index: int
    error_code: int
    high_watermark: int = -1
    log_start_offset: int = -1
    diverging_epoch: EpochEnd | None = None
    records: Buffer = b""


class FetchRequest(PartitionedRequest):
    """A fetch request with the limits in its preamble, in milliseconds and bytes. `rack` is the span of its rack_id.

    `forgotten` are the partitions that a follower no longer requests, by topic id.
    """

    __slots__ = (
        "forgotten",
        "isolation_level",
        "max_bytes",
        "max_wait_ms",
        "min_bytes",
        "rack",
        "replica_id",
        "session_epoch",
        "session_id",
    )

    def __init__(self, frame: memoryview, header: RequestHeader, *, flexible: bool) -> None:
        super().__init__(frame, header, flexible=flexible)
        self.replica_id = -1
        self.max_wait_ms = 0
        self.min_bytes = 0
        self.max_bytes = 0
        self.isolation_level = 0
        self.session_id = NO_SESSION
        self.session_epoch = FINAL_EPOCH
        self.rack = (0, 0)
        self.forgotten: list[tuple[bytes, tuple[int, ...]]] = []

    @property
    def continues_session(self) -> bool:
        """Whether it belongs to a session, and so does not name all of its partitions; only its epoch shows this."""
        return self.session_epoch not in (INITIAL_EPOCH, FINAL_EPOCH)

    def least_bytes(self, brokers: int) -> int:
        """The bytes of records that end its wait, at most the share of max_bytes that one of `brokers` may return."""
        return min(self.min_bytes, max(1, self.max_bytes // brokers))

    def asks_alike(self, other: FetchRequest) -> bool:
        """Whether the same entry has the same answer in both: they have the same version and limits."""
        mine, theirs = self.frame[self.header.body_offset : self.topics_start], other.frame
        return (
            self.header.api_version == other.header.api_version
            and mine == theirs[other.header.body_offset : other.topics_start]
        )


def parse_fetch(frame: memoryview, header: RequestHeader) -> FetchRequest:
    """Index a fetch request. Raises CodecError."""
    version = header.api_version
    if not MIN_VERSION <= version <= MAX_VERSION:
        raise UnsupportedVersion(f"unknown Fetch v{version}; expected version {MIN_VERSION} to {MAX_VERSION}")
    flexible = is_flexible(FETCH, version)
    limit = len(frame)
    request = FetchRequest(frame, header, flexible=flexible)
    form = _preamble_form(version)
    offset = header.body_offset + form.size
    if offset > limit:
        raise Truncated(f"a fetch request of {limit} bytes is shorter than its fixed part")
    numbers = form.unpack_from(frame, header.body_offset)
    if version < _REPLICA_STATE_FROM:
        request.replica_id = numbers[0]
        numbers = numbers[1:]
    request.max_wait_ms, request.min_bytes, request.max_bytes, request.isolation_level = numbers[:4]
    if version >= 7:
        request.session_id, request.session_epoch = numbers[4:]
    request.topics_start = offset
    request.by_id = version >= TOPIC_IDS_FROM
    entry_bytes = _partition_form(version).size
    request.topics, request.topics_end = parse_topics(
        frame,
        offset,
        flexible=flexible,
        least_bytes=entry_bytes,
        read_entries=of_fixed_size(entry_bytes, flexible=flexible),
        by_id=request.by_id,
    )
    offset = _read_forgotten_topics(request, request.topics_end, limit) if version >= 7 else request.topics_end
    if version >= 11:
        rack_start = offset
        _, _, offset = skip_string(frame, offset, limit, compact=flexible)
        request.rack = (rack_start, offset)
    if flexible:
        fields, offset = read_tagged_fields(frame, offset, limit)
        for tag, start, end in fields:
            if tag == _REPLICA_STATE_TAG and version >= _REPLICA_STATE_FROM:
                request.replica_id, _ = read_fixed(INT32, frame, start, end)
    expect_end(frame, offset)
    return request


def _preamble_form(version: int) -> Struct:
    return _WITHOUT_REPLICA if version >= _REPLICA_STATE_FROM else SESSION_PREAMBLE if version >= 7 else _PREAMBLE


def _read_forgotten_topics(request: FetchRequest, offset: int, limit: int) -> int:
    frame, flexible, by_id = request.frame, request.flexible, request.header.api_version >= TOPIC_IDS_FROM
    count, offset = read_topic_count(frame, offset, limit, flexible=flexible)
    for _ in range(count):
        topic_id = bytes(frame[offset : offset + TOPIC_ID_BYTES])
        if by_id:
            offset += TOPIC_ID_BYTES
        else:
            _, _, offset = skip_string(frame, offset, limit, compact=flexible)
        partitions, offset = read_count(frame, offset, limit, compact=flexible, least_bytes=4)
        if by_id:
            request.forgotten.append((topic_id, unpack_from(f">{partitions}i", frame, offset)))
        offset += 4 * partitions
        if flexible:
            offset = skip_tagged_fields(frame, offset, limit)
    return offset


def _partition_form(version: int) -> Struct:
    return PARTITION_FETCH if version >= 12 else _V9 if version >= 9 else _V5 if version >= 5 else _V4


def partition_fetch(request: FetchRequest, entry_start: int) -> PartitionFetch:
    """Read the request for the partition whose entry begins at `entry_start`; -1 for fields that the version lacks."""
    version = request.header.api_version
    if version >= TOPIC_IDS_FROM:
        directory_id = _replica_directory_id(request.frame, entry_start + PARTITION_FETCH.size)
        return PartitionFetch._make((*PARTITION_FETCH.unpack_from(request.frame, entry_start), directory_id))
    if version >= 12:
        return PartitionFetch(*PARTITION_FETCH.unpack_from(request.frame, entry_start))
    index, *rest, max_bytes = _partition_form(version).unpack_from(request.frame, entry_start)
    leader_epoch = rest.pop(0) if version >= 9 else -1
    log_start_offset = rest.pop() if version >= 5 else -1
    return PartitionFetch(index, leader_epoch, rest[0], -1, log_start_offset, max_bytes)


def _replica_directory_id(frame: memoryview, offset: int) -> bytes:
    """The id in a follower's tagged fields, whose section begins at `offset`; empty if there is none."""
    fields, _ = read_tagged_fields(frame, offset, len(frame))
    for tag, start, end in fields:
        if tag == REPLICA_DIRECTORY_ID_TAG and end - start == TOPIC_ID_BYTES:
            return bytes(frame[start:end])
    return b""


class FetchApi:
    """Fetch as a partitioned API (see `PartitionedApi`)."""

    api_key = FETCH
    min_version = MIN_VERSION
    max_version = MAX_VERSION

    def parse_request(self, frame: memoryview, header: RequestHeader) -> FetchRequest:
        """Parse a client's request. Raises CodecError.

        A replica_id of 0 or more is refused: it would move the high watermark.
        """
        request = parse_fetch(frame, header)
        if request.replica_id >= 0:
            raise InvalidField(f"invalid replica_id {request.replica_id}: followers fetch from brokers; expected -1")
        return request

    def parse_response(self, frame: memoryview, api_version: int) -> PartitionedResponse:
        """Parse an answer; blank hints and the session in place. Raises CodecError.

        These are leader hints, preferred read replicas and the session id. Null records become empty records.
        """
        flexible = is_flexible(FETCH, api_version)
        response = PartitionedResponse(frame)
        limit = len(frame)
        offset = response_body_offset(frame, FETCH, api_version)
        response.throttle_time_ms, offset = read_fixed(INT32, frame, offset, limit)
        if api_version >= 7:
            response.error_code, offset = read_fixed(INT16, frame, offset, limit)
            session_id, offset = read_fixed(INT32, frame, offset, limit)
            if session_id != NO_SESSION:
                INT32.pack_into(frame, offset - INT32.size, NO_SESSION)

        sizes: list[int] = []

        def skip(frame: memoryview, offset: int, limit: int) -> tuple[int, int]:
            partition_index, offset, records_bytes = _skip_result(frame, offset, limit, api_version)
            sizes.append(records_bytes)
            return partition_index, offset

        response.topics, offset = parse_topics(
            frame,
            offset,
            flexible=flexible,
            least_bytes=4 + 2 + 8 + 8,
            read_entries=one_by_one(skip),
            by_id=api_version >= TOPIC_IDS_FROM,
        )
        fill_error_codes(response)
        response.payload_bytes = sum(sizes)
        following = iter(sizes)
        for topic in response.topics:
            topic.sizes = list(islice(following, len(topic.partitions)))
        if flexible:
            offset = response_tags(response, offset, _NODE_ENDPOINTS_TAG)
        expect_end(frame, offset)
        return response

    def error_entry(self, api_version: int, partition_index: int, error_code: int) -> bytes:
        return b"".join(result_entry(api_version, PartitionFetched(partition_index, error_code)))

    def response_ends(self, api_version: int, throttle_time_ms: int, tags: list[Tag]) -> tuple[bytes, bytes]:
        return response_ends(api_version, throttle_time_ms, tags)

    def piece_preamble(self, request: PartitionedRequest, pieces: int, least_bytes: int) -> Buffer:
        """The preamble of one piece: its share of max_bytes, and the client's own wait."""
        fetch = as_fetch(request)
        return preamble(fetch, fetch.max_bytes // pieces, least_bytes)

    def admit(self, request: PartitionedRequest) -> None:
        """Remove the session, leader epochs and the rack from the request.

        A leader answers a rack with the replica to read from, and no records (KIP-392). Clients get no such replica.
        """
        fetch = as_fetch(request)
        if fetch.header.api_version >= 9:
            blank_epochs(fetch.frame, fetch.topics, INT32.size)
        fetch.frame[fetch.header.body_offset : fetch.topics_start] = preamble(fetch, fetch.max_bytes, fetch.min_bytes)
        start, end = fetch.rack
        no_rack = encode_count(0, compact=True) if fetch.flexible else INT16.pack(0)
        if end - start > len(no_rack):
            behind = no_rack + fetch.frame[end:]
            fetch.frame = fetch.frame[: start + len(behind)]
            fetch.frame[start:] = behind
            INT32.pack_into(fetch.frame, 0, len(fetch.frame) - LENGTH_BYTES)


def beyond_limits(request: FetchRequest, sizes: Iterable[tuple[Place, int]]) -> list[Place]:
    """The results beyond the request's limits: only the first with records may exceed them (KIP-74).

    `sizes` are the bytes of records of results, in the order in which they are taken.
    """
    room, is_first = request.max_bytes, True
    beyond = []
    for (topic_place, ordinal), size in sizes:
        entry_start = request.topics[topic_place].starts[ordinal]
        if not is_first and size > min(room, partition_fetch(request, entry_start).max_bytes):
            beyond.append((topic_place, ordinal))
            continue
        is_first = False
        room -= size
    return beyond


def without_records(api_version: int, result: Buffer) -> bytes:
    """A result without its records."""
    flexible = is_flexible(FETCH, api_version)
    view = memoryview(result)
    at = _records_at(view, 0, len(view), api_version)
    _, _, behind = skip_bytes(view, at, len(view), compact=flexible)
    return b"".join((view[:at], _NO_RECORDS_COMPACT if flexible else _NO_RECORDS, view[behind:]))


def offsets_of(api_version: int, result: Buffer) -> bytes:
    """The high watermark, last stable offset and log start offset (v5) of a result, as encoded."""
    return bytes(result[_OFFSETS_AT : _OFFSETS_AT + _offsets_bytes(api_version)])


def no_result(api_version: int, partition_index: int, offsets: bytes = b"") -> bytes:
    """The entry of a partition without records, with the offsets of an earlier result; they are -1 if there is none."""
    entry = b"".join(result_entry(api_version, PartitionFetched(partition_index, NONE)))
    end = _OFFSETS_AT + _offsets_bytes(api_version)
    return entry[:_OFFSETS_AT] + offsets + entry[end:] if len(offsets) == end - _OFFSETS_AT else entry


def _offsets_bytes(api_version: int) -> int:
    return (3 if api_version >= 5 else 2) * INT64.size


def as_fetch(request: PartitionedRequest) -> FetchRequest:
    """The same request. Raises TypeError if it is of another API."""
    if not isinstance(request, FetchRequest):
        raise TypeError("expected a fetch request")
    return request


def preamble(request: FetchRequest, max_bytes: int, min_bytes: int) -> bytes:
    """The fixed part of a fetch request, without a session, with other limits."""
    version = request.header.api_version
    replica = (request.replica_id,) if version < _REPLICA_STATE_FROM else ()
    session = (NO_SESSION, FINAL_EPOCH) if version >= 7 else ()
    return _preamble_form(version).pack(
        *replica, request.max_wait_ms, min_bytes, max_bytes, request.isolation_level, *session
    )


def _skip_result(frame: memoryview, offset: int, limit: int, api_version: int) -> tuple[int, int, int]:
    flexible = is_flexible(FETCH, api_version)
    partition_index, _ = read_fixed(INT32, frame, offset, limit)
    records_at = _records_at(frame, offset, limit, api_version)
    if api_version >= 11:
        if records_at > limit:
            raise Truncated(f"no room for preferred_read_replica at byte {records_at - 4}: the message ends at {limit}")
        INT32.pack_into(frame, records_at - INT32.size, -1)
    start, end, offset = skip_bytes(frame, records_at, limit, compact=flexible)
    if start == end:
        # Kafka's brokers never send null records, and only the Java client accepts them.
        none = _NO_RECORDS_COMPACT if flexible else _NO_RECORDS
        if offset - records_at == len(none):
            frame[records_at:offset] = none
    if flexible:
        offset = blank_current_leader(frame, offset, limit, _CURRENT_LEADER_TAG)
    return partition_index, offset, end - start


def _records_at(frame: memoryview, offset: int, limit: int, api_version: int) -> int:
    """The offset of the records, with their length, in the result that begins at `offset`."""
    flexible = is_flexible(FETCH, api_version)
    offset += 4 + 2 + 8 + 8 + (8 if api_version >= 5 else 0)
    aborted, offset = read_count(frame, offset, limit, compact=flexible, least_bytes=16, nullable=True)
    for _ in range(aborted):
        offset += 16
        if flexible:
            offset = skip_tagged_fields(frame, offset, limit)
    return offset + (INT32.size if api_version >= 11 else 0)


_NO_RECORDS, _NO_RECORDS_COMPACT = encode_count(0, compact=False), encode_count(0, compact=True)
_RESULT = Struct(">ihqq")
_NO_TAGS = encode_tagged_fields([])


def result_entry(api_version: int, fetched: PartitionFetched) -> list[Buffer]:
    """One partition's entry of a fetch answer.

    Records have a buffer of their own, so that they are not copied. `diverging_epoch` is omitted before version 12.
    """
    flexible = is_flexible(FETCH, api_version)
    index, error_code, high_watermark, log_start_offset, diverging_epoch, records = fetched
    head = _RESULT.pack(index, error_code, high_watermark, high_watermark)
    if api_version >= 5:
        head += INT64.pack(log_start_offset)
    head += encode_count(-1, compact=flexible)
    if api_version >= 11:
        head += INT32.pack(-1)
    head += encode_count(len(records), compact=flexible)
    if not flexible:
        return [head, records]
    if diverging_epoch is None:
        return [head, records, _NO_TAGS]
    return [head, records, encode_tagged_fields([(DIVERGING_EPOCH_TAG, EPOCH_END.pack(*diverging_epoch) + _NO_TAGS)])]


def response_ends(api_version: int, throttle_time_ms: int, tags: list[Tag], error_code: int = 0) -> tuple[bytes, bytes]:
    """The bytes before and after the topics of a fetch answer; the session is always 0."""
    head = INT32.pack(throttle_time_ms)
    if api_version >= 7:
        head += INT16.pack(error_code) + INT32.pack(NO_SESSION)
    return head, encode_tagged_fields(tags) if is_flexible(FETCH, api_version) else b""

"""Encode Fetch requests of followers and read their answers.

The messages are of version 13, which names topics by their ids. `fetch` has the leader's side, and reads a follower's
request like a client's. The request for a partition stays open, over any number of requests and answers of its
connection, until an answer names the partition, or the follower requests it again or withdraws it. So requests and
answers name only changes. The sender of an answer is not trusted: its lengths are checked like a client's. Records are
slices of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, pack
from typing import NamedTuple

from kproxy_codec.api_keys import FETCH
from kproxy_codec.errors import Truncated
from kproxy_codec.fetch import (
    DIVERGING_EPOCH_TAG,
    EPOCH_END,
    NO_SESSION,
    OPEN_EPOCH,
    PARTITION_FETCH,
    REPLICA_DIRECTORY_ID_TAG,
    SESSION_PREAMBLE,
    EpochEnd,
    PartitionFetch,
    PartitionFetched,
)
from kproxy_codec.framing import frame_message, request_header, response_body_offset
from kproxy_codec.partitioned import TOPIC_ID_BYTES, TopicSpan, expect_end, parse_topics
from kproxy_codec.primitives import encode_count, encode_tagged_fields, read_count, read_tagged_fields, skip_bytes
from kproxy_codec.primitives import skip_tagged_fields as skip_tags

VERSION = 13
READ_UNCOMMITTED = 0

_NO_TAGS = encode_tagged_fields([])
# An entry of a request; it ends in one tagged field, with the number of fields, its tag and its length.
_ASKED = Struct(f"{PARTITION_FETCH.format}bbb{TOPIC_ID_BYTES}s")
_ONE_FIELD = (1, REPLICA_DIRECTORY_ID_TAG, TOPIC_ID_BYTES)
# The end of a request, after the forgotten topics: no rack, no tagged fields.
_TRAILER = encode_count(0, compact=True) + _NO_TAGS
# throttle_time_ms, error_code, session_id
_ANSWER = Struct(">ihi")
# partition_index, error_code, high_watermark, last_stable_offset, log_start_offset
_RESULT = Struct(">ihqqq")
_PREFERRED_READ_REPLICA_BYTES = 4
# At least these follow the fixed part: aborted transactions, preferred_read_replica, records, tagged fields.
_LEAST_RESULT_BYTES = _RESULT.size + 1 + _PREFERRED_READ_REPLICA_BYTES + 1 + 1
_ABORTED_TRANSACTION_BYTES = 16


class ReplicaAnswer(NamedTuple):
    """A leader's answer: results by the bytes of the topic's id. `error_code` is that of the whole answer."""

    error_code: int
    topics: list[tuple[bytes, list[PartitionFetched]]]


def encode_replica_fetch(
    replica_id: int,
    topics: Sequence[tuple[bytes, Sequence[PartitionFetch]]],
    withdrawn: Sequence[tuple[bytes, Sequence[int]]] = (),
    *,
    correlation_id: int,
    sender: bytes,
    max_wait_ms: int,
    min_bytes: int,
    max_bytes: int,
) -> bytes:
    """A follower's whole request, length and header included.

    Topics are named by the bytes of their ids. The leader forgets the requests for `withdrawn` partitions. It may wait
    `max_wait_ms` for `min_bytes`; it sends at most `max_bytes` of records, or one larger batch.
    """
    parts = [
        request_header(FETCH, VERSION, correlation_id, sender),
        SESSION_PREAMBLE.pack(replica_id, max_wait_ms, min_bytes, max_bytes, READ_UNCOMMITTED, NO_SESSION, OPEN_EPOCH),
        encode_count(len(topics), compact=True),
    ]
    for topic_id, partitions in topics:
        parts.append(topic_id + encode_count(len(partitions), compact=True))
        parts.extend([_ASKED.pack(*asked[:-1], *_ONE_FIELD, asked.replica_directory_id) for asked in partitions])
        parts.append(_NO_TAGS)
    parts.append(encode_count(len(withdrawn), compact=True))
    for topic_id, indexes in withdrawn:
        parts.append(
            topic_id + encode_count(len(indexes), compact=True) + pack(f">{len(indexes)}i", *indexes) + _NO_TAGS
        )
    parts.append(_TRAILER)
    return frame_message(*parts)


def read_replica_answer(frame: memoryview) -> ReplicaAnswer:
    """Parse a leader's answer. Raises CodecError. Records are slices of `frame`."""
    limit = len(frame)
    offset = response_body_offset(frame, FETCH, VERSION)
    if offset + _ANSWER.size > limit:
        raise Truncated(f"a fetch answer of {limit} bytes is shorter than its fixed part")
    error_code = _ANSWER.unpack_from(frame, offset)[1]
    found: list[list[PartitionFetched]] = []

    def read(frame: memoryview, offset: int, limit: int, topic: TopicSpan, count: int) -> int:
        results: list[PartitionFetched] = []
        for _ in range(count):
            result, offset = _read_result(frame, offset, limit)
            results.append(result)
        found.append(results)
        return offset

    topics, offset = parse_topics(
        frame,
        offset + _ANSWER.size,
        flexible=True,
        least_bytes=_LEAST_RESULT_BYTES,
        read_entries=read,
        by_id=True,
    )
    expect_end(frame, skip_tags(frame, offset, limit))
    return ReplicaAnswer(error_code, [(topic.wire, results) for topic, results in zip(topics, found, strict=True)])


def _read_result(frame: memoryview, offset: int, limit: int) -> tuple[PartitionFetched, int]:
    if offset + _LEAST_RESULT_BYTES > limit:
        raise Truncated(f"no room for a partition's result at byte {offset}: the message ends at {limit}")
    index, error_code, high_watermark, _, log_start_offset = _RESULT.unpack_from(frame, offset)
    offset = _skip_aborted_transactions(frame, offset + _RESULT.size, limit) + _PREFERRED_READ_REPLICA_BYTES
    start, end, offset = skip_bytes(frame, offset, limit, compact=True)
    records = frame[start:end] if end > start else b""
    diverging_epoch = None
    if offset < limit and frame[offset] == 0:
        offset += 1
    else:
        diverging_epoch, offset = _read_diverging_epoch(frame, offset, limit)
    return PartitionFetched(index, error_code, high_watermark, log_start_offset, diverging_epoch, records), offset


def _skip_aborted_transactions(frame: memoryview, offset: int, limit: int) -> int:
    if frame[offset] <= 1:  # always so for a follower: null or empty
        return offset + 1
    count, offset = read_count(frame, offset, limit, compact=True, least_bytes=_ABORTED_TRANSACTION_BYTES)
    for _ in range(count):
        offset = skip_tags(frame, offset + _ABORTED_TRANSACTION_BYTES, limit)
    return offset


def _read_diverging_epoch(frame: memoryview, offset: int, limit: int) -> tuple[EpochEnd | None, int]:
    fields, after = read_tagged_fields(frame, offset, limit)
    for tag, start, end in fields:
        if tag == DIVERGING_EPOCH_TAG:
            if end - start < EPOCH_END.size:
                raise Truncated(f"a diverging epoch has {end - start} bytes at {start}; expected {EPOCH_END.size}")
            return EpochEnd._make(EPOCH_END.unpack_from(frame, start)), after
    return None, after

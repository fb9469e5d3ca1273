"""Read fetch answers from one broker about one partition, versions 4-12.

`kproxy_codec.fetch` describes the messages. Records stay opaque: they are a slice of the answer.
"""

from __future__ import annotations

from struct import Struct

from kproxy_codec.api_keys import FETCH, is_flexible
from kproxy_codec.errors import InvalidField, Truncated, UnsupportedVersion
from kproxy_codec.fetch import MIN_VERSION, TOPIC_IDS_FROM, PartitionFetched
from kproxy_codec.framing import response_body_offset
from kproxy_codec.partitioned import TopicSpan, expect_end, parse_topics
from kproxy_codec.primitives import INT16, INT32, INT64, read_count, read_fixed, skip_bytes
from kproxy_codec.primitives import skip_tagged_fields as skip_tags

MAX_VERSION = TOPIC_IDS_FROM - 1

# partition_index, error_code, high_watermark, last_stable_offset
_RESULT = Struct(">ihqq")
_ABORTED_TRANSACTION_BYTES = 16


def read_fetch_answer(frame: memoryview, api_version: int, topic: str) -> PartitionFetched:
    """Return the result for the one requested partition of `topic`.

    Raises CodecError. An error of the whole answer is returned as the partition's error. Diverging epochs are ignored.
    """
    if not MIN_VERSION <= api_version <= MAX_VERSION:
        raise UnsupportedVersion(f"unknown Fetch v{api_version}; expected version {MIN_VERSION} to {MAX_VERSION}")
    flexible = is_flexible(FETCH, api_version)
    limit = len(frame)
    error_code = 0
    _, offset = read_fixed(INT32, frame, response_body_offset(frame, FETCH, api_version), limit)
    if api_version >= 7:
        error_code, offset = read_fixed(INT16, frame, offset, limit)
        _, offset = read_fixed(INT32, frame, offset, limit)
    results: list[PartitionFetched] = []

    def read(frame: memoryview, offset: int, limit: int, topic: TopicSpan, count: int) -> int:
        for _ in range(count):
            result, offset = _read_result(frame, offset, limit, api_version)
            results.append(result)
        return offset

    topics, offset = parse_topics(frame, offset, flexible=flexible, least_bytes=_RESULT.size + 4, read_entries=read)
    expect_end(frame, skip_tags(frame, offset, limit) if flexible else offset)
    if error_code:
        return PartitionFetched(-1, error_code)
    if len(results) != 1 or topics[0].name != topic.encode():
        names = [each.name.decode() for each in topics]
        raise InvalidField(f"the answer has {len(results)} partitions, of {names}; expected one, of {topic}")
    return results[0]


def _read_result(frame: memoryview, offset: int, limit: int, api_version: int) -> tuple[PartitionFetched, int]:
    flexible = is_flexible(FETCH, api_version)
    if offset + _RESULT.size > limit:
        raise Truncated(f"no room for a partition's result at byte {offset}: the message ends at {limit}")
    index, error_code, high_watermark, _ = _RESULT.unpack_from(frame, offset)
    offset += _RESULT.size
    log_start_offset = -1
    if api_version >= 5:
        log_start_offset, offset = read_fixed(INT64, frame, offset, limit)
    aborted, offset = read_count(
        frame, offset, limit, compact=flexible, least_bytes=_ABORTED_TRANSACTION_BYTES, nullable=True
    )
    for _ in range(aborted):
        offset += _ABORTED_TRANSACTION_BYTES
        if flexible:
            offset = skip_tags(frame, offset, limit)
    if api_version >= 11:  # preferred_read_replica: only for readers that name their rack
        _, offset = read_fixed(INT32, frame, offset, limit)
    start, end, offset = skip_bytes(frame, offset, limit, compact=flexible)
    if flexible:
        offset = skip_tags(frame, offset, limit)
    records = frame[start:end] if end > start else b""
    return PartitionFetched(index, error_code, high_watermark, log_start_offset, None, records), offset

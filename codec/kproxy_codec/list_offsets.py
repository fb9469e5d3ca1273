"""Parse and encode ListOffsets requests and answers.

Versions 1–11. Request: replica_id INT32, isolation_level INT8 (v2), topics of {name, partitions of {index INT32,
current_leader_epoch INT32 (v4), timestamp INT64}}, timeout_ms INT32 (v10). Answer: throttle_time_ms INT32 (v2), topics
of {name, partitions of {index INT32, error_code INT16, timestamp INT64, offset INT64, leader_epoch INT32 (v4)}};
flexible from 6.
"""

from __future__ import annotations

from struct import Struct

from kproxy_codec.api_keys import LIST_OFFSETS, is_flexible
from kproxy_codec.errors import UnsupportedVersion
from kproxy_codec.framing import RequestHeader, response_body_offset
from kproxy_codec.partitioned import (
    PartitionedRequest,
    PartitionedResponse,
    Tag,
    blank_epochs,
    expect_end,
    fill_error_codes,
    of_fixed_size,
    parse_topics,
    response_tags,
)
from kproxy_codec.primitives import INT8, INT32, Buffer, encode_tagged_fields, read_fixed, skip_tagged_fields

MIN_VERSION = 1
MAX_VERSION = 11
_TIMEOUT_FROM = 10

_NO_TAG = -1
_CONSUMER = -1
_RESULT = Struct(">ihqq")


class ListOffsetsApi:
    """ListOffsets as a partitioned API (see `PartitionedApi`)."""

    api_key = LIST_OFFSETS
    min_version = MIN_VERSION
    max_version = MAX_VERSION

    def parse_request(self, frame: memoryview, header: RequestHeader) -> PartitionedRequest:
        """Parse a request. Raises CodecError."""
        version = header.api_version
        if not MIN_VERSION <= version <= MAX_VERSION:
            raise UnsupportedVersion(f"unknown ListOffsets v{version}; expected version {MIN_VERSION} to {MAX_VERSION}")
        flexible = is_flexible(LIST_OFFSETS, version)
        entry_bytes = 4 + (4 if version >= 4 else 0) + 8
        request = PartitionedRequest(frame, header, flexible=flexible)
        _, offset = read_fixed(INT32, frame, header.body_offset, len(frame))
        if version >= 2:
            _, offset = read_fixed(INT8, frame, offset, len(frame))
        request.topics_start = offset
        entries = of_fixed_size(entry_bytes, flexible=flexible)
        request.topics, request.topics_end = parse_topics(
            frame, offset, flexible=flexible, least_bytes=entry_bytes, read_entries=entries
        )
        offset = request.topics_end
        if version >= _TIMEOUT_FROM:
            _, offset = read_fixed(INT32, frame, offset, len(frame))
        expect_end(frame, skip_tagged_fields(frame, offset, len(frame)) if flexible else offset)
        return request

    def parse_response(self, frame: memoryview, api_version: int) -> PartitionedResponse:
        """Parse an answer; set leader epochs to -1 in place, since clients get none. Raises CodecError."""
        flexible = is_flexible(LIST_OFFSETS, api_version)
        entry_bytes = _RESULT.size + (4 if api_version >= 4 else 0)
        response = PartitionedResponse(frame)
        offset = response_body_offset(frame, LIST_OFFSETS, api_version)
        if api_version >= 2:
            response.throttle_time_ms, offset = read_fixed(INT32, frame, offset, len(frame))
        entries = of_fixed_size(entry_bytes, flexible=flexible, named="a partition's result")
        response.topics, offset = parse_topics(
            frame, offset, flexible=flexible, least_bytes=entry_bytes, read_entries=entries
        )
        if api_version >= 4:
            blank_epochs(frame, response.topics, _RESULT.size)
        fill_error_codes(response)
        if flexible:
            offset = response_tags(response, offset, _NO_TAG)
        expect_end(frame, offset)
        return response

    def error_entry(self, api_version: int, partition_index: int, error_code: int) -> bytes:
        return result_entry(api_version, partition_index, error_code, timestamp=-1, offset=-1)

    def response_ends(self, api_version: int, throttle_time_ms: int, tags: list[Tag]) -> tuple[bytes, bytes]:
        head = INT32.pack(throttle_time_ms) if api_version >= 2 else b""
        return head, encode_tagged_fields(tags) if is_flexible(LIST_OFFSETS, api_version) else b""

    def piece_preamble(self, request: PartitionedRequest, pieces: int, least_bytes: int) -> Buffer | None:
        """Return None: the request's own preamble is kept."""
        return None

    def admit(self, request: PartitionedRequest) -> None:
        """Remove leader epochs and a replica id from the request: only consumers send requests through the proxy.

        A broker answers a replica like a consumer, but with offsets beyond the high watermark.
        """
        INT32.pack_into(request.frame, request.header.body_offset, _CONSUMER)
        if request.header.api_version >= 4:
            blank_epochs(request.frame, request.topics, INT32.size)


def result_entry(
    api_version: int, partition_index: int, error_code: int, *, timestamp: int, offset: int, leader_epoch: int = -1
) -> bytes:
    """One partition's entry of a ListOffsets answer."""
    entry = _RESULT.pack(partition_index, error_code, timestamp, offset)
    if api_version >= 4:
        entry += INT32.pack(leader_epoch)
    return entry + encode_tagged_fields([]) if is_flexible(LIST_OFFSETS, api_version) else entry


LIST_OFFSETS_API = ListOffsetsApi()

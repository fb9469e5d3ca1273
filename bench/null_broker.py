"""Run a broker that stores nothing: it answers each produce request, except acks=0, at once with success.

The proxy's cost is measured in front of such brokers, so that the brokers' own work does not add to it. Offsets rise by
the number of records in a batch's header, because a proxy looks for offsets that are assigned twice. The broker accepts
fences but does not keep them. Each runs in a process of its own and prints its port.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from struct import pack_into, unpack_from
from typing import NamedTuple, cast

import uvloop

from kproxy_codec.api_keys import API_VERSIONS, BIND_FENCES, PRODUCE
from kproxy_codec.control import build_response, encode_response
from kproxy_codec.error_codes import NONE
from kproxy_codec.framing import (
    RESPONSE_CORRELATION_ID_OFFSET,
    FrameReader,
    ReceiveArena,
    RequestHeader,
    frame_message,
    parse_request_header,
    response_header,
)
from kproxy_codec.own import BIND_FENCES_VERSION, BoundFence, encode_bind_fences_response, parse_bind_fences_request
from kproxy_codec.partitioned import PartitionedRequest, encode_topics, with_length
from kproxy_codec.produce import PRODUCE_API, parse_produce, records_span, result_entry

MAX_FRAME_BYTES = 128 << 20
MAX_KNOWN_SHAPES = 4096
LAST_OFFSET_DELTA_OFFSET = 23
OFFSET_BYTES = 8


class Answer(NamedTuple):
    """A whole response, and the place of each partition's base offset in it, in the order of the request."""

    frame: bytes
    base_offsets: list[int]


class NullBroker(asyncio.BufferedProtocol):
    """One connection. Answers of the same shape are encoded once and copied."""

    answers: dict[tuple[object, ...], Answer] = {}  # noqa: RUF012 -- shared by the process on purpose
    end_offsets: dict[tuple[bytes, int], int] = {}  # noqa: RUF012 -- shared by the process on purpose

    def __init__(self, arena: ReceiveArena) -> None:
        self._reader = FrameReader(MAX_FRAME_BYTES, arena)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        answers = [self.answer(frame) for frame in self._reader.buffer_updated(nbytes)]
        if answers:
            self._transport.write(b"".join(answers))

    def answer(self, frame: memoryview) -> bytes | bytearray:
        """Return the answer to one request; empty for none."""
        header = parse_request_header(frame)
        if header.api_key == API_VERSIONS:
            return _versions(header)
        if header.api_key == BIND_FENCES:
            return _bound(frame, header)
        request = parse_produce(frame, header)
        if request.acks == 0:
            return bytearray()
        shape = (header.api_version, *((topic.name, *topic.partitions) for topic in request.topics))
        known = self.answers.get(shape)
        if known is None:
            known = _make(request)
            if len(self.answers) < MAX_KNOWN_SHAPES:
                self.answers[shape] = known
        answer = bytearray(known.frame)
        pack_into(">i", answer, RESPONSE_CORRELATION_ID_OFFSET, header.correlation_id)
        places = iter(known.base_offsets)
        for topic in request.topics:
            for ordinal, partition in enumerate(topic.partitions):
                place = topic.name, partition
                base_offset = self.end_offsets.get(place, 0)
                pack_into(">q", answer, next(places), base_offset)
                start, _ = records_span(request, topic, ordinal)
                last_offset_delta: int = unpack_from(">i", frame, start + LAST_OFFSET_DELTA_OFFSET)[0]
                self.end_offsets[place] = base_offset + last_offset_delta + 1
        return answer


def _make(request: PartitionedRequest) -> Answer:
    """Return the answer to requests of this shape."""
    none, all_ones = (encoded(request, base_offset) for base_offset in (0, -1))
    # All eight bytes of an offset differ, and no other byte does.
    differing = [place for place, (one, other) in enumerate(zip(none, all_ones, strict=True)) if one != other]
    places = iter(differing[::OFFSET_BYTES])
    base_offsets = []
    for topic in request.topics:
        found = dict(zip(_answered(topic.partitions), places, strict=False))
        base_offsets += [found[partition] for partition in topic.partitions]
    return Answer(none, base_offsets)


def _answered(partitions: Sequence[int]) -> list[int]:
    """Return the partitions in the order of an answer."""
    return sorted(partitions, key=lambda index: index * 0x9E3779B1 & 0xFFFFFFFF)


def encoded(request: PartitionedRequest, base_offset: int, error_code: int = NONE, correlation_id: int = 0) -> bytes:
    """Return an answer with the same result for every partition, with its length prefix.

    Partitions are in the order of a hash table, as in answers of Apache Kafka's brokers, not in the request's.
    """
    header = request.header
    topics = [
        (
            topic.name,
            [
                result_entry(header.api_version, index, error_code, base_offset=base_offset, log_start_offset=0)
                for index in _answered(topic.partitions)
            ],
            len(topic.partitions),
        )
        for topic in request.topics
    ]
    head, tail = PRODUCE_API.response_ends(header.api_version, 0, [])
    parts = [response_header(header.api_key, header.api_version, correlation_id) + head]
    return b"".join(with_length([*parts, *encode_topics(topics, flexible=request.flexible, by_id=request.by_id), tail]))


def _versions(header: RequestHeader) -> bytearray:
    served = [{"api_key": key, "min_version": 0, "max_version": 99} for key in (API_VERSIONS, PRODUCE)]
    served.append({"api_key": BIND_FENCES, "min_version": BIND_FENCES_VERSION, "max_version": BIND_FENCES_VERSION})
    body = encode_response(build_response(API_VERSIONS, header.api_version, api_keys=served))
    head = response_header(header.api_key, header.api_version, header.correlation_id)
    return bytearray(b"".join(with_length([head, body])))


def _bound(frame: memoryview, header: RequestHeader) -> bytearray:
    asked = parse_bind_fences_request(frame, header)
    body = encode_bind_fences_response(
        [BoundFence(each.topic, each.partition_index, NONE, each.fence) for each in asked]
    )
    return bytearray(frame_message(response_header(BIND_FENCES, header.api_version, header.correlation_id), body))


async def main(make: Callable[[ReceiveArena], NullBroker] = NullBroker, port: int = 0) -> None:
    """Serve; `make` creates each connection. Port 0: any free one."""
    arena = ReceiveArena()
    server = await asyncio.get_running_loop().create_server(lambda: make(arena), "127.0.0.1", port)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())

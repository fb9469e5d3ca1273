"""Run a broker for the section `consume`: it serves only Fetch, and lets reads wait as Kafka's brokers do.

`python -m bench.log_broker RATE PARTITION…` prints its port. The partitions of the topic `slow` get RATE records a
second, spread over all of them; a record's value is its creation time, on the clock that all processes of this machine
share. The partitions of the topic `full` have, at any offset, as many bytes as a read may get. An empty message is
answered with the number of fetches so far.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time

from kproxy_codec.api_keys import API_VERSIONS, FETCH
from kproxy_codec.control import build_response, encode_response
from kproxy_codec.fetch import PartitionFetched, parse_fetch, partition_fetch, response_ends, result_entry
from kproxy_codec.framing import RequestHeader, frame_message, parse_request_header, response_header
from kproxy_codec.partitioned import PartitionedRequest, encode_topics, with_length
from kproxy_codec.primitives import INT32, Buffer

FULL, SLOW = b"full", b"slow"
BIRTH = struct.Struct(">q")
_LENGTH = struct.Struct(">i")


class LogBroker:
    """The logs and all that waits for them."""

    def __init__(self, rate: float, partitions: list[int]) -> None:
        self.fetches = 0
        self._logs: dict[int, list[bytes]] = {index: [] for index in partitions}
        self._rate = rate
        self._news = asyncio.Event()
        self._blob = bytes(1 << 20)

    async def fill(self) -> None:
        """Append records at their rate."""
        due, turn = time.monotonic(), 0
        while self._rate:
            due += 1 / self._rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            turn += 1
            self._logs[list(self._logs)[turn * 7 % len(self._logs)]].append(BIRTH.pack(time.monotonic_ns()))
            self._news.set()
            self._news = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, request by request."""
        try:
            while True:
                size = _LENGTH.unpack(await reader.readexactly(4))[0]
                if not size:
                    writer.write(BIRTH.pack(self.fetches))
                    continue
                frame = memoryview(bytearray(_LENGTH.pack(size) + await reader.readexactly(size)))
                header = parse_request_header(frame)
                if header.api_key != FETCH:
                    writer.write(_introduction(header))
                    continue
                self.fetches += 1
                request = parse_fetch(frame, header)
                until = time.monotonic() + request.max_wait_ms / 1000
                while True:
                    news = self._news
                    entries, found = self._find(request, request.max_bytes)
                    left = until - time.monotonic()
                    if found >= request.min_bytes or left <= 0:
                        break
                    try:
                        async with asyncio.timeout(left):
                            await news.wait()
                    except TimeoutError:
                        pass
                head, tail = response_ends(header.api_version, 0, [])
                start = response_header(header.api_key, header.api_version, header.correlation_id)
                writer.writelines(with_length([start + head, *encode_topics(entries, flexible=request.flexible), tail]))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _find(self, request: PartitionedRequest, room: int) -> tuple[list[tuple[bytes, list[Buffer], int]], int]:
        found, entries = 0, []
        for topic in request.topics:
            buffers: list[Buffer] = []
            for index, start in zip(topic.partitions, topic.starts, strict=True):
                asked = partition_fetch(request, start)  # type: ignore[arg-type]
                records: Buffer = b""
                if topic.name == FULL:
                    records = self._blob[: min(asked.max_bytes, max(0, room - found))]
                else:
                    records = b"".join(self._logs[index][asked.fetch_offset :])
                found += len(records)
                fetched = PartitionFetched(index, 0, len(self._logs[index]), 0, None, records)
                buffers += result_entry(request.header.api_version, fetched)
            entries.append((topic.name, buffers, len(topic.partitions)))
        return entries, found


def _introduction(header: RequestHeader) -> bytes:
    """Return the answer to the proxy's ApiVersions request."""
    keys = [{"api_key": FETCH, "min_version": 4, "max_version": 12}]
    keys += [{"api_key": API_VERSIONS, "min_version": 0, "max_version": 3}]
    body = encode_response(build_response(API_VERSIONS, header.api_version, error_code=0, api_keys=keys))
    return frame_message(INT32.pack(header.correlation_id), body)


async def main(rate: float, partitions: list[int]) -> None:
    broker = LogBroker(rate, partitions)
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0, limit=1 << 20)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server, asyncio.TaskGroup() as group:
        group.create_task(broker.fill())
        group.create_task(server.serve_forever())


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), list(map(int, sys.argv[2:]))))

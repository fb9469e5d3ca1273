"""Send raw produce load: each connection keeps a number of requests in flight, and counts the answers.

The requests are made once, and are sent unchanged or with a producer's sequence numbers. The generator does little
work, because the proxy is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, repeat
from struct import Struct
from typing import NamedTuple, TypeAlias, cast

from kproxy_codec import api_keys
from kproxy_codec.framing import FrameReader, ReceiveArena, request_header
from kproxy_codec.primitives import INT16, INT32, encode_count, encode_tagged_fields
from kproxy_codec.record_batch import HEADER_BYTES, LOG_OVERHEAD_BYTES, MAGIC

MAX_ANSWER_BYTES = 1 << 20
CONNECTIONS = 8
IN_FLIGHT = 5
VERSION = 9
TOPIC = b"bench"
RECORD_BYTES = 100
# base_offset, batch_length, partition_leader_epoch, magic, crc, attributes, last_offset_delta, base_timestamp,
# max_timestamp, producer_id, producer_epoch, base_sequence, the number of records
_BATCH = Struct(">qiibIhiqqqhii")
_PRODUCER = Struct(">qhi")
_PRODUCER_OFFSET = 43
_TIMESTAMP = 1_700_000_000_000
_MAX_SEQUENCE = 0x7FFF_FFFF
_producer_ids = count(1)
Frames: TypeAlias = bytes | Callable[[], bytes | bytearray]
"""The frames of a connection: one request repeated, or the result of each call."""


@dataclass(frozen=True)
class Shape:
    """`partitions` batches of `batch_bytes` in each request; `requests` on each connection of one measurement."""

    name: str
    partitions: int
    batch_bytes: int
    requests: int

    @property
    def records(self) -> int:
        """The number of records in each batch."""
        return self.batch_bytes // RECORD_BYTES


SHAPES = (
    Shape("1 × 1 KiB", 1, 1 << 10, 3000),
    Shape("1 × 16 KiB", 1, 16 << 10, 2000),
    Shape("3 × 16 KiB", 3, 16 << 10, 1200),
    Shape("10 × 16 KiB", 10, 16 << 10, 400),
    Shape("1 × 1 MB", 1, 1_000_000, 60),
)
# Many small batches: these show the cost of a partition.
MANY_PARTITIONS = (
    Shape("10 × 1 KiB", 10, 1 << 10, 800),
    Shape("100 × 100 B", 100, 100, 200),
)


def produce_frame(shape: Shape, first: int = 0, acks: int = -1, topic: bytes = TOPIC) -> bytes:
    """Return a produce request of this shape, to partitions from `first` on, with its length prefix."""
    return _frame(shape, first, acks, topic)[0]


def _frame(shape: Shape, first: int, acks: int = -1, topic: bytes = TOPIC) -> tuple[bytes, list[int]]:
    """Return the request, and the place of each batch in it."""
    tags = encode_tagged_fields([])
    body = encode_count(-1, compact=True) + INT16.pack(acks) + INT32.pack(30_000)
    body += encode_count(1, compact=True) + encode_count(len(topic), compact=True) + topic
    body += encode_count(shape.partitions, compact=True)
    header = INT32.pack(0) + request_header(api_keys.PRODUCE, VERSION, 0, b"bench")
    starts = []
    for index in range(shape.partitions):
        body += INT32.pack(first + index) + encode_count(shape.batch_bytes, compact=True)
        starts.append(len(header) + len(body))
        body += batch_of(shape) + tags
    message = header[INT32.size :] + body + tags + tags
    return INT32.pack(len(message)) + message, starts


def batch_of(shape: Shape) -> bytes:
    """Return a batch by its header. CRC and records are zeros, because nothing here reads them."""
    records = shape.records
    length = shape.batch_bytes - LOG_OVERHEAD_BYTES
    times = _TIMESTAMP, _TIMESTAMP
    header = _BATCH.pack(0, length, -1, MAGIC, 0, 0, records - 1, *times, -1, -1, -1, records)
    return header + bytes(shape.batch_bytes - HEADER_BYTES)


class ProducerFrames:
    """The requests of an idempotent producer with its own id: the same request with ascending sequence numbers."""

    def __init__(self, shape: Shape, first: int = 0, topic: bytes = TOPIC) -> None:
        self._frame, self._starts = _frame(shape, first, topic=topic)
        self._records = shape.records
        self._producer_id = next(_producer_ids)
        self._sequence = 0

    def __call__(self) -> bytearray:
        frame = bytearray(self._frame)
        for start in self._starts:
            _PRODUCER.pack_into(frame, start + _PRODUCER_OFFSET, self._producer_id, 0, self._sequence)
        self._sequence = self._sequence + self._records & _MAX_SEQUENCE
        return frame


class Connection(asyncio.BufferedProtocol):
    """A connection that sends `opening`, if any, whose answer `ready` returns, and from `start` on the load."""

    def __init__(self, frames: Frames, requests: int, arena: ReceiveArena, opening: bytes = b"") -> None:
        self._frames = frames
        self._to_send = requests
        self._to_come = requests
        self._opening = opening
        self._reader = FrameReader(MAX_ANSWER_BYTES, arena)
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[bytes] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._opening:
            self._transport.write(self._opening)
        else:
            self.ready.set_result(b"")

    def start(self) -> None:
        self._send(IN_FLIGHT)

    def start_again(self, requests: int, frames: Frames | None = None) -> None:
        """Send `requests` more, once every answer has come. `frames` replace the requests."""
        if self._transport.is_closing():
            raise ConnectionError("the proxy has closed")
        if frames is not None:
            self._frames = frames
        self._to_send = self._to_come = requests
        self.done = asyncio.get_running_loop().create_future()
        self.start()

    def close(self) -> None:
        # Nobody waits for what was not sent.
        self.done.cancel()
        self._transport.close()

    def _send(self, wanted: int) -> None:
        count = min(wanted, self._to_send)
        self._to_send -= count
        if count:
            frames = self._frames
            self._transport.writelines(
                [frames] * count if isinstance(frames, bytes) else [frames() for _ in range(count)]
            )

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        frames = self._reader.buffer_updated(nbytes)
        if frames and not self.ready.done():
            self.ready.set_result(bytes(frames[0]))
            return
        self._take(frames)

    def _take(self, frames: Sequence[memoryview]) -> None:
        """Count the answers, and send that many more requests."""
        answers = len(frames)
        self._to_come -= answers
        if self._to_come == 0:
            self.done.set_result(None)
        else:
            self._send(answers)

    def connection_lost(self, exc: Exception | None) -> None:
        ended = ConnectionError(f"the proxy closed with {self._to_come} answers to come")
        for waited in (self.ready, self.done):
            if not waited.done():
                waited.set_exception(ended)


async def open_all(
    port: int,
    frames: Sequence[Frames],
    requests: int,
    openings: Sequence[bytes] = (),
    kind: type[Connection] = Connection,
    host: str = "127.0.0.1",
) -> list[Connection]:
    """Open a connection for each of `frames`, to send `requests`, and await the answer to its opening, if any."""
    loop = asyncio.get_running_loop()
    arena = ReceiveArena()
    connections = []
    for frame, opening in zip(frames, chain(openings, repeat(b"")), strict=False):
        _, connection = await loop.create_connection(partial(kind, frame, requests, arena, opening), host, port)
        await connection.ready
        connections.append(connection)
    return connections


async def send(connections: Sequence[Connection]) -> None:
    """Send the load on all of them, IN_FLIGHT requests at a time on each; close them when every answer is there."""
    for connection in connections:
        connection.start()
    await asyncio.gather(*(connection.done for connection in connections))
    for connection in connections:
        connection.close()


async def send_again(
    connections: Sequence[Connection], requests: int, frames: Iterable[Frames | None] = repeat(None)
) -> None:
    """Send `requests` more on each open connection, once it has all its answers; `frames` replace its requests."""
    for connection, other in zip(connections, frames, strict=False):
        connection.start_again(requests, other)
    await asyncio.gather(*(connection.done for connection in connections))


async def send_all(port: int, frame: bytes, requests: int, connections: int = CONNECTIONS) -> None:
    """Send `requests` on each connection, and wait for every answer."""
    await send(await open_all(port, [frame] * connections, requests))


class Load(NamedTuple):
    """A row of a table: `requests` on each of `connections`, with the frames that `frames` returns for it."""

    name: str
    frames: Callable[[], Frames]
    requests: int
    request_bytes: int
    connections: int = CONNECTIONS
    kind: type[Connection] = Connection

    async def open(self, port: int, requests: int, host: str = "127.0.0.1") -> list[Connection]:
        frames = [self.frames() for _ in range(self.connections)]
        return await open_all(port, frames, requests, kind=self.kind, host=host)

    async def send(self, port: int, requests: int) -> None:
        """Open new connections, and send that many requests on each."""
        await send(await self.open(port, requests))


def shape_load(shape: Shape) -> Load:
    """Return a load that repeats the same request."""
    frame = produce_frame(shape)
    return Load(shape.name, lambda: frame, shape.requests, len(frame))

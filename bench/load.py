"""Raw produce load: connections that each keep a number of requests in flight and count the answers.

The requests are made once and sent as they are: what is measured is the proxy, so the generator does little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import cast

from codec import api_keys
from codec.framing import FrameReader, ReceiveArena
from codec.headers import request_header
from codec.primitives import INT16, INT32, encode_count, encode_tagged_fields

MAX_ANSWER_BYTES = 1 << 20
CONNECTIONS = 8
IN_FLIGHT = 5
VERSION = 9
TOPIC = b"bench"


@dataclass(frozen=True)
class Shape:
    """`partitions` batches of `batch_bytes` in each request; `requests` on each connection of one measurement."""

    name: str
    partitions: int
    batch_bytes: int
    requests: int


SHAPES = (
    Shape("1 × 1 KiB", 1, 1 << 10, 3000),
    Shape("1 × 16 KiB", 1, 16 << 10, 2000),
    Shape("3 × 16 KiB", 3, 16 << 10, 1200),
    Shape("10 × 16 KiB", 10, 16 << 10, 400),
    Shape("1 × 1 MB", 1, 1_000_000, 60),
)


def produce_frame(shape: Shape, first: int = 0) -> bytes:
    """One produce request of this shape, to partitions from `first` on, length prefix included.

    The records are zeros: nobody here reads them.
    """
    tags = encode_tagged_fields([])
    body = encode_count(-1, compact=True) + INT16.pack(-1) + INT32.pack(30_000)
    body += encode_count(1, compact=True) + encode_count(len(TOPIC), compact=True) + TOPIC
    body += encode_count(shape.partitions, compact=True)
    for index in range(shape.partitions):
        body += (
            INT32.pack(first + index) + encode_count(shape.batch_bytes, compact=True) + bytes(shape.batch_bytes) + tags
        )
    message = request_header(api_keys.PRODUCE, VERSION, 0, b"bench") + body + tags + tags
    return INT32.pack(len(message)) + message


class Connection(asyncio.BufferedProtocol):
    """One connection. It sends `opening`, whose answer `ready` gives, or nothing; then, from `start` on, the load."""

    def __init__(self, frame: bytes, requests: int, arena: ReceiveArena, opening: bytes = b"") -> None:
        self._frame = frame
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

    def _send(self, wanted: int) -> None:
        count = min(wanted, self._to_send)
        self._to_send -= count
        if count:
            self._transport.writelines([self._frame] * count)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        frames = self._reader.buffer_updated(nbytes)
        if frames and not self.ready.done():
            self.ready.set_result(bytes(frames[0]))
            return
        answers = len(frames)
        self._to_come -= answers
        if self._to_come == 0:
            self._transport.close()
            self.done.set_result(None)
        else:
            self._send(answers)

    def connection_lost(self, exc: Exception | None) -> None:
        ended = ConnectionError(f"the proxy closed with {self._to_come} answers to come")
        for waited in (self.ready, self.done):
            if not waited.done():
                waited.set_exception(ended)


async def open_all(
    port: int, frames: Sequence[bytes], requests: int, openings: Sequence[bytes] = ()
) -> list[Connection]:
    """A connection for each of `frames`, to send it `requests` times; each has the answer to its opening, if any."""
    loop = asyncio.get_running_loop()
    arena = ReceiveArena()
    connections = []
    for frame, opening in zip_longest(frames, openings, fillvalue=b""):
        _, connection = await loop.create_connection(
            partial(Connection, frame, requests, arena, opening), "127.0.0.1", port
        )
        await connection.ready
        connections.append(connection)
    return connections


async def send(connections: Sequence[Connection]) -> None:
    """The load of all of them, IN_FLIGHT requests at a time on each, until every answer is there."""
    for connection in connections:
        connection.start()
    await asyncio.gather(*(connection.done for connection in connections))


async def send_all(port: int, frame: bytes, requests: int, connections: int = CONNECTIONS) -> None:
    """Send `requests` on each connection, and wait for every answer."""
    await send(await open_all(port, [frame] * connections, requests))

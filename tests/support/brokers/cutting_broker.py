"""Run a broker that cuts a connection after an exact number of bytes of a request or of an answer.

It serves one partition and reads its socket byte by byte, which a protocol on an event loop cannot do. It answers its
first request with success, so that the route to it is proven. It cuts the second one, and serves everything on later
connections. It recognizes a batch of an idempotent producer that is in its log already.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import NamedTuple

from kproxy.routing.topology import Address
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import client_id, parse_request_header
from kproxy_codec.record_batch import parse_header
from tests.support.brokers.scripted_upstream import HOST, VERSIONS_CLIENT_ID, introduction
from tests.support.wire.messages import PRODUCE, read_by_kafka_python, response_body, response_frame, sample_response

RESET_AT_CLOSE = struct.pack("ii", 1, 0)
SEEN_AFTER_S = 0.1


class Cut(NamedTuple):
    """Where and how the second request's connection ends: after `at` bytes of the request or the answer."""

    of_answer: bool
    at: int
    resets: bool

    def __str__(self) -> str:
        what = "answer" if self.of_answer else "request"
        return f"{'reset' if self.resets else 'closed'} after {self.at} bytes of the {what}"


class CuttingBroker:
    """The broker. `appended` is its log; `arrived` has the batches of all whole requests, also on cut connections."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.appended: list[bytes] = []
        self.arrived: list[bytes] = []
        self._listener = socket.create_server((HOST, 0))
        self._listener.setblocking(False)
        self._tasks: set[asyncio.Task[None]] = set()
        self._served = 0
        # Connections on which it has answered ApiVersions, before any request.
        self._introductions = 0
        self._is_cut = False

    @property
    def address(self) -> Address:
        return Address(HOST, self._listener.getsockname()[1])

    @property
    def is_idle(self) -> bool:
        """Whether no connection is open."""
        return len(self._tasks) - self._introductions <= 1

    def has_done_with(self, number: int) -> bool:
        """Whether request `number` has been served, or its connection has been cut and is closed at the other end."""
        return self._served > number and (number == 0 or self._is_cut)

    def start(self) -> None:
        self._spawn(self._accept())

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    def _spawn(self, work: object) -> None:
        task = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            connection.setblocking(False)
            self._spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError, EOFError):
            while True:
                is_cut = self._served == 1
                if is_cut and not self.cut.of_answer:
                    await self._cut_request(connection)
                    return
                frame = await _read(connection, 4)
                frame += await _read(connection, struct.unpack(">i", frame)[0])
                if client_id(frame) == VERSIONS_CLIENT_ID:
                    self._introductions += 1
                    await asyncio.get_running_loop().sock_sendall(connection, introduction(parse_request_header(frame)))
                    continue
                self._served += 1
                reply = self._take(frame)
                if is_cut:
                    reply = reply[: self.cut.at]
                if reply:
                    await asyncio.get_running_loop().sock_sendall(connection, reply)
                if is_cut:
                    await self._end(connection)
                    return

    async def _cut_request(self, connection: socket.socket) -> None:
        while not _has_bytes(connection):
            # A connection that ends before the request comes is idle, and the proxy notices its end.
            await asyncio.sleep(0.001)
        got = await _read(connection, self.cut.at)
        self._served += 1
        if len(got) >= 4 and len(got) == 4 + struct.unpack(">i", got[:4])[0]:
            # The whole request was read: the proxy does not know that the batch was appended.
            self._take(got)
        await self._end(connection)

    async def _end(self, connection: socket.socket) -> None:
        if self.cut.resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            connection.close()
            # Nothing reports when the other end has seen the answer.
            await asyncio.sleep(SEEN_AFTER_S)
            self._is_cut = True
            return
        # Closing a connection with unread bytes would also reset it.
        connection.shutdown(socket.SHUT_WR)
        while await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
            pass
        self._is_cut = True

    def _take(self, frame: bytes) -> bytes:
        """Append the batch of a request; return the answer, if it has one."""
        try:
            header = parse_request_header(frame)
            request = read_by_kafka_python("request", PRODUCE, header.api_version, frame[header.body_offset :])
        except CodecError as error:
            raise AssertionError(f"no request ({self.cut}, {self._served} served): {frame!r}") from error
        [topic] = request["topic_data"]
        [entry] = topic["partition_data"]
        offset = self._append(entry["records"])
        if request["acks"] == 0:
            return b""
        answer = sample_response(PRODUCE, {topic["name"]: [entry["index"]]}, throttle_time_ms=0)
        answer["responses"][0]["partition_responses"][0].update(base_offset=offset, record_errors=[])
        body = response_body(PRODUCE, header.api_version, answer)
        return bytes(response_frame(PRODUCE, header.api_version, body, correlation_id=header.correlation_id))

    def _append(self, records: bytes) -> int:
        self.arrived.append(records)
        if parse_header(records).producer_id >= 0 and records in self.appended:
            return self.appended.index(records)
        self.appended.append(records)
        return len(self.appended) - 1


def _has_bytes(connection: socket.socket) -> bool:
    """Whether something can be read. Raises EOFError."""
    try:
        if not connection.recv(1, socket.MSG_PEEK):
            raise EOFError
    except BlockingIOError:
        return False
    return True


async def _read(connection: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes. Raises EOFError."""
    got = b""
    while len(got) < count:
        more = await asyncio.get_running_loop().sock_recv(connection, count - len(got))
        if not more:
            raise EOFError
        got += more
    return got

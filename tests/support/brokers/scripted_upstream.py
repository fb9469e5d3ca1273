"""Run a broker that its test controls: a real TCP server on loopback, driven request by request.

Without a `script` every request waits in `asked` until the test takes it and answers, or does not. With one, the script
is called for each request as it arrives. It answers nothing by itself except the breaker's probes, unless
`answers_probes` is off. It checks nothing: the test may send anything, wrong correlation ids, halves of answers and
closed connections included.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

from kproxy.proxy.apis import proxy_ranges
from kproxy.routing.topology import Address
from kproxy_codec import control
from kproxy_codec.api_keys import API_VERSIONS, FETCH, LIST_OFFSETS, OWN, PRODUCE, is_flexible
from kproxy_codec.framing import RequestHeader, client_id, parse_request_header
from tests.support.wire.messages import (
    APIS,
    REQUEST_FIELDS,
    RESPONSE_FIELDS,
    Tags,
    read_by_kafka_python,
    response_body,
    response_frame,
)

# Less than the default timeout of requests to a broker: an answer that comes only at its deadline is too late.
PATIENCE_S = 25.0
PROBE_CLIENT_ID = b"kproxy-probe"
VERSIONS_CLIENT_ID = b"kproxy-versions"
# Long enough for requests that are wrongly sent at once to arrive.
SILENCE_S = 0.05
HOST = "127.0.0.1"
# <asm-generic/socket.h>, <linux/bpf_common.h>
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _BPF_RETURN = 26, 27, 0x06

Partition = tuple[str, int]
Script = Callable[["Asked"], None]

# The default fields of every entry of an answer.
_RESULTS: dict[int, dict[str, Any]] = {
    PRODUCE: {
        "error_code": 0,
        "base_offset": 0,
        "log_append_time_ms": -1,
        "log_start_offset": 0,
        "record_errors": [],
        "error_message": None,
    },
    FETCH: {
        "error_code": 0,
        "high_watermark": 0,
        "last_stable_offset": 0,
        "log_start_offset": 0,
        "aborted_transactions": None,
        "preferred_read_replica": -1,
        "records": b"",
    },
    LIST_OFFSETS: {"error_code": 0, "timestamp": -1, "offset": 0, "leader_epoch": -1},
}


class UpstreamConnection(asyncio.Protocol):
    """One accepted connection. `got` holds every byte received."""

    def __init__(self, upstream: ScriptedUpstream) -> None:
        self.upstream = upstream
        self.got = bytearray()
        self.closed = asyncio.get_running_loop().create_future()
        self._taken = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.upstream.connections.append(self)
        if self.upstream.reads_nothing:
            # uvloop begins to read after this, whatever is set here.
            asyncio.get_running_loop().call_soon(self.transport.pause_reading)

    def data_received(self, data: bytes) -> None:
        self.got += data
        while len(self.got) >= self._taken + 4:
            end = self._taken + 4 + struct.unpack_from(">i", self.got, self._taken)[0]
            if len(self.got) < end:
                break
            frame = bytes(self.got[self._taken : end])
            self._taken = end
            self.upstream.take(Asked(self, frame))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    @property
    def is_open(self) -> bool:
        return not self.closed.done() and not self.transport.is_closing()

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def close(self) -> None:
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    def lose_arrivals(self) -> None:
        """Lose every packet that arrives on this connection from now on; others, and the way back, are not affected.

        Its kernel acknowledges nothing, as if the network dropped them: a socket filter (BPF) lets nothing through.
        """
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(drop_all))
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def take_arrivals(self) -> None:
        """Stop losing packets."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    async def until_closed(self) -> None:
        """Wait until the other side has closed."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.shield(self.closed)


class Asked:
    """One request that arrived, and the ways to answer it."""

    def __init__(self, connection: UpstreamConnection, frame: bytes) -> None:
        self.connection = connection
        self.frame = frame
        self.header: RequestHeader = parse_request_header(frame)
        self._fields: dict[str, Any] | None = None

    @property
    def body(self) -> bytes:
        return self.frame[self.header.body_offset :]

    @property
    def fields(self) -> dict[str, Any]:
        """The request as kafka-python reads it; for partitioned APIs only."""
        if self._fields is None:
            self._fields = read_by_kafka_python("request", self.header.api_key, self.header.api_version, self.body)
        return self._fields

    @property
    def topics(self) -> list[tuple[str, list[int]]]:
        topics, entries, name, index = REQUEST_FIELDS[self.header.api_key]
        return [(topic[name], [entry[index] for entry in topic[entries]]) for topic in self.fields[topics]]

    @property
    def partitions(self) -> list[Partition]:
        return [(topic, index) for topic, indexes in self.topics for index in indexes]

    @property
    def records(self) -> dict[Partition, bytes]:
        """The record bytes of a produce request."""
        return {
            (topic["name"], entry["index"]): entry["records"]
            for topic in self.fields["topic_data"]
            for entry in topic["partition_data"]
        }

    def reply(self, correlation_id: int | None = None, **fields: Any) -> bytes:
        """The bytes of an answer, not sent; see `answer`."""
        results: Mapping[Partition, Any] = fields.pop("results", {})
        topics: Sequence[tuple[str, Sequence[int]]] = fields.pop("topics", self.topics)
        tags: Tags = fields.pop("header_tags", ())
        key, version = self.header.api_key, self.header.api_version
        whole = {"throttle_time_ms": 0, "error_code": 0, "session_id": 0, **fields}
        body = response_body(key, version, {**whole, RESPONSE_FIELDS[key][0]: _answered(key, topics, results)})
        answer_to = self.header.correlation_id if correlation_id is None else correlation_id
        return bytes(response_frame(key, version, body, correlation_id=answer_to, tags=tags))

    def answer(self, correlation_id: int | None = None, **fields: Any) -> None:
        """Answer for every partition asked, or for `topics` instead.

        `results` gives some of them an error code, or fields of their entry; other `fields` are the answer's own.
        """
        self.connection.write(self.reply(correlation_id, **fields))

    def answer_message(self, **fields: Any) -> None:
        """Answer a control-plane request."""
        self.connection.write(self.message(**fields))

    def message(self, **fields: Any) -> bytes:
        return message_frame(self.header, **fields)


def message_frame(header: RequestHeader, **fields: Any) -> bytes:
    """The answer to a control-plane request, as it goes over the wire."""
    key, version = header.api_key, header.api_version
    body = control.encode_response(control.build_response(key, version, **fields))
    head = struct.pack(">i", header.correlation_id)
    if key != API_VERSIONS and is_flexible(key, version):
        head += b"\x00"
    return struct.pack(">i", len(head) + len(body)) + head + body


def introduction(header: RequestHeader) -> bytes:
    """The ApiVersions of a broker that serves all that the proxy does, and assigns producer ids."""
    ranges = [
        {"api_key": key, "min_version": lowest, "max_version": highest}
        for key, (lowest, highest) in proxy_ranges().items()
        if key != OWN
    ]
    return message_frame(header, error_code=0, api_keys=ranges)


def _answered(api_key: int, topics: Sequence[tuple[str, Sequence[int]]], results: Mapping[Partition, Any]) -> list[Any]:
    _, entries, name, index_name = RESPONSE_FIELDS[api_key]
    answered = []
    for topic, indexes in topics:
        listed = []
        for index in indexes:
            result = results.get((topic, index), {})
            changes = {"error_code": result} if isinstance(result, int) else result
            # A refused batch has no offset.
            refused = {"base_offset": -1} if api_key == PRODUCE and changes.get("error_code") else {}
            listed.append({**_RESULTS[api_key], **refused, **changes, index_name: index})
        answered.append({name: topic, entries: listed})
    return answered


class ScriptedUpstream:
    """The broker `node_id`; `script` None keeps requests in `asked` for the test to take."""

    def __init__(self, node_id: int, script: Script | None = None) -> None:
        self.node_id = node_id
        self.script = script
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()
        self.connections: list[UpstreamConnection] = []
        # Every request, in the order of arrival.
        self.log: list[Asked] = []
        self.reads_nothing = False
        # The breaker's probes, which come over connections of their own; neither stands in the lists above.
        self.answers_probes = True
        self.probes: list[Asked] = []
        # When the proxy asks what it serves, it answers by itself; that connection is in no list either.
        self.introduces_itself = False
        self.introductions: list[Asked] = []
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def address(self) -> Address:
        return Address(HOST, self.port)

    async def start(self, port: int = 0, listener: socket.socket | None = None) -> Self:
        loop = asyncio.get_running_loop()
        if listener is None:
            self._server = await loop.create_server(lambda: UpstreamConnection(self), HOST, port, reuse_address=True)
        else:
            self._server = await loop.create_server(lambda: UpstreamConnection(self), sock=listener)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def take(self, asked: Asked) -> None:
        """A request has arrived."""
        if client_id(asked.frame) == PROBE_CLIENT_ID:
            self._take_probe(asked)
            return
        if self.introduces_itself and client_id(asked.frame) == VERSIONS_CLIENT_ID:
            self._introduce(asked)
            return
        self.log.append(asked)
        if self.script is not None:
            self.script(asked)
        else:
            self.asked.put_nowait(asked)

    def _take_probe(self, asked: Asked) -> None:
        if asked.connection in self.connections:
            self.connections.remove(asked.connection)
        self.probes.append(asked)
        if self.answers_probes:
            asked.connection.write(introduction(asked.header))

    def _introduce(self, asked: Asked) -> None:
        """Answer that it serves all that the proxy does, like a broker that assigns producer ids."""
        if asked.connection in self.connections:
            self.connections.remove(asked.connection)
        self.introductions.append(asked)
        asked.connection.write(introduction(asked.header))

    def wake(self) -> None:
        """Answer the latest probe, and all later ones."""
        self.answers_probes = True
        if self.probes[-1].connection.is_open:
            self.probes[-1].connection.write(introduction(self.probes[-1].header))

    async def next(self) -> Asked:
        """The next request that arrives."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.asked.get()

    async def is_silent(self, seconds: float = SILENCE_S) -> bool:
        """Whether nothing arrives for that long."""
        await asyncio.sleep(seconds)
        return self.asked.empty()

    async def stop_listening(self) -> None:
        """Refuse further dials; connections stay."""
        if self._server is not None:
            server, self._server = self._server, None
            server.close()
            # The listening socket is closed in a callback.
            await asyncio.sleep(0)

    async def stop(self) -> None:
        await self.stop_listening()
        others = [*self.probes, *self.introductions]
        connections = {*self.connections, *(asked.connection for asked in others)}
        for connection in connections:
            connection.abort()
        for connection in connections:
            await connection.until_closed()


class DeafListener:
    """A port where every dial hangs: the queue of connections to be accepted is full.

    `open` makes an upstream accept them; the dial succeeds when its SYN is repeated, which is after a second.
    """

    def __init__(self, port: int = 0) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((HOST, port))
        self._socket.listen(0)
        self._fillers: list[socket.socket] = []

    @property
    def address(self) -> Address:
        return Address(HOST, self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        for _ in range(2):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(self.address)
            self._fillers.append(filler)
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._socket, *self._fillers):
            each.close()

    async def open(self, upstream: ScriptedUpstream) -> None:
        """Let `upstream` accept waiting and new connections."""
        for filler in self._fillers:
            filler.close()
        await upstream.start(listener=self._socket)


def answers_everything(asked: Asked) -> None:
    """The script of a healthy broker."""
    if asked.header.api_key in APIS and (asked.header.api_key != PRODUCE or asked.fields["acks"] != 0):
        asked.answer()


@contextmanager
def broker_process() -> Iterator[tuple[int, Address]]:
    """The process id and address of a healthy broker."""
    command = (sys.executable, "-m", "tests.support.brokers.upstream_main")
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as process:
        try:
            assert process.stdout is not None
            yield process.pid, Address(HOST, int(process.stdout.readline()))
        finally:
            process.kill()

"""Send exactly the frames that a test builds, on one connection.

Frames are built by `tests.support.wire.messages`, answers are read by kafka-python.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from kproxy_codec import control
from kproxy_codec.api_keys import API_VERSIONS, FETCH, LIST_OFFSETS, PRODUCE
from kproxy_codec.framing import request_header, response_body_offset, response_correlation_id
from tests.support.brokers.scripted_upstream import HOST, PATIENCE_S, SILENCE_S
from tests.support.wire.messages import (
    RESPONSE_FIELDS,
    read_by_kafka_python,
    request_body,
    request_frame,
    sample_request,
)
from tests.support.wire.record_batches import build_batch

SOFTWARE_FROM = 3
Partitions = Mapping[str, Sequence[int]]


class Result(NamedTuple):
    """The entry of one partition in an answer, with all fields that kafka-python reads."""

    topic: str
    partition_index: int
    error_code: int
    fields: dict[str, Any]


class Answer:
    """An answer to `api_key` in `api_version`."""

    def __init__(self, frame: bytes, api_key: int, api_version: int) -> None:
        self.frame = frame
        self.correlation_id = response_correlation_id(frame)
        self._key, self._version = api_key, api_version
        self.body = frame[response_body_offset(frame, api_key, api_version) :]

    @property
    def fields(self) -> dict[str, Any]:
        return read_by_kafka_python("response", self._key, self._version, self.body)

    @property
    def message(self) -> Any:
        """A control-plane answer as kafka-python reads it."""
        return control.decode_response(self._key, self._version, self.body)

    @property
    def results(self) -> list[Result]:
        topics, entries, name, index = RESPONSE_FIELDS[self._key]
        return [
            Result(topic[name], entry[index], entry["error_code"], entry)
            for topic in self.fields[topics]
            for entry in topic[entries]
        ]

    @property
    def codes(self) -> dict[tuple[str, int], int]:
        """The error code of each partition. Fail if a partition is answered twice."""
        results = self.results
        codes = {(result.topic, result.partition_index): result.error_code for result in results}
        assert len(codes) == len(results), f"a partition is answered twice: {results}"
        return codes


class RawClient:
    """One connection."""

    def __init__(self) -> None:
        self.correlation_id = 0

    async def connect(
        self, port: int, host: str = HOST, tls: ssl.SSLContext | None = None, source: str | None = None
    ) -> Self:
        """Connect, from the address `source`; with `tls` to `localhost` by name."""
        name = "localhost" if tls is not None else None
        own = (source, 0) if source is not None else None
        self._reader, self._writer = await asyncio.open_connection(
            host, port, limit=1 << 26, ssl=tls, server_hostname=name, local_addr=own
        )
        return self

    def send(self, *frames: bytes | memoryview) -> None:
        self._writer.write(b"".join(bytes(frame) for frame in frames))

    @property
    def is_gone(self) -> bool:
        """Whether the connection has ended, as seen from this end."""
        return self._writer.is_closing()

    @property
    def own_port(self) -> int:
        """The port of this end."""
        port: int = self._writer.get_extra_info("sockname")[1]
        return port

    async def sent(self) -> None:
        """Wait until the kernel has taken everything."""
        await self._writer.drain()

    async def receive(self, patience_s: float | None = PATIENCE_S) -> bytes:
        """Return the next frame. Raise IncompleteReadError if the connection is closed. `patience_s` None: no limit."""
        async with asyncio.timeout(patience_s):
            head = await self._reader.readexactly(4)
            return head + await self._reader.readexactly(struct.unpack(">i", head)[0])

    async def answer(self, api_key: int = PRODUCE, api_version: int = 9, patience_s: float = PATIENCE_S) -> Answer:
        return Answer(await self.receive(patience_s), api_key, api_version)

    async def is_silent(self, seconds: float = SILENCE_S) -> bool:
        """Return whether nothing arrives for that long, neither a byte nor the end."""
        try:
            async with asyncio.timeout(seconds):
                # A byte that arrives is lost: a test that calls this expects none.
                await self._reader.readexactly(1)
        except TimeoutError:
            return True
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        return False

    async def is_closed(self, patience_s: float = PATIENCE_S) -> bool:
        """Return whether the proxy closes the connection without another byte."""
        try:
            async with asyncio.timeout(patience_s):
                return await self._reader.read(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    async def rest(self, seconds: float = SILENCE_S) -> bytes:
        """Return the bytes that arrive within `seconds`, or before the end."""
        got = b""
        try:
            async with asyncio.timeout(seconds):
                while more := await self._reader.read(1 << 16):
                    got += more
        except TimeoutError:
            pass
        return got

    def pause_reading(self) -> None:
        """Stop reading from the kernel."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def resume_reading(self) -> None:
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close in order: the other end cannot tell whether this one still reads."""
        self._writer.close()

    def end_sending(self) -> None:
        """Close only the sending side, once everything is sent."""
        self._writer.write_eof()

    def abort(self) -> None:
        """Reset the connection, which ends at once for both sides."""
        if not self._writer.is_closing():
            resets = struct.pack("ii", 1, 0)
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, resets)
        self._writer.transport.abort()


# Requests


def batch(n: int = 0, *, producer_id: int = 7, **options: Any) -> bytes:
    """The batch number `n` of an idempotent producer: one record; producer_id -1 makes it a plain one."""
    identity = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": n} if producer_id >= 0 else {}
    return bytes(build_batch([b"record %d" % n], **{**identity, **options}))


def produce_frame(
    partitions: Partitions | None = None,
    *,
    records: bytes | None = None,
    version: int = 9,
    correlation_id: int = 1,
    timeout_ms: int = 30_000,
    **fields: Any,
) -> bytes:
    """A produce request, the same `records` (an idempotent batch) for every partition: by default of ("t", 0)."""
    request = sample_request(PRODUCE, partitions or {"t": [0]}, timeout_ms=timeout_ms, **fields)
    for topic in request["topic_data"]:
        for entry in topic["partition_data"]:
            entry["records"] = batch() if records is None else records
    return bytes(
        request_frame(PRODUCE, version, request_body(PRODUCE, version, request), correlation_id=correlation_id)
    )


def fetch_frame(
    partitions: Partitions | None = None,
    *,
    version: int = 12,
    correlation_id: int = 1,
    max_wait_ms: int = 500,
    **fields: Any,
) -> bytes:
    fields = {"forgotten_topics_data": [], "rack_id": "", "max_wait_ms": max_wait_ms, **fields}
    body = request_body(FETCH, version, sample_request(FETCH, partitions or {"t": [0]}, **fields))
    return bytes(request_frame(FETCH, version, body, correlation_id=correlation_id))


def list_offsets_frame(
    partitions: Partitions | None = None, *, version: int = 6, correlation_id: int = 1, **fields: Any
) -> bytes:
    body = request_body(LIST_OFFSETS, version, sample_request(LIST_OFFSETS, partitions or {"t": [0]}, **fields))
    return bytes(request_frame(LIST_OFFSETS, version, body, correlation_id=correlation_id))


def control_frame(api_key: int, version: int, *, correlation_id: int = 1, **fields: Any) -> bytes:
    """A control-plane request, built by kafka-python."""
    if api_key == API_VERSIONS and version >= SOFTWARE_FROM:
        fields = {"client_software_name": "tests", "client_software_version": "1", **fields}
    body = control.encode_request(control.build_request(api_key, version, **fields))
    return raw_frame(request_header(api_key, version, correlation_id, b"tests") + body)


def raw_frame(message: bytes) -> bytes:
    return struct.pack(">i", len(message)) + message

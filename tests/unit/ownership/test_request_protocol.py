"""One request at a time: long answers, and the end of the connection."""

from __future__ import annotations

import asyncio

import pytest

from kproxy.runtime.request_protocol import RequestProtocol
from kproxy_codec import api_keys as keys
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import frame_message, response_header

LONG = 200_000


class Transport(asyncio.Transport):
    """Keeps written bytes, and records an abort."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, data: object) -> None:
        self.written.append(bytes(data))  # type: ignore[call-overload]

    def abort(self) -> None:
        self.aborted = True


def connected() -> tuple[RequestProtocol, Transport]:
    protocol, transport = RequestProtocol(b"client", 1 << 20, lambda error: error, "set it"), Transport()
    protocol.connection_made(transport)
    return protocol, transport


def receive(protocol: RequestProtocol, data: bytes) -> None:
    while data:
        buffer = protocol.get_buffer(-1)
        nbytes = min(len(buffer), len(data))
        buffer[:nbytes], data = data[:nbytes], data[nbytes:]
        protocol.buffer_updated(nbytes)


async def answer_to(protocol: RequestProtocol, number: int, body: bytes) -> memoryview:
    asking = asyncio.ensure_future(protocol.exchange(keys.API_VERSIONS, 0, b""))
    await asyncio.sleep(0)
    receive(protocol, frame_message(response_header(keys.API_VERSIONS, 0, number), body))
    return await asking


async def test_long_answer_stays_valid_while_it_is_held() -> None:
    protocol, transport = connected()
    held = await answer_to(protocol, 1, b"a" * LONG)
    other = await answer_to(protocol, 2, b"b" * LONG)
    assert (bytes(held[8:]), bytes(other[8:])) == (b"a" * LONG, b"b" * LONG)
    buffer = protocol._long
    del held, other
    assert bytes((await answer_to(protocol, 3, b"c" * LONG))[8:]) == b"c" * LONG
    assert protocol._long is buffer, "its memory is fresh each time"
    assert len(transport.written) == 3


async def test_unasked_answer_ends_the_connection() -> None:
    protocol, transport = connected()
    receive(protocol, frame_message(response_header(keys.API_VERSIONS, 0, 1), b""))
    assert transport.aborted
    assert protocol.ended.is_set()
    with pytest.raises(CodecError, match="matches no request"):
        await protocol.exchange(keys.API_VERSIONS, 0, b"")

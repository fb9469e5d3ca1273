"""Send a process one request over a socket, and wait for the answer."""

from __future__ import annotations

import socket
import struct

from kproxy_codec.api_keys import API_VERSIONS
from kproxy_codec.framing import request_header
from tests.support.clients.raw_client import raw_frame
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import port_of
from tests.support.waiting import PATIENCE_S

_CORRELATION_ID = 77
QUESTION = raw_frame(request_header(API_VERSIONS, 0, _CORRELATION_ID, b"c"))


def connect(process: KproxyProcess, port: int | None = None, source: str = "127.0.0.1") -> socket.socket:
    at = ("127.0.0.1", port_of(process) if port is None else port)
    return socket.create_connection(at, timeout=PATIENCE_S, source_address=(source, 0))


def is_answered(client: socket.socket) -> bool:
    """Whether the next answer, read completely, is one to QUESTION. Raises EOFError if there is none."""
    (length,) = struct.unpack(">i", _exactly(client, 4))
    return bool(struct.unpack(">i", _exactly(client, length)[:4])[0] == _CORRELATION_ID)


def is_served(client: socket.socket) -> bool:
    client.sendall(QUESTION)
    return is_answered(client)


def _exactly(client: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        data = client.recv(size - len(got))
        if not data:
            raise EOFError(f"closed after {len(got)} of {size} bytes")
        got += data
    return got

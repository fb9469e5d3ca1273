"""A relay between clients and a proxy that records which requests pass: evidence of the actual requests on the wire.

It reads the two fields at the head of each request by itself, not by the codec under test. The proxy must advertise the
tap's address; otherwise clients would bypass it.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import NamedTuple

RECEIVE_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 60.0
# frame length; api_key, api_version, correlation_id, length of client_id
_LENGTH = struct.Struct(">i")
_HEAD = struct.Struct(">hhih")


class SeenRequest(NamedTuple):
    api_key: int
    api_version: int
    client_id: str


class Tap:
    """`upstream` is the (host, port) behind it; set it before a client connects."""

    def __init__(self) -> None:
        self.upstream = ("", 0)
        self._seen: list[SeenRequest] = []
        tap = self

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                tap._relay(self.request)

        # Threads whose client stays connected do not delay the end of the tests.
        self._server = type("Server", (ThreadingTCPServer,), {"daemon_threads": True})(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def versions(self, api_key: int, client_id: str) -> set[int]:
        """The versions of this request from this client, or from clients whose ids match the pattern (`producer-*`)."""
        return {
            each.api_version
            for each in self._seen
            if each.api_key == api_key and fnmatchcase(each.client_id, client_id)
        }

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _relay(self, client: socket.socket) -> None:
        with socket.create_connection(self.upstream, CONNECT_TIMEOUT_S) as upstream:
            upstream.settimeout(None)
            answers = threading.Thread(target=_copy, args=(upstream, client), daemon=True)
            answers.start()
            unread = bytearray()
            with suppress(ConnectionError):
                while data := client.recv(RECEIVE_BYTES):
                    unread += data
                    self._read_requests(unread)
                    upstream.sendall(data)
            with suppress(OSError):
                upstream.shutdown(socket.SHUT_WR)
            answers.join()

    def _read_requests(self, unread: bytearray) -> None:
        while len(unread) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(unread)[0]
            if len(unread) < end:
                return
            api_key, api_version, _, length = _HEAD.unpack_from(unread, _LENGTH.size)
            at = _LENGTH.size + _HEAD.size
            self._seen.append(SeenRequest(api_key, api_version, bytes(unread[at : at + max(length, 0)]).decode()))
            del unread[:end]


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes from one to the other until either ends."""
    with suppress(OSError):
        while data := source.recv(RECEIVE_BYTES):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextmanager
def listening_tap() -> Iterator[Tap]:
    tap = Tap()
    tap.start()
    try:
        yield tap
    finally:
        tap.stop()

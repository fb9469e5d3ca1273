"""Measure latency at a fixed rate: each request is sent when it is due, whether or not earlier ones are answered.

One thread uses blocking sockets on CONNECTIONS connections, one after another. `select` waits for the next due time to
the microsecond; an event loop's timers are exact to a millisecond. A latency is the time from the write of a request to
the read of its answer. A late sender on a busy machine does not count for the proxy, and delays no other request.
"""

from __future__ import annotations

import contextlib
import gc
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from struct import unpack_from

from bench.load import CONNECTIONS

# A proxy with more unanswered requests than this is too slow for the rate: some seconds of it.
MAX_UNANSWERED = 4000
PATIENCE_S = 10.0
READ_BYTES = 1 << 16
_LENGTH_BYTES = 4


class TooSlow(Exception):
    """The answers are slower than the requests."""


class _Paced:
    """One connection: the write time of each unanswered request, and the beginning of an answer."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.written: deque[float] = deque()
        self._held = b""

    def send(self, frame: bytes) -> None:
        self.written.append(time.perf_counter())
        self.socket.sendall(frame)

    def take(self) -> list[float]:
        """Read the available bytes; return whole answers' latencies in seconds. Raise ConnectionError at the end."""
        read = self.socket.recv(READ_BYTES)
        while isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            read += self.socket.recv(READ_BYTES)
        now = time.perf_counter()
        if not read:
            raise ConnectionError(f"the connection was closed with {len(self.written)} answers to come")
        found = []
        self._held += read
        while len(self._held) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + unpack_from(">i", self._held)[0]
            if len(self._held) < end:
                break
            self._held = self._held[end:]
            found.append(now - self.written.popleft())
        return found


def latencies(host: str, port: int, frame: bytes, rate: int, seconds: float) -> list[float]:
    """Return each request's latency in seconds, at `rate` requests a second. Raise TooSlow if answers are late."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection((host, port), PATIENCE_S)) for _ in range(CONNECTIONS)]
        for each in sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return paced_latencies(sockets, frame, rate, seconds)


def paced_latencies(sockets: Sequence[socket.socket], frame: bytes, rate: int, seconds: float) -> list[float]:
    """Do the same on connected sockets, which may have TLS."""
    paced = [_Paced(each) for each in sockets]
    with contextlib.ExitStack() as stack:
        gc.disable()
        stack.callback(gc.enable)
        _warm_up(paced, frame)
        return _run(paced, frame, rate, round(rate * seconds))


def _warm_up(paced: Sequence[_Paced], frame: bytes) -> None:
    """Send some requests on each, one at a time: the proxy connects to its brokers and proves the route."""
    for each in paced:
        for _ in range(5):
            each.send(frame)
            while each.written:
                each.take()


def _run(paced: Sequence[_Paced], frame: bytes, rate: int, requests: int) -> list[float]:
    by_socket = {each.socket: each for each in paced}
    found: list[float] = []
    begun = time.perf_counter()
    sent = 0
    while len(found) < requests:
        wait = PATIENCE_S if sent == requests else max(0.0, begun + sent / rate - time.perf_counter())
        for readable in select.select(by_socket, (), (), wait)[0]:
            found += by_socket[readable].take()
        now = time.perf_counter()
        if sent < requests and begun + sent / rate <= now:
            paced[sent % len(paced)].send(frame)
            sent += 1
        unanswered = sent - len(found)
        if unanswered > MAX_UNANSWERED or now - begun > requests / rate + PATIENCE_S:
            raise TooSlow(f"{unanswered} requests are unanswered at {rate:,} requests a second")
    return found

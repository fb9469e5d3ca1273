"""Simulate a broker and its connections.

A broker serves a connection's requests one after another. When the connection ends, requests that are not being served
yet are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kproxy.proxy.client_session import ClientSession
from kproxy.routing.topology import Address
from tests.simulation import wire
from tests.simulation.network import SimulatedTransport
from tests.simulation.partitions import Partition

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

# An acks=0 request that left longer ago may be lost unnoticed: kproxy doubts those of the last second only.
DOUBTED_S: Final = 0.9


class BrokerConnection:
    """A broker's end of one connection (`FarEnd`)."""

    def __init__(self, cluster: Cluster, broker: Broker) -> None:
        self.broker = broker
        self.is_open = True
        # The client session that the connection belongs to, if any, and the session's number.
        self.session: ClientSession | None = None
        self.whose = 0
        self.transport: SimulatedTransport | None = None
        self._cluster = cluster
        self._bytes = b""
        # With arrival and write times; and the write time of the request that is being served.
        self._queue: deque[tuple[bytes, float, float]] = deque()
        self.written_at = 0.0
        # The fences that bind writes on it.
        self.bindings: dict[Partition, int] = {}
        self._is_busy = False
        self._has_ended = False

    def fed(self, total: int, now: float) -> None:
        """Never called."""

    def got(self, data: bytes, written_at: float) -> None:
        if not self.is_open:
            return
        data = self._bytes + data if self._bytes else data
        at, now = 0, self._cluster.loop.now
        while len(data) >= at + 4:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end > len(data):
                break
            self._queue.append((data[at:end], now, written_at))
            at = end
        self._bytes = data[at:]
        self.serve()

    def ended(self, *, reset: bool) -> None:
        if not self.is_open:
            self.cut_short()
        if reset and not self._has_ended:
            self._drop()
        self._has_ended = True
        self.serve()

    def _drop(self) -> None:
        """Lose the connection, with all requests that are not being served yet."""
        self.is_open = False
        now = self._cluster.loop.now
        for frame, came_at, _ in self._queue:
            self._excuse(frame, now - came_at)
        self._queue.clear()
        self.broker.connections.pop(self, None)

    def _excuse(self, frame: bytes, waited_s: float) -> None:
        """Even if they are lost or refused, the proxy does not doubt unconfirmed batches that left so long ago."""
        if waited_s > DOUBTED_S and wire.head_of(frame)[0] == wire.PRODUCE:
            request = wire.read_produce_request(frame)
            if not request.acks:
                for _, _, batch in self._cluster.batches_of(request):
                    batch.is_excused = True

    def serve(self) -> None:
        """Serve waiting requests, one after another, as far as possible now."""
        while self._queue and self.is_open and not self._is_busy and not self.broker.is_hung:
            frame, came_at, self.written_at = self._queue.popleft()
            self._excuse(frame, self._cluster.loop.now - came_at)
            self._cluster.serve(self, frame)
        if self._has_ended and self.is_open and not self._queue and not self._is_busy:
            self.close()

    @property
    def is_behind(self) -> bool:
        """Whether a request waits to be served."""
        return self._is_busy or bool(self._queue)

    def pause(self, seconds: float, then: Callable[[], object] = lambda: None) -> None:
        """Serve nothing for that long, and then begin with this request."""
        self._is_busy = True
        self._cluster.pauses += 1
        self._cluster.loop.call_later(seconds, self._go_on, then)

    def _go_on(self, then: Callable[[], object]) -> None:
        self._is_busy = False
        self._cluster.pauses -= 1
        then()
        self.serve()

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.send(data)

    def close(self) -> None:
        """Close after the bytes that were written."""
        if self._queue or not self._has_ended:
            self.cut_short()
        self._drop()
        if self.transport is not None:
            self.transport.end()

    def cut_short(self) -> None:
        """If the client has already gone, its proxy no longer reads these answers."""
        if self.session is not None and self.session.closed:
            self._cluster.cut_short.add(self.whose)

    def reset(self) -> None:
        self.cut_short()
        self._drop()
        if self.transport is not None:
            self.transport.reset()


class Broker:
    """One broker. It accepts dials while it `is_up`, unless it `is_deaf`; it serves nothing while it `is_hung`."""

    def __init__(self, node_id: int, address: Address) -> None:
        self.node_id = node_id
        self.address = address
        self.is_up = True
        self.is_hung = False
        self.is_deaf = False
        self.is_stalled = False
        self.connections: dict[BrokerConnection, None] = {}

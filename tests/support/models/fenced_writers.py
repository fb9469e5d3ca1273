"""Simulate writers that claim a partition one after another, and never stop writing by themselves.

They use brokers as a proxy does for writers: they call the real BindFences API, and on each connection to a broker they
send a bind before the batches that depend on it. A writer writes after the answer to a bind of its claim; on further
connections it writes without waiting. Claims and releases are revisions of the simulated etcd. A Judge receives the
fence of each batch, and the answers to every writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kproxy.broker.apis import bind_fences
from kproxy.broker.context import Bindings, Request
from kproxy.broker.writer_fence import UNBOUND
from kproxy.etcd import put_op
from kproxy_codec import error_codes
from kproxy_codec.api_keys import BIND_FENCES
from kproxy_codec.framing import parse_request_header, request_header, response_header
from kproxy_codec.own import (
    BIND_FENCES_VERSION,
    BoundFence,
    FenceBinding,
    encode_bind_fences_request,
    parse_bind_fences_response,
)
from kproxy_codec.primitives import INT32
from tests.support.models.replication_checks import Judge
from tests.support.models.replication_clients import Attempt, Clients
from tests.support.models.simulated_broker import PARTITION_INDEX, TOPIC, SimulatedProcess, State
from tests.support.models.simulated_etcd import EtcdStore

WRITERS = 3
_CLAIM = "/p/kproxy/own/writers/t%2F0"


class Connection:
    """A connection to one run of a broker; requests on it are served one after another."""

    def __init__(self, process: SimulatedProcess) -> None:
        self.process = process
        self.bindings: Bindings = {}
        # The fence of the latest bind that was sent.
        self.said = UNBOUND
        self.turn = asyncio.Lock()
        self.tasks: set[asyncio.Task[None]] = set()


class Writer:
    """A writer. `fence` is that of its latest claim; `is_granted`: the claim was answered."""

    def __init__(self) -> None:
        self.fence = UNBOUND
        self.is_granted = False
        self.connections: dict[SimulatedProcess, Connection] = {}


class FencedWriters:
    """Three writers, and the releases of their claims."""

    def __init__(self, judge: Judge, clients: Clients, store: EtcdStore) -> None:
        self.writers = [Writer() for _ in range(WRITERS)]
        self.released_at = UNBOUND
        self.is_released = False
        self._judge = judge
        self._clients = clients
        self._store = store

    def writer(self, which: int) -> Writer:
        return self.writers[which % WRITERS]

    @property
    def is_claimed(self) -> bool:
        return any(writer.fence for writer in self.writers)

    @property
    def is_granted(self) -> bool:
        return any(writer.is_granted for writer in self.writers)

    @property
    def latest(self) -> int:
        return max(writer.fence for writer in self.writers)

    def _revision(self) -> int:
        self._store.apply("Put", put_op(_CLAIM, b"{}").message.request_put)
        return self._store.revision

    # Requests to brokers

    def claim(self, which: int) -> None:
        writer = self.writer(which)
        writer.fence, writer.is_granted = self._revision(), False
        self.is_released = False

    def bind(self, which: int, process: SimulatedProcess) -> None:
        """Send the claim, unless it was answered and also sent on that connection."""
        writer = self.writer(which)
        if writer.fence:
            connection = self._connection(writer, process)
            fence = connection.said = writer.fence
            self._send(connection, lambda: self._bind(writer, connection, fence))

    def write(self, which: int, process: SimulatedProcess, acks: int) -> Attempt | None:
        """Send a batch under a claim that was answered, whether or not it is the latest."""
        may_write = [writer for writer in self.writers if writer.is_granted]
        if not may_write:
            return None
        writer = may_write[which % len(may_write)]
        connection = self._connection(writer, process)
        if connection.said != writer.fence:
            self.bind(self.writers.index(writer), process)
        sent = self._clients.new_batch(-1, -1)
        self._judge.sent_behind(sent.identity, writer.fence)
        attempt = Attempt(sent, process, acks)
        self._send(connection, lambda: self._clients.send(attempt, connection.bindings))
        return attempt

    def release(self, process: SimulatedProcess, *, anew: bool) -> None:
        """Give up the latest claim; `anew`: repeat a release, in case the first did not arrive."""
        if anew or not self.released_at:
            self.released_at = self._revision()
            self._judge.released(self.released_at)
        self.is_released = False
        connection, fence = Connection(process), self.released_at
        self._send(connection, lambda: self._release(connection, fence))

    def hang_up(self, which: int, process: SimulatedProcess) -> None:
        """Close a connection, and lose all requests on their way."""
        connection = self.writer(which).connections.pop(process, None)
        for task in connection.tasks if connection is not None else ():
            task.cancel()

    def _connection(self, writer: Writer, process: SimulatedProcess) -> Connection:
        if process not in writer.connections:
            writer.connections[process] = Connection(process)
        return writer.connections[process]

    # Requests on their way

    def _send(self, connection: Connection, serve: Callable[[], Awaitable[None]]) -> None:
        async def in_turn() -> None:
            async with connection.turn:
                await serve()

        if connection.process.state is not State.DEAD:
            task = connection.process.loop.create_task(in_turn())
            connection.tasks.add(task)
            task.add_done_callback(connection.tasks.discard)

    async def _bind(self, writer: Writer, connection: Connection, fence: int) -> None:
        bound = await self._ask(connection, FenceBinding(TOPIC, PARTITION_INDEX, fence))
        if bound.error_code == error_codes.NONE and connection.process.state is not State.DEAD:
            self._judge.granted(fence)
            writer.is_granted = writer.is_granted or fence == writer.fence

    async def _release(self, connection: Connection, fence: int) -> None:
        bound = await self._ask(connection, FenceBinding(TOPIC, PARTITION_INDEX, fence, is_released=True))
        if bound.error_code == error_codes.NONE and connection.process.state is not State.DEAD:
            self._judge.granted(fence)
            self.is_released = self.is_released or fence == self.released_at > self.latest

    async def _ask(self, connection: Connection, asked: FenceBinding) -> BoundFence:
        """Bind or release a fence by the API, and return its answer."""
        message = request_header(BIND_FENCES, BIND_FENCES_VERSION, 1, b"model") + encode_bind_fences_request([asked])
        frame = memoryview(INT32.pack(len(message)) + message)
        request = Request(frame, parse_request_header(frame), connection.bindings)
        answer = bind_fences.handle(connection.process.broker, request)
        body = await answer if isinstance(answer, Awaitable) else answer
        assert body is not None
        reply = response_header(BIND_FENCES, BIND_FENCES_VERSION, 1) + b"".join(body)
        [bound] = parse_bind_fences_response(INT32.pack(len(reply)) + reply)
        return bound

"""Provide a real etcd for tests, as fixtures.

`etcd` is one server for the whole run; tests use different prefixes (`etcd_prefix`). A test that stops, kills or
compacts etcd uses one of its own: `async with own_etcd(tmp_path)`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self, TypeVar

import grpc.aio
import psutil
import pytest
import pytest_asyncio

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, EtcdUnavailable, put_op
from kproxy.etcd.messages import rpc
from tests.support.waiting import PATIENCE_S, eventually

# A single member need not wait a second to elect itself. Not for `etcd`: the shortest TTL granted depends on it too.
QUICK = ("--heartbeat-interval", "20", "--election-timeout", "200", "--unsafe-no-fsync")

_prefixes = itertools.count(1)
_Client = TypeVar("_Client", bound=EtcdClient)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedEtcd]:
    """A running etcd with fsync off, because nothing kills it."""
    async with EmbeddedEtcd(tmp_path_factory.mktemp("etcd"), extra_arguments=["--unsafe-no-fsync"]) as server:
        yield server


@pytest.fixture
def etcd_prefix() -> str:
    """A prefix that no other test uses."""
    return f"/test-{os.getpid()}-{next(_prefixes)}"


@pytest_asyncio.fixture
async def etcd_client(etcd: EmbeddedEtcd) -> AsyncIterator[EtcdClient]:
    # This etcd is always up, but sometimes slow.
    async with connected(EtcdClient([etcd.endpoint], timeout_s=PATIENCE_S)) as client:
        yield client


@asynccontextmanager
async def connected(client: _Client) -> AsyncIterator[_Client]:
    """Connect the client, and close it at the end of the block."""
    await client.connect()
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def own_etcd(
    data_dir: Path, *, extra_arguments: Sequence[str] = ()
) -> AsyncIterator[tuple[EmbeddedEtcd, EtcdClient]]:
    """An etcd of the test's own, and a client of it."""
    async with (
        EmbeddedEtcd(data_dir, extra_arguments=[*QUICK, *extra_arguments]) as server,
        connected(EtcdClient([server.endpoint])) as client,
    ):
        yield server, client


async def kill(server: EmbeddedEtcd) -> None:
    """kill -9, so that etcd cannot shut down cleanly."""
    os.kill(server.pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    await server.stop()


async def freeze(server: EmbeddedEtcd) -> None:
    """SIGSTOP, and return when it has stopped: a running thread may continue for a moment."""
    os.kill(server.pid, signal.SIGSTOP)
    process = psutil.Process(server.pid)
    await eventually(lambda: process.status() == psutil.STATUS_STOPPED)
    # Bytes that it wrote to its sockets earlier still arrive.
    await asyncio.sleep(0.05)


async def compact(client: EtcdClient, revision: int) -> None:
    """Compact etcd's history; the product never does, so its client has no call for it."""
    async with grpc.aio.insecure_channel(client.endpoints.split(",")[0].removeprefix("http://")) as channel:
        call = channel.unary_unary(
            "/etcdserverpb.KV/Compact",
            request_serializer=rpc.CompactionRequest.SerializeToString,
            response_deserializer=rpc.CompactionResponse.FromString,
        )
        await call(rpc.CompactionRequest(revision=revision, physical=True))


async def put_many(client: EtcdClient, items: Sequence[tuple[str, bytes]], lease_id: int = 0) -> int:
    """Put all of them, as many in one transaction as etcd allows; return the last revision."""
    revision = 0
    for start in range(0, len(items), 128):
        chunk = items[start : start + 128]
        revision = (await client.txn([], [put_op(key, value, lease_id) for key, value in chunk])).revision
    return revision


async def written(client: EtcdClient, key: str, value: bytes = b"") -> bool:
    """Whether a put succeeds; one that an election interrupts is tried again, because it has the same effect."""
    for _ in range(4):
        with suppress(EtcdUnavailable):
            return await client.put(key, value) > 0
    return False


class Relay:
    """A TCP relay before etcd, on a port of its own: refuses and cuts connections, or silently stops forwarding."""

    def __init__(self, endpoint: str) -> None:
        self.target(endpoint)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.Event] = {}
        self._answering: dict[asyncio.Task[None], asyncio.Event] = {}
        self._asking = asyncio.Event()
        self._asking.set()
        # The number of connections with bytes that wait to be forwarded.
        self.held = 0
        self.port = 0
        self._dead = False
        self._is_shut = False
        # The delay of all bytes, in each direction.
        self.delay_s = 0.0

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shut()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def target_port(self) -> int:
        return self._target[1]

    @property
    def is_open(self) -> bool:
        return self._server is not None and self._server.is_serving()

    @property
    def is_dead(self) -> bool:
        """Whether it silently drops everything."""
        return self._dead

    def target(self, endpoint: str) -> None:
        """The target of later connections."""
        host, _, port = endpoint.removeprefix("http://").rpartition(":")
        self._target = (host, int(port))

    async def open(self) -> None:
        """Listen, on the same port as before."""
        self._is_shut = False
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        """Refuse new connections and cut the existing ones."""
        self._is_shut = True
        if self._server is not None:
            self._server.close()
        await self.cut()

    async def cut(self) -> None:
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def freeze(self) -> None:
        """Stop forwarding on the existing connections without ending them; later connections are forwarded."""
        for carrying in self._connections.values():
            carrying.clear()

    def deafen(self) -> None:
        """Stop forwarding answers on the existing connections; requests still arrive."""
        for answering in self._answering.values():
            answering.clear()

    def hold_questions(self) -> None:
        """Keep requests from now on, even if their sender is gone; forward nothing on later connections."""
        self._asking.clear()
        self._dead = True

    def release_questions(self) -> None:
        """Forward the kept requests. Connections made meanwhile stay as they are until `restore`."""
        self._asking.set()

    def blackhole(self) -> None:
        """Forward nothing on any connection, existing or later, and end none: a network that drops every packet."""
        self.freeze()
        self._dead = True

    async def restore(self) -> None:
        """Forward again; earlier connections are cut."""
        self._dead = False
        await self.cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_shut:
            # Opened in the moment before the listening socket was closed.
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        carrying = self._connections[task] = asyncio.Event()
        answering = self._answering[task] = asyncio.Event()
        answering.set()
        if not self._dead:
            carrying.set()
        writers = [writer]
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
            writers.append(upstream_writer)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._carry(reader, upstream_writer, [carrying, self._asking]))
                ways.create_task(self._carry(upstream_reader, writer, [carrying, answering]))
        except (asyncio.CancelledError, OSError, ExceptionGroup):
            # However a connection ends, the other side is ended too.
            pass
        finally:
            for each in writers:
                each.transport.abort()
            del self._connections[task], self._answering[task]

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, open_ways: Sequence[asyncio.Event]
    ) -> None:
        while data := await reader.read(65536):
            self.held += 1
            try:
                for way in open_ways:
                    await way.wait()
            finally:
                self.held -= 1
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("one side ended")


@asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run `work` beside the test; an exception before the test ends fails the test."""
    task = asyncio.ensure_future(work)
    try:
        yield task  # type: ignore[misc]
    finally:
        ended_itself = task.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
        if ended_itself and not task.cancelled() and task.exception() is not None:
            raise AssertionError("what ran beside the test failed") from task.exception()

"""A real etcd for tests, as fixtures: `pytest_plugins = ["tests.support.etcd"]` brings them.

`etcd` is one server for the whole run; tests keep apart by `etcd_prefix`. A test that stops, kills or compacts etcd
takes one of its own: `async with own_etcd(tmp_path)`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.ownership.etcd import EtcdClient, put_op
from kproxy.ownership.etcd.messages import rpc

# A single member need not wait a second to elect itself. Not for `etcd`: the shortest TTL granted hangs on it too.
QUICK = ("--heartbeat-interval", "20", "--election-timeout", "200", "--unsafe-no-fsync")

_prefixes = itertools.count(1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedEtcd]:
    """A running etcd with fsync off: nobody kills this one."""
    async with EmbeddedEtcd(tmp_path_factory.mktemp("etcd"), extra_arguments=["--unsafe-no-fsync"]) as server:
        yield server


@pytest.fixture
def etcd_prefix() -> str:
    """A prefix that no other test uses."""
    return f"/test-{os.getpid()}-{next(_prefixes)}"


@pytest_asyncio.fixture
async def etcd_client(etcd: EmbeddedEtcd) -> AsyncIterator[EtcdClient]:
    client = EtcdClient([etcd.endpoint])
    await client.connect()
    yield client
    await client.close()


@asynccontextmanager
async def own_etcd(
    data_dir: Path, *, extra_arguments: Sequence[str] = ()
) -> AsyncIterator[tuple[EmbeddedEtcd, EtcdClient]]:
    """An etcd that the test may treat as it likes, and a client of it."""
    async with EmbeddedEtcd(data_dir, extra_arguments=[*QUICK, *extra_arguments]) as server:
        client = EtcdClient([server.endpoint])
        await client.connect()
        try:
            yield server, client
        finally:
            await client.close()


async def kill(server: EmbeddedEtcd) -> None:
    """kill -9, so that etcd has no chance to say goodbye."""
    os.kill(server.pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    await server.stop()


async def compact(client: EtcdClient, revision: int) -> None:
    """The product never compacts, so its client has no call for it."""
    call = client._channel.unary_unary(
        "/etcdserverpb.KV/Compact",
        request_serializer=rpc.CompactionRequest.SerializeToString,
        response_deserializer=rpc.CompactionResponse.FromString,
    )
    await call(rpc.CompactionRequest(revision=revision, physical=True))


async def put_many(client: EtcdClient, items: Sequence[tuple[str, bytes]], lease_id: int = 0) -> int:
    """Put all, as many in one transaction as etcd allows; the last revision."""
    revision = 0
    for start in range(0, len(items), 128):
        chunk = items[start : start + 128]
        revision = (await client.txn([], [put_op(key, value, lease_id) for key, value in chunk])).revision
    return revision


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 10.0, what: str = "") -> None:
    """Wait until `condition` holds; a test that waits in vain says for what."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run `work` beside the test; what it raises before the test ends fails the test."""
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

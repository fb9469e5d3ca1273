"""One proxy process from start to stop: etcd, the lease table, the listener."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from kproxy.config import ProxyConfig
from kproxy.errors import StartupError
from kproxy.observe.admin import AdminPage
from kproxy.observe.table import TableView
from kproxy.ownership.etcd import EtcdClient, EtcdError
from kproxy.ownership.leases import LeaseTable
from kproxy.proxy.context import Identity, ProxyContext
from kproxy.proxy.server import Listener
from kproxy.routing.topology import Topology

SYNC_TIMEOUT_S = 30.0
# The virtual node id of a proxy that stands alone; far above any real broker's.
ALONE_NODE_ID = 1_000_000


async def run_proxy(config: ProxyConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartupError."""
    stop = asyncio.Event()
    with _stop_signals(stop.set):
        serving = asyncio.create_task(_serve(config))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        await _cancel(stopping)
        if serving.done():
            serving.result()
        await _cancel(serving)


async def _serve(config: ProxyConfig) -> None:
    """Serve until cancelled; then drain."""
    async with contextlib.AsyncExitStack() as stack:
        topology = Topology()
        client = EtcdClient(config.etcd)
        table = LeaseTable(client, config.prefix, topology)
        host, port = config.advertise or config.listen
        listener = Listener(config.limits)
        bound_port = await listener.bind(*config.listen)
        identity = Identity(ALONE_NODE_ID, host, port or bound_port)
        admin = AdminPage(
            table=lambda: TableView(topology, table.age_s, table.stale),
            not_ready=lambda: listener.not_ready,
        )
        ready = f"ready kafka={config.listen.host}:{bound_port}"
        if config.admin is not None:
            admin_host, admin_port = config.admin
            stack.push_async_callback(admin.stop)
            ready += f" admin={admin_host}:{await admin.start(admin_host, admin_port)}"
        stack.push_async_callback(client.close)
        try:
            await client.connect()
            mirror = asyncio.create_task(table.run())
            stack.push_async_callback(_cancel, mirror)
            async with asyncio.timeout(SYNC_TIMEOUT_S):
                await table.wait_synced()
        except TimeoutError as error:
            raise StartupError(
                f"etcd at {client.endpoints} answers, but its partition leases could not be read in time"
            ) from error
        except EtcdError as error:
            raise StartupError(f"{error} Start etcd, or give its address with --etcd.") from error
        stack.push_async_callback(listener.stop)
        await listener.serve(
            ProxyContext(topology, table, identity, config.limits, time.monotonic, Random())  # noqa: S311
        )
        sys.stdout.write(f"{ready} etcd={client.endpoints}\n")
        sys.stdout.flush()
        await mirror


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def _stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT)
    for number in caught:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)

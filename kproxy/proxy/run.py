"""One proxy process from start to stop: the listener, the admin page, the ownership source."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from math import inf
from random import Random

from kproxy.config import ProxyConfig
from kproxy.observe.admin import AdminPage
from kproxy.observe.metrics import Metrics
from kproxy.observe.table import TableView
from kproxy.observe.tally import Tally
from kproxy.proxy.context import Identity, ProxyContext
from kproxy.proxy.readiness import Brokers, readiness
from kproxy.proxy.server import Listener
from kproxy.proxy.sources import OpenSource, cancel, open_source
from kproxy.routing.topology import Topology

# The virtual node id of a proxy that stands alone; far above any real broker's.
ALONE_NODE_ID = 1_000_000
# Objects more made than freed before the collector looks at the youngest; rounds before it looks at older ones.
COLLECTOR_THRESHOLDS = (20_000, 50, 100)


async def run_proxy(config: ProxyConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartupError."""
    stop = asyncio.Event()
    with _stop_signals(stop.set):
        serving = asyncio.create_task(_serve(config))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        await cancel(stopping)
        if serving.done():
            serving.result()
        await cancel(serving)


async def _serve(config: ProxyConfig) -> None:
    """Serve until cancelled; then drain."""
    async with contextlib.AsyncExitStack() as stack:
        topology = Topology(offers_unowned=config.ownership == "etcd")
        host, port = config.advertise or config.listen
        listener = Listener(config.limits)
        bound_port = await listener.bind(*config.listen)
        ready = f"ready kafka={config.listen.host}:{bound_port}"
        opened: OpenSource | None = None
        tally, counters = Tally(), Counter[str]()
        random = Random()  # noqa: S311 -- spreads retries, guards nothing
        if config.admin is not None:
            brokers = Brokers(
                lambda: topology.brokers,
                timeout_s=config.limits.connect_timeout_s,
                clock=time.monotonic,
                random=random,
            )
            stack.push_async_callback(brokers.close)
            admin = AdminPage(
                table=lambda: _view(topology, opened),
                readiness=lambda: readiness(listener.not_ready, _view(topology, opened), brokers),
                metrics=Metrics(
                    tally=tally,
                    counters=counters,
                    table=lambda: _view(topology, opened),
                    vitals=lambda: listener.vitals,
                ),
            )
            admin_host, admin_port = config.admin
            stack.push_async_callback(admin.stop)
            ready += f" admin={admin_host}:{await admin.start(admin_host, admin_port)}"
        opened = await stack.enter_async_context(open_source(config, topology))
        stack.push_async_callback(listener.stop)
        await listener.serve(
            ProxyContext(
                topology=topology,
                source=opened.source,
                conduct=opened.conduct,
                version_caps=opened.version_caps,
                identity=Identity(ALONE_NODE_ID, host, port or bound_port),
                limits=config.limits,
                clock=time.monotonic,
                random=random,
                counters=counters,
                tally=tally,
                confirm_acks0=config.confirm_acks0,
            )
        )
        _calm_collector()
        sys.stdout.write(f"{ready}{opened.ready}\n")
        sys.stdout.flush()
        await opened.following


def _calm_collector() -> None:
    """Let Python's cycle collector leave alone what was loaded at the start, and look at the rest less often.

    Requests are freed by reference count; left at its defaults the collector takes about a tenth of their CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def _view(topology: Topology, opened: OpenSource | None) -> TableView:
    if opened is None:
        return TableView(topology, inf, True)
    return TableView(topology, opened.source.age_s, opened.source.stale)


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

"""Measure the writer gate's cost for a produce request: CPU time of the proxy, in front of null brokers.

Proxies that differ in one thing take turns with the same load, and the least of their runs counts. Each connection
writes to a partition of its own, which it claims first if the topic is gated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import uvloop
from rich.console import Console

from bench.lease_keys import lease_key, name_brokers
from bench.load import CONNECTIONS, IN_FLIGHT, SHAPES, TOPIC, Shape, open_all, produce_frame, send
from bench.own_client import own_frame
from bench.processes import cpu_seconds, started, table_of
from bench.quick import PARTITIONS, kproxy
from bench.table import serve
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, put_op
from kproxy_codec.error_codes import NONE, name_of
from kproxy_codec.own import OWN_MAX_VERSION, parse_own_response

BROKERS = 3
PREFIX = "/gate"
GROUP = "writers"
MEASURED = SHAPES[:2]
ROUNDS = 6
WARM_UP_REQUESTS = 50
TOPIC_NAME = TOPIC.decode()
NO_OWN, UNGATED, GATED = "no etcd, so no Own", "topic not gated", "gated, each connection owns what it writes to"
NOTHING_GATED = "etcd, nothing gated"


class _Proxy(NamedTuple):
    pid: int
    port: int
    is_gated: bool = False


@contextlib.contextmanager
def _proxies(etcd: EmbeddedEtcd, ports: list[int], directory: Path) -> Iterator[dict[str, _Proxy]]:
    with contextlib.ExitStack() as stack:
        static_pid, static_port = stack.enter_context(kproxy(ports, directory))
        found = {NO_OWN: _Proxy(static_pid, static_port)}
        gates = {NOTHING_GATED: "", UNGATED: "another", GATED: TOPIC_NAME}
        for name, topic in gates.items():
            flags = ("--writer-group", f"{topic}={GROUP}") if topic else ()
            process, port, _ = stack.enter_context(serve(etcd.endpoint, PREFIX, *flags))
            found[name] = _Proxy(process.pid, port, topic == TOPIC_NAME)
        yield found


def _measure(proxy: _Proxy, shape: Shape, requests: int) -> float:
    """Return the CPU µs of the proxy for one request."""

    async def run() -> float:
        frames = [produce_frame(shape, number * shape.partitions) for number in range(CONNECTIONS)]
        claims = [own_frame(GROUP, (f"{TOPIC_NAME}/{number}", 1)) for number in range(CONNECTIONS)]
        connections = await open_all(proxy.port, frames, requests, claims if proxy.is_gated else ())
        for connection in connections if proxy.is_gated else ():
            owned = parse_own_response(connection.ready.result(), OWN_MAX_VERSION).resources[0]
            if owned.error_code != NONE:
                raise SystemExit(f"{owned.resource} was not granted: {name_of(owned.error_code)}")
        before = cpu_seconds(proxy.pid)
        await send(connections)
        return (cpu_seconds(proxy.pid) - before) / (requests * CONNECTIONS) * 1e6

    found: float = uvloop.run(run())
    return found


async def gate(console: Console, etcd: EmbeddedEtcd, directory: Path) -> None:
    """Print the table. Keys in etcd under other prefixes are ignored."""
    with contextlib.ExitStack() as stack:
        ports = started(stack, *["null_broker"] * BROKERS)
        await _write_owners(etcd, ports)
        proxies = await asyncio.to_thread(stack.enter_context, _proxies(etcd, ports, directory))
        title = f"CPU of the proxy for a produce request, µs; {CONNECTIONS} connections, {IN_FLIGHT} in flight"
        table = table_of(title, ["request"], proxies)
        for shape in MEASURED:
            best = await asyncio.to_thread(_compare, proxies, shape)
            table.add_row(shape.name, *(f"{best[name]:.1f}" for name in proxies))
        console.print(table)


async def _write_owners(etcd: EmbeddedEtcd, ports: list[int]) -> None:
    client = EtcdClient([etcd.endpoint])
    await client.connect()
    await name_brokers(client, PREFIX, ports)
    keys = [lease_key(PREFIX, TOPIC_NAME, index) for index in range(PARTITIONS)]
    await client.txn([], [put_op(key, b"%d" % (index % len(ports) + 1)) for index, key in enumerate(keys)])
    await client.close()


def _compare(proxies: dict[str, _Proxy], shape: Shape) -> dict[str, float]:
    best: dict[str, float] = {}
    for proxy in proxies.values():
        _measure(proxy, shape, WARM_UP_REQUESTS)
    for _ in range(ROUNDS):
        for name, proxy in proxies.items():
            best[name] = min(best.get(name, 1e9), _measure(proxy, shape, shape.requests))
    return best

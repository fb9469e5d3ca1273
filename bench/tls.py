"""Measure the cost of TLS with clients: the same load in plain text and over TLS, through kproxy and haproxy.

The brokers are null brokers, one thread each. Connections use TLS 1.3, the cipher that both sides choose, and an ECDSA
certificate. Handshakes are measured separately, by connections that are opened and closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console

from bench.load import CONNECTIONS, SHAPES, Connection, Load, send, shape_load
from bench.processes import measure_run, scratch, started, table_of
from bench.quick import BROKERS, Cost, haproxy, kproxy, per_request
from kproxy_codec.framing import ReceiveArena

ROUNDS: Final = 3
WARM_UP_REQUESTS: Final = 50
HANDSHAKES: Final = 300
NAME: Final = "localhost"
KPROXY: Final = "kproxy"
HAPROXY: Final = "haproxy"
OVER_TLS: Final = ", TLS"


class Way(NamedTuple):
    """A proxy to send through, with TLS by `context`; None means plain text."""

    pid: int
    port: int
    context: ssl.SSLContext | None


def tls(console: Console, rounds: int | None = None) -> None:
    """Measure, and print the tables of `make bench SECTION=tls`."""
    with scratch() as (stack, directory):
        ways = _ways(stack, directory)
        table = table_of("CPU of the proxy, µs a request (ms a MB); least of the rounds", ["request"], ways)
        loads = list(map(shape_load, SHAPES))
        found = []
        for load in loads:
            costs = _take_turns(load, ways, rounds or ROUNDS)
            found.append(costs)
            cells = []
            for name in ways:
                micros, millis, _ = per_request(load, costs[name])
                cells.append(f"{micros:,.1f} ({millis:.2f})")
            table.add_row(load.name, *cells)
        console.print(table)
        for proxy in (KPROXY, HAPROXY):
            if proxy in ways:
                micros, millis = _added(proxy, loads, found)
                console.print(f"{proxy}: TLS adds {micros:,.1f} µs a request and {millis:.2f} ms a MB")
        for name, way in ways.items():
            cpu, _ = measure_run(way.pid, _open_and_close(way))
            console.print(f"{name}: {cpu / HANDSHAKES * 1e6:,.0f} µs a connection")


def _added(proxy: str, loads: Sequence[Load], found: Sequence[Mapping[str, Cost]]) -> tuple[float, float]:
    """Return what TLS adds: µs for each request, and ms for each MB, by the smallest request and the largest."""
    (small, least), (large, most) = (
        (load.request_bytes, per_request(load, costs[proxy + OVER_TLS])[0] - per_request(load, costs[proxy])[0])
        for load, costs in ((loads[0], found[0]), (loads[-1], found[-1]))
    )
    by_byte = (most - least) / (large - small)
    # µs for a byte are s for a MB.
    return least - by_byte * small, by_byte * 1e3


def make_certificates(directory: Path) -> ssl.SSLContext:
    """Write cert.pem, key.pem, both.pem and the authority's ca.pem; return a client's context that trusts it."""
    # A tool of tests and measurements only.
    import trustme

    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    issued = authority.issue_cert(NAME, key_type=trustme.KeyType.ECDSA)
    chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
    (directory / "cert.pem").write_bytes(chain)
    (directory / "key.pem").write_bytes(issued.private_key_pem.bytes())
    (directory / "both.pem").write_bytes(chain + issued.private_key_pem.bytes())
    (directory / "ca.pem").write_bytes(authority.cert_pem.bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    return context


def _ways(stack: contextlib.ExitStack, directory: Path) -> dict[str, Way]:
    context = make_certificates(directory)
    ports = started(stack, *["null_broker"] * BROKERS)
    flags = ("--tls-cert", str(directory / "cert.pem"), "--tls-key", str(directory / "key.pem"))
    ways = {
        KPROXY: Way(*stack.enter_context(kproxy(ports, directory)), None),
        KPROXY + OVER_TLS: Way(*stack.enter_context(kproxy(ports, directory, *flags)), context),
    }
    for name, certificate, used in ((HAPROXY, None, None), (HAPROXY + OVER_TLS, directory / "both.pem", context)):
        found = stack.enter_context(haproxy(ports[0], directory, certificate))
        if found is not None:
            ways[name] = Way(*found, used)
    return ways


def _take_turns(load: Load, ways: Mapping[str, Way], rounds: int) -> dict[str, Cost]:
    best: dict[str, Cost] = {}
    for way in ways.values():
        measure_run(way.pid, _send(way, load, min(WARM_UP_REQUESTS, load.requests)))
    for _ in range(rounds):
        for name, way in ways.items():
            cost = Cost(*measure_run(way.pid, _send(way, load, load.requests)))
            best[name] = min(best.get(name, cost), cost)
    return best


async def _send(way: Way, load: Load, requests: int) -> None:
    await send([await _open(way, load, requests) for _ in range(CONNECTIONS)])


async def _open(way: Way, load: Load, requests: int) -> Connection:
    make = partial(Connection, load.frames(), requests, ReceiveArena())
    name = NAME if way.context is not None else None
    _, connection = await asyncio.get_running_loop().create_connection(
        make, "127.0.0.1", way.port, ssl=way.context, server_hostname=name
    )
    await connection.ready
    return connection


async def _open_and_close(way: Way) -> None:
    for _ in range(HANDSHAKES):
        await send([await _open(way, shape_load(SHAPES[0]), 1)])
    # Closed connections still cause work for a moment.
    await asyncio.sleep(0.5)

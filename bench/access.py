"""`make bench SECTION=access`: the cost of SASL, ACLs and quotas per request of an admitted client; a minute.

One kproxy for each way, before the same null brokers; they take turns. Connections are open and authenticated before
the measurement starts: a password is checked once for each connection, which costs milliseconds. A ratio is taken
within a round, because all runs of a round have the same neighbours on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console
from rich.table import Table

from bench.load import CONNECTIONS, MANY_PARTITIONS, SHAPES, Connection, Load, send_again, shape_load
from bench.processes import child, cpu_seconds, first_line
from bench.quick import BROKERS, WARM_UP_REQUESTS, kproxy
from kproxy.security.users import make_credential, write_users
from kproxy_codec import api_keys
from kproxy_codec.framing import ReceiveArena, request_header
from kproxy_codec.primitives import INT16, INT32

ROUNDS: Final = 7
RULES: Final = 100
LOADS: Final = (SHAPES[0], SHAPES[2], *MANY_PARTITIONS)
OPEN: Final = "without"
USER: Final = "bench"
PASSWORD: Final = "bench-secret"  # noqa: S105 -- of a user who lives for a minute
_ALLOW: Final = '[[acls]]\nprincipal = "User:{user}"\noperations = ["write"]\ntopics = ["{topics}"]\n'
_QUOTA: Final = "[[quotas]]\nproduce_bytes_per_s = 1_000_000_000_000\nrequests_per_s = 1_000_000_000\n"


class Way:
    """A proxy, and its connections."""

    def __init__(self, pid: int, port: int, authenticates: bool) -> None:
        self.pid = pid
        self.port = port
        self._authenticates = authenticates

    async def open(self, load: Load) -> list[Connection]:
        return [await self._connect(load) for _ in range(CONNECTIONS)]

    async def _connect(self, load: Load) -> Connection:
        client = socket.create_connection(("127.0.0.1", self.port))
        if self._authenticates:
            authenticate(client)
        client.setblocking(False)
        make = partial(Connection, load.frames(), 0, ReceiveArena())
        _, connection = await asyncio.get_running_loop().create_connection(make, sock=client)
        return connection


def access(console: Console, rounds: int | None = None) -> None:
    """The tables of `make bench SECTION=access`."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kproxy-bench-")))
        brokers = [stack.enter_context(child(sys.executable, "-m", "bench.null_broker")) for _ in range(BROKERS)]
        ports = [int(first_line(broker)) for broker in brokers]
        ways = {}
        for name, text in _configurations(directory).items():
            place = directory / name.replace(" ", "-")
            place.mkdir()
            (place / "kproxy.toml").write_text(text)
            started = stack.enter_context(kproxy(ports, place, "--config", str(place / "kproxy.toml")))
            ways[name] = Way(*started, authenticates=bool(text))
        table = Table(title="CPU of the proxy, µs a request: the least; and × without: the median of the rounds")
        table.add_column("request")
        for name in ways:
            table.add_column(name, justify="right")
        for load in map(shape_load, LOADS):
            costs = uvloop.run(_take_turns(load, ways, rounds or ROUNDS))
            table.add_row(load.name, *(_cell(each, costs[OPEN]) for each in costs.values()))
        console.print(table)


def _configurations(directory: Path) -> dict[str, str]:
    users = directory / "users.toml"
    kind = "SCRAM-SHA-256"
    write_users(users, {USER: {kind: make_credential(kind, PASSWORD, 4_096, os.urandom(18))}})
    sasl = f'[sasl]\nmechanisms = ["PLAIN"]\nwithout_tls = true\nusers = "{users}"\n'
    allowed = _ALLOW.format(user="*", topics="*")
    others = "".join(_ALLOW.format(user=f"user-{number}", topics=f"topic-{number}-*") for number in range(RULES))
    return {
        OPEN: "",
        "SASL and an ACL": sasl + allowed,
        f"{RULES + 1} ACLs": sasl + others + allowed,
        "ACLs and a quota": sasl + others + allowed + _QUOTA,
    }


async def _take_turns(load: Load, ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """CPU µs for one request, by round."""
    connections = {name: await way.open(load) for name, way in ways.items()}
    for each in connections.values():
        await send_again(each, min(WARM_UP_REQUESTS, load.requests))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        # Each is the first one equally often.
        order = [*ways.items()]
        for name, way in order[number % len(order) :] + order[: number % len(order)]:
            before = cpu_seconds(way.pid)
            await send_again(connections[name], load.requests)
            found[name].append((cpu_seconds(way.pid) - before) / (load.requests * CONNECTIONS) * 1e6)
    for connection in chain.from_iterable(connections.values()):
        connection.close()
    return found


def _cell(costs: Sequence[float], without: Sequence[float]) -> str:
    if costs is without:
        return f"{min(costs):,.1f}"
    ratio = statistics.median(cost / base for cost, base in zip(costs, without, strict=True))
    return f"{min(costs):,.1f} (× {ratio:.3f})"


def authenticate(client: socket.socket) -> None:
    """SASL PLAIN, as a client does it before anything else."""
    mechanism = b"PLAIN"
    _ask(client, api_keys.SASL_HANDSHAKE, INT16.pack(len(mechanism)) + mechanism)
    credentials = f"\0{USER}\0{PASSWORD}".encode()
    _ask(client, api_keys.SASL_AUTHENTICATE, INT32.pack(len(credentials)) + credentials)


def _ask(client: socket.socket, api_key: int, body: bytes) -> None:
    """Raises SystemExit if the answer is an error."""
    message = request_header(api_key, 1, 0, b"bench") + body
    client.sendall(INT32.pack(len(message)) + message)
    size = INT32.unpack(_receive(client, INT32.size))[0]
    (error_code,) = INT16.unpack_from(_receive(client, size), INT32.size)
    if error_code:
        raise SystemExit(f"the proxy refuses the benchmark's user: error {error_code}")


def _receive(client: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        more = client.recv(size - len(received))
        if not more:
            raise SystemExit("the proxy has closed the connection of the benchmark's user")
        received += more
    return received

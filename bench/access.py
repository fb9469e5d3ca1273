"""`make bench SECTION=access`: the cost of SASL, ACLs and quotas per request of an admitted client; two minutes.

One kproxy has a listener for each way (`bench.switched_access`): two processes of one program differ by more than is to
be measured. The ways take turns in slices of some ten milliseconds, in an order that is drawn anew and then reversed,
so that whatever changes slowly affects all of them alike. A ratio is that of two slices of a way to two slices
`without` anything in the same turn. The median of all ratios counts. `without again` shows the error of the method: it
is the same as `without`.

Each round starts a new process. The interval is that of the median when rounds are drawn again and again from those
that were measured (bootstrap, 95 %). On Linux the proxy has a core of its own, and everything else has the others.

Connections are open and authenticated before the measurement starts: a password is checked once for each connection,
which costs milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console
from rich.table import Table

from bench.load import CONNECTIONS, MANY_PARTITIONS, SHAPES, Connection, Load, send_again, shape_load
from bench.processes import child, cpu_seconds, first_line
from bench.quick import BROKERS, write_table
from bench.switched_access import ACLS, AGAIN, LISTENERS, OPEN, QUOTA, QUOTA_BY_CLIENT_ID, SASL, WITHOUT
from kproxy.security.users import make_credential, write_users
from kproxy_codec import api_keys
from kproxy_codec.framing import ReceiveArena, request_header
from kproxy_codec.primitives import INT16, INT32

ROUNDS: Final = 6
# In each round, for each row.
TURNS: Final = 10
# A slice has this part of a row's requests.
SLICES: Final = 40
RULES: Final = 100
DRAWS: Final = 2_000
LOADS: Final = (SHAPES[0], SHAPES[2], *MANY_PARTITIONS)
TITLES: Final = {
    WITHOUT: "without, µs",
    AGAIN: "without again",
    SASL: "SASL",
    ACLS: f"and {RULES + 1} ACLs",
    QUOTA: "and a quota",
    QUOTA_BY_CLIENT_ID: "by client id",
}
USER: Final = "bench"
# Has a quota for its client id.
NAMED_USER: Final = "bench-by-client-id"
PASSWORD: Final = "bench-secret"  # noqa: S105 -- of a user who lives for a minute
_ALLOW: Final = '[[acls]]\nprincipal = "User:{user}"\noperations = ["write"]\ntopics = ["{topics}"]\n'
_RATES: Final = (
    "produce_bytes_per_s = 1_000_000_000_000\nfetch_bytes_per_s = 1_000_000_000_000\nrequests_per_s = 1_000_000_000\n"
)
_LISTENER: Final = '[[listeners]]\nname = "{name}"\nlisten = "127.0.0.1:0"\n{sasl}'
Costs = dict[str, list[float]]
"""CPU µs for one request by listener, turn by turn."""


def access(console: Console, rounds: int | None = None) -> None:
    """The tables of `make bench SECTION=access`."""
    loads = list(map(shape_load, LOADS))
    found: dict[str, list[Costs]] = {load.name: [] for load in loads}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kproxy-bench-")))
        stack.enter_context(_beside_the_proxy())
        brokers = [stack.enter_context(child(sys.executable, "-m", "bench.null_broker")) for _ in range(BROKERS)]
        table = write_table([int(first_line(broker)) for broker in brokers], directory)
        config = _configure(directory)
        for number in range(rounds or ROUNDS):
            with _proxy(table, config) as (pid, ports):
                for load in loads:
                    found[load.name].append(uvloop.run(_take_turns(load, pid, ports, random.Random(number))))  # noqa: S311
    shown = Table(title="CPU of the proxy for a request: × without (95 % interval)", title_style="")
    shown.add_column("request", no_wrap=True)
    for name in LISTENERS:
        shown.add_column(TITLES[name], justify="right")
    for load in loads:
        costs = found[load.name]
        least = min(chain.from_iterable(each[WITHOUT] for each in costs))
        cells = (_cell([_ratios(each[name], each[WITHOUT]) for each in costs]) for name in LISTENERS[1:])
        shown.add_row(load.name, f"{least:,.2f}", *cells)
    console.print(shown)


@contextlib.contextmanager
def _beside_the_proxy() -> Iterator[None]:
    """Leave one core to the proxy, where there are several and the system can do that."""
    if sys.platform != "linux" or len(cores := sorted(os.sched_getaffinity(0))) < 2:
        yield
        return
    os.sched_setaffinity(0, cores[1:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def _proxy(table: Path, config: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """The pid of the proxy, and the port of each listener."""
    arguments = ("--ownership", "static", "--table", str(table), "--config", str(config))
    with child(sys.executable, "-m", "bench.switched_access", "--log-level", "error", "serve", *arguments) as process:
        if sys.platform == "linux":
            ours = os.sched_getaffinity(0)
            os.sched_setaffinity(process.pid, set(range(os.cpu_count() or 1)) - ours or ours)
        listed = first_line(process).partition("listeners=")[2].split()[0]
        addresses = (each.partition("@") for each in listed.split(","))
        yield process.pid, {name: int(address.rpartition(":")[2]) for name, _, address in addresses}


def _configure(directory: Path) -> Path:
    users = directory / "users.toml"
    kind = "SCRAM-SHA-256"
    write_users(
        users, {user: {kind: make_credential(kind, PASSWORD, 4_096, os.urandom(18))} for user in (USER, NAMED_USER)}
    )
    config = directory / "kproxy.toml"
    config.write_text(
        f'[sasl]\nmechanisms = ["PLAIN"]\nwithout_tls = true\nusers = "{users}"\n'
        + "".join(_LISTENER.format(name=name, sasl="sasl = []\n" if name in OPEN else "") for name in LISTENERS)
        + "".join(_ALLOW.format(user=f"user-{number}", topics=f"topic-{number}-*") for number in range(RULES))
        + _ALLOW.format(user="*", topics="*")
        + f'[[quotas]]\nprincipal = "User:{USER}"\n{_RATES}'
        + f'[[quotas]]\nprincipal = "User:{NAMED_USER}"\nclient_id = "bench"\n{_RATES}'
    )
    return config


async def _take_turns(load: Load, pid: int, ports: Mapping[str, int], draw: random.Random) -> Costs:
    requests = max(1, load.requests // SLICES)
    connections = {name: [await _connect(load, name, ports[name]) for _ in range(CONNECTIONS)] for name in LISTENERS}
    for each in connections.values():
        await send_again(each, 2 * requests)
    found: Costs = {name: [] for name in LISTENERS}
    for _ in range(TURNS):
        order = draw.sample(LISTENERS, len(LISTENERS))
        cpu = dict.fromkeys(LISTENERS, 0.0)
        for name in chain(order, reversed(order)):
            before = cpu_seconds(pid)
            await send_again(connections[name], requests)
            cpu[name] += cpu_seconds(pid) - before
        for name, seconds in cpu.items():
            found[name].append(seconds / (2 * requests * CONNECTIONS) * 1e6)
    for connection in chain.from_iterable(connections.values()):
        connection.close()
    return found


async def _connect(load: Load, name: str, port: int) -> Connection:
    client = socket.create_connection(("127.0.0.1", port))
    if name not in OPEN:
        authenticate(client, NAMED_USER if name == QUOTA_BY_CLIENT_ID else USER)
    client.setblocking(False)
    make = partial(Connection, load.frames(), 0, ReceiveArena())
    _, connection = await asyncio.get_running_loop().create_connection(make, sock=client)
    return connection


def _ratios(costs: Sequence[float], without: Sequence[float]) -> list[float]:
    return [cost / base for cost, base in zip(costs, without, strict=True)]


def _cell(rounds: Sequence[Sequence[float]]) -> str:
    """The median of the ratios of all rounds, and its interval."""
    draw = random.Random(0)  # noqa: S311 -- the same figures give the same interval
    drawn = [statistics.median(chain.from_iterable(draw.choices(rounds, k=len(rounds)))) for _ in range(DRAWS)]
    cuts = statistics.quantiles(drawn, n=40)
    return f"{statistics.median(chain.from_iterable(rounds)):.3f} ({cuts[0]:.3f}–{cuts[-1]:.3f})"


def authenticate(client: socket.socket, user: str = USER) -> None:
    """SASL PLAIN, as a client does it before anything else."""
    mechanism = b"PLAIN"
    _ask(client, api_keys.SASL_HANDSHAKE, INT16.pack(len(mechanism)) + mechanism)
    credentials = f"\0{user}\0{PASSWORD}".encode()
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

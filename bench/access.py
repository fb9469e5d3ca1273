"""`make bench SECTION=access`: the cost of SASL, ACLs and quotas per request of an admitted client; three minutes.

All ways are states of the same connections of one process (`bench.switched_access`), because two processes of one
program differ by more than is to be measured, and so do two sets of connections. The ways take turns in slices of some
ten milliseconds, in an order that is drawn anew for each turn and then reversed, so that whatever changes slowly
affects all of them alike. A ratio is that of a turn's two slices of a way to its slices with nothing enforced. The
median of all ratios counts. `off again` is the same as `off`, and shows the error of the method.

Each round starts a new process. The interval is that of the median when rounds are drawn again and again from those
that were measured (bootstrap, 95 %). On Linux the proxy has a core of its own, and everything else has the others.

Connections are open and authenticated before the measurement starts: a password is checked once for each connection,
which costs milliseconds.

What a quota adds is less than the table can show. So the charge of one request is measured by itself as well: the least
of many short loops, less that of an empty loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import uvloop
from rich.console import Console

from bench.load import CONNECTIONS, MANY_PARTITIONS, SHAPES, Connection, Load, produce_frame, send_again, shape_load
from bench.processes import core_of_the_proxy, cpu_seconds, first_line, scratch, started, table_of
from bench.quick import BROKERS, serving, write_table
from bench.switched_access import ACLS, OFF, QUOTAS, SASL
from kproxy.config.quotas import parse_quotas
from kproxy.observe.tally import Tally
from kproxy.proxy.answer_order import AnswerOrder
from kproxy.proxy.memory_budget import Budget
from kproxy.proxy.metering import Meter
from kproxy.security.principals import ANONYMOUS
from kproxy.security.quotas import Quotas
from kproxy.security.users import make_credential, write_users
from kproxy_codec import api_keys
from kproxy_codec.framing import ReceiveArena, request_header
from kproxy_codec.primitives import INT16, INT32

ROUNDS: Final = 8
# In each round, for each row.
TURNS: Final = 10
# A slice has this part of a row's requests, and no fewer than so many on each connection.
SLICES: Final = 40
LEAST_REQUESTS: Final = 20
RULES: Final = 100
DRAWS: Final = 2_000
LOADS: Final = (SHAPES[0], SHAPES[2], *MANY_PARTITIONS)
CHARGES: Final = 1_000
LOOPS: Final = 500
CLIENT_ID: Final = "bench"
USER: Final = "bench"
# This client id has a quota.
NAMED_USER: Final = "bench-by-client-id"
PASSWORD: Final = "bench-secret"  # noqa: S105 -- of a user who lives for a minute


class Way(NamedTuple):
    """A column of the table: the connections' user, and what is enforced."""

    title: str
    user: str
    state: str


OFF_AGAIN: Final = Way("off again", USER, OFF)
WAYS: Final = (
    Way("off, µs", USER, OFF),
    OFF_AGAIN,
    Way("SASL", USER, SASL),
    Way(f"and {RULES + 1} ACLs", USER, ACLS),
    Way("and a quota", USER, QUOTAS),
    Way("off, by client id", NAMED_USER, OFF),
    Way("quota by client id", NAMED_USER, QUOTAS),
)
_ALLOW: Final = '[[acls]]\nprincipal = "User:{user}"\noperations = ["write"]\ntopics = ["{topics}"]\n'
_RATES: Final = (
    "produce_bytes_per_s = 1_000_000_000_000\nfetch_bytes_per_s = 1_000_000_000_000\nrequests_per_s = 1_000_000_000\n"
)
Costs = dict[Way, float]
"""CPU µs for one request in one turn."""


def access(console: Console, rounds: int | None = None) -> None:
    """Measure, and print the tables of `make bench SECTION=access`."""
    loads = list(map(shape_load, LOADS))
    found: dict[str, list[list[Costs]]] = {load.name: [] for load in loads}
    with scratch() as (stack, directory):
        core = stack.enter_context(core_of_the_proxy())
        table = write_table(started(stack, *["null_broker"] * BROKERS), directory)
        config = _configure(directory)
        for number in range(rounds or ROUNDS):
            draw = random.Random(number)  # noqa: S311 -- the order of slices
            with _proxy(table, config, core) as (process, port):
                for load in loads:
                    found[load.name].append(uvloop.run(_take_turns(load, process, port, draw)))
    ways = [way for way in WAYS[1:] if way.state != OFF or way is OFF_AGAIN]
    title = "CPU of the proxy for a request: × off, and the 95 % interval"
    shown = table_of(title, ["request"], (way.title for way in (WAYS[0], *ways)))
    for load in loads:
        turns = found[load.name]
        least = min(costs[WAYS[0]] for costs in chain.from_iterable(turns))
        cells = [_cell([[_ratio(way, costs) for costs in each] for each in turns]) for way in ways]
        shown.add_row(load.name, f"{least:,.2f}", *cells)
    console.print(shown)
    for what, client in (("a quota", None), ("a quota by client id", CLIENT_ID)):
        console.print(f"the charge of a request alone, {what}: {_charge_ns(client):,.0f} ns")


@contextlib.contextmanager
def _proxy(table: Path, config: Path, core: set[int]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the proxy; yield its process and port."""
    flags = ("--config", str(config))
    command = ("bench.switched_access", "--log-level", "error")
    with serving(table, *flags, command=command) as (process, port):
        if sys.platform == "linux" and core:
            os.sched_setaffinity(process.pid, core)
        yield process, port


def _configure(directory: Path) -> Path:
    users = directory / "users.toml"
    kind = "SCRAM-SHA-256"
    write_users(
        users, {user: {kind: make_credential(kind, PASSWORD, 4_096, os.urandom(18))} for user in (USER, NAMED_USER)}
    )
    config = directory / "kproxy.toml"
    config.write_text(
        f'[sasl]\nmechanisms = ["PLAIN"]\nwithout_tls = true\nusers = "{users}"\n'
        + "".join(_ALLOW.format(user=f"user-{number}", topics=f"topic-{number}-*") for number in range(RULES))
        + _ALLOW.format(user="*", topics="*")
        + f'[[quotas]]\nprincipal = "User:{USER}"\n{_RATES}'
        + f'[[quotas]]\nprincipal = "User:{NAMED_USER}"\nclient_id = "{CLIENT_ID}"\n{_RATES}'
    )
    return config


async def _take_turns(load: Load, process: subprocess.Popen[str], port: int, draw: random.Random) -> list[Costs]:
    requests = max(LEAST_REQUESTS, load.requests // SLICES)
    users = {way.user for way in WAYS}
    connections = {user: [await _connect(load, port, user) for _ in range(CONNECTIONS)] for user in sorted(users)}
    for each in connections.values():
        await send_again(each, 2 * requests)
    found = []
    for _ in range(TURNS):
        order = draw.sample(WAYS, len(WAYS))
        cpu = dict.fromkeys(WAYS, 0.0)
        for way in chain(order, reversed(order)):
            _enforce(process, way.state)
            # Routes are found anew, which is not measured.
            await send_again(connections[way.user], 1)
            before = cpu_seconds(process.pid)
            await send_again(connections[way.user], requests)
            cpu[way] += cpu_seconds(process.pid) - before
        found.append({way: seconds / (2 * requests * CONNECTIONS) * 1e6 for way, seconds in cpu.items()})
    for connection in chain.from_iterable(connections.values()):
        connection.close()
    return found


def _enforce(process: subprocess.Popen[str], state: str) -> None:
    if process.stdin is None:
        raise RuntimeError("the proxy has no pipe to its stdin")
    process.stdin.write(f"{state}\n")
    process.stdin.flush()
    if first_line(process) != state:
        raise SystemExit(f"the proxy did not enforce {state}")


async def _connect(load: Load, port: int, user: str) -> Connection:
    client = socket.create_connection(("127.0.0.1", port))
    authenticate(client, user)
    client.setblocking(False)
    make = partial(Connection, load.frames(), 0, ReceiveArena())
    _, connection = await asyncio.get_running_loop().create_connection(make, sock=client)
    return connection


def _ratio(way: Way, costs: Costs) -> float:
    """Return a way's cost divided by that of the same connections with nothing enforced."""
    bases = [cost for base, cost in costs.items() if (base.user, base.state) == (way.user, OFF) and base is not way]
    return costs[way] / statistics.mean(bases)


def _cell(rounds: Sequence[Sequence[float]]) -> str:
    """Return the median of the ratios of all rounds, and its interval."""
    draw = random.Random(0)  # noqa: S311 -- the same figures give the same interval
    drawn = [statistics.median(chain.from_iterable(draw.choices(rounds, k=len(rounds)))) for _ in range(DRAWS)]
    cuts = statistics.quantiles(drawn, n=40)
    return f"{statistics.median(chain.from_iterable(rounds)):.3f}\n{cuts[0]:.3f}–{cuts[-1]:.3f}"


def _charge_ns(client_id: str | None) -> float:
    """Return the ns to charge one request of 1 KiB, by a quota of its principal, or of this client id of it."""
    rates = {"produce_bytes_per_s": 1e15, "fetch_bytes_per_s": 1e15, "requests_per_s": 1e12}
    some = Quotas(parse_quotas([rates | ({"client_id": client_id} if client_id is not None else {})], "the benchmark"))
    context: Any = SimpleNamespace(clock=time.monotonic, tally=Tally(), budget=Budget(1 << 30))
    answers = AnswerOrder(context, None)  # type: ignore[arg-type]
    meter = Meter(lambda: some, ANONYMOUS, _exceed, answers, lambda slow: None, time.monotonic, Counter())
    frame = memoryview(produce_frame(SHAPES[0]))
    least = {False: float("inf"), True: float("inf")}
    for charges in (False, True) * LOOPS:
        before = time.thread_time_ns()
        if charges:
            for _ in range(CHARGES):
                meter.take(frame, 0.0)
        else:
            for _ in range(CHARGES):
                pass
        least[charges] = min(least[charges], time.thread_time_ns() - before)
    return (least[True] - least[False]) / CHARGES


def _exceed(frame: memoryview, first_byte_at: float, throttle_ms: int) -> None:
    raise SystemExit("the benchmark exceeds its quota")


def authenticate(client: socket.socket, user: str = USER) -> None:
    """Authenticate by SASL PLAIN, as a client does first."""
    mechanism = b"PLAIN"
    _ask(client, api_keys.SASL_HANDSHAKE, INT16.pack(len(mechanism)) + mechanism)
    credentials = f"\0{user}\0{PASSWORD}".encode()
    _ask(client, api_keys.SASL_AUTHENTICATE, INT32.pack(len(credentials)) + credentials)


def _ask(client: socket.socket, api_key: int, body: bytes) -> None:
    """Send a request. Raise SystemExit if the answer is an error."""
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

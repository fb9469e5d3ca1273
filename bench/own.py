"""`make bench SECTION=own`: the time that a claim takes, and its cost for other writers; about two minutes.

Real processes: `kproxy serve` once and three times, three `kproxy broker`, one etcd, all on this machine. Clients are
connections of this process, except those that are killed. A claim's time is that from its request to its answer, so it
includes the transaction in etcd, the confirmation by every proxy and, for a partition of a gated topic, the broker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

import structlog
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from rich.console import Console
from rich.table import Table

from bench.brokers import BROKERS, PREFIX, Brokers, brokers
from bench.own_client import OwnConnection
from bench.own_gate import gate
from bench.processes import child, first_line, table_of
from bench.table import serve
from kproxy.claims.keys import OwnKeys
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient

TOPIC = "own"
WRITERS = "writers"
READERS = "readers"
PARTITIONS = 96
AT_ONCE = 16
ROUNDS = 4
OWNER_KILLS = 10
PROXY_KILLS = 3
FLEETS = (1, 3)
LEASE_TTL_S = 4
ADMIN_TIMEOUT_S = 30.0
GRANT_TIMEOUT_S = 60.0
# By then a claimant that ended has long left the table and the brokers.
SETTLE_S = 0.5

FIRST = "first claim"
AGAIN = "the same claim again, on its connection"
TAKE_OVER = "take-over, from another proxy where there are three"
NO_BROKER = "first claim of a name that gates no writes"
CASES = (
    (FIRST, 1),
    (FIRST, AT_ONCE),
    (AGAIN, 1),
    (TAKE_OVER, 1),
    (TAKE_OVER, AT_ONCE),
    (NO_BROKER, 1),
)
OWNER_KILLED = "the owner's process"
PROXY_KILLED = "the owner's proxy; the successor may not take what is owned"
PROXY_KILLED_TAKEN = "the owner's proxy; the successor takes over"
OWNERS_GENERATION = 2


@dataclass
class _Case:
    """Claims of one kind, `at_once` at a time; the seconds of each, by the number of proxies."""

    what: str
    at_once: int
    took: dict[int, list[float]] = field(default_factory=dict)


class _Claims:
    """All rounds against a number of proxies."""

    def __init__(self, ports: Sequence[int], client: EtcdClient) -> None:
        self._ports = ports
        self._client = client
        self._claims = OwnKeys(PREFIX).claims

    async def first(self, at_once: int, group: str = WRITERS) -> tuple[list[float], list[float]]:
        """Return the times of claims of all partitions, and of the same claims repeated."""
        async with self._connections(at_once, self._ports) as connections:
            return await self._claim_all(connections, group), await self._claim_all(connections, group)

    async def take_over(self, at_once: int) -> list[float]:
        """Take each partition from a connection of its own, at another proxy if there is one."""
        async with (
            self._connections(PARTITIONS, self._ports[:1]) as owners,
            self._connections(at_once, self._ports[1:] or self._ports) as successors,
        ):
            await self._claim_all(owners, WRITERS)
            return await self._claim_all(successors, WRITERS)

    @contextlib.asynccontextmanager
    async def _connections(self, count: int, ports: Sequence[int]) -> AsyncIterator[list[OwnConnection]]:
        """Open connections spread over the proxies; at the end release all their claims."""
        made = [await OwnConnection.connect(ports[number % len(ports)]) for number in range(count)]
        try:
            yield made
        finally:
            for connection in made:
                await connection.close()
            await self.settle()

    async def settle(self) -> None:
        deadline = time.monotonic() + GRANT_TIMEOUT_S
        while len((await self._client.get_prefix(self._claims)).kvs):
            if time.monotonic() > deadline:
                raise SystemExit("claims of connections that have ended are still there")
            await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE_S)

    async def _claim_all(self, connections: Sequence[OwnConnection], group: str) -> list[float]:
        """Claim every partition. The connections divide them, and each claims one after the other."""

        async def claim(number: int) -> list[float]:
            wanted = range(number, PARTITIONS, len(connections))
            return [await connections[number].claim(group, f"{TOPIC}/{index}") for index in wanted]

        took = await asyncio.gather(*map(claim, range(len(connections))))
        return [each for seconds in took for each in seconds]


async def _latencies(cases: Sequence[_Case], fleet: int, ports: Sequence[int], client: EtcdClient) -> None:
    claims = _Claims(ports, client)
    # Work that is done once, above all connecting to brokers, is not part of the measurement.
    await claims.first(AT_ONCE)
    for _ in range(ROUNDS):
        for case in cases:
            took = case.took.setdefault(fleet, [])
            if case.what == TAKE_OVER:
                took += await claims.take_over(case.at_once)
            else:
                group = READERS if case.what == NO_BROKER else WRITERS
                found = await claims.first(case.at_once, group)
                took += found[1] if case.what == AGAIN else found[0]


class _Proxies:
    """Proxies that are started and killed."""

    def __init__(self, endpoint: str, stack: contextlib.ExitStack) -> None:
        self._endpoint = endpoint
        self._stack = stack

    def start(self) -> tuple[Popen[str], int]:
        """Start a proxy; return its process and port."""
        flags = ("--writer-group", f"{TOPIC}={WRITERS}", "--lease-ttl", str(LEASE_TTL_S))
        process, port, _ = self._stack.enter_context(serve(self._endpoint, PREFIX, *flags))
        return process, port


@contextlib.contextmanager
def _owner(port: int, resource: str, generation: int) -> Iterator[Popen[str]]:
    """Run a process that owns a partition."""
    arguments = (str(port), WRITERS, resource, str(generation))
    with child(sys.executable, "-m", "bench.own_client", *arguments) as process:
        first_line(process)
        yield process


def _kill(process: Popen[str]) -> float:
    """Kill the process with kill -9; return the time."""
    os.kill(process.pid, signal.SIGKILL)
    return time.monotonic()


async def _until_granted(successor_port: int, owner_port: int, victim: Popen[str] | None, generation: int) -> float:
    """Return seconds from kill -9 of the owner's process, or of its proxy `victim`, until a successor is granted.

    A successor with a generation below the owner's, which asks all the time, is granted when the owner's claim is gone.
    """
    resource = f"{TOPIC}/0"
    successor = await OwnConnection.connect(successor_port)

    async def granted() -> float:
        return await successor.claim_when_possible(WRITERS, resource, generation, GRANT_TIMEOUT_S)

    with _owner(owner_port, resource, OWNERS_GENERATION) as owner:
        asking = asyncio.ensure_future(granted()) if generation < OWNERS_GENERATION else None
        await asyncio.sleep(SETTLE_S)
        killed = _kill(victim or owner)
        moment = await (asking or granted())
    await successor.close()
    if moment < killed:
        raise SystemExit(f"{resource} was granted to a successor while its owner lived")
    return moment - killed


async def _kills(proxies: _Proxies, fleet: list[tuple[Popen[str], int]], claims: _Claims) -> dict[str, list[float]]:
    """Return the seconds without an owner, by the killed process; a killed proxy is replaced."""
    found: dict[str, list[float]] = {OWNER_KILLED: [], PROXY_KILLED: [], PROXY_KILLED_TAKEN: []}
    waits, takes = OWNERS_GENERATION - 1, OWNERS_GENERATION
    for _ in range(OWNER_KILLS):
        found[OWNER_KILLED].append(await _until_granted(fleet[1][1], fleet[0][1], None, waits))
        await claims.settle()
    for what, generation in ((PROXY_KILLED, waits), (PROXY_KILLED_TAKEN, takes)):
        for _ in range(PROXY_KILLS):
            victim, port = fleet.pop()
            found[what].append(await _until_granted(fleet[0][1], port, victim, generation))
            fleet.append(await asyncio.to_thread(proxies.start))
            await claims.settle()
    return found


def _make_topic(running: Brokers) -> None:
    admin = AdminClient({"bootstrap.servers": running.addresses, "log_level": 2})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, BROKERS)])[TOPIC].result(ADMIN_TIMEOUT_S)
    deadline = time.monotonic() + ADMIN_TIMEOUT_S
    while any(each.leader < 0 for each in admin.list_topics(TOPIC, ADMIN_TIMEOUT_S).topics[TOPIC].partitions.values()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{TOPIC}: some partitions have no leader")
        time.sleep(0.05)


def _ms(seconds: Sequence[float], percent: int) -> str:
    return f"{statistics.quantiles(seconds, n=100)[percent - 1] * 1e3:,.1f} ms"


def _latency_table(cases: Sequence[_Case]) -> Table:
    title = f"Claims of {PARTITIONS} partitions, from request to answer; {BROKERS} brokers, replication factor "
    proxies = (f"{fleet} {'proxy' if fleet == 1 else 'proxies'}" for fleet in FLEETS)
    numbers = ("at a time", *(f"{each}\n{percent}" for each in proxies for percent in ("p50", "p99")), "claims")
    table = table_of(f"{title}{BROKERS}, {ROUNDS} rounds", ["what"], numbers)
    for case in cases:
        cells = [_ms(case.took[fleet], percent) for fleet in FLEETS for percent in (50, 99)]
        table.add_row(case.what, str(case.at_once), *cells, f"{min(map(len, case.took.values())):,}")
    return table


def _kill_table(found: dict[str, list[float]]) -> Table:
    title = f"From kill -9 to the successor's grant; {FLEETS[-1]} proxies, lease {LEASE_TTL_S} s"
    table = table_of(title, ["what is killed"], ["shortest", "median", "longest", "kills"])
    for what, seconds in found.items():
        cells = [f"{each:,.3f} s" for each in (min(seconds), statistics.median(seconds), max(seconds))]
        table.add_row(what, *cells, str(len(seconds)))
    return table


async def _measure(console: Console, etcd: EmbeddedEtcd, directory: Path) -> None:
    client = EtcdClient([etcd.endpoint])
    await client.connect()
    cases = [_Case(what, at_once) for what, at_once in CASES]
    with contextlib.ExitStack() as stack:
        running = await asyncio.to_thread(stack.enter_context, brokers(etcd, directory))
        await asyncio.to_thread(_make_topic, running)
        proxies = _Proxies(etcd.endpoint, stack)
        fleet: list[tuple[Popen[str], int]] = []
        for count in FLEETS:
            while len(fleet) < count:
                fleet.append(await asyncio.to_thread(proxies.start))
            await _latencies(cases, count, [port for _, port in fleet], client)
        console.print(_latency_table(cases))
        claims = _Claims([port for _, port in fleet], client)
        console.print(_kill_table(await _kills(proxies, fleet, claims)))
        await client.close()


async def _run(console: Console) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as name:
        directory = Path(name)
        async with EmbeddedEtcd(directory / "etcd") as etcd:
            await _measure(console, etcd, directory)
            await gate(console, etcd, directory)


def own(console: Console) -> None:
    """Measure, and print the tables. Raise StartupError if there is no etcd."""
    asyncio.run(_run(console))

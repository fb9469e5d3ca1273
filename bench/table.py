"""`make bench SECTION=table`: a table of a million partitions, from a real etcd; about three minutes.

etcd runs with fsync off, beside everything else on this machine. The measured process is `kproxy serve` itself, or a
lease table alone in a process of its own (`bench.table_follower`); another process writes to etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import structlog
from rich.console import Console

from bench import load
from bench.lease_keys import WRITE_TIMEOUT_S, Shape, change_steadily, fill, lease_key, move, name_brokers
from bench.load import CONNECTIONS, SHAPES, TOPIC, produce_frame
from bench.processes import (
    child,
    cpu_seconds,
    first_line,
    measure,
    peak_resident_bytes,
    resident_bytes,
    started,
    table_of,
)
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, put_op

PARTITIONS = 1_000_000
PREFIX = "/kafscale"
NO_KEYS = "/nothing-here"
ETCD_FLAGS = ("--unsafe-no-fsync", "--quota-backend-bytes", str(4 << 30))
MIB = 1 << 20
FLOOD_EVENTS = 200_000
LEASE_KEYS = 100_000
CHANGES_PER_S = 1_000
CHANGES = 10_000
FIRST_NEW_OWNER = 1_000_000
PRODUCED = (SHAPES[0], SHAPES[2], load.Shape("100 × 1 KiB", 100, 1 << 10, 200))
ROUNDS = 4
IDLE_S = 5.0


class Report:
    """The table that is printed at the end."""

    def __init__(self, shape: Shape) -> None:
        self.table = table_of(f"A table of {shape.count:,} partitions ({shape})", ["what"], ["goal", "measured"])

    def line(self, what: str, measured: str, goal: str = "") -> None:
        self.table.add_row(what, goal, measured)

    def at_most(self, what: str, goal: float, measured: float | None, unit: str) -> None:
        if measured is None:
            self.line(what, "not told by this system", f"≤ {goal:,g} {unit}")
            return
        self.line(what, judged(f"{measured:,.0f} {unit}", met=measured <= goal), f"≤ {goal:,g} {unit}")

    def at_least(self, what: str, goal: float, measured: float, unit: str) -> None:
        self.line(what, judged(f"{measured:,.0f} {unit}", met=measured >= goal), f"≥ {goal:,g} {unit}")


def judged(text: str, *, met: bool) -> str:
    return text if met else f"[red]{text}[/red]"


@contextlib.asynccontextmanager
async def etcd_with(shape: Shape) -> AsyncIterator[tuple[EmbeddedEtcd, EtcdClient, float]]:
    """Run an etcd that holds a table of this shape; yield it, a client of it, and the seconds it took to fill."""
    with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as directory:
        async with EmbeddedEtcd(Path(directory), extra_arguments=ETCD_FLAGS) as server:
            client = EtcdClient([server.endpoint], timeout_s=WRITE_TIMEOUT_S)
            await client.connect()
            try:
                started = time.monotonic()
                await fill(client, PREFIX, shape)
                yield server, client, time.monotonic() - started
            finally:
                await client.close()


@contextlib.contextmanager
def serve(endpoint: str, prefix: str, *more: str) -> Any:
    """Run a real proxy that has loaded its table; yield (process, Kafka port, admin port). `more` are more flags."""
    arguments = ("--ownership", "etcd", "--etcd", endpoint, "--prefix", prefix, *more)
    addresses = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
    with child(sys.executable, "-m", "kproxy", "--log-level", "error", "serve", *arguments, *addresses) as process:
        ready = dict(part.split("=", 1) for part in first_line(process).split()[1:])
        yield process, int(ready["kafka"].rpartition(":")[2]), int(ready["admin"].rpartition(":")[2])


class _Follower:
    """A `bench.table_follower` that answers one command at a time."""

    def __init__(self, process: Popen[str]) -> None:
        self.process = process
        self.rss = 0
        self.peak: int | None = None

    async def ask(self, command: str, argument: int = 0) -> Any:
        return await asyncio.to_thread(self._ask, command, argument)

    def _ask(self, command: str, argument: int) -> Any:
        print(command, argument, file=self.process.stdin, flush=True)
        answer = json.loads(first_line(self.process))
        self.rss, self.peak = answer["rss"], answer["peak"]
        return answer["found"]


async def serving(report: Report, server: EmbeddedEtcd, shape: Shape, *, pages: bool) -> None:
    """Measure the cost of a proxy with this table at rest, compared with one without."""
    with serve(server.endpoint, NO_KEYS) as (empty, _, _):
        empty_bytes = resident_bytes(empty.pid)
    started = time.monotonic()
    with serve(server.endpoint, PREFIX) as (process, _, admin):
        loaded_s = time.monotonic() - started
        now, peak = resident_bytes(process.pid), peak_resident_bytes(process.pid)
        report.line(f"{shape}: kproxy serve, from its start to its ready line", f"{loaded_s:.1f} s")
        report.line(f"{shape}: resident with an empty table", f"{empty_bytes / MIB:,.0f} MiB")
        report.at_most(f"{shape}: resident more than empty", 250, (now - empty_bytes) / MIB, "MiB")
        above = (peak - empty_bytes) / MIB if peak is not None else None
        report.at_most(f"{shape}: at the peak of the load, more than empty", 250, above, "MiB")
        if pages:
            await asyncio.to_thread(_pages, report, shape, admin)


def _pages(report: Report, shape: Shape, admin: int) -> None:
    def seconds(query: str) -> float:
        started = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{admin}/table?{query}", timeout=60) as answer:
            answer.read()
        return time.monotonic() - started

    topic, index = shape.partition(shape.count - 5_000)
    first, last = seconds(""), seconds(f"after={topic}/{index}")
    report.line("/table: first page, one near the end", f"{first * 1e3:,.0f} ms, {last * 1e3:,.0f} ms")
    started = time.monotonic()
    with child(sys.executable, "-m", "kproxy", "table", "--admin", f"127.0.0.1:{admin}") as process:
        rows = sum(1 for _ in process.stdout or ())
    report.line(f"kproxy table: {rows:,} lines", f"{time.monotonic() - started:.1f} s")


async def _read_alone(report: Report, server: EmbeddedEtcd, client: EtcdClient) -> None:
    """Measure etcd's cost of sending the whole prefix to a reader that ignores it."""
    started, cpu = time.monotonic(), cpu_seconds(server.pid)
    await client.get_prefix(f"{PREFIX}/partition-leases/")
    elapsed, cpu = time.monotonic() - started, cpu_seconds(server.pid) - cpu
    report.line("etcd: handing it all out, and its CPU time", f"{elapsed:.1f} s, {cpu:.1f} s")


async def following(report: Report, server: EmbeddedEtcd, client: EtcdClient, shape: Shape) -> None:
    arguments = (server.endpoint, PREFIX, str(shape.topics), str(shape.partitions))
    with child(sys.executable, "-m", "bench.table_follower", *arguments) as process:
        follower = _Follower(process)
        etcd_before = cpu_seconds(server.pid)
        loaded = await follower.ask("load")
        if loaded["partitions"] != shape.count:
            raise SystemExit(f"{loaded['partitions']} partitions were loaded, of {shape.count}")
        report.line("load: etcd → table", f"{loaded['seconds']:.1f} s")
        report.line("load: CPU of etcd meanwhile", f"{cpu_seconds(server.pid) - etcd_before:.1f} s")
        report.line("load: longest the event loop was held up", f"{loaded['stall'] * 1e3:,.0f} ms")
        await _flood(report, client, follower, shape)
        await _lease_end(report, client, follower)
        await _routes(report, client, follower, shape)
        report.line("lookups in the table, for a second of CPU time", f"{await follower.ask('lookups'):,.0f} /s")
        events = await follower.ask("events")
        report.at_least("watch events in the table itself, for a second of CPU time", 300_000, events, "/s")


async def _flood(report: Report, client: EtcdClient, follower: _Follower, shape: Shape) -> None:
    """Measure changes made while the follower is stopped, so that the speed of writing to etcd does not count."""
    await asyncio.sleep(1.0)
    await follower.ask("stall")
    cpu = await follower.ask("cpu")
    os.kill(follower.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        last = await move(client, PREFIX, shape, FLOOD_EVENTS)
    finally:
        written = time.monotonic()
        os.kill(follower.process.pid, signal.SIGCONT)
    # The stop itself does not count as a stall of the follower.
    await follower.ask("stall")
    reached = await follower.ask("reach", last)
    cpu = await follower.ask("cpu") - cpu
    report.line("etcd takes changes, 128 in a transaction", f"{FLOOD_EVENTS / (written - started):,.0f} /s")
    report.at_least("watch events etcd → table, a backlog", 50_000, FLOOD_EVENTS / (reached - written), "/s")
    report.line("   for a second of its CPU time", f"{FLOOD_EVENTS / cpu:,.0f} /s")
    report.line("   longest the event loop was held up", f"{await follower.ask('stall') * 1e3:,.0f} ms")


async def _lease_end(report: Report, client: EtcdClient, follower: _Follower) -> None:
    """Measure the end of a broker with many partitions, which all lose their owner at one revision."""
    lease = await client.lease_grant(600)
    shape = Shape(100, LEASE_KEYS // 100, topic="leased")
    await fill(client, PREFIX, shape, lease.lease_id)
    last = await client.put(lease_key(PREFIX, "filled", 0), b"1")
    await follower.ask("reach", last)
    await follower.ask("stall")
    started = time.monotonic()
    await client.lease_revoke(lease.lease_id)
    last = await client.put(lease_key(PREFIX, "revoked", 0), b"1")
    reached = await follower.ask("reach", last)
    stall = await follower.ask("stall")
    report.line(f"a lease with {LEASE_KEYS:,} keys ends: until the table has it", f"{reached - started:.2f} s")
    report.line("   longest the event loop was held up", f"{stall * 1e3:,.0f} ms")


async def _routes(report: Report, client: EtcdClient, follower: _Follower, shape: Shape) -> None:
    await follower.ask("expect", FIRST_NEW_OWNER)
    sent = await change_steadily(client, PREFIX, shape, rate=CHANGES_PER_S, count=CHANGES, first_owner=FIRST_NEW_OWNER)
    came: list[float | None] = []
    for _ in range(50):
        came = await follower.ask("routes", CHANGES)
        if None not in came:
            break
        await asyncio.sleep(0.1)
    took = [(there - then) * 1e3 for then, there in zip(sent, came, strict=True) if there is not None]
    if len(took) < CHANGES:
        raise SystemExit(f"{CHANGES - len(took)} of {CHANGES} changes did not arrive")
    cuts = statistics.quantiles(took, n=100)
    report.at_most(f"put → route at {CHANGES_PER_S:,} changes/s, p99", 100, cuts[98], "ms")
    report.line("   p50, longest", f"{cuts[49]:.1f} ms, {max(took):.1f} ms")


async def producing(report: Report, server: EmbeddedEtcd, client: EtcdClient, shape: Shape) -> None:
    """Measure what 1,000 changes a second, of partitions without writers, cost the writers of other partitions."""
    with contextlib.ExitStack() as stack:
        await name_brokers(client, PREFIX, started(stack, *["null_broker"] * 3))
        await client.txn(
            [], [put_op(lease_key(PREFIX, TOPIC.decode(), index), b"%d" % (index % 3 + 1)) for index in range(100)]
        )
        process, port, _ = stack.enter_context(serve(server.endpoint, PREFIX))
        quiet = await _cpu_of_requests(process.pid, port)
        arguments = (server.endpoint, PREFIX, str(shape.topics), str(shape.partitions), str(CHANGES_PER_S))
        writer = stack.enter_context(child(sys.executable, "-m", "bench.lease_keys", *arguments))
        first_line(writer)
        before, revision = cpu_seconds(process.pid), (await client.status()).revision
        await asyncio.sleep(IDLE_S)
        applying = (cpu_seconds(process.pid) - before) / IDLE_S
        rate = ((await client.status()).revision - revision) / IDLE_S
        busy = await _cpu_of_requests(process.pid, port)
        report.line(f"kproxy serve at rest under {rate:,.0f} changes/s", f"{applying * 100:.1f} % of a core")
        for name in quiet:
            cells = f"{quiet[name]:.1f} µs, {busy[name]:.1f} µs"
            report.line(f"CPU of a request of {name}: table at rest, {CHANGES_PER_S:,} changes/s", cells)


async def _cpu_of_requests(pid: int, port: int) -> dict[str, float]:
    """Return CPU µs of the proxy, with its other work, for a request of each shape; the least of several rounds."""
    found: dict[str, float] = {}
    for shape in PRODUCED:
        frame = produce_frame(shape)
        for _ in range(ROUNDS):
            cpu, _ = await asyncio.to_thread(measure, pid, port, frame, shape.requests)
            found[shape.name] = min(found.get(shape.name, 1e9), cpu / (shape.requests * CONNECTIONS) * 1e6)
    return found


async def _run(console: Console, partitions: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    shape, wide = Shape(partitions // 1_000, 1_000), Shape(partitions // 10, 10)
    report = Report(shape)
    async with etcd_with(shape) as (server, client, filled_s):
        report.line("etcd: filled, 128 keys in a transaction", f"{shape.count / filled_s:,.0f} keys/s")
        report.line("etcd: resident with it", f"{resident_bytes(server.pid) / MIB:,.0f} MiB")
        await _read_alone(report, server, client)
        await serving(report, server, shape, pages=True)
        await following(report, server, client, shape)
        await producing(report, server, client, shape)
    async with etcd_with(wide) as (server, client, _):
        await serving(report, server, wide, pages=False)
    console.print(report.table)


def table(console: Console, partitions: int = PARTITIONS) -> None:
    """Measure, and print the table."""
    asyncio.run(_run(console, partitions))

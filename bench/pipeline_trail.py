"""What the audit trail costs on the path of produce requests, in the proxy's CPU.

Proxies before the same three null brokers: two that have no trail, one that looks for offsets given out twice and ships
nothing, as `kproxy serve` does by default, and two that ship, to files and to a topic of another cluster. They take
turns, each round beginning with the next of them, and as in `bench.quick` the least of a proxy's runs counts, the least
disturbed. The second one without a trail is there to tell what the machine's noise comes to all the same.

Clients are idempotent producers, as Spark's, Java's and franz-go's are by default, all to the same partitions. A run
goes on for a second or two, and its CPU counts until its last acknowledgement has been shipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
import uvloop
from rich.console import Console
from rich.table import Table

from bench.brokers import brokers
from bench.load import CONNECTIONS, IN_FLIGHT, SHAPES, ProducerFrames, Shape, open_all, send
from bench.processes import child, cpu_seconds, first_line
from bench.quick import BROKERS, WARM_UP_REQUESTS, write_table
from bench.table import judged
from kproxy.dev.embedded_etcd import EmbeddedEtcd

GOAL_PERCENT = 3.0
ROUNDS = 10
# Of each shape's requests: rows are closed and shipped several times in a run.
TIMES = 4
# A fifth of the default: rows are closed, and shipped, five times as often.
INTERVAL_S = 1.0
SHIPPED_S = 0.7
MEASURED = SHAPES[:3]
_DEFAULT, _NO_TRAIL = "kproxy", "bench.no_trail"
NONE, NONE_AGAIN = "no trail", "no trail, once more"
CHECK, FILES, TOPIC = "the on-line check alone", "shipped to JSON files", "shipped to a topic"
GOALS = (FILES, TOPIC)


class _Proxy(NamedTuple):
    pid: int
    port: int


class _Found(NamedTuple):
    """By way: the CPU µs for a request, run by run."""

    shape: Shape
    cost: dict[str, list[float]]

    def percent(self, way: str) -> float:
        """What it costs more than without a trail."""
        return 100 * (min(self.cost[way]) / min(self.cost[NONE]) - 1)


@contextlib.contextmanager
def _proxies(table: Path, directory: Path, cluster: str) -> Iterator[dict[str, _Proxy]]:
    """One of each kind. `cluster` is a bootstrap list for the trail that goes to a topic."""
    every = ("--audit-interval-s", str(INTERVAL_S))
    flags = {
        CHECK: (),
        FILES: ("--audit-sink", f"json:{directory / 'trail'}", *every),
        TOPIC: ("--audit-sink", "topic", "--audit-bootstrap", cluster, *every),
    }
    with contextlib.ExitStack() as stack:
        found = {way: stack.enter_context(_proxy(_NO_TRAIL, table)) for way in (NONE, NONE_AGAIN)}
        for way, more in flags.items():
            found[way] = stack.enter_context(_proxy(_DEFAULT, table, *more))
        yield found


@contextlib.contextmanager
def _proxy(module: str, table: Path, *flags: str) -> Iterator[_Proxy]:
    arguments = ("--ownership", "static", "--table", str(table), "--listen", "127.0.0.1:0", *flags)
    with child(sys.executable, "-m", module, "--log-level", "error", "serve", *arguments) as process:
        address = first_line(process).partition("kafka=")[2].split()[0]
        yield _Proxy(process.pid, int(address.rpartition(":")[2]))


async def _load(port: int, shape: Shape, requests: int) -> None:
    await send(await open_all(port, [ProducerFrames(shape) for _ in range(CONNECTIONS)], requests))


def _cost(proxy: _Proxy, shape: Shape, requests: int) -> float:
    """CPU µs for a request, until it is in the trail and that is shipped."""
    before = cpu_seconds(proxy.pid)
    uvloop.run(_load(proxy.port, shape, requests))
    time.sleep(INTERVAL_S + SHIPPED_S)
    return (cpu_seconds(proxy.pid) - before) / (requests * CONNECTIONS) * 1e6


def _measure(proxies: dict[str, _Proxy], shape: Shape) -> _Found:
    found = _Found(shape, {way: [] for way in proxies})
    ways = list(proxies)
    for way in ways:
        _cost(proxies[way], shape, WARM_UP_REQUESTS)
    for number in range(ROUNDS):
        first = number % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            found.cost[way].append(_cost(proxies[way], shape, TIMES * shape.requests))
    return found


async def trail(console: Console, directory: Path) -> None:
    """Measure, and print the table. Raises StartupError where there is no etcd for the cluster that has the topic."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    async with EmbeddedEtcd(directory / "etcd") as etcd:
        await asyncio.to_thread(_trail, console, etcd, directory)


def _trail(console: Console, etcd: EmbeddedEtcd, directory: Path) -> None:
    with contextlib.ExitStack() as stack:
        null_brokers = [stack.enter_context(child(sys.executable, "-m", "bench.null_broker")) for _ in range(BROKERS)]
        table = write_table([int(first_line(broker)) for broker in null_brokers], directory)
        cluster = stack.enter_context(brokers(etcd, directory))
        proxies = stack.enter_context(_proxies(table, directory, cluster.addresses))
        console.print(_table([_measure(proxies, shape) for shape in MEASURED]))


def _table(found: Sequence[_Found]) -> Table:
    load = f"{CONNECTIONS} idempotent producers, {IN_FLIGHT} in flight"
    table = Table(title=f"CPU of the proxy process; {load}, least of {ROUNDS} runs", title_style="")
    table.add_column("trail")
    table.add_column("goal", justify="right", no_wrap=True)
    for each in found:
        table.add_column(f"{each.shape.name}\nµs/req", justify="right")
        table.add_column("\nmore", justify="right")
    for way in (NONE, NONE_AGAIN, CHECK, FILES, TOPIC):
        cells = []
        for each in found:
            cells.append(f"{min(each.cost[way]):.2f}")
            percent = each.percent(way)
            met = way not in GOALS or percent <= GOAL_PERCENT
            cells.append("" if way == NONE else judged(f"{percent:+.1f} %", met=met))
        table.add_row(way, f"≤ {GOAL_PERCENT:g} %" if way in GOALS else "", *cells)
    return table

"""The audit trail's cost on the path of produce requests, in the proxy's CPU time.

Proxies before the same three null brokers: one that looks for offsets assigned twice and ships nothing, as `kproxy
serve` does by default, and two that ship, to files and to a topic of another cluster. Each keeps a trail of every other
run's connections: two processes of the same program differ by more than the trail costs. Two kinds of run without a
trail show how large the machine's noise is. As in `bench.quick` the least of the runs counts, because it is the least
disturbed.

Clients are idempotent producers, as Spark's, Java's and franz-go's are by default, all to the same partitions. The CPU
of a run counts until its last acknowledgement has been shipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
import uvloop
from rich.console import Console
from rich.table import Table

from bench.brokers import brokers
from bench.load import CONNECTIONS, IN_FLIGHT, SHAPES, ProducerFrames, Shape, open_all, send
from bench.pipeline_noting import PRODUCERS, cost
from bench.processes import child, cpu_seconds, first_line
from bench.quick import BROKERS, WARM_UP_REQUESTS, write_table
from bench.table import judged
from kproxy.dev.embedded_etcd import EmbeddedEtcd

GOAL_PERCENT = 3.0
PAIRS = 8
# A tenth of the default: rows are closed, and shipped, ten times as often.
INTERVAL_S = 0.5
# Until the last acknowledgements are judged; they are shipped that much after INTERVAL_S.
LOOKED_S = 0.7
SWITCHED_S = 0.1
IDLE_S = 10.0
MEASURED = SHAPES[:3]
CHECK, FILES, TOPIC = "the on-line check alone", "shipped to JSON files", "shipped to a topic"
NOISE = "none in either"
GOALS = (FILES, TOPIC)


class _Proxy(NamedTuple):
    """`rest_s`: the time it takes to process the last acknowledgements."""

    pid: int
    port: int
    rest_s: float


class _Found(NamedTuple):
    """For one proxy and shape: CPU µs for a request, run by run, without a trail and with it."""

    without: list[float]
    cost: list[float]

    @property
    def percent(self) -> float:
        """The additional cost."""
        return 100 * (min(self.cost) / min(self.without) - 1)


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
        yield {way: stack.enter_context(_proxy(table, *more)) for way, more in flags.items()}


@contextlib.contextmanager
def _proxy(table: Path, *flags: str) -> Iterator[_Proxy]:
    arguments = ("--ownership", "static", "--table", str(table), "--listen", "127.0.0.1:0", *flags)
    with child(sys.executable, "-m", "bench.switched_trail", "--log-level", "error", "serve", *arguments) as process:
        address = first_line(process).partition("kafka=")[2].split()[0]
        yield _Proxy(process.pid, int(address.rpartition(":")[2]), LOOKED_S + (INTERVAL_S if flags else 0))


async def _load(port: int, shape: Shape, requests: int) -> None:
    await send(await open_all(port, [ProducerFrames(shape) for _ in range(CONNECTIONS)], requests))


def _cost(proxy: _Proxy, shape: Shape, requests: int, *, trail: bool) -> float:
    """CPU µs for a request, until it is in the trail and the trail is shipped."""
    os.kill(proxy.pid, signal.SIGUSR2 if trail else signal.SIGUSR1)
    time.sleep(SWITCHED_S)
    before = cpu_seconds(proxy.pid)
    uvloop.run(_load(proxy.port, shape, requests))
    time.sleep(proxy.rest_s)
    return (cpu_seconds(proxy.pid) - before) / (requests * CONNECTIONS) * 1e6


def _measure(proxy: _Proxy, shape: Shape, *, trail: bool) -> _Found:
    """Measure pairs of runs, one without a trail and one with `trail`; the order alternates."""
    found = _Found([], [])
    for way in (False, trail):
        _cost(proxy, shape, WARM_UP_REQUESTS, trail=way)
    for number in range(PAIRS):
        runs = [(found.without, False), (found.cost, trail)]
        for costs, way in reversed(runs) if number % 2 else runs:
            costs.append(_cost(proxy, shape, shape.requests, trail=way))
    return found


def _idle(proxy: _Proxy) -> float:
    """CPU ms a second without load."""
    before = cpu_seconds(proxy.pid)
    time.sleep(IDLE_S)
    return (cpu_seconds(proxy.pid) - before) / IDLE_S * 1000


async def trail(console: Console, directory: Path) -> None:
    """Measure, and print the table. Raises StartupError if there is no etcd for the cluster that has the topic."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    async with EmbeddedEtcd(directory / "etcd") as etcd:
        await asyncio.to_thread(_trail, console, etcd, directory)


def _trail(console: Console, etcd: EmbeddedEtcd, directory: Path) -> None:
    with contextlib.ExitStack() as stack:
        null_brokers = [stack.enter_context(child(sys.executable, "-m", "bench.null_broker")) for _ in range(BROKERS)]
        table = write_table([int(first_line(broker)) for broker in null_brokers], directory)
        cluster = stack.enter_context(brokers(etcd, directory))
        proxies = stack.enter_context(_proxies(table, directory, cluster.addresses))
        found = {NOISE: [_measure(proxies[CHECK], shape, trail=False) for shape in MEASURED]}
        for way, proxy in proxies.items():
            found[way] = [_measure(proxy, shape, trail=True) for shape in MEASURED]
        idle = {way: _idle(proxy) for way, proxy in proxies.items()}
        console.print(_table(found))
        console.print(_told(idle), highlight=False)
    for writes, shared in (("a partition each", False), ("all to one partition", True)):
        noted = cost(shared=shared)
        console.print(
            f"- Without a proxy around it, {PRODUCERS} producers, {writes}: {noted.note:.0f} ns to note a batch, "
            f"{noted.judge:.0f} ns to judge it and to close its row.",
            highlight=False,
        )


def _table(found: Mapping[str, Sequence[_Found]]) -> Table:
    load = f"{CONNECTIONS} idempotent producers, {IN_FLIGHT} in flight"
    table = Table(title=f"CPU of the proxy process; {load}, least of {PAIRS} runs each", title_style="")
    table.add_column("trail")
    table.add_column("goal", justify="right", no_wrap=True)
    for shape in MEASURED:
        table.add_column(f"{shape.name}\nµs without", justify="right")
        table.add_column("\nwith", justify="right")
        table.add_column("\nmore", justify="right")
    for way, each in found.items():
        cells = []
        for one in each:
            cells += [f"{min(costs):.2f}" for costs in one]
            met = way not in GOALS or one.percent <= GOAL_PERCENT
            cells.append(judged(f"{one.percent:+.1f} %", met=met))
        table.add_row(way, f"≤ {GOAL_PERCENT:g} %" if way in GOALS else "", *cells)
    return table


def _told(idle: Mapping[str, float]) -> str:
    each = ", ".join(f"{way} {cost:.1f}" for way, cost in idle.items())
    return f"- CPU ms a second of a proxy that nobody asks anything: {each}."

"""`make bench SECTION=trail`: the audit trail's share of a produce request's CPU; ten minutes.

Everything compared is in one process (`bench.switched_trail`), because two processes of one program differ by more than
is to be measured. The same connections send the same requests to three topics in turns, of which the trail notes one:
the third is like the second, and shows the error of the method. A turn is slices of some ten milliseconds or less, in
an order that is drawn anew and then reversed, so that whatever changes slowly affects all topics alike. The connections
are as old as each other, but their routes lie elsewhere in memory for each topic: so each cycle has new connections and
notes another topic.

A cycle is as many looks as there are between two closings of a row at the default `--audit-interval-s`. The proxy looks
when it is told to: after each half second of noted load. So these parts of the cost are measured apart:

  noting     in the request path: a turn's slices of the noted topic to those of the second and third
  judging    a look, by the thread's clock, without the closing of rows
  closing    rows, in a look
  shipping   until the sink has them: the process's CPU in the pause after a look, less that of such a pause without one

The last three are divided by the cost of the noted requests of that time without a trail. The sum counts. Its interval
is that of sums when cycles are drawn again and again from those that were measured (bootstrap, 95 %); cycles are added
until it is narrower than ± PRECISION or there are MOST_CYCLES.

Clients are idempotent producers, as Spark's, Java's and franz-go's are by default, all to the same partitions: nearly
every batch is a span of its own, which costs the most.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import structlog
import uvloop
from rich.console import Console

from bench.brokers import brokers
from bench.load import CONNECTIONS, IN_FLIGHT, MANY_PARTITIONS, SHAPES, ProducerFrames, Shape, open_all, send_again
from bench.processes import core_of_the_proxy, cpu_seconds, first_line, started, table_of
from bench.quick import BROKERS, PARTITIONS, serving, write_table
from bench.table import judged
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.trail.trail import LOOK_S

GOAL_PERCENT: Final = 3.0
MEASURED: Final = (*SHAPES, *MANY_PARTITIONS)
# At the default interval, 5 s: a row is closed before it could be older at the next look.
LOOKS: Final = 9
LEAST_CYCLES: Final = 3
MOST_CYCLES: Final = 8
# The precision of the sum, in percent.
PRECISION: Final = 1.0
# A slice has this part of a shape's requests, and no fewer than so many on each connection.
SLICES: Final = 80
LEAST_REQUESTS: Final = 10
# The time by which a sink has taken what a look offered.
SHIPPED_S: Final = 0.2
DRAWS: Final = 2_000
# Names of one length.
TOPICS: Final = (b"bench-0", b"bench-1", b"bench-2")
OWNERS: Final = {topic: [index % BROKERS + 1 for index in range(PARTITIONS)] for topic in TOPICS}
# Only the shipping depends on the sink.
SINKS: Final = {"files": MEASURED, "a topic": (MEASURED[0], MEASURED[-1])}


class _Cycle(NamedTuple):
    """`off`: CPU µs for a request that is not noted. By turn: the ratio to it of `noted` ones, and of others `again`.

    In CPU seconds: `judging`, `closing`, `shipping` and, for the noted requests without a trail, `sending`.
    """

    off: float
    noted: list[float]
    again: list[float]
    judging: float
    closing: float
    shipping: float
    sending: float


class _Parts(NamedTuple):
    """The parts of the cost, in percent of a request's CPU without a trail."""

    noting: float
    judging: float
    closing: float
    shipping: float
    total: float
    again: float


class _Proxy:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.port = port

    def cpu(self) -> float:
        return cpu_seconds(self._process.pid)

    def obey(self, line: str) -> tuple[float, float]:
        """Return the CPU seconds of the whole look, and of closing rows."""
        if self._process.stdin is None:
            raise RuntimeError("the proxy has no pipe to its stdin")
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        whole, closing = map(int, first_line(self._process).split())
        return whole / 1e9, closing / 1e9


@contextlib.contextmanager
def _proxy(table: Path, core: set[int], *flags: str) -> Iterator[_Proxy]:
    command = ("bench.switched_trail", "--log-level", "error")
    with serving(table, *flags, command=command) as (process, port):
        if sys.platform == "linux" and core:
            os.sched_setaffinity(process.pid, core)
        yield _Proxy(process, port)


async def _measure(proxy: _Proxy, shape: Shape, draw: random.Random, number: int) -> _Cycle:
    """Measure one cycle."""
    noted = TOPICS[number % len(TOPICS)]
    off, again = (topic for topic in TOPICS if topic != noted)
    proxy.obey(",".join(topic.decode() for topic in (off, again)))
    requests = max(LEAST_REQUESTS, shape.requests // SLICES)
    frames = {topic: [ProducerFrames(shape, topic=topic) for _ in range(CONNECTIONS)] for topic in TOPICS}
    connections = await open_all(proxy.port, frames[off], 0)
    for topic in TOPICS * 2:
        await send_again(connections, requests, frames[topic])
    proxy.obey("look")
    await _rest(proxy)
    idle = await _rest(proxy)
    turns: list[dict[bytes, float]] = []
    judging = closing = shipping = 0.0
    for _ in range(LOOKS):
        noted_s = turn_s = 0.0
        # The caches are cold.
        await send_again(connections, requests, frames[off])
        while noted_s + turn_s / 2 < LOOK_S:
            order = [noted, *draw.sample((off, again), 2), noted]
            cpu = dict.fromkeys(TOPICS, 0.0)
            turn_s = 0.0
            for topic in chain(order, reversed(order)):
                before, began = proxy.cpu(), time.monotonic()
                await send_again(connections, requests, frames[topic])
                cpu[topic] += (proxy.cpu() - before) / order.count(topic)
                turn_s += time.monotonic() - began if topic == noted else 0.0
            noted_s += turn_s
            turns.append(cpu)
        whole, rows = proxy.obey("look")
        judging += whole - rows
        closing += rows
        shipping += await _rest(proxy) - idle
    for connection in connections:
        connection.close()
    request_s = [(cpu[off] + cpu[again]) / 4 / requests / CONNECTIONS for cpu in turns]
    return _Cycle(
        statistics.median(request_s) * 1e6,
        [2 * cpu[noted] / (cpu[off] + cpu[again]) for cpu in turns],
        [cpu[again] / cpu[off] for cpu in turns],
        judging,
        closing,
        shipping,
        statistics.median(request_s) * len(turns) * 4 * requests * CONNECTIONS,
    )


async def _rest(proxy: _Proxy) -> float:
    """Return the CPU seconds of the proxy in a pause."""
    before = proxy.cpu()
    await asyncio.sleep(SHIPPED_S)
    return proxy.cpu() - before


def _parts(cycles: Sequence[_Cycle]) -> _Parts:
    noting = 100 * (statistics.median(chain.from_iterable(cycle.noted for cycle in cycles)) - 1)
    again = 100 * (statistics.median(chain.from_iterable(cycle.again for cycle in cycles)) - 1)
    sending = sum(cycle.sending for cycle in cycles) / 100
    judging, closing, shipping = (
        sum(each) / sending
        for each in zip(*((cycle.judging, cycle.closing, cycle.shipping) for cycle in cycles), strict=True)
    )
    return _Parts(noting, judging, closing, shipping, noting + judging + closing + shipping, again)


def _intervals(cycles: Sequence[_Cycle]) -> list[tuple[float, float]]:
    """Return the interval of each part of the cost."""
    draw = random.Random(0)  # noqa: S311 -- the same figures give the same interval
    drawn = [_parts(draw.choices(cycles, k=len(cycles))) for _ in range(DRAWS)]
    cuts = [statistics.quantiles(each, n=40) for each in zip(*drawn, strict=True)]
    return [(each[0], each[-1]) for each in cuts]


def _measure_all(proxy: _Proxy, shape: Shape) -> list[_Cycle]:
    draw = random.Random(shape.name)  # noqa: S311 -- the order of slices
    cycles: list[_Cycle] = []
    while len(cycles) < MOST_CYCLES:
        cycles.append(uvloop.run(_measure(proxy, shape, draw, len(cycles))))
        if len(cycles) >= LEAST_CYCLES:
            low, high = _intervals(cycles)[_Parts._fields.index("total")]
            if high - low <= 2 * PRECISION:
                break
    return cycles


def trail(console: Console) -> None:
    """Measure, and print the table. Raise StartupError if there is no etcd for the cluster that has the topic."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as directory:
        asyncio.run(_with_etcd(console, Path(directory)))


async def _with_etcd(console: Console, directory: Path) -> None:
    async with EmbeddedEtcd(directory / "etcd") as etcd:
        await asyncio.to_thread(_trail, console, etcd, directory)


def _trail(console: Console, etcd: EmbeddedEtcd, directory: Path) -> None:
    load = f"{CONNECTIONS} idempotent producers, {IN_FLIGHT} in flight"
    title = f"Percent of a request's CPU in the proxy, and the 95 % interval; {load}; goal: at most {GOAL_PERCENT:g} %"
    numbers = ("noting", "judging", "closing", "shipping", "all", "error")
    table = table_of(title, ["request", "sink", "without,\nµs"], numbers)
    with contextlib.ExitStack() as stack:
        core = stack.enter_context(core_of_the_proxy())
        owners = write_table(started(stack, *["null_broker"] * BROKERS), directory, OWNERS)
        cluster = stack.enter_context(brokers(etcd, directory))
        flags = (
            ("--audit-sink", f"json:{directory / 'trail'}"),
            ("--audit-sink", "topic", "--audit-bootstrap", cluster.addresses),
        )
        for (sink, shapes), some in zip(SINKS.items(), flags, strict=True):
            proxy = stack.enter_context(_proxy(owners, core, *some))
            for shape in shapes:
                cycles = _measure_all(proxy, shape)
                cells = [
                    f"{part:.2f}\n{low:.1f}–{high:.1f}"
                    for part, (low, high) in zip(_parts(cycles), _intervals(cycles), strict=True)
                ]
                total = _Parts._fields.index("total")
                cells[total] = judged(cells[total], met=_parts(cycles).total <= GOAL_PERCENT)
                off = statistics.median(cycle.off for cycle in cycles)
                table.add_row(shape.name, sink, f"{off:,.2f}", *cells)
    console.print(table)

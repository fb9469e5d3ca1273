"""`make bench SECTION=connections`: many connections, several workers, many brokers; four minutes.

  many      CONNECTIONS clients that each have one request in flight, kproxy and haproxy by turns
  memory    resident memory of a client connection that has no request open, by the broker connections it has
  workers   CPU time of all of kproxy's processes with two workers, as a multiple of that with one, by turns
  brokers   CPU time of a request of many partitions whose owners are three brokers, and MANY_BROKERS

Connections are open and warm before a measurement. kproxy serves with its metrics, its limits and a trail in files.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from bench.load import MANY_PARTITIONS, SHAPES, TOPIC, Connection, Load, Shape, send_again, shape_load
from bench.plain import LOOK_S
from bench.processes import cpu_seconds, resident_bytes, scratch, started, table_of
from bench.quick import BROKERS, PARTITIONS, haproxy, serving, write_table

CONNECTIONS: Final = 2000
# Of clients, and of the proxy to three brokers.
FILES: Final = 5 * CONNECTIONS
TURNS: Final = 7
# For one turn, a request on each connection at a time.
REQUESTS: Final = 5
WORKER_CONNECTIONS: Final = 32
# New connections each time: the kernel shares them out anew.
WORKER_ROUNDS: Final = 5
SETTLE_S: Final = 2.0
MANY_BROKERS: Final = 30
PIECES: Final = Shape("100 × 1 KiB", 100, 1 << 10, 400)


def connections(console: Console) -> None:
    """Print the four tables. Raise SystemExit if the limit of open files is too low."""
    allow_files(FILES)
    with scratch() as (stack, directory):
        ports = started(stack, *["fast_broker"] * BROKERS)
        proxy = stack.enter_context(_kproxy(ports, directory, "one"))
        console.print(_many(proxy, ports[0], directory))
        console.print(_memory(ports, directory))
        console.print(_workers(proxy, stack.enter_context(_kproxy(ports, directory, "two", "--workers", "2"))))
        # Separate brokers: a broker recognizes a request by its length and beginning, whatever its partitions are.
        console.print(_pieces(started(stack, *["fast_broker"] * MANY_BROKERS), directory))


def allow_files(count: int) -> None:
    """Raise this process's limit of open files, which its children get. Raise SystemExit if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise SystemExit(f"this section needs {count:,} open files, and the limit is {hard:,}: raise it (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


@contextlib.contextmanager
def _kproxy(ports: Sequence[int], directory: Path, name: str, *flags: str) -> Iterator[tuple[int, int]]:
    owners = {TOPIC: [index % len(ports) + 1 for index in range(PARTITIONS)]}
    table = write_table(ports, directory, owners)
    everything = ("--admin", "127.0.0.1:0", "--audit-sink", f"json:{directory / name}")
    with serving(table, *everything, *flags, command=("kproxy", "--log-level", "error")) as (process, port):
        yield process.pid, port


def _cpu_of_all(pid: int) -> float:
    """Return the CPU seconds of a process and of its children."""
    return sum(cpu_seconds(each.pid) for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)])


async def _cost(pid: int, opened: Sequence[Connection], requests: int) -> float:
    """Return CPU µs for each of `requests` on each connection, with the trail's look at them."""
    before = _cpu_of_all(pid)
    await send_again(opened, requests)
    await asyncio.sleep(LOOK_S)
    return (_cpu_of_all(pid) - before) / (requests * len(opened)) * 1e6


# Many connections


def _many(proxy: tuple[int, int], broker: int, directory: Path) -> Table:
    title = f"{CONNECTIONS:,} connections with one request each; CPU µs for a request"
    table = table_of(title, ["request"], ["kproxy", "haproxy", "kproxy × haproxy"])
    with haproxy(broker, directory) as beside:
        ways = {"kproxy": proxy} if beside is None else {"kproxy": proxy, "haproxy": beside}
        for shape in (SHAPES[0], SHAPES[2]):
            costs = uvloop.run(_by_turns(shape_load(shape)._replace(connections=CONNECTIONS), ways))
            kproxy, others = costs["kproxy"], costs.get("haproxy")
            table.add_row(
                shape.name,
                _spread(kproxy),
                "not installed" if others is None else _spread(others),
                "-" if others is None else _ratio(kproxy, others),
            )
    return table


async def _by_turns(load: Load, ways: dict[str, tuple[int, int]]) -> dict[str, list[float]]:
    opened = {name: await load.open(port, 0) for name, (_, port) in ways.items()}
    for each in opened.values():
        await _one_each(each, 2)
    await asyncio.sleep(LOOK_S)
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, (pid, _) in ways.items():
            before = cpu_seconds(pid)
            await _one_each(opened[name], REQUESTS)
            await asyncio.sleep(LOOK_S)
            costs[name].append((cpu_seconds(pid) - before) / (REQUESTS * CONNECTIONS) * 1e6)
    for each in opened.values():
        for connection in each:
            connection.close()
    return costs


async def _one_each(opened: Sequence[Connection], times: int) -> None:
    for _ in range(times):
        await send_again(opened, 1)


# Memory


def _memory(ports: Sequence[int], directory: Path) -> Table:
    title = f"Memory of a quiet client connection, KiB; of {CONNECTIONS:,}"
    table = table_of(title, ["broker connections of each"], ["KiB"])
    for partitions in (0, 1, 3):
        # A new process each time: freed memory is used again.
        with _kproxy(ports, directory, f"memory-{partitions}") as (pid, port):
            table.add_row(str(partitions), f"{uvloop.run(_held(pid, port, partitions)) / 1024:.1f}")
    return table


async def _held(pid: int, port: int, partitions: int) -> float:
    """Return the resident bytes that a connection adds after some requests of `partitions`."""
    load = shape_load(Shape("", max(1, partitions), 1 << 10, 1))
    first = await load.open(port, 0)
    await _one_each(first, 2)
    await asyncio.sleep(SETTLE_S)
    before = resident_bytes(pid)
    opened = await load._replace(connections=CONNECTIONS).open(port, 0)
    if partitions:
        await _one_each(opened, 2)
    # The trail has judged and written what they sent.
    await asyncio.sleep(SETTLE_S)
    held = (resident_bytes(pid) - before) / CONNECTIONS
    for connection in [*first, *opened]:
        connection.close()
    return held


# Workers


def _workers(one: tuple[int, int], two: tuple[int, int]) -> Table:
    title = f"CPU µs for a request; {WORKER_CONNECTIONS} connections, all processes"
    table = table_of(title, ["request"], ["one worker", "two workers", "two × one"])
    for shape in (*SHAPES[:3], *MANY_PARTITIONS):
        costs: tuple[list[float], list[float]] = [], []
        load = shape_load(shape)._replace(connections=WORKER_CONNECTIONS)
        for _ in range(WORKER_ROUNDS):
            for (pid, port), found in zip((one, two), costs, strict=True):
                found.append(uvloop.run(_warm_cost(pid, port, load)))
        table.add_row(shape.name, *map(_spread, costs), _ratio(costs[1], costs[0]))
    return table


async def _warm_cost(pid: int, port: int, load: Load) -> float:
    opened = await load.open(port, 0)
    await send_again(opened, max(2, load.requests // 20))
    await asyncio.sleep(LOOK_S)
    cost = await _cost(pid, opened, max(10, load.requests // 4))
    for connection in opened:
        connection.close()
    return cost


# Brokers


def _pieces(every_port: Sequence[int], directory: Path) -> Table:
    title = f"CPU µs for a request of {PIECES.name}, by its brokers"
    table = table_of(title, [], ["brokers", "a request", "a broker more"])
    least = dict[int, float]()
    for count in (BROKERS, len(every_port)):
        with _kproxy(every_port[:count], directory, f"pieces-{count}") as (pid, port):
            costs = [uvloop.run(_warm_cost(pid, port, shape_load(PIECES))) for _ in range(WORKER_ROUNDS)]
        least[count] = min(costs)
        more = "" if count == BROKERS else f"{(least[count] - least[BROKERS]) / (count - BROKERS):.1f}"
        table.add_row(str(count), _spread(costs), more)
    return table


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def _ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Return the median of the rounds' ratios, and the ratio of the least values."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    return f"{statistics.median(ratios):.2f}, of the least {min(values) / min(others):.2f}"

"""`make bench SECTION=against AGAINST=path`: this checkout's proxy beside another checkout's; three minutes.

Both stand before the same brokers and get the same load by turns, in the rows of `bench.quick` and `bench.paths`. The
other one's process runs the other checkout's code in this interpreter. Two processes of one program differ by some
percent for as long as they live: each round starts new ones. The least of all runs counts; they are many and short, for
on a shared machine quiet moments are short too, and their connections are there before they begin.

`by round` is the median of the rounds' own ratios, and between which two half of them are. What a neighbour on the
machine does to a round it does to both, so that this tells a small difference where the ratio of the minima does not:
the same code on both sides has 1 within, or next to, these two.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from bench.load import IN_FLIGHT, MANY_PARTITIONS, SHAPES, Load, send_again, shape_load
from bench.paths import path_loads, path_table
from bench.processes import cpu_seconds
from bench.quick import CHECKOUT, environment_of, serve

ROUNDS = 8
# Of each row in each round, that much shorter than in the other tables.
RUNS = 8


def against(console: Console, checkout: Path, rounds: int = ROUNDS) -> None:
    """The table that is printed; at least two rounds. SystemExit where no kproxy is in `checkout`."""
    checkouts = {"this": CHECKOUT, "other": checkout.resolve()}
    for each in checkouts.values():
        _expect_own_code(each)
    loads = [*map(shape_load, (*SHAPES, *MANY_PARTITIONS)), *path_loads()]
    found: dict[tuple[str, str], list[float]] = {(load.name, name): [] for load in loads for name in checkouts}
    with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as directory, path_table(Path(directory)) as brokers:
        for number in range(rounds):
            # Who is first, in the one and in the other order.
            names = list(checkouts)[:: -1 if number % 2 else 1]
            with contextlib.ExitStack() as stack:
                proxies = {name: stack.enter_context(serve(brokers, checkout=checkouts[name])) for name in names}
                for load in loads:
                    for name, least in uvloop.run(_take_turns(load, proxies)).items():
                        found[load.name, name].append(least)
    table = Table(
        title=f"CPU of the proxy process, µs/req, {IN_FLIGHT} in flight; other: {checkouts['other']}", title_style=""
    )
    table.add_column("request", no_wrap=True)
    for column in (*checkouts, "this / other", "by round"):
        table.add_column(column, justify="right")
    for load in loads:
        this, other = (found[load.name, name] for name in checkouts)
        ratio = f"{min(this) / min(other):.3f}"
        table.add_row(load.name, f"{min(this):,.1f}", f"{min(other):,.1f}", ratio, _by_round(this, other))
    console.print(table)


def _by_round(this: Sequence[float], other: Sequence[float]) -> str:
    low, median, high = statistics.quantiles([one / another for one, another in zip(this, other, strict=True)])
    return f"{median:.3f} ({low:.2f}-{high:.2f})"


async def _take_turns(load: Load, proxies: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """CPU µs for a request, the least of RUNS; a first run of each proxy only warms it up."""
    requests = load.requests // (RUNS + 1)
    connections = {name: await load.open(port, 0) for name, (_, port) in proxies.items()}
    found: dict[str, list[float]] = {name: [] for name in proxies}
    for _ in range(RUNS + 1):
        for name, (pid, _) in proxies.items():
            before = cpu_seconds(pid)
            await send_again(connections[name], requests)
            found[name].append((cpu_seconds(pid) - before) / (requests * load.connections) * 1e6)
    for connection in chain.from_iterable(connections.values()):
        connection.close()
    return {name: min(costs[1:]) for name, costs in found.items()}


def _expect_own_code(checkout: Path) -> None:
    """A checkout that lacks kproxy would be measured with the installed one."""
    environment = environment_of(checkout)
    command = [sys.executable, "-c", "import kproxy; print(kproxy.__file__)"]
    if checkout.is_dir():
        found = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)  # noqa: S603
        if Path(found.stdout.strip()).is_relative_to(checkout):
            return
    raise SystemExit(f"{checkout} is no checkout of kproxy")

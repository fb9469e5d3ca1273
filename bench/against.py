"""`make bench SECTION=against AGAINST=path`: compare this checkout's proxy with another checkout's; three minutes.

Both stand before the same brokers and take turns with the same load, in the rows of `bench.quick` and `bench.paths`.
The other proxy runs the other checkout's code in this interpreter. Two processes of one program differ by some percent
as long as they live, so each round starts new ones. The least of all runs counts. Runs are many and short, because
quiet moments of a shared machine are short. Connections are open before a run begins.

`by round` is the median of the ratios within each round, and the range of the middle half of them. A neighbour on the
machine affects both proxies of a round, so this shows a small difference that the ratio of the minima does not show.
With the same code on both sides, 1 is within this range or next to it.
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

from bench.load import IN_FLIGHT, MANY_PARTITIONS, SHAPES, Load, send_again, shape_load
from bench.paths import path_loads, path_table
from bench.processes import cpu_seconds, table_of
from bench.quick import CHECKOUT, environment_of, serve

ROUNDS = 8
# For each row in each round; shorter by that much than in the other tables.
RUNS = 8


def against(console: Console, checkout: Path, rounds: int = ROUNDS, flags: Sequence[str] = ()) -> None:
    """Measure at least two rounds, and print the table. `flags` are this proxy's, to measure the cost of a feature.

    Raise SystemExit if there is no kproxy in `checkout`.
    """
    checkouts = {"this": CHECKOUT, "other": checkout.resolve()}
    for each in checkouts.values():
        _expect_own_code(each)
    loads = [*map(shape_load, (*SHAPES, *MANY_PARTITIONS)), *path_loads()]
    found: dict[tuple[str, str], list[float]] = {(load.name, name): [] for load in loads for name in checkouts}
    with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as directory, path_table(Path(directory)) as brokers:
        for number in range(rounds):
            # The order alternates from round to round.
            names = list(checkouts)[:: -1 if number % 2 else 1]
            with contextlib.ExitStack() as stack:
                proxies = {
                    name: stack.enter_context(
                        serve(brokers, *(flags if name == "this" else ()), checkout=checkouts[name])
                    )
                    for name in names
                }
                for load in loads:
                    for name, least in uvloop.run(_take_turns(load, proxies)).items():
                        found[load.name, name].append(least)
    title = f"CPU of the proxy process, µs/req, {IN_FLIGHT} in flight; other: {checkouts['other']}"
    table = table_of(title, ["request"], [*checkouts, "this / other", "by round"])
    for load in loads:
        this, other = (found[load.name, name] for name in checkouts)
        ratio = f"{min(this) / min(other):.3f}"
        table.add_row(load.name, f"{min(this):,.1f}", f"{min(other):,.1f}", ratio, _by_round(this, other))
    console.print(table)


def _by_round(this: Sequence[float], other: Sequence[float]) -> str:
    low, median, high = statistics.quantiles([one / another for one, another in zip(this, other, strict=True)])
    return f"{median:.3f} ({low:.2f}-{high:.2f})"


async def _take_turns(load: Load, proxies: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """Return the CPU µs for one request, the least of RUNS; the first run of each proxy only warms it up."""
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
    """Raise SystemExit if `checkout` lacks kproxy: the installed one would be measured instead."""
    environment = environment_of(checkout)
    command = [sys.executable, "-c", "import kproxy; print(kproxy.__file__)"]
    if checkout.is_dir():
        found = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)  # noqa: S603
        if Path(found.stdout.strip()).is_relative_to(checkout):
            return
    raise SystemExit(f"{checkout} is not a checkout of kproxy")

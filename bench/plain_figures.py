"""Evaluate the measurements of `bench.plain`: statistics, a fit, tables and JSON. Nothing here measures.

Two figures per contestant and shape stand for all rounds: the least CPU time of a request, which is the least
disturbed, and the median. A ratio is taken within a round, because both contestants have the same neighbours on the
machine; `lowest` and `highest` are over the rounds. `of_least` is the ratio of the two least times.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from rich.table import Table

from bench.load import CONNECTIONS, IN_FLIGHT, Shape

FORMAT = 1
DIRECT, HAPROXY, KPROXY = "direct", "haproxy", "kproxy"
PERCENTILES = (50, 99)
NO_HAPROXY = (
    "haproxy is not installed, so these figures show nothing about ratios: CPU time per request differs from machine "
    "to machine.\nInstall it with the system's package manager, such as `apt-get install haproxy`, and run this again."
)


class Peer(NamedTuple):
    """Another proxy, which the user has started."""

    name: str
    host: str
    port: int
    pid: int


def parse_peer(text: str) -> Peer:
    """Read `name=host:port,pid`. Raise ValueError with one sentence for anything else."""
    name, _, rest = text.partition("=")
    address, _, pid = rest.rpartition(",")
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (name and host and _within(port, 1 << 16) and _within(pid, 1 << 31)):
        raise ValueError(f"invalid peer {text!r}; expected name=host:port,pid")
    if name in (DIRECT, HAPROXY, KPROXY):
        raise ValueError(f"a peer cannot have the name {name!r}, which this table uses itself")
    return Peer(name, host, int(port), int(pid))


def _within(text: str, limit: int) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < limit


class Ratio(NamedTuple):
    """The ratio of one contestant's CPU time to haproxy's; see above."""

    of_least: float
    lowest: float
    median: float
    highest: float


def ratio(costs: Sequence[float], floor: Sequence[float]) -> Ratio:
    """Return the ratio of two contestants in the same rounds."""
    by_round = [one / other for one, other in zip(costs, floor, strict=True)]
    return Ratio(min(costs) / min(floor), min(by_round), statistics.median(by_round), max(by_round))


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the least value that at least this percentage of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


@dataclass
class Latency:
    """The latency of one contestant, by round: percentiles in µs."""

    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)

    def add(self, latencies_s: Sequence[float]) -> None:
        """Add the percentiles of one round."""
        self.p50.append(percentile(latencies_s, 50) * 1e6)
        self.p99.append(percentile(latencies_s, 99) * 1e6)

    def of(self, percent: int) -> list[float]:
        return self.p50 if percent == PERCENTILES[0] else self.p99


class Fit(NamedTuple):
    """CPU µs of a request: `request` + `partition` × partitions + `broker` × brokers + `megabyte` × MB.

    `errors` are those of each shape, relative to the measured time; above 0 the fit is too high.
    """

    request: float
    partition: float
    broker: float
    megabyte: float
    errors: list[float]

    def cpu_us(self, partitions: int, brokers: int, megabytes: float) -> float:
        return self.request + self.partition * partitions + self.broker * brokers + self.megabyte * megabytes


def fit(shapes: Sequence[Shape], request_bytes: Sequence[int], brokers: Sequence[int], costs: Sequence[float]) -> Fit:
    """Fit by least squares of the errors relative to the measured times, so that all shapes count the same."""
    import numpy

    rows = [
        [1.0, shape.partitions, others, size / 1e6]
        for shape, size, others in zip(shapes, request_bytes, brokers, strict=True)
    ]
    weights = 1 / numpy.array(costs)
    scaled = numpy.array(rows) * weights[:, None]
    found = numpy.linalg.lstsq(scaled, numpy.ones(len(costs)), rcond=None)[0]
    request, partition, broker, megabyte = map(float, found)
    return Fit(request, partition, broker, megabyte, [float(error) for error in scaled @ found - 1])


@dataclass
class Figures:
    """All measurements. By contestant: `cpu` and `rate` by shape and round, `latency` by round.

    `turns` are the longest turns of kproxy's event loop in ms, by section and round.
    """

    machine: dict[str, Any]
    shapes: Sequence[Shape]
    request_bytes: Sequence[int]
    brokers: Sequence[int]
    rate: int
    cpu: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    per_second: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    latency: dict[str, Latency] = field(default_factory=dict)
    turns: dict[str, list[float]] = field(default_factory=dict)

    @property
    def paced(self) -> str:
        """The name of the section at a fixed rate."""
        return f"{self.rate:,} req/s"

    @property
    def contestants(self) -> list[str]:
        return list(self.cpu)

    def add_run(self, contestant: str, shape: str, cpu_us: float, per_second: float) -> None:
        """Add the figures of one round."""
        self.cpu.setdefault(contestant, {}).setdefault(shape, []).append(cpu_us)
        self.per_second.setdefault(contestant, {}).setdefault(shape, []).append(per_second)

    def ratios(self, contestant: str) -> dict[str, Ratio]:
        """Return the ratios to haproxy, by shape; empty if haproxy was not measured."""
        floor = self.cpu.get(HAPROXY, {})
        return {shape: ratio(self.cpu[contestant][shape], costs) for shape, costs in floor.items()}

    def added(self, contestant: str, percent: int) -> list[float]:
        """Return the difference to the latency without a proxy in the same round, in µs."""
        beside = zip(self.latency[contestant].of(percent), self.latency[DIRECT].of(percent), strict=True)
        return [one - direct for one, direct in beside]

    def fit(self) -> Fit:
        """Return the fit of kproxy's least times."""
        costs = [min(self.cpu[KPROXY][shape.name]) for shape in self.shapes]
        return fit(self.shapes, self.request_bytes, self.brokers, costs)


def as_json(figures: Figures) -> dict[str, Any]:
    """Return every figure of every round, and the tables' content; times are µs unless the name says ms."""
    contestants = {}
    for name in figures.contestants:
        ratios = figures.ratios(name)
        contestants[name] = {
            shape: {
                "cpu_us": {"rounds": costs, "least": min(costs), "median": statistics.median(costs)},
                "requests_per_second": figures.per_second[name][shape],
                "times_haproxy": ratios[shape]._asdict() if shape in ratios else None,
            }
            for shape, costs in figures.cpu[name].items()
        }
    latency = {
        name: {
            f"p{percent}": {
                "rounds_us": found.of(percent),
                "least_us": min(found.of(percent)),
                "median_us": statistics.median(found.of(percent)),
                "added_median_us": statistics.median(figures.added(name, percent)),
            }
            for percent in PERCENTILES
        }
        for name, found in figures.latency.items()
    }
    return {
        "format": FORMAT,
        "machine": figures.machine,
        "connections": CONNECTIONS,
        "in_flight": IN_FLIGHT,
        "shapes": [
            {**asdict(shape), "request_bytes": size, "brokers": brokers}
            for shape, size, brokers in zip(figures.shapes, figures.request_bytes, figures.brokers, strict=True)
        ],
        "contestants": contestants,
        "latency": {"requests_per_second": figures.rate, "contestants": latency},
        "longest_turn_ms": {name: {"rounds": found, "highest": max(found)} for name, found in figures.turns.items()},
        "fit": figures.fit()._asdict(),
    }


def number(value: float, digits: int) -> str:
    """Format a number; one from a thousand on has no decimal places."""
    return f"{value:,.{digits if abs(value) < 1000 else 0}f}"


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median, and in brackets the lowest and the highest."""
    return f"{number(statistics.median(values), digits)}\n({number(min(values), digits)}–{number(max(values), digits)})"


def ratio_cell(found: Ratio) -> str:
    """Return the median, in brackets the lowest and the highest, and the ratio of the least times."""
    return f"{found.median:.2f}\n({found.lowest:.2f}–{found.highest:.2f})\n{found.of_least:.2f}"


def _table(first: str, columns: Sequence[str]) -> Table:
    table = Table(padding=(0, 0, 0, 1), show_lines=True)
    for column in (first, *columns):
        table.add_column(column, justify="left" if column == first else "right", no_wrap=True)
    return table


def tables(figures: Figures) -> list[tuple[str, Table]]:
    """Return the tables to print, each with its heading."""
    cpu = (
        "CPU time of the proxy for a request, µs: the median of the rounds (lowest–highest);\n"
        f"partitions × batch; {CONNECTIONS} connections, {IN_FLIGHT} requests in flight on each"
    )
    ratios = (
        "The same as a multiple of haproxy's: the median of the rounds' ratios (lowest–highest), and below it the "
        "ratio of the least times"
    )
    latency = (
        f"Latency at {figures.rate:,} requests/s of {figures.shapes[0].name}, µs: the median of the rounds "
        "(lowest–highest); added: to direct"
    )
    turns = "The longest turn of kproxy's event loop, ms of CPU time: the median of the rounds (lowest–highest)"
    found = [(cpu, cpu_table(figures))]
    if HAPROXY in figures.cpu:
        found.append((ratios, ratio_table(figures)))
    return [*found, (latency, latency_table(figures)), (turns, turns_table(figures))]


def cpu_table(figures: Figures) -> Table:
    table = _table("CPU µs", [shape.name for shape in figures.shapes])
    for name, by_shape in figures.cpu.items():
        table.add_row(name, *(spread(by_shape[shape.name], 1) for shape in figures.shapes))
    return table


def ratio_table(figures: Figures) -> Table:
    """Return a table with a row for each contestant but haproxy."""
    table = _table("× haproxy", [shape.name for shape in figures.shapes])
    for name in figures.contestants:
        if name != HAPROXY:
            ratios = figures.ratios(name)
            table.add_row(name, *(ratio_cell(ratios[shape.name]) for shape in figures.shapes))
    return table


def latency_table(figures: Figures) -> Table:
    table = _table("latency", [f"{what}p{percent}" for percent in PERCENTILES for what in ("", "added ")])
    for name, found in figures.latency.items():
        cells = []
        for percent in PERCENTILES:
            cells.append(spread(found.of(percent), 0))
            cells.append("" if name == DIRECT else spread(figures.added(name, percent), 0))
        table.add_row(name, *cells)
    return table


def turns_table(figures: Figures) -> Table:
    table = _table("turn", list(figures.turns))
    table.add_row(KPROXY, *(spread(found, 1) for found in figures.turns.values()))
    return table


def fit_text(found: Fit) -> str:
    """Return the fitted rule and its errors as text."""
    worst = max(map(abs, found.errors))
    average = statistics.fmean(map(abs, found.errors))
    return (
        f"CPU µs of kproxy for a request ≈ {found.request:.1f} + {found.partition:.2f} × partitions + "
        f"{found.broker:.1f} × brokers + {found.megabyte:.0f} × MB, fitted to the least times;\n"
        f"for the shapes above that is off by {100 * worst:.0f} % at most, and by {100 * average:.0f} % on average"
    )

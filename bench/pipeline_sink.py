"""Measure rows a second of Spark's Kafka sink: directly to brokers, and through the proxy before the same brokers.

Three brokers of Apache Kafka, a proxy that learns the owners from them, and Spark in local mode, all on this machine.
The rows are in Spark's memory: once as messages, so that a run is the sink and nothing else, and once as columns that
the job turns into JSON. Producers have their defaults, idempotent and with acks=all. Topics have one replica: the
brokers' work for replication would hide the proxy's cost. Runs with and without the proxy take turns, in pairs of
alternating order, and the median of the pairs' ratios counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from bench.pipeline_cluster import BROKERS, DIRECT, PARTITIONS, VIA_PROXY, WAYS, Cluster, Topic, cluster
from bench.processes import scratch, table_of
from bench.table import judged
from kproxy.demo.flights import KEY_COLUMN, NULL, TOTAL_ROWS, locate_archive, write_files
from kproxy.demo.stream import SCHEMA

GOAL_PERCENT = 98.0
PAIRS = 7
WARM_UP_PAIRS = 2
READY_ROWS = 400_000
READY_BYTES = 200


class _Run(NamedTuple):
    """Rows a second; CPU ms for 1,000 rows, by process."""

    rate: float
    cpu_ms: dict[str, float]


class _Work:
    """One kind of rows, and the results of its runs."""

    def __init__(self, name: str, rows: Any, count: int) -> None:
        self.name = name
        self.rows = rows
        self.count = count
        self.runs: dict[str, list[_Run]] = {way: [] for way in WAYS}

    @property
    def ratios(self) -> list[float]:
        """Percent of the rate without the proxy, pair by pair."""
        pairs = zip(self.runs[VIA_PROXY], self.runs[DIRECT], strict=True)
        return [100 * through.rate / past.rate for through, past in pairs]


class _Runs:
    """All runs, one after the other."""

    def __init__(self, running: Cluster, works: list[_Work]) -> None:
        self.works = works
        self.sent = 0
        self.missing = 0
        self._cluster = running

    def make(self) -> None:
        for number in range(-WARM_UP_PAIRS, PAIRS):
            for place, work in enumerate(self.works):
                with Topic(self._cluster.kafka, f"rows-{number + WARM_UP_PAIRS}-{place}") as topic:
                    for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                        run = self._run(topic, work, way)
                        if number >= 0:
                            work.runs[way].append(run)
                    sent = work.count * len(WAYS)
                    self.sent += sent
                    self.missing += sent - topic.records()

    def _run(self, topic: Topic, work: _Work, way: str) -> _Run:
        before, began = self._cluster.cpu(), time.monotonic()
        options = {"kafka.bootstrap.servers": self._cluster.bootstraps[way], "topic": topic.name}
        work.rows.write.format("kafka").options(**options).save()
        seconds = time.monotonic() - began
        after = self._cluster.cpu()
        return _Run(work.count / seconds, {name: (after[name] - before[name]) * 1e6 / work.count for name in after})


def _ready(session: Any) -> _Work:
    numbers = session.range(0, READY_ROWS, 1, PARTITIONS)
    digits = "sha2(cast(id as string), 512)"
    value = f"substring(concat({digits}, {digits}), 1, {READY_BYTES})"
    rows = _held(numbers.selectExpr("cast(id as string) as key", f"{value} as value"))
    return _Work(f"messages of {READY_BYTES} bytes, ready to be sent", rows, READY_ROWS)


def _flights(session: Any, directory: Path) -> _Work:
    flights = write_files(locate_archive(), directory, rows=TOTAL_ROWS, files=1)
    reader = session.read.schema(SCHEMA).option("header", True).option("nullValue", NULL)
    rows = _held(reader.csv(str(flights.directory)).repartition(PARTITIONS))
    value = f"to_json(struct({', '.join(rows.columns)})) as value"
    return _Work("flights, made JSON on the way", rows.selectExpr(f"{KEY_COLUMN} as key", value), TOTAL_ROWS)


def _held(rows: Any) -> Any:
    """Keep the rows in Spark's memory from now on."""
    held = rows.persist()
    held.count()
    return held


def sink(console: Console) -> None:
    """Measure, and print the tables. Raise StartupError if Java, Spark or one of Kafka's jars is missing."""
    with scratch() as (_, directory), cluster(directory) as running:
        runs = _Runs(running, [_ready(running.session), _flights(running.session, directory / "flights")])
        runs.make()
        console.print(_rates(runs.works))
        console.print(_costs(runs.works))
        for note in _notes(runs):
            console.print(f"- {note}", highlight=False)


def _rates(works: list[_Work]) -> Table:
    title = f"Rows a second of Spark's Kafka sink; {BROKERS} brokers of Apache Kafka, {PARTITIONS} partitions, "
    title += f"median of {PAIRS} pairs of runs"
    table = table_of(title, ["rows"], [*WAYS, "goal", "ratio", "lowest", "highest"])
    for work in works:
        rates = [statistics.median(run.rate for run in work.runs[way]) for way in WAYS]
        ratio = statistics.median(work.ratios)
        cell = judged(f"{ratio:.1f} %", met=ratio >= GOAL_PERCENT)
        ends = (f"{each:.1f} %" for each in (min(work.ratios), max(work.ratios)))
        table.add_row(work.name, *(f"{rate:,.0f}" for rate in rates), f"≥ {GOAL_PERCENT:g} %", cell, *ends)
    return table


def _costs(works: list[_Work]) -> Table:
    names = list(works[0].runs[DIRECT][0].cpu_ms)
    table = table_of("CPU ms for 1,000 rows, median", ["rows, way"], [*names, "in all"])
    for work in works:
        for way, runs in work.runs.items():
            medians = [statistics.median(run.cpu_ms[name] for run in runs) for name in names]
            table.add_row(f"{work.name}, {way}", *(f"{value:.2f}" for value in (*medians, sum(medians))))
    return table


def _notes(runs: _Runs) -> Iterator[str]:
    if runs.missing:
        what = f"{runs.missing:,} are in no log" if runs.missing > 0 else f"{-runs.missing:,} are there twice"
        yield f"[red]Of {runs.sent:,} rows sent, {what}.[/red]"
    else:
        yield f"All {runs.sent:,} rows sent are in the logs, once each."
    yield (
        f"Spark, the brokers and the proxy share this machine's {psutil.cpu_count()} cores. A run keeps them busy, "
        "so what the proxy takes of them is not there for Spark and the brokers: with a core of its own it costs less."
    )

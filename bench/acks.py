"""`make bench SECTION=acks`: throughput and latency at acks 0, 1 and all, with and without the proxy; three minutes.

Real processes: Kafka's own ProducerPerformance tool with 100-byte records, `kproxy serve`, three `kproxy broker`, one
etcd, all on this machine. Runs with and without the proxy take turns, in pairs of alternating order, and the median of
each counts: other load on this machine affects both alike. A run begins when the followers have all records of the run
before. Replication is measured on the log files (`bench.replicas`), not by what brokers report.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from rich.console import Console
from rich.table import Table

from bench.acks_cluster import DIRECT, PARTITIONS, VIA_PROXY, WAYS, Cluster, Topic, cluster
from bench.brokers import BROKERS
from bench.java_load import RECORD_BYTES
from bench.replicas import LagWatch, Settled, wait_settled
from bench.table import judged
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.errors import StartupError

REPLICATION_FACTOR = 3
ACKS = ("0", "1", "all")

ROUNDS = 3
WARM_UP_RECORDS = 100_000
LEAST_RECORDS = 20_000
RUN_S = 2.0
LATENCY_ROUNDS = 3
LATENCY_RATE = 500
LATENCY_RECORDS = 2_000
LATENCY_WARM_UP = 500
LAG_S = 5.0

RATE_GOALS = {"0": 100_000, "1": 50_000, "all": 20_000}
P50_GOALS_MS = {"1": 5, "all": 10}
LAG_GOAL_MS = 100


@dataclass
class Found:
    """The results of one kind of runs: one value of `acks`, by one way."""

    rates: list[float] = field(default_factory=list)
    tails_s: list[float] = field(default_factory=list)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    p50_ms: list[int] = field(default_factory=list)
    p99_ms: list[int] = field(default_factory=list)


class _Runs:
    """All runs, one after the other, and their results."""

    def __init__(self, cluster: Cluster, replication_factor: int, partitions: int) -> None:
        self.replication_factor = replication_factor
        self.partitions = partitions
        self.found = {(acks, way): Found() for acks in ACKS for way in WAYS}
        self.lags: dict[str, LagWatch] = {}
        self.sent = 0
        self.missing = 0
        self.fewest_in_sync = replication_factor
        self._cluster = cluster

    def make(self) -> None:
        with self._topic("warm-up") as topic:
            rates = {(acks, way): self._send(topic, acks, way, WARM_UP_RECORDS)[0] for acks in ACKS for way in WAYS}
        # The data of the warm-up must be on the disk, and the data of the full-speed run must not be there yet:
        # otherwise the measurement would be of a disk that is busy with hundreds of megabytes.
        os.sync()
        with self._topic("latency") as topic:
            for acks in P50_GOALS_MS:
                self._latency(topic, acks)
        for acks in ACKS:
            with self._topic(f"acks-{acks}") as topic:
                for way in _turns(ROUNDS):
                    records = max(LEAST_RECORDS, int(rates[acks, way] * RUN_S) // 1000 * 1000)
                    self._throughput(topic, acks, way, records)
                if acks in P50_GOALS_MS:
                    self._lag(topic, acks)

    @contextlib.contextmanager
    def _topic(self, name: str) -> Iterator[Topic]:
        with Topic(self._cluster, name, self.replication_factor, self.partitions) as topic:
            yield topic
            self.sent += topic.sent
            self.missing += topic.missing()

    def _send(self, topic: Topic, acks: str, way: str, records: int, throughput: int = -1) -> tuple[float, float]:
        """Send records; return the rate up to the last in its leader's log, and the followers' delay in seconds."""
        run = self._cluster.java.run(
            self._cluster.bootstraps[way], topic.name, records, throughput=throughput, acks=acks
        )
        settled = self._settle(topic, records)
        # With acks=0 the tool is done when it has handed over the last record.
        late_s = max(0.0, settled.leaders - run.ended) if acks == "0" else 0.0
        return run.records / (run.seconds + late_s), max(0.0, settled.followers - run.ended)

    def _settle(self, topic: Topic, records: int) -> Settled:
        topic.sent += records
        self.fewest_in_sync = min(self.fewest_in_sync, topic.in_sync())
        return wait_settled(topic.replicas)

    def _throughput(self, topic: Topic, acks: str, way: str, records: int) -> None:
        found = self.found[acks, way]
        before = self._cluster.cpu()
        rate, tail_s = self._send(topic, acks, way, records)
        found.rates.append(rate)
        found.tails_s.append(tail_s)
        for name, after in self._cluster.cpu().items():
            found.cpu_ms.setdefault(name, []).append((after - before[name]) * 1e3 / (records / 1000))

    def _latency(self, topic: Topic, acks: str) -> None:
        for way in _turns(LATENCY_ROUNDS):
            run = self._cluster.java.run(
                self._cluster.bootstraps[way],
                topic.name,
                LATENCY_RECORDS,
                throughput=LATENCY_RATE,
                warm_up=LATENCY_WARM_UP,
                acks=acks,
                linger_ms=0,
            )
            self.found[acks, way].p50_ms.append(run.p50_ms)
            self.found[acks, way].p99_ms.append(run.p99_ms)
            self._settle(topic, LATENCY_RECORDS)

    def _lag(self, topic: Topic, acks: str) -> None:
        """Measure the followers' lag at half the rate that was reached through the proxy."""
        rate = int(self.rate(acks, VIA_PROXY) / 2)
        with LagWatch(topic.replicas) as watch:
            self._send(topic, acks, VIA_PROXY, int(rate * LAG_S), throughput=rate)
        self.lags[acks] = watch

    def rate(self, acks: str, way: str) -> float:
        return statistics.median(self.found[acks, way].rates)


def _turns(rounds: int) -> Iterator[str]:
    """Yield the proxy and the direct way in pairs; each pair reverses the order of the pair before."""
    for number in range(rounds):
        yield from (VIA_PROXY, DIRECT) if number % 2 == 0 else (DIRECT, VIA_PROXY)


def _results(runs: _Runs) -> Table:
    title = f"ProducerPerformance, {RECORD_BYTES}-byte records; {BROKERS} brokers, {runs.partitions} partitions, "
    table = Table(title=f"{title}replication factor {runs.replication_factor}", title_style="")
    table.add_column("what")
    for column in ("goal", "through kproxy", "past it"):
        table.add_column(column, justify="right", no_wrap=True)
    for acks, least in RATE_GOALS.items():
        through, past = (runs.rate(acks, way) for way in WAYS)
        cell = judged(f"{through:,.0f} /s", met=through >= least)
        table.add_row(f"records, acks={acks}", f"≥ {least:,} /s", cell, f"{past:,.0f} /s")
    for acks, limit in P50_GOALS_MS.items():
        through, past = (statistics.median(runs.found[acks, way].p50_ms) for way in WAYS)
        cell = judged(_whole_ms(through), met=through <= limit)
        table.add_row(f"latency at {LATENCY_RATE} /s, acks={acks}, p50", f"≤ {limit} ms", cell, _whole_ms(past))
        through, past = (statistics.median(runs.found[acks, way].p99_ms) for way in WAYS)
        table.add_row("   p99", "", _whole_ms(through), _whole_ms(past))
    for acks, watch in runs.lags.items():
        name, goal = f"replication lag at {runs.rate(acks, VIA_PROXY) / 2:,.0f} /s, acks={acks}", f"≤ {LAG_GOAL_MS} ms"
        if runs.replication_factor == 1:
            table.add_row(name, goal, "no followers", "")
            continue
        cuts = [cut * 1e3 for cut in statistics.quantiles(watch.lags, n=100)]
        table.add_row(f"{name}, p99", goal, judged(f"{cuts[98]:,.1f} ms", met=cuts[98] <= LAG_GOAL_MS), "")
        table.add_row("   p50, longest", "", f"{cuts[49]:,.1f} ms, {max(watch.lags) * 1e3:,.1f} ms", "")
    return table


def _whole_ms(latency: float) -> str:
    return f"{latency:g} ms" if latency >= 1 else "< 1 ms"


def _costs(runs: _Runs, pids: dict[str, list[int]]) -> Table:
    table = Table(title="CPU ms for 1,000 records at full speed", title_style="")
    table.add_column("acks, way")
    for name in (*pids, "in all"):
        table.add_column(name, justify="right", no_wrap=True)
    for (acks, way), found in runs.found.items():
        medians = [statistics.median(found.cpu_ms[name]) for name in pids]
        table.add_row(f"{acks}, {way}", *(f"{value:.2f}" for value in (*medians, sum(medians))))
    return table


def _notes(runs: _Runs) -> Iterator[str]:
    yield (
        f"Records a second: the producer's defaults; median of {ROUNDS} runs of about {RUN_S:g} s each way. With "
        "acks=0 the clock stops when the last record is in a leader's log."
    )
    yield (
        f"Latency: from send to callback, in whole ms as the tool has it; median of {LATENCY_ROUNDS} runs each way, "
        "with linger.ms=0: its default of 5 ms is the producer's own wait."
    )
    if runs.replication_factor > 1:
        looks_ms = max(watch.seconds / watch.polls for watch in runs.lags.values()) * 1e3
        yield (
            "Replication lag: from the growth of a leader's log file to the same length of a follower's, at half of "
            f"the rate above, seen by looking at the files every {looks_ms:.1f} ms."
        )
        tails = [(acks, statistics.median(runs.found[acks, VIA_PROXY].tails_s) * 1e3) for acks in ACKS]
        behind = ", ".join(f"{tail:,.0f} ms (acks={acks})" for acks, tail in tails)
        yield f"At full speed the last follower had everything this long after the producer was done: {behind}."
    if runs.fewest_in_sync < runs.replication_factor:
        few = f"Only {runs.fewest_in_sync} replicas were in sync for a time: acks=all waited for these alone."
        yield f"[red]{few}[/red]"
    if runs.missing:
        what = f"{runs.missing:,} are in no log" if runs.missing > 0 else f"{-runs.missing:,} are there twice"
        yield f"[red]Of {runs.sent:,} records sent, {what}.[/red]"
    else:
        yield f"All {runs.sent:,} records sent are in the logs, once each."
    yield "The load generator and all processes share this machine's cores: a rate is what they reach together."


def _measure(console: Console, etcd: EmbeddedEtcd, directory: Path, replication_factor: int, partitions: int) -> None:
    with cluster(etcd, directory) as running:
        runs = _Runs(running, replication_factor, partitions)
        runs.make()
        console.print(_results(runs))
        console.print(_costs(runs, running.pids))
        for note in _notes(runs):
            console.print(f"- {note}", highlight=False)


async def _run(console: Console, replication_factor: int, partitions: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as name:
        directory = Path(name)
        async with EmbeddedEtcd(directory / "etcd") as etcd:
            await asyncio.to_thread(_measure, console, etcd, directory, replication_factor, partitions)


def acks(console: Console, replication_factor: int = REPLICATION_FACTOR, partitions: int = PARTITIONS) -> None:
    """Measure, and print the tables. Raise SystemExit if Java, etcd or one of Kafka's jars is missing."""
    try:
        asyncio.run(_run(console, replication_factor, partitions))
    except StartupError as error:
        raise SystemExit(str(error)) from error

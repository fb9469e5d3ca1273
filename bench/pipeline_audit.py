"""Measure the time and memory of an audit of ten million ranges, in Spark's local mode.

The trail and the logs' batch headers are generated inside Spark and written to files, because reading them from a
cluster is not measured. One batch is removed from the log, to show whether the audit has read all of it.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from bench.audit_synthetic import (
    BEGAN_AT,
    Shape,
    log_chunks,
    synthetic_bounds,
    synthetic_log,
    synthetic_trail,
    trail_rows,
)
from bench.processes import peak_resident_bytes, table_of
from bench.table import judged
from kproxy.pipeline.audit.bags import Bag
from kproxy.pipeline.audit.columns import LOST
from kproxy.pipeline.audit.rules import AuditRules
from kproxy.pipeline.audit.run_spark import OnSpark, RddBag, spark_in, write_results
from kproxy.pipeline.audit.steps import audit_bags
from kproxy.pipeline.session import SessionOptions, open_session

RANGES = 10_000_000
HEAP = "2g"
# Long after the last range was acknowledged.
READ_AT_MS = BEGAN_AT + 10**9
_KIB = 1 << 10
_MIB = 1 << 20


class _Found(NamedTuple):
    """The audit's result: `missing` records are reported as lost, `taken_out` records were removed."""

    shape: Shape
    made_s: float
    seconds: float
    acked: int
    missing: list[tuple[str, int, int, int]]
    taken_out: tuple[str, int, int, int]
    kinds: set[str]

    @property
    def is_right(self) -> bool:
        """Whether the audit found the missing batch, and nothing else."""
        shape = self.shape
        acked = shape.ranges * shape.spans * shape.batches * shape.records
        return self.acked == acked and self.missing == [self.taken_out] and self.kinds == {LOST}


def _works(ranges: int) -> dict[str, Shape]:
    return {
        "each of one span": Shape(ranges=ranges),
        "a quarter as many, of four spans between those of three others": Shape(
            ranges=ranges // 4, producers=4, spans=4
        ),
    }


def _audit(session: Any, shape: Shape, directory: Path) -> _Found:
    began, results = time.monotonic(), str(directory / "results")
    with spark_in(session, str(directory / "work")) as engine:
        rows, log, taken_out = _made(session, shape, engine)
        made = time.monotonic()
        batches = shape.ranges * shape.spans * shape.batches
        bits, groups = engine.buckets(shape.ranges, batches)
        rules, bounds = AuditRules(read_at_ms=READ_AT_MS), synthetic_bounds(shape)
        found = audit_bags(rows, log, bounds, rules, bits=bits, groups=groups)
        write_results(session, found, results, {})
        seconds = time.monotonic() - made
        findings = list(found.findings)
        acked = sum(row["acked"] for row in found.partitions)
    lost = [row for row in findings if row["kind"] == LOST]
    missing = [(row["topic"], row["partition"], row["first_offset"], row["records"]) for row in lost]
    kinds = {row["kind"] for row in findings}
    return _Found(shape, made - began, seconds, acked, missing, taken_out, kinds)


def _made(session: Any, shape: Shape, engine: OnSpark) -> tuple[Bag, Bag, tuple[str, int, int, int]]:
    """Return trail, log, and the batch that the log lacks: topic, partition, offset and number of records."""
    log = synthetic_log(session, shape)
    middle = shape.ranges // shape.logs // 2 * shape.records
    is_it = f"topic = 'topic-1' and partition = 1 and base_offset = {middle}"
    rows = RddBag(engine, synthetic_trail(session, shape).rdd).over(trail_rows).kept("made-trail")
    chunks = RddBag(engine, log.where(f"not ({is_it})").rdd).over(log_chunks).kept("made-log")
    return rows, chunks, ("topic-1", 1, middle, shape.records)


def audit(console: Console, directory: Path, ranges: int = RANGES) -> None:
    """Measure, and print the table. Raise StartupError if Java or Spark is missing."""
    with open_session(SessionOptions("kproxy bench", master="local[2]", memory=HEAP)) as spark:
        found = {
            name: _audit(spark.session, shape, directory / str(number))
            for number, (name, shape) in enumerate(_works(ranges).items())
        }
        jvm = peak_resident_bytes(spark.process.pid) if spark.process is not None else None
        console.print(_table(found))
    console.print(f"- Spark in local mode on {psutil.cpu_count()} cores, with a heap of {HEAP}.", highlight=False)
    console.print(f"- At their peaks: the JVM {_mib(jvm)}, Python {_mib(_own_peak_bytes())}.", highlight=False)


def _own_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB


def _mib(count: int | None) -> str:
    return "not known here" if count is None else f"{count / _MIB:,.0f} MiB"


def _table(found: dict[str, _Found]) -> Table:
    title = "An audit of what was made up, one batch of it missing in the log"
    table = table_of(title, ["ranges"], ["ranges", "batches in logs", "audit", "ranges a second", "finds"])
    for name, each in found.items():
        shape = each.shape
        batches = shape.ranges * shape.spans * shape.batches
        verdict = judged("that one" if each.is_right else "something else", met=each.is_right)
        rate = f"{shape.ranges / each.seconds:,.0f}"
        table.add_row(name, f"{shape.ranges:,}", f"{batches - 1:,}", f"{each.seconds:,.0f} s", rate, verdict)
    return table

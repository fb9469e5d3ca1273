"""`make bench SECTION=jobs`: the CPU time of small audits and ingests, from the command's start to its end.

An audit of 200 records, one of a million, and an ingest of 5,000 files of three rows, before the reference brokers of
`kproxy dev`. With `--beside CHECKOUT` another one runs the same commands by turns, with this one's dependencies. CPU is
that of a command and of the processes that it started and awaited.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import confluent_kafka
from rich.console import Console
from rich.table import Table

from bench.processes import child, first_line, table_of
from bench.quick import CHECKOUT, environment_of

ROUNDS = 3
RECORDS = (200, 1_000_000)
RECORD = b"r" * 100
TOPIC = "records"
FILES, ROWS = 5_000, 3
# By then the proxy has shipped the trail of what it acknowledged.
SHIPPED_S = 20.0
FLUSH_TIMEOUT_S = 300.0


class Used(NamedTuple):
    """CPU and elapsed seconds of a command, and its exit status."""

    cpu: float
    elapsed: float
    status: int


Works = dict[tuple[str, str], list[Used]]


def jobs(console: Console, against: Path | None = None) -> None:
    """Measure, and print the table; `against` is another checkout."""
    checkouts = {"this": CHECKOUT} if against is None else {"this": CHECKOUT, "against": against.resolve()}
    works: Works = {}

    def measure(work: str, command: Callable[[str], list[str]]) -> None:
        for number in range(ROUNDS):
            for name, checkout in checkouts.items():
                used = _run(checkout, command(f"{name}-{number}"))
                works.setdefault((work, name), []).append(used)

    with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as directory:
        for records in RECORDS:
            with _dev(Path(directory, f"dev-{records}")) as kafka:
                _produce(kafka, records)
                time.sleep(SHIPPED_S)
                audit = ["audit", "--bootstrap", kafka, "--topics", TOPIC]
                measure(f"audit of {records:,} records", lambda run, audit=audit: audit)  # type: ignore[misc]
        files = _files(Path(directory, "in"))
        with _dev(Path(directory, "dev-files")) as kafka:
            ingest = ["ingest", "--from", f"csv:{files}", "--bootstrap", kafka, "--partitions", "3"]
            where = f"{directory}/checkpoint-"
            measure(f"ingest of {FILES:,} files", lambda run: [*ingest, "--topic", run, "--checkpoint", where + run])
    console.print(_table(works))


@contextlib.contextmanager
def _dev(directory: Path) -> Iterator[str]:
    addresses = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data-dir", str(directory))
    with child(sys.executable, "-m", "kproxy", "dev", *addresses) as process:
        yield first_line(process).partition("kafka=")[2].split()[0]


def _produce(kafka: str, records: int) -> None:
    """Write the records. Raise SystemExit if some are not acknowledged."""
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka, "linger.ms": 20, "enable.idempotence": True})
    for _ in range(records):
        while len(producer) > 50_000:
            producer.poll(0.05)
        producer.produce(TOPIC, RECORD)
    if left := producer.flush(FLUSH_TIMEOUT_S):
        raise SystemExit(f"{left:,} records were not acknowledged")


def _files(directory: Path) -> Path:
    directory.mkdir()
    for file in range(FILES):
        rows = "".join(f"{file * ROWS + row},text {row}\n" for row in range(ROWS))
        (directory / f"{file:05}.csv").write_text(f"n,t\n{rows}")
    return directory


def _run(checkout: Path, command: list[str]) -> Used:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    ended = subprocess.run(  # noqa: S603 -- our own commands
        [sys.executable, "-m", "kproxy", "pipeline", *command],
        cwd=checkout,
        env=environment_of(checkout),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    elapsed, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Used(cpu, elapsed, ended.returncode)


def _table(works: Works) -> Table:
    numbers = ("CPU s", "lowest", "highest", "elapsed s", "exit statuses")
    table = table_of(f"Spark jobs and audits, median of {ROUNDS} runs", ["work", "checkout"], numbers)
    for (work, name), runs in works.items():
        cpu = [run.cpu for run in runs]
        figures = (statistics.median(cpu), min(cpu), max(cpu), statistics.median(run.elapsed for run in runs))
        statuses = ", ".join(str(run.status) for run in runs)
        table.add_row(work, name, *(f"{each:.1f}" for each in figures), statuses)
    return table

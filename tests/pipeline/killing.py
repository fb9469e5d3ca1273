"""Run jobs that are killed while they stream: their files, and their progress as their topic shows it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import confluent_kafka
import psutil

from tests.support.clients.kafka_io import Placed

STEP_TIMEOUT_S = 240.0
KEYS = 17
# A request has one or two records, so that a micro-batch is long enough to be killed halfway.
SLOWLY = {"batch.size": "150", "linger.ms": "0", "max.in.flight.requests.per.connection": "1"}


class Job:
    """A process with Spark in it; its output goes to the file `said`."""

    def __init__(self, command: Sequence[str | Path], directory: Path, name: str) -> None:
        self.said = directory / name
        with self.said.open("wb") as said:
            # The test's directory keeps what a killed process cannot remove.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, "TMPDIR": str(directory)},
            )

    def kill(self) -> None:
        """kill -9 the process and its JVM, one right after the other."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in processes:
            # The JVM ends by itself when its parent is gone.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes[1:], timeout=60)
        self.process.wait(60)

    async def ended(self) -> int:
        async with asyncio.timeout(STEP_TIMEOUT_S):
            while self.process.poll() is None:
                await asyncio.sleep(0.1)
        return self.process.returncode


@contextlib.asynccontextmanager
async def running(command: Sequence[str | Path], directory: Path, name: str) -> AsyncIterator[Job]:
    job = Job(command, directory, name)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.kill()


class Watched:
    """The number of records in a topic, as the proxy reports it."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        settings = {"bootstrap.servers": bootstrap, "group.id": "unused", "log_level": 0}
        self._topic = topic
        self._partitions = partitions
        self._consumer = confluent_kafka.Consumer(settings)

    def _end(self, partition: int) -> int:
        try:
            return self._consumer.get_watermark_offsets(confluent_kafka.TopicPartition(self._topic, partition), 5.0)[1]
        except confluent_kafka.KafkaException:
            # The partition has no owner just now.
            return 0

    def count(self) -> int:
        return sum(map(self._end, range(self._partitions)))

    async def until(self, least: int, job: Job) -> int:
        """Wait for this many, while `job` runs."""
        async with asyncio.timeout(STEP_TIMEOUT_S):
            while (count := await asyncio.to_thread(self.count)) < least:
                assert job.process.poll() is None, job.said.read_text()
                await asyncio.sleep(0.05)
        return count

    def close(self) -> None:
        self._consumer.close()


def committed(checkpoint: Path) -> int:
    """The number of committed micro-batches."""
    return sum(1 for each in (checkpoint / "commits").glob("*") if each.name.isdigit())


def write_files(directory: Path, files: int, rows: int, corrupt: str = "") -> None:
    """Write rows numbered from 0 on, in files of which each is older than the next; a `corrupt` row may end each."""
    directory.mkdir(exist_ok=True)
    for file in range(files):
        path = directory / f"{file:03}.csv"
        lines = [f"{n},key-{n % KEYS}\n" for n in range(file * rows, (file + 1) * rows)]
        path.write_text("".join(["n,k\n", *lines, *([f"{corrupt},{file}\n"] if corrupt else [])]))
        os.utime(path, (1_700_000_000 + file, 1_700_000_000 + file))


def number_of(record: Placed) -> int:
    """The number of a record's row."""
    number: int = json.loads(record.value or b"")["n"]
    return number


def assert_in_order(records: Iterable[Placed]) -> None:
    """The rows of each key are in order."""
    by_key: dict[bytes | None, list[int]] = {}
    for record in records:
        by_key.setdefault(record.key, []).append(number_of(record))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())

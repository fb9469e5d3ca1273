"""Jobs that are killed while they stream, and their progress as their topic shows it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import confluent_kafka
import psutil

STEP_TIMEOUT_S = 240.0


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

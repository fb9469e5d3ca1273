"""Run Kafka's own ProducerPerformance tool as the load: one Java process makes one run after another."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

from bench.processes import child, first_line
from kproxy.pipeline.java import find_java
from tests.support.brokers.kafka_jars import kafka_classpath, pyspark_jars

RECORD_BYTES = 100
# Kafka's own script starts it in the same way.
_OPTIONS = ("-Xmx512M",)
_SOURCE = Path(__file__).with_name("PerformanceRuns.java")
_SUMMARY = re.compile(
    r"(?P<records>\d+) (?:steady state )?records sent, (?P<rate>[\d.]+) records/sec .*?"
    r"(?P<mean>[\d.]+) ms avg latency, (?P<longest>[\d.]+) ms max latency, "
    r"(?P<p50>\d+) ms 50th, \d+ ms 95th, (?P<p99>\d+) ms 99th"
)


class Run(NamedTuple):
    """The tool's report of a run: records per second by the tool's own clock, and latencies in whole ms, each from
    `send` to its callback. `ended` is the time of the report, on time.monotonic.
    """

    records: int
    rate: float
    p50_ms: int
    p99_ms: int
    ended: float

    @property
    def seconds(self) -> float:
        return self.records / self.rate


class JavaLoad:
    """The running tool. All calls block."""

    def __init__(self, process: Popen[str], stderr_path: Path) -> None:
        self._process = process
        self._stderr_path = stderr_path

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(
        self, bootstrap: str, topic: str, records: int, *, throughput: int = -1, warm_up: int = 0, **settings: object
    ) -> Run:
        """Send `records`, at most `throughput` a second; the figures leave out the first `warm_up` of them.

        `settings` are the producer's, with _ for each dot. Raise SystemExit if the run fails.
        """
        arguments = ["--bootstrap-server", bootstrap, "--topic", topic, "--num-records", str(records)]
        arguments += ["--record-size", str(RECORD_BYTES), "--throughput", str(throughput)]
        arguments += ["--warmup-records", str(warm_up)] if warm_up else []
        if settings:
            arguments += ["--command-property", *(f"{name.replace('_', '.')}={v}" for name, v in settings.items())]
        print(*arguments, file=self._process.stdin, flush=True)
        said = []
        while (line := first_line(self._process)) != "end":
            said.append(line)
        found = [match for match in map(_SUMMARY.match, said) if match]
        failures = self._stderr_path.read_text(errors="replace")
        if not found or "Exception" in failures:
            raise SystemExit(f"ProducerPerformance failed: {' '.join(said[-1:])} {failures[:2000]}")
        last = found[-1]
        return Run(int(last["records"]), float(last["rate"]), int(last["p50"]), int(last["p99"]), time.monotonic())


@contextlib.contextmanager
def java_load(directory: Path) -> Iterator[JavaLoad]:
    """Start the tool; its stderr goes to a file in `directory`. Raise StartupError."""
    compiler = pyspark_jars("janino-*.jar", "commons-compiler-*.jar")
    classpath = f"{compiler}{os.pathsep}{kafka_classpath()}"
    stderr_path = directory / "java.stderr"
    command = (str(find_java().executable), *_OPTIONS, "-cp", classpath, "org.codehaus.janino.SimpleCompiler")
    with stderr_path.open("w") as stderr, child(*command, str(_SOURCE), "PerformanceRuns", stderr=stderr) as process:
        yield JavaLoad(process, stderr_path)

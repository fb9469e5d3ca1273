"""Run a client's own integration tests direct to Apache Kafka and through the proxy, and compare them by test.

    python -m scripts.client_suites CLONES SUITE [TEST…] [--brokers N]

CLONES is a directory with Git clones of the clients, each named NAME or OWNER+NAME; what is built for them, and the
output of the runs, goes there too. SUITE is a table of `client_suites.toml`. Each side has a cluster of three
brokers, or N, and both run at once. A test whose outcome differs, and has no reason in the table, is run again alone,
direct and then proxied. The remaining differences are printed.

Needs Java and what the suite needs. Exit status: 1 if a test without a reason fails only through the proxy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.brokers.kafka_jars import KAFKA_VERSION, kafka_classpath
from tests.support.brokers.real_kafka import start_real_kafka
from tests.support.clients.java import SHORT_JAVA, java_executable
from tests.support.clients.kafka_tools import commands
from tests.support.processes.served import kafka_proxy

TABLE: Final = Path(__file__).with_suffix(".toml")
PLUGIN: Final = Path(__file__).parents[1] / "tests/support/clients/suite_plugin.py"
# As the suites start their own: topics of one replica, and an authorizer, which everybody passes.
BROKERS: Final = {
    "num.partitions": 4,
    "default.replication.factor": 1,
    "min.insync.replicas": 1,
    "share.coordinator.state.topic.num.partitions": 1,
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}
_GO: Final = {"pass": "passed", "fail": "failed", "skip": "skipped"}


class Side(NamedTuple):
    """Where a suite runs: `clone` with the address that it is given, and a directory for its output."""

    clone: Path
    address: str
    output: Path

    def call(self, command: str, output: Path, *tests: str) -> None:
        """Run a shell command, which may fail: its output tells what happened."""
        output.mkdir(parents=True)
        shutil.copy(PLUGIN, output)
        told = {"BROKERS": self.address, "VERSION": KAFKA_VERSION, "OUTPUT": str(output), "TESTS": " ".join(tests)}
        environ = {**os.environ, **told, "TOOLS": str(self.output)}
        with (output / "stdout").open("w") as said:
            subprocess.run(["sh", "-c", command], cwd=self.clone, env=environ, stdout=said, stderr=said, check=False)  # noqa: S603, S607 - a suite's own

    def run(self, command: str, *tests: str) -> dict[str, str]:
        """Run these tests, or all of them; return their outcomes."""
        output = self.output / f"run-{len(list(self.output.glob('run-*')))}"
        self.call(command, output, *tests)
        return dict(outcomes(output))


def outcomes(output: Path) -> Iterator[tuple[str, str]]:
    """Yield a run's outcomes, from the pytest plugin, `go test -json`, or reports of librdkafka's tests."""
    if (output / "outcomes").exists():
        for line in (output / "outcomes").read_text().splitlines():
            test, _, outcome = line.rpartition("\t")
            yield test, outcome
    for line in (output / "stdout").read_text(errors="replace").splitlines():
        event = json.loads(line) if line.startswith('{"Time"') else {}
        if "Test" in event and event["Action"] in _GO:
            yield event["Test"], _GO[event["Action"]]
    for log in output.glob("[0-9]*.log"):
        report = log.with_suffix(".json")
        if not report.exists() or not (text := report.read_text()).endswith("}\n"):
            begun = re.findall(rf"\[({log.stem}_\w+)", log.read_text(errors="replace"))
            yield from dict.fromkeys(begun or [log.stem], "failed").items()
            continue
        for test, told in json.loads(text)["tests"].items():
            if test.startswith(log.stem):
                yield test, told["state"].lower()


def write_tools(directory: Path) -> None:
    """Write Kafka's command line tools, with the names in its distribution."""
    directory.mkdir(parents=True)
    for tool, (command, *_) in commands().items():
        script = directory / f"{tool}.sh"
        java = " ".join([java_executable(), *SHORT_JAVA, "-cp", kafka_classpath(), command.main])
        script.write_text(f'#!/bin/sh\nexec {java} "$@"\n')
        script.chmod(0o755)


def main() -> int:
    suites = tomllib.loads(TABLE.read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path)
    parser.add_argument("suite", choices=suites)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--brokers", type=int, default=3)
    asked = parser.parse_args()
    suite, reasons = suites[asked.suite], suites[asked.suite].get("reasons", {})
    (clone,) = (each.resolve() for each in asked.clones.iterdir() if each.name.rpartition("+")[2] == asked.suite)
    output = Path(tempfile.mkdtemp(dir=clone.parent, prefix=f"run-{asked.suite}-"))
    Side(clone, "", output).call(suite.get("build", ""), output / "build")

    def reason(test: str) -> str:
        return next((why for start, why in reasons.items() if test.startswith(start)), "")

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        # One cluster a side: tests that use the same group, transactional id or topic would disturb each other.
        clusters = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        first, second = (
            stack.enter_context(start_real_kafka(each, asked.brokers, first_id=0, more=BROKERS)) for each in clusters
        )
        proxy = stack.enter_context(kafka_proxy(output / "proxy", second.bootstrap))
        sides = [Side(clone, first.brokers[0].address, output / "direct"), Side(clone, proxy.kafka, output / "proxied")]
        for side in sides:
            write_tools(side.output / "bin")
        direct, proxied = pool.map(lambda side: side.run(suite["run"], *asked.tests), sides)
        for test in sorted(direct.keys() | proxied.keys()):
            if direct.get(test) != proxied.get(test) and not reason(test):
                direct.update(sides[0].run(suite["run"], test))
                proxied.update(sides[1].run(suite["run"], test))
    if "passed" not in direct.values():
        sys.exit(f"no test passes direct: {output / 'build'} and {sides[0].output} tell why")
    for side, found in zip(sides, (direct, proxied), strict=True):
        sys.stdout.write(f"{side.output.name}: {dict(Counter(found.values()))}\n")
    unexplained = 0
    for test in sorted(direct.keys() | proxied.keys()):
        pair = direct.get(test, "not run"), proxied.get(test, "not run")
        if pair[0] != pair[1]:
            unexplained += pair[0] == "passed" and not reason(test)
            sys.stdout.write(f"{test}: direct {pair[0]}, proxied {pair[1]}: {reason(test) or 'no reason known'}\n")
    return min(unexplained, 1)


if __name__ == "__main__":
    sys.exit(main())

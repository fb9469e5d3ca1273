"""Run a Spark standalone cluster on this machine: a master and a worker, processes of Spark's own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import util
from pathlib import Path
from typing import Final

from kproxy.pipeline.java import Java, java_home
from kproxy.pipeline.spark import pyspark_home

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 20.0
_MASTER: Final = re.compile(r"Starting Spark master at (spark://\S+)")
_REGISTERED: Final = re.compile(r"Successfully registered with master")
# Their work takes little, and they live only for a test.
_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class SparkProcess:
    """One class of `org.apache.spark.deploy`; its output goes to a file."""

    def __init__(self, name: str, arguments: list[str], directory: Path, environ: dict[str, str]) -> None:
        home = pyspark_home()
        self.log_path = directory / f"{name}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                env={
                    **environ,
                    "SPARK_HOME": str(home),
                    "SPARK_CONF_DIR": str(directory),
                    "SPARK_LOCAL_IP": "127.0.0.1",
                    "SPARK_DAEMON_MEMORY": "128m",
                    "SPARK_DAEMON_JAVA_OPTS": _OPTIONS,
                },
                start_new_session=True,
            )

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def said(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Wait for a text in the output. Raises AssertionError if it does not come."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := pattern.search(self.log())) is None:
            assert self.process.poll() is None, self.log()[-2000:]
            assert time.monotonic() < deadline, self.log()[-2000:]
            time.sleep(0.05)
        return found

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            # With its executors, if it is a worker.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
                return


@contextmanager
def spark_cluster(java: Java, directory: Path, python: Path | str = sys.executable) -> Iterator[str]:
    """The master's address, once the worker is registered. Executors' Python is `python`, without kproxy's packages."""
    foreign = ("SPARK_", "PYSPARK_", "PYTHON", "JAVA_HOME")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    if (home := java_home(java, directory)) is not None:
        environ["JAVA_HOME"] = str(home)
    environ["PYSPARK_PYTHON"] = str(python)
    started: list[SparkProcess] = []
    at = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    try:
        started.append(SparkProcess("master.Master", at, directory, environ))
        address = started[0].said(_MASTER)[1]
        sizes = ["--cores", "2", "--memory", "1g", "--work-dir", str(directory / "work")]
        started.append(SparkProcess("worker.Worker", [*at, *sizes, address], directory, environ))
        started[1].said(_REGISTERED)
        yield address
    finally:
        for process in reversed(started):
            process.stop()


def bare_python(directory: Path) -> Path:
    """This interpreter without its installed packages, except those that Spark needs on its workers."""
    packages = directory / "packages"
    packages.mkdir()
    for name in ("pyarrow", "numpy", "pandas"):
        spec = util.find_spec(name)
        if spec is not None and spec.origin is not None:
            root = Path(spec.origin).parent
            for found in [root, *root.parent.glob(f"{name}.libs")]:
                (packages / found.name).symlink_to(found)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python

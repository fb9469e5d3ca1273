"""Processes started by a test run end with it, even if it is killed before its teardown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes.dev import gone

RUN = """
import sys, time
from pathlib import Path
from tests.support.processes.dev import KproxyProcess, dev_arguments
from tests.support.processes.served import static_proxy

directory = Path(sys.argv[2])
if sys.argv[1] == "serve":
    with static_proxy(directory, {1: 1}) as process:
        print(process.pid, flush=True)
        time.sleep(600)
process = KproxyProcess(dev_arguments(directory / "data", "--brokers", "1"), directory / "stderr")
process.wait_ready()
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.long(but=1)
@pytest.mark.parametrize("command", ["serve", "dev"])
def test_killed_test_run_leaves_no_process(tmp_path: Path, command: str) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, command, tmp_path],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        process = psutil.Process(int(run.stdout.readline()))
        started = [process, *process.children(recursive=True)]
        assert len(started) >= (1 if command == "serve" else 4)
    finally:
        run.kill()
        run.wait()
        if run.stdout is not None:
            run.stdout.close()
    assert gone(started, timeout_s=30.0)

"""Run the child processes of a measurement, and read the system's figures about them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil
import uvloop
from rich.table import Table

from bench.load import send_all


@contextlib.contextmanager
def child(
    *command: str, stderr: IO[str] | None = None, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a child process, and end it with the block."""
    process = subprocess.Popen(  # noqa: S603 -- our own commands
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=cwd, env=env
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def scratch() -> Iterator[tuple[contextlib.ExitStack, Path]]:
    """Yield a stack of resources and a directory, which both end with the block."""
    with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as directory, contextlib.ExitStack() as stack:
        yield stack, Path(directory)


def started(stack: contextlib.ExitStack, *modules: str) -> list[int]:
    """Start a broker for each module of `bench`; return their ports. They end with `stack`."""
    brokers = [stack.enter_context(child(sys.executable, "-m", f"bench.{module}", "0")) for module in modules]
    return [int(first_line(broker)) for broker in brokers]


def first_line(process: subprocess.Popen[str]) -> str:
    """Return the next line of a child's output. Raise SystemExit if there is none."""
    if process.stdout is None:
        raise RuntimeError("the child's output is not read")
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(f"{' '.join(map(str, process.args))} did not start")  # type: ignore[arg-type]
    return line


@contextlib.contextmanager
def core_of_the_proxy() -> Iterator[set[int]]:
    """Yield a core that nothing else here runs on; none if there is only one, or the system cannot reserve one."""
    if sys.platform != "linux" or len(cores := sorted(os.sched_getaffinity(0))) < 2:
        yield set()
        return
    os.sched_setaffinity(0, cores[1:])
    try:
        yield {cores[0]}
    finally:
        os.sched_setaffinity(0, cores)


def cpu_seconds(pid: int) -> float:
    """Return user and system time: on Linux to the ns, by the process's own clock; elsewhere as the system counts."""
    if sys.platform == "linux":
        # As clock_getcpuclockid(3) makes it.
        return time.clock_gettime(~pid << 3 | 2)
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def peak_resident_bytes(pid: int) -> int | None:
    """Return the largest memory it ever had; None if the system does not report it (only Linux does)."""
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def table_of(title: str, texts: Sequence[str], numbers: Iterable[str]) -> Table:
    """Return an empty table with columns of texts, and then of numbers."""
    table = Table(title=title, title_style="")
    for heading in texts:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def measure(pid: int, port: int, frame: bytes, requests: int) -> tuple[float, float]:
    """Return the proxy's CPU seconds and the elapsed seconds for one run of the load."""
    return measure_run(pid, send_all(port, frame, requests))


def measure_run(pid: int, run: Coroutine[object, object, None]) -> tuple[float, float]:
    """Return the same for any work."""
    before, started = cpu_seconds(pid), time.monotonic()
    uvloop.run(run)
    return cpu_seconds(pid) - before, time.monotonic() - started

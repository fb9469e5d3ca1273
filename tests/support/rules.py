"""Enforce the rules for every test, as a pytest plugin.

1. With KPROXY_TEST_REQUIRE=all, for machines that have everything, a skipped test fails. An expected failure is not a
   skip.
2. No test leaves a process behind. All processes inherit a mark of this run in their environment; those that still have
   it when every fixture is torn down are named, ended by their ids, and fail the run. If the run itself is killed,
   a separate process ends them (tests.support.reaper).
3. Coroutines run on uvloop, as the product does; KPROXY_TEST_LOOP=asyncio takes asyncio's own loop.
4. Ctrl-C reaches the processes of tests, even if the tests' parent ignores it, as shells do for background jobs.
5. Hundreds of processes share bytecode that is compiled once, even if the environment disables writing bytecode.
6. Tests marked `long` run with KPROXY_TEST_ALL=1 (`make test-all`), or if their file is named on the command line.
   They repeat a shape that another test has: more releases of a client, more seeds, every byte of a reset. Of those
   marked `long(but_one=True)` the first of each file runs in any case, of those marked `long(but=3)` the first three of
   each test function.
7. Hypothesis sets no time limits: a busy machine is not a fault of an example. A test without a number of
   examples has FEW_EXAMPLES, new ones in each run, and with KPROXY_TEST_ALL=1 a hundred. A test with a number
   (`examples`) has a third of it without KPROXY_TEST_ALL=1.
8. A whole run starts only if FREE_BYTES are free for its files. Otherwise etcd, Kafka and brokers would fail one after
   the other, each with a different error.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.support import reaper as reaping
from tests.support.processes.forked import stop_fork_server
from tests.support.reaper import RUN_MARK, marked_processes

REQUIRE = "KPROXY_TEST_REQUIRE"
LOOP = "KPROXY_TEST_LOOP"
ALL = "KPROXY_TEST_ALL"
FEW_EXAMPLES = 25
FREE_BYTES = 6 << 30
# A process may take a moment to end after the signal.
LEFT_BEHIND_GRACE_S = 30.0


def examples(most: int) -> int:
    """The number of examples that a property test takes in this run, `most` with KPROXY_TEST_ALL=1."""
    return most if os.environ.get(ALL) == "1" else -(-most // 3)


def is_whole_run(config: pytest.Config) -> bool:
    """Whether all tests run: the command names none."""
    return bool(config.args == config.getini("testpaths"))


def pytest_configure(config: pytest.Config) -> None:
    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("untimed", untimed, max_examples=100 if os.environ.get(ALL) == "1" else FEW_EXAMPLES)
    settings.load_profile("untimed")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    wanted = os.environ.get(LOOP, "uvloop")
    if wanted not in ("uvloop", "asyncio"):
        raise pytest.UsageError(f"{LOOP} is uvloop or asyncio, not {wanted!r}")
    if wanted == "uvloop":
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    if os.environ.get(REQUIRE, "") not in ("", "all"):
        raise pytest.UsageError(f"{REQUIRE} is all or nothing, not {os.environ[REQUIRE]!r}")
    if os.environ.get(ALL, "") not in ("", "1"):
        raise pytest.UsageError(f"{ALL} is 1 or nothing, not {os.environ[ALL]!r}")
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if is_whole_run(config) and free < FREE_BYTES:
        raise pytest.UsageError(
            f"The tests take up to {FREE_BYTES >> 30} GiB in {tempfile.gettempdir()}, and {free / (1 << 30):.1f} GiB "
            f"are free there: make room, or name another directory in TMPDIR."
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get(ALL) == "1" or any(".py" in argument for argument in config.args):
        return
    kept, left_out = [], []
    in_any_case: Counter[tuple[Path, str]] = Counter()
    for item in items:
        marks = [*item.iter_markers("long")]
        if marks:
            # If a parameter and its test both have a mark, the stricter one counts.
            most, by_file = min((_most(mark), "but_one" in mark.kwargs) for mark in marks)
            of = (item.path, "" if by_file else item.name.partition("[")[0])
            if in_any_case[of] >= most:
                left_out.append(item)
                continue
            in_any_case[of] += 1
        kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _most(mark: pytest.Mark) -> int:
    """The number of tests with this mark that run in `make test`."""
    return int(mark.kwargs.get("but", 1 if "but_one" in mark.kwargs else 0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _fail_where_required(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        _fail_where_required(report)
    return report


def _fail_where_required(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get(REQUIRE) != "all":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{REQUIRE}=all, and this was skipped: {reason}"


@pytest.fixture(scope="session", autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    """Set up before every other fixture, so that it is torn down last."""
    mark = uuid.uuid4().hex
    with reaper(mark):
        os.environ[RUN_MARK] = mark
        yield
        stop_fork_server()
        del os.environ[RUN_MARK]
        _end_what_is_left(mark)


@contextmanager
def reaper(mark: str) -> Iterator[None]:
    """Until the block ends, the end of this process ends all processes with this mark."""
    process = subprocess.Popen(
        [sys.executable, Path(reaping.__file__), mark], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        process.communicate()


def _end_what_is_left(mark: str) -> None:
    left = marked_processes(mark)
    deadline = time.monotonic() + LEFT_BEHIND_GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = marked_processes(mark)
    described = [describe(process) for process in left]
    for process in left:
        process.kill()
    assert not described, "processes left behind by the tests: " + "; ".join(described)


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)

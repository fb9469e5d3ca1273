"""The rules of the suite hold: skipped tests and leftover processes are noticed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[3]


def run_pytest(directory: Path, test: str, *, by_file: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
    file = directory / "test_it.py"
    file.write_text(test)
    settings = {name: value for name, value in os.environ.items() if not name.startswith("KPROXY_TEST_")}
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.support.rules", "-p", "pytest_asyncio.plugin"),
            *("-p", "no:cacheprovider", "--rootdir", directory, "-c", os.devnull, file if by_file else directory),
        ],
        cwd=REPOSITORY,
        env={**settings, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


SKIPS = """
import pytest

def test_in_the_test():
    pytest.skip("no java")

@pytest.mark.skipif(True, reason="no java")
def test_by_a_mark():
    pass

@pytest.fixture
def java():
    pytest.skip("no java")

def test_in_a_fixture(java):
    pass

@pytest.mark.xfail(reason="known")
def test_expected_failure():
    assert False
"""


def test_skip_passes_unless_everything_is_required(tmp_path: Path) -> None:
    home = run_pytest(tmp_path, SKIPS)
    assert (home.returncode, "3 skipped, 1 xfailed" in home.stdout) == (0, True), home.stdout
    required = run_pytest(tmp_path, SKIPS, KPROXY_TEST_REQUIRE="all")
    assert required.returncode == 1
    # No skip is tolerated, wherever it is declared; an expected failure is not a skip.
    assert "1 xfailed" in required.stdout.splitlines()[-1]
    assert "skipped" not in required.stdout.splitlines()[-1]
    assert len(re.findall(r"this was skipped: .*no java", required.stdout)) >= 3


def test_module_skip_fails_where_everything_is_required(tmp_path: Path) -> None:
    test = "import pytest\npytest.importorskip('no_java')\ndef test_it(): pass"
    required = run_pytest(tmp_path, test, KPROXY_TEST_REQUIRE="all")
    assert required.returncode == 2
    assert re.search(r"this was skipped: .*no_java", required.stdout)


LONG = """
import pytest

@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_it(seed):
    pass

@pytest.mark.long(but_one=True)
@pytest.mark.parametrize("seed", range(3))
def test_one_of_these(seed):
    pass

@pytest.mark.long(but=2)
@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.long), 2, 3, 4])
def test_two_of_these(seed):
    pass
"""


def test_long_test_runs_when_all_or_named(tmp_path: Path) -> None:
    def outcome(*, by_file: bool, **environ: str) -> str:
        return run_pytest(tmp_path, LONG, by_file=by_file, **environ).stdout.splitlines()[-1]

    assert "4 passed, 5 deselected" in outcome(by_file=False)
    assert "9 passed" in outcome(by_file=False, KPROXY_TEST_ALL="1")
    assert "9 passed" in outcome(by_file=True)


def test_leftover_process_fails_the_run_and_ends(tmp_path: Path) -> None:
    # In a session of its own and orphaned: a walk over children would miss it.
    test = (
        "import subprocess, pathlib\n"
        "from tests.support import rules\n"
        "rules.LEFT_BEHIND_GRACE_S = 0.5\n"
        "def test_it():\n"
        "    done = subprocess.run(['sh', '-c', 'sleep 600 </dev/null >/dev/null 2>&1 & echo $!'],\n"
        "                          start_new_session=True, capture_output=True, text=True)\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(done.stdout)\n"
    )
    run = run_pytest(tmp_path, test)
    assert run.returncode == 1
    assert "left behind by the tests" in run.stdout
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("loop", [pytest.param("uvloop", marks=pytest.mark.long), "asyncio"])
def test_coroutines_run_on_the_requested_loop(tmp_path: Path, loop: str) -> None:
    test = (
        "import asyncio, pytest\n@pytest.mark.asyncio\nasync def test_it():\n"
        f"    assert type(asyncio.get_running_loop()).__module__.split('.')[0] == {loop!r}\n"
    )
    assert run_pytest(tmp_path, test, KPROXY_TEST_LOOP=loop).returncode == 0


KILLED = """
import os, pathlib, signal, subprocess, time

def test_it():
    started = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path("PLACE").write_text(str(started.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_children_of_a_killed_run_are_ended(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    assert run_pytest(tmp_path, KILLED.replace("PLACE", str(place))).returncode == -signal.SIGKILL
    left = int(place.read_text())
    deadline = time.monotonic() + 120
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.1)

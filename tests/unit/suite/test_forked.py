"""A forked process equals one of `python -m`, as far as a command and its test can see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.processes import forked
from tests.support.processes.dev import run_kproxy
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

# With other values a process is not forked.
KEPT = {name: os.environ[name] for name in ("PATH", *forked.AT_IMPORT) if name in os.environ}


def started(
    directory: Path,
    *arguments: str,
    pass_fds: tuple[int, ...] = (),
    server: forked.ForkServer | None = None,
    **environ: str,
) -> forked.Forked:
    """A process of forked_main."""
    with (directory / "stderr").open("ab") as stderr:
        return forked.start(
            "tests.unit.suite.forked_main",
            arguments,
            stdout=None,
            stderr=stderr.fileno(),
            environ={**KEPT, **environ},
            directory=directory,
            pass_fds=pass_fds,
            new_session=True,
            text=True,
            server=server,
        )


def waiting(directory: Path, server: forked.ForkServer | None = None) -> forked.Forked:
    """One that has begun to wait."""
    process = started(directory, "wait", server=server)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_child_has_only_the_given_environment(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        process = started(tmp_path, "tell", "a b", pass_fds=(reader,), COLOUR="blue")
        assert process.stdout is not None
        given = json.loads(process.stdout.read())
        assert process.wait(PATIENCE_S) == 7
    finally:
        os.close(reader)
        os.close(writer)
    assert given["arguments"] == ["tell", "a b"]
    assert given["environ"] == {**KEPT, "COLOUR": "blue"}
    assert given["directory"] == str(tmp_path)
    assert given["pid"] == given["session"] == process.pid
    assert given["fds"] == [0, 1, 2, reader]
    assert given["stdin"] == ""
    assert (tmp_path / "stderr").read_text() == "complaint\n"


def test_child_is_waited_for_and_reports_status(tmp_path: Path) -> None:
    process = waiting(tmp_path)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(PATIENCE_S) == process.poll() == process.returncode == -signal.SIGKILL
    # Its number may be another process's by now.
    process.kill()
    assert not psutil.pid_exists(process.pid)


def test_ctrl_c_reaches_child_as_any_python(tmp_path: Path) -> None:
    process = waiting(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == -signal.SIGINT
    assert "KeyboardInterrupt" in (tmp_path / "stderr").read_text()


def test_several_children_outlive_the_server(tmp_path: Path) -> None:
    # Not that of this process: other fixtures have forked from it.
    server = forked.ForkServer()
    processes = [waiting(tmp_path, server) for _ in range(3)]
    server.stop()
    try:
        assert all(psutil.Process(each.pid).is_running() for each in processes)
    finally:
        for each in processes:
            os.kill(each.pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while any(psutil.pid_exists(each.pid) and psutil.Process(each.pid).status() != "zombie" for each in processes):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # Nobody is left to tell its status.
    with pytest.raises(RuntimeError, match="fork server has ended"):
        processes[0].wait(PATIENCE_S)


def test_import_time_decisions_prevent_a_fork() -> None:
    assert forked.can_fork(os.environ)
    other = {"off": "auto"}.get(os.environ.get("KPROXY_PLAIN", "auto"), "off")
    assert not forked.can_fork({**os.environ, "KPROXY_PLAIN": other})
    # It is run all the same.
    assert "fleeting" in run_kproxy("serve", "--etcd", "127.0.0.1:1", environ={"KPROXY_PLAIN": "fleeting"}).stderr


def test_signal_to_an_ended_copy_is_dropped() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    reader, server = os.pipe()
    os.write(server, ended.pid.to_bytes(4, "big", signed=True))
    copy = forked.Forked([], reader, None)
    copy.terminate()
    os.write(server, bytes(4))
    os.close(server)
    assert copy.wait(30) == 0

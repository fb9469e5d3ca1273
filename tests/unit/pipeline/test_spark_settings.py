"""The settings of Spark, by where it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kproxy.cli.pipeline import session_options
from kproxy.errors import StartupError
from kproxy.pipeline.java import Java
from kproxy.pipeline.spark import (
    foreign_variables,
    in_one_process,
    on_this_machine,
    spark_environment,
    spark_settings,
    worker_python,
)

JAVA = Java(Path("/jvm/17"), Path("/jvm/17/bin/java"), 17, "PATH")


@pytest.mark.parametrize(
    ("master", "here", "one_process"),
    [
        ("local", True, True),
        ("local[4]", True, True),
        ("local[*]", True, True),
        ("local-cluster[2,1,1024]", True, False),
        ("spark://spark:7077", False, False),
        ("yarn", False, False),
        ("k8s://https://k8s:6443", False, False),
    ],
)
def test_master_decides_where_tasks_run(master: str, here: bool, one_process: bool) -> None:
    assert (on_this_machine(master), in_one_process(master)) == (here, one_process)


def test_cluster_configuration_applies_except_session_settings(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    theirs = {"SPARK_HOME": str(tmp_path), "HADOOP_CONF_DIR": "/etc/hadoop", "PYSPARK_PYTHON": "/venv/bin/python"}
    never = {"SPARK_REMOTE": "sc://far.example", "PYSPARK_SUBMIT_ARGS": "--master local", "PYSPARK_GATEWAY_PORT": "1"}

    environment = spark_environment({**theirs, **never}, JAVA, Path("/ours"), "yarn")

    assert environment["SPARK_HOME"] == "/ours"
    assert environment["SPARK_CONF_DIR"] == str(tmp_path / "conf")
    assert environment["HADOOP_CONF_DIR"] == "/etc/hadoop"
    assert "SPARK_LOCAL_IP" not in environment
    assert never.keys() & environment.keys() == set()
    assert set(foreign_variables(theirs | never, "yarn")) == {"SPARK_HOME", *never}
    assert worker_python(theirs, "yarn") == "/venv/bin/python"
    assert worker_python({}, "yarn") is None


def test_driver_on_a_cluster_binds_no_local_address(tmp_path: Path) -> None:
    here = spark_settings(JAVA, tmp_path, tmp_path, app_name="job", master="local[2]")
    there = spark_settings(JAVA, tmp_path, tmp_path, app_name="job", master="spark://spark:7077")

    assert here["spark.driver.bindAddress"] == "127.0.0.1"
    assert [name for name in there if "driver.host" in name or "bindAddress" in name or "spark.local" in name] == []
    assert there["spark.master"] == "spark://spark:7077"
    assert there["spark.sql.session.timeZone"] == here["spark.sql.session.timeZone"] == "UTC"


@pytest.mark.parametrize("setting", ["spark.ui.port", "ui.port=4040", "=x"])
def test_invalid_setting_is_refused(setting: str) -> None:
    with pytest.raises(StartupError, match="is not a Spark setting"):
        session_options("job", None, None, (setting,))


def test_settings_may_hold_equals_signs() -> None:
    options = session_options("job", "yarn", "2g", ("spark.x=-Da=b", "spark.y="))
    assert options.settings == {"spark.x": "-Da=b", "spark.y": ""}
    assert (options.master, options.memory) == ("yarn", "2g")

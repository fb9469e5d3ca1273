"""The settings and the environment of Spark, by where it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyspark
import pytest

from kproxy.cli.pipeline import session_options
from kproxy.errors import StartupError
from kproxy.pipeline.java import Java
from kproxy.pipeline.session import SessionOptions, environment_changes, spark_settings
from kproxy.pipeline.spark import in_one_process, kafka_connector, on_this_machine, pyspark_home

JAVA = Java(Path("/jvm/17/bin/java"), 17, "JAVA_HOME")
HOME = Path("/jvm/17")


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


def test_settings_of_other_sparks_do_not_apply() -> None:
    foreign = {
        "SPARK_CONF_DIR": "/opt/spark/conf",
        "SPARK_REMOTE": "sc://far.example",
        "SPARK_LOCAL_DIRS": "/mnt",
        "PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell",
        "HADOOP_CONF_DIR": "/etc/hadoop",
    }
    mine = {"HOME": "/home/me", "PATH": "/opt/bin", "PYTHONPATH": "/my/own"}

    changes = environment_changes({**foreign, **mine, "SPARK_HOME": "/opt/spark", "JAVA_HOME": "/25"}, "local", None)

    assert changes == {
        **dict.fromkeys(foreign),
        "SPARK_HOME": str(pyspark_home()),
        # Spark's scripts then use the Java in PATH.
        "JAVA_HOME": None,
        "PATH": f"/opt/bin{os.pathsep}{os.defpath}",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }


def test_cluster_configuration_applies_except_session_settings(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    theirs = {"SPARK_HOME": str(tmp_path), "HADOOP_CONF_DIR": "/etc/hadoop", "PYSPARK_PYTHON": "/venv/bin/python"}
    never = {"SPARK_REMOTE": "sc://far.example", "PYSPARK_SUBMIT_ARGS": "--master local", "PYSPARK_GATEWAY_PORT": "1"}

    assert environment_changes({**theirs, **never}, "yarn", HOME) == {
        **dict.fromkeys(never),
        "SPARK_HOME": str(pyspark_home()),
        "SPARK_CONF_DIR": str(tmp_path / "conf"),
        "JAVA_HOME": str(HOME),
        "PATH": os.defpath,
    }
    assert "SPARK_CONF_DIR" not in environment_changes({**theirs, "SPARK_CONF_DIR": "/etc/spark"}, "yarn", HOME)


def test_driver_on_a_cluster_binds_no_local_address(tmp_path: Path) -> None:
    here = spark_settings(SessionOptions("job", "local[2]"), JAVA, tmp_path)
    there = spark_settings(SessionOptions("job", "spark://spark:7077", memory="3g"), JAVA, tmp_path)

    assert here["spark.driver.bindAddress"] == "127.0.0.1"
    assert [name for name in there if "driver.host" in name or "bindAddress" in name or "spark.local" in name] == []
    assert there["spark.master"] == "spark://spark:7077"
    assert (here["spark.driver.memory"], there["spark.driver.memory"]) == ("1g", "3g")
    assert there["spark.sql.session.timeZone"] == here["spark.sql.session.timeZone"] == "UTC"


def test_user_settings_replace_or_unset_defaults(tmp_path: Path) -> None:
    given = {"spark.driver.memory": "4g", "spark.sql.shuffle.partitions": "", "spark.x": "-Da=b"}
    settings = spark_settings(SessionOptions("job", memory="2g", settings=given, kafka=False), JAVA, tmp_path)

    assert (settings["spark.driver.memory"], settings["spark.x"]) == ("4g", "-Da=b")
    assert {"spark.sql.shuffle.partitions", "spark.jars.packages"} & settings.keys() == set()
    assert spark_settings(SessionOptions("job"), JAVA, tmp_path)["spark.jars.packages"] == kafka_connector()


def test_connector_follows_the_imported_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.2.7")
    assert kafka_connector() == "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.7"


@pytest.mark.parametrize("setting", ["spark.ui.port", "ui.port=4040", "=x"])
def test_invalid_setting_is_refused(setting: str) -> None:
    with pytest.raises(StartupError, match="is not a Spark setting"):
        session_options("job", None, None, (setting,))


def test_settings_may_hold_equals_signs() -> None:
    options = session_options("job", "yarn", "2g", ("spark.x=-Da=b", "spark.y="))
    assert options.settings == {"spark.x": "-Da=b", "spark.y": ""}
    assert (options.master, options.memory) == ("yarn", "2g")

"""A pipeline job's session: an existing one, one of spark-submit's, or one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.java import java_home
from kproxy.pipeline.session import SessionOptions, environment_changes, open_session
from kproxy.pipeline.spark import pyspark_home
from tests.support.clients.java import require_java
from tests.support.clients.spark import QUICK, SETTINGS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

# Adds on an executor, which must find kproxy, and prints who provides it.
JOB = """
import sys
from kproxy.pipeline.session import SessionOptions, open_session

def add(rows):
    import kproxy.errors, kproxy_codec
    zips = [each for each in sys.path_importer_cache.values() if type(each).__name__ == "zipimporter"]
    yield sum(rows), sys.executable, len(zips)

def main():
    options = SessionOptions("summing", master={master!r}, settings={settings})
    with open_session(options) as spark:
        session = spark.session
        numbers = session.sparkContext.parallelize(range(10), 2).mapPartitions(add).collect()
        name, zone = session.sparkContext.appName, session.conf.get("spark.sql.session.timeZone")
        total, pythons = sum(n for n, _, _ in numbers), {{python for _, python, _ in numbers}}
        print("ZIPS", max(zips for *_, zips in numbers))
        print("RESULT", name, zone, total, pythons, spark.process is None)

if __name__ == "__main__":
    main()
"""


def test_existing_session_is_used_and_stays(spark: Any) -> None:
    with open_session(SessionOptions("job", settings={"spark.sql.shuffle.partitions": "3"})) as opened:
        assert opened.session.sparkContext is spark.sparkContext
        assert opened.process is None
        assert opened.session.conf.get("spark.sql.shuffle.partitions") == "3"
    spark.conf.set("spark.sql.shuffle.partitions", SETTINGS["spark.sql.shuffle.partitions"])

    assert spark.range(3).count() == 3


def test_fixed_spark_settings_are_refused_later(spark: Any) -> None:
    options = SessionOptions("job", settings={"spark.executor.memory": "2g"})
    with (
        pytest.raises(StartupError, match=r"spark\.executor\.memory cannot change after Spark has started"),
        open_session(options),
    ):
        pass


@pytest.mark.long
def test_job_starts_and_removes_its_own_spark(tmp_path: Path) -> None:
    require_java()
    script = tmp_path / "job.py"
    script.write_text(JOB.format(master="local[1]", settings=dict(each.split("=", 1) for each in QUICK)))

    done = _run([sys.executable, str(script)], TMPDIR=str(tmp_path), PYSPARK_PYTHON="/nonexistent")

    assert done.stdout.splitlines()[-1] == f"RESULT summing UTC 45 {{{sys.executable!r}}} False", done.stderr[-2000:]
    # Else each task would read their directories again.
    assert "ZIPS 0" in done.stdout
    assert [child.name for child in tmp_path.iterdir()] == ["job.py"]


@pytest.mark.long
def test_job_under_spark_submit_uses_given_session(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB.format(master=None, settings={"spark.sql.ansi.enabled": "false"}))

    settings = chain.from_iterable(("--conf", setting) for setting in QUICK)
    done = _submit(tmp_path, str(script), ["--master", "local[1]", *settings])

    assert done.stdout.splitlines()[-1] == f"RESULT summing UTC 45 {{{sys.executable!r}}} True", done.stderr[-2000:]


def test_master_under_spark_submit_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB.format(master="yarn", settings={}))

    # The error comes before Spark is asked for anything.
    done = _run([sys.executable, str(script)], PYSPARK_GATEWAY_PORT="1")

    assert done.returncode != 0
    assert "give --master and --memory to it, not to the job" in done.stderr


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def _submit(directory: Path, script: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    changes = environment_changes(os.environ, "local[1]", java_home(require_java(), directory))
    submit = str(pyspark_home() / "bin" / "spark-submit")
    return _run([submit, *arguments, script], **{name: value or "" for name, value in changes.items()})

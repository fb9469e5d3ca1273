"""If a JVM does not start, the error names the reason, its log is kept, and no other file remains."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline import session
from kproxy.pipeline.java import Java
from kproxy.pipeline.session import SessionOptions, open_session

# It prints its arguments, unlike Spark's own script.
SUBMIT = """\
#!/bin/sh
echo "$@ in $SPARK_HOME with $SPARK_REMOTE on $JAVA_HOME"
echo 'Exception in thread "main" a.b.Failed: no network.' >&2
exit 1
"""


@pytest.fixture
def failing_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "spark-submit").write_text(SUBMIT)
    (home / "bin" / "spark-submit").chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(session, "pyspark_home", lambda: home)
    monkeypatch.setattr(session, "find_java", lambda: Java(tmp_path / "java", 17, "JAVA_HOME"))
    # Another test of this process may have a session.
    monkeypatch.setattr(session, "_active_context", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("SPARK_REMOTE", "sc://far.example")
    monkeypatch.setenv("JAVA_HOME", "/old")
    return home


def test_failed_start_names_its_reason_and_log(failing_spark: Path, tmp_path: Path) -> None:
    before = dict(os.environ)
    options = SessionOptions("job", settings={"spark.x": "y"})
    with pytest.raises(StartupError) as refused, open_session(options):
        pass

    (log,) = (tmp_path / "tmp").iterdir()
    assert str(refused.value) == f"Spark did not start: no network; Spark's log is {log}."
    started = log.read_text().splitlines()[0]
    assert "--conf spark.app.name=job " in started
    assert "--conf spark.x=y " in started
    assert re.search(rf"pyspark-shell in {failing_spark} with  on {tmp_path}/tmp/.*/java$", started)
    assert dict(os.environ) == before


def test_log_of_failed_start_has_requested_place(failing_spark: Path, tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    with (
        pytest.raises(StartupError, match=f"Spark's log is {re.escape(str(log))}"),
        open_session(SessionOptions("job", log_path=log)),
    ):
        pass

    assert "no network" in log.read_text()
    assert list((tmp_path / "tmp").iterdir()) == []

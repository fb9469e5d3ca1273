"""`kproxy pipeline audit`: its output for its users, up to the exit status."""

from __future__ import annotations

import io
import re
import uuid
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from rich.console import Console

from kproxy.cli import main
from kproxy.config.audit import DEFAULT_TOPIC
from kproxy.demo.run import await_trails
from kproxy.pipeline.audit.run import AuditJob, run_audit_job
from kproxy.pipeline.audit.trail import parse_trail
from kproxy.pipeline.progress import Report
from kproxy.pipeline.session import SessionOptions
from kproxy.trail.rows import encode_page
from tests.support.audit.forged_trail import ForgedTrail, now_ms
from tests.support.clients.java import require_java
from tests.support.clients.kafka_io import produce
from tests.support.clients.spark import QUICK
from tests.support.processes.dev import KproxyProcess, run_kproxy
from tests.support.processes.ports import free_port

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

RECORDS = 300


@pytest.fixture
def topic(dev_cluster: KproxyProcess) -> str:
    """With RECORDS records, written through the proxy."""
    name = f"audited-{uuid.uuid4().hex[:10]}"
    produce(dev_cluster.kafka, name, [b"value"] * RECORDS)
    return name


@pytest.mark.long
def test_clean_run_audits_clean_from_command_line(dev_cluster: KproxyProcess, topic: str, tmp_path: Path) -> None:
    require_java()
    assert await_trails(dev_cluster.kafka, DEFAULT_TOPIC, now_ms(), timeout_s=120)
    output, report = tmp_path / "tables", tmp_path / "report.html"
    arguments = ["--bootstrap", dev_cluster.kafka, "--topics", topic, "--master", "local[1]"]
    arguments += chain.from_iterable(("--conf", setting) for setting in QUICK)

    done = run_kproxy(
        "pipeline", "audit", *arguments, "--output", output, "--report", report, "--strict", timeout_s=580
    )

    assert done.status == 0, done.stderr[-2000:]
    assert done.stdout.startswith("Clean, duplicates not known. "), done.stdout
    assert f"{topic}/0" in done.stdout
    assert done.stderr.splitlines()[-1] == f"Report: {report}"
    assert "Clean" in report.read_text()
    (partition,) = pyarrow.parquet.read_table(output / "partitions").to_pylist()
    assert (partition["topic"], partition["acked"], partition["present"]) == (topic, RECORDS, RECORDS)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["report.html", "tables"]


@pytest.mark.long
def test_unproven_trail_ends_a_strict_audit_with_1(
    dev_cluster: KproxyProcess, topic: str, tmp_path: Path, spark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trail = ForgedTrail("f" * 16)
    rows = [trail.begin(), trail.acked(topic, 0, RECORDS)]
    (tmp_path / "trail").mkdir()
    (tmp_path / "trail" / "kproxy-audit-1.jsonl").write_bytes(encode_page(rows) + b"\n")
    place = parse_trail(f"json:{tmp_path / 'trail'}")
    job = AuditJob(bootstrap=dev_cluster.kafka, trail=place, topics=(topic,), strict=True)

    said = Report(progress=Console(file=io.StringIO()))
    assert run_audit_job(job, SessionOptions("audit", kafka=False), display=said) == 1
    assert capsys.readouterr().out.startswith("Unproven")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--bootstrap", "127.0.0.1"], "--bootstrap: '127.0.0.1' has no port"),
        (["--bootstrap", "NOBODY"], "No Kafka answers at --bootstrap"),
        (["--trail", "topic:nowhere"], "No audit trail: there is no topic nowhere"),
        (["--trail", "json:/nonexistent"], "No audit trail: /nonexistent is no directory"),
        (["--trail", "parquet:EMPTY"], r"has no file \*\.parquet"),
        (["--trail", "disk"], "is no place of an audit trail"),
        (["--topics", "nix,nada"], "There is no topic nada"),
        (["--from", "1h", "--to", "2h"], "--from is not before --to"),
        (["--from", "2999-01-01"], "--from 2999-01-01 is in the future"),
        (["--window", "10"], "--window 10 is no duration"),
        (["--report", "/nonexistent/report.html"], "cannot be written to /nonexistent/report.html .No such file"),
        (["--conf", "x=y"], "is not a Spark setting"),
        (["--master", "yarn"], r"On a cluster \(yarn\) the tables need a place .* give --output DIR"),
        (["--follow"], "give --output DIR"),
        (["--follow", "--output", "x", "--to", "1h"], "--follow has no end"),
        (["--follow", "--output", "x", "--trail", "json:EMPTY"], "needs files that are whole when they appear"),
    ],
)
def test_unauditable_input_is_refused_before_spark_starts(
    dev_cluster: KproxyProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    def no_spark(*_: object) -> None:
        raise AssertionError("Spark was asked for")

    monkeypatch.setattr("kproxy.pipeline.audit.run.open_session", no_spark)
    monkeypatch.setattr("kproxy.pipeline.audit.follow.open_session", no_spark)
    given = [each.replace("NOBODY", f"127.0.0.1:{free_port()}") for each in arguments]
    given = [each.replace("EMPTY", str(tmp_path)) for each in given]
    bootstrap = [] if "--bootstrap" in given else ["--bootstrap", dev_cluster.kafka]

    assert main(["pipeline", "audit", *bootstrap, *given]) == 2
    assert re.search(sentence, capsys.readouterr().err)

"""`kproxy pipeline audit`: its output for its users, up to the exit status."""

from __future__ import annotations

import io
import re
import uuid
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
from rich.console import Console

from kproxy.cli import main
from kproxy.demo.run import audit_when_proven
from kproxy.errors import StartupError
from kproxy.pipeline.audit.run import LOCAL, AuditJob, run_audit_job
from kproxy.pipeline.audit.trail_place import parse_trail
from kproxy.pipeline.progress import Report
from kproxy.pipeline.session import SessionOptions
from kproxy.trail.rows import encode_page
from tests.support.audit.audit_trails import trails_in_topic
from tests.support.audit.forged_trail import ForgedTrail
from tests.support.clients.kafka_io import produce
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.processes.ports import free_port

pytestmark = pytest.mark.timeout(600)

RECORDS = 300


@pytest.fixture
def topic(dev_cluster: KproxyProcess) -> str:
    """A topic with RECORDS records, written through the proxy."""
    name = f"audited-{uuid.uuid4().hex[:10]}"
    produce(dev_cluster.kafka, name, [b"value"] * RECORDS)
    return name


def test_clean_run_audits_clean_from_command_line(dev_cluster: KproxyProcess, topic: str, tmp_path: Path) -> None:
    # Without an end: a row is dated when the trail looks, up to LOOK_S after its last acknowledgement.
    facts = audit_when_proven(
        AuditJob(bootstrap=dev_cluster.kafka, trail=parse_trail("topic"), topics=(topic,)), timeout_s=120
    )
    assert facts is not None
    assert facts.verdict.clean
    output, report = tmp_path / "tables", tmp_path / "report.html"
    arguments = ["--bootstrap", dev_cluster.kafka, "--topics", topic, "--output", output, "--report", report]

    done = run_kproxy("pipeline", "audit", *arguments, timeout_s=580)

    assert done.status == 0, done.stderr[-2000:]
    assert done.stdout.startswith("Clean, duplicates not known. "), done.stdout
    assert f"{topic}/0" in done.stdout
    assert done.stderr.splitlines()[-1] == f"Report: {report}"
    assert "Clean" in report.read_text()
    (partition,) = pyarrow.parquet.read_table(output / "partitions").to_pylist()
    assert (partition["topic"], partition["acked"], partition["present"]) == (topic, RECORDS, RECORDS)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["report.html", "tables"]


def audit_status(job: AuditJob) -> int:
    return run_audit_job(job, SessionOptions("audit"), display=Report(progress=Console(file=io.StringIO())))


@pytest.fixture
def unended(dev_cluster: KproxyProcess, topic: str) -> AuditJob:
    """A trail in a topic whose proxy was killed."""
    trail, name = ForgedTrail("f" * 16), f"trail-{topic}"
    produce(dev_cluster.kafka, name, [encode_page([trail.begin()]), encode_page([trail.acked(topic, 0, RECORDS)])])
    return AuditJob(bootstrap=dev_cluster.kafka, trail=parse_trail(f"topic:{name}"), topics=(topic,))


def test_unproven_trail_ends_with_status_3(unended: AuditJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit_status(unended) == 3
    said = capsys.readouterr().out
    assert said.startswith("Unproven"), said
    assert f"{RECORDS}" in said


def test_allowed_unproven_trail_ends_with_status_0(unended: AuditJob) -> None:
    assert audit_status(replace(unended, allow_unproven=True)) == 0


def test_forged_rows_do_not_decide_a_signed_audit(
    dev_cluster: KproxyProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic, trail = (f"{word}-{uuid.uuid4().hex[:10]}" for word in ("signed", "trail"))
    key, config = tmp_path / "key", tmp_path / "kproxy.toml"
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    config.write_text(f'[audit]\nsink = "topic:{trail}"\nkey_file = "{key}"\n')
    listen = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--etcd", dev_cluster.etcd, "--alone"]
    with serving(["serve", "--config", config, *listen], tmp_path / "stderr") as proxy:
        produce(proxy.kafka, topic, [b"value"] * RECORDS)
        assert proxy.stop() == 0
    (rows,) = trails_in_topic(dev_cluster.kafka, trail).values()
    # A record that nobody wrote, in the proxy's name and in a nonexistent proxy's.
    forged = ForgedTrail(rows[0].incarnation, rows[0].proxy, sequence=rows[-1].sequence + 1)
    produce(dev_cluster.kafka, trail, [encode_page([forged.acked(topic, RECORDS, 1)])])
    produce(dev_cluster.kafka, trail, [encode_page([ForgedTrail("f" * 16, "nobody:1").acked(topic, RECORDS + 1, 1)])])

    whole = AuditJob(bootstrap=dev_cluster.kafka, trail=parse_trail(f"topic:{trail}"), topics=(topic,))
    assert audit_status(whole) == 1
    assert capsys.readouterr().out.startswith("Loss. ")
    assert audit_status(replace(whole, trail=parse_trail(f"topic:{trail}", [key]))) == 0
    out = capsys.readouterr().out
    assert out.startswith("Clean, duplicates not known. ")
    assert "Trail rows left out, not signed with the key: 2." in out


def test_large_audit_continues_on_spark(unended: AuditJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_spark(*_: object) -> None:
        raise StartupError("on Spark")

    monkeypatch.setattr("kproxy.pipeline.audit.run_spark.audit_on_spark", on_spark)
    monkeypatch.setattr("kproxy.pipeline.audit.run.MOST_BATCHES", 0)
    with pytest.raises(StartupError, match="on Spark"):
        audit_status(unended)
    assert audit_status(replace(unended, engine=LOCAL)) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--bootstrap", "127.0.0.1"], "--bootstrap: '127.0.0.1' has no port"),
        (["--bootstrap", "NOBODY"], "No Kafka answers at --bootstrap"),
        (["--trail", "topic:nowhere"], "No audit trail: there is no topic nowhere"),
        (["--trail", "json:/nonexistent"], "No audit trail: /nonexistent is not a directory"),
        (["--trail", "parquet:EMPTY"], r"has no file \*\.parquet"),
        (["--trail", "disk"], "is not a place of an audit trail"),
        (["--topics", "nix,nada"], "There is no topic nada"),
        (["--from", "1h", "--to", "2h"], "--from is not before --to"),
        (["--from", "2999-01-01"], "--from 2999-01-01 is in the future"),
        (
            ["--trail", "parquet:/tmp", "--trail-key", "/dev/null"],
            "--trail-key: a trail in Parquet files is not signed",
        ),
        (["--trail-key", "/dev/null"], "--trail-key: the key in /dev/null has 0 bytes"),
        (["--window", "10"], "--window 10 is not a duration"),
        (["--report", "/nonexistent/report.html"], "cannot be written to /nonexistent/report.html .No such file"),
        (["--conf", "x=y"], "is not a Spark setting"),
        (["--master", "yarn"], r"On a cluster \(yarn\) the tables need a place .* give --output DIR"),
        (["--engine", "local", "--master", "local[1]"], "--engine local reads files of this machine"),
        (["--engine", "local", "--output", "s3://x"], "--engine local reads files of this machine"),
        (["--follow", "--output", "x"], "--follow does not end and reports each finding at once"),
        (["--follow", "--to", "1h"], "--follow does not end"),
        (["--follow", "--json"], "omit --to, --report, --output, --json, --metrics"),
        (["--follow", "--engine", "spark"], "--follow reads files of this machine"),
        (["--follow", "--master", "local[1]"], "--follow reads files of this machine in this process: omit --master"),
        (["--follow", "--trail", "parquet:s3://x"], "--follow reads files of this machine"),
        (["--state", "x"], "--state applies only with --follow"),
        (["--follow", "--trail", "json:EMPTY"], "needs files that are whole when they appear"),
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

    monkeypatch.setattr("kproxy.pipeline.audit.run_spark.open_session", no_spark)
    given = [each.replace("NOBODY", f"127.0.0.1:{free_port()}") for each in arguments]
    given = [each.replace("EMPTY", str(tmp_path)) for each in given]
    bootstrap = [] if "--bootstrap" in given else ["--bootstrap", dev_cluster.kafka]

    assert main(["pipeline", "audit", *bootstrap, *given]) == 2
    assert re.search(sentence, capsys.readouterr().err)

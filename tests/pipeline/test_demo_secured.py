"""The demo with TLS and SASL: no part of it, Spark and the audit included, is left out or in plain text."""

from __future__ import annotations

import io
import ssl
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kproxy.demo.run import DemoOptions, run_demo
from kproxy.demo.secured import PLAIN, secure
from kproxy.errors import StartupError
from kproxy.pipeline.kafka_access import read_access
from kproxy.pipeline.progress import Report
from kproxy.security.users import read_users

ROWS = 1_000


@pytest.mark.parametrize(
    ("tls", "sasl", "protocol"),
    [(True, False, "SSL"), (False, True, "SASL_PLAINTEXT"), (True, True, "SASL_SSL")],
)
def test_generated_security_files_match_the_flags(tmp_path: Path, tls: bool, sasl: bool, protocol: str) -> None:
    made = secure(tmp_path / "security", tls=tls, sasl=sasl)
    assert made.protocol == protocol
    access = read_access(made.kafka)
    assert (access.context() is not None, access.credentials is not None) == (tls, sasl)
    if tls:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(tmp_path / "security" / "server.pem", tmp_path / "security" / "server.key")
        assert (tmp_path / "security" / "server.key").stat().st_mode & 0o777 == 0o600
    if sasl:
        assert access.credentials is not None
        users = read_users(tmp_path / "security" / "users.toml")
        assert users.check(access.credentials.username, access.credentials.password)


def test_missing_flags_generate_no_security_files(tmp_path: Path) -> None:
    assert secure(tmp_path / "security", tls=False, sasl=False) == PLAIN
    assert not (tmp_path / "security").exists()


def test_foreign_cluster_keeps_its_own_security(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--tls and --sasl do not go with --bootstrap"):
        run_demo(DemoOptions(bootstrap="127.0.0.1:1", tls=True, data_dir=tmp_path))


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.long
def test_secured_demo_ships_all_rows_and_audits_clean(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each partition is a task of Spark, with connections of its own.
    monkeypatch.setattr("kproxy.demo.run.PARTITIONS", 3)
    said, shown = io.StringIO(), io.StringIO()
    options = DemoOptions(rows=ROWS, tls=True, sasl=True, data_dir=tmp_path, report=tmp_path / "report.html", keep=True)
    report = Report(progress=Console(file=said, width=200))
    status = run_demo(options, report=report, output=Console(file=shown, width=120))
    assert status == 0, said.getvalue() + shown.getvalue()
    assert "(SASL_SSL)" in said.getvalue()
    assert f"{ROWS:,}" in shown.getvalue()
    assert "Clean" in (tmp_path / "report.html").read_text()
    # No log contains the password.
    (directory,) = tmp_path.glob("kproxy-demo-*")
    logs = "".join(log.read_text(errors="replace") for log in (directory / "cluster" / "logs").iterdir())
    assert "SCRAM" in (directory / "security" / "kproxy.toml").read_text()
    assert "password" not in logs
    for credential in read_users(directory / "security" / "users.toml").by_name["demo"].values():
        assert str(credential).rpartition("$")[2] not in logs

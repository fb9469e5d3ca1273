"""Secrets of a proxy and its workers appear in no log, argument, environment, admin page or output of check-config."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.security.users import read_users
from tests.support.processes.dev import run_kproxy, serving
from tests.support.processes.ports import free_port
from tests.support.processes.served import page, static_proxy
from tests.support.security.sasl_client import ALLOW_ALL, USERS, users_file
from tests.support.security.tls_files import Signer

PASSWORD, TOKEN = "the-secret-of-the-proxy", "the-token-of-the-page"
PAGES = ("/", "/table", "/own", "/metrics", "/readyz", "/livez")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_secrets_of_the_file_are_never_shown(tmp_path: Path, workers: str) -> None:
    users = users_file(tmp_path)
    rooms = f'[admin]\ntoken = "{TOKEN}"\n[sasl]\nmechanisms = "SCRAM-SHA-256"\nusers = "{users}"\n'
    rooms += f'[broker_sasl]\nmechanism = "SCRAM-SHA-512"\nusername = "kproxy"\npassword = "{PASSWORD}"\n' + ALLOW_ALL
    known = [str(each) for user in read_users(users).by_name.values() for each in user.values()]
    secret = {PASSWORD, TOKEN, *USERS.values(), *(key for text in known for key in text.rpartition("$")[2].split(":"))}
    with static_proxy(tmp_path, {1: free_port()}, rooms=rooms, more=["--workers", workers]) as process:
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
        assert len(family) >= int(workers)
        shown = {f"arguments of {each.pid}": " ".join(each.cmdline()) for each in family}
        shown |= {f"environment of {each.pid}": str(each.environ()) for each in family}
        for path in PAGES:
            shown[path] = page(process.admin, path, Authorization=f"Bearer {TOKEN}")[1]
        assert "partition" in shown["/table"]
        for more in ((), ("--json",)):
            ended = run_kproxy(
                "check-config",
                "--config",
                tmp_path / "kproxy.toml",
                *more,
                environ={"KPROXY_LISTEN__ADMIN": "127.0.0.1:0"},
            )
            assert ended.status == 0, ended.stderr
            shown[f"check-config {more}"] = ended.stdout + ended.stderr
        shown["log"] = process.stderr()
    assert {where for where, text in shown.items() for each in secret if each in text} == set()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_secret_files_readable_by_others_are_reported(tmp_path: Path, workers: str) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o644)
    rooms = f'[broker_sasl]\nmechanism = "SCRAM-SHA-512"\nusername = "kproxy"\npassword = "{PASSWORD}"\n'
    rooms += f'[admin]\ntoken_file = "{token}"\n'
    with static_proxy(tmp_path, {1: free_port()}, rooms=rooms, more=["--workers", workers]) as process:
        lines = [line for line in process.stderr().splitlines() if "others can read a secret" in line]
    config = tmp_path / "kproxy.toml"
    environ = {"KPROXY_LISTEN__ADMIN": "127.0.0.1:0"}
    told = run_kproxy("check-config", "--config", config, environ=environ).stderr.splitlines()
    for said in (lines, told):
        assert len(said) == 2, said
        for file in (token, config):
            assert sum("0644" in line and f"chmod 600 {file}`" in line for line in said) == 1, said
    as_json = json.loads(run_kproxy("check-config", "--config", config, "--json", environ=environ).stdout)
    assert [f"kproxy: warning: {each}" for each in as_json["warnings"]] == told
    for file in (token, config):
        file.chmod(0o640)
    assert run_kproxy("check-config", "--config", config, environ=environ).stderr == ""


def test_broker_reports_a_key_readable_by_others(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> None:
    pair = Signer(tmp_path / "ca").issue("broker", "127.0.0.1")
    pair.key.chmod(0o644)
    broker = ["broker", "--node-id", "1", "--data-dir", tmp_path / "data", "--etcd", etcd.endpoint]
    broker += ["--prefix", etcd_prefix, "--tls-cert", pair.cert, "--tls-key", pair.key]
    with serving(broker, tmp_path / "stderr") as process:
        assert f"chmod 600 {pair.key}" in process.stderr()

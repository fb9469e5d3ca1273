"""Secrets of a proxy and its workers: in no log, argument, environment, admin page, and not shown by check-config."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kproxy.security.users import read_users
from tests.support.processes.dev import run_kproxy
from tests.support.processes.ports import free_port
from tests.support.processes.served import page, static_proxy
from tests.support.security.sasl_client import ALLOW_ALL, USERS, users_file

PASSWORD, TOKEN = "the-secret-of-the-proxy", "the-token-of-the-page"
PAGES = ("/", "/table", "/own", "/metrics", "/readyz", "/livez")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_secrets_of_the_file_are_shown_nowhere(tmp_path: Path, workers: str) -> None:
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

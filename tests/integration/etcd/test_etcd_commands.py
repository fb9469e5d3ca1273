"""The commands on an etcd that requires TLS, a client certificate and a password: they serve or report the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from tests.support.clients.kafka_io import produce, read_partition
from tests.support.etcd.etcd_secured import PASSWORD, enable_users, tls_etcd
from tests.support.processes.dev import run_kproxy, serving
from tests.support.security.tls_files import Signer

PREFIX = "/kafscale"


class Guarded(NamedTuple):
    """An etcd with all three, and the flags to use it."""

    flags: list[str]
    plain: str
    password_file: Path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    directory = tmp_path_factory.mktemp("guarded")
    authority = Signer(directory / "ca")
    client = authority.issue("client")
    async with tls_etcd(directory / "etcd", authority.issue("localhost"), authority.ca) as (server, port):
        await enable_users(server.endpoint, prefix=f"{PREFIX}/")
        password_file = directory / "password"
        password_file.write_text(PASSWORD)
        flags = ["--etcd", f"https://localhost{port}", "--etcd-ca", str(authority.ca), "--etcd-username", "kproxy"]
        flags += ["--etcd-cert", str(client.cert), "--etcd-key", str(client.key)]
        yield Guarded(flags, server.endpoint, password_file)


def test_broker_proxy_and_table_use_one_etcd(guarded: Guarded, tmp_path: Path) -> None:
    flags = [*guarded.flags, "--etcd-password-file", str(guarded.password_file)]
    with ExitStack() as stack:
        arguments = ["broker", "--node-id", "7", "--data-dir", str(tmp_path / "data"), "--lease-ttl", "2", *flags]
        stack.enter_context(serving(arguments, tmp_path / "broker"))
        proxy = stack.enter_context(serving(["serve", "--listen", "127.0.0.1:0", *flags], tmp_path / "proxy"))
        produce(proxy.kafka, "guarded", [b"one"])
        assert read_partition(proxy.kafka, "guarded", 0, 1) == [b"one"]
        shown = run_kproxy("table", *guarded.flags, environ={"KPROXY_ETCD__PASSWORD": PASSWORD})
        assert shown.status == 0, shown.stderr
        assert [line.split()[:3] for line in shown.stdout.splitlines() if line.startswith("guarded")] == [
            ["guarded", "0", "7"]
        ]
        listed = run_kproxy("own", "list", *guarded.flags, environ={"KPROXY_ETCD__PASSWORD": PASSWORD})
        assert listed.status == 0, listed.stderr
        assert f"1 proxy offers the Own API: {proxy.kafka}" in listed.stdout
        for process in ("broker", "proxy"):
            assert PASSWORD not in (tmp_path / process).read_text()


@pytest.mark.parametrize("command", ["serve", "broker", "table"])
def test_wrong_password_is_reported_in_one_sentence(guarded: Guarded, tmp_path: Path, command: str) -> None:
    arguments = {
        "serve": ["serve", "--listen", "127.0.0.1:0"],
        "broker": ["broker", "--node-id", "1", "--data-dir", str(tmp_path / "data")],
        "table": ["table"],
    }[command]
    ended = run_kproxy(*arguments, *guarded.flags, environ={"KPROXY_ETCD__PASSWORD": "hunter2"})
    assert ended.status == 2, ended
    *_, sentence = ended.stderr.splitlines()
    assert sentence.startswith("kproxy: ")
    assert "does not take this user" in sentence
    assert sentence.endswith("KPROXY_ETCD__PASSWORD.")
    assert "hunter2" not in ended.stderr

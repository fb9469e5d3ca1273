"""Listeners on IPv6: addresses are printed with brackets, and `[::]` also serves IPv4 clients."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kproxy_codec.api_keys import API_VERSIONS
from kproxy_codec.framing import request_header
from tests.support.clients.raw_client import raw_frame
from tests.support.processes.dev import run_kproxy
from tests.support.processes.served import port_of, static_proxy
from tests.support.waiting import PATIENCE_S, wait_for

QUESTION = raw_frame(request_header(API_VERSIONS, 0, 77, b"c"))
LOOPBACKS = ("127.0.0.1", "::1")

pytestmark = pytest.mark.skipif(not socket.has_ipv6, reason="IPv6 is needed")


def answers(host: str, port: int) -> bool:
    with socket.create_connection((host, port), timeout=PATIENCE_S) as client:
        client.sendall(QUESTION)
        return client.recv(8)[4:] == (77).to_bytes(4, "big")


@pytest.mark.parametrize("workers", [1, 2])
def test_wildcard_serves_both_families(tmp_path: Path, workers: int) -> None:
    more = ["--listen", "[::]:0", "--advertise", "localhost:9092", "--admin", "[::1]:0", "--workers", str(workers)]
    with static_proxy(tmp_path, {1: 1}, more=more) as process:
        assert process.kafka == f"[::]:{port_of(process)}"
        assert all(answers(host, port_of(process)) for host in LOOPBACKS)
        assert run_kproxy("table", "--admin", process.admin).status == 0


def two_listeners(*hosts: str) -> str:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as free:
        port = free.getsockname()[1]
    texts = [f'name = "l{n}"\nlisten = "{host}:{port}"\nadvertise = "localhost:9092"\n' for n, host in enumerate(hosts)]
    return "".join(f"[[listeners]]\n{text}" for text in texts)


@pytest.mark.parametrize("hosts", [("0.0.0.0", "[::]"), ("127.0.0.1", "[::1]")])
def test_families_share_port_and_name(tmp_path: Path, hosts: tuple[str, str]) -> None:
    with static_proxy(tmp_path, {1: 1}, rooms=two_listeners(*hosts), listen=None) as process:
        named = [each.rpartition(":")[0] for each in process.fields["listeners"].split(",")]
        assert named == [f"l{number}@{host}" for number, host in enumerate(hosts)]
        assert all(answers(host, port_of(process)) for host in LOOPBACKS)


def test_log_shows_clients_with_brackets(tmp_path: Path) -> None:
    with static_proxy(tmp_path, {1: 1}, more=["--listen", "[::1]:0"]) as process:
        with socket.create_connection(("::1", port_of(process)), timeout=PATIENCE_S) as client:
            client.sendall(b"\x7f\xff\xff\xff")
            assert client.recv(1) == b""
            peer = f"client=[::1]:{client.getsockname()[1]}"
        wait_for(lambda: peer in process.stderr())

"""A listener behind a load balancer: the PROXY protocol's header comes first and names the client."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.support.clients.blocking_client import QUESTION, connect, is_answered
from tests.support.processes.served import counted, static_proxy
from tests.support.security.proxy_header import LOCAL, header
from tests.support.security.tls_files import Signer, client_context
from tests.support.waiting import wait_for


def test_client_behind_a_balancer_is_named(tmp_path: Path) -> None:
    with static_proxy(tmp_path, {1: 1}, more=["--proxy-protocol"]) as process:
        # Written at once, and byte by byte.
        for portion in (1 << 20, 1):
            with connect(process) as client:
                data = header(("203.0.113.7", 4711), checksum=True) + QUESTION
                for at in range(0, len(data), portion):
                    client.sendall(data[at : at + portion])
                assert is_answered(client)
                client.sendall(b"\x7f\xff\xff\xff")
                assert client.recv(1) == b""
        wait_for(lambda: process.stderr().count("client=203.0.113.7:4711") == 2)
        with connect(process) as client:
            client.sendall(header(command=LOCAL) + QUESTION)
            assert is_answered(client)


def test_client_without_proxy_header_is_rejected(tmp_path: Path) -> None:
    with static_proxy(tmp_path, {1: 1}, more=["--proxy-protocol"]) as process:
        for data in (QUESTION, b"PROXY TCP4 203.0.113.7 198.51.100.1 1 2\r\n", header(family=0x31)):
            with connect(process) as client, contextlib.suppress(ConnectionError):
                client.sendall(data)
                assert client.recv(1) == b""
        wait_for(lambda: counted(process.admin, 'kproxy_client_handshakes_total{outcome="proxy_header"}') == 3)
        assert "does not begin with a header of the PROXY protocol" in process.stderr()


def test_proxy_header_is_accepted_only_from_balancers(tmp_path: Path) -> None:
    senders = 'proxy_protocol = true\nproxy_protocol_from = ["127.0.0.2", "127.1.0.0/16", "fd00::/8"]\n'
    with static_proxy(tmp_path, {1: 1}, rooms="[listen]\n" + senders) as process:
        data = header(("203.0.113.7", 4711)) + QUESTION
        for source in ("127.0.0.2", "127.1.2.3"):
            with connect(process, source=source) as client:
                client.sendall(data)
                assert is_answered(client)
        for source in ("127.0.0.1", "127.0.0.3"):
            with connect(process, source=source) as client, contextlib.suppress(ConnectionError):
                client.sendall(data)
                assert client.recv(1) == b""
        # Closed without sending a byte.
        with connect(process) as client:
            assert client.recv(1) == b""
        wait_for(lambda: counted(process.admin, 'kproxy_client_handshakes_total{outcome="proxy_sender"}') == 3)
        assert "client=127.0.0.3:" in process.stderr()
        assert "not in proxy_protocol_from" in process.stderr()


def test_tls_follows_the_header(tmp_path: Path) -> None:
    signer = Signer(tmp_path / "ca")
    pair = signer.issue("server", "localhost")
    rooms = f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n'
    with static_proxy(tmp_path, {1: 1}, rooms=rooms, more=["--proxy-protocol"]) as process:
        with connect(process) as plain:
            plain.sendall(header(("2001:db8::7", 4711), ("2001:db8::1", 9092)))
            with client_context(signer.ca).wrap_socket(plain, server_hostname="localhost") as client:
                client.sendall(QUESTION)
                assert is_answered(client)
        with connect(process) as plain, pytest.raises(OSError):  # noqa: PT011 -- reset or closed
            client_context(signer.ca).wrap_socket(plain, server_hostname="localhost")
        with connect(process) as plain:
            plain.sendall(header(("2001:db8::8", 4712), ("2001:db8::1", 9092)) + b"GET / HTTP/1.1\r\n\r\n")
            assert plain.recv(12) == b"HTTP/1.1 400"
        wait_for(lambda: "client=[2001:db8::8]:4712" in process.stderr())

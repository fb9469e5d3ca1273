"""A client that uses TLS, HTTP, SSH or SASL on a plain listener gets an error, which is logged once."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.runtime.process import spawn
from kproxy_codec.api_keys import API_VERSIONS, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.error_codes import UNSUPPORTED_SASL_MECHANISM
from kproxy_codec.framing import request_header
from tests.support.brokers.reference_broker import BrokerProcess
from tests.support.clients.raw_client import raw_frame
from tests.support.processes.served import port_of, static_proxy

HOST = "127.0.0.1"


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, port), timeout=60) as client:
        yield client


def whole_answer(client: socket.socket) -> bytes:
    """All bytes until it is closed."""
    got = b""
    while data := client.recv(4096):
        got += data
    return got


def speak_tls(port: int) -> None:
    context = ssl.create_default_context()
    with connected(port) as client, pytest.raises(ssl.SSLError) as raised:
        context.wrap_socket(client, server_hostname="localhost")
    # OpenSSL's message for an answer that is not TLS.
    assert raised.value.reason == "WRONG_VERSION_NUMBER"


def speak_http(port: int) -> None:
    for method in ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH", "CONNECT"):
        connection = http.client.HTTPConnection(HOST, port, timeout=60)
        connection.request(method, "/metrics", body=bytes(1000) if method == "POST" else None)
        answer = connection.getresponse()
        assert answer.status == 400
        assert method == "HEAD" or b"Kafka" in answer.read()
        connection.close()
    with connected(port) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert whole_answer(client).startswith(b"HTTP/1.1 400 ")


def speak_ssh(port: int) -> None:
    with connected(port) as client:
        client.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        assert whole_answer(client) == b""


def speak_sasl(port: int) -> None:
    """At once, like clients with fixed versions; and after ApiVersions, like current ones."""
    for asks_first in (False, True):
        for version in (0, 1):
            with connected(port) as client:
                if asks_first:
                    client.sendall(raw_frame(request_header(API_VERSIONS, 0, 1, b"c")))
                    (length,) = struct.unpack(">i", client.recv(4, socket.MSG_WAITALL))
                    client.recv(length, socket.MSG_WAITALL)
                body = struct.pack(">h5s", 5, b"PLAIN")
                client.sendall(raw_frame(request_header(SASL_HANDSHAKE, version, 77, b"c") + body))
                answered = raw_frame(struct.pack(">ihi", 77, UNSUPPORTED_SASL_MECHANISM, 0))
                assert whole_answer(client) == answered
    with connected(port) as client:
        client.sendall(raw_frame(request_header(SASL_AUTHENTICATE, 1, 78, b"c") + struct.pack(">i3s", 3, b"\0u\0")))
        assert whole_answer(client) == b""


SPEAKERS: dict[str, tuple[Callable[[int], None], str]] = {
    "TLS": (speak_tls, "set security.protocol=PLAINTEXT"),
    "HTTP": (speak_http, "--admin"),
    "SSH": (speak_ssh, "speaks Kafka's protocol"),
    "SASL": (speak_sasl, "set security.protocol=PLAINTEXT"),
}


def test_proxy_answers_and_names_each_foreign_protocol_once(tmp_path: Path) -> None:
    with static_proxy(tmp_path, {1: 1}) as process:
        for speak, _ in SPEAKERS.values():
            for _ in range(3):
                speak(port_of(process))
        lines = process.stderr().splitlines()
        for protocol, (_, advice) in SPEAKERS.items():
            named = [line for line in lines if f"protocol={protocol}" in line]
            assert len(named) == 1, "\n".join(lines)
            assert advice in named[0]
        assert not [line for line in lines if "announces" in line or "not offered" in line]
    assert "of='client speaks another protocol: TLS'" in process.stderr()


def test_reference_broker_names_each_foreign_protocol_once(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    broker = BrokerProcess(1, tmp_path / "1", etcd.endpoint, f"/{tmp_path.name}")
    try:
        broker.start()
        port = int(broker.address.rpartition(":")[2])
        for speak, advice in SPEAKERS.values():
            speak(port)
            assert advice in broker.log()
    finally:
        broker.stop()


# The errors that users of misconfigured clients see

_SASL = """
PLAIN = {"sasl_mechanism": "PLAIN", "sasl_plain_username": "u", "sasl_plain_password": "p"}
more = PLAIN if "SASL" in protocol else {}
"""
_CLIENTS = {
    "confluent-kafka": """
from confluent_kafka import Producer
more = {"sasl.mechanisms": "PLAIN", "sasl.username": "u", "sasl.password": "p"} if "SASL" in protocol else {}
producer = Producer({"bootstrap.servers": bootstrap, "security.protocol": protocol, "message.timeout.ms": 1500, **more})
producer.produce("t", b"x")
producer.flush(4)
""",
    "kafka-python": _SASL
    + """
import logging
from kafka import KafkaProducer
logging.basicConfig()
KafkaProducer(bootstrap_servers=bootstrap, security_protocol=protocol, max_block_ms=1500, **more)
""",
    "aiokafka": _SASL
    + """
import asyncio, logging, ssl
from aiokafka import AIOKafkaProducer
logging.basicConfig()
async def main():
    if "SSL" in protocol: more["ssl_context"] = ssl.create_default_context()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, security_protocol=protocol, **more)
    try:
        await producer.start()
    finally:
        await producer.stop()
asyncio.run(main())
""",
}
_SEEN = {"SSL": "wrong version number", "SASL_PLAINTEXT": "handshake"}


@pytest.mark.parametrize("client", _CLIENTS)
async def test_client_shows_the_error_to_its_user(tmp_path: Path, client: str) -> None:
    with static_proxy(tmp_path, {1: 1}) as process:
        for protocol, seen in _SEEN.items():
            script = f"bootstrap, protocol = {process.kafka!r}, {protocol!r}\n" + _CLIENTS[client]
            run = await spawn(
                *(sys.executable, "-u", "-c", script), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            assert run.stdout is not None
            said = ""
            try:
                async with asyncio.timeout(60):
                    while seen not in said.lower() and (line := await run.stdout.readline()):
                        said += line.decode()
            finally:
                # Some retry for half a minute.
                with contextlib.suppress(ProcessLookupError):
                    run.kill()
                await run.communicate()
            assert seen in said.lower(), f"{protocol}: {said[-2000:]}"

"""If something other than Kafka listens, the error comes at once with the address, and not after a timeout."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.audit.log_client import LogClient, LogReadFailed
from kproxy.pipeline.audit.run import check_places
from kproxy.pipeline.audit.trail_place import parse_trail
from kproxy.pipeline.preflight import check_kafka
from kproxy.routing.topology import Address
from kproxy_codec.foreign import ANSWER_TO_HTTP

SOON_S = 20.0
HTTP_ANSWER = b"HTTP/1.1 400 Bad Request\r\n\r\n"


def answers_http(handler: socketserver.StreamRequestHandler) -> None:
    handler.connection.recv(1)
    handler.wfile.write(HTTP_ANSWER)


def waits_for_a_line(handler: socketserver.StreamRequestHandler) -> None:
    """Wait as etcd does for the end of a line that may become HTTP."""
    if handler.rfile.readline().startswith(b"GET"):
        handler.wfile.write(HTTP_ANSWER)


def closes_what_is_no_http(handler: socketserver.StreamRequestHandler) -> None:
    if handler.rfile.read(4).startswith(b"GET"):
        handler.wfile.write(HTTP_ANSWER)


def alerts(handler: socketserver.StreamRequestHandler) -> None:
    """Answer like a TLS listener to bytes that are not TLS."""
    handler.connection.recv(1)
    handler.wfile.write(b"\x15\x03\x03\x00\x02\x02\x46")


def is_silent(handler: socketserver.StreamRequestHandler) -> None:
    handler.rfile.read()


Behaviour = Callable[[socketserver.StreamRequestHandler], None]


@contextmanager
def listening(behaviour: Behaviour) -> Iterator[Address]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            behaviour(self)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield Address("127.0.0.1", server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("behaviour", "protocol"),
    [(answers_http, "HTTP"), (waits_for_a_line, "HTTP"), (closes_what_is_no_http, "HTTP"), (alerts, "TLS")],
)
def test_other_protocol_is_named_at_once(behaviour: Behaviour, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy.pipeline.audit.run.PATIENCE_S", 3 * SOON_S)
    began = time.monotonic()
    with listening(behaviour) as address, pytest.raises(StartupError) as raised:
        check_places(str(address), parse_trail("topic"), str(address), ())
    with listening(behaviour) as other, pytest.raises(StartupError) as of_ingest:
        check_kafka(str(other), "--from-bootstrap", {})
    assert str(raised.value).startswith(f"No Kafka answers at --bootstrap {address}: {address} speaks {protocol}")
    assert str(of_ingest.value).startswith(f"No Kafka answers at --from-bootstrap {other}: {other} speaks {protocol}")
    assert time.monotonic() - began < SOON_S


def test_client_of_tls_broker_gets_the_option() -> None:
    """With SASL, no further request is sent to the port."""
    login = 'username="alice" password="secret"'
    options = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.jaas.config": login}
    with (
        listening(alerts) as address,
        LogClient(str(address), options, timeout_s=SOON_S, patience_s=0) as client,
        pytest.raises(LogReadFailed, match=r"speaks TLS.*: set security\.protocol to SSL or SASL_SSL"),
    ):
        client.partitions(None)


def is_slow(handler: socketserver.StreamRequestHandler) -> None:
    """Answer late, like a kproxy listener on a busy machine; HTTP is answered at once."""
    if handler.rfile.read(4).startswith(b"GET"):
        handler.wfile.write(ANSWER_TO_HTTP)
    else:
        handler.rfile.read()


@pytest.mark.parametrize("behaviour", [is_silent, is_slow])
def test_possible_broker_is_awaited(behaviour: Behaviour) -> None:
    with (
        listening(behaviour) as address,
        LogClient(str(address), timeout_s=1.5, patience_s=1) as client,
        pytest.raises(LogReadFailed, match=r"no answer in time.*given up"),
    ):
        client.partitions(None)

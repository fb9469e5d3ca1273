"""Write the trail to a topic with kafka-python, and make its clients so that a failure leaks nothing.

Messages have the process's incarnation as key, so one partition has all of its trail in order. kafka-python's producer
runs its network on a thread of its own; blocking calls are made on another one. By default it reaches the cluster
through this proxy itself, on connections that never leave the process: `dial` makes one, for any broker's address. So
the advertised address, other listeners on the port, and a closed listener do not matter.

`connected` makes clients: kafka-python itself leaves sockets that failed to connect to the garbage collector, and a
client that fails in its constructor leaves its sockets and its thread. It also logs every error that it raises, bounds
no TLS handshake, computes SCRAM's proof with as few iterations as a broker says, and reports a timeout where a broker
refuses it; here the connection's own error is noted.

States: none --a page--> a producer --a failure--> none.

Invariants
1. A producer that failed is discarded with all that it holds. The next one, with a producer id of its own, writes the
   pages again. A page may then be there twice, never changed, and never out of order by more.
2. Nothing blocks for longer than the timeouts below, and nothing blocks the event loop.
"""

from __future__ import annotations

import logging
import re
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaConnectionError, KafkaError, TopicAlreadyExistsError
from kafka.net.compat import KafkaNetClient
from kafka.net.sasl import register_sasl_mechanism
from kafka.net.sasl.oauth import AbstractTokenProvider
from kafka.net.sasl.scram import SaslMechanismScram
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport

from kproxy.address import Address
from kproxy.config.broker_sasl import LEAST_SCRAM_ITERATIONS, BrokerSasl
from kproxy.errors import StartupError
from kproxy.trail.sink import BatchPreference, SinkFailed, on_thread

if TYPE_CHECKING:
    from kproxy.security.broker_auth import BrokerAuth

CONNECT_S: Final = 3.0
# The cluster's own default.
DEFAULT_REPLICATION: Final = -1

# Of a broker's words in the log, in characters.
MOST_REASON: Final = 1_000
_ITERATIONS: Final = re.compile(rb"(?:^|,)i=([0-9]{1,10})(?:,|$)")

Connect = Callable[[str, int], socket.socket]
"""Connects to a host and port, on any thread, or raises OSError."""


def over_the_network(host: str, port: int) -> socket.socket:
    connected = socket.create_connection((host, port), CONNECT_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connected


Note = Callable[[str], None]
"""Takes the reason why a connection has ended."""


def connected(
    kind: Callable[..., Any],
    connect: Connect = over_the_network,
    *,
    access: BrokerAuth | None = None,
    note: Note = lambda reason: None,
    **configs: Any,
) -> Any:
    """A client of that kind, such as KafkaProducer, that connects by `connect` alone, with TLS and SASL as in `access`.

    `note` is called on the client's thread. Raises KafkaError, and StartupError for a secret that cannot be read.
    """
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    made: list[Any] = []

    def make_client(**given: Any) -> Any:
        made.append(_client(connect, access, note, **given))
        return made[-1]

    configs |= _security(access)

    try:
        return kind(**configs, kafka_client=make_client)
    except BaseException:
        for client in made:
            client.close()
        raise


def create_topic(admin: Any, topic: str, partitions: int) -> None:
    """Create a topic with a KafkaAdminClient, and wait until it has leaders.

    Raises KafkaError.
    """
    settings = {"num_partitions": partitions, "replication_factor": DEFAULT_REPLICATION}
    admin.create_topics({topic: settings}, wait_for_metadata=True)


def _security(access: BrokerAuth | None) -> dict[str, Any]:
    """kafka-python's options of an access. Raises StartupError."""
    if access is None or access.is_plain:
        return {}
    has_tls, sasl = access.context() is not None, access.sasl
    if sasl is None:
        return {"security_protocol": "SSL"}
    settings = {"security_protocol": "SASL_SSL" if has_tls else "SASL_PLAINTEXT", "sasl_mechanism": sasl.mechanism}
    if sasl.mechanism == "OAUTHBEARER":
        return {**settings, "sasl_oauth_token_provider": _TokenFile(sasl)}
    return {**settings, "sasl_plain_username": sasl.username, "sasl_plain_password": sasl.read_secret()}


class _TokenFile(AbstractTokenProvider):  # type: ignore[misc]  # kafka-python has no types
    """Reads the token anew for each authentication."""

    def __init__(self, sasl: BrokerSasl) -> None:
        super().__init__()
        self._sasl = sasl

    def token(self) -> str:
        return self._sasl.read_secret()


class CarefulScram(SaslMechanismScram):  # type: ignore[misc]
    """SCRAM that gives no proof for fewer iterations than clients have to ask for."""

    def receive(self, auth_bytes: bytes) -> bool:
        found = _ITERATIONS.search(auth_bytes) if not self._state else None
        if not self._state and (found is None or int(found[1]) < LEAST_SCRAM_ITERATIONS):
            raise ValueError(f"it asks for fewer than {LEAST_SCRAM_ITERATIONS} iterations of SCRAM")
        done: bool = super().receive(auth_bytes)
        return done


for _name in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
    register_sasl_mechanism(_name, CarefulScram, overwrite=True)


class _Noting(KafkaTCPTransport):  # type: ignore[misc]
    """A transport that notes the error with which it ends."""

    def __init__(self, net: Any, connection: socket.socket, host: str, note: Callable[[BaseException], None]) -> None:
        # A connection with TLS has finished its handshake: KafkaSSLTransport's own constructor would begin another.
        KafkaTCPTransport.__init__(self, net, connection, host=host)
        self._note = note

    def abort(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._note(error)
        super().abort(error)

    def _sock_recv(self) -> tuple[bytes, BaseException | None]:
        received, error = super()._sock_recv()
        # The last bytes before the end have the broker's reason, and kafka-python would not read them; the end shows
        # again at the next attempt to receive.
        return received, None if received else error


class _NotingTls(_Noting, KafkaSSLTransport):  # type: ignore[misc]
    """The same with TLS."""


def _client(connect: Connect, access: BrokerAuth | None, note: Note, **configs: Any) -> Any:
    client = KafkaNetClient(**configs)

    async def build_transport(node: Any, timeout_at: float | None = None) -> Any:
        def ended(error: BaseException) -> None:
            # kafka-python wraps the errors of TLS.
            cause = error.args[0] if error.args and isinstance(error.args[0], OSError) else error
            if access is not None and isinstance(cause, OSError):
                cause = access.explain(cause, node.host)
            note(f"{Address(node.host, node.port)}: {str(cause) or type(cause).__name__}")

        try:
            connected = connect(node.host, node.port)
            context = access.context() if access is not None else None
            if access is not None and context is not None:
                connected = _with_tls(connected, context, access.server_name(node.host))
        except OSError as error:
            ended(error)
            raise KafkaConnectionError(f"no connection to {Address(node.host, node.port)}: {error}") from error
        connected.setblocking(False)
        kind = _NotingTls if isinstance(connected, ssl.SSLSocket) else _Noting
        return kind(client._net, connected, node.host, ended)

    client._manager._build_transport = build_transport
    return client


def _with_tls(connected: socket.socket, context: ssl.SSLContext, name: str | None) -> ssl.SSLSocket:
    """Do the handshake, within CONNECT_S. Raises OSError, with the socket closed."""
    try:
        connected.settimeout(CONNECT_S)
        return context.wrap_socket(connected, server_hostname=name)
    except BaseException:
        connected.close()
        raise


PARTITIONS = 3
WRITE_BYTES = 1 << 20
CLIENT_ID = "kproxy-audit"
# A name for the proxy behind `dial`; it is never resolved.
INSIDE = "kproxy.invalid:9092"
BOOTSTRAP_MS = 5_000
REQUEST_MS = 10_000
DELIVERY_MS = 20_000
CLOSE_S = 1.0


class TopicSink:
    """`bootstrap` are HOST:PORT, or `dial` is given: it connects, on any thread, or raises OSError.

    `access`: TLS and SASL towards `bootstrap`; None: neither.
    """

    def __init__(
        self,
        topic: str,
        incarnation: str,
        *,
        bootstrap: Sequence[str] = (),
        dial: Callable[[], socket.socket] | None = None,
        access: BrokerAuth | None = None,
    ) -> None:
        self.preference = BatchPreference(WRITE_BYTES)
        self._topic = topic
        self._key = incarnation.encode()
        self._client: dict[str, Any] = {
            "bootstrap_servers": list(bootstrap) if dial is None else [INSIDE],
            "client_id": CLIENT_ID,
            "bootstrap_timeout_ms": BOOTSTRAP_MS,
            "request_timeout_ms": REQUEST_MS,
        }
        self._connect = over_the_network if dial is None else lambda host, port: dial()
        self._access = access
        # Why the first connection ended that did not end well: later ones end with a timeout.
        self._trouble = ""
        self._producer: Any = None
        # Why the topic could not be created, in case it is missing.
        self._not_made = ""

    async def write(self, pages: Sequence[bytes]) -> None:
        try:
            if self._producer is None:
                self._producer = await on_thread(self._open)
            producer = self._producer
            await on_thread(lambda: self._send(producer, pages))
        except Exception as error:
            await self.close()
            if not isinstance(error, (KafkaError, OSError, StartupError)):
                raise
            reason = f"topic {self._topic}: {str(error) or type(error).__name__}"
            if self._trouble:
                reason, self._trouble = f"{reason} ({self._trouble})", ""
            if self._not_made:
                reason = f"{reason}; it could not be made: {self._not_made}"
            raise SinkFailed(reason[:MOST_REASON]) from error

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await on_thread(lambda: _close(producer))

    def _open(self) -> Any:
        self._not_made = self._trouble = ""
        admin = self._connected(KafkaAdminClient)
        try:
            create_topic(admin, self._topic, PARTITIONS)
        except TopicAlreadyExistsError:
            pass
        except KafkaError as error:
            # The topic may exist, or be created by others: writing to it shows that.
            self._not_made = str(error) or type(error).__name__
        finally:
            admin.close()
        return self._connected(
            KafkaProducer,
            acks="all",
            enable_idempotence=True,
            max_block_ms=REQUEST_MS,
            delivery_timeout_ms=DELIVERY_MS,
            metrics_enabled=False,
        )

    def _connected(self, kind: Callable[..., Any], **configs: Any) -> Any:
        return connected(kind, self._connect, access=self._access, note=self._noted, **self._client, **configs)

    def _noted(self, reason: str) -> None:
        self._trouble = self._trouble or reason

    def _send(self, producer: Any, pages: Sequence[bytes]) -> None:
        until = time.monotonic() + (DELIVERY_MS + REQUEST_MS) / 1000
        sent = [producer.send(self._topic, value=page, key=self._key) for page in pages]
        for each in sent:
            each.get(timeout=max(0.0, until - time.monotonic()))
        self._not_made = self._trouble = ""


def _close(producer: Any) -> None:
    """Close without sending the rest."""
    try:
        producer.close(timeout=CLOSE_S)
    except KafkaError:
        # `close` gives up if it cannot send all; without this the sender continues in the background.
        producer._sender.force_close()

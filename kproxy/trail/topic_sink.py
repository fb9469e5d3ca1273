"""Write the trail to a topic with kafka-python, and make its clients so that a failure leaks nothing.

Messages have the process's incarnation as key, so one partition has all of its trail in order. kafka-python's producer
runs its network on a thread of its own; blocking calls are made on another one. By default it reaches the cluster
through this proxy itself, on connections that never leave the process: `dial` makes one, for any broker's address. So
the advertised address, other listeners on the port, and a closed listener do not matter.

`connected` makes clients: kafka-python itself leaves sockets that failed to connect to the garbage collector, and a
client that fails in its constructor leaves its sockets and its thread. It also logs every error that it raises.

States: none --a page--> a producer --a failure--> none.

Invariants
1. A producer that failed is discarded with all that it holds. The next one, with a producer id of its own, writes the
   pages again. A page may then be there twice, never changed, and never out of order by more.
2. Nothing blocks for longer than the timeouts below, and nothing blocks the event loop.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaConnectionError, KafkaError, TopicAlreadyExistsError
from kafka.net.compat import KafkaNetClient
from kafka.net.transport import KafkaTCPTransport

from kproxy.trail.sink import Appetite, SinkFailed, on_thread

CONNECT_S: Final = 3.0
# The cluster's own default.
DEFAULT_REPLICATION: Final = -1

Connect = Callable[[str, int], socket.socket]
"""Connects to a host and port, on any thread, or raises OSError."""


def over_the_network(host: str, port: int) -> socket.socket:
    connected = socket.create_connection((host, port), CONNECT_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connected


def connected(kind: Callable[..., Any], connect: Connect = over_the_network, **configs: Any) -> Any:
    """A client of that kind, such as KafkaProducer, that connects by `connect` alone. Raises KafkaError."""
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    made: list[Any] = []

    def make_client(**given: Any) -> Any:
        made.append(_client(connect, **given))
        return made[-1]

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


def _client(connect: Connect, **configs: Any) -> Any:
    client = KafkaNetClient(**configs)

    async def build_transport(node: Any, timeout_at: float | None = None) -> Any:
        try:
            connected = connect(node.host, node.port)
        except OSError as error:
            raise KafkaConnectionError(f"no connection to {node.host}:{node.port}: {error}") from error
        connected.setblocking(False)
        return KafkaTCPTransport(client._net, connected, host=node.host)

    client._manager._build_transport = build_transport
    return client


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
    """`bootstrap` are HOST:PORT, or `dial` is given: it connects, on any thread, or raises OSError."""

    def __init__(
        self,
        topic: str,
        incarnation: str,
        *,
        bootstrap: Sequence[str] = (),
        dial: Callable[[], socket.socket] | None = None,
    ) -> None:
        self.appetite = Appetite(WRITE_BYTES)
        self._topic = topic
        self._key = incarnation.encode()
        self._client: dict[str, Any] = {
            "bootstrap_servers": list(bootstrap) if dial is None else [INSIDE],
            "client_id": CLIENT_ID,
            "bootstrap_timeout_ms": BOOTSTRAP_MS,
            "request_timeout_ms": REQUEST_MS,
        }
        self._connect = over_the_network if dial is None else lambda host, port: dial()
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
            if not isinstance(error, (KafkaError, OSError)):
                raise
            reason = f"topic {self._topic}: {str(error) or type(error).__name__}"
            raise SinkFailed(
                f"{reason}; it could not be made: {self._not_made}" if self._not_made else reason
            ) from error

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await on_thread(lambda: _close(producer))

    def _open(self) -> Any:
        self._not_made = ""
        admin = connected(KafkaAdminClient, self._connect, **self._client)
        try:
            create_topic(admin, self._topic, PARTITIONS)
        except TopicAlreadyExistsError:
            pass
        except KafkaError as error:
            # The topic may exist, or be created by others: writing to it shows that.
            self._not_made = str(error) or type(error).__name__
        finally:
            admin.close()
        return connected(
            KafkaProducer,
            self._connect,
            **self._client,
            acks="all",
            enable_idempotence=True,
            max_block_ms=REQUEST_MS,
            delivery_timeout_ms=DELIVERY_MS,
            metrics_enabled=False,
        )

    def _send(self, producer: Any, pages: Sequence[bytes]) -> None:
        until = time.monotonic() + (DELIVERY_MS + REQUEST_MS) / 1000
        sent = [producer.send(self._topic, value=page, key=self._key) for page in pages]
        for each in sent:
            each.get(timeout=max(0.0, until - time.monotonic()))
        self._not_made = ""


def _close(producer: Any) -> None:
    """Close without sending the rest."""
    try:
        producer.close(timeout=CLOSE_S)
    except KafkaError:
        # `close` gives up if it cannot send all; without this the sender continues in the background.
        producer._sender.force_close()

"""Clients of kafka-python that leave nothing behind when they fail.

kafka-python's own way leaves sockets that could not connect to the garbage collector, which looks for them seldom, and
a client that fails as it is made leaves its sockets and its thread. It also logs what it raises as well.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any, Final

from kafka.errors import KafkaConnectionError
from kafka.net.compat import KafkaNetClient
from kafka.net.transport import KafkaTCPTransport

CONNECT_S: Final = 3.0
# As the cluster has it configured.
DEFAULT_REPLICATION: Final = -1

Connect = Callable[[str, int], socket.socket]
"""Connects to a host and port, on any thread, or raises OSError."""


def over_the_network(host: str, port: int) -> socket.socket:
    connected = socket.create_connection((host, port), CONNECT_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connected


def connected(kind: Callable[..., Any], connect: Connect = over_the_network, **configs: Any) -> Any:
    """A client of that kind, for one KafkaProducer, whose connections are all made by `connect`. Raises KafkaError."""
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
    """Make a topic with a KafkaAdminClient, and wait until it has leaders. Raises KafkaError."""
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

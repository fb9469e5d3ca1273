"""Send exactly the messages that a test specifies to a broker's replication listener, on one connection."""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections.abc import Sequence
from typing import NamedTuple, Self

from kproxy.broker.keys import BrokerValue, Keys, ReplicaKey, decode_value
from kproxy.broker.replication.authentication import MECHANISM, FollowerHandshake, Secret
from kproxy.etcd import EtcdClient
from kproxy_codec import control
from kproxy_codec.api_keys import SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.fetch import PartitionFetch
from kproxy_codec.replica_fetch import ReplicaAnswer, encode_replica_fetch, read_replica_answer
from tests.support.brokers.reference_broker import RawClient

# A value for a data directory's id.
NO_DIRECTORY = uuid.UUID(int=0)


class Replication(NamedTuple):
    """Access of followers to a broker: the address of its listener and the cluster's secret."""

    host: str
    port: int
    secret: Secret

    def client(self) -> FollowerClient:
        return FollowerClient(self.host, self.port)

    def follower(self, node_id: int, log_id: uuid.UUID = NO_DIRECTORY) -> FollowerClient:
        """A client authenticated as broker `node_id`, with that data directory."""
        return self.client().authenticate(node_id, self.secret, log_id=log_id)


def replication_of(etcd: str, prefix: str, node_id: int) -> Replication:
    """The broker's replication listener, from its key in etcd."""

    async def read() -> Replication:
        client, keys = EtcdClient((etcd,)), Keys(prefix)
        try:
            await client.connect()
            broker, secret = await client.get(keys.broker(node_id)), await client.get(keys.replication_secret)
        finally:
            await client.close()
        assert broker is not None
        assert secret is not None
        value = decode_value(broker.value, BrokerValue)
        return Replication(value.host, value.replication_port, Secret.of(secret.value.decode()))

    return asyncio.run(read())


class FollowerClient(RawClient):
    """A follower's connection; calls block."""

    def secure(self, context: ssl.SSLContext) -> Self:
        """Begin TLS; the broker's certificate is for its host, 127.0.0.1. Raises OSError."""
        self._socket = context.wrap_socket(self._socket, server_hostname="127.0.0.1")
        return self

    def shake_hands(self, mechanism: str = MECHANISM, version: int = 1) -> control.Message:
        return self.request(SASL_HANDSHAKE, version, mechanism=mechanism)

    def prove(self, message: bytes, version: int = 2) -> control.Message:
        return self.request(SASL_AUTHENTICATE, version, auth_bytes=message)

    def authenticate(self, node_id: int, secret: Secret, version: int = 2, *, log_id: uuid.UUID = NO_DIRECTORY) -> Self:
        handshake = FollowerHandshake(ReplicaKey(node_id, log_id), secret)
        assert self.shake_hands().error_code == 0
        final = handshake.final(self.prove(handshake.first(), version).auth_bytes)
        handshake.check(self.prove(final, version).auth_bytes)
        return self

    def send_fetch(
        self,
        replica_id: int,
        topics: Sequence[tuple[uuid.UUID, Sequence[PartitionFetch]]],
        *,
        max_wait_ms: int = 0,
        min_bytes: int = 1,
        max_bytes: int = 1 << 20,
    ) -> None:
        frame = encode_replica_fetch(
            replica_id,
            [(topic.bytes, asked) for topic, asked in topics],
            correlation_id=77,
            sender=b"tests",
            max_wait_ms=max_wait_ms,
            min_bytes=min_bytes,
            max_bytes=max_bytes,
        )
        self.send_raw(frame)

    def fetched(self) -> ReplicaAnswer:
        """The answer to the oldest fetch sent. Raises Closed."""
        frame = self.receive_frame()
        return read_replica_answer(memoryview(bytearray(len(frame).to_bytes(4, "big") + frame)))

    def fetch(
        self, replica_id: int, topics: Sequence[tuple[uuid.UUID, Sequence[PartitionFetch]]], **limits: int
    ) -> ReplicaAnswer:
        self.send_fetch(replica_id, topics, **limits)
        return self.fetched()

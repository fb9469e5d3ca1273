"""The demo's topic: made through the proxy before anything is written, and who owned its partitions at the end."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence

from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError

from kproxy.errors import StartupError
from kproxy.ownership.etcd import EtcdClient

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_MS = 15_000
# As the cluster has it configured; a demo has no business asking for more.
DEFAULT_REPLICATION = -1


class TopicNotCreated(Exception):
    """The cluster answered that it would not make the topic, or did not answer; the message is one line."""


def check_reachable(bootstrap: str) -> None:
    """Raises StartupError where `bootstrap` is no address or nobody listens there."""
    host, _, port = bootstrap.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise StartupError(f"--bootstrap {bootstrap} is no address: give HOST:PORT of a running kproxy.")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S):
            pass
    except OSError as error:
        raise StartupError(
            f"Nothing answers at --bootstrap {bootstrap} ({error.strerror or error}): "
            "start `kproxy dev` and give its address, or leave --bootstrap out."
        ) from error


def create_topic(bootstrap: str, topic: str, partitions: int) -> None:
    """Make `topic` and wait until each partition has a leader to write to. Blocks; raises TopicNotCreated."""
    # It logs what it also raises.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    try:
        admin = KafkaAdminClient(
            bootstrap_servers=bootstrap,
            client_id="kproxy-demo",
            bootstrap_timeout_ms=REQUEST_TIMEOUT_MS,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
        )
        try:
            admin.create_topics(
                {topic: {"num_partitions": partitions, "replication_factor": DEFAULT_REPLICATION}},
                wait_for_metadata=True,
            )
        finally:
            admin.close()
    except KafkaError as error:
        raise TopicNotCreated(f"The topic {topic} could not be created through {bootstrap}: {error}") from error


async def partition_owners(endpoints: Sequence[str], prefix: str, topic: str) -> Mapping[int, int]:
    """Broker id by partition index, as the lease keys in etcd say now. Raises EtcdError."""
    client = EtcdClient(endpoints)
    await client.connect()
    try:
        directory = f"{prefix}/partition-leases/{topic}/"
        leases = await client.get_prefix(directory)
        return {int(kv.key.removeprefix(directory)): int(kv.value) for kv in leases.kvs}
    finally:
        await client.close()

"""The demo's topic: made through the proxy before anything is written, and who owned its partitions at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError

from kproxy.etcd import EtcdClient
from kproxy.trail import topic_sink

REQUEST_TIMEOUT_MS = 15_000


class TopicNotCreated(Exception):
    """The cluster answered that it would not make the topic, or did not answer; the message is one line."""


def create_topic(bootstrap: str, topic: str, partitions: int) -> None:
    """Make `topic` and wait until each partition has a leader to write to. Blocks; raises TopicNotCreated."""
    try:
        admin = topic_sink.connected(
            KafkaAdminClient,
            bootstrap_servers=bootstrap,
            client_id="kproxy-demo",
            bootstrap_timeout_ms=REQUEST_TIMEOUT_MS,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
        )
        try:
            topic_sink.create_topic(admin, topic, partitions)
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

"""Read partition leases from etcd, and a table's view of them, in one form."""

from __future__ import annotations

from kproxy.etcd import EtcdClient
from kproxy.routing.topology import Topology

# Owners by topic and partition index.
Owners = dict[tuple[str, int], int]


def lease_key(prefix: str, topic: str, partition_index: int) -> str:
    return f"{prefix}/partition-leases/{topic}/{partition_index}"


def owners(topology: Topology) -> Owners:
    return {(row.topic.decode(), row.partition_index): row.owner for row in topology.ownerships()}


async def owners_in_etcd(client: EtcdClient, prefix: str) -> Owners:
    """Read the owners with a linearizable read."""
    found = await client.get_prefix(f"{prefix}/partition-leases/")
    parts = [(kv.key.rsplit("/", 2), kv.value) for kv in found.kvs]
    return {(topic, int(index)): int(value) for (_, topic, index), value in parts}

"""Take owners from a fixed table in the configuration: brokers by id, owners by topic and partition.

It is meant for sidecars whose brokers seldom move, and for measurements. A topic that the table does not name has no
owner. A reload of the configuration replaces the table (`load`).

Invariant: a revision is the number of the reading that changed an entry. Revisions only grow.
"""

from __future__ import annotations

import asyncio

from kproxy.config import Owners
from kproxy.routing.topology import Ownership, Topology


class StaticTable:
    """Fills a topology with `owners`. It follows no other system and is never stale."""

    def __init__(self, topology: Topology, owners: Owners) -> None:
        self._topology = topology
        self._owners = owners
        self._readings = 0
        self.load(owners)

    age_s = 0.0
    stale = False

    def load(self, owners: Owners) -> None:
        """Use another table."""
        self._owners = owners
        self._readings += 1
        topology = self._topology
        for broker_id, address in owners.brokers.items():
            topology.set_broker(broker_id, address)
        rows = []
        for topic in owners.topics:
            name = topic.name.encode()
            for partition_index, owner in enumerate(topic.owners):
                is_new = topology.owner(name, partition_index) != owner
                revision = self._readings if is_new else topology.owner_revision(name, partition_index)
                rows.append(Ownership(name, partition_index, owner, revision))
        topology.load(rows, self._readings)
        for broker_id in topology.brokers.keys() - owners.brokers.keys():
            topology.remove_broker(broker_id)

    async def run(self) -> None:
        """Do nothing until cancelled."""
        await asyncio.Event().wait()

    async def wait_synced(self) -> None:
        """Return at once: the table is loaded in the constructor."""

    async def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> None:
        """Do nothing: the table does not change by itself."""

    async def reload(self) -> str:
        """Describe the present table, which `load` has set."""
        partitions = sum(len(topic.owners) for topic in self._owners.topics)
        return f"{partitions} partitions and {len(self._owners.brokers)} brokers, from {self._owners.where}"

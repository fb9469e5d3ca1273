"""Owners from a table that somebody wrote: brokers by id, and for each topic the owners by partition index.

For sidecars whose brokers seldom move, and for measurements. A topic that the table does not name has no owner. The
table is read again when somebody asks for it (SIGHUP); one that will not do leaves the last one in force.

Invariant: revisions are this source's own, the number of the reading that changed an entry. They only grow.
"""

from __future__ import annotations

import asyncio

from kproxy.config import Owners
from kproxy.routing.topology import Address, Ownership, Topology


class StaticTable:
    """Fills a topology with `owners`; there is nothing to follow and nothing to grow stale."""

    def __init__(self, topology: Topology, owners: Owners) -> None:
        self._topology = topology
        self._owners = owners
        self._readings = 0
        self._load(owners)

    age_s = 0.0
    stale = False

    def _load(self, owners: Owners) -> None:
        self._owners = owners
        self._readings += 1
        topology = self._topology
        for broker_id, address in owners.brokers.items():
            topology.set_broker(broker_id, Address(*address))
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
        """There is nothing to follow."""
        await asyncio.Event().wait()

    async def wait_synced(self) -> None:
        """It is loaded before it is run."""

    async def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> None:
        """The table is what it is."""

    async def reload(self) -> str:
        """Read the file again that the table came from. StartupError where it will not do."""
        owners = await asyncio.to_thread(self._owners.read_again)
        self._load(owners)
        partitions = sum(len(topic.owners) for topic in owners.topics)
        return f"{partitions} partitions and {len(owners.brokers)} brokers, from {owners.where}"

"""Owners from a table that somebody wrote: brokers by id, and for each topic the owners by partition index.

For sidecars whose brokers never move, and for measurements. A topic that the table does not name has no owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from kproxy.routing.topology import Address, Topology

# Every entry of a static table is of one age.
STATIC_REVISION = 1


class StaticTable:
    """Fills a topology once; there is nothing to refresh and nothing to grow stale."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    age_s = 0.0
    stale = False

    def load(self, brokers: Mapping[int, Address], topics: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Take the table: addresses by broker id, owners by topic and partition index."""
        for broker_id, address in brokers.items():
            self._topology.set_broker(broker_id, address)
        for name, owners in topics:
            for partition_index, owner in enumerate(owners):
                self._topology.set_owner(name.encode(), partition_index, owner, STATIC_REVISION)

    async def run(self) -> None:
        """There is nothing to follow."""
        await asyncio.Event().wait()

    async def wait_synced(self) -> None:
        """It is loaded before it is run."""

    async def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> None:
        """The table is what it is."""

"""Have a partition's owner looked up anew, each a task until the source has answered.

Invariants
1. One task for each partition; a wish that comes while its task waits is served by one more look, as what is being read
   may be older than the refusal.
2. None is begun once `close` has been called: nobody would wait for it.
3. At most MAX_LOOKUPS tasks for each client connection; who made a wish learns of it by the topology. Who got none asks
   again by the next refusal.
"""

from __future__ import annotations

import asyncio

from kproxy.proxy.context import ProxyContext

# Two of etcd's transactions; a Kafka cluster is asked about topics.
MAX_LOOKUPS = 256


class OwnerLookups:
    """The wishes of one client connection."""

    def __init__(self, context: ProxyContext) -> None:
        self._context = context
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._again: set[tuple[bytes, int]] = set()
        self._closed = False

    def ask(self, topic: bytes, partition_index: int, routed_at: int) -> None:
        """Have the source look again, unless it has said something new since this was routed."""
        partition = (topic, partition_index)
        if self._context.topology.owner_revision(topic, partition_index) > routed_at:
            return
        if partition in self._tasks:
            self._again.add(partition)
        elif len(self._tasks) < MAX_LOOKUPS and not self._closed:
            task = self._tasks[partition] = asyncio.ensure_future(self._refresh(partition))
            task.add_done_callback(lambda _: self._tasks.pop(partition, None))

    async def _refresh(self, partition: tuple[bytes, int]) -> None:
        topology = self._context.topology
        seen_revision = topology.owner_revision(*partition)
        is_wanted = True
        while is_wanted:
            self._again.discard(partition)
            topic, partition_index = partition
            # An id that the topology does not know is the source's to find.
            await self._context.source.refresh(topology.name_of(topic) or topic, partition_index, seen_revision)
            is_wanted = partition in self._again and topology.owner_revision(*partition) == seen_revision
        self._again.discard(partition)

    async def close(self) -> None:
        """Take all wishes back, and those to come: what is left of acks=0 may still be lost."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

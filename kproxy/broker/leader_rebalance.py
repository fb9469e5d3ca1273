"""Letting others lead: the choice of what another should lead, and the wait until it can.

A partition belongs to the first of its replicas as soon as that one is in sync and has been away for long enough;
leaders that moved when a broker failed so come back to it, one partition at a time.

Invariants
1. Who leads refuses writes from before the wait until the end: what followers have then is all there is.
2. Where followers do not get there in time, it leads on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from kproxy.broker.cluster import ClusterView
from kproxy.broker.keys import PartitionKey
from kproxy.broker.partition import Partition
from kproxy.broker.replication.partition_replication import Role

HAND_OVER_TIMEOUT_S = 2.0
_POLL_S = 0.01


class LeaderRebalance:
    """What this broker leads, and since when. `after_s` seconds is how long it leads in another's place at least."""

    def __init__(
        self, view: ClusterView, node_id: int, led: Mapping[tuple[bytes, int], Partition], after_s: float
    ) -> None:
        self._view = view
        self._node_id = node_id
        self._led = led
        self._after_s = after_s
        self._since: dict[PartitionKey, float] = {}

    def begun(self, key: PartitionKey) -> None:
        """The partition is led from now on, or begins to wait anew."""
        self._since[key] = asyncio.get_running_loop().time()

    def ended(self, key: PartitionKey) -> None:
        self._since.pop(key, None)

    def next(self) -> PartitionKey | None:
        """One that another should lead, who stands first and is in sync."""
        led_before = asyncio.get_running_loop().time() - self._after_s
        for key, since in self._since.items():
            partition = self._led.get((key.topic.encode(), key.partition_index))
            if since <= led_before and partition is not None and self._first_is_ready(key, partition):
                return key
        return None

    def _first_is_ready(self, key: PartitionKey, partition: Partition) -> bool:
        topic = self._view.topics.get(key.topic)
        if topic is None or partition.role is not Role.LEADER:
            return False
        first = self._view.replicas(topic, key.partition_index)[0]
        return first != self._node_id and first in self._view.brokers and partition.replication.is_in_sync(first)

    async def prepare(self, key: PartitionKey, is_stopping: Callable[[], bool]) -> bool:
        """Refuse writes until followers have all there is. Where that takes too long False, and it leads on, unless
        the broker stops."""
        partition = self._led.get((key.topic.encode(), key.partition_index))
        if partition is None:
            return False
        self.begun(key)
        partition.resign()
        there = await self.wait_for_followers([partition], HAND_OVER_TIMEOUT_S)
        if not there and not is_stopping():
            partition.replication.resume()
        return there and not is_stopping()

    async def wait_for_followers(self, partitions: Iterable[Partition], timeout_s: float) -> bool:
        """Wait until live in-sync followers have reached the ends of these logs, at most so long; whether they have."""
        waited_for = list(partitions)
        return await _until(lambda: not any(map(self._is_ahead, waited_for)), timeout_s)

    def _is_ahead(self, partition: Partition) -> bool:
        return partition.serves_reads() and partition.replication.followers_behind(self._view.brokers)


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    # Rare and short: not worth an event in every partition.
    while not condition():
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True

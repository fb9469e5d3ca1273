"""Move leadership back to the preferred replica.

A partition's preferred leader is its first replica. Once that replica is in sync again and this broker has led for long
enough, the leadership moves back, one partition at a time. So leaders that moved when a broker failed return to it.

Invariants
1. The leader refuses writes from before the wait until its end: what followers have then is all there is.
2. If followers do not catch up in time, the leader goes on leading.
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
    """The partitions that this broker leads, and since when. None is given up before `after_s` seconds."""

    def __init__(
        self, view: ClusterView, node_id: int, led: Mapping[tuple[bytes, int], Partition], after_s: float
    ) -> None:
        self._view = view
        self._node_id = node_id
        self._led = led
        self._after_s = after_s
        self._since: dict[PartitionKey, float] = {}

    def begun(self, key: PartitionKey) -> None:
        """Note that the partition is led from now on, or start its time anew."""
        self._since[key] = asyncio.get_running_loop().time()

    def ended(self, key: PartitionKey) -> None:
        self._since.pop(key, None)

    def next(self) -> PartitionKey | None:
        """Return one partition whose first replica is another broker and in sync; None where there is none."""
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
        """Refuse writes until the followers have all records.

        False if that takes too long or the broker stops. If it takes too long, the partition is led as before.
        """
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
        """Wait until live in-sync followers have reached the ends of these logs; False if they do not in time."""
        waited_for = list(partitions)
        return await _until(lambda: not any(map(self._is_ahead, waited_for)), timeout_s)

    def _is_ahead(self, partition: Partition) -> bool:
        return partition.serves_reads() and partition.replication.followers_behind(self._view.brokers)


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    # Rare and short, so polling is enough.
    while not condition():
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True

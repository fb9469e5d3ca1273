"""When a broker takes, unasked, a partition that nobody owns: at once where it stands first, else after the others.

States of a partition, here
  (none)    it is not waited for
  queued    others go first, or may yet come up: a timer says when to look again
  due       those that go first have had their time
Orphaned is a partition whose owner was seen to go.

Invariants
1. Who stands at place n among the living waits n times TURN_S, or for a partition that nobody has written to yet n
   times UNWRITTEN_TURN_S, and PATIENT_TURN_S where no replica of it lives, so that one attempt is made at a time where
   all see the same.
2. For START_GRACE_S after a broker has come up, those that are not alive keep their places: a cluster that starts as a
   whole finds its leaders where it left them. Not for orphaned partitions: their owner has gone before our eyes.
3. One timer for each partition at most; `close` ends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kproxy.broker.candidates import place_in_line
from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.keys import PartitionKey

TURN_S = 0.25
PATIENT_TURN_S = 2.0
# The first replica of a partition that nobody has written to lives, and may have thousands more to take.
UNWRITTEN_TURN_S = 10.0
START_GRACE_S = 2.0


class Turns:
    """`look_again` is called with a partition for which `is_mine` said no, when it may say yes."""

    def __init__(self, view: ClusterView, node_id: int, look_again: Callable[[PartitionKey], None]) -> None:
        self._view = view
        self._node_id = node_id
        self._look_again = look_again
        self._began_at = 0.0
        self._queued: dict[PartitionKey, asyncio.TimerHandle] = {}
        self._due: set[PartitionKey] = set()
        self._orphaned: set[PartitionKey] = set()

    def begin(self) -> None:
        """The broker has come up."""
        self._began_at = asyncio.get_running_loop().time()

    def orphaned(self, key: PartitionKey) -> None:
        """Its owner has gone."""
        self._orphaned.add(key)

    def done(self, key: PartitionKey) -> None:
        """It was tried, has an owner, or is not there any more."""
        self._due.discard(key)

    def owned(self, key: PartitionKey) -> None:
        """It has an owner, or is not there any more."""
        self._orphaned.discard(key)
        self._due.discard(key)
        timer = self._queued.pop(key, None)
        if timer is not None:
            timer.cancel()

    def is_mine(self, key: PartitionKey, topic: Topic) -> bool:
        """Whether to take it now. If others go first, `look_again` comes after them."""
        loop = asyncio.get_running_loop()
        grace_s = self._began_at + START_GRACE_S - loop.time()
        count_dead = grace_s > 0 and key not in self._orphaned
        place = place_in_line(self._view, topic, key.partition_index, self._node_id, count_dead=count_dead)
        if place <= 0 or key in self._due:
            return True
        if key not in self._queued:
            delay_s = grace_s if count_dead else place * self._turn_s(key, topic)
            self._queued[key] = loop.call_later(delay_s, self._on_timer, key, not count_dead)
        return False

    def _turn_s(self, key: PartitionKey, topic: Topic) -> float:
        if self._view.state(topic, key.partition_index) is not None:
            return TURN_S
        keeps_one = self._node_id in topic.replicas[key.partition_index]
        return UNWRITTEN_TURN_S if keeps_one else PATIENT_TURN_S

    def _on_timer(self, key: PartitionKey, due: bool) -> None:
        del self._queued[key]
        if due:
            self._due.add(key)
        self._look_again(key)

    def close(self) -> None:
        for timer in self._queued.values():
            timer.cancel()
        self._queued.clear()

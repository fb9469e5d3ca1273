"""Decide which broker takes a partition without an owner, and when its leadership moves back to the preferred leader.

The candidates are the members of the partition's ISR. They hold all records acknowledged with acks=all. A member is a
log, not a broker: the replica manager checks that a broker has opened that very log. A partition without a state has no
candidate: it is unknown which logs have the records.

The first candidate in the replica list takes the partition first, so that the preferred replica leads. The others wait,
and take it if the first cannot.

States of a partition in `ElectionQueue`
  (none)    this broker does not wait to take it
  queued    other candidates come first, or may start soon; a timer says when to look again
  due       the candidates before this broker have had their time
A partition is orphaned if this broker saw it lose its owner.

Invariants
1. The candidate at place n among the live ones waits n times CANDIDATE_DELAY_S; n times UNWRITTEN_DELAY_S for a
   partition that was never led. So brokers with the same view try one at a time. A broker whose disk fails comes after
   all others, _FAILING_DISK_PLACES later for each replica: it takes only partitions that no other broker takes.
2. For START_GRACE_S after a broker starts, dead candidates keep their places, so that a cluster that starts as a whole
   gets its leaders back where they were. Orphaned partitions are exempt: their owner is known to be gone.
3. Each partition has at most one timer; `close` cancels them all.

Rebalance
A partition's preferred leader is its first replica. Once that replica is in sync again and this broker has led for long
enough, the leadership moves back, at most HAND_OVER_BATCH partitions at a time. So leaders that moved when a broker
failed return to it, thousands within minutes, and at any time few partitions refuse writes. A broker that is busy with
opening logs or taking partitions gives none back, and a batch waits until the last one has owners.
4. The leader refuses writes from before the wait until its end, so a follower that has caught up has every record.
5. If followers do not catch up in time, the leader continues to lead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.keys import PartitionKey, ReplicaKey
from kproxy.broker.partition import Partition
from kproxy.broker.replication.partition_replication import Role

NOT_A_CANDIDATE = -1


CANDIDATE_DELAY_S = 0.25
# A partition that was never led is left to its first replica: that broker lives, and may have thousands more to take.
UNWRITTEN_DELAY_S = 10.0
# A broker whose disk fails comes after this many places for each replica.
_FAILING_DISK_PLACES = 4
START_GRACE_S = 2.0


def is_in_sync(view: ClusterView, topic: Topic, partition_index: int, replica: ReplicaKey) -> bool:
    """Return whether this log has all committed records: it is in the ISR."""
    state = view.state(topic, partition_index)
    return state is not None and replica in state.isr


def was_led(view: ClusterView, topic: Topic, partition_index: int) -> bool:
    """Return whether the partition ever had a leader, according to etcd."""
    state = view.state(topic, partition_index)
    return state is not None and state.leader_epoch >= 0


def candidate_place(view: ClusterView, topic: Topic, partition_index: int, node_id: int, *, count_dead: bool) -> int:
    """Count the candidates before this broker; NOT_A_CANDIDATE if it is none.

    `count_dead` also counts dead candidates, which may be about to start.
    """
    state = view.state(topic, partition_index)
    in_sync = [each for each in topic.replicas[partition_index] if state is not None and each in state.in_sync]
    if node_id not in in_sync:
        return NOT_A_CANDIDATE
    return sum(count_dead or each in view.brokers for each in in_sync[: in_sync.index(node_id)])


class ElectionQueue:
    """Schedules when this broker takes partitions. `look_again` is called for a partition that may be due by then."""

    def __init__(self, view: ClusterView, node_id: int, look_again: Callable[[PartitionKey], None]) -> None:
        self._view = view
        self._node_id = node_id
        self._look_again = look_again
        self._began_at = 0.0
        self._queued: dict[PartitionKey, asyncio.TimerHandle] = {}
        self._due: set[PartitionKey] = set()
        self._orphaned: set[PartitionKey] = set()

    def begin(self) -> None:
        """Start the grace period: the broker has come up."""
        self._began_at = asyncio.get_running_loop().time()

    def orphaned(self, key: PartitionKey) -> None:
        """Note that the partition lost its owner."""
        self._orphaned.add(key)

    def done(self, key: PartitionKey) -> None:
        """Forget that the partition is due: it was tried, is owned, or is gone."""
        self._due.discard(key)

    def owned(self, key: PartitionKey) -> None:
        """Stop waiting for a partition: it is owned or gone."""
        self._orphaned.discard(key)
        self._due.discard(key)
        timer = self._queued.pop(key, None)
        if timer is not None:
            timer.cancel()

    def may_take_now(self, key: PartitionKey, topic: Topic, *, stands_back: bool = False) -> bool:
        """Return whether to take the partition now; if others come first, `look_again` is called after them.

        `stands_back`: all others come first, because the disk fails here.
        """
        loop = asyncio.get_running_loop()
        grace_s = self._began_at + START_GRACE_S - loop.time()
        count_dead = grace_s > 0 and key not in self._orphaned
        place = candidate_place(self._view, topic, key.partition_index, self._node_id, count_dead=count_dead)
        if stands_back:
            place += _FAILING_DISK_PLACES * len(topic.replicas[key.partition_index])
        if place <= 0 or key in self._due:
            return True
        if key not in self._queued:
            delay_s = grace_s if count_dead else place * self._delay_s(key, topic)
            self._queued[key] = loop.call_later(delay_s, self._on_timer, key, not count_dead)
        return False

    def _delay_s(self, key: PartitionKey, topic: Topic) -> float:
        return CANDIDATE_DELAY_S if was_led(self._view, topic, key.partition_index) else UNWRITTEN_DELAY_S

    def _on_timer(self, key: PartitionKey, due: bool) -> None:
        del self._queued[key]
        if due:
            self._due.add(key)
        self._look_again(key)

    def close(self) -> None:
        for timer in self._queued.values():
            timer.cancel()
        self._queued.clear()


HAND_OVER_TIMEOUT_S = 2.0
# As many as their first replica takes at once (`replica_manager.CONCURRENT_WORKS`): beyond CANDIDATE_DELAY_S another
# candidate would lead, and give the partition back in turn.
HAND_OVER_BATCH = 16
_POLL_S = 0.01


class LeaderRebalance:
    """Selects the led partitions to give up to their first replica, none before `after_s` seconds as their leader.

    Partitions whose first replica is this broker are forgotten.
    """

    def __init__(
        self, view: ClusterView, node_id: int, led: Mapping[tuple[bytes, int], Partition], after_s: float
    ) -> None:
        self._view = view
        self._node_id = node_id
        self._led = led
        self._after_s = after_s
        self._since: dict[PartitionKey, float] = {}
        # The last batch, and the time of its hand-over.
        self._given: list[PartitionKey] = []
        self._given_at = float("-inf")

    def begun(self, key: PartitionKey) -> None:
        """Start, or restart, the time of this broker as leader."""
        self._since[key] = asyncio.get_running_loop().time()

    def ended(self, key: PartitionKey) -> None:
        self._since.pop(key, None)

    def next_batch(self) -> list[PartitionKey]:
        """Return at most HAND_OVER_BATCH partitions to be given up: their first replica is another broker and in sync.

        Empty while one of the last batch has no owner, for at most `after_s`: the brokers that take them are busy.
        """
        now = asyncio.get_running_loop().time()
        is_busy = any(key.topic in self._view.topics and self._view.ownership(*key) is None for key in self._given)
        if is_busy and now < self._given_at + self._after_s:
            return []
        old = [key for key, at in self._since.items() if at <= now - self._after_s]
        for key in filter(self._stays, old):
            del self._since[key]
        ready = (key for key in old if key in self._since and self._first_is_ready(key))
        self._given, self._given_at = list(islice(ready, HAND_OVER_BATCH)), now
        return self._given

    def _stays(self, key: PartitionKey) -> bool:
        """Return whether this broker is the first replica, which does not change while it leads."""
        topic = self._view.topics.get(key.topic)
        return topic is not None and topic.replicas[key.partition_index][0] == self._node_id

    def _first_is_ready(self, key: PartitionKey) -> bool:
        topic, partition = self._view.topics.get(key.topic), self._led.get((key.topic.encode(), key.partition_index))
        if topic is None or partition is None or partition.role is not Role.LEADER:
            return False
        first = topic.replicas[key.partition_index][0]
        return first in self._view.brokers and partition.replication.is_in_sync(first)

    async def prepare(self, key: PartitionKey, is_stopping: Callable[[], bool]) -> bool:
        """Refuse writes until the followers have all records.

        False if that takes too long or the broker stops. After a timeout, this broker continues to lead.
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
        """Wait until live in-sync followers have reached the ends of these logs; False after the timeout."""
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

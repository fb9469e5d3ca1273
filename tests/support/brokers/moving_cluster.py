"""Three brokers that share their partitions' logs, move ownership at random, and check sequences as Kafka does.

Each broker serves a connection's requests strictly one after another, with a short random pause before each, so that
ownership changes between two requests of one connection. A broker treats a batch of an idempotent producer as Kafka
does: it answers an appended batch again, appends the next sequence, refuses any other one as out of order, and accepts
any sequence if it knows nothing of the producer.

Two kinds: with `rebuilds` a new owner learns the producer's state from the log, and connections may be cut as well,
so that outcomes are unknown. Without it, a new owner knows nothing: a batch that overtakes another stays in the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import pairwise
from random import Random

from kproxy_codec.record_batch import parse_header
from tests.support.brokers.scripted_upstream import Asked, Partition, ScriptedUpstream, UpstreamConnection
from tests.support.processes.running_proxy import RunningProxy

NOT_LEADER = 6
OUT_OF_ORDER = 45
RETAINED_BATCHES = 5
MOST_PAUSE_S = 0.001
# The longest lag of the table behind a move, and of the new owner behind the table.
MOST_LAG_S = 0.004
LEAST_STAY_S = 0.03
MOST_STAY_S = 0.08


class MovingCluster:
    """`logs` holds the sequence numbers in the order in which they were appended."""

    def __init__(self, partitions: list[Partition], seed: int, *, rebuilds: bool) -> None:
        self.random = Random(seed)
        self.rebuilds = rebuilds
        self.brokers = [ScriptedUpstream(node_id, self._enqueue) for node_id in (1, 2, 3)]
        self.logs: dict[Partition, list[int]] = {partition: [] for partition in partitions}
        self.owners: dict[Partition, int] = dict.fromkeys(partitions, 1)
        self.moves = 0
        self.refusals = 0
        self.cuts = 0
        # The broker that believes it is the owner; the last sequences it knows, oldest first.
        self._serving: dict[Partition, int] = dict.fromkeys(partitions, 1)
        self._known: dict[Partition, deque[int]] = {
            partition: deque(maxlen=RETAINED_BATCHES) for partition in partitions
        }
        self._queues: dict[UpstreamConnection, deque[Asked]] = {}

    # Serving

    def _enqueue(self, asked: Asked) -> None:
        queue = self._queues.setdefault(asked.connection, deque())
        queue.append(asked)
        if len(queue) == 1:
            self._serve_later(queue)

    def _serve_later(self, queue: deque[Asked]) -> None:
        asyncio.get_running_loop().call_later(self.random.random() * MOST_PAUSE_S, self._serve, queue)

    def _serve(self, queue: deque[Asked]) -> None:
        asked = queue[0]
        node_id = asked.connection.upstream.node_id
        results = {
            partition: self._append(node_id, partition, asked.records[partition]) for partition in asked.partitions
        }
        if asked.connection.is_open:
            asked.answer(results=results)
        queue.popleft()
        if queue:
            self._serve_later(queue)

    def _append(self, node_id: int, partition: Partition, records: bytes) -> int:
        if self._serving[partition] != node_id:
            self.refusals += 1
            return NOT_LEADER
        sequence = parse_header(records).base_sequence
        known = self._known[partition]
        if sequence in known:
            return 0
        if known and sequence != known[-1] + 1:
            return OUT_OF_ORDER
        known.append(sequence)
        self.logs[partition].append(sequence)
        return 0

    # Moving

    async def move_about(self, proxy: RunningProxy) -> None:
        """Move ownership, and cut connections, until cancelled."""
        proxy.source.on_refresh = lambda topic, index, _: self._tell(proxy, (topic, index))
        await asyncio.gather(*(self._move_partition(proxy, partition) for partition in self.owners))

    async def _move_partition(self, proxy: RunningProxy, partition: Partition) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(LEAST_STAY_S, MOST_STAY_S))
            self.moves += 1
            # Always on to the next: a broker that forgets must not be back while batches for it are under way.
            self.owners[partition] = new = self.owners[partition] % 3 + 1
            self._serving[partition] = 0
            if self.rebuilds and self.random.random() < 0.3:
                self._cut()
            await self._lag()
            if self.random.random() < 0.7:
                # Sometimes the table learns it only when a request has been refused.
                self._tell(proxy, partition)
            await self._lag()
            while not self.rebuilds and self._has_queued(new, partition):
                # A loop that hardly runs finishes a round of moves before it has served one connection's requests.
                await asyncio.sleep(MOST_PAUSE_S)
            retained = self.logs[partition][-RETAINED_BATCHES:] if self.rebuilds else []
            self._known[partition] = deque(retained, RETAINED_BATCHES)
            self._serving[partition] = new

    def _has_queued(self, node_id: int, partition: Partition) -> bool:
        """Whether a broker has yet to serve a batch for this partition."""
        queues = (queue for each, queue in self._queues.items() if each.upstream.node_id == node_id)
        return any(partition in asked.partitions for queue in queues for asked in queue)

    async def _lag(self) -> None:
        if self.random.random() < 0.5:
            await asyncio.sleep(self.random.random() * MOST_LAG_S)

    def _tell(self, proxy: RunningProxy, partition: Partition) -> None:
        topic, index = partition
        if proxy.topology.owner(topic.encode(), index) != self.owners[partition]:
            proxy.own(self.owners[partition], topic, [index])

    def _cut(self) -> None:
        """Cut one connection with all bytes on their way in both directions."""
        connections = [each for broker in self.brokers for each in broker.connections if each.is_open]
        if connections:
            self.cuts += 1
            self.random.choice(connections).abort()


def disorder(log: list[int], count: int) -> list[str]:
    """The faults of a log that should hold 0 … count - 1: everything missing, doubled or out of place."""
    found = [f"{number} is missing" for number in sorted(set(range(count)) - set(log))]
    found += [f"{number} is there {log.count(number)} times" for number in sorted(set(log)) if log.count(number) > 1]
    found += [f"{later} follows {earlier}" for earlier, later in pairwise(log) if later <= earlier]
    return found

"""Owners as a Kafka cluster tells them: the leaders in its Metadata.

States: EMPTY --first answer--> CURRENT <--> STALE (no answer for `stale_after_s`). A stale table still serves.

Transitions happen in rounds. A round asks one broker for all topics and applies the answer. It begins when the interval
is over, or at once when `refresh` wants one; wishes that come while a round is under way get the next one, since what
is being read may be older than the refusal that caused the wish.

Invariants
1. Revisions are this source's own: the number of the round that changed an entry. They only grow.
2. Within one topic id a leader counts only with an epoch that is not lower than the one known: a broker that lags
   behind cannot bring an earlier leader back. A new topic id begins anew.
3. A partition that a round does not name has no owner any more; neither has one without a leader. A topic that a round
   has only an error for, other than that there is no such topic, stays as it was known.
4. A broker that the cluster does not name any more keeps no address.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from random import Random
from uuid import UUID

import structlog

from codec import api_keys as keys
from codec.control import Message
from codec.error_codes import (
    INVALID_TOPIC_EXCEPTION,
    LEADER_NOT_AVAILABLE,
    NONE,
    REPLICA_NOT_AVAILABLE,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from kproxy.ownership.kafka_client import BrokerConnection, BrokerUnreachable, open_any
from kproxy.routing.topology import MAX_PARTITION_INDEX, NO_OWNER, Address, Ownership, Topology

log = structlog.get_logger(__name__)

# 12 is the last version whose answer has no error of its own; nothing later is needed here.
METADATA_VERSION = 12
_NO_SUCH_TOPIC = (UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID, INVALID_TOPIC_EXCEPTION)
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0


class KafkaMetadata:
    """Feeds `topology` from a Kafka cluster. `run` is one coroutine that the caller owns. All times are in seconds."""

    def __init__(
        self,
        bootstrap: Sequence[Address],
        topology: Topology,
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = 30.0,
        timeout_s: float = 5.0,
        stale_after_s: float = 90.0,
    ) -> None:
        self._bootstrap = tuple(bootstrap)
        self._topology = topology
        self._clock = clock
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._stale_after_s = stale_after_s
        self._jitter = Random()  # noqa: S311 -- spreads retries, guards nothing
        self._connection: BrokerConnection | None = None
        self._round = 0
        self._epochs: dict[tuple[object, int], int] = {}
        self._heard_at = float("-inf")
        self._wanted = asyncio.Event()
        self._next_round: asyncio.Future[None] | None = None
        self._running = False
        self._synced = asyncio.Event()
        self.last_error: BrokerUnreachable | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the cluster last answered; infinite before it ever did."""
        return self._clock() - self._heard_at

    @property
    def stale(self) -> bool:
        return self.age_s > self._stale_after_s

    async def wait_synced(self) -> None:
        """Until the table has been loaded once."""
        await self._synced.wait()

    async def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> None:
        """Have the table read anew, unless the entry has changed since `seen_revision`; wishes are coalesced.

        Returns when a read that began after the call has ended, well or not; at once where nobody runs `run`.
        """
        if self._topology.owner_revision(topic, partition_index) <= seen_revision:
            await self._read_anew()

    async def reload(self) -> str:
        """Have the table read anew."""
        await self._read_anew()
        return str(self.last_error or f"{self._topology.owned_count} partitions")

    async def _read_anew(self) -> None:
        if not self._running:
            return
        if self._next_round is None:
            self._next_round = asyncio.get_running_loop().create_future()
        self._wanted.set()
        await asyncio.shield(self._next_round)

    async def run(self) -> None:
        """Keep the topology current until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        waiting: asyncio.Future[None] | None = None
        self._running = True
        try:
            while True:
                self._wanted.clear()
                waiting, self._next_round = self._next_round, None
                try:
                    await self._read_once()
                    backoff_s, pause_s = FIRST_BACKOFF_S, self._interval_s
                except BrokerUnreachable as error:
                    # Before the first answer whoever opened the source says what is wrong.
                    if self.last_error is None and self._synced.is_set():
                        log.warning("kafka_metadata_interrupted", reason=str(error))
                    self.last_error = error
                    pause_s = backoff_s * (1 + self._jitter.random() / 2)
                    backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)
                await self._pause(pause_s, wakes=self.last_error is None)
        finally:
            self._running = False
            for future in (waiting, self._next_round):
                if future is not None and not future.done():
                    future.set_result(None)
            await self._drop_connection()

    async def _pause(self, seconds: float, *, wakes: bool) -> None:
        """Until the next round is due; a wish ends the pause of a healthy source, not the back-off of a failing one."""
        if not wakes:
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
        except TimeoutError:
            return

    async def _read_once(self) -> None:
        if self._connection is None:
            known = [*self._topology.brokers.values()]
            self._connection = await open_any([*self._bootstrap, *known], self._timeout_s)
        try:
            answer = await self._connection.ask(
                keys.METADATA, METADATA_VERSION, topics=None, allow_auto_topic_creation=False
            )
        except BrokerUnreachable:
            await self._drop_connection()
            raise
        if not answer.brokers:
            await self._drop_connection()
            raise BrokerUnreachable("a broker answered with no brokers: it is still starting")
        self._apply(answer)
        self._heard_at = self._clock()
        if self.last_error is not None and self._synced.is_set():
            log.info("kafka_metadata_resumed")
        self.last_error = None
        self._synced.set()

    async def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _apply(self, answer: Message) -> None:
        self._round += 1
        named = {broker.node_id: Address(broker.host, broker.port) for broker in answer.brokers}
        for broker_id, address in named.items():
            self._topology.set_broker(broker_id, address)
        for broker_id in set(self._topology.brokers) - set(named):
            self._topology.remove_broker(broker_id)
        rows = []
        epochs: dict[tuple[object, int], int] = {}
        ids: dict[bytes, bytes | None] = {}
        for topic in answer.topics:
            if topic.name is None:
                continue
            name = topic.name.encode()
            if topic.error_code == NONE:
                ids[name] = topic.topic_id.bytes if topic.topic_id and topic.topic_id.int else None
                known = (self._row(name, topic.topic_id or name, partition, epochs) for partition in topic.partitions)
                rows += [row for row in known if row is not None]
            elif topic.error_code not in _NO_SUCH_TOPIC:
                ids[name] = self._topology.topic_ids.get(name)
                rows += self._rows_as_known(name, epochs)
        self._epochs = epochs
        self._name_ids(ids)
        self._topology.load(rows, self._round)

    def _name_ids(self, ids: dict[bytes, bytes | None]) -> None:
        for name in set(self._topology.topic_ids) - set(ids):
            self._topology.set_topic_id(name, None)
        for name, topic_id in ids.items():
            try:
                self._topology.set_topic_id(name, topic_id)
            except ValueError as error:
                # The cluster contradicts itself: that topic is known by its name alone.
                log.warning("kafka_metadata_topic_id", reason=str(error))

    def _rows_as_known(self, name: bytes, epochs: dict[tuple[object, int], int]) -> list[Ownership]:
        """A topic that the cluster has only an error for at the moment, with its epochs."""
        topic_id = self._topology.topic_ids.get(name)
        topic_key = name if topic_id is None else UUID(bytes=topic_id)
        rows = []
        for index in self._topology.partition_indexes(name):
            if (topic_key, index) in self._epochs:
                epochs[topic_key, index] = self._epochs[topic_key, index]
            owner = self._topology.owner(name, index)
            if owner != NO_OWNER:
                rows.append(Ownership(name, index, owner, self._topology.owner_revision(name, index)))
        return rows

    def _row(
        self, name: bytes, topic_key: object, partition: Message, epochs: dict[tuple[object, int], int]
    ) -> Ownership | None:
        """What the table is to say of a partition; an unchanged owner keeps its revision."""
        index: int = partition.partition_index
        if not 0 <= index <= MAX_PARTITION_INDEX:
            return None
        owner, revision = self._topology.owner(name, index), self._topology.owner_revision(name, index)
        known_epoch = self._epochs.get((topic_key, index), -1)
        epochs[topic_key, index] = max(known_epoch, partition.leader_epoch)
        lags = partition.leader_epoch < known_epoch
        has_leader = partition.error_code in (NONE, REPLICA_NOT_AVAILABLE) and partition.leader_id >= 0
        if partition.error_code == LEADER_NOT_AVAILABLE or not has_leader:
            return Ownership(name, index, owner, revision) if lags and owner != NO_OWNER else None
        if lags or partition.leader_id == owner:
            return Ownership(name, index, owner, revision) if owner != NO_OWNER else None
        return Ownership(name, index, partition.leader_id, self._round)

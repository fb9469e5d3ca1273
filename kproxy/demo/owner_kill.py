"""`--kill-owner`: kill -9 an owner in mid-stream and time the recovery.

The owner of most partitions is killed, and started again.

States
  waiting      the first micro-batch is being written
  killed       the owner is gone but its lease is valid; after that, others take its partitions
  restarting   after all were taken; at once if no other broker has a copy, as they wait for the broker itself
  back         it serves again, and has caught up, or the wait for that has ended

Invariants
1. The kill is in mid-stream: after the first micro-batch is written, before the last begins. If the stream is too fast,
   its last micro-batch waits for the kill.
2. All times are observed from outside: ownership by a watch on etcd, and new records by a consumer that reads through
   the proxy, as any client would.
3. When `run` returns or raises, no task or thread of it runs, and the stream does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Final

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from kproxy.broker.cluster import NO_OWNER, Change, ClusterView
from kproxy.broker.keys import Keys
from kproxy.demo.report import KilledOwner, brokers_in_words
from kproxy.dev.cluster import DevCluster
from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient, PrefixMirror
from kproxy.pipeline.progress import Report

SYNC_TIMEOUT_S: Final = 10.0
# Beyond the lease's time. The report says if brokers have not taken over or caught up by then; nothing depends on it.
TAKE_OVER_PATIENCE_S: Final = 10.0
CATCH_UP_PATIENCE_S: Final = 20.0
POLL_MS: Final = 100
# After the stream's end, reading ends after this many empty polls.
LAST_POLLS: Final = 10


class OwnerNotKilled(Exception):
    """The owner could not be found, or the killed broker did not come back; the message is one line."""


class StreamGate:
    """Synchronize the kill with the stream's threads; `file_rows` are the rows of each micro-batch."""

    def __init__(self, file_rows: Sequence[int], loop: asyncio.AbstractEventLoop) -> None:
        self.rows = 0
        self.ended = threading.Event()
        self.reached = asyncio.Event()
        self._first_rows = file_rows[0]
        self._last_batch = len(file_rows) - 1
        self._loop = loop
        self._released = threading.Event()

    def advance_to(self, rows: int) -> None:
        """Report that about `rows` rows have been written."""
        self.rows = rows
        if rows > self._first_rows:
            self._loop.call_soon_threadsafe(self.reached.set)

    def before_batch(self, batch_id: int) -> None:
        """Report that a micro-batch is about to begin. Block before the last one until `release`."""
        if batch_id >= self._last_batch:
            self._loop.call_soon_threadsafe(self.reached.set)
            self._released.wait()

    def release(self) -> None:
        """Let the last micro-batch begin: the kill is done, or will not happen."""
        self._released.set()


class OwnerKill:
    """One kill.

    `call` runs a blocking function on a thread; `client` has options of kafka-python; `clock` is in seconds.
    """

    def __init__(
        self,
        cluster: DevCluster,
        prefix: str,
        topic: str,
        gate: StreamGate,
        report: Report,
        call: Callable[[Callable[[], None]], asyncio.Future[None]],
        client: Mapping[str, Any] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._gate = gate
        self._report = report
        self._call = call
        self._client = client
        self._clock = clock
        self._view = ClusterView(Keys(prefix))

    async def run(self) -> KilledOwner:
        """Run from `waiting` to `back`. Raise OwnerNotKilled or EtcdError."""
        reader = NewEpochReader(self._cluster.kafka, self._topic, self._clock, self._client)
        try:
            async with self._watching():
                await self._call(reader.open)
                await self._gate.reached.wait()
                return await self._kill(reader)
        finally:
            self._gate.release()
            reader.stop()

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        client = EtcdClient([self._cluster.etcd])
        await client.connect()
        mirror = PrefixMirror(client, self._view.prefixes, self._view)
        mirroring = asyncio.create_task(mirror.run())
        try:
            async with asyncio.timeout(SYNC_TIMEOUT_S):
                await mirror.wait_synced()
            yield
        except TimeoutError as error:
            raise OwnerNotKilled(f"etcd at {self._cluster.etcd} did not tell in time who owns what") from error
        finally:
            mirroring.cancel()
            await asyncio.gather(mirroring, return_exceptions=True)
            await client.close()

    async def _kill(self, reader: NewEpochReader) -> KilledOwner:
        owners, rows = self._owners(), round(self._gate.rows, -2)
        victim = owner_of_most(owners)
        partitions = [partition for partition, owner in owners.items() if owner == victim]
        await self._call(lambda: reader.seek(partitions))
        take_overs = TakeOvers(self._view, self._topic, partitions, self._clock)
        others = [partition for partition, owner in owners.items() if owner not in (victim, NO_OWNER)]
        shrinks = IsrShrinks(self._view, self._topic, others, victim, self._clock)
        stage = self._report.stage("kill", f"kill -9 of broker {victim}")
        of_all = f"{len(partitions)} of the {len(owners)} partitions"
        stage.tell(f"kill -9 of broker {victim}, owner of {of_all}, after about {rows:,} rows")
        killed_at = self._clock()
        await self._cluster.kill_broker(victim)
        self._gate.release()
        reading = self._call(lambda: reader.read(self._gate.ended))
        stage.say(f"its lease of {self._cluster.lease_ttl_s} s runs out")
        if self._others_may_take(partitions, victim):
            patience_s = self._cluster.lease_ttl_s + TAKE_OVER_PATIENCE_S
            if await self._view.wait_until(take_overs.are_complete, patience_s):
                names = brokers_in_words(take_overs.owners.values())
                stage.tell(f"{names} took over, {take_overs.last_at - killed_at:.1f} s after the kill")
            else:
                stage.tell(f"not all of its partitions were taken over within {patience_s:g} s")
        stage.say(f"starting broker {victim} again")
        try:
            await self._cluster.restart_broker(victim)
        except StartupError as error:
            raise OwnerNotKilled(f"broker {victim} was killed and did not come back: {error}") from error
        back_at = self._clock()
        stage.say(f"broker {victim} is back and catches up")
        in_sync = await self._view.wait_until(lambda: self._is_in_sync(victim), CATCH_UP_PATIENCE_S)
        in_sync_at = self._clock() if in_sync else None
        await self._view.wait_until(take_overs.are_complete, TAKE_OVER_PATIENCE_S)
        stage.finish(f"broker {victim} is back" + (" and has caught up" if in_sync else ", but has not caught up"))
        await reading
        return KilledOwner(
            broker=victim,
            rows_before=rows,
            owners_before=owners,
            taken_by=take_overs.owners,
            taken_s={partition: at - killed_at for partition, at in take_overs.at.items()},
            written_s={partition: at - killed_at for partition, at in reader.written_at.items()},
            shrunk_s={partition: max(0.0, at - killed_at) for partition, at in shrinks.at.items()},
            back_s=back_at - killed_at,
            in_sync_s=None if in_sync_at is None else in_sync_at - killed_at,
        )

    def _owners(self) -> Mapping[int, int]:
        found = self._view.topics.get(self._topic)
        partitions = range(0 if found is None else len(found.replicas))
        return {partition: self._view.owner(self._topic, partition) for partition in partitions}

    def _others_may_take(self, partitions: Iterable[int], victim: int) -> bool:
        topic = self._view.topics[self._topic]
        return all(set(topic.replicas[partition]) != {victim} for partition in partitions)

    def _is_in_sync(self, broker: int) -> bool:
        """Return whether the broker is in the ISR of every partition that it has a copy of."""
        topic = self._view.topics[self._topic]
        kept = [index for index in range(len(topic.replicas)) if broker in topic.replicas[index]]
        states = [self._view.state(topic, index) for index in kept]
        return all(state is not None and broker in state.in_sync for state in states)


def owner_of_most(owners: Mapping[int, int]) -> int:
    """Return the live broker that owns most partitions, the lowest id of several. Raise OwnerNotKilled."""
    counts = Counter(owner for owner in owners.values() if owner >= 0)
    if not counts:
        raise OwnerNotKilled("No broker owned a partition of the topic, so there was none to kill")
    return min(counts, key=lambda broker: (-counts[broker], broker))


class TakeOvers:
    """The times (`at`, by partition) when `partitions` get another lease than now, and the new `owners`."""

    def __init__(self, view: ClusterView, topic: str, partitions: Sequence[int], clock: Callable[[], float]) -> None:
        self.at: dict[int, float] = {}
        self.owners: dict[int, int] = {}
        self._view = view
        self._topic = topic
        self._clock = clock
        self._lease_ids = {partition: self._lease_id(partition) for partition in partitions}
        view.subscribe(self._on_change)

    def are_complete(self) -> bool:
        return self.at.keys() == self._lease_ids.keys()

    @property
    def last_at(self) -> float:
        return max(self.at.values())

    def _lease_id(self, partition: int) -> int:
        ownership = self._view.ownership(self._topic, partition)
        return 0 if ownership is None else ownership.lease_id

    def _on_change(self, _: Change) -> None:
        for partition, before in self._lease_ids.items():
            ownership = self._view.ownership(self._topic, partition)
            if partition not in self.at and ownership is not None and ownership.lease_id != before:
                self.at[partition] = self._clock()
                self.owners[partition] = ownership.node_id


class IsrShrinks:
    """The times (`at`, by partition) when the ISRs of `partitions`, which others lead, lose `broker`.

    Until then writes with acks=all wait for that broker.
    """

    def __init__(
        self, view: ClusterView, topic: str, partitions: Sequence[int], broker: int, clock: Callable[[], float]
    ) -> None:
        self.at: dict[int, float] = {}
        self._view = view
        self._topic = topic
        self._partitions = partitions
        self._broker = broker
        self._clock = clock
        view.subscribe(self._on_change)
        self._look()

    def _on_change(self, _: Change) -> None:
        self._look()

    def _look(self) -> None:
        topic = self._view.topics.get(self._topic)
        for partition in self._partitions:
            state = self._view.state(topic, partition) if topic is not None else None
            if partition not in self.at and state is not None and self._broker not in state.in_sync:
                self.at[partition] = self._clock()


class NewEpochReader:
    """The times when the first records of a later leader appear, by the leader epoch in their batches.

    All methods but `stop` block, and belong to one thread at a time. Errors of the consumer are retried.
    """

    def __init__(
        self, bootstrap: str, topic: str, clock: Callable[[], float], client: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """`client` has options of kafka-python."""
        self.written_at: dict[int, float] = {}
        self._bootstrap = bootstrap
        self._topic = topic
        self._clock = clock
        self._client = client
        self._consumer: KafkaConsumer | None = None
        self._epochs: dict[int, int] = {}
        self._stopping = threading.Event()

    def open(self) -> None:
        # kafka-python also logs the errors that it raises.
        logging.getLogger("kafka").setLevel(logging.CRITICAL)
        self._consumer = KafkaConsumer(
            bootstrap_servers=self._bootstrap,
            client_id="kproxy-demo-kill",
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            retry_backoff_ms=POLL_MS,
            **self._client,
        )

    def seek(self, partitions: Sequence[int]) -> None:
        """Start at the last records of the partitions, which have the leader epoch of before the kill."""
        consumer = self._opened()
        targets = [TopicPartition(self._topic, partition) for partition in partitions]
        consumer.assign(targets)
        for target, end in consumer.end_offsets(targets).items():
            consumer.seek(target, max(end - 1, 0))

    def read(self, stream_ended: threading.Event) -> None:
        """Read until all partitions have newer records, or no more come after the stream's end."""
        consumer = self._opened()
        waiting = {target.partition for target in consumer.assignment()}
        empty_polls = 0
        while waiting and empty_polls < LAST_POLLS and not self._stopping.is_set():
            try:
                batches = consumer.poll(timeout_ms=POLL_MS)
            except KafkaError:
                batches = {}
            empty_polls = empty_polls + 1 if stream_ended.is_set() and not batches else 0
            for target, records in batches.items():
                epoch = self._epochs.setdefault(target.partition, records[0].leader_epoch)
                if target.partition in waiting and any(record.leader_epoch > epoch for record in records):
                    self.written_at[target.partition] = self._clock()
                    waiting.discard(target.partition)
                    consumer.pause(target)
        consumer.close()

    def stop(self) -> None:
        """Stop reading. May be called from any thread."""
        self._stopping.set()

    def _opened(self) -> KafkaConsumer:
        if self._consumer is None:
            raise RuntimeError("the consumer has not been opened")
        return self._consumer

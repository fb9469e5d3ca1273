"""Kill -9 an owner in mid-stream (`--kill-owner`) and measure how long its partitions have no owner.

The broker that owns most partitions is killed, and started again.

States
  waiting      the first micro-batch is being written
  killed       the owner is gone but its lease is valid; after the lease, other brokers take its partitions
  restarting   the broker starts, once all partitions are taken, or at once if no other broker has a copy of them
  back         the broker serves again

Invariants
1. The kill is in mid-stream: after the first micro-batch is written, before the last begins. If the stream is too fast,
   its last micro-batch waits for the kill.
2. One clock gives all times, which are those at which a watch of etcd shows the owners.
3. When `run` returns or raises, none of its tasks runs, and the stream does not wait for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from kproxy.broker.cluster import Change, ClusterView
from kproxy.broker.keys import Keys
from kproxy.demo.report import KilledOwner, brokers_in_words
from kproxy.dev.cluster import DevCluster
from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient, PrefixMirror
from kproxy.pipeline.progress import Report

SYNC_TIMEOUT_S: Final = 10.0
# Added to the lease's time. The report says if brokers have not taken over by then; nothing depends on it.
TAKE_OVER_PATIENCE_S: Final = 10.0


class OwnerNotKilled(Exception):
    """The owner could not be found, or the killed broker did not come back; the message is one line."""


class StreamGate:
    """Synchronize the kill with the stream's threads, of `batches` micro-batches."""

    def __init__(self, batches: int, loop: asyncio.AbstractEventLoop) -> None:
        self.rows = 0
        self.reached = asyncio.Event()
        self._last_batch = batches - 1
        self._loop = loop
        self._released = threading.Event()

    def advance_to(self, rows: int) -> None:
        """Report that a micro-batch was written, with the number of all rows so far."""
        self.rows = rows
        self._loop.call_soon_threadsafe(self.reached.set)

    def before_batch(self, batch_id: int) -> None:
        """Report that a micro-batch is about to begin. Block before the last one until `release`."""
        if batch_id >= self._last_batch:
            self._loop.call_soon_threadsafe(self.reached.set)
            self._released.wait()

    def release(self) -> None:
        """Let the last micro-batch begin, as the kill is done, or will not happen."""
        self._released.set()


class OwnerKill:
    """One kill; `clock` is in seconds."""

    def __init__(
        self,
        cluster: DevCluster,
        prefix: str,
        topic: str,
        gate: StreamGate,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._gate = gate
        self._report = report
        self._clock = clock
        self._view = ClusterView(Keys(prefix))

    async def run(self) -> KilledOwner:
        """Run from `waiting` to `back`. Raise OwnerNotKilled or EtcdError."""
        try:
            async with self._watching():
                await self._gate.reached.wait()
                return await self._kill()
        finally:
            self._gate.release()

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
            raise OwnerNotKilled(f"etcd at {self._cluster.etcd} did not report the owners in time") from error
        finally:
            mirroring.cancel()
            await asyncio.gather(mirroring, return_exceptions=True)
            await client.close()

    async def _kill(self) -> KilledOwner:
        owners, rows = self._owners(), round(self._gate.rows, -2)
        victim = owner_of_most(owners)
        partitions = [partition for partition, owner in owners.items() if owner == victim]
        take_overs = TakeOvers(self._view, self._topic, partitions, self._clock)
        stage = self._report.stage("kill", f"kill -9 of broker {victim}")
        of_all = f"{len(partitions)} of the {len(owners)} partitions"
        stage.tell(f"kill -9 of broker {victim}, owner of {of_all}, after about {rows:,} rows")
        killed_at = self._clock()
        await self._cluster.kill_broker(victim)
        self._gate.release()
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
        await self._view.wait_until(take_overs.are_complete, TAKE_OVER_PATIENCE_S)
        stage.finish(f"broker {victim} is back")
        return KilledOwner(
            broker=victim,
            rows_before=rows,
            owners_before=owners,
            taken_by=take_overs.owners,
            taken_s={partition: at - killed_at for partition, at in take_overs.at.items()},
            back_s=back_at - killed_at,
        )

    def _owners(self) -> Mapping[int, int]:
        found = self._view.topics.get(self._topic)
        partitions = range(0 if found is None else len(found.replicas))
        return {partition: self._view.owner(self._topic, partition) for partition in partitions}

    def _others_may_take(self, partitions: Iterable[int], victim: int) -> bool:
        topic = self._view.topics[self._topic]
        return all(set(topic.replicas[partition]) != {victim} for partition in partitions)


def owner_of_most(owners: Mapping[int, int]) -> int:
    """Return the live broker that owns most partitions, the lowest id of several. Raise OwnerNotKilled."""
    counts = Counter(owner for owner in owners.values() if owner >= 0)
    if not counts:
        raise OwnerNotKilled("No broker owned a partition of the topic, so there was none to kill")
    return min(counts, key=lambda broker: (-counts[broker], broker))


class TakeOvers:
    """The times (`at`, by partition) when each of `partitions` gets another lease, and the new `owners`."""

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

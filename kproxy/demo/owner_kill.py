"""Kill -9 an owner in mid-stream (`--kill-owner`) and measure how long its partitions have no owner.

The killed broker is the one that owns most partitions. It is started again.

States
  waiting      the first micro-batch is being written
  killed       the owner is gone but its lease is valid; after the lease, other brokers take its partitions
  restarting   the broker starts, once all partitions are taken, or after some seconds more than the lease
  back         the broker serves again

Invariants
1. The kill is in mid-stream: after the first micro-batch is written, before the last begins. If the stream is too fast,
   its last micro-batch waits for the kill.
2. All times are of one clock. A partition is taken when etcd, which is asked every POLL_S, shows its new owner.
3. When `kill_owner` returns or raises, the stream does not wait for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from kproxy.demo.report import KilledOwner, brokers_in_words
from kproxy.dev.cluster import DevCluster
from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient, KeyValue
from kproxy.pipeline.progress import Report

POLL_S: Final = 0.05
# Added to the lease's time. The report says if brokers have not taken over by then; nothing depends on it.
TAKE_OVER_PATIENCE_S: Final = 10.0
Leases = Mapping[int, KeyValue]
"""The lease keys by partition; a value is the owner's id in decimal."""


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


async def leases_in(client: EtcdClient, prefix: str, topic: str) -> Leases:
    """Return the lease keys of a topic. Raise EtcdError."""
    directory = f"{prefix}/partition-leases/{topic}/"
    found = await client.get_prefix(directory)
    return {int(each.key.removeprefix(directory)): each for each in found.kvs}


def owners_in(leases: Leases) -> Mapping[int, int]:
    return {partition: int(lease.value) for partition, lease in sorted(leases.items())}


def owner_of_most(owners: Mapping[int, int]) -> int:
    """Return the broker that owns most partitions, the lowest id of several. Raise OwnerNotKilled."""
    counts = Counter(owners.values())
    if not counts:
        raise OwnerNotKilled("No broker owned a partition of the topic, so there was none to kill")
    return min(counts, key=lambda broker: (-counts[broker], broker))


class TakeOvers:
    """The times (`at`) when partitions get another lease than `before` the kill, and new `owners`, by partition."""

    def __init__(self, before: Leases) -> None:
        self.at: dict[int, float] = {}
        self.owners: dict[int, int] = {}
        self._before = before

    def note(self, leases: Leases, now: float) -> bool:
        """Note the `leases` of this time. Return whether all partitions are taken."""
        for partition, before in self._before.items():
            lease = leases.get(partition)
            if partition not in self.at and lease is not None and lease.create_revision != before.create_revision:
                self.at[partition] = now
                self.owners[partition] = int(lease.value)
        return self.at.keys() == self._before.keys()


async def kill_owner(
    cluster: DevCluster,
    prefix: str,
    topic: str,
    gate: StreamGate,
    report: Report,
    clock: Callable[[], float] = time.monotonic,
) -> KilledOwner:
    """Run from `waiting` to `back`; `clock` is in seconds. Raise OwnerNotKilled or EtcdError."""
    client = EtcdClient([cluster.etcd])

    async def taken_within(patience_s: float) -> bool:
        deadline = clock() + patience_s
        while not take_overs.note(await leases_in(client, prefix, topic), clock()):
            if clock() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    try:
        await client.connect()
        await gate.reached.wait()
        before, rows = await leases_in(client, prefix, topic), round(gate.rows, -2)
        owners = owners_in(before)
        victim = owner_of_most(owners)
        take_overs = TakeOvers({partition: before[partition] for partition, owner in owners.items() if owner == victim})
        stage = report.stage("kill", f"kill -9 of broker {victim}")
        of_all = f"{Counter(owners.values())[victim]} of the {len(owners)} partitions"
        stage.tell(f"kill -9 of broker {victim}, owner of {of_all}, after about {rows:,} rows")
        killed_at = clock()
        await cluster.kill_broker(victim)
        gate.release()
        stage.say(f"its lease of {cluster.lease_ttl_s} s runs out")
        patience_s = cluster.lease_ttl_s + TAKE_OVER_PATIENCE_S
        if await taken_within(patience_s):
            last_s = max(take_overs.at.values()) - killed_at
            stage.tell(f"{brokers_in_words(take_overs.owners.values())} took over, {last_s:.1f} s after the kill")
        else:
            stage.tell(f"not all of its partitions were taken over within {patience_s:g} s")
        stage.say(f"starting broker {victim} again")
        try:
            await cluster.restart_broker(victim)
        except StartupError as error:
            raise OwnerNotKilled(f"broker {victim} was killed and did not come back: {error}") from error
        back_at = clock()
        await taken_within(TAKE_OVER_PATIENCE_S)
        stage.finish(f"broker {victim} is back")
    finally:
        gate.release()
        await client.close()
    taken_s = {partition: at - killed_at for partition, at in take_overs.at.items()}
    return KilledOwner(victim, rows, owners, take_overs.owners, taken_s, back_at - killed_at)

"""Keep the partitions' owners in the routing table (`Topology`) current with the leases in etcd.

It mirrors `{prefix}/partition-leases/{topic}/{partition}` (value: a decimal broker id), and the keys of its
`directory`: brokers' addresses, topic ids, group coordinators. The mirror (`kproxy.etcd.mirror`) stays current, and the
topology changes an entry only to a later revision. The module interprets keys and values, and re-reads a key after a
broker answered NOT_LEADER_OR_FOLLOWER.

States: EMPTY --first snapshot--> CURRENT <--> STALE (etcd has been silent for `stale_after_s`). A stale table still
serves: the last known owner is the best guess. After a refusal brokers are asked for the present owner
(kproxy.ownership.broker_hints), if `access` is given. If etcd was restored, the table is emptied and an error logged.

Invariants
1. An entry is (owner, mod_revision), and its revision only grows; a removal has a revision too.
2. A broker's refusal deletes nothing. The caller names the revision of the owner it used; if the table is not newer,
   the key is read again, linearizably, and the result is applied by invariant 1; while STALE brokers are asked first.
3. Re-reads are coalesced: at most one transaction is in flight, and it reads each waiting partition once. A caller that
   comes meanwhile waits for the next one, since the present read may be older than the refusal.
4. An ownership lasts until its own key is deleted, even if its broker's key is deleted first.
5. No key in etcd is older than its entry in the table. If one is, etcd was restored in a way that its cluster id and
   its revision do not show (`etcdutl snapshot restore --bump-revision`), and the table is loaded anew.
6. An invalid key is skipped, and an invalid value means no owner: a snapshot and the same changes as events give the
   same table. Both are counted in `skipped`, by reason, and logged once per key.
7. Brokers' hints are taken only while the table is STALE, and dropped when it is CURRENT again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import islice

import structlog

from kproxy.config.parsing import is_topic_name
from kproxy.etcd import (
    EtcdClient,
    EtcdError,
    KeyValue,
    PrefixMirror,
    Snapshot,
    WatchEvent,
    get_op,
)
from kproxy.ownership.broker_hints import BrokerHints
from kproxy.ownership.directory import PORTION_ENTRIES, Directory
from kproxy.ownership.lease_keys import (
    InvalidEntry,
    Partition,
    SkippedKeys,
    parse_lease_key,
    parse_owner,
)
from kproxy.routing.topology import MAX_PARTITION_INDEX, NO_OWNER, Topology
from kproxy.security.broker_auth import BrokerAuth

# etcd's own limit on the operations of one transaction.
REREAD_KEYS = 128
MAX_WAITING_REREADS = 100_000


class Rereads:
    """The partitions that wait for a re-read, each with one shared future."""

    def __init__(self) -> None:
        self._waiting: dict[Partition, asyncio.Future[None]] = {}
        self._any = asyncio.Event()
        self._served = False

    def open(self) -> None:
        self._served = True

    async def wait_for(self, partition: Partition) -> None:
        """Wait until a read that begins after this call has succeeded or failed.

        Return at once if no reads are made.
        """
        if not self._served:
            return
        future = self._waiting.get(partition)
        if future is None:
            if len(self._waiting) >= MAX_WAITING_REREADS:
                return
            future = self._waiting[partition] = asyncio.get_running_loop().create_future()
            self._any.set()
        # Cancelling one caller must not cancel the others.
        await asyncio.shield(future)

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[list[Partition]]:
        """Take waiting partitions, as many as one transaction holds. Release their callers when the block ends."""
        await self._any.wait()
        batch = dict(islice(self._waiting.items(), REREAD_KEYS))
        for partition in batch:
            del self._waiting[partition]
        if not self._waiting:
            self._any.clear()
        try:
            yield list(batch)
        finally:
            for future in batch.values():
                future.set_result(None)

    def close(self) -> None:
        """Release all callers, because no further read will be made."""
        self._served = False
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_result(None)


MAX_LOGGED_KEYS = 1_000
# Twice the interval at which etcd is asked for a sign of life: a table is stale within 5 s of the last sign.
STALE_AFTER_S = 4.0
# Longer than a live majority of etcd takes; the next question to brokers waits for this read.
STALE_REREAD_S = 1.0
# The interval at which a stale table checks whether etcd answers again.
LOOK_S = 0.2

log = structlog.get_logger(__name__)


class LeaseTable:
    """Feeds `topology` from etcd. `run` is one coroutine that the caller owns.

    `prefix` is that of all keys, such as `/kafscale`. `clock` and `stale_after_s` are in seconds. `access`
    opens connections to brokers while etcd is silent.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        topology: Topology,
        *,
        clock: Callable[[], float] = time.monotonic,
        stale_after_s: float = STALE_AFTER_S,
        access: BrokerAuth | None = None,
    ) -> None:
        self._client = client
        self._topology = topology
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._leases_prefix = f"{prefix.rstrip('/')}/partition-leases/"
        self.skipped: Counter[str] = Counter()
        self._skip = SkippedKeys("etcd key ignored", self.skipped, most_logged=MAX_LOGGED_KEYS).skip
        self.directory = Directory(prefix.rstrip("/"), topology, self._skip)
        prefixes = (self._leases_prefix, *self.directory.prefixes)
        self._mirror = PrefixMirror(client, prefixes, self, keys=self.directory.keys, clock=clock)
        self._cluster_id = 0
        self._loaded_revision = 0
        self._rereads = Rereads()
        self._hints = BrokerHints(topology, access, clock=clock) if access is not None else None
        # Set from the first question to brokers until etcd answers again.
        self._asks_brokers = asyncio.Event()
        self.restores = 0

    async def run(self) -> None:
        """Keep the topology current until cancelled."""
        self._rereads.open()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._mirror.run(), name="lease-table-mirror")
                tasks.create_task(self._reread_for_ever(), name="lease-table-rereads")
                tasks.create_task(self._drop_hints_in_time(), name="lease-table-hints")
        finally:
            self._rereads.close()

    async def wait_synced(self) -> None:
        """Wait until the table has been loaded once."""
        await self._mirror.wait_synced()

    @property
    def age_s(self) -> float:
        """Seconds since etcd last answered; infinite before it ever did."""
        return self._clock() - self._mirror.last_heard

    @property
    def stale(self) -> bool:
        return self.age_s > self._stale_after_s

    @property
    def last_error(self) -> EtcdError | None:
        """The error because of which no change arrives; None otherwise."""
        return self._mirror.last_error

    async def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> bool:
        """Re-read a partition after NOT_LEADER_OR_FOLLOWER (6) from its owner.

        The caller used the owner as of `seen_revision`.

        Returns whether the table has a later change now; the change may be the removal of the owner. If nothing
        changed, or etcd did not answer, the result is False, and the caller backs off.
        """
        partition = Partition(self._topology.name_of(topic) or topic, partition_index)
        known = self._topology.owner_revision(*partition) > seen_revision
        if (
            not known
            and is_topic_name(partition.topic.decode("ascii", "replace"))
            and 0 <= partition_index <= MAX_PARTITION_INDEX
        ):
            await self._rereads.wait_for(partition)
        return self._topology.owner_revision(topic, partition_index) > seen_revision

    async def reload(self) -> str:
        """Do nothing: etcd reports every change."""
        return "etcd tells of every change, there is nothing to read again"

    # Calls of the mirror

    def on_restored(self) -> None:
        self.restores += 1
        log.error("etcd restored", was_revision=self._topology.revision)
        self._topology.begin_rebuild()

    async def on_snapshot(self, snapshot: Snapshot) -> None:
        self._cluster_id = snapshot.cluster_id
        self._loaded_revision = snapshot.revision
        if await self._is_contradicted_by(snapshot):
            self.on_restored()
        self._topology.drop_hints()
        load = self._topology.begin_load(snapshot.revision)
        others: list[KeyValue] = []
        for position, kv in enumerate(snapshot.kvs):
            try:
                if kv.key.startswith(self._leases_prefix):
                    topic, partition_index = parse_lease_key(kv.key.removeprefix(self._leases_prefix))
                    load.set_owner(topic, partition_index, parse_owner(kv.value), kv.mod_revision)
                else:
                    others.append(kv)
            except InvalidEntry as reason:
                self._skip(kv, reason)
            if position % PORTION_ENTRIES == PORTION_ENTRIES - 1:
                await asyncio.sleep(0)
        await self.directory.load(others)
        for _ in load.end():
            await asyncio.sleep(0)
        log.info("lease table loaded", revision=snapshot.revision, partitions=load.count)

    async def _is_contradicted_by(self, snapshot: Snapshot) -> bool:
        """Whether the snapshot breaks invariant 5; the first load, the longest, is not checked."""
        if not self._topology.revision:
            return False
        for position, kv in enumerate(snapshot.kvs):
            if kv.key.startswith(self._leases_prefix) and self._is_contradicted(kv, snapshot.revision):
                return True
            if position % PORTION_ENTRIES == PORTION_ENTRIES - 1:
                await asyncio.sleep(0)
        return False

    def _is_contradicted(self, kv: KeyValue, as_of: int) -> bool:
        """Whether `kv`, read at revision `as_of`, is older than the entry of its key."""
        try:
            partition = parse_lease_key(kv.key.removeprefix(self._leases_prefix))
            # An invalid value counts as no owner as of the load that read it, which is later than its mod_revision.
            parse_owner(kv.value)
        except InvalidEntry:
            return False
        # A re-read may have found a change newer than this load.
        return kv.mod_revision < self._topology.owner_revision(*partition) <= as_of

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        for event in events:
            try:
                if event.kv.key.startswith(self._leases_prefix):
                    partition = parse_lease_key(event.kv.key.removeprefix(self._leases_prefix))
                    self._set_owner(partition, None if event.deleted else event.kv, event.kv.mod_revision)
                else:
                    self.directory.take(event)
            except InvalidEntry as reason:
                self._skip(event.kv, reason)

    def _set_owner(self, partition: tuple[bytes, int], kv: KeyValue | None, revision: int) -> None:
        """Set the owner in `kv`, the key of `partition` as of `revision`; None if the key is gone."""
        owner = NO_OWNER
        if kv is not None:
            try:
                owner = parse_owner(kv.value)
            except InvalidEntry as reason:
                self._skip(kv, reason)
        # Where there is nothing to remove, arbitrary partitions must not create rows.
        if owner != NO_OWNER or self._topology.owner(*partition) != NO_OWNER:
            self._topology.set_owner(*partition, owner, revision)

    # Re-reads

    async def _reread_for_ever(self) -> None:
        while True:
            async with self._rereads.batch() as partitions:
                try:
                    if not await self._ask_brokers(partitions):
                        async with asyncio.timeout(STALE_REREAD_S if self._asks_brokers.is_set() else None):
                            await self._reread(partitions)
                except (EtcdError, TimeoutError) as error:
                    log.warning("leases not reread", partitions=len(partitions), reason=str(error))

    async def _ask_brokers(self, partitions: Sequence[Partition]) -> bool:
        """Ask brokers if etcd is silent; return whether an owner has changed."""
        if self._hints is None or not self.stale:
            return False
        if not self._asks_brokers.is_set():
            log.warning("lease table stale", consequence="brokers are asked for owners", age_s=round(self.age_s, 1))
            self._asks_brokers.set()
        return await self._hints.ask(partitions, lambda: self.stale and self._asks_brokers.is_set())

    async def _drop_hints_in_time(self) -> None:
        while True:
            await self._asks_brokers.wait()
            while self.stale:  # noqa: ASYNC110 - time alone makes it stale
                await asyncio.sleep(LOOK_S)
            self._asks_brokers.clear()
            log.info("lease table current", consequence="brokers are not asked any more")
            self._topology.drop_hints()

    async def _reread(self, partitions: Sequence[Partition]) -> None:
        # A linearizable read that begins now is at or above every revision seen so far.
        floor = self._topology.revision
        keys = [f"{self._leases_prefix}{topic.decode('ascii')}/{index}" for topic, index in partitions]
        result = await self._client.txn([], [get_op(key) for key in keys])
        if self._cluster_id == 0:
            # Not loaded yet: the first snapshot will contain this change.
            return
        if (
            result.cluster_id != self._cluster_id
            or result.revision < floor
            or any(kv is not None and self._is_contradicted(kv, result.revision) for kv in result.found)
        ):
            self._mirror.distrust()
            return
        if result.revision < self._loaded_revision:
            # A load overtook this read. If the load lacks a partition, no entry would make an older read lose.
            return
        for partition, kv in zip(partitions, result.found, strict=True):
            self._set_owner(partition, kv, result.revision if kv is None else kv.mod_revision)

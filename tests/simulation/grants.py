"""Record the granted claims of a simulated world, and check their promise for produce requests.

The promise of the Own API: after the answer that grants a claim, no batch of the partition's earlier writers is
appended. With brokers without fences the promise is bounded: a batch that takes longer than the proxy's wait for
unsettled partitions may still arrive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kproxy.claims.keys import OwnKeys, decode_claim
from kproxy_codec.own import WHOLE_GROUP
from tests.simulation.network import NetworkLoop
from tests.simulation.partitions import Batch, Partition
from tests.simulation.proxy import PREFIX
from tests.simulation.setting import WRITERS
from tests.support.models.simulated_etcd import EtcdStore

_KEYS = OwnKeys(PREFIX)


class Holder(NamedTuple):
    """A client's connection."""

    client: int
    connection: int


class Grants:
    """`unsettled_s` is the proxies' wait for an unsettled partition."""

    def __init__(self, loop: NetworkLoop, store: EtcdStore, unsettled_s: float, found: list[str]) -> None:
        # The highest generation that any claimant has requested.
        self.generations: dict[Partition, int] = defaultdict(int)
        self._loop = loop
        self._store = store
        self._unsettled_s = unsettled_s
        self._found = found
        # By partition, as far as the claimants know: the fence of each holder, and the highest of all.
        self._fences: dict[Partition, dict[Holder, int]] = defaultdict(dict)
        self._highest: dict[Partition, tuple[int, Holder]] = {}
        # The time when each connection was severed, by its number, and when the lease behind its grants ended.
        self.severed_at: dict[int, float] = {}
        self.lapsed_at: dict[Holder, float] = {}
        # The appended batches of connections that had not received a grant.
        self._unheard: dict[Holder, Batch] = {}

    def granted(self, partition: Partition, holder: Holder, fence: int) -> None:
        """Record a grant when the claimant receives the answer."""
        self._fences[partition][holder] = fence
        if fence > self._highest.get(partition, (0, holder))[0]:
            self._highest[partition] = fence, holder

    def severed(self, connection: int) -> None:
        """Record a severed client connection, for which no batch may be written from now on, to any partition."""
        self.severed_at.setdefault(connection, self._loop.now)

    def arrived(self, batch: Batch) -> None:
        """A broker receives a batch."""
        severed_at = self.severed_at.get(batch.client * 1000 + batch.connection)
        if severed_at is not None and batch.written_at > severed_at:
            self._found.append(f"{batch} was written at {batch.written_at}, its client was severed at {severed_at}")
        lapsed_at = self.lapsed_at.get(Holder(batch.client, batch.connection))
        if lapsed_at is not None and batch.written_at > lapsed_at and batch.partition in self._fences:
            self._found.append(f"{batch} was written at {batch.written_at}, the lease had ended at {lapsed_at}")

    def lapsed(self, holders: Iterable[Holder]) -> None:
        """Record the end of the lease behind all grants of these holders."""
        for holder in holders:
            if any(holder in fences for fences in self._fences.values()):
                self.lapsed_at.setdefault(holder, self._loop.now)

    def appended(self, batch: Batch) -> None:
        """Check a batch that is appended to the log."""
        partition, holder = batch.partition, Holder(batch.client, batch.connection)
        mine = self._fences[partition].get(holder) if partition in self._fences else None
        if mine is None:
            self._unheard[holder] = batch
            return
        highest, latest = self._highest[partition]
        took_s = self._loop.now - batch.written_at
        if highest > mine and latest != holder and took_s < self._unsettled_s:
            self._found.append(
                f"{batch}, written behind fence {mine}, is appended when client {latest.client} has been granted "
                f"{partition} with fence {highest}, {took_s:.3f} s after it was sent"
            )

    def is_standing(self, partition: Partition, fence: int) -> bool:
        """Whether no key of a partition's claim has changed in etcd since that fence."""
        keys = {_KEYS.claim(WRITERS, str(partition)), _KEYS.claim(WRITERS, WHOLE_GROUP)}
        return not any(event.kv.key in keys for _, events in self._store.events_after(fence) for event in events)

    def judge(self) -> Iterator[str]:
        """Check that only claimants have written."""
        claimed = set[int]()
        for _, events in self._store.events_after(1):
            for event in events:
                if event.kv.key.startswith(_KEYS.claims) and not event.deleted:
                    claimed.add(int(decode_claim(event.kv.value).client.rpartition(":")[2]))
        for holder, batch in self._unheard.items():
            if holder.client * 1000 + holder.connection not in claimed:
                yield f"{batch} is in the log, and its connection {holder.connection} has claimed nothing"

"""Release claims: delete them in etcd, and release partitions without a claimant at their leaders.

Invariants
1. Every claim in etcd of an ended connection of this process is deleted, even if it was put after that end. The
   deletion is guarded by the revision of the put, so it never removes a claim of another connection.
2. At most CONCURRENT_DELETIONS run at a time.
3. When a claim of a gated partition is gone, a member releases the partition at its leader, with the revision of that
   change: the member that held the claim or, if it is gone too, the living member with the lowest name.
4. A process that is not a member defers such releases until it is one again, and drops those of partitions that are
   owned by then; at most MAX_DEFERRED wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

import structlog

from kproxy.claims.member import OwnMember
from kproxy.claims.table import OwnTable, TableRow
from kproxy.etcd import EtcdClient, EtcdError, delete_op, mod_revision_is
from kproxy_codec.own import WHOLE_GROUP, resource_partition

MAX_DEFERRED: Final = 10_000
CONCURRENT_DELETIONS: Final = 32
DELETE_PAUSE_S: Final = 0.5

log = structlog.get_logger(__name__)


class Release(NamedTuple):
    """A partition without a claimant since `revision`."""

    topic: str
    partition_index: int
    revision: int


class Brokers(Protocol):
    """The interface through which claims use the brokers behind a proxy."""

    def have_fences(self) -> bool:
        """Whether the brokers support fences."""

    def partition_indexes(self, topic: str) -> Collection[int]:
        """Return the known partition indexes of a topic."""

    def release(self, release: Release) -> None:
        """Release a partition at its leader, as soon as possible."""


class BrokerAccess:
    """The brokers, from `attach` on. Before that none have fences, and nothing is known or released."""

    def __init__(self) -> None:
        self._brokers: Brokers | None = None

    def attach(self, brokers: Brokers) -> None:
        self._brokers = brokers

    def have_fences(self) -> bool:
        return self._brokers is not None and self._brokers.have_fences()

    def partition_indexes(self, topic: str) -> Collection[int]:
        return self._brokers.partition_indexes(topic) if self._brokers is not None else ()

    def release(self, release: Release) -> None:
        if self._brokers is not None:
            self._brokers.release(release)


class WriterGroups:
    """Topics that only claimants may write, with the group of each in `writer_groups`."""

    def __init__(self, writer_groups: Mapping[str, str], brokers: Brokers) -> None:
        # Topics by their names as bytes, as in requests.
        self.by_topic = {topic.encode(): group for topic, group in writer_groups.items()}
        self._brokers = brokers

    def gates(self, topic: str, group: str) -> bool:
        """Whether only claimants in this group may write to the topic."""
        return self.by_topic.get(topic.encode()) == group

    def partitions(self, group: str, resource: str) -> Iterable[tuple[str, int]]:
        """Yield the partitions whose writes a claim gates."""
        if resource == WHOLE_GROUP:
            for topic in [topic.decode() for topic, writers in self.by_topic.items() if writers == group]:
                yield from ((topic, index) for index in self._brokers.partition_indexes(topic))
        elif (partition := resource_partition(resource)) is not None and self.gates(partition[0], group):
            yield partition


class ClaimDeletions:
    """Deletes claims of the process `member`, retrying until it succeeds or the process has another lease."""

    def __init__(self, client: EtcdClient, table: OwnTable, member: OwnMember) -> None:
        self._client = client
        self._keys = table.keys
        self._member = member
        # Group, resource, fence, and this process's name as a member when the deletion was requested.
        self._pending: deque[tuple[str, str, int, str]] = deque()
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, group: str, resource: str, fence: int) -> None:
        """Delete the claim that was put at `fence`, retrying until its lease ends."""
        self._pending.append((group, resource, fence, self._member.name))
        if self._running < CONCURRENT_DELETIONS:
            self._running += 1
            task = asyncio.get_running_loop().create_task(self._delete_pending())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _delete_pending(self) -> None:
        try:
            while self._pending:
                await self._delete(*self._pending.popleft())
        finally:
            self._running -= 1

    async def _delete(self, group: str, resource: str, fence: int, member: str) -> None:
        key = self._keys.claim(group, resource)
        while member and member == self._member.name:
            try:
                await self._client.txn([mod_revision_is(key, fence)], [delete_op(key)])
                return
            except EtcdError as error:
                log.warning("claim not freed", key=key, reason=str(error))
                await asyncio.sleep(DELETE_PAUSE_S)

    async def wait_done(self, timeout_s: float) -> None:
        """Wait until all deletions are done, at most `timeout_s` seconds."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)

    async def close(self) -> None:
        """Cancel all deletions."""
        self._pending.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class LeaderReleases:
    """Decides which partitions are released at their leaders."""

    def __init__(self, table: OwnTable, writer_groups: WriterGroups, brokers: Brokers) -> None:
        self._brokers = brokers
        self._table = table
        self._writer_groups = writer_groups
        self._deferred: deque[Release] = deque(maxlen=MAX_DEFERRED)

    def is_owned(self, topic: str, partition_index: int) -> bool:
        """Whether some connection owns a partition of a gated topic as its writer."""
        group = self._writer_groups.by_topic.get(topic.encode(), "")
        row = self._table.owner(group, f"{topic}/{partition_index}")
        # When a lease ends, etcd reports the deletions in the order of the keys: a member's entry goes before its
        # claims.
        return row is not None and row.owner.proxy in self._table.members

    def release(self, rows: Iterable[TableRow], revision: int) -> None:
        """Release these claims, which are gone since `revision`."""
        for each in self._releases(rows, revision):
            self._release_unless_owned(each)

    def defer(self, rows: Iterable[TableRow], revision: int) -> None:
        """Release these claims later, as this process cannot tell whether another process releases them."""
        self._deferred.extend(self._releases(rows, revision))

    def release_deferred(self) -> None:
        """Carry out the deferred releases, because this process is a member again."""
        deferred, self._deferred = self._deferred, deque(maxlen=MAX_DEFERRED)
        for each in deferred:
            self._release_unless_owned(each)

    def _releases(self, rows: Iterable[TableRow], revision: int) -> list[Release]:
        return [
            Release(*partition, revision)
            for row in rows
            for partition in self._writer_groups.partitions(row.group, row.resource)
        ]

    def _release_unless_owned(self, release: Release) -> None:
        if not self.is_owned(release.topic, release.partition_index):
            self._brokers.release(release)

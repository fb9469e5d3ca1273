"""Serve the Own API in one process: claim for its clients' connections, and act upon the claims of other processes.

Each resource of a request takes these steps independently
  decided   by the rules, in a transaction (`acquire.ClaimWriter`)
  granted   once no other client is served (`acquire.ClaimGranter`)

Invariants
1. A claim counts, for writing or reading, only when it is granted and while this process's lease is certain to live.
2. A connection that loses a claim is severed in the same step of the event loop in which the table changes. Only then
   is the revision confirmed to the other members.
3. A claim of a gated partition that is gone is released at the partition's leader (`release`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from kproxy.address import Address
from kproxy.claims.acquire import Bind, ChangeSignal, ClaimGranter, ClaimOutcome, ClaimWriter
from kproxy.claims.admin import ClaimsAdmin
from kproxy.claims.connection import MAX_CLAIMS_PER_CONNECTION, ClaimingConnection
from kproxy.claims.inflight_writes import InflightWrites
from kproxy.claims.keys import OwnKeys
from kproxy.claims.member import AtWorkMark, OwnMember
from kproxy.claims.release import BrokerAccess, ClaimDeletions, LeaderReleases, WriterGroups
from kproxy.claims.table import Member, OwnTable, TableListener, TableRow
from kproxy.etcd import EtcdClient, PrefixMirror
from kproxy.etcd.lease import Clock, lease_clock
from kproxy_codec.error_codes import (
    COORDINATOR_NOT_AVAILABLE,
    FENCED_INSTANCE_ID,
    INVALID_REQUEST,
    NONE,
    REQUEST_TIMED_OUT,
)
from kproxy_codec.own import WHOLE_GROUP, OwnedResource, OwnRequest, OwnResource, OwnResponse

# How often expired unsettled writes are removed.
EXPIRE_INTERVAL_S: Final = 0.5
# The longest wait of an ending process for etcd to delete its claims, which end with its lease anyway.
DELETE_TIMEOUT_S: Final = 2.0
# Topics in one line of the log.
MAX_NAMED: Final = 5

log = structlog.get_logger(__name__)


class OwnService(TableListener):
    """The Own API of one process. `run` is one coroutine that the caller runs. Make it on that event loop.

    `host` and `port` are the advertised address. `writer_groups` has, by topic, the group that gates writes to it.
    `timeout_s` bounds each claim, in seconds. `brokers` must be attached before clients are served.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        host: str,
        port: int,
        *,
        ttl_s: int,
        writer_groups: Mapping[str, str],
        timeout_s: float,
        unsettled: InflightWrites,
        counters: Counter[str],
        clock: Clock = lease_clock,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.table = OwnTable(OwnKeys(prefix), listener=self, counters=counters)
        self.unsettled = unsettled
        self.brokers = BrokerAccess()
        self.writer_groups = WriterGroups(writer_groups, self.brokers)
        self.gated = self.writer_groups.by_topic
        self.releases = LeaderReleases(self.table, self.writer_groups, self.brokers)
        self._group_by_topic = dict(writer_groups)
        # Members with other writer groups than this one.
        self._differing: set[str] = set()
        self.admin = ClaimsAdmin(client, self.table)
        self.timeout_s = timeout_s
        self._counters = counters
        self._changes = ChangeSignal()
        self._member = OwnMember(
            client,
            self.table.keys,
            host,
            port,
            ttl_s=ttl_s,
            clock=clock,
            writer_groups=writer_groups,
            state=lambda: (self.table.revision, self.unsettled.places()),
            on_entered=self.releases.release_deferred,
            on_lost=self._lease_lost,
        )
        self._mirror = PrefixMirror(client, [self.table.keys.all], self.table)
        self._deletions = ClaimDeletions(client, self.table, self._member)
        self._writer = ClaimWriter(client, self.table, self._member, self._deletions, self._changes, wall_clock)
        self._at_work = AtWorkMark(client, self.table, unsettled)
        self._granter = ClaimGranter(
            self.table,
            self._member,
            self.unsettled,
            self.writer_groups,
            self._deletions,
            self._changes,
            self._at_work,
            self.brokers,
        )
        self._connections: dict[int, ClaimingConnection] = {}
        self._last_number = 0
        # The fence of another process's latest claim, to be confirmed once the table has this revision; 0: none.
        self._to_confirm = 0
        # The task of `run`; once it fails nothing can be claimed any more.
        self.running: asyncio.Task[None] | None = None
        unsettled.on_change = self._unsettled_changed

    async def run(self) -> None:
        """Mirror the table and be a member until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._mirror.run(), name="own-table")
                tasks.create_task(self._join(), name="own-member")
                tasks.create_task(self._expire(), name="own-unsettled")
        finally:
            await self._deletions.close()

    async def _join(self) -> None:
        await self._mirror.wait_synced()
        await self._at_work.check()
        try:
            await self._member.run()
        finally:
            await self._at_work.remove()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_INTERVAL_S)
            self.unsettled.expire()

    async def wait_ready(self) -> None:
        """Wait until claims can be made."""
        while not self.is_ready:
            await self._changes.wait()

    @property
    def is_ready(self) -> bool:
        """Whether this process is a member that its table shows, so that the table lacks no earlier claim."""
        return self._member.is_live() and self._member.name in self.table.members

    def is_live(self) -> bool:
        """Whether granted claims of this process still count."""
        return self._member.is_live()

    @property
    def held_count(self) -> int:
        """The number of claims that this process holds for its clients."""
        return sum(len(each.held) for each in self._connections.values())

    # Connections

    def connection(self, client: str, sever: Callable[[str], None]) -> ClaimingConnection:
        """Add a connection that may claim; the caller calls `ended` when it has ended."""
        self._last_number += 1
        connection = ClaimingConnection(self._last_number, client, sever, self.writer_groups.gates)
        self._connections[connection.number] = connection
        return connection

    def ended(self, connection: ClaimingConnection) -> None:
        """Free the claims of an ended connection."""
        if self._connections.pop(connection.number, None) is None:
            return
        for resource, held in connection.end().items():
            if connection.group is not None:
                self._deletions.add(connection.group, resource, held.fence)

    async def all_freed(self) -> None:
        """Wait until the claims of ended connections are free, or etcd does not answer."""
        await self._deletions.wait_done(DELETE_TIMEOUT_S)

    # Claiming

    async def own(self, connection: ClaimingConnection, request: OwnRequest, bind: Bind) -> OwnResponse:
        """Serve one Own request; one at a time for each connection. `bind` uses the client's own broker connections."""
        group = request.group
        if not group or connection.group not in (None, group):
            return self._refused(request, INVALID_REQUEST)
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        while not self.is_ready:
            if not await self._changes.wait(deadline):
                return self._refused(request, COORDINATOR_NOT_AVAILABLE)
        connection.group = group
        asked = request.resources
        if asked is None:
            asked = (OwnResource(WHOLE_GROUP, 0),)
            wanted: Sequence[OwnResource] = asked
        else:
            named = Counter(each.resource for each in asked)
            wanted = [each for each in asked if named[each.resource] == 1 and each.resource != WHOLE_GROUP]
            if len(connection.held) + len(wanted) > MAX_CLAIMS_PER_CONNECTION:
                wanted = []
        outcomes = await self._writer.put_all(connection, wanted, deadline)
        codes = await self._granter.grant_all(connection, outcomes, bind, deadline)
        return OwnResponse(NONE, group, tuple(self._answer(each.resource, outcomes, codes) for each in asked))

    def _refused(self, request: OwnRequest, error_code: int) -> OwnResponse:
        self._counters["own.refused"] += 1 if request.resources is None else len(request.resources)
        return OwnResponse(error_code, request.group)

    def _answer(self, resource: str, outcomes: Mapping[str, ClaimOutcome], codes: Mapping[str, int]) -> OwnedResource:
        outcome = outcomes.get(resource, ClaimOutcome(INVALID_REQUEST))
        error_code = codes.get(resource, outcome.error_code)
        if error_code != NONE or outcome.held is None:
            counted = {FENCED_INSTANCE_ID: "own.fenced", REQUEST_TIMED_OUT: "own.timed_out"}
            self._counters[counted.get(error_code, "own.refused")] += 1
            return OwnedResource(resource, error_code)
        self._counters["own.granted"] += 1
        return OwnedResource(resource, NONE, outcome.held.generation, outcome.held.fence)

    def _unsettled_changed(self) -> None:
        self._member.publish()
        self._changes.notify()

    # Changes of the table

    def claim_put(self, row: TableRow, before: TableRow | None) -> None:
        """Sever connections that lost a resource by a claim (invariant 2)."""
        if row.owner.proxy == self._member.name:
            self._learn_own(row)
        else:
            self._to_confirm = row.fence
        if before is not None:
            self._lost(before, row)
        if row.resource == WHOLE_GROUP:
            for each in list(self.table.rows_of(row.group).values()):
                self._lost(each, row)
        elif (whole := self.table.whole(row.group)) is not None:
            self._lost(whole, row)

    def _learn_own(self, row: TableRow) -> None:
        """Note a claim of this process whose connection has ended, or does not know of its success."""
        connection = self._connections.get(row.owner.connection)
        if connection is None:
            self._deletions.add(row.group, row.resource, row.fence)
        elif connection.group == row.group:
            connection.learn(row.resource, row.generation, row.fence)

    def _lost(self, lost: TableRow, to: TableRow) -> None:
        """Act upon a claim that is not in force any more, if `to` is another connection's."""
        if lost.owner == to.owner:
            return
        if lost.owner.proxy != self._member.name:
            self.unsettled.note_taken(lost.owner.proxy, lost.group, lost.resource, to.fence)
            return
        connection = self._connections.get(lost.owner.connection)
        if connection is not None:
            by = to.client or "another"
            self._sever(connection, f"{_described(lost)} was claimed by {by}, generation {to.generation}")

    def claim_gone(self, row: TableRow, revision: int) -> None:
        """Act upon a deleted claim: its claimant ended, a command freed it, or part of its whole group was claimed."""
        if row.owner.proxy != self._member.name:
            self.unsettled.note_taken(row.owner.proxy, row.group, row.resource, revision)
            return
        connection = self._connections.get(row.owner.connection)
        held = connection.held.get(row.resource) if connection is not None else None
        if connection is not None and held is not None and held.fence <= row.fence:
            self._sever(connection, f"{_described(row)} was freed")
        self.releases.release([row], revision)

    def member_put(self, name: str, member: Member) -> None:
        """Note a member's published state; `batch_told` wakes the coroutines that wait for it."""
        if name == self._member.name:
            return
        self.unsettled.note_member(name, member.seen, member.unsettled)
        if name not in self._differing and member.writer_groups != self._group_by_topic:
            # That proxy lets other clients write to these topics, and no other check would find the mistake.
            self._differing.add(name)
            log.error(
                "writer groups differ from another proxy's",
                advice="give all proxies of one etcd the same --writer-group",
                proxy=str(Address(member.host, member.port)),
                differ=sorted(
                    topic
                    for topic in {*member.writer_groups, *self._group_by_topic}
                    if member.writer_groups.get(topic) != self._group_by_topic.get(topic)
                )[:MAX_NAMED],
            )

    def member_gone(self, member: str, rows: Sequence[TableRow], revision: int) -> None:
        """Act upon the end of a member or of its lease, which freed `rows`; its writes may still be in flight."""
        if member == self._member.name:
            self._member.entry_gone(member)
        self._differing.discard(member)
        self.unsettled.note_member_gone(member, [(row.group, row.resource) for row in rows])
        if not self._member.is_live():
            self.releases.defer(rows, revision)
        elif self._member.name == min(self.table.members, default=self._member.name):
            self.releases.release(rows, revision)

    def batch_told(self) -> None:
        """Confirm the table's revision, as connections that lost a claim are severed by now (invariant 2)."""
        # A long message of etcd comes in parts; before its last part the table has an earlier revision.
        if 0 < self._to_confirm <= self.table.revision:
            self._to_confirm = 0
            self._member.publish()
        self._changes.notify()

    def restored(self) -> None:
        """Give up all claims, because they were made in a history that etcd no longer has."""
        self._to_confirm = 0
        self._member.entry_gone(self._member.name)
        self.unsettled.note_restored()
        self._lease_lost("etcd was restored")

    def _lease_lost(self, reason: str) -> None:
        for connection in list(self._connections.values()):
            if connection.group is not None:
                self._sever(connection, reason)
        self._changes.notify()

    def _sever(self, connection: ClaimingConnection, reason: str) -> None:
        self._counters["own.severed"] += 1
        connection.sever(reason)


def _described(row: TableRow) -> str:
    return f"group {row.group}" if row.resource == WHOLE_GROUP else f"{row.resource} of group {row.group}"

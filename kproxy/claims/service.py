"""The Own API of one process: claims of its clients' connections, and what claims of others mean for them.

A claim goes through these steps, each resource for itself
  decided    by the rules, in a transaction (`claiming`)
  granted    once nobody else is served (`granting`)

Invariants
1. A claim counts, for writing or reading, only when it is granted and while this process's lease is certain to live.
2. Who loses a claim is severed in the same step of the event loop in which the table is told of it, and only then is
   the revision confirmed to the others.
3. A claim of a gated partition that is gone is released at the partition's leader (`releasing`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from kproxy.claims.aftermath import Aftermath
from kproxy.claims.changes import Changes
from kproxy.claims.claiming import Claiming, Outcome
from kproxy.claims.desk import ClaimDesk
from kproxy.claims.granting import Bind, Granting
from kproxy.claims.holdings import MAX_CLAIMS_PER_CONNECTION, Holdings
from kproxy.claims.keys import OwnKeys
from kproxy.claims.member import OwnMember
from kproxy.claims.releasing import Gates, Releasing
from kproxy.claims.settlement import Settlement
from kproxy.claims.table import Member, OwnTable, TableRow
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

# How soon it is found out that time has settled something.
LOOK_INTERVAL_S: Final = 0.5
# A process that ends does not wait longer for etcd to hear of it: its claims end with its lease.
FREE_TIMEOUT_S: Final = 2.0
# Topics in one line of the log.
MAX_NAMED: Final = 5

log = structlog.get_logger(__name__)


class OwnService:
    """`run` is one coroutine that the caller owns. Made on the event loop it runs on.

    `host` and `port` are what this process advertises; `writer_groups` the group that gates writes to a topic, by
    topic; `timeout_s` how long a claim may take, in seconds. `has_fences` tells whether the brokers know fences; `desk`
    is for those who look at claims and free them.
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
        settlement: Settlement,
        counters: Counter[str],
        clock: Clock = lease_clock,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.table = OwnTable(OwnKeys(prefix), counters=counters)
        self.table.listener = self
        self.settlement = settlement
        self.gates = Gates(writer_groups)
        self.gated = self.gates.by_topic
        self.releasing = Releasing(self.table, self.gates)
        self._writer_groups = dict(writer_groups)
        # Members that were told of other writer groups than this one.
        self._differing: set[str] = set()
        self.has_fences: Callable[[], bool] = lambda: False
        self.desk = ClaimDesk(client, self.table)
        self._timeout_s = timeout_s
        self._counters = counters
        self._changes = Changes()
        self._member = OwnMember(
            client,
            self.table.keys,
            host,
            port,
            ttl_s=ttl_s,
            clock=clock,
            writer_groups=writer_groups,
            state=lambda: (self.table.revision, self.settlement.unsettled()),
            on_entered=self.releasing.release_left,
            on_lost=self._lease_lost,
        )
        self._mirror = PrefixMirror(client, [self.table.keys.all], self.table)
        self._claiming = Claiming(client, self.table, self._member, self._changes, wall_clock)
        self._aftermath = Aftermath(client, self.table, settlement)
        self._granting = Granting(
            self.table,
            self._member,
            self.settlement,
            self.gates,
            self._claiming,
            self._changes,
            self._aftermath,
            has_fences=lambda: self.has_fences(),
        )
        self._connections: dict[int, Holdings] = {}
        self._last_connection = 0
        # Claims up to here are to be confirmed once the table has all up to it; 0 for none.
        self._to_confirm = 0
        # Whoever runs this: where that fails nothing can be claimed any more.
        self.running: asyncio.Task[None] | None = None
        settlement.on_change = self._settlement_changed

    async def run(self) -> None:
        """Mirror the table and be a member until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._mirror.run(), name="own-table")
                tasks.create_task(self._join(), name="own-member")
                tasks.create_task(self._look(), name="own-settlement")
        finally:
            await self._claiming.close()

    async def _join(self) -> None:
        await self._mirror.wait_synced()
        await self._aftermath.look()
        try:
            await self._member.run()
        finally:
            await self._aftermath.unmark()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.settlement.look()

    async def wait_ready(self) -> None:
        """Until claims can be made."""
        while not self.is_ready:
            await self._changes.wait()

    @property
    def is_ready(self) -> bool:
        """Whether this process is a member, and its table knows it: no claim before that is missing there."""
        return self._member.is_live() and self._member.name in self.table.members

    def is_live(self) -> bool:
        """Whether granted claims of this process still count."""
        return self._member.is_live()

    @property
    def held_count(self) -> int:
        """How many claims this process holds for its clients."""
        return sum(len(each.held) for each in self._connections.values())

    # Connections

    def connection(self, client: str, sever: Callable[[str], None]) -> Holdings:
        """A connection that may claim; `ended` is to be called when it has ended."""
        self._last_connection += 1
        holdings = Holdings(self._last_connection, client, sever, self.gates.are_of)
        self._connections[holdings.connection] = holdings
        return holdings

    def ended(self, holdings: Holdings) -> None:
        """The connection has ended: what it owned is free."""
        if self._connections.pop(holdings.connection, None) is None:
            return
        for resource, held in holdings.end().items():
            if holdings.group is not None:
                self._claiming.delete(holdings.group, resource, held.fence)

    async def all_freed(self) -> None:
        """Until what ended connections owned is free, or etcd does not answer."""
        await self._claiming.all_deleted(FREE_TIMEOUT_S)

    # Claiming

    async def own(self, holdings: Holdings, request: OwnRequest, bind: Bind) -> OwnResponse:
        """Serve one Own request of a connection; one at a time for each. `bind` on the connection's own connections."""
        group = request.group
        if not group or holdings.group not in (None, group):
            return self._refused(request, INVALID_REQUEST)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while not self.is_ready:
            if not await self._changes.wait(deadline):
                return self._refused(request, COORDINATOR_NOT_AVAILABLE)
        holdings.group = group
        asked = request.resources
        if asked is None:
            asked = (OwnResource(WHOLE_GROUP, 0),)
            wanted: Sequence[OwnResource] = asked
        else:
            named = Counter(each.resource for each in asked)
            wanted = [each for each in asked if named[each.resource] == 1 and each.resource != WHOLE_GROUP]
            if len(holdings.held) + len(wanted) > MAX_CLAIMS_PER_CONNECTION:
                wanted = []
        outcomes = await self._claiming.take_all(holdings, wanted, deadline)
        codes = await self._granting.see_granted(holdings, outcomes, bind, deadline)
        return OwnResponse(NONE, group, tuple(self._answer(each.resource, outcomes, codes) for each in asked))

    def _refused(self, request: OwnRequest, error_code: int) -> OwnResponse:
        self._counters["own.refused"] += 1 if request.resources is None else len(request.resources)
        return OwnResponse(error_code, request.group)

    def _answer(self, resource: str, outcomes: Mapping[str, Outcome], codes: Mapping[str, int]) -> OwnedResource:
        outcome = outcomes.get(resource, Outcome(INVALID_REQUEST))
        error_code = codes.get(resource, outcome.error_code)
        if error_code != NONE or outcome.held is None:
            counted = {FENCED_INSTANCE_ID: "own.fenced", REQUEST_TIMED_OUT: "own.timed_out"}
            self._counters[counted.get(error_code, "own.refused")] += 1
            return OwnedResource(resource, error_code)
        self._counters["own.granted"] += 1
        return OwnedResource(resource, NONE, outcome.held.generation, outcome.held.fence)

    def _settlement_changed(self) -> None:
        self._member.publish()
        self._changes.tell()

    # What the table says

    def claim_put(self, row: TableRow, before: TableRow | None) -> None:
        """Invariant 2."""
        if row.owner.proxy == self._member.name:
            self._take_note_of_own(row)
        else:
            self._to_confirm = row.fence
        if before is not None:
            self._lost(before, row)
        if row.resource == WHOLE_GROUP:
            for each in list(self.table.rows_of(row.group).values()):
                self._lost(each, row)
        elif (whole := self.table.whole(row.group)) is not None:
            self._lost(whole, row)

    def _take_note_of_own(self, row: TableRow) -> None:
        """A claim for a connection of this process: one that has ended, or did not hear that it succeeded."""
        holdings = self._connections.get(row.owner.connection)
        if holdings is None:
            self._claiming.delete(row.group, row.resource, row.fence)
        elif holdings.group == row.group:
            holdings.learn(row.resource, row.generation, row.fence)

    def _lost(self, lost: TableRow, to: TableRow) -> None:
        """`lost` is not in force any more, where `to` is another connection's."""
        if lost.owner == to.owner:
            return
        if lost.owner.proxy != self._member.name:
            self.settlement.note_taken(lost.owner.proxy, lost.group, lost.resource, to.fence)
            return
        holdings = self._connections.get(lost.owner.connection)
        if holdings is not None:
            by = to.client or "another"
            self._sever(holdings, f"{_called(lost)} was claimed by {by}, generation {to.generation}")

    def claim_gone(self, row: TableRow, revision: int) -> None:
        """Freed by its owner's end, or by somebody's command."""
        if row.owner.proxy != self._member.name:
            self.settlement.note_taken(row.owner.proxy, row.group, row.resource, revision)
            return
        holdings = self._connections.get(row.owner.connection)
        held = holdings.held.get(row.resource) if holdings is not None else None
        if holdings is not None and held is not None and held.fence <= row.fence:
            self._sever(holdings, f"{_called(row)} was freed")
        self.releasing.release([row], revision)

    def member_put(self, name: str, member: Member) -> None:
        """What it confirms is looked at by those who wait for it."""
        if name == self._member.name:
            return
        self.settlement.note_member(name, member.seen, member.unsettled)
        if name not in self._differing and member.writer_groups != self._writer_groups:
            # It lets others write than this process does: a mistake that shows nowhere else.
            self._differing.add(name)
            log.error(
                "another proxy has other writer groups: give all proxies of one etcd the same --writer-group",
                proxy=f"{member.host}:{member.port}",
                differ=sorted(
                    topic
                    for topic in {*member.writer_groups, *self._writer_groups}
                    if member.writer_groups.get(topic) != self._writer_groups.get(topic)
                )[:MAX_NAMED],
            )

    def member_gone(self, member: str, rows: Sequence[TableRow], revision: int) -> None:
        """A process has ended or lost its lease: what it held was freed by that, and what it sent may be under way."""
        if member == self._member.name:
            self._member.entry_gone(member)
        self._differing.discard(member)
        self.settlement.note_member_gone(member, [(row.group, row.resource) for row in rows])
        if not self._member.is_live():
            self.releasing.leave(rows, revision)
        elif self._member.name == min(self.table.members, default=self._member.name):
            self.releasing.release(rows, revision)

    def batch_told(self) -> None:
        """Invariant 2: whoever lost something is severed by now."""
        # A long message comes in parts, and of the first ones the table's revision does not tell yet.
        if 0 < self._to_confirm <= self.table.revision:
            self._to_confirm = 0
            self._member.publish()
        self._changes.tell()

    def restored(self) -> None:
        """What is claimed in a history that is no more counts for nothing."""
        self._to_confirm = 0
        self._member.entry_gone(self._member.name)
        self.settlement.note_restored()
        self._lease_lost("etcd was restored")

    def _lease_lost(self, reason: str) -> None:
        for holdings in list(self._connections.values()):
            if holdings.group is not None:
                self._sever(holdings, reason)
        self._changes.tell()

    def _sever(self, holdings: Holdings, reason: str) -> None:
        self._counters["own.severed"] += 1
        holdings.sever(reason)


def _called(row: TableRow) -> str:
    return f"group {row.group}" if row.resource == WHOLE_GROUP else f"{row.resource} of group {row.group}"

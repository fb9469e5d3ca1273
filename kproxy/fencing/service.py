"""Claims for the connections of this process: making them, seeing them confirmed, losing them, giving them up.

A claim goes through these steps, each resource for itself
  decide     by the rules, on what the table has; a transaction that is guarded by just that carries the decision out, a
             refusal too, so that it is true when it is made. Where the transaction finds something else, decide again.
  confirm    every member that was there before has acted upon the claim: whoever lost something by it is severed, and
             nothing of theirs is under way. A member that is dead has lost its own lease, and is not waited for.
  bind       the leader of the partition knows the fence (kproxy.proxy.binding), where it knows of fences at all
  granted

Invariants
1. A claim counts, for writing or reading, only when it is granted and while this process's lease is certain to live.
2. Who loses a claim is severed in the same step of the event loop in which the table is told of it, and only then is
   the revision confirmed to the others.
3. What stands in etcd for a connection of this process that has ended is deleted, whoever put it there and whenever:
   guarded by the revision at which it was put, so that nothing of anybody else's ever is.
4. A claim of a gated partition that is gone is released at the partition's leader with the revision at which it went:
   by the member that held it or, where that one has gone too, by the first of those that live.
5. At most CONCURRENT_TRANSACTIONS are under way at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import structlog

from codec.error_codes import (
    COORDINATOR_NOT_AVAILABLE,
    FENCED_INSTANCE_ID,
    INVALID_REQUEST,
    NONE,
    REQUEST_TIMED_OUT,
)
from codec.own import WHOLE_GROUP, OwnedResource, OwnRequest, OwnResource, OwnResponse, resource_partition
from kproxy.fencing.holdings import MAX_CLAIMS_PER_CONNECTION, Held, Holdings
from kproxy.fencing.keys import ClaimValue, OwnKeys, decode_claim, encode_value
from kproxy.fencing.member import OwnMember
from kproxy.fencing.rules import Claim, Decision, Owner, decide, decide_whole
from kproxy.fencing.settlement import Settlement
from kproxy.fencing.table import Member, OwnTable, TableRow
from kproxy.ownership.etcd import (
    EtcdClient,
    EtcdError,
    PrefixMirror,
    TxnCompare,
    TxnOp,
    delete_op,
    get_op,
    key_absent,
    mod_revision_is,
    prefix_unchanged_since,
    put_op,
)
from kproxy.ownership.etcd.clock import Clock, lease_clock

CONCURRENT_TRANSACTIONS: Final = 32
# A resource that others claim at the same time is tried for so often, and then the client may ask again.
MAX_ATTEMPTS: Final = 50
DELETE_PAUSE_S = 0.5
# How soon it is found out that time has settled something.
LOOK_INTERVAL_S = 0.5
MAX_UNRELEASED: Final = 10_000

log = structlog.get_logger(__name__)


class Release(NamedTuple):
    """A partition that nobody owns any more, and the revision since which that is so."""

    topic: str
    partition_index: int
    revision: int


class Binding(NamedTuple):
    """A partition and the fence of the claim that its writes are to stand behind."""

    topic: str
    partition_index: int
    fence: int


Bind = Callable[[list[Binding], float], Coroutine[Any, Any, dict[tuple[str, int], int]]]
"""Binds partitions at their leaders until a deadline (seconds, the event loop's clock): an error code for each."""


class _Outcome(NamedTuple):
    """What came of one resource's transaction; `held` where it is the asker's."""

    error_code: int
    held: Held | None = None


class OwnService:
    """`run` is one coroutine that the caller owns. Made on the event loop it runs on.

    `host` and `port` are what this process advertises; `writer_groups` the group that gates writes to a topic, by
    topic; `timeout_s` how long a claim may take, in seconds. `release` is told of partitions that are to be released at
    their leaders, `partitions_of` tells the indexes of a topic's partitions, `has_fences` whether the brokers know
    fences.
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
        self._wall_clock = wall_clock
        self.table = OwnTable(OwnKeys(prefix), counters=counters)
        self.table.listener = self
        self.settlement = settlement
        self.gated = {topic.encode(): group for topic, group in writer_groups.items()}
        self.release: Callable[[Release], None] = lambda release: None
        self.partitions_of: Callable[[str], Collection[int]] = lambda topic: ()
        self.has_fences: Callable[[], bool] = lambda: False
        self._client = client
        self._keys = self.table.keys
        self._timeout_s = timeout_s
        self._counters = counters
        self._member = OwnMember(
            client,
            self._keys,
            host,
            port,
            ttl_s=ttl_s,
            clock=clock,
            state=lambda: (self.table.revision, self.settlement.unsettled()),
            on_lost=self._lease_lost,
        )
        self._member.on_entered = self._release_left_over
        self._mirror = PrefixMirror(client, [self._keys.all], self.table)
        self._slots = asyncio.Semaphore(CONCURRENT_TRANSACTIONS)
        self._connections: dict[int, Holdings] = {}
        self._last_connection = 0
        self._changed: asyncio.Future[None] | None = None
        self._chores: set[asyncio.Task[None]] = set()
        # Of members that went while this process was none: (topic, partition) and since when.
        self._unreleased: deque[Release] = deque(maxlen=MAX_UNRELEASED)
        self._is_to_confirm = False
        settlement.on_change = self._settlement_changed

    async def run(self) -> None:
        """Mirror the table and be a member until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._mirror.run(), name="own-table")
                tasks.create_task(self._join(), name="own-member")
                tasks.create_task(self._look(), name="own-settlement")
        finally:
            for chore in list(self._chores):
                chore.cancel()
            await asyncio.gather(*self._chores, return_exceptions=True)

    async def _join(self) -> None:
        await self._mirror.wait_synced()
        await self._member.run()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.settlement.look()

    async def wait_ready(self) -> None:
        """Until claims can be made."""
        while not self.is_ready:
            await self._wait_changed(None)

    @property
    def is_ready(self) -> bool:
        """Whether this process is a member, and its table knows it: no claim before that is missing there."""
        return self._member.is_live() and self._member.name in self.table.members

    def is_live(self) -> bool:
        """Whether granted claims of this process still count."""
        return self._member.is_live()

    @property
    def held_count(self) -> int:
        return sum(len(each.held) for each in self._connections.values())

    # Connections

    def connection(self, client: str, sever: Callable[[str], None]) -> Holdings:
        """A connection that may claim; `ended` is to be called when it has ended."""
        self._last_connection += 1
        holdings = Holdings(self._last_connection, client, sever, self.is_gated_by)
        self._connections[holdings.connection] = holdings
        return holdings

    def is_gated_by(self, topic: str, group: str) -> bool:
        return self.gated.get(topic.encode()) == group

    def ended(self, holdings: Holdings) -> None:
        """The connection has ended: what it owned is free."""
        if self._connections.pop(holdings.connection, None) is None:
            return
        for resource, held in holdings.end().items():
            if holdings.group is not None:
                self._delete(holdings.group, resource, held.fence)

    async def settled_down(self) -> None:
        """Until what ended connections owned is free, or etcd does not answer."""
        if self._chores:
            await asyncio.wait(list(self._chores), timeout=DELETE_PAUSE_S * 4)

    # Claiming

    async def own(self, holdings: Holdings, request: OwnRequest, bind: Bind) -> OwnResponse:
        """Serve one Own request of a connection; one at a time for each. `bind` on the connection's own connections."""
        group = request.group
        if not group or holdings.group not in (None, group):
            self._counters["own.refused"] += 1
            return OwnResponse(INVALID_REQUEST, group)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        if not await self._ready_by(deadline):
            self._counters["own.timed_out"] += 1
            return OwnResponse(COORDINATOR_NOT_AVAILABLE, group)
        holdings.group = group
        asked = request.resources
        outcomes: dict[str, _Outcome] = {}
        if asked is None:
            asked = (OwnResource(WHOLE_GROUP, 0),)
            outcomes[WHOLE_GROUP] = await self._take(holdings, WHOLE_GROUP, 0)
        else:
            named = Counter(each.resource for each in asked)
            wanted = [each for each in asked if named[each.resource] == 1 and each.resource != WHOLE_GROUP]
            if len(holdings.held) + len(wanted) > MAX_CLAIMS_PER_CONNECTION:
                wanted = []
            taken = await asyncio.gather(*(self._take(holdings, *each) for each in wanted))
            outcomes = {each.resource: outcome for each, outcome in zip(wanted, taken, strict=True)}
        codes = await self._see_granted(holdings, outcomes, bind, deadline)
        return OwnResponse(NONE, group, tuple(self._answer(each.resource, outcomes, codes) for each in asked))

    def _answer(self, resource: str, outcomes: Mapping[str, _Outcome], codes: Mapping[str, int]) -> OwnedResource:
        outcome = outcomes.get(resource)
        if outcome is None:
            self._counters["own.refused"] += 1
            return OwnedResource(resource, INVALID_REQUEST)
        error_code = codes.get(resource, outcome.error_code)
        if error_code != NONE or outcome.held is None:
            counted = {FENCED_INSTANCE_ID: "own.fenced", REQUEST_TIMED_OUT: "own.timed_out"}
            self._counters[counted.get(error_code, "own.refused")] += 1
            return OwnedResource(resource, error_code)
        self._counters["own.granted"] += 1
        return OwnedResource(resource, NONE, outcome.held.generation, outcome.held.fence)

    async def _ready_by(self, deadline: float) -> bool:
        while not self.is_ready:
            if not await self._wait_changed(deadline):
                return False
        return True

    async def _take(self, holdings: Holdings, resource: str, generation: int) -> _Outcome:
        """Decide on one resource and carry it out."""
        group = holdings.group or ""
        view = _View(self.table.row(group, resource), self.table.whole(group))
        async with self._slots:
            for _ in range(MAX_ATTEMPTS):
                if holdings.has_ended or not self._member.is_live():
                    return _Outcome(COORDINATOR_NOT_AVAILABLE)
                try:
                    outcome = await self._attempt(holdings, group, resource, generation, view)
                except EtcdError as error:
                    # Whether it stands is told by the mirror: it is this connection's then, and asking again finds it.
                    log.warning("own_not_decided", group=group, resource=resource, reason=str(error))
                    return _Outcome(COORDINATOR_NOT_AVAILABLE)
                if isinstance(outcome, _Outcome):
                    return outcome
                view = outcome
        return _Outcome(REQUEST_TIMED_OUT)

    async def _attempt(
        self, holdings: Holdings, group: str, resource: str, generation: int, view: _View
    ) -> _Outcome | _View:
        """Carry out what `view` leads to, or tell what there is instead. Raises EtcdError."""
        owner = holdings.owner(self._member.name)
        key, whole_key = self._keys.claim(group, resource), self._keys.claim(group, WHOLE_GROUP)
        if resource == WHOLE_GROUP:
            decision, compares = self._decide_whole(group, owner)
        else:
            decision = decide(owner, generation, *view.claims)
            compares = [_as_seen(key, view.row), _as_seen(whole_key, view.whole)]
        if decision.error_code == INVALID_REQUEST:
            return _Outcome(INVALID_REQUEST)
        writes: list[TxnOp] = []
        if decision.is_new:
            value = ClaimValue(*owner, decision.generation, holdings.client, int(self._wall_clock() * 1_000))
            writes.append(put_op(key, encode_value(value), self._member.lease_id))
            if resource != WHOLE_GROUP and view.whole is not None and view.whole.owner != owner:
                # Its owner has lost a part of it, and is severed for that.
                writes.append(delete_op(whole_key))
        found = await self._client.txn(compares, writes, [get_op(key), get_op(whole_key)])
        if not found.succeeded:
            if resource == WHOLE_GROUP:
                # Somebody claimed in this group: the table has to know of it first.
                await self._wait_changed(asyncio.get_running_loop().time() + DELETE_PAUSE_S)
            return _View.of(self._keys, found.responses[0].kvs, found.responses[1].kvs)
        if decision.error_code != NONE:
            return _Outcome(decision.error_code)
        if holdings.has_ended:
            self._delete(group, resource, found.revision)
            return _Outcome(COORDINATOR_NOT_AVAILABLE)
        if decision.is_new:
            return _Outcome(NONE, holdings.learn(resource, decision.generation, found.revision))
        return _Outcome(NONE, holdings.held.get(resource) or holdings.held.get(WHOLE_GROUP))

    def _decide_whole(self, group: str, owner: Owner) -> tuple[Decision, list[TxnCompare]]:
        rows = self.table.rows_of(group)
        whole = rows.get(WHOLE_GROUP)
        claims = [row.claim for resource, row in rows.items() if resource != WHOLE_GROUP]
        decision = decide_whole(owner, claims, whole.claim if whole is not None else None)
        return decision, [prefix_unchanged_since(self._keys.group(group), self.table.revision)]

    # Confirming

    async def _see_granted(
        self, holdings: Holdings, outcomes: Mapping[str, _Outcome], bind: Bind, deadline: float
    ) -> dict[str, int]:
        """Wait until what was taken is confirmed and bound; an error code for each that was taken."""
        taken = {resource: each.held for resource, each in outcomes.items() if each.held is not None}
        waiting = {resource: held for resource, held in taken.items() if not held.is_granted}
        codes = dict.fromkeys(taken, NONE)
        bindings = {resource: self._bindings(holdings, resource, held.fence) for resource, held in waiting.items()}
        confirmed = []
        for resource, held in waiting.items():
            if await self._confirmed_by(deadline, held.fence, holdings.group or "", resource):
                confirmed.append(resource)
            else:
                codes[resource] = REQUEST_TIMED_OUT
        wanted = [binding for resource in confirmed for binding in bindings[resource]]
        bound = await bind(wanted, deadline) if wanted else {}
        granted = []
        for resource in confirmed:
            failures = [code for each in bindings[resource] if (code := bound.get(each[:2], NONE)) != NONE]
            if failures:
                codes[resource] = failures[0]
            else:
                granted.append(resource)
        if holdings.has_ended or not self.is_live():
            return dict.fromkeys(taken, COORDINATOR_NOT_AVAILABLE)
        holdings.grant(granted)
        return codes

    def _bindings(self, holdings: Holdings, resource: str, fence: int) -> list[Binding]:
        """The partitions whose leaders are to know of a claim."""
        if resource == WHOLE_GROUP:
            topics = [topic.decode() for topic, group in self.gated.items() if group == holdings.group]
            return [Binding(topic, index, fence) for topic in topics for index in self.partitions_of(topic)]
        partition = resource_partition(resource)
        return [Binding(*partition, fence)] if partition is not None and holdings.gates(partition[0]) else []

    async def _confirmed_by(self, deadline: float, fence: int, group: str, resource: str) -> bool:
        while not self._is_confirmed(fence, group, resource):
            if not await self._wait_changed(deadline):
                return False
        return True

    def _is_confirmed(self, fence: int, group: str, resource: str) -> bool:
        """Whether all who were there before have acted upon the claim, and nothing earlier is under way.

        Where brokers know fences what is under way is refused at its end.
        """
        if self.table.revision < fence:
            return False
        others = [
            member
            for name, member in self.table.members.items()
            if name != self._member.name and member.create_revision <= fence
        ]
        if any(member.seen < fence for member in others):
            return False
        if self.has_fences():
            return True
        listed = [self.settlement.unsettled(), *(member.unsettled for member in others)]
        return not any(self.settlement.keeps_back(group, resource, each) for each in listed)

    async def _wait_changed(self, deadline: float | None) -> bool:
        """Until the table or what is settled changes; False at the deadline (seconds, the event loop's clock)."""
        loop = asyncio.get_running_loop()
        if self._changed is None:
            self._changed = loop.create_future()
        left = None if deadline is None else deadline - loop.time()
        if left is not None and left <= 0:
            return False
        done, _ = await asyncio.wait([self._changed], timeout=left)
        return bool(done)

    def _tell(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    def _settlement_changed(self) -> None:
        self._member.publish()
        self._tell()

    # What the table says

    def claim_put(self, row: TableRow, before: TableRow | None) -> None:
        """Invariant 2."""
        if row.owner.proxy != self._member.name:
            self._is_to_confirm = True
        self._take_note_of_own(row)
        if before is not None:
            self._lost(before, row)
        if row.resource == WHOLE_GROUP:
            for each in list(self.table.rows_of(row.group).values()):
                self._lost(each, row)
        elif (whole := self.table.whole(row.group)) is not None:
            self._lost(whole, row)

    def _take_note_of_own(self, row: TableRow) -> None:
        """A claim for a connection of this process: one that has ended, or did not hear that it succeeded."""
        if row.owner.proxy != self._member.name:
            return
        holdings = self._connections.get(row.owner.connection)
        if holdings is None:
            self._delete(row.group, row.resource, row.fence)
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
            self._sever(
                holdings, f"{_called(lost)} was claimed by {to.client or 'another'}, generation {to.generation}"
            )

    def claim_gone(self, row: TableRow, revision: int) -> None:
        """Freed by its owner's end, or by somebody's command."""
        if row.owner.proxy != self._member.name:
            self.settlement.note_taken(row.owner.proxy, row.group, row.resource, revision)
            return
        holdings = self._connections.get(row.owner.connection)
        if holdings is not None:
            held = holdings.held.get(row.resource)
            if held is None or held.fence <= row.fence:
                self._sever(holdings, f"{_called(row)} was freed")
        self._release([row], revision)

    def member_put(self, name: str, member: Member) -> None:
        """What it confirms is looked at by those who wait for it."""
        if name != self._member.name:
            self.settlement.note_member(name, member.seen, member.unsettled)

    def member_gone(self, member: str, rows: Sequence[TableRow], revision: int) -> None:
        """A process has ended or lost its lease: what it held was freed by that, and what it sent may be under way."""
        if member == self._member.name:
            self._member.entry_gone(member)
        self.settlement.note_member_gone(member, [(row.group, row.resource) for row in rows])
        if self._is_first():
            self._release(rows, revision)
        elif not self._member.is_live():
            partitions = [partition for row in rows for partition in self._gated_partitions(row)]
            self._unreleased.extend(Release(*partition, revision) for partition in partitions)

    def batch_told(self) -> None:
        if self._is_to_confirm:
            self._is_to_confirm = False
            self._member.publish()
        self._tell()

    def restored(self) -> None:
        """What is claimed in a history that is no more counts for nothing."""
        self._member.entry_gone(self._member.name)
        self.settlement.note_restored()
        self._lease_lost("etcd was restored")

    def _lease_lost(self, reason: str) -> None:
        for holdings in list(self._connections.values()):
            if holdings.group is not None:
                self._sever(holdings, reason)
        self._tell()

    def _sever(self, holdings: Holdings, reason: str) -> None:
        self._counters["own.severed"] += 1
        holdings.sever(reason)

    # Giving up

    def _delete(self, group: str, resource: str, fence: int) -> None:
        self._start(self._delete_key(self._keys.claim(group, resource), fence, self._member.name))

    async def _delete_key(self, key: str, fence: int, member: str) -> None:
        """As often as it takes; with the lease it goes by itself."""
        while member and member == self._member.name:
            try:
                async with self._slots:
                    await self._client.txn([mod_revision_is(key, fence)], [delete_op(key)])
                return
            except EtcdError as error:
                log.warning("own_not_freed", key=key, reason=str(error))
                await asyncio.sleep(DELETE_PAUSE_S)

    def _gated_partitions(self, row: TableRow) -> Iterable[tuple[str, int]]:
        """The partitions whose writes a claim gates."""
        if row.resource == WHOLE_GROUP:
            for topic, group in self.gated.items():
                if group == row.group:
                    yield from ((topic.decode(), index) for index in self.partitions_of(topic.decode()))
        elif (partition := resource_partition(row.resource)) is not None and self.is_gated_by(partition[0], row.group):
            yield partition

    def _release(self, rows: Iterable[TableRow], revision: int) -> None:
        for row in rows:
            for topic, partition_index in self._gated_partitions(row):
                if self.table.owner(row.group, f"{topic}/{partition_index}") is None:
                    self.release(Release(topic, partition_index, revision))

    def _release_left_over(self) -> None:
        """This process is a member again, or at last."""
        left, self._unreleased = self._unreleased, deque(maxlen=MAX_UNRELEASED)
        for release in left:
            group = self.gated.get(release.topic.encode(), "")
            if self.table.owner(group, f"{release.topic}/{release.partition_index}") is None:
                self.release(release)

    def _is_first(self) -> bool:
        name = self._member.name
        return bool(name) and name == min(self.table.members, default=name)

    def _start(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


class _View(NamedTuple):
    """What stands for a resource and for its group, as one read has it."""

    row: TableRow | None
    whole: TableRow | None

    @property
    def claims(self) -> tuple[Claim | None, Claim | None]:
        return (
            self.row.claim if self.row is not None else None,
            self.whole.claim if self.whole is not None else None,
        )

    @classmethod
    def of(cls, keys: OwnKeys, rows: Sequence[Any], wholes: Sequence[Any]) -> _View:
        return cls(_row_of(keys, rows), _row_of(keys, wholes))


def _row_of(keys: OwnKeys, kvs: Sequence[Any]) -> TableRow | None:
    if not kvs:
        return None
    group, resource = keys.parse_claim(kvs[0].key)
    try:
        value = decode_claim(kvs[0].value)
    except ValueError:
        # It makes no sense: nobody owns by it, and whoever claims replaces it.
        value = ClaimValue("", 0, 0)
    return TableRow(group, resource, Owner(value.proxy, value.connection), value.generation, kvs[0].mod_revision)


def _as_seen(key: str, row: TableRow | None) -> TxnCompare:
    return key_absent(key) if row is None else mod_revision_is(key, row.fence)


def _called(row: TableRow) -> str:
    return f"group {row.group}" if row.resource == WHOLE_GROUP else f"{row.resource} of group {row.group}"

"""Acquire claims for clients: decide each claim, put it into etcd, and wait until it is granted.

A claim in etcd is granted under two conditions. Once both are true, no other client can be served:
  confirmed   every earlier member has severed the connections that lost a resource by the claim and, unless the leader
              knows fences, none of their writes is in flight. A dead member has lost its lease, and is not waited for.
  bound       the leader of the partition knows the fence (kproxy.proxy.claims), if it supports fences at all

Invariants
1. A transaction carries out each decision, also a refusal of a lower generation. It succeeds only if the data of the
   decision is unchanged (whole group: nothing was put in the group since). Otherwise the claim is decided again.
2. At most CONCURRENT_TRANSACTIONS claims are under way at a time, PER_REQUEST of them for one request, so that no
   request waits for all resources of another. Deletions have slots of their own, and delay no claim.
3. A claim is granted when it is confirmed and bound, and while its connection and this process's lease live.
4. A claim that is not granted in time stays in etcd; a repeated request continues to wait.
5. A claim that its partition's leader finally refuses is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import structlog

from kproxy.claims.connection import ClaimingConnection, Held
from kproxy.claims.inflight_writes import InflightWrites
from kproxy.claims.keys import ClaimValue, OwnKeys, decode_claim, encode_value
from kproxy.claims.member import AtWorkMark, OwnMember
from kproxy.claims.release import Brokers, ClaimDeletions, WriterGroups
from kproxy.claims.rules import Claim, Decision, Owner, decide, decide_whole
from kproxy.claims.table import MAX_CLAIMS, OwnTable, TableRow
from kproxy.etcd import (
    EtcdClient,
    EtcdError,
    KeyValue,
    TxnCompare,
    TxnOp,
    delete_op,
    get_op,
    key_absent,
    mod_revision_is,
    prefix_unchanged_since,
    put_op,
)
from kproxy_codec.error_codes import (
    COORDINATOR_NOT_AVAILABLE,
    INVALID_REQUEST,
    NONE,
    REQUEST_TIMED_OUT,
    THROTTLING_QUOTA_EXCEEDED,
)
from kproxy_codec.own import WHOLE_GROUP, FenceBinding, OwnResource

CONCURRENT_TRANSACTIONS: Final = 32
PER_REQUEST: Final = 8
# No new claim is made beyond this number: a claim that tables cannot hold would sever no connection. The rest of
# MAX_CLAIMS is for claims that other processes are making.
FULL: Final = MAX_CLAIMS * 9 // 10
# The longest wait for the table to show the claims that a transaction has found.
CATCH_UP_S: Final = 0.5

log = structlog.get_logger(__name__)

Bind = Callable[[list[FenceBinding], float], Coroutine[Any, Any, dict[tuple[str, int], int]]]
"""Binds partitions at their leaders by a deadline (seconds, the event loop's clock); returns each one's error code."""


class ChangeSignal:
    """Wakes all coroutines that wait for a change."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """Wake every coroutine that waits at this moment."""
        changed, self._next = self._next, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def wait(self, deadline: float | None = None) -> bool:
        """Wait for the next `notify`; False if the deadline (seconds, the event loop's clock) passes first."""
        loop = asyncio.get_running_loop()
        left = None if deadline is None else deadline - loop.time()
        if left is not None and left <= 0:
            return False
        if self._next is None:
            self._next = loop.create_future()
        done, _ = await asyncio.wait([self._next], timeout=left)
        return bool(done)


class ClaimOutcome(NamedTuple):
    """The outcome of claiming one resource: an error code, or the claim `held`, granted or not."""

    error_code: int
    held: Held | None = None


class _View(NamedTuple):
    """The claims of a resource and of its whole group, from one read."""

    row: TableRow | None
    whole: TableRow | None

    @property
    def claims(self) -> tuple[Claim | None, Claim | None]:
        return (
            self.row.claim if self.row is not None else None,
            self.whole.claim if self.whole is not None else None,
        )


@dataclass(frozen=True)
class ClaimWriter:
    """Puts claims for connections of the process that `member` is. `wall_clock` is in seconds since 1970."""

    client: EtcdClient
    table: OwnTable
    member: OwnMember
    deletions: ClaimDeletions
    changes: ChangeSignal
    wall_clock: Callable[[], float]
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENT_TRANSACTIONS))

    async def put_all(
        self, connection: ClaimingConnection, wanted: Sequence[OwnResource], deadline: float
    ) -> dict[str, ClaimOutcome]:
        """Claim each resource of one request; no resource is wanted twice."""
        outcomes: dict[str, ClaimOutcome] = {}
        left = iter(wanted)

        async def put_some() -> None:
            for resource, generation in left:
                outcomes[resource] = await self.put(connection, resource, generation, deadline)

        await asyncio.gather(*(put_some() for _ in range(min(PER_REQUEST, len(wanted)))))
        return outcomes

    async def put(
        self, connection: ClaimingConnection, resource: str, generation: int, deadline: float
    ) -> ClaimOutcome:
        """Decide one resource, WHOLE_GROUP for all, and put the claim, by the deadline (the event loop's clock)."""
        group = connection.group or ""
        async with self.slots:
            view = _View(self.table.row(group, resource), self.table.whole(group))
            while asyncio.get_running_loop().time() < deadline:
                if connection.has_ended or not self.member.is_live():
                    return ClaimOutcome(COORDINATOR_NOT_AVAILABLE)
                try:
                    outcome = await self._attempt(connection, group, resource, generation, view)
                except EtcdError as error:
                    # The claim may have been made: the table will show it, and another request will find it.
                    log.warning("claim failed", group=group, resource=resource, reason=str(error))
                    return ClaimOutcome(COORDINATOR_NOT_AVAILABLE)
                if isinstance(outcome, ClaimOutcome):
                    return outcome
                view = outcome
        return ClaimOutcome(REQUEST_TIMED_OUT)

    async def _attempt(
        self, connection: ClaimingConnection, group: str, resource: str, generation: int, view: _View
    ) -> ClaimOutcome | _View:
        """Carry out the decision on `view`, or return the claims that etcd has instead. Raises EtcdError."""
        owner = connection.owner(self.member.name)
        decision, compares = self._decide(group, resource, owner, generation, view)
        if decision.error_code == INVALID_REQUEST:
            return ClaimOutcome(INVALID_REQUEST)
        if decision.is_new and view.row is None and self.table.count >= FULL:
            return ClaimOutcome(THROTTLING_QUOTA_EXCEEDED)
        key, whole_key = self.table.keys.claim(group, resource), self.table.keys.claim(group, WHOLE_GROUP)
        writes: list[TxnOp] = []
        if decision.is_new:
            value = ClaimValue(*owner, decision.generation, connection.client, int(self.wall_clock() * 1_000))
            writes.append(put_op(key, encode_value(value), self.member.lease_id))
            if resource != WHOLE_GROUP and view.whole is not None and view.whole.owner != owner:
                # The claimant of the whole group loses a part of the group, and is severed.
                writes.append(delete_op(whole_key))
        result = await self.client.txn(compares, writes, [get_op(key), get_op(whole_key)])
        if not result.succeeded:
            if resource == WHOLE_GROUP:
                # Another connection claimed in this group: the table must first show its claim.
                await self.changes.wait(asyncio.get_running_loop().time() + CATCH_UP_S)
            return _View(*(_row_of(self.table.keys, kv) for kv in result.found))
        if decision.error_code != NONE:
            return ClaimOutcome(decision.error_code)
        if not decision.is_new:
            # The connection may not know its claim: the answer to the transaction that made it may have been lost.
            had = (view.row, view.whole) if resource != WHOLE_GROUP else (self.table.whole(group),)
            for row in had:
                if row is not None and row.owner == owner and not connection.has_ended:
                    connection.learn(row.resource, row.generation, row.fence)
            return ClaimOutcome(NONE, connection.latest(resource))
        if connection.has_ended:
            self.deletions.add(group, resource, result.revision)
            return ClaimOutcome(COORDINATOR_NOT_AVAILABLE)
        return ClaimOutcome(NONE, connection.learn(resource, decision.generation, result.revision))

    def _decide(
        self, group: str, resource: str, owner: Owner, generation: int, view: _View
    ) -> tuple[Decision, list[TxnCompare]]:
        """Return a decision, and the comparisons that guard it."""
        if resource != WHOLE_GROUP:
            compares = [
                _unchanged(self.table.keys.claim(group, resource), view.row),
                _unchanged(self.table.keys.claim(group, WHOLE_GROUP), view.whole),
            ]
            return decide(owner, generation, *view.claims), compares
        rows = self.table.rows_of(group)
        whole = rows.get(WHOLE_GROUP)
        claims = [row.claim for resource, row in rows.items() if resource != WHOLE_GROUP]
        decision = decide_whole(owner, claims, whole.claim if whole is not None else None)
        return decision, [prefix_unchanged_since(self.table.keys.group(group), self.table.revision)]


def _row_of(keys: OwnKeys, kv: KeyValue | None) -> TableRow | None:
    if kv is None:
        return None
    group, resource = keys.parse_claim(kv.key)
    try:
        value = decode_claim(kv.value)
    except ValueError:
        # An invalid value counts as no claim; the next claim replaces it.
        value = ClaimValue("", 0, 0)
    return TableRow(group, resource, Owner(value.proxy, value.connection), value.generation, kv.mod_revision)


def _unchanged(key: str, row: TableRow | None) -> TxnCompare:
    return key_absent(key) if row is None else mod_revision_is(key, row.fence)


@dataclass(frozen=True)
class ClaimGranter:
    """Grants the claims of this process, `member`."""

    table: OwnTable
    member: OwnMember
    unsettled: InflightWrites
    writer_groups: WriterGroups
    deletions: ClaimDeletions
    changes: ChangeSignal
    at_work: AtWorkMark
    brokers: Brokers

    async def grant_all(
        self, connection: ClaimingConnection, outcomes: Mapping[str, ClaimOutcome], bind: Bind, deadline: float
    ) -> dict[str, int]:
        """Wait until the claims are confirmed and bound. Return an error code for each of them."""
        group = connection.group or ""
        claimed = {resource: each.held for resource, each in outcomes.items() if each.held is not None}
        waiting = {resource: held for resource, held in claimed.items() if not held.is_granted}
        codes = dict.fromkeys(claimed, NONE)
        for resource, held in waiting.items():
            if not await self._wait_confirmed(deadline, held.fence, group, resource):
                codes[resource] = REQUEST_TIMED_OUT
        confirmed = [resource for resource in waiting if codes[resource] == NONE]
        bindings = {resource: self._bindings(group, resource, waiting[resource].fence) for resource in confirmed}
        wanted = [binding for each in bindings.values() for binding in each]
        bound = await bind(wanted, deadline) if wanted else {}
        for resource in confirmed:
            codes[resource] = max((bound.get(each[:2], NONE) for each in bindings[resource]), default=NONE)
            if codes[resource] != NONE or all(each[:2] in bound for each in bindings[resource]):
                continue
            codes[resource] = await self._wait_settled(deadline, waiting[resource].fence, group, resource)
        if connection.has_ended or not self.member.is_live():
            return dict.fromkeys(claimed, COORDINATOR_NOT_AVAILABLE)
        connection.grant(resource for resource in confirmed if codes[resource] == NONE)
        for resource in confirmed:
            if codes[resource] not in (NONE, REQUEST_TIMED_OUT):
                self._give_up(connection, resource)
        return codes

    def _bindings(self, group: str, resource: str, fence: int) -> list[FenceBinding]:
        return [FenceBinding(*partition, fence) for partition in self.writer_groups.partitions(group, resource)]

    async def _wait_settled(self, deadline: float, fence: int, group: str, resource: str) -> int:
        """Put the mark, and wait until no earlier write is in flight, as the leader has not fenced the claim."""
        try:
            await self.at_work.put(self.member.name)
        except EtcdError as error:
            log.warning("claim not granted", group=group, resource=resource, reason=str(error))
            return REQUEST_TIMED_OUT
        is_settled = await self._wait_confirmed(deadline, fence, group, resource, is_fenced=False)
        return NONE if is_settled else REQUEST_TIMED_OUT

    def _give_up(self, connection: ClaimingConnection, resource: str) -> None:
        """Give up a claim that its leader has refused (invariant 5)."""
        held = connection.forget(resource)
        if held is not None and connection.group is not None:
            self.deletions.add(connection.group, resource, held.fence)

    async def _wait_confirmed(
        self, deadline: float, fence: int, group: str, resource: str, *, is_fenced: bool = True
    ) -> bool:
        while not self._is_confirmed(fence, group, resource, is_fenced=is_fenced and self.brokers.have_fences()):
            if not await self.changes.wait(deadline):
                return False
        return True

    def _is_confirmed(self, fence: int, group: str, resource: str, *, is_fenced: bool) -> bool:
        """Whether all earlier members have acted upon the claim, and no write of an earlier claimant is in flight.

        With brokers that know fences (`is_fenced`) the second condition is dropped, as they refuse such writes.
        """
        if self.table.revision < fence:
            return False
        others = [
            member
            for name, member in self.table.members.items()
            if name != self.member.name and member.create_revision <= fence
        ]
        if any(member.seen < fence for member in others):
            return False
        if is_fenced:
            return True
        listed = [self.unsettled.places(), *(member.unsettled for member in others)]
        return not any(self.unsettled.blocks(group, resource, each) for each in listed)

"""Deciding claims, and carrying the decisions out in etcd.

Invariants
1. A decision is carried out by a transaction that is guarded by just what it was made upon, a refusal too: it is true
   at the moment of the transaction. Where the transaction finds something else, it is decided anew.
2. What stands in etcd for a connection of this process that has ended is deleted, whoever put it there and whenever:
   guarded by the revision at which it was put, so that nothing of anybody else's ever is.
3. At most CONCURRENT_TRANSACTIONS claims are under way at a time, OF_ONE_REQUEST of them for one request: nobody waits
   behind all that somebody else asked for. Deletions are as many, and hold up no claim.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import structlog

from kproxy.claims.changes import Changes
from kproxy.claims.holdings import Held, Holdings
from kproxy.claims.keys import ClaimValue, OwnKeys, decode_claim, encode_value
from kproxy.claims.member import OwnMember
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
from kproxy_codec.own import WHOLE_GROUP, OwnResource

CONCURRENT_TRANSACTIONS: Final = 32
OF_ONE_REQUEST: Final = 8
# When so much is claimed nothing more is: what no table takes any more nobody would be severed for. The rest of the
# room is for claims that are under way in other processes.
FULL: Final = MAX_CLAIMS * 9 // 10
# How long to wait for the table to show what a transaction has found.
CATCH_UP_S: Final = 0.5
DELETE_PAUSE_S: Final = 0.5

log = structlog.get_logger(__name__)


class Outcome(NamedTuple):
    """What came of claiming one resource: an error code or what is `held`, granted or not."""

    error_code: int
    held: Held | None = None


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


class Claiming:
    """Claims for connections of the process that `member` is. `wall_clock` is in seconds since 1970."""

    def __init__(
        self,
        client: EtcdClient,
        table: OwnTable,
        member: OwnMember,
        changes: Changes,
        wall_clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._table = table
        self._keys = table.keys
        self._member = member
        self._changes = changes
        self._wall_clock = wall_clock
        self._slots = asyncio.Semaphore(CONCURRENT_TRANSACTIONS)
        # What is to be deleted: group, resource, fence, and this process's name when that was said.
        self._to_delete: deque[tuple[str, str, int, str]] = deque()
        self._deleting = 0
        self._deletions: set[asyncio.Task[None]] = set()

    async def take_all(self, holdings: Holdings, wanted: Sequence[OwnResource], deadline: float) -> dict[str, Outcome]:
        """What comes of each resource of one request; no resource is wanted twice."""
        outcomes: dict[str, Outcome] = {}
        left = iter(wanted)

        async def take_some() -> None:
            for resource, generation in left:
                outcomes[resource] = await self.take(holdings, resource, generation, deadline)

        await asyncio.gather(*(take_some() for _ in range(min(OF_ONE_REQUEST, len(wanted)))))
        return outcomes

    async def take(self, holdings: Holdings, resource: str, generation: int, deadline: float) -> Outcome:
        """Decide on one resource, WHOLE_GROUP for all, and carry it out, by the deadline (the event loop's clock)."""
        group = holdings.group or ""
        async with self._slots:
            view = _View(self._table.row(group, resource), self._table.whole(group))
            while asyncio.get_running_loop().time() < deadline:
                if holdings.has_ended or not self._member.is_live():
                    return Outcome(COORDINATOR_NOT_AVAILABLE)
                try:
                    outcome = await self._attempt(holdings, group, resource, generation, view)
                except EtcdError as error:
                    # Whether it stands is told by the table: it is this connection's then, and asking again finds it.
                    log.warning("own_not_decided", group=group, resource=resource, reason=str(error))
                    return Outcome(COORDINATOR_NOT_AVAILABLE)
                if isinstance(outcome, Outcome):
                    return outcome
                view = outcome
        return Outcome(REQUEST_TIMED_OUT)

    async def _attempt(
        self, holdings: Holdings, group: str, resource: str, generation: int, view: _View
    ) -> Outcome | _View:
        """Carry out what `view` leads to, or tell what there is instead. Raises EtcdError."""
        owner = holdings.owner(self._member.name)
        decision, compares = self._decide(group, resource, owner, generation, view)
        if decision.error_code == INVALID_REQUEST:
            return Outcome(INVALID_REQUEST)
        if decision.is_new and view.row is None and self._table.count >= FULL:
            return Outcome(THROTTLING_QUOTA_EXCEEDED)
        key, whole_key = self._keys.claim(group, resource), self._keys.claim(group, WHOLE_GROUP)
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
                await self._changes.wait(asyncio.get_running_loop().time() + CATCH_UP_S)
            row, whole = (_row_of(self._keys, response.kvs) for response in found.responses)
            return _View(row, whole)
        if decision.error_code != NONE:
            return Outcome(decision.error_code)
        if not decision.is_new:
            # The table need not have told of it yet: the answer to the claim that made it may have been lost.
            had = (view.row, view.whole) if resource != WHOLE_GROUP else (self._table.whole(group),)
            for row in had:
                if row is not None and row.owner == owner and not holdings.has_ended:
                    holdings.learn(row.resource, row.generation, row.fence)
            return Outcome(NONE, holdings.counting(resource))
        if holdings.has_ended:
            self.delete(group, resource, found.revision)
            return Outcome(COORDINATOR_NOT_AVAILABLE)
        return Outcome(NONE, holdings.learn(resource, decision.generation, found.revision))

    def _decide(
        self, group: str, resource: str, owner: Owner, generation: int, view: _View
    ) -> tuple[Decision, list[TxnCompare]]:
        """A decision, and what it rests upon."""
        if resource != WHOLE_GROUP:
            compares = [
                _as_seen(self._keys.claim(group, resource), view.row),
                _as_seen(self._keys.claim(group, WHOLE_GROUP), view.whole),
            ]
            return decide(owner, generation, *view.claims), compares
        rows = self._table.rows_of(group)
        whole = rows.get(WHOLE_GROUP)
        claims = [row.claim for resource, row in rows.items() if resource != WHOLE_GROUP]
        decision = decide_whole(owner, claims, whole.claim if whole is not None else None)
        return decision, [prefix_unchanged_since(self._keys.group(group), self._table.revision)]

    def delete(self, group: str, resource: str, fence: int) -> None:
        """Have the claim that was put at `fence` deleted, as often as it takes; with the lease it goes by itself."""
        self._to_delete.append((group, resource, fence, self._member.name))
        if self._deleting < CONCURRENT_TRANSACTIONS:
            self._deleting += 1
            task = asyncio.get_running_loop().create_task(self._delete_some())
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)

    async def _delete_some(self) -> None:
        try:
            while self._to_delete:
                await self._delete(*self._to_delete.popleft())
        finally:
            self._deleting -= 1

    async def _delete(self, group: str, resource: str, fence: int, member: str) -> None:
        key = self._keys.claim(group, resource)
        while member and member == self._member.name:
            try:
                await self._client.txn([mod_revision_is(key, fence)], [delete_op(key)])
                return
            except EtcdError as error:
                log.warning("own_not_freed", key=key, reason=str(error))
                await asyncio.sleep(DELETE_PAUSE_S)

    async def all_deleted(self, timeout_s: float) -> None:
        """Until what was to be deleted is, or the time is over."""
        if self._deletions:
            await asyncio.wait(list(self._deletions), timeout=timeout_s)

    async def close(self) -> None:
        """Delete nothing more."""
        self._to_delete.clear()
        deletions = list(self._deletions)
        for deletion in deletions:
            deletion.cancel()
        await asyncio.gather(*deletions, return_exceptions=True)


def _row_of(keys: OwnKeys, kvs: Sequence[KeyValue]) -> TableRow | None:
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

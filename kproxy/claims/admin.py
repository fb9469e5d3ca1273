"""Show and free claims, for the admin page and for `kproxy own`.

Freeing deletes claims of other clients in etcd. Their proxies then sever the connections that held them. A claim is
deleted only at the revision at which it was read, so a client that claims meanwhile keeps its claim.
"""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from kproxy.claims.keys import OwnKeys
from kproxy.claims.rules import in_force
from kproxy.claims.table import OwnTable, TableRow
from kproxy.config import Address
from kproxy.etcd import EtcdClient, EtcdError, delete_op, get_op, mod_revision_is
from kproxy.etcd.messages import Pages, Snapshot
from kproxy.observe.page import Unanswered
from kproxy.observe.table import (
    MAX_CLAIM_ROWS,
    MAX_CLIENT_TEXT,
    MAX_WRITER_GROUPS,
    ClaimRow,
    ClaimsPage,
    ClaimsQuery,
    FreeOrder,
    FreeOutcome,
    MemberRow,
    merge_claims,
)
from kproxy_codec.own import WHOLE_GROUP

# Shorter than a supervisor's wait for a worker's answer.
FREE_TIMEOUT_S: Final = 1.5
# etcd takes at most 128 operations in a transaction.
_CLAIMS_PER_TXN: Final = 100


class ClaimsAdmin:
    """Serves pages of `table` and frees claims through `client`."""

    def __init__(self, client: EtcdClient, table: OwnTable) -> None:
        self._client = client
        self._table = table

    def page(self, query: ClaimsQuery) -> ClaimsPage:
        """Return a page of claims. Raises ValueError for an invalid query, Unanswered before the table is loaded."""
        if not self._table.synced:
            raise Unanswered("the claims have not been read from etcd yet")
        return claims_page(self._table, query)

    async def free(self, order: FreeOrder) -> FreeOutcome:
        """Free claims. Raises Unanswered if etcd does not answer; some of the claims may be free then."""
        try:
            async with asyncio.timeout(FREE_TIMEOUT_S):
                return await free(self._client, self._table.keys, order)
        except (EtcdError, TimeoutError) as error:
            reason = str(error).rstrip(".") or f"etcd has not answered within {FREE_TIMEOUT_S:g} s"
            raise Unanswered(f"{reason}: it is not known which claims are free") from error


# Pages


def claims_page(table: OwnTable, query: ClaimsQuery) -> ClaimsPage:
    """Return a page of the claims in force. Raises ValueError for an invalid `after` or `limit`."""
    if not 1 <= query.limit <= MAX_CLAIM_ROWS:
        raise ValueError(f"limit must be a number from 1 to {MAX_CLAIM_ROWS}")
    after = _decode_place(query.after) if query.after is not None else None
    addresses = addresses_of(table)
    claims = [claim_row(row, addresses) for row in islice(_rows(table, query.group, after), query.limit + 1)]
    more = len(claims) > query.limit
    claims = claims[: query.limit]
    by_member = [member.writer_groups for member in table.members.values()]
    return ClaimsPage(
        revision=table.revision,
        writer_groups=sorted({f"{topic}={group}" for each in by_member for topic, group in each.items()})[
            :MAX_WRITER_GROUPS
        ],
        differ=any(each != by_member[0] for each in by_member),
        members=[
            MemberRow(name, addresses[name], member.seen, len(member.unsettled))
            for name, member in sorted(table.members.items())
        ],
        claims=claims,
        next=_encode_place(claims[-1]) if more else None,
    )


def whole_page(table: OwnTable, group: str | None = None) -> ClaimsPage:
    """Return all claims in force on one page; those of one group if it is named."""
    pages = [claims_page(table, ClaimsQuery(group))]
    while pages[-1].next is not None:
        pages.append(claims_page(table, ClaimsQuery(group, pages[-1].next)))
    return merge_claims(pages)


async def read_table(client: EtcdClient, keys: OwnKeys) -> OwnTable:
    """Read the table from etcd once. Raises EtcdError."""
    table = OwnTable(keys)
    table.on_snapshot(await client.get_prefix(keys.all))
    return table


def claim_row(row: TableRow, addresses: Mapping[str, str]) -> ClaimRow:
    """Return a claim with the address of its claimant's proxy; `addresses` has each member's, by name."""
    return ClaimRow(
        group=row.group,
        resource=row.resource,
        generation=row.generation,
        fence=row.fence,
        proxy=row.owner.proxy,
        address=addresses.get(row.owner.proxy, ""),
        connection=row.owner.connection,
        client=row.client[:MAX_CLIENT_TEXT],
        since=row.since,
    )


def addresses_of(table: OwnTable) -> dict[str, str]:
    """Return the advertised address of each member, by its name."""
    return {name: str(Address(member.host, member.port)) for name, member in table.members.items()}


def _rows(table: OwnTable, group: str | None, after: tuple[str, str] | None) -> Iterator[TableRow]:
    """Yield the claims in force that follow `after`, in order. Bisection skips the earlier ones."""
    groups = sorted(table.groups()) if group is None else [group]
    first = bisect_left(groups, after[0]) if after is not None else 0
    for each in islice(groups, first, None):
        rows = table.rows_of(each)
        resources = sorted(rows)
        start = bisect_right(resources, after[1]) if after is not None and each == after[0] else 0
        whole = table.whole(each)
        for resource in islice(resources, start, None):
            claim = rows[resource].claim
            rival = whole.claim if whole is not None and resource != WHOLE_GROUP else None
            if in_force(claim, rival) is not None:
                yield rows[resource]


def _encode_place(claim: ClaimRow) -> str:
    """Encode a place for a URL. For all names the result is shorter than the 8 KiB that HTTP servers accept."""
    return urlsafe_b64encode(msgspec.msgpack.encode(claim.place)).decode()


def _decode_place(after: str) -> tuple[str, str]:
    try:
        return msgspec.msgpack.decode(urlsafe_b64decode(after), type=tuple[str, str])
    except ValueError as error:
        raise ValueError("after must be the value of next on the previous page") from error


# Freeing


async def free(client: EtcdClient, keys: OwnKeys, order: FreeOrder) -> FreeOutcome:
    """Delete the claims that `order` names, at most MAX_CLAIM_ROWS of them. Raises EtcdError."""
    table = await _read_group(client, keys, order.group)
    rows_by_resource = table.rows_of(order.group)
    # The whole group's claim comes first: most of the others end with its connection.
    wanted = sorted(rows_by_resource) if order.resources is None else list(dict.fromkeys(order.resources))
    rows = [rows_by_resource[resource] for resource in wanted if resource in rows_by_resource]
    changed: set[str] = set()
    for first in range(0, min(len(rows), MAX_CLAIM_ROWS), _CLAIMS_PER_TXN):
        changed |= await _delete(client, keys, rows[first : min(first + _CLAIMS_PER_TXN, MAX_CLAIM_ROWS)])
    taken = rows[:MAX_CLAIM_ROWS]
    whole, addresses = rows_by_resource.get(WHOLE_GROUP), addresses_of(table)
    return FreeOutcome(
        freed=[claim_row(row, addresses) for row in taken if row.resource not in changed],
        missing=[resource for resource in wanted if resource not in rows_by_resource],
        changed=[row.resource for row in taken if row.resource in changed],
        whole=None if whole is None else claim_row(whole, addresses),
        more=len(rows) > len(taken),
    )


async def _read_group(client: EtcdClient, keys: OwnKeys, group: str) -> OwnTable:
    kvs = Pages()
    members = await client.get_prefix(keys.members, into=kvs)
    await client.get_prefix(keys.group(group), revision=members.revision, into=kvs)
    table = OwnTable(keys)
    table.on_snapshot(Snapshot(members.revision, members.cluster_id, kvs))
    return table


async def _delete(client: EtcdClient, keys: OwnKeys, rows: Sequence[TableRow]) -> set[str]:
    """Delete all rows in one transaction, or one by one if one has changed. Return resources with a new claimant."""
    named = [(row, keys.claim(row.group, row.resource)) for row in rows]
    result = await client.txn(
        [mod_revision_is(key, row.fence) for row, key in named],
        success=[delete_op(key) for _, key in named],
        failure=[get_op(key) for _, key in named],
    )
    if result.succeeded:
        return set()
    if len(rows) > 1:
        return set[str]().union(*[await _delete(client, keys, [row]) for row in rows])
    # A claim that is gone already, perhaps with its connection, counts as freed.
    return {rows[0].resource} if any(result.found) else set()

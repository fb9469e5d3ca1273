"""The table of claims as others see it: pages for the admin page and for `kproxy own`."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from codec.own import WHOLE_GROUP
from kproxy.config import Address
from kproxy.fencing.keys import OwnKeys
from kproxy.fencing.rules import in_force
from kproxy.fencing.table import Member, OwnTable, TableRow
from kproxy.observe.claims import (
    MAX_CLAIM_ROWS,
    MAX_CLIENT_TEXT,
    MAX_WRITER_GROUPS,
    ClaimRow,
    ClaimsPage,
    ClaimsQuery,
    MemberRow,
    merge_claims,
)
from kproxy.ownership.etcd import EtcdClient


def claims_page(table: OwnTable, query: ClaimsQuery) -> ClaimsPage:
    """A page of the claims in force. ValueError for an `after` or `limit` that cannot be."""
    if not 1 <= query.limit <= MAX_CLAIM_ROWS:
        raise ValueError(f"limit is a number from 1 to {MAX_CLAIM_ROWS}")
    after = _place(query.after) if query.after is not None else None
    rows = (row for row in _rows(table, query.group) if after is None or (row.group, row.resource) > after)
    claims = [claim_row(row, table.members) for row in islice(rows, query.limit + 1)]
    more = len(claims) > query.limit
    claims = claims[: query.limit]
    told = [member.writer_groups for member in table.members.values()]
    return ClaimsPage(
        revision=table.revision,
        writer_groups=sorted({f"{topic}={group}" for each in told for topic, group in each.items()})[
            :MAX_WRITER_GROUPS
        ],
        differ=any(each != told[0] for each in told),
        members=[
            MemberRow(name, address_of(member), member.seen, len(member.unsettled))
            for name, member in sorted(table.members.items())
        ],
        claims=claims,
        next=_after(claims[-1]) if more else None,
    )


def whole_page(table: OwnTable, group: str | None = None) -> ClaimsPage:
    """All claims in force, of one group if named."""
    pages = [claims_page(table, ClaimsQuery(group))]
    while pages[-1].next is not None:
        pages.append(claims_page(table, ClaimsQuery(group, pages[-1].next)))
    return merge_claims(pages)


async def read_table(client: EtcdClient, keys: OwnKeys) -> OwnTable:
    """The table as it stands in etcd, read once. Raises EtcdError."""
    table = OwnTable(keys)
    table.on_snapshot(await client.get_prefix(keys.all))
    return table


def claim_row(row: TableRow, members: Mapping[str, Member]) -> ClaimRow:
    """A claim with its owner's address."""
    member = members.get(row.owner.proxy)
    return ClaimRow(
        group=row.group,
        resource=row.resource,
        generation=row.generation,
        fence=row.fence,
        proxy=row.owner.proxy,
        address=address_of(member) if member is not None else "",
        connection=row.owner.connection,
        client=row.client[:MAX_CLIENT_TEXT],
        since=row.since,
    )


def address_of(member: Member) -> str:
    return str(Address(member.host, member.port))


def _rows(table: OwnTable, group: str | None) -> Iterator[TableRow]:
    rows = table.claims() if group is None else iter([row for _, row in sorted(table.rows_of(group).items())])
    for row in rows:
        whole = table.whole(row.group) if row.resource != WHOLE_GROUP else None
        if in_force(row.claim, whole.claim if whole is not None else None) is not None:
            yield row


def _after(claim: ClaimRow) -> str:
    """A place as one word, which in an address stays below the 8 KiB that HTTP servers take, whatever the names."""
    return urlsafe_b64encode(msgspec.msgpack.encode(claim.place)).decode()


def _place(after: str) -> tuple[str, str]:
    try:
        return msgspec.msgpack.decode(urlsafe_b64decode(after), type=tuple[str, str])
    except ValueError as error:
        raise ValueError("after is the next of the page before") from error

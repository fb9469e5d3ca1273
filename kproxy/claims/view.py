"""The table of claims as others see it: pages for the admin page and for `kproxy own`."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from kproxy.claims.keys import OwnKeys
from kproxy.claims.rules import in_force
from kproxy.claims.table import Member, OwnTable, TableRow
from kproxy.config import Address
from kproxy.etcd import EtcdClient
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
from kproxy_codec.own import WHOLE_GROUP


def claims_page(table: OwnTable, query: ClaimsQuery) -> ClaimsPage:
    """A page of the claims in force. ValueError for an `after` or `limit` that cannot be."""
    if not 1 <= query.limit <= MAX_CLAIM_ROWS:
        raise ValueError(f"limit is a number from 1 to {MAX_CLAIM_ROWS}")
    after = _place(query.after) if query.after is not None else None
    addresses = addresses_of(table)
    claims = [claim_row(row, addresses) for row in islice(_rows(table, query.group, after), query.limit + 1)]
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
            MemberRow(name, addresses[name], member.seen, len(member.unsettled))
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


def claim_row(row: TableRow, addresses: Mapping[str, str]) -> ClaimRow:
    """A claim with its owner's address; `addresses` are those of members by name."""
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
    return {name: address_of(member) for name, member in table.members.items()}


def address_of(member: Member) -> str:
    return str(Address(member.host, member.port))


def _rows(table: OwnTable, group: str | None, after: tuple[str, str] | None) -> Iterator[TableRow]:
    """Those in force behind `after`, in order; what comes before it is not looked at one by one."""
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


def _after(claim: ClaimRow) -> str:
    """A place as one word, which in an address stays below the 8 KiB that HTTP servers take, whatever the names."""
    return urlsafe_b64encode(msgspec.msgpack.encode(claim.place)).decode()


def _place(after: str) -> tuple[str, str]:
    try:
        return msgspec.msgpack.decode(urlsafe_b64decode(after), type=tuple[str, str])
    except ValueError as error:
        raise ValueError("after is the next of the page before") from error

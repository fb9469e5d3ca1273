"""Freeing what others own, from outside: their claims are deleted in etcd, upon which their proxies sever them.

Only what was seen is deleted, at the revision at which it was seen: whoever claims meanwhile keeps what is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

from kproxy.claims.keys import OwnKeys
from kproxy.claims.table import OwnTable, TableRow
from kproxy.claims.view import addresses_of, claim_row
from kproxy.etcd import EtcdClient, delete_op, get_op, mod_revision_is
from kproxy.etcd.messages import Pages, Snapshot
from kproxy.observe.claims import MAX_CLAIM_ROWS, FreeOrder, FreeOutcome
from kproxy_codec.own import WHOLE_GROUP

# etcd takes at most 128 operations in a transaction.
_CLAIMS_PER_TXN = 100


async def free(client: EtcdClient, keys: OwnKeys, order: FreeOrder) -> FreeOutcome:
    """Delete the claims that `order` names, of all of a group MAX_CLAIM_ROWS at most. Raises EtcdError."""
    table = await _read_group(client, keys, order.group)
    there = table.rows_of(order.group)
    # The whole group's claim comes first: with it most of the others go by themselves.
    wanted = sorted(there) if order.resources is None else list(dict.fromkeys(order.resources))
    rows = [there[resource] for resource in wanted if resource in there]
    changed: set[str] = set()
    for first in range(0, min(len(rows), MAX_CLAIM_ROWS), _CLAIMS_PER_TXN):
        changed |= await _delete(client, keys, rows[first : min(first + _CLAIMS_PER_TXN, MAX_CLAIM_ROWS)])
    taken = rows[:MAX_CLAIM_ROWS]
    whole, addresses = there.get(WHOLE_GROUP), addresses_of(table)
    return FreeOutcome(
        freed=[claim_row(row, addresses) for row in taken if row.resource not in changed],
        missing=[resource for resource in wanted if resource not in there],
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
    """All of them or, where one has changed, each by itself; the resources that another has by now."""
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
    # Gone by itself, perhaps with another claim of its connection, it is as free as was asked for.
    return {rows[0].resource} if result.responses[0].kvs else set()

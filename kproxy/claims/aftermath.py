"""Whether writers were at work when the last of all proxies died: then nobody remembers what they had under way.

    {prefix}/kproxy/own-at-work   a mark, on no lease: it outlives those who made it

It is of interest before brokers without fences alone (kproxy.claims.settlement).

Invariants
1. The mark stands before the first claim is granted that no broker fences, and while the process that granted it lives.
2. Only who ends in order takes it away, as the last one and with nothing under way.
3. Who finds it as the first one waits for everything, for as long as for a process that it saw die.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from kproxy.claims.settlement import Settlement
from kproxy.claims.table import OwnTable
from kproxy.etcd import EtcdClient, EtcdError, delete_op, mod_revision_is, prefix_unchanged_since

RETRY_PAUSE_S: Final = 0.5
# A process that ends does not wait longer for etcd: then the next one waits for nothing, a minute long.
UNMARK_TIMEOUT_S: Final = 2.0

log = structlog.get_logger(__name__)


class Aftermath:
    """For one process; `table` is to be loaded first."""

    def __init__(self, client: EtcdClient, table: OwnTable, settlement: Settlement) -> None:
        self._client = client
        self._table = table
        self._settlement = settlement
        self._key = table.keys.at_work
        # As which member this process has made the mark.
        self._marked_as = ""

    async def look(self) -> None:
        """Before this process is a member."""
        while self._settlement.topics:
            try:
                if await self._client.get(self._key) is not None and not self._table.members:
                    log.warning("own_left_behind", reason="all proxies ended at once: what they sent is waited for")
                    self._settlement.note_all_gone()
                return
            except EtcdError as error:
                log.warning("own_not_looked_back", reason=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)

    async def mark(self, member: str) -> None:
        """This process, which is `member`, is about to grant a claim that no broker fences. Raises EtcdError."""
        if self._marked_as != member:
            await self._client.put(self._key, b"")
            self._marked_as = member

    async def unmark(self) -> None:
        """This process has ended in order, and is no member any more."""
        if not self._marked_as or self._settlement.unsettled():
            return
        members = self._table.keys.members
        try:
            async with asyncio.timeout(UNMARK_TIMEOUT_S):
                mark, others = await self._client.get(self._key), await self._client.get_prefix(members)
                if mark is None or others.kvs:
                    return
                unchanged = [
                    mod_revision_is(self._key, mark.mod_revision),
                    prefix_unchanged_since(members, others.revision),
                ]
                await self._client.txn(unchanged, [delete_op(self._key)])
        except (EtcdError, TimeoutError) as error:
            log.warning("own_mark_not_removed", reason=str(error) or "no answer in time")

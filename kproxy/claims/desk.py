"""What a proxy's admin page says of claims, and does about them."""

from __future__ import annotations

import asyncio

from kproxy.claims.freeing import free
from kproxy.claims.table import OwnTable
from kproxy.claims.view import claims_page
from kproxy.etcd import EtcdClient, EtcdError
from kproxy.observe.admin import Unanswered
from kproxy.observe.claims import ClaimsPage, ClaimsQuery, FreeOrder, FreeOutcome

# Below the time that a supervisor waits for an answer.
FREE_TIMEOUT_S = 1.5


class ClaimDesk:
    """Reads `table` and frees by `client`."""

    def __init__(self, client: EtcdClient, table: OwnTable) -> None:
        self._client = client
        self._table = table

    def page(self, query: ClaimsQuery) -> ClaimsPage:
        """ValueError for a query that will not do; Unanswered."""
        if not self._table.synced:
            raise Unanswered("the claims have not been read from etcd yet")
        return claims_page(self._table, query)

    async def free(self, order: FreeOrder) -> FreeOutcome:
        """Raises Unanswered where etcd does not answer; then some of it may have been done."""
        try:
            async with asyncio.timeout(FREE_TIMEOUT_S):
                return await free(self._client, self._table.keys, order)
        except (EtcdError, TimeoutError) as error:
            reason = str(error).rstrip(".") or f"etcd has not answered within {FREE_TIMEOUT_S:g} s"
            raise Unanswered(f"{reason}: what is free by now is not known") from error

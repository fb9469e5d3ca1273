"""The proxy's admin page, which shows the table, claims and replicas, and frees claims.

| page | answer | | --- | --- | | `/table` | JSON of the routing table: `?topic=`, `?after=`, `?limit=`; follow `next`
for more; `?worker=` | | `/own` | JSON of the claims of the Own API: `?group=`, `?after=`, `?limit=`; 501 if it is not
offered | | `/own/free` | POST `{"group": "g", "resources": ["t/0"]}`, null: all of the group; their claimants are
severed | | `/replication` | JSON of reference brokers' replicas: `?topic=`, `?after=`, `?limit=`; 501 if there is no
etcd |

`observe.http_page` has the pages of every process. In `/readyz` a stale table is degraded, not unready.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
from aiohttp import web

from kproxy.config import ProxyConfig
from kproxy.etcd import EtcdError
from kproxy.observe.http_page import HttpPage, VitalPages
from kproxy.observe.page_guard import PageGuard
from kproxy.observe.table import (
    MAX_CLAIM_ROWS,
    MAX_ORDER_BYTES,
    MAX_PAGE_ROWS,
    ClaimsQuery,
    FreeOrder,
    NotOffered,
    TableQuery,
    replication_page,
)
from kproxy.ownership.replication import ReplicationReader

TableLike = Callable[[TableQuery], Awaitable[bytes]]


class Unanswered(Exception):
    """There is no answer at the moment; the text says why."""


class Pages(VitalPages, Protocol):
    """The content of the pages, of one process or of several together."""

    async def table(self, query: TableQuery, worker: int | None) -> bytes:
        """Return JSON of a TablePage, of `worker` if named.

        Raises ValueError for an invalid query, and Unanswered.
        """
        ...

    async def claims(self, query: ClaimsQuery) -> bytes:
        """Return JSON of a ClaimsPage.

        Raises ValueError for an invalid query, Unanswered, NotOffered.
        """
        ...

    async def free(self, order: FreeOrder) -> bytes:
        """Return JSON of a FreeOutcome.

        Raises ValueError, Unanswered, NotOffered as `claims`.
        """
        ...


class AdminPage(HttpPage):
    """Serves `pages`; `replication` makes JSON of a ReplicationPage. With `guard` None everybody is served."""

    def __init__(self, pages: Pages, replication: TableLike, guard: PageGuard | None = None) -> None:
        self._pages = pages
        super().__init__(
            pages,
            [
                web.get("/table", self._get_table),
                replication_route(replication),
                web.get("/own", self._get_claims),
                web.post("/own/free", self._free),
            ],
            guard,
        )

    async def _get_table(self, request: web.Request) -> web.Response:
        asked = request.query

        async def page() -> bytes:
            worker = int(asked["worker"]) if "worker" in asked else None
            return await self._pages.table(_table_query(request), worker)

        return await _json(page())

    async def _get_claims(self, request: web.Request) -> web.Response:
        asked = request.query

        async def page() -> bytes:
            query = ClaimsQuery(asked.get("group"), asked.get("after"), int(asked.get("limit", MAX_CLAIM_ROWS)))
            return await self._pages.claims(query)

        return await _json(page())

    async def _free(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            # A foreign web page can make a browser send a form, but not JSON.
            return web.Response(status=415, text="send application/json\n")

        async def outcome() -> bytes:
            body = await request.read()
            if len(body) > MAX_ORDER_BYTES:
                raise ValueError(f"an order of {len(body)} bytes; at most {MAX_ORDER_BYTES} are allowed: name fewer")
            return await self._pages.free(msgspec.json.decode(body, type=FreeOrder))

        return await _json(outcome())


def replication_route(replication: TableLike) -> web.RouteDef:
    """Return the page `/replication`; `replication` makes JSON of a ReplicationPage."""

    async def get(request: web.Request) -> web.Response:
        async def page() -> bytes:
            return await replication(_table_query(request))

        return await _json(page())

    return web.get("/replication", get)


class ReplicaPages:
    """Make the page `/replication` from etcd on request, for a proxy with or without workers."""

    def __init__(self, config: ProxyConfig) -> None:
        self._reader = (
            ReplicationReader(config.etcd, config.etcd_options, config.prefix, clock=time.monotonic)
            if config.etcd
            else None
        )

    async def page(self, query: TableQuery) -> bytes:
        """Return JSON of a ReplicationPage. Raises ValueError for an invalid query, Unanswered, NotOffered."""
        if self._reader is None:
            raise NotOffered("replicas are not known here: reference brokers keep theirs in an etcd (--etcd URL)")
        try:
            return msgspec.json.encode(replication_page(await self._reader.read(), query))
        except EtcdError as error:
            raise Unanswered(str(error)) from error

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()


def _table_query(request: web.Request) -> TableQuery:
    asked = request.query
    return TableQuery(asked.get("topic"), asked.get("after"), int(asked.get("limit", MAX_PAGE_ROWS)))


async def _json(page: Awaitable[bytes]) -> web.Response:
    try:
        return web.Response(body=await page, content_type="application/json")
    except ValueError as error:
        return web.Response(status=400, text=f"{error}\n")
    except NotOffered as error:
        return web.Response(status=501, text=f"{error}\n")
    except Unanswered as error:
        return web.Response(status=503, text=f"{error}\n")

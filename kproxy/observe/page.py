"""The proxy's admin page, which shows the table, partitions, clients, claims and replicas, and frees claims.

| page | answer |
| --- | --- |
| `/table` | JSON of the routing table: `?topic=`, `?after=`, `?limit=`; follow `next` for more; `?worker=` |
| `/partitions` | JSON of single partitions: `?search=`, `?owner=` (-1: without one), `?after=`, `?limit=` |
| `/topics` | JSON of the first topics: `?order=rate`, `moves`, `errors`, `name`, `?search=`, `?skip=`, `?limit=` |
| `/clients` | JSON of the first clients: `?order=rate`, `oldest`, `slow`, `?search=`, `?skip=`, `?limit=` |
| `/own` | JSON of the claims of the Own API: `?group=`, `?after=`, `?limit=`; 501 if it is not offered |
| `/own/free` | POST `{"group": "g", "resources": ["t/0"]}`, null: all of the group; their claimants are severed |
| `/replication` | JSON of reference brokers' replicas: `?topic=`, `?after=`, `?limit=`; 501 if there is no etcd |

`observe.http_page` has the pages of every process. In `/readyz` a stale table is degraded, not unready.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec
from aiohttp import web

from kproxy.config import ProxyConfig
from kproxy.etcd import EtcdError
from kproxy.observe.http_page import HttpPage, VitalPages
from kproxy.observe.overview import ClientsPage, Overview, PartitionsPage, RowsQuery, TopicsPage
from kproxy.observe.page_guard import Handler, PageGuard
from kproxy.observe.table import (
    MAX_CLAIM_ROWS,
    MAX_ORDER_BYTES,
    MAX_PAGE_ROWS,
    ClaimsQuery,
    FreeOrder,
    NotOffered,
    ReplicaRow,
    TableQuery,
    replication_page,
)
from kproxy.ownership.replication import ReplicationReader
from kproxy.runtime.tasks import in_portions

# Replicas that the live page shows are as old as this, in seconds, or as old as COSTS times the time to read them.
REPLICAS_S = 5.0
COSTS = 20.0
Place = tuple[str, int]


class Unanswered(Exception):
    """There is no answer at the moment; the text says why."""


class Pages(VitalPages, Protocol):
    """The content of the pages, of one process or of several together."""

    async def table(self, query: TableQuery, worker: int | None) -> bytes:
        """Return JSON of a TablePage, of `worker` if named.

        Raises ValueError for an invalid query, and Unanswered.
        """
        ...

    async def partitions(self, search: str, owner: int | None, after: str | None, limit: int) -> PartitionsPage:
        """Return a page of partitions. Raises ValueError for an invalid query."""
        ...

    async def topics(self, query: RowsQuery) -> TopicsPage:
        """Return a page of topics. Raises ValueError for an invalid query."""
        ...

    async def clients(self, query: RowsQuery) -> ClientsPage:
        """Return a page of clients. Raises ValueError for an invalid query."""
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
    """Serves `pages` and `replicas`. With `guard` None everybody is served."""

    def __init__(self, pages: Pages, replicas: ReplicaPages, guard: PageGuard | None = None) -> None:
        self._pages = pages
        self._replicas = replicas
        super().__init__(
            pages,
            [
                web.get("/table", _json(self._table)),
                web.get("/partitions", _json(self._partitions)),
                web.get("/topics", _json(lambda request: _rows(request, pages.topics))),
                web.get("/clients", _json(lambda request: _rows(request, pages.clients))),
                replication_route(replicas),
                web.get("/own", _json(self._claims)),
                web.post("/own/free", _json(self._free)),
            ],
            guard,
        )

    async def _table(self, request: web.Request) -> bytes:
        worker = int(request.query["worker"]) if "worker" in request.query else None
        return await self._pages.table(_table_query(request), worker)

    async def overview(self) -> Overview:
        return await self._replicas.complete(await super().overview())

    async def _partitions(self, request: web.Request) -> bytes:
        asked = request.query
        owner = int(asked["owner"]) if "owner" in asked else None
        search, after, limit = asked.get("search", ""), asked.get("after"), int(asked.get("limit", 100))
        found = await self._pages.partitions(search, owner, after, limit)
        return msgspec.json.encode(await self._replicas.complete_partitions(found))

    async def _claims(self, request: web.Request) -> bytes:
        asked = request.query
        query = ClaimsQuery(asked.get("group"), asked.get("after"), int(asked.get("limit", MAX_CLAIM_ROWS)))
        return await self._pages.claims(query)

    async def _free(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            # A foreign web page can make a browser send a form, but not JSON.
            raise web.HTTPUnsupportedMediaType(text="send application/json\n")
        body = await request.read()
        if len(body) > MAX_ORDER_BYTES:
            raise ValueError(f"an order of {len(body)} bytes; at most {MAX_ORDER_BYTES} are allowed: name fewer")
        return await self._pages.free(msgspec.json.decode(body, type=FreeOrder))


def replication_route(replicas: ReplicaPages) -> web.RouteDef:
    """Return the page `/replication`."""
    return web.get("/replication", _json(lambda request: replicas.page(_table_query(request))))


class ReplicaPages:
    """Make the page `/replication` from etcd on request, for a proxy with or without workers.

    What the live page shows of replicas is read seldom: there may be many.
    """

    def __init__(self, config: ProxyConfig) -> None:
        self._rows: Mapping[Place, ReplicaRow] = {}
        self._lacking: Counter[int] = Counter()
        self._due = 0.0
        self._reading = asyncio.Lock()
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

    async def complete(self, overview: Overview) -> Overview:
        """Add to each broker how many of its replicas are not in sync, where that is known."""
        await self._look()
        if not self._rows:
            return overview
        brokers = [msgspec.structs.replace(each, lacking=self._lacking[each.id]) for each in overview.brokers]
        return msgspec.structs.replace(overview, brokers=brokers)

    async def complete_partitions(self, page: PartitionsPage) -> PartitionsPage:
        """Add the replicas and the ISR to each partition, where they are known."""
        await self._look()
        lines = []
        for line in page.partitions:
            row = self._rows.get((line.topic, line.partition))
            if row is not None:
                line = msgspec.structs.replace(
                    line, isr=row.isr, replicas=row.replicas, min_insync_replicas=row.min_insync_replicas
                )
            lines.append(line)
        return PartitionsPage(lines, page.next)

    async def _look(self) -> None:
        """Read the replicas again if it is time to."""
        began = time.monotonic()
        if self._reader is None or began < self._due or self._reading.locked():
            return
        async with self._reading:
            try:
                known = (await self._reader.read()).rows
            except EtcdError:
                # The last known ones are shown; the table's age tells that etcd is away.
                known = list(self._rows.values())
            rows, lacking = {}, Counter[int]()
            async for row in in_portions(known, time.monotonic):
                rows[row.topic, row.partition] = row
                lacking.update(row.missing)
            self._rows, self._lacking = rows, lacking
            now = time.monotonic()
            self._due = now + max(REPLICAS_S, COSTS * (now - began))

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()


def rows_query(request: web.Request) -> RowsQuery:
    """Return the query of a request for `/topics` or `/clients`. Raises ValueError."""
    try:
        return msgspec.convert(dict(request.query), type=RowsQuery, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _table_query(request: web.Request) -> TableQuery:
    asked = request.query
    return TableQuery(asked.get("topic"), asked.get("after"), int(asked.get("limit", MAX_PAGE_ROWS)))


async def _rows(request: web.Request, ask: Callable[[RowsQuery], Awaitable[msgspec.Struct]]) -> bytes:
    return msgspec.json.encode(await ask(rows_query(request)))


def _json(make: Callable[[web.Request], Awaitable[bytes]]) -> Handler:
    """Return a handler that answers with the JSON that `make` returns, or with its error."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return web.Response(body=await make(request), content_type="application/json")
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        except NotOffered as error:
            return web.Response(status=501, text=f"{error}\n")
        except Unanswered as error:
            return web.Response(status=503, text=f"{error}\n")

    return answer

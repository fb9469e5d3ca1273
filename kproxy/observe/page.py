"""Define the pages of a proxy besides those of every serving process (kproxy.observe.http_page).

| page | answer |
| --- | --- |
| `/table` | JSON of the routing table: `?topic=`, `?after=`, `?limit=`; follow `next` for more; `?worker=` |
| `/partitions` | JSON of single partitions: `?search=`, `?owner=` (-1: without one), `?after=`, `?limit=` |
| `/topics` | JSON of the first topics: `?order=rate`, `moves`, `errors`, `name`, `?search=`, `?skip=`, `?limit=` |
| `/clients` | JSON of the first clients: `?order=rate`, `oldest`, `slow`, `?search=`, `?skip=`, `?limit=` |
| `/own` | JSON of the claims of the Own API: `?group=`, `?after=`, `?limit=`; 501 if it is not offered |
| `/own/free` | POST `{"group": "g", "resources": ["t/0"]}`, null: all of the group; their claimants are severed |
| `/replication` | JSON of reference brokers' replicas: `?topic=`, `?after=`, `?limit=`; 501 if there is no etcd |

A proxy that serves alone answers them in kproxy.proxy.process_host, one with workers in kproxy.workers.pages. In
`/readyz` a stale table is degraded, not unready.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from kproxy.config import ProxyConfig
from kproxy.etcd import EtcdError
from kproxy.observe.overview import Overview, PartitionsPage, RowsQuery
from kproxy.observe.page_guard import Handler
from kproxy.observe.table import MAX_PAGE_ROWS, NotOffered, ReplicaRow, TableQuery, replication_page
from kproxy.ownership.replication import ReplicationReader
from kproxy.runtime.tasks import in_portions

# The live page's replicas are read again after this time, in seconds, or after COSTS times the time to read them.
REPLICAS_S = 5.0
COSTS = 20.0
Place = tuple[str, int]


class Unanswered(Exception):
    """There is no answer at the moment; the message states the reason."""


def replication_route(replicas: ReplicaPages) -> web.RouteDef:
    """Return the page `/replication`."""
    return web.get("/replication", json_of(lambda request: replicas.page(table_query(request))))


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
            raise NotOffered("this proxy has no etcd, in which reference brokers keep their replicas: give --etcd URL")
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
                # The last known ones are shown; the table's age shows that etcd does not answer.
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


def table_query(request: web.Request) -> TableQuery:
    """Return the query of a request for `/table` or `/replication`. Raises ValueError."""
    asked = request.query
    return TableQuery(asked.get("topic"), asked.get("after"), int(asked.get("limit", MAX_PAGE_ROWS)))


def json_of(make: Callable[[web.Request], Awaitable[bytes]]) -> Handler:
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

"""The admin page: what this process knows and whether it is well, over HTTP; and the freeing of claims.

| page | answer |
| --- | --- |
| `/table` | JSON of the routing table: `?topic=`, `?after=`, `?limit=`; follow `next` for more; `?worker=` |
| `/own` | JSON of who owns what by the Own API: `?group=`, `?after=`, `?limit=`; 501 where it is not offered |
| `/own/free` | POST `{"group": "g", "resources": ["t/0"]}`, null: all of the group's; their owners are severed |
| `/metrics` | for Prometheus (see `observe.metrics`) |
| `/livez` | 200 while the process turns |
| `/readyz` | 200 while it can serve clients, 503 with the reason otherwise; a stale table is degraded, not unready |

States: made --start()--> serving --stop()--> stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

import msgspec
from aiohttp import web

from kproxy.errors import StartupError
from kproxy.observe.claims import MAX_CLAIM_ROWS, MAX_ORDER_BYTES, ClaimsQuery, FreeOrder, NotOffered
from kproxy.observe.table import MAX_PAGE_ROWS, TableQuery

KEEPALIVE_S = 15.0
SHUTDOWN_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether clients should be sent here; `text` is `ready`, how it is degraded, or why not."""

    ready: bool
    text: str


class Unanswered(Exception):
    """Nobody can say at the moment; the text says why."""


class Pages(Protocol):
    """What the pages say; of one process, or of several as of one."""

    async def table(self, query: TableQuery, worker: int | None) -> bytes:
        """JSON of a TablePage, of `worker` where one is named.

        ValueError for a query that will not do, Unanswered.
        """
        ...

    async def claims(self, query: ClaimsQuery) -> bytes:
        """JSON of a ClaimsPage. ValueError for a query that will not do, Unanswered, NotOffered."""
        ...

    async def free(self, order: FreeOrder) -> bytes:
        """JSON of a FreeOutcome. ValueError, Unanswered, NotOffered as above."""
        ...

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, in the format that an HTTP Accept header asks for."""
        ...

    async def readiness(self) -> Readiness:
        """Whether clients can be served."""
        ...

    async def liveness(self) -> Readiness:
        """Whether anybody turns; where not, a restart is what helps."""
        ...


class AdminPage:
    """Serves `pages`."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        application = web.Application()
        application.add_routes(
            [
                web.get("/", self._index),
                web.get("/table", self._get_table),
                web.get("/own", self._get_claims),
                web.post("/own/free", self._free),
                web.get("/metrics", self._get_metrics),
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
            ]
        )
        self._runner = web.AppRunner(
            application, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )

    async def start(self, host: str, port: int) -> int:
        """Listen; the real port. StartupError, with nothing left open, where that cannot be."""
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, host, port)
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise StartupError(
                f"the admin page cannot listen on {host}:{port} ({error.strerror or error}): "
                f"choose another --admin, or stop what uses this one."
            ) from error
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Close the listener and its connections."""
        await self._runner.cleanup()

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(text="kproxy\n\n/table\n/own\n/metrics\n/livez\n/readyz\n")

    async def _livez(self, _: web.Request) -> web.Response:
        return _said(await self._pages.liveness())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _said(await self._pages.readiness())

    async def _get_metrics(self, request: web.Request) -> web.Response:
        page, content_type = await self._pages.metrics(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def _get_table(self, request: web.Request) -> web.Response:
        asked = request.query

        async def page() -> bytes:
            worker = int(asked["worker"]) if "worker" in asked else None
            query = TableQuery(asked.get("topic"), asked.get("after"), int(asked.get("limit", MAX_PAGE_ROWS)))
            return await self._pages.table(query, worker)

        return await _json(page())

    async def _get_claims(self, request: web.Request) -> web.Response:
        asked = request.query

        async def page() -> bytes:
            query = ClaimsQuery(asked.get("group"), asked.get("after"), int(asked.get("limit", MAX_CLAIM_ROWS)))
            return await self._pages.claims(query)

        return await _json(page())

    async def _free(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            # What any web page may have a browser send here is a form: this is none.
            return web.Response(status=415, text="send application/json\n")

        async def outcome() -> bytes:
            body = await request.read()
            if len(body) > MAX_ORDER_BYTES:
                raise ValueError(f"an order of {len(body)} bytes; at most {MAX_ORDER_BYTES} are taken: name fewer")
            return await self._pages.free(msgspec.json.decode(body, type=FreeOrder))

        return await _json(outcome())


async def _json(page: Awaitable[bytes]) -> web.Response:
    try:
        return web.Response(body=await page, content_type="application/json")
    except ValueError as error:
        return web.Response(status=400, text=f"{error}\n")
    except NotOffered as error:
        return web.Response(status=501, text=f"{error}\n")
    except Unanswered as error:
        return web.Response(status=503, text=f"{error}\n")


def _said(readiness: Readiness) -> web.Response:
    return web.Response(status=200 if readiness.ready else 503, text=f"{readiness.text}\n")

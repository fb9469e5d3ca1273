"""The admin page: what this process knows and whether it is well, over HTTP, for reading only.

| page | answer |
| --- | --- |
| `/table` | JSON of the routing table, `?topic=`, `?after=`, `?limit=` (see `observe.table`); follow `next` for more |
| `/metrics` | for Prometheus (see `observe.metrics`) |
| `/livez` | 200 while the process turns |
| `/readyz` | 200 while it can serve clients, 503 with the reason otherwise; a stale table is degraded, not unready |

States: made --start()--> serving --stop()--> stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from kproxy.errors import StartupError
from kproxy.observe.metrics import Metrics
from kproxy.observe.table import MAX_PAGE_ROWS, TableView, table_page

KEEPALIVE_S = 15.0
SHUTDOWN_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether clients should be sent here; `text` is `ready`, how it is degraded, or why not."""

    ready: bool
    text: str


class AdminPage:
    """`table` gives the view of now, `readiness` finds out whether clients can be served."""

    def __init__(
        self, *, table: Callable[[], TableView], readiness: Callable[[], Awaitable[Readiness]], metrics: Metrics
    ) -> None:
        self._table = table
        self._readiness = readiness
        self._metrics = metrics
        application = web.Application()
        application.add_routes(
            [
                web.get("/", self._index),
                web.get("/table", self._get_table),
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
        return web.Response(text="kproxy\n\n/table\n/metrics\n/livez\n/readyz\n")

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        readiness = await self._readiness()
        return web.Response(status=200 if readiness.ready else 503, text=f"{readiness.text}\n")

    async def _get_metrics(self, request: web.Request) -> web.Response:
        page, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})

    async def _get_table(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            page = table_page(
                self._table(),
                topic=query.get("topic"),
                after=query.get("after"),
                limit=int(query.get("limit", MAX_PAGE_ROWS)),
            )
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")

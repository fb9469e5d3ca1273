"""The admin page: what this process knows and whether it is well, over HTTP, for reading only.

| page | answer |
| --- | --- |
| `/table` | JSON of the routing table, `?topic=`, `?after=`, `?limit=` (see `observe.table`); follow `next` for more |
| `/livez` | 200 while the process turns |
| `/readyz` | 200 while it serves clients, 503 with the reason otherwise; a stale table is degraded, not unready |

States: made --start()--> serving --stop()--> stopped.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from kproxy.errors import StartupError
from kproxy.observe.table import MAX_PAGE_ROWS, TableView, table_page

KEEPALIVE_S = 15.0
SHUTDOWN_TIMEOUT_S = 1.0


class AdminPage:
    """`table` gives the view of now; `not_ready` the reason why clients are not served, None where they are."""

    def __init__(self, *, table: Callable[[], TableView], not_ready: Callable[[], str | None]) -> None:
        self._table = table
        self._not_ready = not_ready
        application = web.Application()
        application.add_routes(
            [
                web.get("/", self._index),
                web.get("/table", self._get_table),
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
        return web.Response(text="kproxy\n\n/table\n/livez\n/readyz\n")

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = self._not_ready()
        if reason is None:
            return web.Response(text="ready\n")
        return web.Response(status=503, text=f"{reason}\n")

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

"""The HTTP pages of every serving process: metrics, liveness, readiness.

| page | answer |
| --- | --- |
| `/` | a summary for people, and the other pages |
| `/metrics` | for Prometheus (see `observe.exposition`) |
| `/livez` | 200 while the process works |
| `/readyz` | 200 while it can serve, 503 with the reason otherwise |

States: made --start()--> serving --stop()--> stopped.

With TLS an entrance (kproxy.security.entrance) has connections until their handshake is finished.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from aiohttp import web

from kproxy.config.admin import SPEAKS_TLS
from kproxy.config.tls import Loaded
from kproxy.errors import StartupError
from kproxy.observe.page_guard import PageGuard
from kproxy.runtime.sockets import bind, bound_port
from kproxy.security.entrance import Entrance
from kproxy.security.tls_errors import ListenerWords
from kproxy_codec.foreign import http_answer

KEEPALIVE_S = 15.0
SHUTDOWN_TIMEOUT_S = 1.0
# Connections that have not finished their TLS handshake.
MAX_HALF_OPEN: Final = 50
_WORDS: Final = ListenerWords("admin.tls.client_ca", "admin.tls.client_auth", "admin.tls.min_version", "ask https://")
_REMEDY: Final = "another --admin, or stop what uses this one"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether clients should be sent here.

    `text` is `ready`, or says how it is degraded or why it is not ready.
    """

    ready: bool
    text: str


class VitalPages(Protocol):
    """The content of the pages that every process has."""

    async def summary(self) -> str:
        """Some lines for people: the process and its state."""
        ...

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """The page, and its content type as an HTTP Accept header asks for it."""
        ...

    async def readiness(self) -> Readiness:
        """Whether clients can be served."""
        ...

    async def liveness(self) -> Readiness:
        """Whether the process works; if not, a restart helps."""
        ...


class HttpPage:
    """Serves `pages`, and `more` routes of the process's own. `guard` None: to everybody."""

    def __init__(self, pages: VitalPages, more: Sequence[web.RouteDef] = (), guard: PageGuard | None = None) -> None:
        self._vital = pages
        routes = [
            *more,
            web.get("/metrics", self._get_metrics),
            web.get("/livez", self._livez),
            web.get("/readyz", self._readyz),
        ]
        self._paths = [route.path for route in routes if route.method == "GET"]
        application = web.Application(middlewares=[guard.middleware] if guard is not None else [])
        application.add_routes([web.get("/", self._index), *routes])
        self._runner = web.AppRunner(
            application, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )
        self._entrance: Entrance[asyncio.BaseProtocol] | None = None

    async def start(self, host: str, port: int, tls: Callable[[], Loaded] | None = None) -> int:
        """Listen; return the real port. `tls` returns what a handshake uses that begins now; None: plain text.

        Raises StartupError, with nothing left open.
        """
        if tls is not None:
            return await self._start_with_tls(host, port, tls)
        await self._listen(lambda: web.TCPSite(self._runner, host, port), f"{host}:{port}", f"choose {_REMEDY}")
        bound: int = self._runner.addresses[0][1]
        return bound

    async def _start_with_tls(self, host: str, port: int, tls: Callable[[], Loaded]) -> int:
        bound = await bind(asyncio.Protocol, host, port, choose=_REMEDY)
        real_port = bound_port(bound)
        await self._runner.setup()
        entrance = self._entrance = Entrance(
            "admin page",
            tls,
            max_half_open=MAX_HALF_OPEN,
            session=lambda _: self._session(),
            counters=Counter(),
            words=_WORDS,
            answer_to_http=http_answer(f"{SPEAKS_TLS}\n".encode()),
        )
        try:
            entrance.open(bound)
        except StartupError:
            await self.stop()
            raise
        return real_port

    def _session(self) -> asyncio.BaseProtocol | None:
        """None: the page has stopped meanwhile."""
        server = self._runner.server
        return None if server is None else server()

    async def start_unix(self, path: Path) -> None:
        """Listen on a unix socket, in the place of one that another process left. Raises StartupError as `start`."""
        remedy = "name another directory in TMPDIR, with a short path"
        await self._listen(lambda: web.UnixSite(self._runner, path), str(path), remedy)

    async def _listen(self, site: Callable[[], web.BaseSite], where: str, remedy: str) -> None:
        await self._runner.setup()
        try:
            await site().start()
        except OSError as error:
            await self._runner.cleanup()
            raise StartupError(
                f"the admin page cannot listen on {where} ({error.strerror or error}): {remedy}."
            ) from error

    async def stop(self) -> None:
        """Close the listener and its connections."""
        if self._entrance is not None:
            await self._entrance.close()
        await self._runner.cleanup()

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(text="\n".join([await self._vital.summary(), "", *self._paths, ""]))

    async def _livez(self, _: web.Request) -> web.Response:
        return _said(await self._vital.liveness())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _said(await self._vital.readiness())

    async def _get_metrics(self, request: web.Request) -> web.Response:
        page, content_type = await self._vital.metrics(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})


def _said(readiness: Readiness) -> web.Response:
    return web.Response(status=200 if readiness.ready else 503, text=f"{readiness.text}\n")

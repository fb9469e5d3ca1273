"""Serve the HTTP pages that every serving process has: metrics, liveness, readiness.

| page | answer |
| --- | --- |
| `/` | for browsers the live page (see `observe.live_page`), else a summary for people, and the other pages |
| `/metrics` | for Prometheus (see `observe.exposition`) |
| `/livez` | 200 while the process works |
| `/readyz` | 200 while it can serve, 503 with the reason otherwise |

States of a page: made --start()--> serving --stop()--> stopped.

States of a connection
  new        no request has arrived; with TLS, the handshake is finished (kproxy.security.tls_acceptor)
  answering  a handler has a request of the connection
  idle       its request is answered; aiohttp closes it unless another one arrives within KEEPALIVE_S

Invariants
1. A connection is new for at most REQUEST_S. A handler has the whole body of a request within BODY_S.
2. At most MAX_CONNECTIONS are open, besides those on a unix socket. When another one arrives, the connection that has
   been new or idle for the longest time is closed, or the new one if all are answering. So idle clients block nobody.
3. Connections that are closed by these bounds are counted and logged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

import structlog
from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.typedefs import Middleware
from aiohttp.web_protocol import RequestHandler
from yarl import URL

from kproxy.address import Address
from kproxy.config.admin import SPEAKS_TLS
from kproxy.config.tls import Loaded
from kproxy.errors import StartupError
from kproxy.observe.live_page import LivePage, wants_html
from kproxy.observe.overview import Overview
from kproxy.observe.page_guard import Handler, PageGuard
from kproxy.runtime.sockets import accept_from, bind, bound_port
from kproxy.security.events import NO_EVENTS
from kproxy.security.tls_acceptor import TlsAcceptor
from kproxy.security.tls_errors import ListenerWords
from kproxy_codec.foreign import http_answer

log = structlog.get_logger(__name__)

KEEPALIVE_S = 15.0
# Bounds for the head of a connection's first request, and for the body of each request, in seconds.
REQUEST_S: Final = 10.0
BODY_S: Final = 10.0
MAX_CONNECTIONS: Final = 100
SHUTDOWN_TIMEOUT_S = 1.0
# Connections that have not finished their TLS handshake.
MAX_HALF_OPEN: Final = 50
_WORDS: Final = ListenerWords("admin.tls.client_ca", "admin.tls.client_auth", "admin.tls.min_version", "ask https://")
_UNREADABLE: Final = URL("*")
_REMEDY: Final = "another --admin, or stop what uses this one"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether clients should be sent to this process.

    `text` is `ready`, or says how the process is degraded or why it is not ready.
    """

    ready: bool
    text: str


class VitalPages(Protocol):
    """The content of the pages that every process has."""

    async def sample(self) -> None:
        """Note what has changed; called once a second."""
        ...

    async def overview(self) -> Overview:
        """Return what the live page shows."""
        ...

    async def summary(self) -> str:
        """Return some lines for people about the process and its state."""
        ...

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the page, and its content type as an HTTP Accept header asks for it."""
        ...

    async def readiness(self) -> Readiness:
        """Whether clients can be served."""
        ...

    async def liveness(self) -> Readiness:
        """Whether the process works; if not, a restart helps."""
        ...


class HttpPage:
    """Serves `pages`, and `more` routes of the process's own. With `guard` None everybody is served."""

    def __init__(self, pages: VitalPages, more: Sequence[web.RouteDef] = (), guard: PageGuard | None = None) -> None:
        self._vital = pages
        self._live = LivePage(pages.overview, pages.sample, guard)
        routes = [
            *more,
            *self._live.routes,
            web.get("/metrics", self._get_metrics),
            web.get("/livez", self._livez),
            web.get("/readyz", self._readyz),
        ]
        # The index does not list the files of the live page.
        own = ("/web/", "/login")
        self._paths = [each.path for each in routes if each.method == "GET" and not each.path.startswith(own)]
        self._visitors = _Visitors()
        guards = [guard.middleware] if guard is not None else []
        self._events = guard.events if guard is not None else NO_EVENTS
        application = web.Application(middlewares=[self._visitors.middleware, *guards, _read_whole])
        application.add_routes([web.get("/", self._index), *routes])
        self._runner = web.AppRunner(
            application, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )
        self._acceptor: TlsAcceptor[asyncio.BaseProtocol] | None = None
        self._server: asyncio.Server | None = None

    async def start(
        self, host: str, port: int, tls: Callable[[], Loaded] | None = None, counters: Counter[str] | None = None
    ) -> int:
        """Listen; return the real port. `tls` returns the TLS settings for new handshakes; None: plain text.

        `counters` counts handshakes, and connections that are closed without an answer. Raises StartupError, with
        nothing left open.
        """
        if counters is not None:
            self._visitors.counters = counters
        await self._set_up()
        try:
            if tls is None:
                bound = self._server = await bind(self._visitor, host, port, choose=_REMEDY)
                real_port = bound_port(bound)
                await accept_from(bound)
            else:
                bound = await bind(asyncio.Protocol, host, port, choose=_REMEDY)
                real_port = bound_port(bound)
                self._acceptor = self._make_acceptor(tls)
                self._acceptor.open(bound)
            self._live.start()
        except StartupError:
            await self.stop()
            raise
        return real_port

    async def _set_up(self) -> None:
        await self._runner.setup()
        server = cast(web.Server, self._runner.server)
        make = server.request_factory

        def make_any(message: RawRequestMessage, *given: Any) -> web.BaseRequest:
            try:
                return make(message, *given)
            except ValueError:
                # The URL's host is not a valid name. The error would end aiohttp's task, without an answer.
                return make(message._replace(url=_UNREADABLE), *given)

        server.request_factory = make_any

    def _make_acceptor(self, tls: Callable[[], Loaded]) -> TlsAcceptor[asyncio.BaseProtocol]:
        return TlsAcceptor(
            "admin page",
            tls,
            max_half_open=MAX_HALF_OPEN,
            session=lambda _: self._visitor() if self._runner.server is not None else None,
            counters=self._visitors.counters,
            counted_as="page.handshakes.",
            words=_WORDS,
            answer_to_http=http_answer(f"{SPEAKS_TLS}\n".encode()),
            events=self._events,
        )

    def _visitor(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection, while the page has not stopped."""
        return _Visitor(cast(web.Server, self._runner.server)(), self._visitors)

    async def start_unix(self, path: Path) -> None:
        """Listen on a unix socket, replacing one that another process left. Raises StartupError as `start`."""
        await self._set_up()
        try:
            await web.UnixSite(self._runner, path).start()
            self._live.start()
        except OSError as error:
            await self._runner.cleanup()
            raise StartupError(
                f"the admin page cannot listen on {path} ({error.strerror or error}): name another directory in "
                f"TMPDIR, with a short path."
            ) from error

    async def stop(self) -> None:
        """Close the listener and its connections."""
        await self._live.stop()
        if self._acceptor is not None:
            await self._acceptor.close()
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    async def _index(self, request: web.Request) -> web.Response:
        if wants_html(request):
            return self._live.html()
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


@web.middleware
async def _read_whole(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.can_read_body:
        try:
            async with asyncio.timeout(BODY_S):
                await request.read()
        except TimeoutError:
            return web.Response(status=408, text=f"the body has not arrived within {BODY_S:g} s\n")
    return await handler(request)


class _Visitors:
    """The open connections of a page."""

    def __init__(self) -> None:
        self.counters = Counter[str]()
        # Connections that are new or idle, the longest first, and those whose requests handlers have.
        self._waiting: dict[RequestHandler, _Visitor] = {}
        self._answering: dict[RequestHandler, _Visitor] = {}

    def enter(self, visitor: _Visitor) -> bool:
        """Add a new connection; return whether it may stay."""
        if len(self._waiting) + len(self._answering) >= MAX_CONNECTIONS:
            oldest = next(iter(self._waiting.values()), visitor)
            oldest.cut("crowded", f"there are {MAX_CONNECTIONS} connections, and it has waited without a request")
            if oldest is visitor:
                return False
            self.leave(oldest)
        self._waiting[visitor.handler] = visitor
        return True

    def leave(self, visitor: _Visitor) -> None:
        self._waiting.pop(visitor.handler, None)
        self._answering.pop(visitor.handler, None)

    @contextlib.contextmanager
    def _answer(self, handler: RequestHandler) -> Iterator[None]:
        visitor = self._waiting.pop(handler, None)
        if visitor is None:
            # The connection came by a unix socket, or has ended.
            yield
            return
        visitor.has_asked()
        self._answering[handler] = visitor
        try:
            yield
        finally:
            if self._answering.pop(handler, None) is not None:
                self._waiting[handler] = visitor

    @property
    def middleware(self) -> Middleware:
        """Return the middleware for aiohttp's application."""

        @web.middleware
        async def visited(request: web.Request, handler: Handler) -> web.StreamResponse:
            with self._answer(request.protocol):
                if request.rel_url is _UNREADABLE:
                    return web.Response(status=400, text="the host in the request's URL is no name\n")
                return await handler(request)

        return visited


class _Visitor(asyncio.Protocol):
    """One connection, which `handler` of aiohttp reads and answers."""

    def __init__(self, handler: RequestHandler, visitors: _Visitors) -> None:
        self.handler = handler
        self._visitors = visitors
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_taken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_taken = self._visitors.enter(self)
        if self._is_taken:
            text = f"no request has arrived within {REQUEST_S:g} s"
            self._deadline = asyncio.get_running_loop().call_later(REQUEST_S, self.cut, "idle", text)
            self.handler.connection_made(transport)

    def has_asked(self) -> None:
        """Note that the first request has arrived."""
        if self._deadline is not None:
            self._deadline.cancel()

    def cut(self, word: str, reason: str) -> None:
        """Close the connection; `word` is the label of the metric."""
        transport = cast(asyncio.Transport, self._transport)
        peer = transport.get_extra_info("peername")
        self._visitors.counters[f"page.cut.{word}"] += 1
        log.warning(
            "admin page closed a connection",
            most_a_minute=5,
            bounded_by="failure",
            failure=word,
            client=str(Address(*peer[:2])) if peer else "?",
            reason=reason,
        )
        transport.abort()

    def data_received(self, data: bytes) -> None:
        self.handler.data_received(data)

    def eof_received(self) -> None:
        self.handler.eof_received()

    def pause_writing(self) -> None:
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self.has_asked()
        self._visitors.leave(self)
        if self._is_taken:
            self.handler.connection_lost(error)

"""Serve the admin page to browsers: the files of `web/`, the overview as JSON and as server-sent events, the login.

| path | answer |
| --- | --- |
| `/web/page.css`, `/web/page.js` | the files of the page |
| `/overview` | JSON of an Overview: what the page shows of the process |
| `/events` | the same, once a second, as server-sent events |
| GET `/login` | whether a browser has to log in, and whether it has |
| POST `/login` | `{"token": "..."}` opens a session of a browser: a cookie that scripts cannot read |
| POST `/logout` | ends it |

Invariants
1. The overview is made once a second at most, for all who ask; a stream gets the latest one, and skips those that were
   made while its client did not read.
2. At most MOST_STREAMS streams are open. Each ends after STREAM_S, and when its client takes nothing for WRITE_S; the
   browser then opens another one, with its present rights.
3. One task samples the process once a second, from `start` to `stop`, and makes overviews while a stream is open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog
from aiohttp import web

from kproxy.observe.overview import Overview
from kproxy.observe.page_guard import PageGuard
from kproxy.runtime.tasks import cancel

MOST_STREAMS: Final = 30
STREAM_S: Final = 300.0
WRITE_S: Final = 10.0
EVERY_S: Final = 1.0
MOST_LOGIN_BYTES: Final = 4 << 10

_FILES: Final = Path(__file__).parent / "web"
_TYPES: Final = {"page.css": "text/css", "page.js": "text/javascript"}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

log = structlog.get_logger(__name__)


class _Login(msgspec.Struct, frozen=True):
    token: str


def wants_html(request: web.Request) -> bool:
    """Whether a browser asks."""
    return "text/html" in request.headers.get("Accept", "")


class LivePage:
    """The page for browsers. `overview` returns its data, `sample` is called once a second; `guard` None: no login."""

    def __init__(
        self,
        overview: Callable[[], Awaitable[Overview]],
        sample: Callable[[], Awaitable[None]],
        guard: PageGuard | None,
    ) -> None:
        self._overview = overview
        self._sample = sample
        self._guard = guard
        self._files = {name: (_FILES / name).read_bytes() for name in ("page.html", *_TYPES)}
        self._making = asyncio.Lock()
        self._made_at = float("-inf")
        self._made = b""
        self._news = asyncio.Event()
        self._streams = 0
        self._ticking: asyncio.Task[None] | None = None
        self.routes = [
            web.get("/overview", self._get_overview),
            web.get("/events", self._stream),
            web.get("/login", self._session),
            web.post("/login", self._login),
            web.post("/logout", self._logout),
            *(web.get(f"/web/{name}", self._file) for name in _TYPES),
        ]

    def start(self) -> None:
        self._ticking = asyncio.get_running_loop().create_task(self._tick(), name="samples for the admin page")

    async def stop(self) -> None:
        """End the streams."""
        if self._ticking is not None:
            await cancel(self._ticking)
            self._ticking = None
        self._news.set()

    async def _tick(self) -> None:
        while True:
            try:
                await self._sample()
                if self._streams:
                    await self._make()
            except Exception:  # the boundary: an error here must not end the page
                log.exception("admin page not updated")
            self._tell()
            await asyncio.sleep(EVERY_S)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _make(self) -> bytes:
        """Return the overview's JSON, of less than a second ago."""
        async with self._making:
            # A tick may be a little early.
            if time.monotonic() - self._made_at >= 0.9 * EVERY_S:
                self._made = msgspec.json.encode(await self._overview())
                self._made_at = time.monotonic()
            return self._made

    def html(self) -> web.Response:
        """The page for browsers."""
        return web.Response(body=self._files["page.html"], content_type="text/html", charset="utf-8", headers=HEADERS)

    async def _file(self, request: web.Request) -> web.Response:
        name = request.path.rpartition("/")[2]
        return web.Response(body=self._files[name], content_type=_TYPES[name], charset="utf-8", headers=HEADERS)

    async def _get_overview(self, _: web.Request) -> web.Response:
        return web.Response(body=await self._make(), content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self._streams >= MOST_STREAMS or self._ticking is None:
            return web.Response(status=503, text=f"{MOST_STREAMS} pages are open: close one, or ask /overview\n")
        self._streams += 1
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        ends_at, sent = time.monotonic() + STREAM_S, b""
        try:
            await response.prepare(request)
            while self._ticking is not None and time.monotonic() < ends_at:
                news, made = self._news, await self._make()
                if made is not sent:
                    async with asyncio.timeout(WRITE_S):
                        await response.write(b"retry: 1000\ndata: " + made + b"\n\n")
                    sent = made
                await news.wait()
        except (ConnectionError, TimeoutError) as error:
            log.debug("admin page stream ended", client=str(request.remote), reason=str(error) or "it reads nothing")
        finally:
            self._streams -= 1
        return response

    async def _session(self, request: web.Request) -> web.Response:
        is_needed, has_session = (False, False) if self._guard is None else self._guard.login_state(request)
        return web.json_response({"is_needed": is_needed, "has_session": has_session})

    async def _login(self, request: web.Request) -> web.Response:
        if self._guard is None or request.content_type != "application/json":
            return web.Response(status=415, text="send application/json\n")
        body = await request.read()
        try:
            token = msgspec.json.decode(body[:MOST_LOGIN_BYTES], type=_Login).token
        except msgspec.DecodeError:
            return web.Response(status=400, text='send {"token": "..."}\n')
        return self._guard.log_in(request, token)

    async def _logout(self, request: web.Request) -> web.Response:
        return web.Response(status=404) if self._guard is None else self._guard.log_out(request)

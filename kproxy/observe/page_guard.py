"""Protect an admin page by a bearer token, if one is set, and by Host and Origin of requests.

A foreign web page in an operator's browser can send requests to an admin page that the browser reaches. The web page
can neither read the answers nor send JSON, unless its name resolves to the admin page's address (DNS rebinding). So a
request must call the page by an address or a known name, and one that changes something must not come from another
origin. The pages of VITAL_PATHS are read by any name, since probes and scrapers call a machine by names that it does
not know. Where a token is set no name is checked: a foreign page has neither the token nor a session's cookie.

A browser gives the token once (POST /login) and gets the cookie of a session, which only pages of the same site send
(SameSite=Strict) and no script can read (HttpOnly). Sessions are bounded in number and time, are kept as digests, and
end when the token changes. The page itself and its files need no token: they have no data, and the login is on them.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from hashlib import sha256
from typing import Final

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from kproxy.security.events import NO_EVENTS, SecurityEvents

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = structlog.get_logger(__name__)

# What a browser needs to log in.
LOGIN_PATHS: Final = frozenset({"/login", "/logout", "/web/page.css", "/web/page.js"})
VITAL_PATHS: Final = frozenset({"/livez", "/readyz", "/metrics"})
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_BEARER: Final = "bearer "
MOST_SESSIONS: Final = 100
SESSION_S: Final = 12 * 3600
_COOKIE: Final = "kproxy_session_"


class _Sessions:
    """The sessions of browsers: digests of their ids, when they end, and the digest of the token they began with."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: dict[bytes, tuple[float, bytes]] = {}

    def open(self, token: str) -> str:
        """Begin a session; the oldest one ends if there are too many."""
        if len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        session = secrets.token_urlsafe(32)
        self._sessions[_digest(session)] = (self._clock() + SESSION_S, _digest(token))
        return session

    def has(self, session: str, token: str) -> bool:
        ends_at, of_token = self._sessions.get(_digest(session), (0.0, b""))
        return self._clock() < ends_at and hmac.compare_digest(of_token, _digest(token))

    def end(self, session: str) -> None:
        self._sessions.pop(_digest(session), None)


class PageGuard:
    """Checks the requests to one page.

    `token` returns the present token, or "" if none is required. `hosts` are names under which the page is called.
    `token_for_all`: the pages of VITAL_PATHS need the token as well.
    """

    def __init__(
        self,
        token: Callable[[], str] = lambda: "",
        hosts: Collection[str] = (),
        *,
        token_for_all: bool = False,
        events: SecurityEvents = NO_EVENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.events = events
        self._sessions = _Sessions(clock)
        self._token = token
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self._open = frozenset() if token_for_all else VITAL_PATHS

    @property
    def middleware(self) -> Middleware:
        """Return the middleware for aiohttp's application."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            refusal = self.refusal(
                request.method,
                request.path,
                request.host,
                request.headers.get("Origin"),
                _token_of(request),
                with_tls=request.secure,
                session=request.cookies.get(_cookie_of(request), ""),
                wants_html="text/html" in request.headers.get("Accept", ""),
            )
            return await handler(request) if refusal is None else self._refused(request, *refusal)

        return guarded

    def _refused(self, request: web.Request, status: int, reason: str) -> web.Response:
        client, path = str(request.remote), request.path[:100]
        log.warning("admin page refused a request", client=client, path=path, reason=reason)
        self.events.tell("admin_refused", client=client, path=path, status=status, reason=reason)
        headers = {"WWW-Authenticate": 'Bearer realm="kproxy"'} if status == 401 else {}
        return web.Response(status=status, text=f"{reason}\n", headers=headers)

    def login_state(self, request: web.Request) -> tuple[bool, bool]:
        """Return whether the browser has to log in first, and whether it has a session."""
        wanted = self._token()
        has_session = bool(wanted) and self._sessions.has(request.cookies.get(_cookie_of(request), ""), wanted)
        return bool(wanted) and not has_session, has_session

    def log_in(self, request: web.Request, token: str) -> web.Response:
        """Answer POST /login."""
        wanted = self._token()
        if wanted and not _are_same(token, wanted):
            return self._refused(request, 401, "this is not the token")
        answer = web.Response(status=204)
        if wanted:
            answer.set_cookie(
                _cookie_of(request),
                self._sessions.open(wanted),
                max_age=SESSION_S,
                path="/",
                secure=request.secure,
                httponly=True,
                samesite="Strict",
            )
        return answer

    def log_out(self, request: web.Request) -> web.Response:
        """Answer POST /logout."""
        self._sessions.end(request.cookies.get(_cookie_of(request), ""))
        answer = web.Response(status=204)
        answer.del_cookie(_cookie_of(request), path="/", httponly=True, samesite="Strict")
        return answer

    def refusal(
        self,
        method: str,
        path: str,
        host: str,
        origin: str | None,
        token: str,
        *,
        with_tls: bool = False,
        session: str = "",
        wants_html: bool = False,
    ) -> tuple[int, str] | None:
        """Return the status and the reason with which a request is refused; None if it is not.

        `with_tls`: the request came by TLS. Otherwise another server may end TLS, so that the page's origin is https.
        `session` is the browser's, or empty.
        """
        wanted = self._token()
        reading = method in _READING
        shows_login = path in LOGIN_PATHS or (path == "/" and reading and wants_html)
        has_right = not wanted or path in self._open or shows_login or _are_same(token, wanted)
        if not has_right and not (session and self._sessions.has(session, wanted)):
            return 401, "this page needs its token: Authorization: Bearer TOKEN"
        if not wanted and not (reading and path in VITAL_PATHS) and not self._is_known(host):
            return 403, "unknown host name: use the page's address, or add the name to admin.hosts"
        if reading:
            return None
        schemes = ("https",) if with_tls else ("http", "https")
        if origin is not None and origin.lower() not in [f"{scheme}://{host.lower()}" for scheme in schemes]:
            return 403, "a page of another origin must not change anything here"
        return None

    def _is_known(self, host: str) -> bool:
        name = host.lower()
        if not name.endswith("]"):
            before, colon, port = name.rpartition(":")
            name = before if colon and port.isdigit() else name
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def _are_same(token: str, wanted: str) -> bool:
    # A header may have bytes that are not text.
    return hmac.compare_digest(token.encode(errors="surrogateescape"), wanted.encode())


def _digest(text: str) -> bytes:
    return sha256(text.encode(errors="surrogateescape")).digest()


def _cookie_of(request: web.Request) -> str:
    """Return the cookie's name; browsers send a host's cookies to all of its ports."""
    port = request.host.rpartition(":")[2]
    return f"{_COOKIE}{port if port.isascii() and port.isdigit() else ''}"


def _token_of(request: web.Request) -> str:
    given = request.headers.get("Authorization", "")
    return given[len(_BEARER) :].strip() if given[: len(_BEARER)].lower() == _BEARER else ""

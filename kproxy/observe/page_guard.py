"""Protect an admin page by a bearer token, if one is set, and by Host and Origin of requests.

A foreign web page in an operator's browser can send requests to an admin page that the browser reaches. The web page
can neither read the answers nor send JSON, unless its name resolves to the admin page's address (DNS rebinding). So a
request must call the page by an address or a known name, and one that changes something must not come from another
origin. The pages of VITAL_PATHS are read by any name, since probes and scrapers call a machine by names that it does
not know. A request with the token needs no known name: a foreign page has no token.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from kproxy.security.events import NO_EVENTS, SecurityEvents

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = structlog.get_logger(__name__)

VITAL_PATHS: Final = frozenset({"/livez", "/readyz", "/metrics"})
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_BEARER: Final = "bearer "


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
    ) -> None:
        self.events = events
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
            )
            if refusal is None:
                return await handler(request)
            status, reason = refusal
            client, path = str(request.remote), request.path[:100]
            log.warning("admin page refused a request", client=client, path=path, reason=reason)
            self.events.tell("admin_refused", client=client, path=path, status=status, reason=reason)
            headers = {"WWW-Authenticate": 'Bearer realm="kproxy"'} if status == 401 else {}
            return web.Response(status=status, text=f"{reason}\n", headers=headers)

        return guarded

    def refusal(
        self, method: str, path: str, host: str, origin: str | None, token: str, *, with_tls: bool = False
    ) -> tuple[int, str] | None:
        """Return the status and the reason with which a request is refused; None if it is not.

        `with_tls`: the request came by TLS. Otherwise another server may end TLS, so that the page's origin is https.
        """
        wanted = self._token()
        if wanted and path not in self._open and not _are_same(token, wanted):
            return 401, "this page needs its token: Authorization: Bearer TOKEN"
        reading = method in _READING
        if not wanted and not (reading and path in VITAL_PATHS) and not self._is_known(host):
            return 403, "this page is not called so: use its address, or name the host in admin.hosts"
        if reading:
            return None
        schemes = ("https",) if with_tls else ("http", "https")
        if origin is not None and origin.lower() not in [f"{scheme}://{host.lower()}" for scheme in schemes]:
            return 403, "a page of another origin may change nothing here"
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


def _token_of(request: web.Request) -> str:
    given = request.headers.get("Authorization", "")
    return given[len(_BEARER) :].strip() if given[: len(_BEARER)].lower() == _BEARER else ""

"""Fetch the public keys of tokens repeatedly from a URL, as the issuer's JSON Web Key Set (RFC 7517).

States
  empty   no set has been fetched yet, and every token is refused
  known   the set that was fetched last verifies tokens

Transitions
  empty -> known   a set is fetched
  known -> known   another set is fetched: after `refresh_s`, or because a token names an unknown key

Invariants
1. `current` is always a set that was read whole. A failed fetch leaves it as it is, and is counted. The first failure,
   and each that follows a success, has one line in the log. The next fetch comes after RETRY_S.
2. One fetch runs at a time, for at most FETCH_S and MOST_FILE_BYTES, and follows no redirects.
3. Two fetches are at least RETRY_S apart, whatever clients send.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp
import structlog

from kproxy.errors import StartupError
from kproxy.security.events import NO_EVENTS, SecurityEvents
from kproxy.security.tokens import MOST_FILE_BYTES, TokenOptions, TokenVerifier, parse_verifier, require_jwt

log = structlog.get_logger(__name__)

FETCH_S: Final = 10.0
RETRY_S: Final = 5.0
_OK: Final = 200
_NAMED: Final = "keys of tokens"
_HEADERS: Final = {"Accept": "application/json", "Accept-Encoding": "identity"}


class FetchFailed(Exception):
    """A fetch has failed; the message is the reason, for the log."""


class KeyServer:
    """The keys at `url`. `fetch` returns them as bytes, or raises FetchFailed.

    `tells`: this process, and not another worker, logs new keys. Raises StartupError if tokens cannot be verified at
    all.
    """

    def __init__(
        self,
        url: str,
        options: TokenOptions,
        refresh_s: float,
        *,
        counters: Counter[str],
        tells: bool = True,
        events: SecurityEvents = NO_EVENTS,
        fetch: Callable[[str], Awaitable[bytes]] | None = None,
    ) -> None:
        require_jwt()
        self._url = url
        self._options = options
        self._refresh_s = refresh_s
        self._counters = counters
        self._tells = tells
        self._events = events if tells else NO_EVENTS
        self._fetch = fetch or fetch_keys
        self._is_failing = False
        self._content = b""
        self._wanted = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.current = TokenVerifier({}, options, self._want)

    def _want(self) -> None:
        """Request a fetch, because a token names a key that is not known; called on any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop has been closed meanwhile
            self._loop.call_soon_threadsafe(self._wanted.set)

    async def run(self) -> None:
        """Fetch the keys now and repeatedly, until cancelled."""
        while True:
            self._wanted.clear()
            is_fetched = await self._look()
            await asyncio.sleep(RETRY_S)
            if is_fetched:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._refresh_s - RETRY_S):
                        await self._wanted.wait()

    async def _look(self) -> bool:
        """Fetch the keys; return whether they can be used."""
        try:
            content = await self._fetch(self._url)
            if content != self._content:
                self.current = await asyncio.to_thread(parse_verifier, content, self._url, self._options, self._want)
                self._content = content
                if self._tells:
                    log.info("token keys fetched", url=self._url)
                self._events.tell("reloaded", what=_NAMED)
        except (FetchFailed, StartupError) as error:
            self._failed(str(error))
            return False
        except Exception:  # the boundary: whatever the server sends, the process continues to serve
            log.exception("token keys not fetched")
            self._failed("an internal error")
            return False
        self._counters["oauth.fetches.done"] += 1
        self._is_failing = False
        return True

    def _failed(self, reason: str) -> None:
        self._counters["oauth.fetches.failed"] += 1
        if not self._is_failing and self._tells:
            what = "the keys fetched last stay in use" if self._content else "no token is accepted"
            log.error("token keys not fetched", consequence=what, url=self._url, reason=reason)
            self._events.tell("not_reloaded", what=_NAMED, reason=reason)
        self._is_failing = True


async def fetch_keys(url: str) -> bytes:
    """Return the content of `url`. Raises FetchFailed."""
    try:
        async with (
            # Compressed content is not accepted, as it may be longer than its length says.
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=FETCH_S), auto_decompress=False) as session,
            session.get(url, allow_redirects=False, headers=_HEADERS) as answer,
        ):
            if answer.status != _OK:
                raise FetchFailed(f"it answers with the status {answer.status}")
            content = b""
            async for chunk in answer.content.iter_any():
                content += chunk
                if len(content) > MOST_FILE_BYTES:
                    raise FetchFailed(f"it is longer than {MOST_FILE_BYTES} bytes")
            return content
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # TimeoutError is an OSError.
        raise FetchFailed(f"{type(error).__name__}: {error}"[:300]) from error

"""Resolve host names: one lookup per name, and no name delays another.

The system's resolver blocks a thread, for half a minute if a name server does not answer. The event loop's own threads
(uvloop has four) serve all names, and each dial of a slow name would take one. uvloop's own `create_connection` also
waits for the resolver in a way that cannot be cancelled: the lookup of an abandoned dial fails later, in a future that
nobody awaits, and asyncio reports it on stderr. So names are resolved here before anything is dialled.

States of a name
  (none)      no lookup has been made; IP addresses need none
  under way   one thread asks the system; all callers wait for its result
  known       its addresses are used for FRESH_S, or until a dial to them fails

Invariants
1. Each name takes at most one thread, and all names together MAX_LOOKUPS. Beyond that, or if the system gives no
   thread, a lookup fails at once.
2. A caller that stops waiting does not end the lookup for others. Threads are daemons: the process does not wait for
   them when it ends.
3. At most MAX_KNOWN names are remembered; those resolved first are forgotten first.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

# Brokers that are down are dialled once a second, so one lookup a second is enough.
FRESH_S: Final = 1.0
MAX_LOOKUPS: Final = 64
MAX_KNOWN: Final = 1000


class Resolver:
    """The resolver of one event loop; `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[str, asyncio.Future[Sequence[str]]] = {}
        # Addresses by name, with the time at which they expire.
        self._known: dict[str, tuple[Sequence[str], float]] = {}

    async def addresses(self, host: str) -> Sequence[str]:
        """The addresses of a host, in the system's order of preference.

        Raises OSError, and UnicodeError if `host` is not a valid name.
        """
        if _is_address(host):
            return (host,)
        found, fresh_until = self._known.get(host, ((), 0.0))
        if found and self._clock() < fresh_until:
            return found
        lookup = self._under_way.get(host)
        if lookup is None:
            lookup = self._start(host)
        return await asyncio.shield(lookup)

    def forget(self, host: str) -> None:
        """Look the host up again next time: its addresses may have changed."""
        self._known.pop(host, None)

    def _start(self, host: str) -> asyncio.Future[Sequence[str]]:
        if len(self._under_way) >= MAX_LOOKUPS:
            raise OSError(f"{host} is not looked up: {MAX_LOOKUPS} other lookups are in progress")
        loop = asyncio.get_running_loop()
        lookup: asyncio.Future[Sequence[str]] = loop.create_future()
        # Retrieve the outcome even if nobody waits for it any more.
        lookup.add_done_callback(lambda _: lookup.cancelled() or lookup.exception())
        thread = threading.Thread(target=self._look_up, args=(loop, host), name=f"resolve {host}"[:15], daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, f"{host} is not looked up: {error}") from error
        self._under_way[host] = lookup
        return lookup

    def _look_up(self, loop: asyncio.AbstractEventLoop, host: str) -> None:
        """Run on a thread of its own."""
        outcome: Sequence[str] | OSError | UnicodeError
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            outcome = tuple(dict.fromkeys(str(row[4][0]) for row in rows))
        except (OSError, UnicodeError) as error:
            outcome = error
        try:
            loop.call_soon_threadsafe(self._looked_up, host, outcome)
        except RuntimeError:
            # The event loop has been closed, so no caller waits any more.
            return

    def _looked_up(self, host: str, outcome: Sequence[str] | OSError | UnicodeError) -> None:
        lookup = self._under_way.pop(host)
        if isinstance(outcome, (OSError, UnicodeError)):
            lookup.set_exception(outcome)
            return
        self._known.pop(host, None)
        self._known[host] = (outcome, self._clock() + FRESH_S)
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        lookup.set_result(outcome)


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, Resolver] = WeakKeyDictionary()


async def dial(connect: Callable[[str, int], Awaitable[T]], host: str, port: int) -> T:
    """Call `connect` with the addresses of `host` in turn.

    Return the result for the first address that can be reached.

    Raises the first OSError. All dials on one event loop share a `Resolver`.
    """
    resolver = _of_loops.setdefault(asyncio.get_running_loop(), Resolver())
    try:
        addresses = await resolver.addresses(host)
    except UnicodeError as error:
        raise OSError(f"{host!r} cannot be a host name") from error
    failed: OSError | None = None
    for address in addresses:
        try:
            return await connect(address, port)
        except ssl.SSLError:
            # A server at this address refused the request: another address would not help.
            raise
        except OSError as error:
            failed = failed or error
    resolver.forget(host)
    raise failed or OSError(f"{host} has no address")


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, UnicodeError, ValueError):
            continue
        return True
    return False

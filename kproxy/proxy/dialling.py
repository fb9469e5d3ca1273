"""Dial brokers, and remember for the whole process which are down.

States of a broker's address
  up      no dial has failed; every connection dials for itself, at once
  down    the last dial failed: refused, no route, no answer in time; dials go out at the pace of
          kproxy.routing.broker_health.Redial, one at a time

Transitions
  up   -> down   a dial fails; one line in the log
  down -> up     any dial succeeds; one line in the log

Invariants
1. While an address is down, at most one of the dials that take turns is in progress. Connections that are wanted
   meanwhile wait for it: if it fails they fail too, and if it succeeds they dial for themselves.
2. A connection that is wanted during the pause after a failure fails at once: nothing is written.
3. A dial that is given up (its client has gone) shows nothing about the broker. The next one that waits for it dials.
4. A lack of resources in this process shows nothing about the broker either. The same holds for the result of a
   client's identity: a dial that gets that far is a success, and nobody waits for it any more.
5. At most MAX_DOWN addresses are remembered; those that failed first are forgotten first.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Final, Self

import structlog

from kproxy.routing.broker_health import Redial
from kproxy.routing.topology import Address
from kproxy.runtime.resolver import Resolver
from kproxy.security.broker_auth import AccessRefused, BrokerAuth

log = structlog.get_logger(__name__)

# More than a cluster has brokers.
MAX_DOWN: Final = 1000
# Too few file descriptors, ports, buffers or threads in this process or host.
_OUR_OWN: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAGAIN}
)


class Turn(Enum):
    """When a broker that is down may be dialled."""

    PACED = "when the pause is over"
    NEXT = "at once, unless a dial is under way; for who asks at a slow pace of his own"
    BESIDE = "at once; for a probe, whose time is its own"


class KnownDown(ConnectionError):
    """The broker is down, and it was not dialled for this."""


class _Down:
    """A broker that is down; `under_way` is done when the dial that all others wait for is over."""

    __slots__ = ("redial", "since", "under_way")

    def __init__(self, since: float) -> None:
        self.since = since
        self.redial = Redial()
        self.under_way: asyncio.Future[None] | None = None


class Dialler:
    """The dials of one process, on one event loop; `clock` in seconds. Brokers are accessed by `access`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, access: BrokerAuth | None = None) -> None:
        self._clock = clock
        self.access = access or BrokerAuth()
        self.resolver = Resolver(clock)
        self._down: dict[Address, _Down] = {}

    @property
    def all_up(self) -> bool:
        """Whether no broker is known to be down."""
        return not self._down

    def is_down(self, address: Address) -> bool:
        """Whether the last dial failed."""
        return address in self._down

    def refuses(self, address: Address) -> bool:
        """Whether a PACED dial would fail at once."""
        down = self._down.get(address)
        return down is not None and down.under_way is None and not down.redial.is_due(self._clock())

    def attempt(
        self, owner: int, address: Address, turn: Turn = Turn.PACED, access: BrokerAuth | None = None
    ) -> Attempt:
        """One attempt at reaching the broker `owner`, a context manager that notes the result when it is left.

        `access` None: that of the process.
        """
        return Attempt(self, owner, address, turn, access or self.access)

    async def take_turn(self, address: Address, turn: Turn) -> asyncio.Future[None] | None:
        """Wait until a dial may go out; if others wait for it, return the future of its end. Raises KnownDown."""
        while (down := self._down.get(address)) is not None and turn is not Turn.BESIDE:
            if down.under_way is None:
                if turn is Turn.PACED and not down.redial.is_due(self._clock()):
                    raise KnownDown("it could not be reached just now")
                down.under_way = asyncio.get_running_loop().create_future()
                return down.under_way
            failures = down.redial.failures
            # The future must not be cancelled with one of those who wait for it.
            await asyncio.wait((down.under_way,))
            if down.redial.failures > failures:
                raise KnownDown("the dial that was under way has failed")
        return None

    def end_turn(self, address: Address, under_way: asyncio.Future[None]) -> None:
        """End the dial that others wait for."""
        down = self._down.get(address)
        if down is not None and down.under_way is under_way:
            down.under_way = None
        under_way.set_result(None)

    def succeeded(self, owner: int, address: Address) -> None:
        """Note a successful dial."""
        down = self._down.pop(address, None)
        if down is not None:
            log.info(
                "broker reachable again",
                broker=owner,
                address=str(address),
                down_s=round(self._clock() - down.since, 1),
                failed_dials=down.redial.failures,
            )

    def failed(self, owner: int, address: Address, reason: str, *, paced: bool) -> None:
        """Note a failed dial; `paced`: it was one of those that are made while the broker is down."""
        self.resolver.forget(address.host)
        now = self._clock()
        down = self._down.get(address)
        if down is None:
            log.warning("broker unreachable", broker=owner, address=str(address), reason=reason)
            if len(self._down) >= MAX_DOWN:
                del self._down[next(iter(self._down))]
            down = self._down[address] = _Down(now)
        elif not paced:
            # It went out before the first failure was known.
            return
        down.redial.failed(now)


class Attempt:
    """See `Dialler.attempt`."""

    def __init__(self, dialler: Dialler, owner: int, address: Address, turn: Turn, access: BrokerAuth) -> None:
        self._dialler = dialler
        self._access = access
        self._owner = owner
        self._address = address
        self._turn = turn
        self._dials = False
        self._resolves = False
        self._under_way: asyncio.Future[None] | None = None

    async def connect(self, protocol: asyncio.BaseProtocol) -> asyncio.Transport:
        """Connect, and give `protocol` the connection once the broker has accepted it.

        Raises OSError (KnownDown and AccessRefused are some), UnicodeError for a host name that cannot be looked up.
        """
        self._under_way = await self._dialler.take_turn(self._address, self._turn)
        self._dials = self._resolves = True
        hosts = await self._dialler.resolver.addresses(self._address.host)
        self._resolves = False
        errors = []
        for host in hosts:
            try:
                return await self._access.connect(protocol, host, self._address.port, self._address.host, self._reached)
            except AccessRefused:
                # A broker is there: another of its addresses would not help.
                raise
            except OSError as error:
                errors.append(error)
        raise errors[0] if len(errors) == 1 else OSError("; ".join(map(str, errors)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._dials:
            if error is None:
                self._dialler.succeeded(self._owner, self._address)
            elif isinstance(error, (OSError, UnicodeError)):
                self._note(error)
        self._end_turn()

    def _end_turn(self) -> None:
        if self._under_way is not None:
            self._dialler.end_turn(self._address, self._under_way)
            self._under_way = None

    def _reached(self) -> None:
        """Note that the broker is there; everything later is about a client alone."""
        self._dials = False
        self._dialler.succeeded(self._owner, self._address)
        self._end_turn()

    def _note(self, error: OSError | UnicodeError) -> None:
        if isinstance(error, OSError) and error.errno in _OUR_OWN:
            log.warning("connection not possible", address=str(self._address), reason=reason_of(error))
            return
        is_late = self._resolves and isinstance(error, TimeoutError)
        reason = "its name is not resolved in time" if is_late else reason_of(error)
        self._dialler.failed(self._owner, self._address, reason, paced=self._under_way is not None)


def reason_of(error: BaseException) -> str:
    """Why a connection could not be made, or was lost."""
    # The TimeoutError of our own timer has no text.
    return str(error) or ("no answer to the dial in time" if isinstance(error, TimeoutError) else type(error).__name__)

"""Dial brokers, and remember for the whole process which are down.

States of a broker at one address (`BrokerDials`)
  up      no dial has failed; every connection dials for itself, at once
  down    the last dial failed: refused, no route, no answer in time; dials go out at the pace of
          kproxy.routing.broker_health.Redial, one at a time

Transitions
  up   -> down   a dial fails; one line in the log
  down -> up     any dial succeeds; one line in the log

Invariants
1. While a broker is down, at most one paced dial that began since is in progress. Connections wanted meanwhile wait
   for it: if it fails they fail too, and if it succeeds they dial for themselves. The proxy's own connection
   (kproxy.proxy.broker_watch) has a pace of its own and is dialled beside them.
2. A connection that is wanted while the broker hangs, or during the pause after a failure, fails at once: nothing is
   written.
3. A dial that is given up (its client has gone) shows nothing about the broker. The next one that waits for it dials.
4. A lack of resources in this process shows nothing about the broker either. The same holds for the result of a
   client's identity: a dial that gets that far is a success, and nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

import structlog

from kproxy.observe.tally import Tally
from kproxy.plain import ReceiveArena
from kproxy.routing.broker_health import Redial
from kproxy.routing.topology import Address
from kproxy.runtime.resolver import Resolver
from kproxy.security.broker_auth import AccessRefused, BrokerAuth

log = structlog.get_logger(__name__)

# Too few file descriptors, ports, buffers or threads in this process or host.
_OUR_OWN: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAGAIN}
)


class KnownDown(ConnectionError):
    """The broker hangs or is down, and it was not dialled for this."""


class Dialler:
    """What all connections of a process to brokers share; `clock` in seconds. Brokers are accessed by `access`."""

    def __init__(self, clock: Callable[[], float], access: BrokerAuth, arena: ReceiveArena, tally: Tally) -> None:
        self.clock = clock
        self.tally = tally
        self.access = access
        self.arena = arena
        self.resolver = Resolver(clock)


class _Stage(Enum):
    """The stage of a dial, for the reason of its failure; in WAITS and OURS it shows nothing about the broker."""

    WAITS, RESOLVES, DIALS, OURS = range(4)


class BrokerDials:
    """The dials of the broker `owner` at `address`, for all connections of a process."""

    def __init__(self, owner: int, address: Address, dialler: Dialler) -> None:
        self.owner = owner
        self.address = address
        self.dialler = dialler
        self.counts = dialler.tally.of_broker(owner)
        self._redial: Redial | None = None
        self._down_since = 0.0
        # Done when the dial that all others wait for is over.
        self._under_way: asyncio.Future[None] | None = None

    @property
    def is_down(self) -> bool:
        """Whether the last dial failed."""
        return self._redial is not None

    @property
    def refuses(self) -> bool:
        """Whether a paced dial would fail at once."""
        return self._redial is not None and self._under_way is None and not self._redial.is_due(self.dialler.clock())

    async def dial(
        self, protocol: asyncio.BaseProtocol, patience: asyncio.Timeout, access: BrokerAuth, *, is_paced: bool
    ) -> None:
        """Connect, give `protocol` the connection once the broker has accepted it, and note the result.

        Raises OSError (KnownDown, AccessRefused and TimeoutError are some), UnicodeError for a host name that cannot be
        looked up.
        """
        if is_paced and self.refuses:
            raise KnownDown("the broker hangs, or its last dial failed")
        stage = _Stage.WAITS
        under_way: asyncio.Future[None] | None = None

        def reached() -> None:
            nonlocal stage
            stage = _Stage.OURS
            self._succeeded()
            self._end_turn(under_way)

        try:
            async with patience:
                under_way = await self._take_turn() if is_paced else None
                stage = _Stage.RESOLVES
                self.counts.dials += 1
                hosts = await self.dialler.resolver.addresses(self.address.host)
                stage = _Stage.DIALS
                await self._connect(protocol, hosts, access, reached)
            self._succeeded()
        except (OSError, UnicodeError) as error:
            if stage in (_Stage.RESOLVES, _Stage.DIALS):
                is_late = stage is _Stage.RESOLVES and isinstance(error, TimeoutError)
                reason = "its name is not resolved in time" if is_late else reason_of(error)
                if not _is_ours(error):
                    self.counts.errors[_kind_of(error)] += 1
                self._failed(error, reason, had_turn=under_way is not None)
            raise
        finally:
            self._end_turn(under_way)

    async def _connect(
        self, protocol: asyncio.BaseProtocol, hosts: Sequence[str], access: BrokerAuth, reached: Callable[[], None]
    ) -> None:
        errors = []
        for host in hosts:
            try:
                await access.connect(protocol, host, self.address.port, self.address.host, reached)
                return
            except AccessRefused:
                # A server is there: another of its addresses would not help.
                raise
            except OSError as error:
                errors.append(error)
        raise errors[0] if len(errors) == 1 else OSError("; ".join(map(str, errors)))

    async def _take_turn(self) -> asyncio.Future[None] | None:
        """Wait until a paced dial may go out; if others wait for it, return the future of its end. Raises KnownDown."""
        while (redial := self._redial) is not None:
            if self._under_way is None:
                self._under_way = asyncio.get_running_loop().create_future()
                return self._under_way
            failures = redial.failures
            # The future must not be cancelled with one of those who wait for it.
            await asyncio.wait((self._under_way,))
            if self._redial is not None and self._redial.failures > failures:
                raise KnownDown("the dial that this connection waited for failed")
        return None

    def _end_turn(self, under_way: asyncio.Future[None] | None) -> None:
        """End the dial that others wait for."""
        if under_way is not None and not under_way.done():
            self._under_way = None
            under_way.set_result(None)

    def _succeeded(self) -> None:
        if self._redial is not None:
            log.info(
                "broker became reachable",
                broker=self.owner,
                address=str(self.address),
                down_s=round(self.dialler.clock() - self._down_since, 1),
                failed_dials=self._redial.failures,
            )
            self._redial = None

    def _failed(self, error: OSError | UnicodeError, reason: str, *, had_turn: bool) -> None:
        if _is_ours(error):
            log.warning("process cannot open connection", address=str(self.address), reason=reason)
            return
        self.dialler.resolver.forget(self.address.host)
        now = self.dialler.clock()
        if self._redial is None:
            log.warning("broker became unreachable", broker=self.owner, address=str(self.address), reason=reason)
            self._redial, self._down_since = Redial(), now
        elif not had_turn:
            # This dial began before the first failure was known, or at its own pace.
            return
        self._redial.failed(now)


def _is_ours(error: OSError | UnicodeError) -> bool:
    return isinstance(error, OSError) and error.errno in _OUR_OWN


def _kind_of(error: OSError | UnicodeError) -> str:
    """The kind of a failed dial (kproxy.observe.tally)."""
    if isinstance(error, AccessRefused):
        return "access"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "refused" if isinstance(error, ConnectionRefusedError) else "unreachable"


def reason_of(error: BaseException) -> str:
    """Why a connection could not be made, or was lost."""
    # The TimeoutError of our own timer has no text.
    return str(error) or ("no answer to the dial in time" if isinstance(error, TimeoutError) else type(error).__name__)

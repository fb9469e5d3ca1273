"""The health of one proxy's brokers: which of them hang, and with the dialler's memory, which can be used.

Every connection to a broker shares it, whatever it is for: what clients write and read, the control plane,
coordinators, the question what a broker serves. Who sees a request wait calls `suspect`; from then on, for as long as
somebody keeps suspecting the broker or its breaker is open, one task probes it. Nothing is done about a broker that is
idle or answers promptly. The rules are in `kproxy.routing.broker_health`; who is down is in `kproxy.proxy.dialling`.

States of a broker's address
  (none)     nobody suspects it
  watched    one task probes it; its breaker is closed or open

Transitions
  (none)  -> watched   `suspect`, unless MAX_WATCHED are watched or the probing has been stopped
  watched -> (none)    a probe is answered and nobody suspects the broker in the pause after it; the broker has left the
                       topology; `close`

Invariants
1. One task per address, one probe at a time, on a connection that no client's request travels on.
2. `on_open` is called for every breaker that opens, after `is_open` says so.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from math import inf
from typing import Final

import structlog

from kproxy.config import Limits
from kproxy.proxy.dialling import Dialler, Turn
from kproxy.proxy.question import Lost, ask
from kproxy.proxy.upstream import Oldest, Upstream
from kproxy.routing.broker_health import PROBE_PAUSE_S, SUSPICIOUS_S, Breaker, is_cut_off
from kproxy.routing.topology import Address, Topology
from kproxy_codec import api_keys as keys
from kproxy_codec.framing import ReceiveArena
from kproxy_codec.headers import request_header
from kproxy_codec.partitioned import with_length

log = structlog.get_logger(__name__)

# Clusters are smaller than this; what is beyond is not watched, and its requests end at their deadlines.
MAX_WATCHED: Final = 1000
# The oldest version, which every broker answers (KIP-35) without looking at anything that could make it wait.
_PROBE_VERSION: Final = 0
_CLIENT_ID: Final = b"kproxy-probe"


class _Reply(Enum):
    ANSWER = "it answered"
    CUT_OFF = "it refused or closed the connection"
    SILENCE = "it did not answer in time"


class _Watched:
    """`suspected`: a request still waits, said after the latest probe began."""

    __slots__ = ("breaker", "connection", "suspected", "task")

    def __init__(self, timeout_s: float) -> None:
        self.breaker = Breaker(timeout_s)
        self.suspected = True
        self.connection: Upstream | None = None
        self.task: asyncio.Task[None] | None = None


class BrokerHealth:
    """By broker address. `clock` is in seconds."""

    def __init__(
        self,
        topology: Topology,
        limits: Limits,
        clock: Callable[[], float],
        arena: ReceiveArena,
        counters: Counter[str],
        dialler: Dialler,
    ) -> None:
        self._topology = topology
        self._limits = limits
        self._clock = clock
        self._arena = arena
        self._counters = counters
        self.dialler = dialler
        self._watched: dict[Address, _Watched] = {}
        self._closed = False
        self.on_open: Callable[[Address], None] = lambda address: None

    @property
    def watching(self) -> bool:
        """Whether any broker is suspected; where none is, no breaker is open."""
        return bool(self._watched)

    @property
    def open_count(self) -> int:
        """How many brokers hang."""
        return sum(watched.breaker.is_open for watched in self._watched.values())

    def is_open(self, address: Address | None) -> bool:
        """Whether the broker there hangs: nothing is to be sent to it."""
        if address is None:
            return False
        watched = self._watched.get(address)
        return watched is not None and watched.breaker.is_open

    @property
    def all_well(self) -> bool:
        """Whether nothing speaks against any broker."""
        return not self._watched and self.dialler.all_up

    def is_well(self, address: Address) -> bool:
        """Whether nothing speaks against the broker there: it does not hang, and the last dial came through."""
        return not self.is_open(address) and not self.dialler.is_down(address)

    def refuses(self, address: Address) -> bool:
        """Whether what is sent to the broker there now is lost unwritten, at once: it hangs, or is down."""
        return self.is_open(address) or self.dialler.refuses(address)

    def suspect(self, owner: int, address: Address) -> None:
        """A request has been waiting for this broker for SUSPICIOUS_S."""
        watched = self._watched.get(address)
        if watched is not None:
            watched.suspected = True
        elif not self._closed and len(self._watched) < MAX_WATCHED:
            watched = self._watched[address] = _Watched(self._limits.probe_timeout_s)
            watched.task = asyncio.get_running_loop().create_task(self._watch(owner, address, watched))

    @contextmanager
    def wondering(self, owner: int, address: Address) -> Iterator[None]:
        """Suspect the broker there if what is done within takes SUSPICIOUS_S."""
        timer = asyncio.get_running_loop().call_later(SUSPICIOUS_S, self.suspect, owner, address)
        try:
            yield
        finally:
            timer.cancel()

    def is_cut_off(self, upstream: Upstream, waits_s: float) -> bool:
        """Whether nothing gets through on a connection that has let something wait for so long.

        As long as for a probe: it is the same that is lost, and the probe tells nothing of this connection.
        """
        patience_s = self._limits.probe_timeout_s
        told = upstream.delivery() if waits_s >= patience_s else None
        return told is not None and is_cut_off(
            unacknowledged=told.unacknowledged,
            retransmits=told.retransmits,
            probes=told.probes,
            silent_s=told.silent_s,
            patience_s=patience_s,
        )

    def heard(self, address: Address, since: float) -> None:
        """The broker has answered a client's request, not earlier than `since`."""
        watched = self._watched.get(address)
        if watched is not None:
            watched.breaker.heard(since)

    async def _watch(self, owner: int, address: Address, watched: _Watched) -> None:
        """Probe until nobody wonders any more."""
        try:
            while watched.suspected or watched.breaker.is_open:
                watched.suspected = False
                reply = await self._probe(owner, address, watched)
                if reply is _Reply.SILENCE:
                    if watched.breaker.silent():
                        self._opened(owner, address)
                    if address not in self._topology.brokers.values():
                        return
                else:
                    if watched.breaker.answered():
                        self._topology.doubt(owner, doubted=False)
                        log.info("broker no longer hangs", broker=owner, address=str(address), reason=reply.value)
                    await asyncio.sleep(PROBE_PAUSE_S)
        except Exception:  # the boundary: without its watcher this broker's breaker is closed
            self._topology.doubt(owner, doubted=False)
            log.exception("a broker can no longer be probed", broker=owner, address=str(address))
        finally:
            del self._watched[address]
            if watched.connection is not None:
                await watched.connection.close()

    def _opened(self, owner: int, address: Address) -> None:
        self._counters["breaker.opened"] += 1
        log.warning("broker hangs", broker=owner, address=str(address), unanswered_s=self._limits.probe_timeout_s)
        self._topology.doubt(owner, doubted=True)
        self.on_open(address)

    async def _probe(self, owner: int, address: Address, watched: _Watched) -> _Reply:
        """One probe, on the connection of the one before where that was answered."""
        if watched.connection is None or watched.connection.closed:
            watched.connection = self._dial(owner, address, watched)
        watched.breaker.asked(self._clock())
        return await self._ask(watched.connection, watched)

    def _dial(self, owner: int, address: Address, watched: _Watched) -> Upstream:
        return Upstream(
            owner,
            address,
            dialler=self.dialler,
            turn=Turn.BESIDE,
            arena=self._arena,
            max_answer_bytes=self._limits.max_control_request_bytes,
            # The probe's own patience is to be over first: a dial that hangs is silence.
            connect_timeout_s=watched.breaker.patience_s + 1,
            on_pressure=lambda slow: None,
        )

    async def _ask(self, connection: Upstream, watched: _Watched) -> _Reply:
        correlation_id = connection.next_correlation_id()
        request = request_header(keys.API_VERSIONS, _PROBE_VERSION, correlation_id, _CLIENT_ID)
        try:
            async with asyncio.timeout(watched.breaker.patience_s):
                await ask(connection, correlation_id, with_length([request]))
        except TimeoutError:
            # What a hung host's network lost is repeated ever more slowly; a new connection comes through sooner.
            await connection.close()
            return _Reply.SILENCE
        except Lost:
            await connection.close()
            return _Reply.CUT_OFF
        return _Reply.ANSWER

    async def close(self) -> None:
        """End all probing."""
        self._closed = True
        tasks = [watched.task for watched in self._watched.values() if watched.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _may_wait_until(upstream: Upstream) -> float:
    """Until when the next answer may take its time, for that is what was asked: a fetch that waits for data."""
    ticket = upstream.oldest_unanswered()
    return ticket.may_wait_until if ticket is not None else -inf


class Waiting:
    """What one client connection's broker connections let wait, as far as is seen by looking now and then.

    Requests are not timed: a connection whose next answer is still the same one at look after look lets it wait. Such a
    connection may be cut off alone, while its broker answers on others: while it waits, its own way is watched.
    """

    def __init__(self, health: BrokerHealth) -> None:
        self._health = health
        # The next answer of each connection, and since when it has been that.
        self._seen: dict[Upstream, tuple[Oldest, float]] = {}
        self._looked_at = -inf
        # The connections that the kernel watches closely.
        self._watched: set[Upstream] = set()

    @property
    def watches(self) -> bool:
        """Whether there is something to be undone at the next look."""
        return bool(self._watched)

    def look(self, upstreams: Iterable[Upstream], now: float) -> None:
        """Suspect the brokers that let something wait; tell of those that have answered since the last look."""
        seen: dict[Upstream, tuple[Oldest, float]] = {}
        waiting: dict[Upstream, float] = {}
        for upstream in upstreams:
            oldest = upstream.oldest()
            before, since = self._seen.get(upstream, (None, now))
            if oldest != before:
                since = now
                if before is not None and before.written and not upstream.closed:
                    self._health.heard(upstream.address, self._looked_at)
            if oldest is None:
                continue
            seen[upstream] = (oldest, since)
            waits_s = now - max(since, _may_wait_until(upstream))
            if waits_s >= SUSPICIOUS_S:
                self._health.suspect(upstream.owner, upstream.address)
                waiting[upstream] = waits_s
        self._seen = seen
        self._looked_at = now
        if waiting or self._watched:
            self._watch(waiting)

    def _watch(self, waiting: Mapping[Upstream, float]) -> None:
        """Watch the ways of those that wait, for so long, and no others; give up what nothing gets through on."""
        for upstream in waiting.keys() - self._watched:
            upstream.watch_path(closely=True)
        for upstream in self._watched - waiting.keys():
            upstream.watch_path(closely=False)
        self._watched = set(waiting)
        for upstream, waits_s in waiting.items():
            if self._health.is_cut_off(upstream, waits_s):
                upstream.cut()

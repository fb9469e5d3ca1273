"""Watch the health of one proxy's brokers, and answer `/readyz`.

All connections to brokers share one `BrokerHealth`. A connection whose request waits calls `suspect`. From then on one
task probes the broker, until nobody suspects it any more and its breaker is closed. A broker that is idle or answers
promptly is never probed. The breaker's rules are in `kproxy.routing.broker_health`; `kproxy.proxy.dialling` knows which
brokers are down.

`/readyz`:

| finding | answer |
| --- | --- |
| starting or draining | not ready |
| no broker is known, or none of them answers | not ready: every request would fail; another proxy may reach a broker |
| the table is stale | ready, degraded: the last known table stays in use |
| some brokers do not answer | ready: their partitions fail wherever a client goes |

`/readyz` makes the proxy ask its brokers, at most once every FRESH_S; without it the proxy sends nothing.

States of a broker's id (`BrokerHealth`), for the metrics
  here      the topology has an address of it
  gone      it has left the topology less than GONE_FOR_S ago: Kafka and etcd drop a broker soon after it dies, and an
            alert needs its series for longer. A broker that was removed on purpose looks the same
  (none)    neither

Transitions: (none), gone --it joins the topology--> here --it leaves--> gone --GONE_FOR_S, or MAX_GONE others left
later--> (none). `follow` notes them.

States of a broker's address (`BrokerHealth`)
  (none)     not suspected
  watched    one task probes it; its breaker is closed or open

Transitions
  (none)  -> watched   `suspect`, unless MAX_WATCHED are watched or the probing has been stopped
  watched -> (none)    a probe is answered and nobody suspects the broker in the pause after it; the broker has left the
                       topology; `close`

States of `ReadinessProbe`
  idle      it keeps the last finding
  asking    one task asks; callers that come meanwhile wait for it

Invariants
1. One task per address, one probe at a time, on a connection of its own.
2. `on_open` is called for every breaker that opens, after `is_open` is true.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from enum import Enum
from math import inf
from random import Random
from types import MappingProxyType
from typing import Final

import structlog

from kproxy.config import Limits
from kproxy.observe.http_page import Readiness
from kproxy.observe.metrics import BrokerVitals
from kproxy.observe.table import TableView
from kproxy.observe.tally import Tally
from kproxy.plain import ReceiveArena
from kproxy.proxy.broker_connection import Lost, Oldest, Upstream, ask
from kproxy.proxy.dialling import Dialler, Turn
from kproxy.routing.broker_health import PROBE_PAUSE_S, SUSPICIOUS_S, Breaker, is_cut_off
from kproxy.routing.topology import Address, Topology
from kproxy_codec import api_keys
from kproxy_codec.framing import request_header
from kproxy_codec.partitioned import with_length

log = structlog.get_logger(__name__)

# Clusters are smaller than this; further brokers are not watched, and their requests end at their deadlines.
MAX_WATCHED: Final = 1000
GONE_FOR_S: Final = 600.0
MAX_GONE: Final = 1000
# The oldest version, which every broker answers (KIP-35) without looking at anything that could make it wait.
_PROBE_VERSION: Final = 0
_CLIENT_ID: Final = b"kproxy-probe"


class _Reply(Enum):
    ANSWER = "it answered"
    CUT_OFF = "it refused or closed the connection"
    SILENCE = "it did not answer in time"


class _Watched:
    """A broker that is probed. `suspected`: a request still waits, as reported after the latest probe began."""

    __slots__ = ("breaker", "connection", "suspected", "task")

    def __init__(self, timeout_s: float) -> None:
        self.breaker = Breaker(timeout_s)
        self.suspected = True
        self.connection: Upstream | None = None
        self.task: asyncio.Task[None] | None = None


class BrokerHealth:
    """The health of brokers by address. `clock` is in seconds."""

    def __init__(
        self,
        topology: Topology,
        limits: Limits,
        clock: Callable[[], float],
        arena: ReceiveArena,
        tally: Tally,
        dialler: Dialler,
    ) -> None:
        self._topology = topology
        self._limits = limits
        self._clock = clock
        self._arena = arena
        self._tally = tally
        self.dialler = dialler
        self._watched: dict[Address, _Watched] = {}
        # The ids that the topology had at this version, and when others left, in that order.
        self._followed = -1
        self._here: Set[int] = frozenset()
        self._gone: dict[int, float] = {}
        self._closed = False
        self.on_open: Callable[[Address], None] = lambda address: None

    @property
    def watching(self) -> bool:
        """Whether any broker is suspected; where none is, no breaker is open."""
        return bool(self._watched)

    def follow(self) -> None:
        """Note which brokers have left the topology; call it regularly."""
        if self._topology.version == self._followed:
            return
        self._followed = self._topology.version
        before, self._here = self._here, frozenset(self._topology.brokers)
        for broker in self._here & self._gone.keys():
            del self._gone[broker]
        self._gone |= dict.fromkeys(before - self._here, self._clock())
        for broker in list(self._gone)[:-MAX_GONE]:
            del self._gone[broker]

    def brokers(self) -> dict[int, BrokerVitals]:
        """By id, whether each broker that is here is well and whether it hangs; one that is gone is not well."""
        self.follow()
        now = self._clock()
        self._gone = {broker: left for broker, left in self._gone.items() if now - left < GONE_FOR_S}
        here = {
            broker: BrokerVitals(self.is_well(address), self.is_open(address))
            for broker, address in self._topology.brokers.items()
        }
        return dict.fromkeys(self._gone, BrokerVitals(False)) | here

    def is_open(self, address: Address | None) -> bool:
        """Whether the broker there hangs: nothing is to be sent to it."""
        if address is None:
            return False
        watched = self._watched.get(address)
        return watched is not None and watched.breaker.is_open

    @property
    def all_well(self) -> bool:
        """Whether no broker is known to be in trouble."""
        return not self._watched and self.dialler.all_up

    def is_well(self, address: Address) -> bool:
        """Whether the broker there is not known to be in trouble: it does not hang, and the last dial succeeded."""
        return not self.is_open(address) and not self.dialler.is_down(address)

    def refuses(self, address: Address) -> bool:
        """Whether a request to the broker there is now lost unwritten, at once: the broker hangs, or is down."""
        return self.is_open(address) or self.dialler.refuses(address)

    def suspect(self, owner: int, address: Address) -> None:
        """Suspect a broker for which a request has waited for SUSPICIOUS_S."""
        watched = self._watched.get(address)
        if watched is not None:
            watched.suspected = True
        elif not self._closed and len(self._watched) < MAX_WATCHED:
            watched = self._watched[address] = _Watched(self._limits.probe_timeout_s)
            watched.task = asyncio.get_running_loop().create_task(self._watch(owner, address, watched))

    @contextmanager
    def wondering(self, owner: int, address: Address) -> Iterator[None]:
        """Suspect the broker there if the body of the context takes SUSPICIOUS_S."""
        timer = asyncio.get_running_loop().call_later(SUSPICIOUS_S, self.suspect, owner, address)
        try:
            yield
        finally:
            timer.cancel()

    def is_cut_off(self, upstream: Upstream, waits_s: float) -> bool:
        """Whether nothing gets through on a connection on which a request has waited for `waits_s`.

        The time allowed is that of a probe: the same is lost, and the probe shows nothing about this connection.
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
        """Note that the broker has answered a client's request, not earlier than `since`."""
        watched = self._watched.get(address)
        if watched is not None:
            watched.breaker.heard(since)

    async def _watch(self, owner: int, address: Address, watched: _Watched) -> None:
        """Probe until nobody suspects the broker any more and its breaker is closed."""
        try:
            while watched.suspected or watched.breaker.is_open:
                watched.suspected = False
                began = self._clock()
                reply = await self._probe(owner, address, watched)
                if reply is not _Reply.CUT_OFF:
                    self._tally.probe(owner, self._clock() - began)
                if reply is _Reply.SILENCE:
                    if watched.breaker.silent():
                        self._opened(owner, address)
                    if address not in self._topology.brokers.values():
                        return
                else:
                    if watched.breaker.answered():
                        self._topology.doubt(owner, doubted=False)
                        log.info("broker answers again", broker=owner, address=str(address), reason=reply.value)
                    await asyncio.sleep(PROBE_PAUSE_S)
        except Exception:  # the boundary: without its watcher this broker's breaker is closed
            self._topology.doubt(owner, doubted=False)
            log.exception("broker probe failed", broker=owner, address=str(address))
        finally:
            del self._watched[address]
            if watched.connection is not None:
                await watched.connection.close()

    def _opened(self, owner: int, address: Address) -> None:
        self._tally.hang(owner)
        log.warning("broker hangs", broker=owner, address=str(address), unanswered_s=self._limits.probe_timeout_s)
        self._topology.doubt(owner, doubted=True)
        self.on_open(address)

    async def _probe(self, owner: int, address: Address, watched: _Watched) -> _Reply:
        """Send one probe, on the connection of the last probe if that was answered."""
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
            clock=self._clock,
            max_answer_bytes=self._limits.max_control_request_bytes,
            # The probe's own timeout ends first: a dial that hangs counts as silence.
            connect_timeout_s=watched.breaker.patience_s + 1,
        )

    async def _ask(self, connection: Upstream, watched: _Watched) -> _Reply:
        correlation_id = connection.next_correlation_id()
        request = request_header(api_keys.API_VERSIONS, _PROBE_VERSION, correlation_id, _CLIENT_ID)
        try:
            async with asyncio.timeout(watched.breaker.patience_s):
                await ask(connection, correlation_id, with_length([request]))
        except TimeoutError:
            # Packets lost in the network of a hung host are repeated ever more slowly; a new connection gets through
            # sooner.
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
    """The time until which the request itself lets its answer wait: a fetch that waits for data."""
    ticket = upstream.oldest_unanswered()
    return ticket.may_wait_until if ticket is not None else -inf


_NO_UPSTREAMS: Final = frozenset[Upstream]()
_NOTHING_SEEN: Final[Mapping[Upstream, tuple[Oldest, float]]] = MappingProxyType({})


class Waiting:
    """The waiting requests of one client connection's broker connections, as seen in checks at intervals.

    Requests are not timed: a request waits as long as its connection has the same next answer at each check. Such a
    connection alone may be cut off, while its broker answers on others: its own path is watched while it waits.
    """

    __slots__ = ("_health", "_looked_at", "_seen", "_watched")

    def __init__(self, health: BrokerHealth) -> None:
        self._health = health
        # The next answer of each connection, and the time since when it has been the next.
        self._seen = _NOTHING_SEEN
        self._looked_at = -inf
        # The connections that the kernel watches closely.
        self._watched = _NO_UPSTREAMS

    @property
    def watches(self) -> bool:
        """Whether the next check has something to undo."""
        return bool(self._watched)

    def unanswered(self, upstreams: Iterable[Upstream], now: float) -> Iterator[tuple[int, int, float]]:
        """For each connection with unanswered requests: its broker, their number, and since when it waits, in seconds.

        That is for how long its next answer has been the next, as of the last check, without the time that the request
        itself lets its answer wait.
        """
        for upstream in upstreams:
            count = upstream.unanswered_count
            if count:
                oldest, since = self._seen.get(upstream, (None, now))
                waits_s = now - max(since, _may_wait_until(upstream)) if oldest == upstream.oldest() else 0.0
                yield upstream.owner, count, max(0.0, waits_s)

    def look(self, upstreams: Iterable[Upstream], now: float) -> None:
        """Suspect the brokers that let a request wait; report those that have answered since the last check."""
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
        self._seen = seen or _NOTHING_SEEN
        self._looked_at = now
        if waiting or self._watched:
            self._watch(waiting)

    def _watch(self, waiting: Mapping[Upstream, float]) -> None:
        """Watch the paths of waiting connections and no others; give up connections on which nothing gets through."""
        for upstream in waiting.keys() - self._watched:
            upstream.watch_path(closely=True)
        for upstream in self._watched - waiting.keys():
            upstream.watch_path(closely=False)
        self._watched = frozenset(waiting) if waiting else _NO_UPSTREAMS
        for upstream, waits_s in waiting.items():
            if self._health.is_cut_off(upstream, waits_s):
                upstream.cut()


FRESH_S = 1.0
AT_ONCE = 16
_CORRELATION_ID = 0x72647920
# Version 0 has no body: every broker answers it, whatever it serves.
_QUESTION = b"".join(with_length([request_header(api_keys.API_VERSIONS, 0, _CORRELATION_ID, b"kproxy-readyz")]))
_ANSWER_HEAD = struct.Struct(">ii")


class ReadinessProbe:
    """Check whether any of `addresses` answers, in `timeout_s` seconds for each broker; `clock` in seconds."""

    def __init__(
        self,
        addresses: Callable[[], Mapping[int, Address]],
        *,
        dialler: Dialler,
        timeout_s: float,
        clock: Callable[[], float],
        random: Random,
    ) -> None:
        self._addresses = addresses
        self._dialler = dialler
        self._timeout_s = timeout_s
        self._clock = clock
        self._random = random
        self._asking: asyncio.Task[str | None] | None = None
        self._last: tuple[int, Address] | None = None
        self._fresh_until = 0.0
        self._problem: str | None = None

    async def problem(self) -> str | None:
        """Return the reason why no broker can be used; None where one answers."""
        if self._asking is None:
            if self._clock() < self._fresh_until:
                return self._problem
            self._asking = asyncio.get_running_loop().create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    def _asked(self, task: asyncio.Task[str | None]) -> None:
        self._asking = None
        if not task.cancelled() and task.exception() is None:
            self._problem, self._fresh_until = task.result(), self._clock() + FRESH_S

    async def _ask(self) -> str | None:
        brokers = list(self._addresses().items())
        if not brokers:
            return "no broker is known"
        self._random.shuffle(brokers)
        # The one that answered last is usually enough.
        brokers.sort(key=lambda broker: broker != self._last)
        groups = [brokers[:1], *(brokers[at : at + AT_ONCE] for at in range(1, len(brokers), AT_ONCE))]
        for group in groups:
            self._last = await self._first_to_answer(group)
            if self._last is not None:
                return None
        return f"no broker answers: {len(brokers)} asked"

    async def _first_to_answer(self, brokers: list[tuple[int, Address]]) -> tuple[int, Address] | None:
        asked = [asyncio.get_running_loop().create_task(self._answers(*broker)) for broker in brokers]
        try:
            for answer in asyncio.as_completed(asked):
                broker = await answer
                if broker is not None:
                    return broker
            return None
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _answers(self, broker: int, address: Address) -> tuple[int, Address] | None:
        """Return the broker if it answers. Connecting is not enough: a stopped process's kernel does that."""
        reader = asyncio.StreamReader()
        transport: asyncio.Transport | None = None
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            with self._dialler.attempt(broker, address, Turn.NEXT) as attempt:
                async with asyncio.timeout_at(deadline):
                    transport = await attempt.connect(asyncio.StreamReaderProtocol(reader))
            async with asyncio.timeout_at(deadline):
                transport.write(_QUESTION)
                _, correlation_id = _ANSWER_HEAD.unpack(await reader.readexactly(_ANSWER_HEAD.size))
            return (broker, address) if correlation_id == _CORRELATION_ID else None
        except (OSError, UnicodeError, asyncio.IncompleteReadError):
            # TimeoutError is an OSError. UnicodeError: a host that no name server can be asked about.
            return None
        finally:
            if transport is not None:
                transport.abort()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)


async def readiness(not_ready: str | None, view: TableView, brokers: ReadinessProbe) -> Readiness:
    """Apply the table at the top of this module; `not_ready` is the listener's own reason."""
    problem = not_ready or await brokers.problem()
    if problem is not None:
        return Readiness(ready=False, text=problem)
    if view.stale:
        return Readiness(ready=True, text="ready, degraded: the table is stale, the last known owners are used")
    return Readiness(ready=True, text="ready")

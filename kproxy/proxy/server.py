"""Accept client connections, watch their deadlines, and close them when the process stops.

States
  starting   the listener is bound, then the routing table is loaded, so that a port in use is reported at once
  serving    clients are served; the ready line follows when the proxy has joined the fleet
  leaving    `/readyz` is 503, and clients are served as before: they find other proxies meanwhile
  draining   no new connections; the requests that were read are answered, for at most `drain_s`
  drained    clients are gone; connections from within this process are served as before
  stopped

Transitions: starting --serve()--> serving --leave()--> leaving --drain()--> draining --the last client, or the time-->
drained --stop()--> stopped; `drain` may come without `leave`, and `stop` drains first.

`/readyz`:

| finding | answer |
| --- | --- |
| starting, leaving or draining | not ready |
| no broker is known, or none of them answers | not ready: every request would fail; another proxy may reach a broker |
| the table is stale | ready, degraded: the last known table stays in use |
| some brokers do not answer | ready: their partitions fail wherever a client goes |

Invariants
1. Every session is in `_sessions` until its `close` has been awaited; nothing is left running when `stop` returns.
2. At most `max_connections` clients are admitted by all listeners together, and none while descriptors run short
   (kproxy.proxy.descriptors); one more is closed at once, with a line in the log.
3. Clients of a listener with TLS or the PROXY protocol have a session once they are accepted
   (kproxy.security.tls_acceptor).
4. Sessions close, drain and take news in their turn of the event loop (kproxy.runtime.tasks): there may be thousands.
5. The sessions in `_inside` are ends of `connect_inside`, no clients: they are neither counted nor drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from heapq import nlargest
from types import MappingProxyType

import structlog

from kproxy.config import Limits
from kproxy.config.listeners import ListenerConfig
from kproxy.config.tls import Loaded
from kproxy.observe.http_page import Readiness
from kproxy.observe.metrics import SlowClient, Vitals
from kproxy.observe.table import TableView
from kproxy.proxy.admission import Admission
from kproxy.proxy.apis import Ranges
from kproxy.proxy.client_session import ClientOrigin, ClientSession
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.descriptors import Descriptors, in_use
from kproxy.routing.fleet import Fleet
from kproxy.routing.topology import Address
from kproxy.runtime.process import open_file_limit
from kproxy.runtime.sockets import accept_from, bind, bound_port
from kproxy.runtime.tasks import cancel, in_portions
from kproxy.security.events import NO_EVENTS, SecurityEvents
from kproxy.security.proxy_protocol import Source
from kproxy.security.reloading import Reloading
from kproxy.security.tls_acceptor import TlsAcceptor

log = structlog.get_logger(__name__)

DEADLINE_TICK_S = 0.1
NO_FLEETS: Mapping[str, Fleet] = MappingProxyType({})
NO_ADMISSIONS: Mapping[str, Admission] = MappingProxyType({})
# If a tick is later than this, in seconds, clients are not blamed for unfinished work.
LATE_S = 0.5
# Clients that keep the proxy waiting for so long are named, the slowest of them.
SLOW_S = 1.0
MOST_SLOW = 10


class Listener:
    """The client connections of one proxy."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # Why it does not serve yet, as a sentence, if known.
        self.waits_for = ""
        self._context: ProxyContext | None = None
        self._descriptors: Descriptors | None = None
        self._sessions: set[ClientSession] = set()
        self._inside: set[ClientSession] = set()
        self._adopting: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._leaving = False
        self._draining = False
        self._stopped = False
        self._follows_versions = True
        self._closing: set[asyncio.Task[None]] = set()
        self._fleets: Mapping[str, Fleet] = NO_FLEETS
        self._admissions: Mapping[str, Admission] = NO_ADMISSIONS
        self._servers: list[asyncio.Server] = []
        self._acceptors: list[tuple[TlsAcceptor[ClientSession], asyncio.Server]] = []
        self._ticker: asyncio.Task[None] | None = None

    @property
    def not_ready(self) -> str | None:
        """The reason why no clients are served; None if they are."""
        if self._draining:
            return "draining: what is in flight is being answered, new connections are not taken"
        if self._leaving:
            return "draining: clients are served for a little longer, new ones should go elsewhere"
        if self._context is None:
            return f"starting: {self.waits_for or 'the routing table is not loaded yet'}"
        return None

    async def readiness(self, view: TableView) -> Readiness:
        """Apply the table at the top of this module; `view` is the routing table."""
        problem = self.not_ready
        if problem is None and self._context is not None:
            problem = await self._context.brokers.problem()
        if problem is not None:
            return Readiness(ready=False, text=problem)
        if view.stale:
            return Readiness(ready=True, text="ready, degraded: the table is stale, the last known owners are used")
        return Readiness(ready=True, text="ready")

    async def vitals(self) -> Vitals:
        """The current values for the metrics, and the tally's sent bytes. Clients have their turns meanwhile."""
        acceptors = [acceptor for acceptor, _ in self._acceptors]
        of_process = Vitals(
            client_connections=self._client_count,
            limits=self._limits,
            draining=self._leaving or self._draining,
            certificates={
                ("listener", each.name): each.expires_at for each in acceptors if each.expires_at is not None
            },
            half_open_connections=sum(each.half_open for each in acceptors),
            half_open_limit=len(acceptors) * self._limits.max_half_open,
        )
        context = self._context
        if context is None:
            return of_process
        in_flight_requests = most_requests = most_bytes = 0
        requests, bytes_of, connections = Counter[int](), Counter[int](), Counter[int]()
        oldest_s: defaultdict[int, float] = defaultdict(float)
        slow: list[SlowClient] = []
        now = context.clock()
        async for session in self._in_portions(context):
            open_requests = session.open_requests
            in_flight_requests += open_requests
            most_requests = max(most_requests, open_requests)
            most_bytes = max(most_bytes, session.in_flight_bytes)
            session.tell_sent()
            slow_s, slow_at = session.slow(now)
            if slow_s >= SLOW_S:
                slow.append(SlowClient(slow_s, slow_at, session.client_id or "", session.principal, session.peer))
            connections.update(session.connected_brokers)
            for broker, count, size, age_s in session.unanswered(now):
                requests[broker] += count
                bytes_of[broker] += size
                oldest_s[broker] = max(oldest_s[broker], age_s)
        own = context.own
        return replace(
            of_process,
            upstream_connections=connections,
            in_flight_requests=in_flight_requests,
            in_flight_bytes=context.budget.held + context.answer_memory.held,
            most_requests=most_requests,
            most_bytes=most_bytes,
            slow=nlargest(MOST_SLOW, slow),
            paused_connections=len(context.budget.waiting),
            brokers={
                broker: replace(
                    vitals, in_flight=requests[broker], in_flight_bytes=bytes_of[broker], oldest_s=oldest_s[broker]
                )
                for broker, vitals in context.brokers.vitals().items()
            },
            own_claims=own.held_count if own is not None else 0,
            own_members=len(own.table.members) if own is not None else 0,
            own_unsettled=len(own.unsettled.places()) if own is not None else 0,
        )

    @property
    def context(self) -> ProxyContext | None:
        """What the sessions share; None until `serve`."""
        return self._context

    @property
    def _serving(self) -> ProxyContext:
        if self._context is None:
            raise RuntimeError("call serve first")
        return self._context

    async def tell_sent(self) -> None:
        """Have the tally count the bytes sent to clients by now."""
        if self._context is not None:
            async for session in self._in_portions(self._context):
                session.tell_sent()

    async def clients(self) -> AsyncIterator[ClientSession]:
        """The sessions of clients, in portions."""
        if self._context is not None:
            async for session in self._in_portions(self._context):
                if session not in self._inside:
                    yield session

    @property
    def _client_count(self) -> int:
        return len(self._sessions) - len(self._inside)

    async def bind(self, host: str, port: int, *, name: str = "", shared: bool = False, only_ipv6: bool = False) -> int:
        """Listen without accepting yet; return the real port.

        `shared`: other processes may listen there too. Raises StartupError.
        """
        server = await bind(lambda: self._session(name), host, port, shared=shared, only_ipv6=only_ipv6)
        self._servers.append(server)
        return bound_port(server)

    async def bind_for(
        self,
        config: ListenerConfig,
        tls: Reloading[Loaded] | None,
        *,
        counters: Counter[str],
        shared: bool = False,
        events: SecurityEvents = NO_EVENTS,
    ) -> int:
        """Like `bind`, for a configured listener; `tls` if it has TLS."""
        if config.is_plain:
            return await self.bind(*config.listen, name=config.name, shared=shared, only_ipv6=config.only_ipv6)
        server = await bind(asyncio.Protocol, *config.listen, shared=shared, only_ipv6=config.only_ipv6)
        acceptor = TlsAcceptor(
            config.name,
            None if tls is None else lambda: tls.current,
            proxy_protocol=config.proxy_protocol,
            proxy_senders=config.proxy_protocol_from,
            max_half_open=self._limits.max_half_open,
            refuses=self._refuses,
            session=lambda source: self._session_inside(config.name, source),
            welcome=self._welcome,
            counters=counters,
            events=events,
        )
        self._acceptors.append((acceptor, server))
        return bound_port(server)

    async def serve(
        self,
        context: ProxyContext,
        *,
        fleets: Mapping[str, Fleet] = NO_FLEETS,
        admissions: Mapping[str, Admission] = NO_ADMISSIONS,
        follows_versions: bool = True,
    ) -> None:
        """Accept connections, all of them on `context`.

        `fleets`: the proxies that answers name, by the name of the client's listener; by default those of the context.
        `admissions`: the requirements for clients, by the name of their listener; by default none.
        `follows_versions`: brokers are asked for their versions as soon as they appear, not only when a client asks.
        """
        if not self._servers and not self._acceptors:
            raise RuntimeError("call bind first")
        self._context = context
        self._fleets = fleets
        self._admissions = admissions
        self._descriptors = Descriptors(open_file_limit(), context.clock)
        self._follows_versions = follows_versions
        context.brokers.on_change = self._follow_ranges
        context.brokers.on_open = self._give_up_broker
        for server in self._servers:
            await accept_from(server)
        for acceptor, server in self._acceptors:
            acceptor.open(server)
        self._ticker = asyncio.get_running_loop().create_task(self._watch_deadlines(context))

    def change(self, limits: Limits, admissions: Mapping[str, Admission]) -> None:
        """Use other limits, and other requirements for new clients; have all follow the current rules."""
        self._limits = limits
        self._admissions = admissions
        for acceptor, _ in self._acceptors:
            acceptor.max_half_open = limits.max_half_open
        if self._context is not None:
            self._context.change(limits)
        # Soon, not only at the next tick.
        self._each(self._sessions, ClientSession.follow_rules, "follow new rules")

    @property
    def watching(self) -> asyncio.Task[None]:
        """The task that watches deadlines; it ends only by an error, after which nothing may be served."""
        if self._ticker is None:
            raise RuntimeError("call serve first")
        return self._ticker

    def connect_inside(self) -> socket.socket:
        """Connect this process to itself.

        The connection is served until `stop`. Raises OSError if nothing is served.
        """
        if self._context is None or self._stopped:
            raise ConnectionRefusedError("the proxy does not serve yet, or has stopped")
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._serve_inside(theirs))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)
        return ours

    async def _serve_inside(self, end: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._inside_session, end)
        except OSError as error:
            log.warning("internal connection failed", reason=str(error))
            end.close()

    def _inside_session(self) -> ClientSession:
        session = ClientSession(self._serving, self._session_closed)
        self._sessions.add(session)
        self._inside.add(session)
        return session

    def _session(self, listener: str) -> asyncio.BaseProtocol:
        if self._refuses():
            return _Refusal()
        return self._admit(self._origin(listener))

    def _origin(self, listener: str, source: Source | None = None) -> ClientOrigin:
        fleet = self._fleets.get(listener, self._serving.fleet)
        return ClientOrigin(fleet, source, self._admissions.get(listener))

    def _session_inside(self, listener: str, source: Source | None) -> ClientSession | None:
        """The session of an accepted client; None if the limit was reached meanwhile."""
        if self._client_count >= self._limits.max_connections and self._refuses():
            return None
        return self._admit(self._origin(listener, source))

    def _refuses(self) -> bool:
        """Whether one more client is over a limit; logs and counts it."""
        if self._context is None:
            return True
        if self._client_count >= self._limits.max_connections:
            reason: dict[str, object] = {
                "reason": "limits.max_connections is reached",
                "limit": self._limits.max_connections,
            }
        elif not self._has_descriptors(self._context):
            text = "too few open files are allowed (ulimit -Hn, LimitNOFILE= of systemd)"
            reason = {"reason": text, "limit": open_file_limit(), "clients": self._client_count}
        else:
            return False
        log.warning("client connection refused", **reason)
        self._context.counters["clients.too_many"] += 1
        return True

    def _admit(self, origin: ClientOrigin) -> ClientSession:
        """The session of a client that is admitted."""
        context = self._serving
        context.counters["clients.accepted"] += 1
        session = ClientSession(context, self._session_closed, origin)
        self._sessions.add(session)
        self._empty.clear()
        return session

    def _welcome(self, session: ClientSession) -> None:
        """Drain a session that was accepted while the listener closed."""
        if self._draining:
            session.drain()

    def _has_descriptors(self, context: ProxyContext) -> bool:
        """Whether one more client leaves enough descriptors for connections to brokers."""
        if self._descriptors is None or self._descriptors.limit is None:
            return True
        used = in_use(self._descriptor())
        return used is not None and self._descriptors.admit(used, self._client_count, len(context.topology.brokers))

    def _descriptor(self) -> int:
        """An open descriptor."""
        if self._servers:
            return int(self._servers[0].sockets[0].fileno())
        return self._acceptors[0][0].descriptor

    def _session_closed(self, session: ClientSession) -> None:
        self._serving.turns.take(partial(self._begin_close, session))

    def _begin_close(self, session: ClientSession) -> None:
        task = asyncio.get_running_loop().create_task(self._close(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, session: ClientSession) -> None:
        try:
            await session.close()
            session.take_apart()
        finally:
            self._sessions.discard(session)
            self._inside.discard(session)
            if not self._client_count:
                self._empty.set()

    def _follow_ranges(self, ranges: Ranges) -> None:
        """Report a change of the offered versions to all sessions."""
        self._each(self._sessions, lambda session: session.follow_ranges(ranges), "follow new API versions")

    def _give_up_broker(self, address: Address) -> None:
        """Stop all clients' waiting for a broker that hangs."""
        self._each(self._sessions, lambda session: session.give_up_broker(address), "give up a hung broker")

    def _each(self, sessions: Set[ClientSession], step: Callable[[ClientSession], None], name: str) -> None:
        """Run a step of these sessions, each in its turn of the event loop; `name` is for the log."""
        if self._context is None:
            return

        def take(session: ClientSession) -> None:
            if session not in self._sessions:
                return
            try:
                step(session)
            except Exception:  # the boundary: an error in one session must not affect the others
                log.exception("client connection failed", client=session.peer, step=name)
                session.abandon()

        for session in tuple(sessions):
            self._context.turns.take(partial(take, session))

    async def _in_portions(self, context: ProxyContext) -> AsyncIterator[ClientSession]:
        """The sessions, without those that ended meanwhile."""
        async for session in in_portions(list(self._sessions), context.clock):
            if session in self._sessions:
                yield session

    async def _watch_deadlines(self, context: ProxyContext) -> None:
        while True:
            due = context.clock() + DEADLINE_TICK_S
            await asyncio.sleep(DEADLINE_TICK_S)
            try:
                if self._follows_versions:
                    context.brokers.look()
                else:
                    context.brokers.follow()
            except Exception:  # the boundary: deadlines are watched whatever happens here
                log.exception("broker API versions not followed")
            now = context.clock()
            context.answer_memory.wake()
            context.tally.delays.count(max(0.0, now - due))
            async for session in self._in_portions(context):
                try:
                    session.expire(now, is_late=now - due > LATE_S)
                except Exception:  # the boundary: an error in one session must not stop the deadlines of others
                    log.exception("client deadlines not checked")
                    session.abandon()

    def leave(self) -> None:
        """Report that clients should leave, and continue to serve."""
        self._leaving = True

    async def linger(self, insists: asyncio.Event) -> None:
        """Continue to serve for `drain_delay`, or until `insists` is set."""
        if self._limits.drain_delay:
            log.info("drain delayed", seconds=self._limits.drain_delay)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.drain_delay):
                    await insists.wait()

    async def drain(self) -> None:
        """Answer the requests that clients have sent, and close their connections."""
        self._draining = True
        for server in self._servers:
            server.close()
        for acceptor, bound in self._acceptors:
            bound.close()
            await acceptor.close()
        self._each(self._sessions - self._inside, ClientSession.drain, "drain")
        if self._client_count:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.drain_s):
                    await self._empty.wait()
        await self._abandon(self._sessions - self._inside)

    async def _abandon(self, sessions: Set[ClientSession]) -> None:
        if self._context is not None:
            self._each(sessions, ClientSession.abandon, "stop")
            await self._context.turns.all_taken()

    async def stop(self) -> None:
        """Drain, and close everything."""
        if not self._draining:
            await self.drain()
        self._stopped = True
        if self._ticker is not None:
            await cancel(self._ticker)
        await asyncio.gather(*self._adopting)
        await self._abandon(self._sessions)
        await asyncio.gather(*self._closing)
        if self._context is not None:
            await self._context.brokers.close()


class _Refusal(asyncio.Protocol):
    """A connection over the limit: closed before a byte is read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()

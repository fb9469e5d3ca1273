"""The listener: admit client connections, watch their deadlines, drain and stop.

States
  starting   the listener is bound and the lease table loaded, in this order, so that a taken port is said at once
  serving    `ready` has been printed
  draining   no new connections; every open one answers what it has read, for at most `drain_s`
  stopped

Invariants
1. Every session is in `_sessions` until its `close` has been awaited; nothing is left running when `run` returns.
2. A listener admits at most `max_connections`; one more is closed at once, with a line in the log.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from kproxy.config import Limits
from kproxy.observe.metrics import Vitals
from kproxy.proxy.client_session import ClientSession
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.port import accept_from, bind
from kproxy.proxy.versions import Ranges
from kproxy.routing.topology import Address

log = structlog.get_logger(__name__)

DEADLINE_TICK_S = 0.1
# So much after its time a tick finds work undone that is not the clients' fault.
LATE_S = 0.5


class Listener:
    """The client connections of one proxy."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # What keeps it from serving, as a sentence, where that is known.
        self.waits_for = ""
        self._context: ProxyContext | None = None
        self._sessions: set[ClientSession] = set()
        self._empty = asyncio.Event()
        self._draining = False
        self._follows_versions = True
        self._closing: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None

    @property
    def not_ready(self) -> str | None:
        """Why no clients are served; None where they are."""
        if self._draining:
            return "draining: what is in flight is being answered, new connections are not taken"
        if self._context is None:
            return f"starting: {self.waits_for or 'the routing table is not loaded yet'}"
        return None

    @property
    def vitals(self) -> Vitals:
        """What holds at this moment, for the metrics."""
        in_flight_requests = upstream_connections = sent_bytes = 0
        for session in self._sessions:
            in_flight_requests += session.open_requests
            upstream_connections += session.upstream_count
            sent_bytes += session.sent_bytes
        own = self._context.own if self._context is not None else None
        return Vitals(
            client_connections=len(self._sessions),
            upstream_connections=upstream_connections,
            in_flight_requests=in_flight_requests,
            in_flight_bytes=self._context.budget.held if self._context is not None else 0,
            paused_connections=len(self._context.budget.waiting) if self._context is not None else 0,
            sent_bytes=sent_bytes,
            hung_brokers=self._context.breakers.open_count if self._context is not None else 0,
            draining=self._draining,
            own_claims=own.held_count if own is not None else 0,
            own_members=len(own.table.members) if own is not None else 0,
            own_unsettled=len(own.settlement.unsettled()) if own is not None else 0,
        )

    async def bind(self, host: str, port: int, *, shared: bool = False) -> int:
        """Listen, without accepting anything yet; the real port. `shared`: other processes may listen there as well.

        Raises StartupError.
        """
        self._server = await bind(self._session, host, port, shared=shared)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def serve(self, context: ProxyContext, *, follows_versions: bool = True) -> None:
        """Accept connections, all of them on `context`.

        `follows_versions`: brokers are asked what they serve as soon as they are known, not only when a client asks.
        """
        if self._server is None:
            raise RuntimeError("bind comes first")
        self._context = context
        self._follows_versions = follows_versions
        context.versions.on_change = self._follow_ranges
        context.breakers.on_open = self._give_up_broker
        await accept_from(self._server)
        self._ticker = asyncio.get_running_loop().create_task(self._watch_deadlines(context))

    def _session(self) -> asyncio.BaseProtocol:
        if self._context is None or len(self._sessions) >= self._limits.max_connections:
            log.warning("connection refused: too many", limit=self._limits.max_connections)
            if self._context is not None:
                self._context.counters["clients.too_many"] += 1
            return _Refusal()
        self._context.counters["clients.accepted"] += 1
        session = ClientSession(self._context, self._session_closed)
        self._sessions.add(session)
        self._empty.clear()
        return session

    def _session_closed(self, session: ClientSession) -> None:
        task = asyncio.get_running_loop().create_task(self._close(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, session: ClientSession) -> None:
        try:
            await session.close()
        finally:
            self._sessions.discard(session)
            if not self._sessions:
                self._empty.set()

    def _follow_ranges(self, ranges: Ranges) -> None:
        """Other versions are offered now."""
        for session in list(self._sessions):
            try:
                session.follow_ranges(ranges)
            except Exception:  # the boundary: one session's trouble must not keep the others at what was offered before
                log.exception("a client connection could not follow what is offered")
                session.abandon()

    def _give_up_broker(self, address: Address) -> None:
        """A broker hangs: no client connection waits for it any longer."""
        for session in list(self._sessions):
            try:
                session.give_up_broker(address)
            except Exception:  # the boundary: one session's trouble must not keep the others waiting
                log.exception("a broker that hangs could not be given up")
                session.abandon()

    async def _watch_deadlines(self, context: ProxyContext) -> None:
        while True:
            due = context.clock() + DEADLINE_TICK_S
            await asyncio.sleep(DEADLINE_TICK_S)
            if self._follows_versions:
                try:
                    context.versions.look()
                except Exception:  # the boundary: deadlines are watched whatever becomes of this
                    log.exception("what the brokers serve could not be followed")
            now = context.clock()
            context.tally.delayed(max(0.0, now - due))
            for session in list(self._sessions):
                try:
                    session.expire(now, is_late=now - due > LATE_S)
                except Exception:  # the boundary: one session's trouble must not stop the others' clock
                    log.exception("deadlines of a client connection could not be watched")
                    session.abandon()

    async def stop(self) -> None:
        """Drain: answer what has been read, then close everything."""
        self._draining = True
        if self._server is not None:
            self._server.close()
        for session in list(self._sessions):
            session.drain()
        if self._sessions:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.drain_s):
                    await self._empty.wait()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        for session in list(self._sessions):
            session.abandon()
        await asyncio.gather(*self._closing)
        if self._context is not None:
            await self._context.versions.close()
            await self._context.breakers.close()


class _Refusal(asyncio.Protocol):
    """A connection over the limit: closed before a byte is read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()

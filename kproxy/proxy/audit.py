"""Keep the audit trail of a serving process from its first client to its last, and ship it to its sink."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from random import Random

import structlog

from kproxy.config import AuditOptions, ProxyConfig
from kproxy.runtime.tasks import cancel
from kproxy.security.broker_auth import BrokerAuth
from kproxy.security.reloading import Reloads
from kproxy.trail.overlaps import Overlap
from kproxy.trail.shipper import Shipper, ShipperVitals
from kproxy.trail.sink import make_sink
from kproxy.trail.trail import Trail

# How long the rest of the audit trail may take to ship at the end, in seconds.
SHIP_REST_S = 5.0

log = structlog.get_logger(__name__)


class Audit:
    """The audit trail of this process while it serves, under the name `proxy`.

    `keep` begins the trail before the first client is served and ends it when the last one is gone. `ship` is called
    once the proxy serves, as the trail may pass through the proxy itself, which `dial` connects to. The rest is shipped
    at the end. `access` makes the access to another cluster, whose files `reloads` follows. An offset that is
    assigned twice is logged and counted. Raises StartupError for a sink that cannot be used.
    """

    def __init__(
        self,
        config: ProxyConfig,
        proxy: str,
        counters: Counter[str],
        random: Random,
        dial: Callable[[], socket.socket],
        access: Callable[[AuditOptions], BrokerAuth],
        reloads: Reloads,
    ) -> None:
        self._counters = counters
        self._random = random
        self._dial = dial
        self._make_access = access
        self._reloads = reloads
        self._options = options = config.audit
        incarnation = secrets.token_hex(8)
        self._shipper, self._access = self._make(options, incarnation)
        reloads.replace(None, self._access.tls)
        # Tasks that ship the last rows of earlier sinks.
        self._ending: set[asyncio.Task[None]] = set()
        self.trail = Trail(
            proxy,
            incarnation,
            clock=time.monotonic,
            wall_ms=_wall_ms,
            deadline_cap_ms=config.limits.deadline_cap_ms,
            interval_s=options.interval_s,
            offer=self._shipper.offer if self._shipper is not None else None,
            key=options.key,
            left_out={options.topic.encode()},
            on_overlap=self._count,
        )

    def _make(self, options: AuditOptions, incarnation: str) -> tuple[Shipper | None, BrokerAuth]:
        access = self._make_access(options)
        sink = make_sink(options, incarnation, _wall_ms(), self._dial, access)
        if sink is None:
            return None, access
        shipper = Shipper(
            sink, max_bytes=options.max_bytes, counters=self._counters, clock=time.monotonic, random=self._random
        )
        return shipper, access

    def prepare(self, config: ProxyConfig) -> Callable[[], None]:
        """Make the sink if it has changed; return a function that continues with it, in a new trail.

        Call both while the trail is kept and shipped; `prepare` may run on any thread. Raises StartupError.
        """
        options, incarnation = config.audit, secrets.token_hex(8)
        if options == self._options:
            return lambda: None
        shipper, access = self._make(options, incarnation)

        def go_on() -> None:
            self.trail.go_on_as(
                incarnation,
                interval_s=options.interval_s,
                offer=shipper.offer if shipper is not None else None,
                key=options.key,
                left_out={options.topic.encode()},
            )
            if self._shipper is not None:
                ending = asyncio.get_running_loop().create_task(self._shipper.close(SHIP_REST_S))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            self._reloads.replace(self._access.tls, access.tls)
            self._options, self._shipper, self._access = options, shipper, access
            self.ship()

        return go_on

    @property
    def shipping(self) -> ShipperVitals | None:
        """The state of the shipping; None without a sink."""
        return self._shipper.vitals if self._shipper is not None else None

    @property
    def expires_at(self) -> float | None:
        """When the certificate towards the other cluster ends; None without one."""
        return self._access.expires_at

    def _count(self, overlap: Overlap) -> None:
        self._counters["audit.overlaps"] += 1
        self._counters["audit.overlapping_records"] += overlap.last_offset - overlap.first_offset + 1

    @contextlib.asynccontextmanager
    async def keep(self) -> AsyncIterator[None]:
        """Run the trail; then end it, and ship as much as its sink accepts."""
        if self._shipper is not None:
            self.trail.begin()
        looking = asyncio.create_task(self.trail.keep_looking())
        try:
            yield
        finally:
            await cancel(looking)
            try:
                self.trail.end()
            except Exception:  # the boundary: its rows are shipped, and their missing end shows the failure
                log.exception("audit trail not closed")
            if self._shipper is not None:
                await self._shipper.close(SHIP_REST_S)
            await asyncio.gather(*self._ending)

    def ship(self) -> None:
        """Begin to ship; call it once the proxy serves."""
        if self._shipper is not None:
            self._shipper.start()


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000

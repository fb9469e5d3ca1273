"""The trail of this process while it serves: looked after several times a second, shipped, and ended in order.

Order: `keep` begins the trail before the first client is served and ends it when the last one is gone; `ship` comes
once the proxy serves, as the trail may go out through the proxy itself. What is left of it when it ends is shipped
then, for SHIP_REST_S at most.
"""

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

from kproxy.config import ProxyConfig
from kproxy.runtime.tasks import cancel
from kproxy.trail.overlaps import Overlap
from kproxy.trail.shipper import Shipper, ShipperVitals
from kproxy.trail.sink import make_sink
from kproxy.trail.trail import Trail

SHIP_REST_S = 5.0

log = structlog.get_logger(__name__)


class Audit:
    """A trail under the name of `proxy`: an offset that is given out twice is told and counted.

    `dial` connects to this proxy itself, from any thread. Raises StartupError where the sink cannot be used.
    """

    def __init__(
        self,
        config: ProxyConfig,
        proxy: str,
        counters: Counter[str],
        random: Random,
        dial: Callable[[], socket.socket],
    ) -> None:
        options, incarnation = config.audit, secrets.token_hex(8)
        self._counters = counters
        self._shipper: Shipper | None = None
        sink = make_sink(options, incarnation, _wall_ms(), dial)
        if sink is not None:
            self._shipper = Shipper(
                sink, max_bytes=options.max_bytes, counters=counters, clock=time.monotonic, random=random
            )
        self.trail = Trail(
            proxy,
            incarnation,
            clock=time.monotonic,
            wall_ms=_wall_ms,
            deadline_cap_ms=config.limits.deadline_cap_ms,
            interval_s=options.interval_s,
            offer=self._shipper.offer if self._shipper is not None else None,
            left_out={options.topic.encode()},
            on_overlap=self._count,
        )

    @property
    def shipping(self) -> ShipperVitals | None:
        """How the shipping does; None where nothing is shipped."""
        return self._shipper.vitals if self._shipper is not None else None

    def _count(self, overlap: Overlap) -> None:
        self._counters["audit.overlaps"] += 1
        self._counters["audit.overlapping_records"] += overlap.last_offset - overlap.first_offset + 1

    @contextlib.asynccontextmanager
    async def keep(self) -> AsyncIterator[None]:
        """The trail runs within; behind, it is ended, and shipped as far as its sink takes it."""
        if self._shipper is not None:
            self.trail.begin()
        looking = asyncio.create_task(self.trail.keep_looking())
        try:
            yield
        finally:
            await cancel(looking)
            try:
                self.trail.end()
            except Exception:  # the boundary: what there is of it goes out, and that it has no end tells of this
                log.exception("the audit trail could not be ended")
            if self._shipper is not None:
                await self._shipper.close(SHIP_REST_S)

    def ship(self) -> None:
        """The proxy serves: what it serves may be asked of it."""
        if self._shipper is not None:
            self._shipper.start()


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000

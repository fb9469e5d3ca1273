"""The trail of this process while it serves: looked after several times a second, and ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator

from kproxy.config import ProxyConfig
from kproxy.observe.audit.given_out import Overlap
from kproxy.observe.audit.trail import Trail
from kproxy.proxy.tasks import cancel

INTERVAL_S = 5.0


@contextlib.asynccontextmanager
async def open_trail(config: ProxyConfig, proxy: str, counters: Counter[str]) -> AsyncIterator[Trail]:
    """Keep a trail under the name of `proxy`: an offset that is given out twice is told and counted."""

    def count(overlap: Overlap) -> None:
        counters["audit.overlaps"] += 1
        counters["audit.overlapping_records"] += overlap.last_offset - overlap.first_offset + 1

    trail = Trail(
        proxy,
        secrets.token_hex(8),
        clock=time.monotonic,
        wall_ms=lambda: time.time_ns() // 1_000_000,
        deadline_cap_ms=config.limits.deadline_cap_ms,
        interval_s=INTERVAL_S,
        on_overlap=count,
    )
    looking = asyncio.create_task(trail.keep_looking())
    try:
        yield trail
    finally:
        await cancel(looking)
        trail.end()

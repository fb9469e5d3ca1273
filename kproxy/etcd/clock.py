"""The clock that leases are measured on, in seconds; it counts suspend where the system can tell."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]

if hasattr(time, "CLOCK_BOOTTIME"):

    def lease_clock() -> float:
        """Seconds since boot, suspend included (Linux)."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def lease_clock() -> float:
        """Seconds on the monotonic clock; whether it counts suspend is the system's affair."""
        return time.monotonic()

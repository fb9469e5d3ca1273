"""What several worker processes share."""

from __future__ import annotations

import os

import msgspec

from kproxy.config.limits import Limits
from kproxy.errors import StartupError

MAX_WORKERS = 256
# The bounds that hold for all client connections together.
SHARED_LIMITS = ("max_connections", "max_in_flight_bytes_total")


def worker_count(wanted: int) -> int:
    """As many as wanted; 0: one for each CPU that this process may run on."""
    if wanted:
        return wanted
    # macOS does not say which CPUs a process may use.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MAX_WORKERS)


def share_limits(limits: Limits, workers: int) -> tuple[Limits, ...]:
    """The limits of each worker, so that what all of them hold together is within `limits`. Raises StartupError."""
    for name in SHARED_LIMITS:
        if getattr(limits, name) < workers:
            raise StartupError(
                f"limits.{name} is {getattr(limits, name)}, which {workers} workers cannot share: raise it, or give "
                f"fewer --workers."
            )
    return tuple(
        msgspec.structs.replace(
            limits, **{name: _share(getattr(limits, name), number, workers) for name in SHARED_LIMITS}
        )
        for number in range(workers)
    )


def _share(total: int, number: int, workers: int) -> int:
    return total // workers + (number < total % workers)

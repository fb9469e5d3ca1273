"""The limit of open files (descriptors) of this process: each connection is one, and each segment of a broker's log.

Processes that this one starts inherit the limit.
"""

from __future__ import annotations

import contextlib
import sys

if sys.platform != "win32":
    import resource

# The highest limit asked for: some programs close every possible descriptor when they start another program.
MOST = 1 << 20
# macOS calls its hard limit infinite, and accepts no soft limit above about OPEN_MAX.
OPEN_MAX = 10_240


def raise_limit() -> int | None:
    """Raise the soft limit to the hard one; the one in force then, None where the system has no such limit."""
    if sys.platform == "win32":
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (MOST if hard == resource.RLIM_INFINITY else min(hard, MOST), OPEN_MAX):
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            break
        # The system may refuse less than its hard limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
    return limit()


def limit() -> int | None:
    """The soft limit; None where there is none."""
    if sys.platform == "win32":
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft

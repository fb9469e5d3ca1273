"""Admit clients within the limit of open files (descriptors).

A process that admits clients until no descriptor is left cannot dial brokers for them, and would report healthy brokers
as unreachable. So part of the limit is reserved for connections to brokers. A client that connected in the last seconds
counts with the connections that it may still need; an older client has opened them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

# This fraction of the limit (1/8) stays free when new clients are refused; the process itself has about 20 descriptors.
RESERVED_PART = 8
# A client counts as new for this time at least, and for twice this time at most, in seconds.
NEW_S = 5.0
# Connections that a client may need: for records, to this many brokers (few clients use more); one for other requests.
MOST_BROKERS = 3
CONTROL = 1


class Descriptors:
    """Admission under a `limit` of open files; None for no limit."""

    def __init__(self, limit: int | None, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        self._since = clock()
        self._new = 0
        self._newer = 0

    def admit(self, in_use: int, clients: int, brokers: int) -> bool:
        """Whether one more client is admitted besides `clients`, with `brokers` to dial; `in_use` includes its own."""
        if self.limit is None:
            return True
        now = self._clock()
        if now - self._since >= NEW_S:
            self._new = self._newer if now - self._since < 2 * NEW_S else 0
            self._newer, self._since = 0, now
        still_to_come = (min(self._new + self._newer, clients) + 1) * (min(brokers, MOST_BROKERS) + CONTROL)
        if in_use + still_to_come > self.limit - self.limit // RESERVED_PART:
            return False
        self._newer += 1
        return True


def wanted(max_connections: int) -> int:
    """The limit that suffices for `max_connections` clients with one connection to a broker each."""
    return 2 * max_connections * RESERVED_PART // (RESERVED_PART - 1)


def most_clients(limit: int) -> int:
    """The number of clients that a limit suffices for: the inverse of `wanted`."""
    return limit * (RESERVED_PART - 1) // (2 * RESERVED_PART)


def in_use(descriptor: int) -> int | None:
    """A lower bound of the descriptors in use: the lowest free one, None if none is free; pass any open descriptor."""
    try:
        lowest = os.dup(descriptor)
    except OSError:
        return None
    os.close(lowest)
    return lowest

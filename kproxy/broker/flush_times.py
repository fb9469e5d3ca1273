"""How long the disk takes to bring home what was appended: one count for each process, whichever thread flushes."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FLUSH_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram's buckets, in seconds, inclusive; one more bucket has no bound."""


class FlushTimes:
    """Flushes by how long they took; those that failed count as well."""

    def __init__(self) -> None:
        self._adding = threading.Lock()
        self.buckets = [0] * (len(FLUSH_BOUNDS_S) + 1)
        self.seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what is done within."""
        began = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - began
            with self._adding:
                self.buckets[bisect_left(FLUSH_BOUNDS_S, took_s)] += 1
                self.seconds += took_s


FLUSHES: Final = FlushTimes()
"""Those of this process."""

"""What a log's producers were some way back, so that truncating it need not read it from the beginning.

Every so many bytes the states are copied, and the last few copies kept: what is truncated is the end of a log, and most
often a short one. The more producers there are, the rarer, or copying would cost more than appending.
"""

from __future__ import annotations

from kproxy.broker.producer_state import ProducerStates

EVERY_BYTES = 8 << 20
BYTES_FOR_EACH_PRODUCER = 1 << 10
KEPT = 2


class ProducerHistory:
    """At most KEPT copies, by the offset that they stand before."""

    def __init__(self) -> None:
        self._before: dict[int, ProducerStates] = {}
        self._bytes_since = 0

    def passes(self, offset: int, size_in_bytes: int, producers: ProducerStates) -> None:
        """A batch of that size comes to stand at `offset`, and `producers` are what they are before it."""
        self._bytes_since += size_in_bytes
        if self._bytes_since >= EVERY_BYTES + len(producers) * BYTES_FOR_EACH_PRODUCER:
            self._bytes_since = 0
            self._before[offset] = producers.copy()
            if len(self._before) > KEPT:
                del self._before[min(self._before)]

    def go_back(self, log_end_offset: int, log_start_offset: int) -> tuple[int, ProducerStates]:
        """The log ends there now. From what offset on its batches have to be read, and into what states."""
        self._before = {offset: states for offset, states in self._before.items() if offset <= log_end_offset}
        self._bytes_since = 0
        if not self._before:
            return log_start_offset, ProducerStates()
        latest = max(self._before)
        return latest, self._before[latest].copy()

    def clear(self) -> None:
        self._before.clear()
        self._bytes_since = 0

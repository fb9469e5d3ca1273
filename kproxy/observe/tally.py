"""What is counted while requests are served: plain numbers, one `Tally` for each process.

The path of a request only adds to integers and lists here; names and families are made when somebody asks for
`/metrics` (kproxy.observe.metrics). What is rare and has a name of its own is in the `counters` beside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Final

PRODUCE_BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
"""Upper bounds of the latency histogram's buckets, in seconds, inclusive; one more bucket has no bound."""
DELAY_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""The same for how late this process gets to what is due: the proxy's own share of a latency."""
MAX_DROP_TOPICS: Final = 100
OTHER_TOPICS: Final = b"other"
VERSION_BITS: Final = 8
OTHER_VERSION: Final = (1 << VERSION_BITS) - 1
"""In the place of a version that is not offered: what clients may invent must not become a label."""


class Tally:
    """Counts since the process began."""

    __slots__ = (
        "delay_buckets",
        "delay_seconds",
        "drops",
        "errors",
        "produce_buckets",
        "produce_seconds",
        "received_bytes",
        "requests",
        "sent_bytes",
    )

    def __init__(self) -> None:
        # By api_key << VERSION_BITS | api_version.
        self.requests: Counter[int] = Counter()
        # By (api_key, error_code): partitions that were answered with it.
        self.errors: Counter[tuple[int, int]] = Counter()
        # On client connections; those of open ones are with their sessions.
        self.received_bytes = 0
        self.sent_bytes = 0
        self.produce_buckets = [0] * (len(PRODUCE_BOUNDS_S) + 1)
        self.produce_seconds = 0.0
        self.delay_buckets = [0] * (len(DELAY_BOUNDS_S) + 1)
        self.delay_seconds = 0.0
        # By topic and error_code: acks=0 batches that were lost.
        self.drops: dict[bytes, Counter[int]] = {}

    def delayed(self, seconds: float) -> None:
        """What was due came so late."""
        self.delay_buckets[bisect_left(DELAY_BOUNDS_S, seconds)] += 1
        self.delay_seconds += seconds

    def drop(self, topic: bytes, error_code: int) -> None:
        """An acks=0 batch is lost. Beyond MAX_DROP_TOPICS topics all others are one: clients choose the names."""
        if topic not in self.drops and len(self.drops) >= MAX_DROP_TOPICS:
            topic = OTHER_TOPICS
        self.drops.setdefault(topic, Counter())[error_code] += 1

"""Counts of served requests: plain numbers, one `Tally` per process.

The path of a request only adds to integers and lists here; `kproxy.observe.metrics` makes names and families when
`/metrics` is requested. Rare events are counted by name in a separate `counters`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kproxy.plain import compiled
from kproxy.routing.topology import NO_OWNER

PRODUCE_BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
"""Upper bounds of the latency histogram's buckets, in seconds, inclusive; one more bucket has no bound."""
DELAY_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""The same for the delay of the event loop: the proxy's own share of a latency."""
MAX_DROP_TOPICS: Final = 100
MAX_TOPIC_BYTES: Final = 249
"""The longest name of a topic in Kafka. Longer names cost the readers of `/metrics` much time."""
OTHER_TOPICS: Final = b"other"
MAX_BROKERS: Final = 1_000
OTHER_BROKERS: Final = -2
"""Stands for the id of any broker beyond MAX_BROKERS, as NO_OWNER stands for no broker."""
VERSION_BITS: Final = 8
OTHER_VERSION: Final = (1 << VERSION_BITS) - 1
"""Stands for any version that is not offered, as clients must not create labels."""


class ProduceCounts:
    """The counts to which every produce request adds; the compiled plain path has a twin of this class.

    `requests` by api_key << key_shift | api_version. `bounds` are those of the latency histogram.
    """

    __slots__ = (
        "_bounds",
        "plain_requests",
        "produce_buckets",
        "produce_seconds",
        "received_bytes",
        "requests",
        "sent_bytes",
    )

    def __init__(self, requests: Counter[int], key_shift: int, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.requests = requests
        # On client connections that have ended; sessions count the bytes of open ones.
        self.received_bytes = 0
        self.sent_bytes = 0
        # Requests sent on the plain path.
        self.plain_requests = 0
        self.produce_buckets = [0] * (len(bounds) + 1)
        self.produce_seconds = 0.0

    def answered(self, elapsed: float) -> None:
        """Count the time to the answer of a produce request, in seconds."""
        self.produce_seconds += elapsed
        self.produce_buckets[bisect_left(self._bounds, elapsed)] += 1


if not TYPE_CHECKING and compiled is not None:
    ProduceCounts = compiled.ProduceCounts


class Tally(ProduceCounts):
    """Counts since the process began."""

    __slots__ = (
        "_brokers",
        "delay_buckets",
        "delay_seconds",
        "drops",
        "errors",
        "hangs",
        "probe_seconds",
        "probes",
        "retries",
        "unconfirmed",
    )

    def __init__(self) -> None:
        super().__init__(Counter(), VERSION_BITS, PRODUCE_BOUNDS_S)
        # By (api_key, error_code, broker): partitions that were answered with that error.
        self.errors: Counter[tuple[int, int, int]] = Counter()
        # By (event of kproxy.routing.retry, broker): partitions to be sent again.
        self.retries: Counter[tuple[int, int]] = Counter()
        # By broker: the times it was found to hang; the probes that were answered or given up, and their durations.
        self.hangs: Counter[int] = Counter()
        self.probes: Counter[int] = Counter()
        self.probe_seconds: dict[int, float] = {}
        self._brokers: set[int] = set()
        self.delay_buckets = [0] * (len(DELAY_BOUNDS_S) + 1)
        self.delay_seconds = 0.0
        # By topic and error_code: acks=0 batches that were lost.
        self.drops: dict[bytes, Counter[int]] = {}
        # By topic: acks=0 batches that had left when a broker's connection ended.
        self.unconfirmed: Counter[bytes] = Counter()

    def delayed(self, seconds: float) -> None:
        """Count a delay of the event loop."""
        self.delay_buckets[bisect_left(DELAY_BOUNDS_S, seconds)] += 1
        self.delay_seconds += seconds

    def error(self, api_key: int, error_code: int, broker: int = NO_OWNER, partitions: int = 1) -> None:
        """Count partitions answered with an error.

        They were last sent to `broker`.
        """
        self.errors[api_key, error_code, self._counted(broker)] += partitions

    def retry(self, event: int, broker: int) -> None:
        """Count a partition to be sent again after an attempt at `broker`."""
        self.retries[event, self._counted(broker)] += 1

    def hang(self, broker: int) -> None:
        """Count a broker that was found to hang."""
        self.hangs[self._counted(broker)] += 1

    def probe(self, broker: int, seconds: float) -> None:
        """Count a probe, with the time to its answer or until it was given up."""
        broker = self._counted(broker)
        self.probes[broker] += 1
        self.probe_seconds[broker] = self.probe_seconds.get(broker, 0.0) + seconds

    def _counted(self, broker: int) -> int:
        """Return the broker or, beyond MAX_BROKERS ids, OTHER_BROKERS, since ids may change without end."""
        if broker not in self._brokers and broker != NO_OWNER:
            if len(self._brokers) >= MAX_BROKERS:
                return OTHER_BROKERS
            self._brokers.add(broker)
        return broker

    def drop(self, topic: bytes, error_code: int) -> None:
        """Count a lost acks=0 batch.

        Topics beyond MAX_DROP_TOPICS count as one, and so do invalid names, because clients choose the names.
        """
        if len(topic) > MAX_TOPIC_BYTES or (topic not in self.drops and len(self.drops) >= MAX_DROP_TOPICS):
            topic = OTHER_TOPICS
        self.drops.setdefault(topic, Counter())[error_code] += 1

    def leave_unconfirmed(self, topic: bytes, batches: int) -> None:
        """Count acks=0 batches that may have been appended or not.

        The number of topics is bounded as in `drop`; each of them has an owner.
        """
        if topic not in self.unconfirmed and len(self.unconfirmed) >= MAX_DROP_TOPICS:
            topic = OTHER_TOPICS
        self.unconfirmed[topic] += batches

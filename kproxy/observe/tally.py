"""Count served requests in plain numbers, in one `Tally` per process.

To serve a request only adds to fields and arrays here; `kproxy.observe.metrics` makes names and families when
`/metrics` is requested. Rare events are counted by name in a separate `counters`.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from ctypes import Array, Structure, c_int64
from itertools import chain
from math import inf
from typing import Final, Protocol

from kproxy.config.metrics import NOTHING_NAMED, MetricsSection
from kproxy.observe.busiest import Busiest
from kproxy.routing.topology import NO_OWNER, OTHER_TOPICS
from kproxy_codec.api_keys import FETCH, PRODUCE
from kproxy_codec.produce import MAX_VERSION

PRODUCE_BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
"""Upper bounds of the latency histogram's buckets, in seconds, inclusive; one more bucket has no bound."""
BROKER_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""The same for the time that one broker takes; there are as many of these as brokers."""
DELAY_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""The same for the delay of the event loop, which the proxy itself adds to a latency."""
BROKER_ERRORS: Final = ("access", "closed", "cut_off", "invalid", "refused", "timeout", "unreachable")
"""Kinds of errors of the connections to a broker.

In this order: the broker refuses an identity or TLS, it ends a connection with unanswered requests, no packet arrives,
its answer is invalid, it refuses a dial, it answers a dial or a request too late, a dial fails for another reason.
"""
STAGES: Final = ("reading", "queue", "broker", "order", "writing")
"""The stages of a produce request: attributes of Tally."""
MAX_DROP_TOPICS: Final = 100
MAX_TOPIC_BYTES: Final = 249
"""The longest name of a topic in Kafka. Longer names cost the readers of `/metrics` much time."""
MAX_BROKERS: Final = 1_000
OTHER_BROKERS: Final = -2
"""Stands for the id of any broker beyond MAX_BROKERS, as NO_OWNER stands for no broker."""
VERSION_BITS: Final = 8
OTHER_VERSION: Final = (1 << VERSION_BITS) - 1
"""Stands for any version that is not offered, as clients must not create labels."""


class Durations:
    """A histogram of seconds. `buckets` are not cumulated; the last one has no bound.

    `numbers` are the sum of all times, then each bound and its count; the last bound is infinite. The compiled plain
    path adds to them: the array is never replaced.
    """

    __slots__ = ("bounds", "numbers")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.numbers = array("d", (0.0, *chain.from_iterable((bound, 0.0) for bound in (*bounds, inf))))

    @property
    def seconds(self) -> float:
        """The sum of all times."""
        return self.numbers[0]

    @property
    def buckets(self) -> list[int]:
        return [int(count) for count in self.numbers[2::2]]

    def count(self, elapsed: float, times: int = 1) -> None:
        """Count a time."""
        self.numbers[0] += elapsed * times
        self.numbers[2 + 2 * bisect_left(self.bounds, elapsed)] += times


class BrokerCounts(Structure):
    """What every request to one broker and every answer of it adds to.

    `produce` and `fetch`: the times from a request's hand-over to its answer. `errors` by kind (BROKER_ERRORS). The
    compiled plain path has the same fields (kproxy/plain/counters.pxi) and the histograms, which are never replaced.
    """

    __slots__ = ("dials", "errors", "fetch", "produce")

    sent_bytes: int
    received_bytes: int
    _fields_ = [("sent_bytes", c_int64), ("received_bytes", c_int64)]

    def __init__(self, bounds: tuple[float, ...]) -> None:
        super().__init__()
        self.produce = Durations(bounds)
        self.fetch = Durations(bounds)
        self.dials = 0
        self.errors: Counter[str] = Counter()

    def answered(self, api_key: int, elapsed: float) -> None:
        """Count the time to an answer. Requests of other APIs are not timed."""
        if api_key == PRODUCE:
            self.produce.count(elapsed)
        elif api_key == FETCH:
            self.fetch.count(elapsed)


class Stages(Protocol):
    """When a produce request passed from one stage to the next, in seconds; `sent_at` 0: it was never sent."""

    began: float
    taken_at: float
    sent_at: float
    answered_at: float


class Tally(Structure):
    """Counts since the process began.

    `produce` has the times of produce requests from the first byte to the answer's turn, and STAGES their parts;
    `writing` comes after these. The compiled plain path has the same fields (kproxy/plain/counters.pxi) and these
    histograms, which are never replaced.
    """

    received_bytes: int
    # The produce requests on the plain path, by version.
    plain_produces: Array[c_int64]
    _fields_ = [("received_bytes", c_int64), ("plain_produces", c_int64 * (MAX_VERSION + 1))]

    def __init__(self, named: MetricsSection = NOTHING_NAMED, clock: Callable[[], float] = time.monotonic) -> None:
        """`named`: how many topics and clients are counted by name; `clock` in seconds."""
        super().__init__()
        # All other requests, by api_key << VERSION_BITS | api_version.
        self.served: Counter[int] = Counter()
        # Open client connections tell theirs when they are asked.
        self.sent_bytes = 0
        self.produce, self.reading, self.queue, self.broker, self.order, self.writing = (
            Durations(PRODUCE_BOUNDS_S) for _ in range(6)
        )
        # By (api_key, error_code, broker): partitions that were answered with that error.
        self.errors: Counter[tuple[int, int, int]] = Counter()
        # By (event of kproxy.routing.retry, broker): partitions to be sent again.
        self.retries: Counter[tuple[int, int]] = Counter()
        # By broker: the times it was found to hang; the probes that were answered or given up, and their durations.
        self.hangs: Counter[int] = Counter()
        self.probes: Counter[int] = Counter()
        self.probe_seconds: dict[int, float] = {}
        self._brokers: set[int] = set()
        self.by_broker: dict[int, BrokerCounts] = {}
        self.delays = Durations(DELAY_BOUNDS_S)
        # By topic and error_code: acks=0 batches that were lost.
        self.drops: dict[bytes, Counter[int]] = {}
        # By topic: partitions that were answered with an error.
        self.topic_errors: Counter[bytes] = Counter()
        self.topics = Busiest(("topic",), named.topics, clock) if named.topics else None
        self.clients = Busiest(("client_id", "principal"), named.clients, clock) if named.clients else None
        # By topic: acks=0 batches that had left when a broker's connection ended.
        self.unconfirmed: Counter[bytes] = Counter()

    @property
    def plain_requests(self) -> int:
        """Requests sent on the plain path."""
        return sum(self.plain_produces)

    @property
    def requests(self) -> Counter[int]:
        """All requests, by api_key << VERSION_BITS | api_version."""
        by_version = enumerate(self.plain_produces)
        return self.served + Counter({PRODUCE << VERSION_BITS | version: count for version, count in by_version})

    def answered(self, slot: Stages, now: float) -> None:
        """Count a produce request whose answer has its turn."""
        self.produce.count(now - slot.began)
        self.reading.count(slot.taken_at - slot.began)
        if slot.sent_at:
            self.queue.count(slot.sent_at - slot.taken_at)
            self.broker.count(slot.answered_at - slot.sent_at)
        else:
            self.queue.count(slot.answered_at - slot.taken_at)
        self.order.count(now - slot.answered_at)

    def of_broker(self, broker: int) -> BrokerCounts:
        """Return the counts of a broker."""
        broker = self._counted(broker)
        counts = self.by_broker.get(broker)
        if counts is None:
            counts = self.by_broker[broker] = BrokerCounts(BROKER_BOUNDS_S)
        return counts

    def forget(self, broker: int) -> None:
        """Forget a broker that has left: its counts are shown no more, and another id may take its place."""
        if broker not in self._brokers:
            return
        self._brokers.discard(broker)
        self.by_broker.pop(broker, None)
        for counts in (self.hangs, self.probes, self.probe_seconds):
            counts.pop(broker, None)
        for by_kind in (self.errors, self.retries):
            for key in [key for key in by_kind if key[-1] == broker]:
                del by_kind[key]

    def error(self, api_key: int, error_code: int, broker: int = NO_OWNER, partitions: int = 1) -> None:
        """Count partitions answered with an error.

        They were last sent to `broker`.
        """
        self.errors[api_key, error_code, self._counted(broker)] += partitions

    def topic_error(self, topic: bytes) -> None:
        """Count a partition answered with an error; its topic is in the table. Bounded as in `drop`."""
        if topic not in self.topic_errors and len(self.topic_errors) >= MAX_DROP_TOPICS:
            topic = OTHER_TOPICS
        self.topic_errors[topic] += 1

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

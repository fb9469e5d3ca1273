"""Read partition leaders from a Kafka cluster's Metadata: decide when to ask, and which broker.

States: EMPTY --first answer--> CURRENT <--> STALE (no answer for `stale_after_s`). A stale table still serves.

Transitions happen in rounds. A round asks one broker, about all topics or about those in doubt, and applies the answer
(kproxy.ownership.kafka_leaders). Rounds about all topics come at an interval, after a lost connection (`broker_lost`),
after a failed round, and by `reload`. `refresh` requests a round about a topic. Requests that come during a round
wait for the next round, since the present read may be older than the refusal that caused them.

Invariants
1. There are at most BURST rounds at once and RATE_PER_S a second on average: requests share rounds. Lost connections
   cause a round about all topics at most every WHOLE_APART_S.
2. A broker whose answer did not help is not asked next: it may lag or be cut off from the controllers. The same
   broker is not asked about all topics twice in a row, if there are others.
3. A round blocks the event loop for milliseconds only, however large the cluster is.
4. A round asks for at most MAX_DOUBTED single topics; if more are in doubt, it asks for all topics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from random import Random
from uuid import UUID

import structlog

from kproxy.ownership.kafka_client import PLAIN_ACCESS, BrokerGone, BrokerUnreachable, KafkaConnection, open_any
from kproxy.ownership.kafka_leaders import KafkaLeaders
from kproxy.ownership.pace import Pace
from kproxy.routing.topology import Address, Topology
from kproxy.security.broker_auth import BrokerAuth
from kproxy_codec import api_keys as keys
from kproxy_codec.metadata import HIGHEST_VERSION, TOPICS_BY_ID_FROM, MetadataReader
from kproxy_codec.partitioned import TOPIC_ID_BYTES

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0
BURST = 5
RATE_PER_S = 5.0
WHOLE_APART_S = 1.0
MAX_DOUBTED = 500
# The length of the longest topic name that Kafka allows.
_MAX_NAME_BYTES = 249


class KafkaMetadata:
    """Feeds `topology` from a Kafka cluster. `run` is one coroutine that the caller owns. All times are in seconds."""

    def __init__(
        self,
        bootstrap: Sequence[Address],
        topology: Topology,
        *,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = 30.0,
        timeout_s: float = 5.0,
        stale_after_s: float | None = None,
        access: BrokerAuth = PLAIN_ACCESS,
    ) -> None:
        """`stale_after_s` None means three intervals. `access` opens connections to brokers."""
        self._access = access
        self._bootstrap = tuple(bootstrap)
        self._topology = topology
        self._leaders = KafkaLeaders(topology)
        self._clock = clock
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._stale_after_s = 3 * interval_s if stale_after_s is None else stale_after_s
        self._jitter = Random()  # noqa: S311 -- spreads retries, guards nothing
        self._connection: KafkaConnection | None = None
        # The broker that is not asked next, if there is another one.
        self._passed_over: Address | None = None
        self._heard_at = float("-inf")
        self._pace = Pace(clock, BURST, RATE_PER_S)
        self._whole_at = float("-inf")
        self._whole_due = float("-inf")
        # Topics in doubt, by name or id, each with one of its partitions and the revision of that one's owner.
        self._doubted: dict[bytes, tuple[int, int]] = {}
        self._wanted = asyncio.Event()
        self._next_round: asyncio.Future[None] | None = None
        self._running = False
        self._synced = asyncio.Event()
        self.last_error: BrokerUnreachable | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the cluster last answered; infinite before the first answer."""
        return self._clock() - self._heard_at

    @property
    def stale(self) -> bool:
        return self.age_s > self._stale_after_s

    async def wait_synced(self) -> None:
        """Wait until the table has been loaded once."""
        await self._synced.wait()

    async def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> None:
        """Read a topic again, unless the entry has changed since `seen_revision`.

        Requests are coalesced.

        `topic` is a name or an id. Returns when a read that began after the call has succeeded or failed. Returns at
        once if `run` is not running, or if `topic` is neither a name nor an id.
        """
        if self._topology.owner_revision(topic, partition_index) > seen_revision:
            return
        if not _is_id(topic) and not _is_name(topic):
            return
        if len(self._doubted) < MAX_DOUBTED:
            self._doubted[topic] = (partition_index, seen_revision)
        elif topic not in self._doubted:
            self._whole_due = self._clock()
        await self._read_anew()

    def broker_lost(self) -> None:
        """Read all topics again soon: a broker is gone or unreachable, so others are about to lead its partitions."""
        self._whole_due = min(self._whole_due, max(self._clock(), self._whole_at + WHOLE_APART_S))
        self._wanted.set()

    async def reload(self) -> str:
        """Read the table again."""
        self._whole_due = self._clock()
        await self._read_anew()
        return str(self.last_error or f"{self._topology.owned_count} partitions")

    async def _read_anew(self) -> None:
        if not self._running:
            return
        if self._next_round is None:
            self._next_round = asyncio.get_running_loop().create_future()
        self._wanted.set()
        await asyncio.shield(self._next_round)

    async def run(self) -> None:
        """Keep the topology current until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        waiting: asyncio.Future[None] | None = None
        self._running = True
        try:
            while True:
                waiting, self._next_round = self._next_round, None
                doubted, self._doubted = self._doubted, {}
                try:
                    await self._read_once(doubted)
                    backoff_s = FIRST_BACKOFF_S
                except BrokerUnreachable as error:
                    # Before the first answer the caller that opened the source reports the error.
                    if self.last_error is None and self._synced.is_set():
                        log.warning("kafka metadata interrupted", reason=str(error))
                    self.last_error = error
                    self._whole_due = self._clock()
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)
                if self.last_error is None:
                    await self._pause()
                else:
                    # Requests do not shorten the back-off of a failing source.
                    await asyncio.sleep(backoff_s * (1 + self._jitter.random() / 2))
                    backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        finally:
            self._running = False
            for future in (waiting, self._next_round):
                if future is not None and not future.done():
                    future.set_result(None)
            await self._drop_connection()

    async def _pause(self) -> None:
        """Wait until the next round is due and allowed."""
        while self._next_round is None and self._clock() < self._whole_due:
            try:
                async with asyncio.timeout(self._whole_due - self._clock()):
                    await self._wanted.wait()
            except TimeoutError:
                break
            self._wanted.clear()
        await asyncio.sleep(self._pace.due_in_s())

    async def _read_once(self, doubted: dict[bytes, tuple[int, int]]) -> None:
        self._pace.spend()
        began = self._clock()
        whole = not doubted or began >= self._whole_due
        if whole and self._connection is not None:
            self._passed_over = self._connection.address
        try:
            answer, whole = await self._ask_any(None if whole else list(doubted))
        except BrokerUnreachable:
            await self._drop_connection()
            raise
        if not answer.brokers:
            await self._drop_connection()
            raise BrokerUnreachable("a broker that is still starting named no brokers")
        for _ in self._leaders.take(answer, whole=whole):
            await asyncio.sleep(0)
        self._heard_at = self._clock()
        if whole:
            self._whole_at, self._whole_due = began, self._heard_at + self._interval_s
        if not self._has_helped(doubted) and self._connection is not None:
            self._passed_over = self._connection.address
        if self.last_error is not None and self._synced.is_set():
            log.info("kafka metadata resumed")
        self.last_error = None
        self._synced.set()

    def _has_helped(self, doubted: dict[bytes, tuple[int, int]]) -> bool:
        owner_revision = self._topology.owner_revision
        return all(owner_revision(topic, index) > seen for topic, (index, seen) in doubted.items())

    async def _ask_any(self, topics: list[bytes] | None) -> tuple[MetadataReader, bool]:
        """Like `_ask`. If the last broker has gone, ask the next one at once: callers have few attempts."""
        before = self._connection
        await self._connect()
        try:
            return await self._ask(topics)
        except BrokerGone:
            if self._connection is not before or before is None:
                raise
            self._passed_over = before.address
        await self._connect()
        return await self._ask(topics)

    async def _ask(self, topics: list[bytes] | None) -> tuple[MetadataReader, bool]:
        """Ask about `topics` (None: all). Return the answer, and whether it is about all. Raises BrokerUnreachable."""
        assert self._connection is not None  # noqa: S101 - connected by the caller
        by_id = topics is not None and any(map(_is_id, topics))
        if by_id and self._connection.version(keys.METADATA, HIGHEST_VERSION) < TOPICS_BY_ID_FROM:
            topics = None
        wanted = None if topics is None else [_as_asked(topic) for topic in topics]
        return await self._connection.metadata(wanted), topics is None

    async def _connect(self) -> None:
        """Connect to the broker asked last, or to the next one if that broker is passed over."""
        known = list(dict.fromkeys([*self._bootstrap, *self._topology.brokers.values()]))
        passed_over, self._passed_over = self._passed_over, None
        if self._connection is not None:
            if self._connection.address != passed_over:
                return
            await self._drop_connection()
        if passed_over in known:
            # Begin with the next broker, so that all are asked in turn and the passed-over one last.
            at = known.index(passed_over) + 1
            known = known[at:] + known[:at]
        self._connection = await open_any(known, self._timeout_s, access=self._access)

    async def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _is_id(topic: bytes) -> bool:
    return len(topic) == TOPIC_ID_BYTES and not topic.isascii()


def _is_name(topic: bytes) -> bool:
    return topic.isascii() and 0 < len(topic) <= _MAX_NAME_BYTES


def _as_asked(topic: bytes) -> dict[str, object]:
    if _is_id(topic):
        return {"topic_id": UUID(bytes=topic), "name": None}
    return {"name": topic.decode()}

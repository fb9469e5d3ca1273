"""Query a cluster for leaders, the bounds of logs, and their batches, over one connection to each broker.

Calls block. The connections are kproxy.ownership.kafka_client's, on an event loop in a separate thread, because the
caller's thread may run another loop, as in a notebook. Spark's executors use this client.

States of a partition: KNOWN (its leader is remembered) <-> UNKNOWN. A leader is forgotten when a request to it fails,
or when it answers that it is not the leader; the next request then asks for Metadata first.

Invariants
1. Every wait is bounded: a call fails when nothing has succeeded for `patience_s` (`Patience`).
2. Errors that a retry cannot fix are raised at once.
3. There is one connection per broker, and none to more brokers than the cluster has. `close` ends all and the thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from kproxy.ownership.kafka_client import BrokerRefused, BrokerUnreachable, KafkaConnection, open_any
from kproxy.pipeline.kafka_access import NO_OPTIONS, WrongKafkaOption, read_access
from kproxy.routing.topology import Address
from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes
from kproxy_codec.control import Message, build_request, encode_request
from kproxy_codec.errors import CodecError
from kproxy_codec.fetch import FINAL_EPOCH, PartitionFetched
from kproxy_codec.fetch_answer import MAX_VERSION, read_fetch_answer
from kproxy_codec.foreign import ANSWER_TO_HTTP, answered_in
from kproxy_codec.metadata import TopicLeaders

T = TypeVar("T")

CLIENT_ID: Final = b"kproxy-audit"
# The most bytes by which an answer may exceed the request, because brokers send the first batch whole.
LARGEST_BATCH_BYTES: Final = 128 << 20
# Short, because a reader at the end of a log asks again.
_MAX_WAIT_MS: Final = 100
# If a port's first answer takes longer, check for HTTP: a server such as etcd waits for more bytes of a Kafka request.
_SUSPECT_AFTER_S: Final = 1.0
_HTTP_QUESTION: Final = b"GET / HTTP/1.0\r\n\r\n"


class LogReadFailed(Exception):
    """A log cannot be read; the sentence names topic, partition and offset if they are known."""


class NotYet(Exception):
    """A later attempt may succeed."""


async def _other_protocol(address: Address) -> str | None:
    """Return the protocol other than Kafka's that an address speaks, if an HTTP request shows it."""
    try:
        async with asyncio.timeout(_SUSPECT_AFTER_S):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(_HTTP_QUESTION)
                answer = await reader.read(len(ANSWER_TO_HTTP))
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return None
    # This answer comes from a kproxy listener, which speaks Kafka but is slow.
    return None if ANSWER_TO_HTTP.startswith(answer) else answered_in(answer)


async def _fetch(
    connection: KafkaConnection, topic: str, partition: int, offset: int, max_bytes: int
) -> PartitionFetched:
    """Return the batches from the one that contains `offset`, at most `max_bytes` or one batch.

    Reading stops at the high watermark; open transactions do not stop it. Raise BrokerUnreachable.
    """
    asked = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": max_bytes}
    topics = [{"topic": topic, "partitions": [asked]}]
    fields = {"replica_id": -1, "max_wait_ms": _MAX_WAIT_MS, "min_bytes": 1, "max_bytes": max_bytes, "topics": topics}
    try:
        version = connection.version(keys.FETCH, MAX_VERSION)
        body = encode_request(build_request(keys.FETCH, version, session_epoch=FINAL_EPOCH, **fields))
        frame = await connection.exchange_frame(
            keys.FETCH, version, body, max_answer_bytes=max_bytes + LARGEST_BATCH_BYTES
        )
        return read_fetch_answer(frame, version, topic)
    except CodecError as error:
        raise connection.unreachable(keys.FETCH, error) from error


EARLIEST: Final = -2
LATEST: Final = -1
# Requests about more partitions are split.
PARTITIONS_PER_QUESTION: Final = 1000
# A new topic may not be known to every broker yet.
UNKNOWN_TOPIC_TRIES: Final = 5
_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 2.0
_TOPIC: Final = 2
_CLEANUP_POLICY: Final = "cleanup.policy"
_LIST_OFFSETS_VERSION: Final = 9
_DESCRIBE_CONFIGS_VERSION: Final = 4

# For each answer, and for the time in which nothing succeeds.
TIMEOUT_S: Final = 10.0
PATIENCE_S: Final = 60.0
_NO_SUCH_TOPIC: Final = frozenset({error_codes.UNKNOWN_TOPIC_OR_PARTITION, error_codes.INVALID_TOPIC_EXCEPTION})


def parse_bootstrap(text: str) -> tuple[Address, ...]:
    """Parse `H:P,H:P`. Raise LogReadFailed. It does not use kproxy.config, whose dependencies executors lack."""
    addresses = []
    for part in filter(None, map(str.strip, text.split(","))):
        host, _, port = part.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise LogReadFailed(f"Invalid address {part!r}; expected HOST:PORT, several separated by commas.")
        addresses.append(Address(host.strip("[]"), int(port)))
    if not addresses:
        raise LogReadFailed("The address of a kproxy or of a Kafka cluster is missing; expected HOST:PORT.")
    return tuple(addresses)


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"topic {self.topic}, partition {self.partition}"

    @property
    def name(self) -> str:
        return f"{self.topic}/{self.partition}"


Offsets = Mapping[TopicPartition, int]
Unread = dict[TopicPartition, str]
"""The reasons by partition, for those without a leader or that brokers refuse to read. Calls add to it."""


class Patience:
    """Growing pauses between attempts, until nothing has succeeded for `seconds`."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self.succeeded()

    def succeeded(self) -> None:
        self._since = self._clock()
        self._pause_s = _FIRST_PAUSE_S

    def pause(self, reason: str) -> None:
        """Wait before the next attempt. If no time is left, raise LogReadFailed with the last attempt's `reason`."""
        waited_s = self._clock() - self._since
        if waited_s >= self._seconds:
            raise LogReadFailed(f"{reason}; given up after {waited_s:.0f} s.")
        self._sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    def until(self, attempt: Callable[[], T], what: str) -> T:
        """Repeat `attempt` until a broker answers, and return its result. `what`: an error's subject and verb."""
        while True:
            try:
                return attempt()
            except (BrokerUnreachable, NotYet) as error:
                self.pause(f"{what} not to be had ({error})")


class LogClient:
    """A client of the cluster at `bootstrap` (H:P[,H:P...]) for one thread. Times are in seconds.

    `topic_ids` has the ids of requested topics, in hex. `kafka` has options of Kafka's clients about TLS and SASL.
    Raise LogReadFailed if they cannot be used.
    """

    def __init__(
        self,
        bootstrap: str,
        kafka: Mapping[str, str] = NO_OPTIONS,
        *,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._bootstrap = parse_bootstrap(bootstrap)
        try:
            self._access = read_access(kafka)
        except WrongKafkaOption as error:
            raise LogReadFailed(str(error)) from error
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._connections: dict[Address, KafkaConnection] = {}
        self.topic_ids: dict[str, str | None] = {}
        self._brokers: dict[int, Address] = {}
        self.leaders: dict[TopicPartition, Address] = {}

    def __enter__(self) -> LogClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._loop is None or self._thread is None:
            return
        self._run(self._disconnect())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    async def _disconnect(self) -> None:
        for connection in self._connections.values():
            connection.abort()
        self._connections.clear()
        # Let the loop close their sockets.
        await asyncio.sleep(0)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the event loop of the connections. Raise BrokerUnreachable, LogReadFailed."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="kproxy log client", daemon=True)
            self._thread.start()
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BrokerRefused as error:
            raise LogReadFailed(f"{error}.") from error
        except BaseException:
            # Ctrl-C may have interrupted the caller.
            running.cancel()
            raise

    def _ask(self, broker: Address | None, ask: Callable[[KafkaConnection], Awaitable[T]]) -> T:
        """Ask `broker`; None means any, preferably one with an open connection. Raise BrokerUnreachable, LogReadFailed.

        A broker that fails is forgotten, and with it its leaderships, until Metadata names it again.
        """
        return self._run(self._asked(broker, ask))

    async def _asked(self, broker: Address | None, ask: Callable[[KafkaConnection], Awaitable[T]]) -> T:
        asked = broker or next(iter(self._connections), None)
        try:
            connection = None if asked is None else self._connections.get(asked)
            if connection is None:
                connection = await self._open([asked] if asked else [*self._bootstrap, *self._brokers.values()])
                asked = connection.address
                self._connections[asked] = connection
            return await ask(connection)
        except BrokerUnreachable:
            self.leaders = {which: leader for which, leader in self.leaders.items() if leader != asked}
            if asked is not None and (failed := self._connections.pop(asked, None)) is not None:
                failed.abort()
            raise

    async def _open(self, addresses: Sequence[Address]) -> KafkaConnection:
        """Connect to one of `addresses`. Raise LogReadFailed if one of them speaks another protocol than Kafka's."""
        opening = asyncio.ensure_future(open_any(addresses, self._timeout_s, CLIENT_ID, self._access))
        try:
            await asyncio.wait({opening}, timeout=_SUSPECT_AFTER_S)
            if self._access.is_plain and (not opening.done() or opening.exception() is not None):
                for address, protocol in zip(
                    addresses, await asyncio.gather(*map(_other_protocol, addresses)), strict=True
                ):
                    if protocol is not None:
                        raise LogReadFailed(
                            f"{address} speaks {protocol}: give the address of a Kafka listener; "
                            f"for TLS, security.protocol."
                        )
            return await opening
        finally:
            opening.cancel()

    def patience(self) -> Patience:
        return Patience(self._patience_s)

    def forget_leader(self, which: TopicPartition) -> None:
        """Forget the leader, so that Metadata comes before the next request: it may be a lagging follower by now."""
        self.leaders.pop(which, None)

    def partitions(self, topics: Collection[str] | None) -> dict[str, int]:
        """Return the number of partitions by topic; of all topics for None.

        Raise LogReadFailed if no broker answers or a topic does not exist.
        """
        known = self.partitions_if_any(topics)
        missing = min(set(topics or ()) - known.keys(), default=None)
        if missing is not None:
            raise LogReadFailed(f"There is no topic {missing} at {','.join(map(str, self._bootstrap))}.")
        return known

    def partitions_if_any(self, topics: Collection[str] | None) -> dict[str, int]:
        """Return the number of partitions of those topics that exist.

        Brokers must deny that the others exist. Raise LogReadFailed for any other error, for example if a topic may not
        be read.
        """
        attempts = iter(range(UNKNOWN_TOPIC_TRIES - 1))

        def attempt() -> dict[str, int]:
            found = {_name(each): each for each in self._metadata(topics)}
            known = {name: each.partition_count for name, each in found.items() if each.partition_count}
            unknown = []
            for topic in sorted(set(topics or ()) - known.keys()):
                code = found[topic].error_code if topic in found else error_codes.UNKNOWN_TOPIC_OR_PARTITION
                if code not in error_codes.PASSING | _NO_SUCH_TOPIC:
                    raise LogReadFailed(f"Topic {topic} cannot be read: {error_codes.name_of(code)}.")
                unknown.append((topic, code))
            is_new = next(attempts, None) is not None
            for topic, code in unknown:
                if is_new or code not in _NO_SUCH_TOPIC:
                    raise NotYet(f"{topic}: {error_codes.name_of(code)}")
            return known

        return self.patience().until(attempt, "The topics are")

    def list_offsets(
        self,
        partitions: Iterable[TopicPartition],
        timestamp: int,
        unread: Unread | None = None,
        patience_s: float | None = None,
    ) -> dict[TopicPartition, int]:
        """Return the first offsets of logs (EARLIEST) or those after the last records (LATEST, the high watermarks).

        For a time in milliseconds, return the first offset with that timestamp or a later one, -1 if there is none.
        Raise LogReadFailed. `unread` instead gets the partitions that have no leader or are refused, with the reason.
        """
        offsets: dict[TopicPartition, int] = {}
        pending = dict.fromkeys(partitions, "nobody was asked")
        patience = Patience(patience_s or self._patience_s)
        while pending:
            before = len(pending)
            for leader, asked in self._by_leader(pending, patience).items():
                for first in range(0, len(asked), PARTITIONS_PER_QUESTION):
                    part = asked[first : first + PARTITIONS_PER_QUESTION]
                    for which, code, offset in self._offsets(leader, part, timestamp, pending):
                        if code == error_codes.NONE:
                            offsets[which] = offset
                            del pending[which]
                            continue
                        self.forget_leader(which)
                        pending[which] = error_codes.name_of(code)
                        if code in error_codes.PASSING:
                            continue
                        if unread is None:
                            raise LogReadFailed(f"The offsets of {which} cannot be read: {pending[which]}.")
                        unread[which] = pending.pop(which)
            if len(pending) < before:
                patience.succeeded()
            if pending:
                which, reason = next(iter(pending.items()))
                try:
                    patience.pause(f"The offsets of {which} are not to be had ({reason})")
                except LogReadFailed:
                    if unread is None:
                        raise
                    unread.update(pending)
                    break
        return offsets

    def _offsets(
        self, leader: Address, asked: Sequence[TopicPartition], timestamp: int, reasons: Unread
    ) -> Iterator[tuple[TopicPartition, int, int]]:
        """Yield error codes and offsets in a leader's answer; without an answer, set the reasons."""
        by_topic: dict[str, list[dict[str, int]]] = defaultdict(list)
        for topic, partition in asked:
            wanted = {"partition_index": partition, "current_leader_epoch": -1, "timestamp": timestamp}
            by_topic[topic].append(wanted)
        topics = [{"name": topic, "partitions": wanted} for topic, wanted in by_topic.items()]
        fields = {"replica_id": -1, "isolation_level": 0, "topics": topics}
        try:
            answer: Message = self._ask(leader, lambda it: it.ask(keys.LIST_OFFSETS, _LIST_OFFSETS_VERSION, **fields))
        except BrokerUnreachable as error:
            reasons.update(dict.fromkeys(asked, str(error)))
            return
        for topic in answer.topics:
            for each in topic.partitions:
                if (which := TopicPartition(topic.name, each.partition_index)) in reasons:
                    yield which, each.error_code, each.offset

    def compacted(self, topics: Collection[str]) -> set[str]:
        """Return the compacted ones of `topics`; none if brokers do not serve DescribeConfigs. Raise LogReadFailed."""
        resources = [
            {"resource_type": _TOPIC, "resource_name": topic, "configuration_keys": [_CLEANUP_POLICY]}
            for topic in sorted(topics)
        ]
        found: set[str] = set()
        for first in range(0, len(resources), PARTITIONS_PER_QUESTION):
            part = resources[first : first + PARTITIONS_PER_QUESTION]
            found |= self.patience().until(partial(self._compacted, part), "Which topics are compacted is")
        return found

    def _compacted(self, resources: Sequence[Mapping[str, Any]]) -> set[str]:
        answer = self._ask(None, lambda it: _configs(it, resources))
        for each in () if answer is None else answer.results:
            if each.error_code == error_codes.NONE:
                continue
            reason = f"Whether topic {each.resource_name} is compacted cannot be read"
            if each.error_code in error_codes.PASSING:
                raise NotYet(reason)
            code = error_codes.name_of(each.error_code)
            raise LogReadFailed(f"{reason}: {code}; name the compacted topics with --compacted.")
        return set() if answer is None else {one.resource_name for one in answer.results if _is_compact(one)}

    def fetch(self, which: TopicPartition, offset: int, max_bytes: int, patience: Patience) -> PartitionFetched:
        """Return the batches of a partition from `offset` on, or an error code that a retry cannot fix.

        Raise LogReadFailed when `patience` is exhausted.
        """

        def attempt() -> PartitionFetched:
            leader = next(iter(self._by_leader({which: ""}, patience)), None)
            if leader is None:
                raise NotYet("it has no leader")
            fetched = self._ask(leader, lambda it: _fetch(it, *which, offset, max_bytes))
            if fetched.error_code in error_codes.PASSING:
                self.forget_leader(which)
                raise NotYet(f"{leader} says {error_codes.name_of(fetched.error_code)}")
            return fetched

        return patience.until(attempt, f"Batches of {which} from offset {offset} on are")

    def _by_leader(self, partitions: Unread, patience: Patience) -> dict[Address, list[TopicPartition]]:
        """Group the partitions by leader, after Metadata if one is unknown; those that have none get that reason."""
        if unknown := {which.topic for which in partitions if which not in self.leaders}:
            patience.until(lambda: self._metadata(unknown), "The leaders are")
        by_leader: dict[Address, list[TopicPartition]] = defaultdict(list)
        for which in partitions:
            if which in self.leaders:
                by_leader[self.leaders[which]].append(which)
            else:
                partitions[which] = "it has no leader"
        return by_leader

    def _metadata(self, topics: Collection[str] | None) -> list[TopicLeaders]:
        """Ask about topics, and remember brokers, leaders and ids. Raise BrokerUnreachable, LogReadFailed."""
        wanted = None if topics is None else [{"name": topic} for topic in sorted(topics)]
        reader = self._ask(None, lambda it: it.metadata(wanted))
        self._brokers = {node_id: Address(host, port) for node_id, host, port in reader.brokers}
        for each in reader.topics:
            self.topic_ids[_name(each)] = each.topic_id.hex() if each.topic_id else None
            for _, index, leader_id, _ in each.partitions():
                if leader_id in self._brokers:
                    self.leaders[TopicPartition(_name(each), index)] = self._brokers[leader_id]
        return reader.topics


async def _configs(connection: KafkaConnection, resources: Sequence[Mapping[str, Any]]) -> Message | None:
    """Return the answer to DescribeConfigs; None if the broker does not serve it. Raise BrokerUnreachable."""
    if connection.offered(keys.DESCRIBE_CONFIGS) is None:
        return None
    return await connection.ask(keys.DESCRIBE_CONFIGS, _DESCRIBE_CONFIGS_VERSION, resources=resources)


def _name(topic: TopicLeaders) -> str:
    return (topic.name or b"").decode()


def _is_compact(resource: Any) -> bool:
    return any(each.name == _CLEANUP_POLICY and "compact" in (each.value or "") for each in resource.configs)

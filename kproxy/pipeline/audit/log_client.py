"""Query a cluster for leaders, the bounds of logs, and their batches.

States of a partition: KNOWN (its leader is remembered) <-> UNKNOWN. A leader is forgotten when a request to it fails or
it answers that it is not the leader; the next request then asks for Metadata first.

Invariants
1. Every wait is bounded: a call fails when nothing has succeeded for `patience_s` (`Patience`).
2. Errors that a retry cannot fix are raised at once.
3. One connection per broker, and no more brokers than the cluster has; `close` leaves none open.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from kproxy.pipeline.audit.log_connection import BrokerFailed, LogConnection, LogReadFailed
from kproxy.routing.topology import Address
from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes
from kproxy_codec.errors import CodecError
from kproxy_codec.fetch import PartitionFetched
from kproxy_codec.framing import response_body_offset
from kproxy_codec.metadata import HIGHEST_VERSION, MetadataReader, TopicLeaders

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

# After these errors the leader is looked up again and the request repeated.
PASSING: Final = frozenset(
    {
        error_codes.UNKNOWN_TOPIC_OR_PARTITION,
        error_codes.LEADER_NOT_AVAILABLE,
        error_codes.NOT_LEADER_OR_FOLLOWER,
        error_codes.REQUEST_TIMED_OUT,
        error_codes.BROKER_NOT_AVAILABLE,
        error_codes.REPLICA_NOT_AVAILABLE,
        error_codes.NETWORK_EXCEPTION,
        error_codes.KAFKA_STORAGE_ERROR,
        error_codes.FENCED_LEADER_EPOCH,
        error_codes.UNKNOWN_LEADER_EPOCH,
        error_codes.OFFSET_NOT_AVAILABLE,
        error_codes.UNKNOWN_SERVER_ERROR,
    }
)
_NO_SUCH_TOPIC: Final = frozenset({error_codes.UNKNOWN_TOPIC_OR_PARTITION, error_codes.INVALID_TOPIC_EXCEPTION})


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"topic {self.topic}, partition {self.partition}"


class Patience:
    """Growing pauses between attempts, until nothing has succeeded for `seconds`."""

    def __init__(self, seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self.succeeded()

    def succeeded(self) -> None:
        self._since = self._clock()
        self._pause_s = _FIRST_PAUSE_S

    def pause(self, reason: str) -> None:
        """Wait before the next attempt. If there is none, raise LogReadFailed with the last attempt's `reason`."""
        waited_s = self._clock() - self._since
        if waited_s >= self._seconds:
            raise LogReadFailed(f"{reason}; given up after {waited_s:.0f} s.")
        self._sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


class LogClient:
    """Not for concurrent use. Times are in seconds. `topic_ids` has the ids of requested topics, in hex."""

    def __init__(
        self,
        bootstrap: Sequence[Address],
        *,
        timeout_s: float,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bootstrap = tuple(bootstrap)
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep
        self._connections: dict[Address, LogConnection] = {}
        self.topic_ids: dict[str, str | None] = {}
        self._brokers: dict[int, Address] = {}
        self._leaders: dict[TopicPartition, Address] = {}

    def __enter__(self) -> LogClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def patience(self) -> Patience:
        return Patience(self._patience_s, self._clock, self._sleep)

    def remember_leader(self, which: TopicPartition, leader: Address) -> None:
        """Set the leader that the planner has just learned."""
        self._leaders[which] = leader

    def leader(self, which: TopicPartition) -> Address | None:
        """Return the remembered leader, if any."""
        return self._leaders.get(which)

    def forget_leader(self, which: TopicPartition) -> None:
        """Ask for Metadata before the next request: the broker may be a follower by now, and lag behind."""
        self._leaders.pop(which, None)

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
        patience = self.patience()
        tries = UNKNOWN_TOPIC_TRIES
        while True:
            found = self._ask_metadata(topics, patience)
            known = {_name(each): each.partition_count for each in found if each.partition_count}
            reasons = {_name(each): each.error_code for each in found}
            missing = {
                topic: reasons.get(topic, error_codes.UNKNOWN_TOPIC_OR_PARTITION)
                for topic in sorted(set(topics or ()) - known.keys())
            }
            tries -= 1
            pending = [topic for topic, code in missing.items() if code not in _NO_SUCH_TOPIC or tries > 0]
            if not pending:
                return known
            for topic in pending:
                if missing[topic] not in PASSING | _NO_SUCH_TOPIC:
                    raise LogReadFailed(f"Topic {topic} cannot be read: {error_codes.name_of(missing[topic])}.")
            patience.pause(f"Metadata of {', '.join(pending)} is not to be had")

    def list_offsets(self, partitions: Iterable[TopicPartition], timestamp: int) -> dict[TopicPartition, int]:
        """Return the first offsets of logs (EARLIEST) or those after the last records (LATEST, the high watermarks).

        For a time in milliseconds, return the first offset with that timestamp or a later one, -1 if there is none.
        Raise LogReadFailed.
        """
        offsets: dict[TopicPartition, int] = {}
        pending = dict.fromkeys(partitions, "nobody was asked")
        patience = self.patience()
        while pending:
            for leader, asked in self._by_leader(list(pending), patience).items():
                for first in range(0, len(asked), PARTITIONS_PER_QUESTION):
                    part = asked[first : first + PARTITIONS_PER_QUESTION]
                    offsets.update(self._list_offsets(leader, part, timestamp, pending))
            if any(which in offsets for which in pending):
                patience.succeeded()
            pending = {which: reason for which, reason in pending.items() if which not in offsets}
            if pending:
                which, reason = next(iter(pending.items()))
                patience.pause(f"The offsets of {which} are not to be had ({reason})")
        return offsets

    def _list_offsets(
        self, leader: Address, asked: Sequence[TopicPartition], timestamp: int, reasons: dict[TopicPartition, str]
    ) -> dict[TopicPartition, int]:
        """Return the offsets in a leader's answer. For those missing, add the reason and forget the leader."""
        by_topic: dict[str, list[dict[str, int]]] = defaultdict(list)
        for topic, partition in asked:
            wanted = {"partition_index": partition, "current_leader_epoch": -1, "timestamp": timestamp}
            by_topic[topic].append(wanted)
        topics = [{"name": topic, "partitions": wanted} for topic, wanted in by_topic.items()]
        try:
            answer = self._connection(leader).ask(
                keys.LIST_OFFSETS, _LIST_OFFSETS_VERSION, replica_id=-1, isolation_level=0, topics=topics
            )
        except BrokerFailed as error:
            self._forget(leader)
            reasons.update(dict.fromkeys(asked, str(error)))
            return {}
        offsets = {}
        for topic in answer.topics:
            for result in topic.partitions:
                which = TopicPartition(topic.name, result.partition_index)
                if result.error_code == error_codes.NONE:
                    offsets[which] = result.offset
                    continue
                self.forget_leader(which)
                reasons[which] = error_codes.name_of(result.error_code)
                if result.error_code not in PASSING:
                    raise LogReadFailed(f"The offsets of {which} cannot be read: {reasons[which]}.")
        return offsets

    def compacted(self, topics: Collection[str]) -> set[str]:
        """Return the compacted ones of `topics`; none if brokers do not serve DescribeConfigs. Raise LogReadFailed."""
        asked = [
            {"resource_type": _TOPIC, "resource_name": topic, "configuration_keys": [_CLEANUP_POLICY]}
            for topic in sorted(topics)
        ]
        compacted: set[str] = set()
        for first in range(0, len(asked), PARTITIONS_PER_QUESTION):
            compacted |= self._compacted(asked[first : first + PARTITIONS_PER_QUESTION])
        return compacted

    def _compacted(self, resources: list[dict[str, Any]]) -> set[str]:
        patience = self.patience()
        while True:
            try:
                with self._any_connection() as connection:
                    if not connection.serves(keys.DESCRIBE_CONFIGS):
                        return set()
                    answer = connection.ask(keys.DESCRIBE_CONFIGS, _DESCRIBE_CONFIGS_VERSION, resources=resources)
            except BrokerFailed as error:
                patience.pause(f"Which topics are compacted is not to be had ({error})")
                continue
            refused = [each for each in answer.results if each.error_code != error_codes.NONE]
            if not refused:
                return {each.resource_name for each in answer.results if any(map(_says_compact, each.configs))}
            which, code = refused[0].resource_name, refused[0].error_code
            reason = f"Whether topic {which} is compacted cannot be read: {error_codes.name_of(code)}"
            if code not in PASSING:
                raise LogReadFailed(f"{reason}; say by option compactedTopics which topics are.")
            patience.pause(reason)

    def fetch(self, which: TopicPartition, offset: int, max_bytes: int, patience: Patience) -> PartitionFetched:
        """Return the batches of a partition from `offset` on, or an error code that is not a passing one.

        Raise LogReadFailed when `patience` is exhausted.
        """
        while True:
            try:
                leader = next(iter(self._by_leader([which], patience)))
                fetched = self._connection(leader).fetch(which.topic, which.partition, offset, max_bytes)
                if fetched.error_code not in PASSING:
                    return fetched
                self.forget_leader(which)
                reason = f"{leader} says {error_codes.name_of(fetched.error_code)}"
            except BrokerFailed as error:
                self._forget(leader)
                reason = str(error)
            patience.pause(f"Batches of {which} from offset {offset} on are not to be had ({reason})")

    def _by_leader(
        self, partitions: Sequence[TopicPartition], patience: Patience
    ) -> dict[Address, list[TopicPartition]]:
        """Group the partitions by leader; ask for Metadata for unknown leaders."""
        while unknown := [which for which in partitions if which not in self._leaders]:
            for found in self._ask_metadata({which.topic for which in unknown}, patience):
                for _, index, leader_id, _ in found.partitions():
                    if leader_id in self._brokers:
                        self._leaders[TopicPartition(_name(found), index)] = self._brokers[leader_id]
            leaderless = next((which for which in unknown if which not in self._leaders), None)
            if leaderless is not None:
                patience.pause(f"{leaderless} has no leader")
        by_leader: dict[Address, list[TopicPartition]] = defaultdict(list)
        for which in partitions:
            by_leader[self._leaders[which]].append(which)
        return by_leader

    def _ask_metadata(self, topics: Collection[str] | None, patience: Patience) -> list[TopicLeaders]:
        wanted = None if topics is None else [{"name": topic} for topic in sorted(topics)]
        while True:
            try:
                with self._any_connection() as connection:
                    version, frame = connection.exchange(
                        keys.METADATA, HIGHEST_VERSION, topics=wanted, allow_auto_topic_creation=False
                    )
                reader = MetadataReader(frame[response_body_offset(frame, keys.METADATA, version) :], version)
                while not reader.read_some(1 << 20):
                    pass
            except (BrokerFailed, CodecError) as error:
                patience.pause(str(error))
                continue
            self._brokers = {node_id: Address(host, port) for node_id, host, port in reader.brokers}
            self.topic_ids |= {_name(each): each.topic_id.hex() if each.topic_id else None for each in reader.topics}
            return reader.topics

    @contextmanager
    def _any_connection(self) -> Iterator[LogConnection]:
        """Yield a connection to any broker, preferably an open one.

        If all fail, raise BrokerFailed that names them. If the request in the block fails, the next call uses another
        broker.
        """
        failures = []
        for address in dict.fromkeys([*self._connections, *self._bootstrap, *self._brokers.values()]):
            try:
                connection = self._connection(address)
                break
            except BrokerFailed as error:
                failures.append(str(error))
        else:
            raise BrokerFailed("; ".join(failures))
        try:
            yield connection
        except BrokerFailed:
            self._forget(address)
            raise

    def _connection(self, address: Address) -> LogConnection:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = LogConnection(address, self._timeout_s, self._clock)
        return connection

    def _forget(self, address: Address) -> None:
        """Close a failed broker's connection and forget what it leads, until Metadata names it again."""
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()
        self._leaders = {which: leader for which, leader in self._leaders.items() if leader != address}


def _name(topic: TopicLeaders) -> str:
    return (topic.name or b"").decode()


def _says_compact(config: Any) -> bool:
    return config.name == _CLEANUP_POLICY and "compact" in (config.value or "")

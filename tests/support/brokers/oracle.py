"""Send the same requests to two clusters: Apache Kafka, whose answers count as right, and the reference brokers.

A side is three brokers with every topic on all of them, and is used only over the protocol: creating topics and asking
for leaders and in-sync replicas is the same for both. Only starting and ending a process differs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from kproxy_codec import error_codes
from kproxy_codec.api_keys import API_VERSIONS, LIST_OFFSETS, METADATA, PRODUCE
from kproxy_codec.record_batch import iterate_batches
from tests.support.brokers import reference_broker
from tests.support.brokers.real_kafka import RealBroker, RealKafka
from tests.support.brokers.reference_broker import BrokerProcess, Closed, RawClient, create_topic
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

NODES = (1, 2, 3)
PATIENCE_S = 60.0
_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer", "Outcome", "Read")


class Side:
    """One cluster. Nodes are named by their broker ids."""

    def __init__(self, name: str, brokers: Sequence[RealBroker | BrokerProcess]) -> None:
        self.name = name
        self._brokers = {broker.node_id: broker for broker in brokers}

    def port(self, node_id: int) -> int:
        return self._brokers[node_id].port

    def is_running(self, node_id: int) -> bool:
        return self._brokers[node_id].running

    def start(self, *node_ids: int) -> None:
        """Start these brokers side by side, and wait until they serve."""
        for node_id in node_ids:
            self._brokers[node_id].start(wait=False)
        for node_id in node_ids:
            self._brokers[node_id].wait_ready()

    def stop(self, node_id: int) -> None:
        """Send SIGTERM, and wait until the broker has ended."""
        self._brokers[node_id].terminate()

    def kill(self, node_id: int) -> None:
        self._brokers[node_id].kill()

    def pause(self, node_id: int) -> None:
        self._brokers[node_id].pause()

    def resume(self, node_id: int) -> None:
        self._brokers[node_id].resume()

    def client(self, node_id: int) -> RawClient:
        return RawClient("127.0.0.1", self.port(node_id))

    def create(self, topic: str, leader: int = NODES[0], **configs: str) -> None:
        """One partition with a replica on every node, led by that one, all of them in sync."""
        named = {name.replace("_", "."): value for name, value in configs.items()}
        replicas = sorted(NODES, key=lambda node_id: node_id != leader)
        with self.client(NODES[0]) as client:
            created = create_topic(client, topic, [replicas], named)
        assert created.error_code == 0, f"{self.name}: {created}"
        self.wait_in_sync(topic, len(NODES))

    def described(self, topic: str, node_id: int) -> Any:
        """One node's description of the partition; None if it does not know the partition."""
        with self.client(node_id) as client:
            answer = client.request(METADATA, 12, topics=[{"name": topic}], allow_auto_topic_creation=False)
        partitions = answer.topics[0].partitions
        return partitions[0] if partitions else None

    def leader(self, topic: str) -> int:
        """Wait until all running nodes name the same leader; return it."""

        def agreed() -> int | None:
            told = [self.described(topic, node_id) for node_id in NODES if self.is_running(node_id)]
            leaders = {each.leader_id if each is not None else -1 for each in told}
            leader = leaders.pop()
            return leader if not leaders and leader != -1 and self.is_running(leader) else None

        found: int = wait_for(agreed, PATIENCE_S, f"{self.name}: a leader of {topic}")
        return found

    def wait_in_sync(self, topic: str, count: int) -> None:
        """Wait until every node reports exactly that many in-sync replicas."""

        def in_sync() -> bool:
            told = [self.described(topic, node_id) for node_id in NODES if self.is_running(node_id)]
            return all(each is not None and each.leader_id != -1 and len(each.isr_nodes) == count for each in told)

        wait_for(in_sync, PATIENCE_S, f"{self.name}: {count} replicas of {topic} in sync")


class RealSide(Side):
    def __init__(self, kafka: RealKafka) -> None:
        super().__init__("Apache Kafka", kafka.brokers)


class ReferenceSide(Side):
    def __init__(self, brokers: Sequence[BrokerProcess]) -> None:
        super().__init__("the reference brokers", brokers)
        self.prefix = brokers[0].prefix


# Requests

ONE = bytes(build_batch([b"v" * 50]))
LAST_SEQUENCE = (1 << 31) - 1


class Step(NamedTuple):
    """One request; `options` are those of `produce`."""

    what: str
    records: bytes
    options: Mapping[str, Any] = {}


def batch(sequence: int, *, count: int = 2, epoch: int = 0, producer_id: int = 77) -> bytes:
    values = [b"%d" % (sequence + position) for position in range(count)]
    return bytes(build_batch(values, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence))


# Results


class Outcome(NamedTuple):
    """The outcome of a step, with the name of the error code."""

    error: str
    offset: int = -1


SILENT = Outcome("no answer")
CLOSED = Outcome("connection closed")


def outcome(error_code: int, offset: int) -> Outcome:
    return Outcome(error_codes.name_of(error_code), offset)


def produce(
    client: RawClient,
    records: bytes,
    *,
    topic: str = "",
    topic_id: uuid.UUID | None = None,
    partition: int = 0,
    acks: int = -1,
    version: int = 9,
    timeout_ms: int = 10_000,
) -> Outcome:
    """Send a produce request for one partition. For acks=0 the outcome is whether the connection stays open."""
    named = {"name": topic} if topic_id is None else {"topic_id": topic_id}
    data = [{**named, "partition_data": [{"index": partition, "records": records}]}]
    fields: dict[str, Any] = {"acks": acks, "timeout_ms": timeout_ms, "topic_data": data}
    try:
        if acks == 0:
            client.send(PRODUCE, version, answered=False, **fields)
            client.request(API_VERSIONS, 0)
            return SILENT
        [answered] = client.request(PRODUCE, version, **fields).responses
    except Closed:
        return CLOSED
    [result] = answered.partition_responses
    return outcome(result.error_code, result.base_offset)


class Read(NamedTuple):
    """The result of a fetch: the name of the error, the high watermark, and the offsets at which batches begin."""

    error: str
    high_watermark: int
    base_offsets: list[int]


def fetch(client: RawClient, topic: str, offset: int) -> Read:
    """Fetch from an offset on, without waiting for more."""
    found = reference_broker.fetch(client, topic, offset, max_wait_ms=0, min_bytes=0)
    base_offsets = [batch.base_offset for batch in iterate_batches(found.records or b"")]
    return Read(error_codes.name_of(found.error_code), found.high_watermark, base_offsets)


def latest(client: RawClient, topic: str) -> Outcome:
    """The offset that ListOffsets reports for the log's end, as consumers see it."""
    asked = [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": -1}]}]
    found = client.request(LIST_OFFSETS, 6, replica_id=-1, topics=asked).topics[0].partitions[0]
    return outcome(found.error_code, found.offset)


class ToLeader:
    """Requests to the leader of a topic's partition, repeated if the leader has moved, which happens on a busy machine.

    CLOSED is the result of a request if the leader is still the same.
    """

    def __init__(self, side: Side, topic: str) -> None:
        self._side = side
        self._topic = topic
        self._client: RawClient | None = None
        self._leader = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._disconnect()

    def produce(self, records: bytes, **options: Any) -> Outcome:
        return self._ask(lambda client: produce(client, records, **{"topic": self._topic, **options}))

    def latest(self) -> Outcome:
        return self._ask(lambda client: latest(client, self._topic))

    def fetch(self, offset: int) -> Read:
        return self._ask(lambda client: fetch(client, self._topic, offset))

    def _ask(self, ask: Callable[[RawClient], _Answer]) -> _Answer:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = ask(self._client or self._connect())
            if answer != CLOSED and answer.error != "NOT_LEADER_OR_FOLLOWER":
                return answer
            asked = self._leader
            self._disconnect()
            self._connect()
            if answer == CLOSED and self._leader == asked:
                return answer
            assert time.monotonic() < deadline, f"{self._side.name}: {answer}"

    def _connect(self) -> RawClient:
        self._leader = self._side.leader(self._topic)
        self._client = self._side.client(self._leader)
        return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def on_both(sides: Mapping[str, Side], script: Callable[[Side], _Result]) -> tuple[_Result, _Result]:
    """Run a script on both at once; the results of Apache Kafka, and of the reference brokers."""
    with ThreadPoolExecutor(len(sides)) as threads:
        real, ours = (threads.submit(script, sides[name]) for name in ("real", "ours"))
        return real.result(), ours.result()


def differing(real: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The steps with different results, each with Kafka's and the reference brokers' result."""
    assert list(real) == list(ours)
    return {what: (real[what], ours[what]) for what in real if real[what] != ours[what]}

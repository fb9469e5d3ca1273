"""Apache Kafka's base offset in an error: -1 before the append, the batch's offset after it.

The proxy resends batches refused with -1 at once, from any producer. If the error has an offset, the log has the batch
and may keep it. All tests but the last send frames to the brokers themselves.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest

from kproxy_codec.api_keys import (
    ALTER_PARTITION_REASSIGNMENTS,
    DELETE_TOPICS,
    DESCRIBE_QUORUM,
    ELECT_LEADERS,
    FIND_COORDINATOR,
    INCREMENTAL_ALTER_CONFIGS,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    PRODUCE,
)
from tests.support.brokers.oracle import NODES, Outcome, RealSide, outcome
from tests.support.brokers.real_kafka import RealKafka
from tests.support.brokers.reference_broker import RawClient, create_topic
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import port_of
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

# The very first run downloads Kafka's jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

VERSIONS = (3, 7, 9, 11, 13)
TOPIC_IDS_FROM = 13
UNKNOWN_PARTITION = 7
PATIENCE_S = 60.0
# Far longer than deposing a leader takes.
WAITS_MS = 30_000
# The cluster takes a frozen broker out of the ISR after 5 s. An attempt that is slower is repeated.
ATTEMPTS = 5
REFUSED = Outcome("NOT_LEADER_OR_FOLLOWER")
UNKNOWN = Outcome("UNKNOWN_TOPIC_OR_PARTITION")
TOO_FEW = Outcome("NOT_ENOUGH_REPLICAS")
TIMED_OUT = Outcome("REQUEST_TIMED_OUT")
ONE = bytes(build_batch([b"one"]))
# The time to look for the one error that only a race causes, and the number of racing requests.
RACE_S = 6.0
RACERS = 4
PIPELINED = 10


class Topic:
    """A topic whose partitions have their replicas on the same nodes, in this order: the first one leads."""

    def __init__(
        self, side: RealSide, kafka: RealKafka, replicas: Sequence[int], partitions: int = 1, **configs: str
    ) -> None:
        self.name = f"base-offsets-{uuid.uuid4().hex[:10]}"
        self._partitions = list(range(partitions))
        self._side = side
        self._brokers = {broker.node_id: broker for broker in kafka.brokers}
        named = {name.replace("_", "."): value for name, value in configs.items()}
        with side.client(replicas[0]) as client:
            created = create_topic(client, self.name, [replicas] * partitions, named)
            assert created.error_code == 0, created
        self.wait_in_sync(*replicas)
        with side.client(replicas[0]) as client:
            self.topic_id = client.topic_id(self.name)

    def wait_in_sync(self, *replicas: int) -> None:
        """Wait until every node reports these replicas as in sync and the first as the leader."""

        def told(node_id: int) -> bool:
            with self._side.client(node_id) as client:
                [topic] = client.metadata(self.name, create=False).topics
            return len(topic.partitions) == len(self._partitions) and all(
                partition.leader_id == replicas[0] and set(partition.isr_nodes) == set(replicas)
                for partition in topic.partitions
            )

        wait_for(lambda: all(map(told, NODES)), PATIENCE_S, f"{self.name} in sync on {replicas}")
        # A broker may report a change before it has made it.
        leads = {node_id: node_id == replicas[0] for node_id in NODES}
        wait_for(lambda: {each: self._leads(each) for each in NODES} == leads, PATIENCE_S, f"the leader {replicas[0]}")

    def _leads(self, node_id: int) -> bool:
        """Whether a node serves all partitions."""
        entries = [{"partition_index": each, "timestamp": -1} for each in self._partitions]
        asked = [{"name": self.name, "partitions": entries}]
        with self._side.client(node_id) as client:
            [topic] = client.request(LIST_OFFSETS, 6, replica_id=-1, topics=asked).topics
        return all(partition.error_code == 0 for partition in topic.partitions)

    def in_sync(self, node_id: int) -> int:
        """The number of in-sync replicas, as that node reports."""
        with self._side.client(node_id) as client:
            [topic] = client.metadata(self.name, create=False).topics
        return min(len(partition.isr_nodes) for partition in topic.partitions)

    def stored(self, node_id: int, partition: int = 0) -> bytes:
        """The batches on a node's disk."""
        return self._brokers[node_id].stored(self.name, partition)

    def assign(self, client: RawClient, *replicas: int) -> None:
        """Assign other replicas or another order: the first is the preferred leader. An assigned leader continues."""
        asked = [{"partition_index": each, "replicas": list(replicas)} for each in self._partitions]
        topics = [{"name": self.name, "partitions": asked}]
        answer = client.request(ALTER_PARTITION_REASSIGNMENTS, 0, topics=topics, timeout_ms=10_000)
        codes = {entry.error_code for topic in answer.responses for entry in topic.partitions}
        assert (answer.error_code, codes) == (0, {0}), answer

    def elect_preferred(self, client: RawClient) -> None:
        asked = [{"topic": self.name, "partitions": self._partitions}]
        answer = client.request(ELECT_LEADERS, 2, election_type=0, topic_partitions=asked, timeout_ms=10_000)
        codes = {entry.error_code for result in answer.replica_election_results for entry in result.partition_result}
        assert (answer.error_code, codes) == (0, {0}), answer

    def require_in_sync(self, client: RawClient, replicas: int) -> None:
        """Set min.insync.replicas."""
        config = {"name": "min.insync.replicas", "config_operation": 0, "value": str(replicas)}
        asked = [{"resource_type": 2, "resource_name": self.name, "configs": [config]}]
        [answer] = client.request(INCREMENTAL_ALTER_CONFIGS, 1, resources=asked, validate_only=False).responses
        assert answer.error_code == 0, answer

    def delete(self, client: RawClient) -> None:
        [deleted] = client.request(DELETE_TOPICS, 5, topic_names=[self.name], timeout_ms=10_000).responses
        assert deleted.error_code == 0, deleted


@pytest.fixture(scope="module")
def side(real_kafka: RealKafka) -> RealSide:
    return RealSide(real_kafka)


@pytest.fixture(scope="module")
def guard(side: RealSide, real_kafka: RealKafka) -> Topic:
    """A topic on all nodes, which shows when a broker is back."""
    return Topic(side, real_kafka, NODES)


def send(
    client: RawClient, topic: Topic, records: bytes, version: int, partition: int = 0, timeout_ms: int = WAITS_MS,
    acks: int = -1, transactional_id: str | None = None,
) -> None:  # fmt: skip
    named: dict[str, Any] = {"topic_id": topic.topic_id} if version >= TOPIC_IDS_FROM else {"name": topic.name}
    data = [{**named, "partition_data": [{"index": partition, "records": records}]}]
    fields: dict[str, Any] = {
        "transactional_id": transactional_id,
        "acks": acks,
        "timeout_ms": timeout_ms,
        "topic_data": data,
    }
    client.send(PRODUCE, version, **fields)


def answered(client: RawClient) -> Outcome:
    """The outcome of the oldest request."""
    [topic] = client.receive().responses
    [result] = topic.partition_responses
    return outcome(result.error_code, result.base_offset)


def produce(client: RawClient, topic: Topic, records: bytes, version: int, *more: Any, **fields: Any) -> Outcome:
    send(client, topic, records, version, *more, **fields)
    return answered(client)


# Before the append


@pytest.mark.parametrize("acks", [-1, 1])
def test_non_leader_refuses_with_base_offset_minus_one(side: RealSide, real_kafka: RealKafka, acks: int) -> None:
    topic = Topic(side, real_kafka, [1, 2])
    with ExitStack() as stack:
        leader, follower, stranger = (stack.enter_context(side.client(node_id)) for node_id in NODES)
        assert produce(leader, topic, ONE, 9) == Outcome("NONE", 0)
        wait_for(lambda: topic.stored(2) == topic.stored(1), PATIENCE_S, "the replica")
        before = topic.stored(1)
        said = {
            version: [
                produce(follower, topic, ONE, version, acks=acks),
                produce(stranger, topic, ONE, version, acks=acks),
                produce(leader, topic, ONE, version, UNKNOWN_PARTITION, acks=acks),
            ]
            for version in VERSIONS
        }
        assert said == {version: [REFUSED, REFUSED, UNKNOWN] for version in VERSIONS}
        # A planned move: the former leader lives on.
        topic.assign(leader, 2, 1)
        topic.elect_preferred(leader)
        topic.wait_in_sync(2, 1)
        deposed = {version: produce(leader, topic, ONE, version, acks=acks) for version in VERSIONS}
        assert deposed == dict.fromkeys(VERSIONS, REFUSED)
        # The former leader may have truncated its log and be fetching again.
        wait_for(lambda: topic.stored(1) == topic.stored(2) == before, PATIENCE_S, "both logs as before")
        assert produce(follower, topic, ONE, 9) == Outcome("NONE", 1)


# After the append


class Roles(NamedTuple):
    """Node ids. The cluster's controllers have a majority without the frozen one."""

    leader: int
    successor: int
    frozen: int


def cast(side: RealSide) -> Roles:
    with side.client(NODES[0]) as client:
        asked = [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]
        [topic] = client.request(DESCRIBE_QUORUM, 1, topics=asked).topics
    controller: int = topic.partitions[0].leader_id
    leader, frozen = (node_id for node_id in NODES if node_id != controller)
    return Roles(leader, controller, frozen)


@contextmanager
def frozen(side: RealSide, node_id: int, guard: Topic) -> Iterator[None]:
    """A broker that hangs until the block ends; it has caught up when this returns."""
    side.pause(node_id)
    try:
        yield
    finally:
        side.resume(node_id)
        wait_for(lambda: guard.in_sync(NODES[0]) == len(NODES), PATIENCE_S, "the frozen broker in sync")


class Producer(NamedTuple):
    """One batch in flight; `before` batches of the same producer were appended to the partition."""

    what: str
    client: RawClient
    partition: int
    version: int
    records: bytes
    value: bytes
    before: int
    transactional_id: str | None = None


def producer_identity(side: RealSide, transactional_id: str | None) -> dict[str, Any]:
    """Producer id and epoch, as `build_batch` takes them."""

    def coordinator() -> int | None:
        fields = {"key_type": 1, "coordinator_keys": [transactional_id]}
        with side.client(NODES[0]) as client:
            [found] = client.request(FIND_COORDINATOR, 4, **fields).coordinators
        return None if found.error_code else found.node_id

    node_id = NODES[0] if transactional_id is None else wait_for(coordinator, PATIENCE_S, "the coordinator")

    def identity() -> dict[str, Any] | None:
        fields = {"transactional_id": transactional_id, "transaction_timeout_ms": 60_000}
        with side.client(node_id) as client:
            told = client.request(INIT_PRODUCER_ID, 4, **fields)
        return None if told.error_code else {"producer_id": told.producer_id, "producer_epoch": told.producer_epoch}

    found: dict[str, Any] = wait_for(identity, PATIENCE_S, "a producer id")
    return found


def producers(stack: ExitStack, side: RealSide, topic: Topic, connect: Callable[[], RawClient]) -> list[Producer]:
    """Plain ones in each version, an idempotent one, the same from another connection, a transactional one."""

    def client() -> RawClient:
        return stack.enter_context(connect())

    plain = [
        Producer(f"plain, v{version}", client(), partition, version, bytes(build_batch([value])), value, 0)
        for partition, version in enumerate(VERSIONS)
        for value in [b"plain %d" % version]
    ]
    at, value = len(VERSIONS), b"idempotent"
    identity = producer_identity(side, None)
    first, second = (bytes(build_batch([value], **identity, base_sequence=sequence)) for sequence in (0, 1))
    idempotent = Producer("idempotent", client(), at, 9, second, value, 1)
    assert produce(idempotent.client, topic, first, 9, at) == Outcome("NONE", 0)
    again = idempotent._replace(what="idempotent, again", client=client())

    at, value, name = at + 1, b"transactional", topic.name
    identity = producer_identity(side, name)
    first, second = (
        bytes(build_batch([value], **identity, base_sequence=sequence, is_transactional=True)) for sequence in (0, 1)
    )
    transactional = Producer("transactional", client(), at, 12, second, value, 1, name)
    # The first batch makes the partition part of the transaction; the coordinator may need more than one request.
    wait_for(
        lambda: produce(transactional.client, topic, first, 12, at, transactional_id=name) == Outcome("NONE", 0),
        PATIENCE_S,
        "a transaction",
    )
    return [*plain, idempotent, again, transactional]


def send_all(topic: Topic, leader: int, waiting: Sequence[Producer]) -> None:
    """Send every producer's batch, until it is in the leader's log."""
    for each in waiting:
        send(each.client, topic, each.records, each.version, each.partition, transactional_id=each.transactional_id)

        def appended(each: Producer = each) -> bool:
            return topic.stored(leader, each.partition).count(each.value) == each.before + 1

        wait_for(appended, PATIENCE_S, f"the batch of {each.what}")


def lead_elsewhere(topic: Topic, roles: Roles, client: RawClient) -> None:
    topic.elect_preferred(client)


def take_replica_away(topic: Topic, roles: Roles, client: RawClient) -> None:
    topic.assign(client, roles.successor, roles.frozen)


def delete(topic: Topic, roles: Roles, client: RawClient) -> None:
    topic.delete(client)


@pytest.mark.parametrize(
    ("happens", "error"),
    [
        (lead_elsewhere, "NOT_LEADER_OR_FOLLOWER"),
        (take_replica_away, "NOT_LEADER_OR_FOLLOWER"),
        (delete, "UNKNOWN_TOPIC_OR_PARTITION"),
    ],
)
def test_deposed_leader_reports_offset_of_waiting_batch(
    side: RealSide,
    real_kafka: RealKafka,
    guard: Topic,
    happens: Callable[[Topic, Roles, RawClient], None],
    error: str,
) -> None:
    roles = cast(side)
    for attempt in range(1, ATTEMPTS + 1):
        topic = Topic(side, real_kafka, [roles.leader, roles.successor, roles.frozen], len(VERSIONS) + 2)
        with ExitStack() as stack:
            waiting = producers(stack, side, topic, lambda: side.client(roles.leader))
            controller = stack.enter_context(side.client(roles.successor))
            topic.assign(controller, roles.successor, roles.leader, roles.frozen)
            with frozen(side, roles.frozen, guard):
                send_all(topic, roles.leader, waiting)
                happens(topic, roles, controller)
                said = {each.what: answered(each.client) for each in waiting}
                if happens is lead_elsewhere:
                    # Sending them to the new leader would append them again, except for the idempotent one.
                    for each in waiting:
                        assert each.value in topic.stored(roles.successor, each.partition), each.what
        if Outcome("NONE", 0) not in said.values():
            assert said == {each.what: Outcome(error, each.before) for each in waiting}
            return
        print(f"attempt {attempt}: the frozen broker was out of the ISR before the end: {said}")
    pytest.fail("no attempt was fast enough")


def test_replica_shortage_reports_offset_only_after_append(side: RealSide, real_kafka: RealKafka, guard: Topic) -> None:
    """A frozen broker leaves the ISR while a batch waits; later, min.insync.replicas changes under the requests."""
    roles = cast(side)
    strict = Topic(side, real_kafka, [roles.leader, roles.successor, roles.frozen], min_insync_replicas="3")
    racing = Topic(side, real_kafka, [roles.leader, roles.frozen], RACERS, min_insync_replicas="1")
    with side.client(roles.leader) as first, side.client(roles.leader) as second, frozen(side, roles.frozen, guard):
        send(first, strict, ONE, 9, timeout_ms=5_000)
        wait_for(lambda: strict.stored(roles.leader), PATIENCE_S, "the append")

        def is_refused() -> bool:
            return produce(second, strict, ONE, 9, timeout_ms=100) == TOO_FEW

        wait_for(is_refused, PATIENCE_S, "a refusal")
        before = strict.stored(roles.leader)
        assert {version: produce(second, strict, ONE, version) for version in VERSIONS} == dict.fromkeys(
            VERSIONS, TOO_FEW
        )
        seen = race(side, roles, racing)
        # Since Kafka 4.0 the high watermark does not rise below min.insync.replicas: the wait ends with 7, not with 20.
        assert answered(first) == Outcome("REQUEST_TIMED_OUT", 0)
        assert strict.stored(roles.leader) == before
    print(f"under changes of min.insync.replicas: {dict(seen)}")
    expected = {"NONE", "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "REQUEST_TIMED_OUT"}
    assert {error for error, _ in seen} <= expected, seen
    assert all(is_placed == (error != "NOT_ENOUGH_REPLICAS") for error, is_placed in seen), seen


def race(side: RealSide, roles: Roles, topic: Topic) -> Counter[tuple[str, bool]]:
    """Change min.insync.replicas between append and answer, until 20 was seen or RACE_S is over.

    Return, by error code, whether there was a base offset, and how often.
    """
    seen: Counter[tuple[str, bool]] = Counter()
    ended = threading.Event()

    def produce_on(partition: int) -> None:
        with side.client(roles.leader) as client:
            for _ in range(PIPELINED):
                send(client, topic, ONE, 9, partition, timeout_ms=200)
            while not ended.is_set():
                came = answered(client)
                seen[came.error, came.offset >= 0] += 1
                send(client, topic, ONE, 9, partition, timeout_ms=200)

    with ThreadPoolExecutor(RACERS) as threads, side.client(roles.successor) as controller:
        racers = [threads.submit(produce_on, partition) for partition in range(RACERS)]
        try:
            deadline = time.monotonic() + RACE_S
            while ("NOT_ENOUGH_REPLICAS_AFTER_APPEND", True) not in seen and time.monotonic() < deadline:
                topic.require_in_sync(controller, 2)
                topic.require_in_sync(controller, 1)
        finally:
            ended.set()
        for racer in racers:
            racer.result()
    return seen


# The proxy's answers


def test_proxy_resends_appended_batch_only_where_recognised(
    side: RealSide, real_kafka: RealKafka, guard: Topic, proxy: KproxyProcess
) -> None:
    roles = cast(side)
    for attempt in range(1, ATTEMPTS + 1):
        topic = Topic(side, real_kafka, [roles.leader, roles.successor, roles.frozen], len(VERSIONS) + 2)
        with ExitStack() as stack:
            waiting = producers(stack, side, topic, lambda: RawClient("127.0.0.1", port_of(proxy)))
            controller = stack.enter_context(side.client(roles.successor))
            topic.assign(controller, roles.successor, roles.leader, roles.frozen)
            with frozen(side, roles.frozen, guard):
                send_all(topic, roles.leader, waiting)
                topic.elect_preferred(controller)
            said = {each.what: answered(each.client) for each in waiting}
        # The proxy retries for 3 s; on a busy machine the next leader may not be ready by then.
        gave_up = any(said[each.what] == TIMED_OUT for each in waiting if "idempotent" in each.what)
        if said[waiting[0].what] != Outcome("NONE", 0) and not gave_up:
            break
        print(f"attempt {attempt}: the frozen broker was out of the ISR before the end, or time was over: {said}")
    expected = {each.what: Outcome("NONE", each.before) if "idempotent" in each.what else TIMED_OUT for each in waiting}
    assert said == expected
    for each in waiting:
        assert topic.stored(roles.successor, each.partition).count(each.value) == each.before + 1, each.what

"""Two clusters that are told the same: Apache Kafka, which is right by definition, and the reference brokers.

A side is three brokers, each topic on all of them, spoken to over the protocol alone: how topics are made, who leads
and who is in sync is asked in the same words of both. What differs is how a process is started and ended.
"""

from __future__ import annotations

import signal
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from codec import error_codes
from codec.api_keys import API_VERSIONS, CREATE_TOPICS, METADATA, PRODUCE
from tests.support.real_kafka import RealKafka
from tests.support.reference_broker import BrokerProcess, Closed, RawClient, wait_for

NODES = (1, 2, 3)
PATIENCE_S = 60.0
_Result = TypeVar("_Result")


class Side(ABC):
    """One cluster. Nodes are named by their broker ids."""

    name: str
    replication_factor = len(NODES)

    @abstractmethod
    def port(self, node_id: int) -> int: ...

    @abstractmethod
    def is_running(self, node_id: int) -> bool: ...

    @abstractmethod
    def start(self, node_id: int) -> None:
        """Until it serves."""

    @abstractmethod
    def stop(self, node_id: int) -> None:
        """SIGTERM, until it has ended."""

    @abstractmethod
    def kill(self, node_id: int) -> None: ...

    @abstractmethod
    def pause(self, node_id: int) -> None: ...

    @abstractmethod
    def resume(self, node_id: int) -> None: ...

    def client(self, node_id: int) -> RawClient:
        return RawClient("127.0.0.1", self.port(node_id))

    def create(self, topic: str, **configs: str) -> None:
        """One partition with a replica on every node, all of them in sync."""
        named = [{"name": name.replace("_", "."), "value": value} for name, value in configs.items()]
        asked = {"name": topic, "num_partitions": 1, "replication_factor": self.replication_factor, "configs": named}
        with self.client(NODES[0]) as client:
            [created] = client.request(CREATE_TOPICS, 7, topics=[asked], timeout_ms=10_000).topics
        assert created.error_code == 0, f"{self.name}: {created}"
        self.wait_in_sync(topic, self.replication_factor)

    def described(self, topic: str, node_id: int) -> Any:
        """What one node tells of the partition; None where it knows of none."""
        with self.client(node_id) as client:
            answer = client.request(METADATA, 12, topics=[{"name": topic}], allow_auto_topic_creation=False)
        partitions = answer.topics[0].partitions
        return partitions[0] if partitions else None

    def leader(self, topic: str) -> int:
        """The leader that every running node names, as soon as they do."""

        def agreed() -> int | None:
            told = [self.described(topic, node_id) for node_id in NODES if self.is_running(node_id)]
            leaders = {each.leader_id if each is not None else -1 for each in told}
            leader = leaders.pop()
            return leader if not leaders and leader != -1 and self.is_running(leader) else None

        found: int = wait_for(agreed, PATIENCE_S, f"{self.name}: a leader of {topic}")
        return found

    def wait_in_sync(self, topic: str, count: int) -> None:
        """Until the leader, and everybody, says that exactly so many replicas are in sync."""

        def in_sync() -> bool:
            told = [self.described(topic, node_id) for node_id in NODES if self.is_running(node_id)]
            return all(each is not None and each.leader_id != -1 and len(each.isr_nodes) == count for each in told)

        wait_for(in_sync, PATIENCE_S, f"{self.name}: {count} replicas of {topic} in sync")


class RealSide(Side):
    name = "Apache Kafka"

    def __init__(self, kafka: RealKafka) -> None:
        self._brokers = {broker.node_id: broker for broker in kafka.brokers}

    def port(self, node_id: int) -> int:
        return self._brokers[node_id].port

    def is_running(self, node_id: int) -> bool:
        return self._brokers[node_id].running

    def start(self, node_id: int) -> None:
        self._brokers[node_id].start()
        self._brokers[node_id].wait_started()

    def stop(self, node_id: int) -> None:
        self._brokers[node_id].stop()

    def kill(self, node_id: int) -> None:
        self._brokers[node_id].kill()

    def pause(self, node_id: int) -> None:
        self._brokers[node_id].pause()

    def resume(self, node_id: int) -> None:
        self._brokers[node_id].resume()


class ReferenceSide(Side):
    name = "the reference brokers"
    replication_factor = 1

    def __init__(self, brokers: Sequence[BrokerProcess]) -> None:
        self._brokers = {broker.node_id: broker for broker in brokers}

    def port(self, node_id: int) -> int:
        return self._brokers[node_id].port

    def is_running(self, node_id: int) -> bool:
        return self._brokers[node_id].process.poll() is None

    def start(self, node_id: int) -> None:
        self._brokers[node_id].start()

    def stop(self, node_id: int) -> None:
        self._brokers[node_id].terminate()

    def kill(self, node_id: int) -> None:
        self._brokers[node_id].kill()

    def pause(self, node_id: int) -> None:
        self._brokers[node_id].signal(signal.SIGSTOP)

    def resume(self, node_id: int) -> None:
        self._brokers[node_id].signal(signal.SIGCONT)


class Outcome(NamedTuple):
    """What came of a step, with the error code by its name."""

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
    """One produce request for one partition. For acks=0, whether the connection lives on."""
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


def on_both(sides: Mapping[str, Side], script: Callable[[Side], _Result]) -> tuple[_Result, _Result]:
    """The same script on both at once: what came of it at Apache Kafka, and at the reference brokers."""
    with ThreadPoolExecutor(len(sides)) as threads:
        real, ours = (threads.submit(script, sides[name]) for name in ("real", "ours"))
        return real.result(), ours.result()

"""Simulate Apache Kafka's behaviour when leaders move, with scripted brokers for real clients and proxies.

A broker refuses a batch for a partition that it does not lead with NOT_LEADER_OR_FOLLOWER and no base offset. It
refuses an acks=0 batch by closing the connection.
"""

from __future__ import annotations

from typing import Self

from kproxy_codec import api_keys as keys
from tests.support.brokers.scripted_upstream import Asked, Partition
from tests.support.processes.served import ServedBroker

NOT_LEADER = 6


class KafkaCluster:
    """`leaders` has the leading broker of each partition; every broker knows it at once. `appended` has all batches."""

    def __init__(self, count: int = 2) -> None:
        self.brokers = [ServedBroker(node_id, self._serve) for node_id in range(1, count + 1)]
        self.leaders: dict[Partition, int] = {}
        self.leader_epoch = 0
        self.appended: list[tuple[int, Partition, bytes]] = []
        # The number of acks=0 batches for partitions that the broker does not lead.
        self.refused_unanswered = 0
        self.metadata_requests = 0

    async def __aenter__(self) -> Self:
        for broker in self.brokers:
            await broker.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for broker in self.brokers:
            await broker.stop()

    @property
    def bootstrap(self) -> str:
        return ",".join(str(broker.address) for broker in self.brokers)

    def move(self, partition: Partition, leader: int) -> None:
        self.leaders[partition] = leader
        self.leader_epoch += 1

    def _serve(self, asked: Asked) -> None:
        if asked.header.api_key == keys.METADATA:
            self.metadata_requests += 1
            asked.answer_message(**self._metadata())
        elif asked.header.api_key == keys.PRODUCE:
            self._append(asked)

    def _metadata(self) -> dict[str, object]:
        topics: dict[str, list[dict[str, object]]] = {}
        nodes = [broker.node_id for broker in self.brokers]
        for (topic, index), leader in self.leaders.items():
            partition = {"error_code": 0, "partition_index": index, "leader_id": leader, "offline_replicas": []}
            partition |= {"leader_epoch": self.leader_epoch, "replica_nodes": nodes, "isr_nodes": nodes}
            topics.setdefault(topic, []).append(partition)
        addresses = [
            {"node_id": broker.node_id, "host": broker.address.host, "port": broker.port, "rack": None}
            for broker in self.brokers
        ]
        listed = [
            {"error_code": 0, "name": name, "is_internal": False, "partitions": partitions}
            for name, partitions in topics.items()
        ]
        return {"throttle_time_ms": 0, "cluster_id": "c", "controller_id": 1, "brokers": addresses, "topics": listed}

    def _append(self, asked: Asked) -> None:
        node_id = asked.connection.upstream.node_id
        refused = {partition for partition in asked.partitions if self.leaders.get(partition) != node_id}
        for partition, records in asked.records.items():
            if partition not in refused:
                self.appended.append((node_id, partition, records))
        if asked.fields["acks"] != 0:
            asked.answer(results=dict.fromkeys(refused, NOT_LEADER))
        elif refused:
            self.refused_unanswered += len(refused)
            asked.connection.close()

"""Topics of reference brokers on the wire: described, created, deleted, configured."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from kproxy_codec import api_keys, error_codes
from tests.support.brokers.reference_broker import Cluster, RawClient
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch


@pytest.mark.parametrize("version", range(14))
def test_every_metadata_version_names_brokers_and_leaders(cluster: Cluster, topic: str, version: int) -> None:
    with cluster.brokers[1].client() as client:
        answer = client.metadata(topic, version=version)
    assert {(each.node_id, each.port) for each in answer.brokers} == {
        (broker.node_id, broker.port) for broker in cluster.brokers
    }
    described = answer.topics[0]
    assert (described.error_code, described.name, len(described.partitions)) == (0, topic, 3)
    assert {each.leader_id for each in described.partitions} == {1, 2, 3}, "partitions go round the brokers"
    assert {each.error_code for each in described.partitions} == {0}
    assert version < 2 or answer.cluster_id
    assert version < 10 or isinstance(described.topic_id, uuid.UUID)


def test_all_brokers_describe_the_cluster_alike(cluster: Cluster, topic: str) -> None:
    cluster.leader(topic)
    # Each broker sees the topic and its owner by its own watch, so they agree soon, not at once.
    answers: list[dict[str, Any]] = []

    def are_alike() -> bool:
        answers.clear()
        for broker in cluster.brokers:
            with broker.client() as client:
                answers.append(client.metadata(topic, create=False).to_dict())
        return answers[0] == answers[1] == answers[2] and answers[0]["topics"][0]["error_code"] == 0

    wait_for(are_alike, what=lambda: answers)


def test_topics_are_created_only_when_request_allows_it(cluster: Cluster, topic: str) -> None:
    with cluster.brokers[0].client() as client:
        refused = client.metadata(topic, create=False).topics[0]
        assert refused.error_code == error_codes.UNKNOWN_TOPIC_OR_PARTITION
        assert client.metadata(topic).topics[0].error_code == 0


def test_topic_is_found_by_its_id(cluster: Cluster, topic: str) -> None:
    with cluster.brokers[0].client() as client:
        topic_id = client.metadata(topic).topics[0].topic_id
        asked = [{"name": None, "topic_id": topic_id}, {"name": None, "topic_id": uuid.uuid4()}]
        known, unknown = client.request(api_keys.METADATA, 12, topics=asked).topics
    assert (known.name, known.error_code) == (topic, 0)
    assert (unknown.name, unknown.error_code) == (None, error_codes.UNKNOWN_TOPIC_ID)


def test_metadata_lists_no_topics_or_all(cluster: Cluster, topic: str) -> None:
    cluster.leader(topic)
    with cluster.brokers[0].client() as client:
        assert client.request(api_keys.METADATA, 12, topics=[]).topics == []
        assert topic in {each.name for each in client.request(api_keys.METADATA, 12, topics=None).topics}
        assert topic in {each.name for each in client.request(api_keys.METADATA, 0, topics=[]).topics}


@pytest.mark.parametrize("version", [0, 1])
def test_describe_cluster_names_the_live_brokers(cluster: Cluster, version: int) -> None:
    with cluster.brokers[2].client() as client:
        answer = client.request(api_keys.DESCRIBE_CLUSTER, version)
    assert {(each.broker_id, each.port) for each in answer.brokers} == {(b.node_id, b.port) for b in cluster.brokers}
    assert (answer.error_code, answer.controller_id) == (0, 1)


def test_describe_topic_partitions_continues_at_its_cursor(cluster: Cluster) -> None:
    names = sorted(f"d-{uuid.uuid4().hex[:8]}" for _ in range(3))
    with cluster.brokers[0].client() as client:
        client.metadata(*names)
        seen: list[tuple[str, int]] = []
        cursor: Any = None
        for _ in range(20):
            answer = client.request(
                api_keys.DESCRIBE_TOPIC_PARTITIONS,
                0,
                topics=[{"name": name} for name in names],
                response_partition_limit=2,
                cursor=cursor,
            )
            assert all(part.last_known_elr == [] for each in answer.topics for part in each.partitions), (
                "Java fails on null"
            )
            seen += [(each.name, part.partition_index) for each in answer.topics for part in each.partitions]
            if answer.next_cursor is None:
                break
            cursor = {
                "topic_name": answer.next_cursor.topic_name,
                "partition_index": answer.next_cursor.partition_index,
            }
    assert seen == [(name, index) for name in names for index in range(3)]


def create(client: RawClient, name: str, version: int = 7, **fields: Any) -> Any:
    defaults = {"num_partitions": -1, "replication_factor": -1}
    options = {"timeout_ms": 5000, "validate_only": fields.pop("validate_only", False)}
    return client.request(
        api_keys.CREATE_TOPICS, version, topics=[{"name": name} | defaults | fields], **options
    ).topics[0]


@pytest.mark.parametrize("version", range(2, 8))
def test_created_topic_has_leaders_at_its_answer(cluster: Cluster, topic: str, version: int) -> None:
    with cluster.brokers[0].client() as client:
        assert create(client, topic, version, num_partitions=5, replication_factor=1).error_code == 0
        assert sorted(client.leaders(topic)) == list(range(5))
        assert -1 not in client.leaders(topic).values()
        assert create(client, topic, version).error_code == error_codes.TOPIC_ALREADY_EXISTS


@pytest.mark.parametrize(
    ("fields", "error_code"),
    [
        ({"replication_factor": 4}, error_codes.INVALID_REPLICATION_FACTOR),
        ({"num_partitions": 10_001}, error_codes.INVALID_PARTITIONS),
        ({"configs": [{"name": "retention.ms", "value": None}]}, error_codes.INVALID_CONFIG),
    ],
)
def test_refused_topic_is_explained_and_not_created(
    cluster: Cluster, topic: str, fields: dict[str, Any], error_code: int
) -> None:
    with cluster.brokers[0].client() as client:
        refused = create(client, topic, **fields)
        assert (refused.error_code, bool(refused.error_message)) == (error_code, True)
        assert client.metadata(topic, create=False).topics[0].error_code == error_codes.UNKNOWN_TOPIC_OR_PARTITION


def test_assigned_partitions_go_to_the_named_brokers(cluster: Cluster, topic: str) -> None:
    assignments = [{"partition_index": index, "broker_ids": [2, 3]} for index in range(2)]
    with cluster.brokers[0].client() as client:
        assert create(client, topic, assignments=assignments).error_code == 0
        described = client.metadata(topic).topics[0].partitions
        assert [(each.leader_id, each.replica_nodes) for each in described] == [(2, [2, 3])] * 2


@pytest.mark.parametrize("replication_factor", [1, 2, 3])
def test_topic_has_the_requested_number_of_replicas(cluster: Cluster, topic: str, replication_factor: int) -> None:
    with cluster.brokers[0].client() as client:
        created = create(client, topic, num_partitions=6, replication_factor=replication_factor)
        assert (created.error_code, created.num_partitions, created.replication_factor) == (0, 6, replication_factor)
        described = client.metadata(topic).topics[0].partitions
    assert {len(set(each.replica_nodes)) for each in described} == {replication_factor}
    assert [sum(each.leader_id == node_id for each in described) for node_id in (1, 2, 3)] == [2, 2, 2]
    assert [each.leader_id for each in described] == [each.replica_nodes[0] for each in described]
    assert all(each.leader_id in each.isr_nodes and each.offline_replicas == [] for each in described)
    assert all(set(each.isr_nodes) <= set(each.replica_nodes) for each in described)


def test_topic_configuration_is_described_as_its_own(cluster: Cluster, topic: str) -> None:
    configs = {"retention.ms": "60000", "min.insync.replicas": " +1 ", "cleanup.policy": "delete"}
    asked = [{"resource_type": 2, "resource_name": topic, "configuration_keys": None}]
    with cluster.brokers[0].client() as client:
        named = [{"name": name, "value": value} for name, value in configs.items()]
        created = create(client, topic, replication_factor=3, configs=named)
        [described] = client.request(api_keys.DESCRIBE_CONFIGS, 4, resources=asked).results
    found = {each.name: (each.value, each.config_source) for each in described.configs}
    own, brokers = 1, 4
    assert found["retention.ms"] == ("60000", own)
    assert found["min.insync.replicas"] == ("1", own)
    assert found["cleanup.policy"] == ("delete", own)
    assert found["retention.bytes"] == ("-1", brokers)
    assert {each.name: (each.value, each.config_source) for each in created.configs} == found


def test_validate_only_creates_nothing(cluster: Cluster, topic: str) -> None:
    with cluster.brokers[0].client() as client:
        planned = create(client, topic, validate_only=True)
        assert (planned.error_code, planned.num_partitions, planned.replication_factor) == (0, 3, 1)
        assert client.metadata(topic, create=False).topics[0].error_code == error_codes.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("version", [1, 5, 6])
def test_deleted_topic_comes_back_empty(cluster: Cluster, topic: str, version: int) -> None:
    leader = cluster.leader(topic)
    log_dir = leader.data_dir / f"{topic}-0"
    with leader.client() as client:
        client.produce(topic, 0, build_batch())
        assert log_dir.exists()
        fields: dict[str, Any] = {"topics": [{"name": topic}]} if version == 6 else {"topic_names": [topic]}
        assert client.request(api_keys.DELETE_TOPICS, version, **fields, timeout_ms=1000).responses[0].error_code == 0
        missing = client.request(api_keys.DELETE_TOPICS, version, **fields, timeout_ms=1000).responses[0]
        assert missing.error_code == error_codes.UNKNOWN_TOPIC_OR_PARTITION
        assert client.produce(topic, 0, build_batch()).error_code == error_codes.UNKNOWN_TOPIC_OR_PARTITION
    with cluster.leader(topic).client() as client:
        assert client.produce(topic, 0, build_batch()).base_offset == 0


def test_configurations_are_described_for_topics_and_brokers(cluster: Cluster, topic: str) -> None:
    cluster.leader(topic)
    asked = [
        {"resource_type": 2, "resource_name": topic, "configuration_keys": ["max.message.bytes"]},
        {"resource_type": 4, "resource_name": "1", "configuration_keys": None},
        {"resource_type": 2, "resource_name": "missing", "configuration_keys": None},
    ]
    with cluster.brokers[0].client() as client:
        topic_configs, broker_configs, missing = client.request(api_keys.DESCRIBE_CONFIGS, 4, resources=asked).results
    assert [(each.name, each.value) for each in topic_configs.configs] == [("max.message.bytes", "1048588")]
    assert "num.partitions" in {each.name for each in broker_configs.configs}
    assert missing.error_code == error_codes.UNKNOWN_TOPIC_OR_PARTITION

"""Groups and the cluster are administered through the proxy as at the brokers of a real Kafka cluster."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kafka
import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)

from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes
from kproxy_codec.coordination import GROUP, TRANSACTION
from tests.support.brokers.real_kafka import ADMIN_TIMEOUT_S, RealKafka, start_real_kafka
from tests.support.brokers.reference_broker import RawClient
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import kafka_proxy, port_of
from tests.support.waiting import wait_for

# Each test may be the first of the run, which starts Kafka.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

PARTITIONS, GROUPS, PATIENCE_S = 6, 8, 60.0
FIRST_PROXY = 1_000_000
BROKER_RESOURCE = 4


class Site:
    """Proxy and cluster, with a topic led by every broker, and groups coordinated by several."""

    def __init__(self, brokers: RealKafka, proxy: KproxyProcess) -> None:
        self.brokers, self.proxy = brokers, proxy
        name = uuid.uuid4().hex[:10]
        self.topic = brokers.create_topic(f"administered-{name}", PARTITIONS)
        self.groups = [f"administered-{name}-{number}" for number in range(GROUPS)]
        self.rdkafka = AdminClient({"bootstrap.servers": proxy.kafka, "log_level": 0})
        producer = Producer({"bootstrap.servers": proxy.kafka})
        for index in range(PARTITIONS):
            producer.produce(self.topic, b"value", partition=index)
        assert producer.flush(PATIENCE_S) == 0
        for group in self.groups:
            self.commit(group)
        self.coordinators = {group: self.coordinator(GROUP, group) for group in self.groups}

    def commit(self, group: str) -> None:
        places = [TopicPartition(self.topic, index, 1) for index in range(PARTITIONS)]
        asked = [ConsumerGroupTopicPartitions(group, places)]

        def is_committed() -> bool:
            # At first a coordinator is loading.
            done = self.brokers.admin().alter_consumer_group_offsets(asked)[group].result(PATIENCE_S)
            return all(each.error is None for each in done.topic_partitions)

        wait_for(is_committed, PATIENCE_S, "the group's offsets")

    def coordinator(self, key_type: int, key: str) -> int:
        """The real one."""
        with RawClient("127.0.0.1", self.brokers.brokers[0].port) as client:
            found = client.request(keys.FIND_COORDINATOR, 4, key_type=key_type, coordinator_keys=[key]).coordinators
        return int(found[0].node_id)

    def ask(self, api_key: int, version: int, **fields: Any) -> Any:
        """The proxy's answer."""
        with self.client() as client:
            return client.request(api_key, version, **fields)

    @contextmanager
    def client(self) -> Iterator[RawClient]:
        with RawClient("127.0.0.1", port_of(self.proxy)) as client:
            yield client


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With several coordinators, and an authorizer that allows everything."""
    more = {
        "offsets.topic.num.partitions": 6,
        "transaction.state.log.num.partitions": 6,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    with (
        start_real_kafka(tmp_path_factory.mktemp("kafka"), 3, more=more) as brokers,
        kafka_proxy(tmp_path_factory.mktemp("proxy"), brokers.bootstrap) as proxy,
    ):
        yield Site(brokers, proxy)
        print(proxy.stderr())


def test_groups_of_all_brokers_are_listed(site: Site) -> None:
    assert len(set(site.coordinators.values())) > 1
    assert {each.group_id for each in site.ask(keys.LIST_GROUPS, 5).groups} >= set(site.groups)
    listed = site.rdkafka.list_consumer_groups().result(PATIENCE_S)
    assert not listed.errors
    assert {each.group_id for each in listed.valid} >= set(site.groups)
    python = kafka.KafkaAdminClient(bootstrap_servers=site.proxy.kafka)
    assert {each["group_id"] for each in python.list_groups()} >= set(site.groups)
    python.close()


def test_groups_are_described_by_their_coordinators(site: Site) -> None:
    described = site.ask(keys.DESCRIBE_GROUPS, 5, groups=site.groups, include_authorized_operations=False).groups
    assert {each.group_id: (each.error_code, each.group_state) for each in described} == dict.fromkeys(
        site.groups, (0, "Empty")
    )
    for group, future in site.rdkafka.describe_consumer_groups(site.groups).items():
        assert future.result(PATIENCE_S).group_id == group


def test_deleted_groups_are_gone_from_their_coordinators(site: Site) -> None:
    groups = [f"deleted-{uuid.uuid4().hex[:8]}" for _ in range(GROUPS)]
    for group in groups:
        site.commit(group)
    results = site.ask(keys.DELETE_GROUPS, 2, groups_names=[*groups, "nobody"]).results
    codes = {each.group_id: each.error_code for each in results}
    assert codes == {**dict.fromkeys(groups, 0), "nobody": error_codes.GROUP_ID_NOT_FOUND}
    listed = site.brokers.admin().list_consumer_groups().result(PATIENCE_S).valid
    assert not {each.group_id for each in listed} & set(groups)


def test_committed_offsets_are_deleted(site: Site) -> None:
    group = f"offsets-{uuid.uuid4().hex[:8]}"
    site.commit(group)
    topics = [{"name": site.topic, "partitions": [{"partition_index": 2}]}]
    answer = site.ask(keys.OFFSET_DELETE, 0, group_id=group, topics=topics)
    assert (answer.error_code, answer.topics[0].partitions[0].error_code) == (0, 0)
    asked = [ConsumerGroupTopicPartitions(group)]
    left = site.brokers.admin().list_consumer_group_offsets(asked)[group].result(PATIENCE_S).topic_partitions
    assert sorted(each.partition for each in left) == [0, 1, 3, 4, 5]


def test_group_of_new_protocol_is_served(site: Site) -> None:
    group = f"new-{uuid.uuid4().hex[:8]}"
    consumer = Consumer(
        {
            "bootstrap.servers": site.proxy.kafka,
            "group.id": group,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([site.topic])
    got = {}
    for _ in range(300):
        message = consumer.poll(1.0)
        if message is not None and message.error() is None:
            got[message.partition()] = message.value()
        if len(got) == PARTITIONS:
            break
    assert got == dict.fromkeys(range(PARTITIONS), b"value")
    others = [group, *site.groups[:3]]
    described = {each.group_id: each for each in site.ask(keys.CONSUMER_GROUP_DESCRIBE, 1, group_ids=others).groups}
    assert described.keys() == set(others)
    [member] = described[group].members
    [topic] = member.assignment.topic_partitions
    assert (topic.topic_name, sorted(topic.partitions)) == (site.topic, list(range(PARTITIONS)))
    consumer.close()
    told = site.rdkafka.describe_consumer_groups([group])[group].result(PATIENCE_S)
    assert told.group_id == group


def test_records_are_deleted_at_each_owner(site: Site) -> None:
    topic = site.brokers.create_topic(f"shortened-{uuid.uuid4().hex[:8]}", PARTITIONS)
    producer = Producer({"bootstrap.servers": site.proxy.kafka})
    for number in range(PARTITIONS * 4):
        producer.produce(topic, b"value", partition=number % PARTITIONS)
    assert producer.flush(PATIENCE_S) == 0
    partitions = [{"partition_index": index, "offset": 3} for index in range(PARTITIONS)]
    absent = [{"name": "absent", "partitions": [{"partition_index": 0, "offset": 1}]}]
    asked = [{"name": topic, "partitions": partitions}, *absent]
    answer = {each.name: each for each in site.ask(keys.DELETE_RECORDS, 2, topics=asked, timeout_ms=30_000).topics}
    told = {each.partition_index: (each.error_code, each.low_watermark) for each in answer[topic].partitions}
    assert told == dict.fromkeys(range(PARTITIONS), (0, 3))
    assert [each.error_code for each in answer["absent"].partitions] == [error_codes.UNKNOWN_TOPIC_OR_PARTITION]
    asked_rd = [TopicPartition(topic, index, 4) for index in range(PARTITIONS)]
    for future in site.rdkafka.delete_records(asked_rd).values():
        assert future.result(PATIENCE_S).low_watermark == 4


def test_partition_facts_come_from_each_owner(site: Site) -> None:
    epochs = [{"partition": index, "current_leader_epoch": -1, "leader_epoch": 0} for index in range(PARTITIONS)]
    topics = [{"topic": site.topic, "partitions": epochs}]
    [topic] = site.ask(keys.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=topics).topics
    ends = {each.partition: (each.error_code, each.leader_epoch) for each in topic.partitions}
    assert ends == dict.fromkeys(range(PARTITIONS), (0, 0))
    producer = Producer({"bootstrap.servers": site.proxy.kafka, "enable.idempotence": True})
    for index in range(PARTITIONS):
        producer.produce(site.topic, b"again", partition=index)
    assert producer.flush(PATIENCE_S) == 0
    asked = [{"name": site.topic, "partition_indexes": list(range(PARTITIONS))}]
    [topic] = site.ask(keys.DESCRIBE_PRODUCERS, 0, topics=asked).topics
    producers = {each.partition_index: bool(each.active_producers) for each in topic.partitions}
    assert producers == dict.fromkeys(range(PARTITIONS), True)


def test_transactions_of_all_coordinators_are_described(site: Site) -> None:
    ids = [f"transaction-{uuid.uuid4().hex[:8]}" for _ in range(6)]
    producers = []
    for name in ids:
        producers.append(Producer({"bootstrap.servers": site.proxy.kafka, "transactional.id": name}))
        producers[-1].init_transactions(PATIENCE_S)
    producers[0].begin_transaction()
    producers[0].produce(site.topic, b"open", partition=1)
    producers[0].flush(PATIENCE_S)
    assert len({site.coordinator(TRANSACTION, name) for name in ids}) > 1
    listed = {each.transactional_id for each in site.ask(keys.LIST_TRANSACTIONS, 0).transaction_states}
    assert listed >= set(ids)
    described = site.ask(keys.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[*ids, "absent"]).transaction_states
    codes = {each.transactional_id: each.error_code for each in described}
    assert codes == {**dict.fromkeys(ids, 0), "absent": 105}
    [first] = [each for each in described if each.transactional_id == ids[0]]
    assert (first.transaction_state, [(each.topic, each.partitions) for each in first.topics]) == (
        "Ongoing",
        [(site.topic, [1])],
    )
    producers[0].abort_transaction(PATIENCE_S)


def config(kind: int, name: str, key: str, value: str) -> dict[str, Any]:
    entry = {"name": key, "config_operation": 0, "value": value}
    return {"resource_type": kind, "resource_name": name, "configs": [entry]}


def test_configurations_are_altered_at_named_brokers(site: Site) -> None:
    numbers = [str(each.node_id) for each in site.brokers.brokers]
    resources = [config(BROKER_RESOURCE, name, "log.cleaner.threads", "1") for name in numbers]
    resources += [
        config(2, site.topic, "retention.ms", "86400000"),
        config(BROKER_RESOURCE, "", "log.cleaner.threads", "1"),
    ]
    resources += [config(BROKER_RESOURCE, str(FIRST_PROXY), "log.cleaner.threads", "1")]
    answer = site.ask(keys.INCREMENTAL_ALTER_CONFIGS, 1, resources=resources, validate_only=False).responses
    codes = {(each.resource_type, each.resource_name): each.error_code for each in answer}
    proxy = (BROKER_RESOURCE, str(FIRST_PROXY))
    assert codes.pop(proxy) == error_codes.INVALID_REQUEST
    assert set(codes.values()) == {0}
    assert len(codes) == len(resources) - 1
    [message] = [each.error_message for each in answer if each.error_code]
    assert message.startswith("an id from 1000000 up is the id of a proxy (kproxy): configure a broker (")
    entry = ConfigEntry("retention.ms", "3600000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, site.topic, incremental_configs=[entry])
    assert site.rdkafka.incremental_alter_configs([resource])[resource].result(PATIENCE_S) is None


def test_brokers_are_described_by_either_id(site: Site) -> None:
    numbers = [*(str(each.node_id) for each in site.brokers.brokers), str(FIRST_PROXY)]
    resources = [
        {"resource_type": BROKER_RESOURCE, "resource_name": name, "configuration_keys": ["node.id"]} for name in numbers
    ]
    resources.append({"resource_type": 2, "resource_name": site.topic, "configuration_keys": ["retention.ms"]})
    results = site.ask(keys.DESCRIBE_CONFIGS, 4, resources=resources).results
    told = {each.resource_name: (each.error_code, [one.value for one in each.configs]) for each in results}
    assert all(told[name] == (0, [name]) for name in numbers[:-1])
    assert told[numbers[-1]][0] == 0
    assert told[numbers[-1]][1][0] in numbers[:-1]
    assert told[site.topic][0] == 0
    listed = site.ask(keys.LIST_CONFIG_RESOURCES, 1, resource_types=[2, BROKER_RESOURCE]).config_resources
    assert [each.resource_name for each in listed if each.resource_type == BROKER_RESOURCE] == [str(FIRST_PROXY)]
    assert site.topic in {each.resource_name for each in listed if each.resource_type == 2}


def test_replicas_on_proxies_are_refused(site: Site) -> None:
    new = f"placed-{uuid.uuid4().hex[:8]}"
    real = [each.node_id for each in site.brokers.brokers]

    def topic(name: str, replicas: list[int]) -> dict[str, Any]:
        placed = [{"partition_index": 0, "broker_ids": replicas}]
        return {"name": name, "num_partitions": -1, "replication_factor": -1, "assignments": placed, "configs": []}

    asked = [topic(new, real), topic(f"{new}-proxy", [FIRST_PROXY])]
    results = {each.name: each for each in site.ask(keys.CREATE_TOPICS, 7, topics=asked, timeout_ms=30_000).topics}
    assert results[new].error_code == 0
    refused = results[f"{new}-proxy"]
    assert refused.error_code == error_codes.INVALID_REPLICA_ASSIGNMENT
    assert "is the id of a proxy" in refused.error_message
    more = [{"name": new, "count": 2, "assignments": [{"broker_ids": [FIRST_PROXY]}]}]
    [answer] = site.ask(keys.CREATE_PARTITIONS, 3, topics=more, timeout_ms=30_000, validate_only=False).results
    assert answer.error_code == error_codes.INVALID_REPLICA_ASSIGNMENT
    moves = [{"partition_index": 0, "replicas": [FIRST_PROXY]}]
    reassigned = site.ask(
        keys.ALTER_PARTITION_REASSIGNMENTS, 0, topics=[{"name": new, "partitions": moves}], timeout_ms=30_000
    )
    [partition] = reassigned.responses[0].partitions
    assert (reassigned.error_code, partition.error_code) == (0, error_codes.INVALID_REPLICA_ASSIGNMENT)
    moves[0]["replicas"] = real[::-1]
    reassigned = site.ask(
        keys.ALTER_PARTITION_REASSIGNMENTS, 0, topics=[{"name": new, "partitions": moves}], timeout_ms=30_000
    )
    assert (reassigned.error_code, reassigned.responses[0].partitions[0].error_code) == (0, 0)
    assert site.ask(keys.LIST_PARTITION_REASSIGNMENTS, 0, topics=None, timeout_ms=30_000).error_code == 0
    elected = site.ask(keys.ELECT_LEADERS, 2, election_type=0, topic_partitions=None, timeout_ms=30_000)
    assert elected.error_code == 0


def test_directories_of_all_brokers_are_described(site: Site) -> None:
    asked = [{"topic": site.topic, "partitions": list(range(PARTITIONS))}]
    answer = site.ask(keys.DESCRIBE_LOG_DIRS, 4, topics=asked)
    assert answer.error_code == 0
    brokers = {each.log_dir.partition(":")[0] for each in answer.results}
    assert brokers == {str(each.node_id) for each in site.brokers.brokers}
    assert all(each.topics for each in answer.results)


def test_cluster_is_administered_at_any_broker(site: Site) -> None:
    quorum = site.ask(
        keys.DESCRIBE_QUORUM, 1, topics=[{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]
    )
    assert (quorum.error_code, len(quorum.topics[0].partitions[0].current_voters)) == (0, 3)
    entity = [{"entity_type": "client-id", "entity_name": "c"}]
    ops = [{"key": "producer_byte_rate", "value": 1e9, "remove": False}]
    entries = [{"entity": entity, "ops": ops}]
    [altered] = site.ask(keys.ALTER_CLIENT_QUOTAS, 1, entries=entries, validate_only=False).entries
    assert altered.error_code == 0

    def is_told() -> bool:
        match = [{"entity_type": "client-id", "match_type": 0, "match": "c"}]
        return bool(site.ask(keys.DESCRIBE_CLIENT_QUOTAS, 1, components=match, strict=True).entries)

    wait_for(is_told, PATIENCE_S, "the quota")
    user = {"name": "u", "mechanism": 1, "iterations": 4096, "salt": b"salt", "salted_password": b"password"}
    [altered] = site.ask(keys.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=[], upsertions=[user]).results
    assert (altered.user, altered.error_code) == ("u", 0)
    wait_for(
        lambda: not site.ask(keys.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, users=[{"name": "u"}]).results[0].error_code,
        PATIENCE_S,
        "the user",
    )
    feature = [{"feature": "no.such", "max_version_level": 1, "upgrade_type": 1}]
    assert site.ask(keys.UPDATE_FEATURES, 1, feature_updates=feature, timeout_ms=1_000, validate_only=True).error_code


def test_acls_of_the_brokers_are_administered(site: Site) -> None:
    literal, operation, allow = ResourcePatternType.LITERAL, AclOperation.READ, AclPermissionType.ALLOW
    rule = AclBinding(ResourceType.TOPIC, site.topic, literal, "User:somebody", "*", operation, allow)
    wanted = AclBindingFilter(ResourceType.TOPIC, site.topic, literal, None, None, operation, allow)
    assert site.rdkafka.create_acls([rule])[rule].result(PATIENCE_S) is None
    wait_for(lambda: site.rdkafka.describe_acls(wanted).result(PATIENCE_S) == [rule], PATIENCE_S, "the rule")
    assert site.rdkafka.delete_acls([wanted])[wanted].result(PATIENCE_S) == [rule]


def test_silent_broker_is_an_error_in_lists(site: Site) -> None:
    coordinator = site.coordinators[site.groups[0]]
    [dead] = [broker for broker in site.brokers.brokers if broker.node_id == coordinator]
    theirs = [group for group, broker in site.coordinators.items() if broker == dead.node_id]
    dead.pause()
    try:
        answer = site.ask(keys.LIST_GROUPS, 4)
        listed = {each.group_id for each in answer.groups}
        assert listed >= set(site.groups) - set(theirs)
        assert answer.error_code == error_codes.COORDINATOR_NOT_AVAILABLE
        described = site.ask(keys.DESCRIBE_GROUPS, 5, groups=site.groups).groups
        assert {each.group_id for each in described} == set(site.groups)
    finally:
        dead.resume()
    wait_for(lambda: not site.ask(keys.LIST_GROUPS, 4).error_code, ADMIN_TIMEOUT_S, "the broker")

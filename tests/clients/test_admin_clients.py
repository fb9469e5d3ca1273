"""Admin clients against a running `kproxy dev`, with the proxy as their only address: groups of three brokers."""

from __future__ import annotations

import uuid

import kafka
import pytest
from confluent_kafka import Consumer, ConsumerGroupState, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from kproxy_codec import api_keys as keys
from tests.support.brokers.reference_broker import RawClient
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import port_of

GROUPS, PARTITIONS, TIMEOUT_S = 6, 3, 60.0


class Site:
    def __init__(self, kafka_address: str) -> None:
        self.kafka, name = kafka_address, uuid.uuid4().hex[:10]
        self.topic = f"administered-{name}"
        self.groups = [f"administered-{name}-{number}" for number in range(GROUPS)]
        self.rdkafka = AdminClient({"bootstrap.servers": kafka_address})
        self.rdkafka.create_topics([NewTopic(self.topic, PARTITIONS)])[self.topic].result(TIMEOUT_S)
        for group in self.groups:
            self.commit(group)

    def commit(self, group: str) -> None:
        consumer = Consumer({"bootstrap.servers": self.kafka, "group.id": group})
        offsets = [TopicPartition(self.topic, index, 0) for index in range(PARTITIONS)]
        consumer.commit(offsets=offsets, asynchronous=False)
        consumer.close()

    def offsets(self, group: str) -> dict[int, int]:
        asked = self.rdkafka.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        return {each.partition: each.offset for each in asked[group].result(TIMEOUT_S).topic_partitions}


@pytest.fixture
def site(dev_cluster: KproxyProcess) -> Site:
    return Site(dev_cluster.kafka)


def test_librdkafka_administers_groups(site: Site) -> None:
    listed = site.rdkafka.list_consumer_groups().result(TIMEOUT_S)
    assert not listed.errors
    assert {each.group_id for each in listed.valid} >= set(site.groups)
    described = site.rdkafka.describe_consumer_groups(site.groups)
    states = {name: future.result(TIMEOUT_S).state for name, future in described.items()}
    assert states == dict.fromkeys(site.groups, ConsumerGroupState.EMPTY)
    moved = ConsumerGroupTopicPartitions(site.groups[0], [TopicPartition(site.topic, 1, 7)])
    site.rdkafka.alter_consumer_group_offsets([moved])[site.groups[0]].result(TIMEOUT_S)
    assert site.offsets(site.groups[0]) == {0: 0, 1: 7, 2: 0}
    for future in site.rdkafka.delete_consumer_groups(site.groups).values():
        assert future.result(TIMEOUT_S) is None
    listed = site.rdkafka.list_consumer_groups().result(TIMEOUT_S)
    assert not {each.group_id for each in listed.valid} & set(site.groups)


def test_kafka_python_administers_groups(site: Site) -> None:
    admin = kafka.KafkaAdminClient(bootstrap_servers=site.kafka)
    assert {each["group_id"] for each in admin.list_groups()} >= set(site.groups)
    described = admin.describe_groups(site.groups)
    assert {name: each["group_state"] for name, each in described.items()} == dict.fromkeys(site.groups, "Empty")
    place = kafka.TopicPartition(site.topic, 1)
    admin.delete_group_offsets(site.groups[0], [place])
    assert site.offsets(site.groups[0]) == {0: 0, 2: 0}
    admin.delete_groups(site.groups)
    admin.close()


def test_leader_epochs_are_asked_of_their_owners(site: Site, dev_cluster: KproxyProcess) -> None:
    epochs = [{"partition": index, "current_leader_epoch": -1, "leader_epoch": 0} for index in range(PARTITIONS)]
    topics = [{"topic": site.topic, "partitions": epochs}]
    with RawClient("127.0.0.1", port_of(dev_cluster)) as client:
        [topic] = client.request(keys.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=topics).topics
    assert {each.partition: each.error_code for each in topic.partitions} == dict.fromkeys(range(PARTITIONS), 0)


def test_brokers_without_an_api_do_not_offer_it(dev_cluster: KproxyProcess) -> None:
    with RawClient("127.0.0.1", port_of(dev_cluster)) as client:
        offered = {each.api_key for each in client.request(keys.API_VERSIONS, 0).api_keys}
    assert keys.LIST_GROUPS in offered
    assert not offered & {keys.ALTER_CONFIGS, keys.DESCRIBE_ACLS, keys.ELECT_LEADERS, keys.CONSUMER_GROUP_DESCRIBE}

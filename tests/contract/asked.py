"""Define the requests (`ASKED`) that test_answers_as_kafka.py sends to Kafka, the proxy and the reference brokers."""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kproxy_codec import api_keys as keys
from tests.support.brokers.oracle import ONE
from tests.support.wire.record_batches import build_batch

# Placeholders in the fields of requests: a topic to read, one to write, the name of a new one, a name without a topic,
# and the broker that Metadata names.
TOPIC, TOPIC_ID, WRITTEN, NEW, UNKNOWN, NODE = "TOPIC", "TOPIC_ID", "WRITTEN", "NEW", "UNKNOWN", "NODE"
NO_ID, STRANGE_ID = uuid.UUID(int=0), uuid.UUID("9b4b2b3e-1111-4222-8333-944444444444")
CLOSED, SILENT = "closed", "silent"
HOUR_MS = 3_600_000
NOW_MS = round(time.time() * 1000)

Fields = Mapping[str, Any]


class Asked(NamedTuple):
    """One request. `shown`: fields whose values are compared besides error codes; `body`: bytes instead of `fields`."""

    what: str
    api_key: int
    version: int
    fields: Fields
    shown: tuple[str, ...] = ()
    body: bytes | None = None


def of(what: str, api_key: int, version: int, *shown: str, **fields: Any) -> Asked:
    """A request with these fields."""
    return Asked(what, api_key, version, fields, shown)


def produce(
    what: str, *indexes: int, topic: Any = WRITTEN, records: bytes = ONE, version: int = 9, **more: Any
) -> Asked:
    """To these partitions, or the first one."""
    fields = {"acks": -1, "timeout_ms": 10_000, **more}
    partitions = [{"index": index, "records": records} for index in indexes or (0,)]
    fields.setdefault("topic_data", [{"name" if version < 13 else "topic_id": topic, "partition_data": partitions}])
    return Asked(f"Produce: {what}", keys.PRODUCE, version, fields)


def stamped(first: int) -> bytes:
    return bytes(build_batch([b"v"], timestamp=first))


def fetch(what: str, *, topic: str = TOPIC, version: int = 11, partition: Fields | None = None, **more: Any) -> Asked:
    asked = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20, **(partition or {})}
    fields = {"max_wait_ms": 0, "min_bytes": 0, "max_bytes": 1 << 20, **more}
    fields.setdefault("topics", [{"topic" if version < 13 else "topic_id": topic, "partitions": [asked]}])
    return Asked(f"Fetch: {what}", keys.FETCH, version, fields)


def committed(what: str, version: int, *topics: Fields | None) -> Asked:
    """For as many groups as there are `topics`; None: all of them."""
    groups = [{"group_id": UNKNOWN, "topics": None if topic is None else [topic]} for topic in topics]
    return Asked(f"OffsetFetch v{version}: {what}", keys.OFFSET_FETCH, version, {"groups": groups})


def commit(what: str, topic: Any, version: int = 10, index: int = 0) -> Asked:
    partition = {"partition_index": index, "committed_offset": 1, "committed_leader_epoch": 3, "committed_metadata": ""}
    named = {"name" if version < 10 else "topic_id": topic}
    fields = {"group_id": UNKNOWN, "topics": [{**named, "partitions": [partition]}]}
    return Asked(f"OffsetCommit: {what}", keys.OFFSET_COMMIT, version, fields)


def offsets(what: str, timestamp: int, *, topic: str = TOPIC, index: int = 0, version: int = 6, **more: Any) -> Asked:
    asked = {"partition_index": index, "timestamp": timestamp, **more.pop("partition", {})}
    fields = {"replica_id": -1, "topics": [{"name": topic, "partitions": [asked]}], **more}
    return Asked(f"ListOffsets v{version}: {what}", keys.LIST_OFFSETS, version, fields, ("offset", "old_style_offsets"))


def metadata(what: str, topics: list[Fields] | None, version: int = 12, **more: Any) -> Asked:
    fields = {"topics": topics, **({"allow_auto_topic_creation": False} if version >= 4 else {}), **more}
    return Asked(f"Metadata: {what}", keys.METADATA, version, fields)


def versions(what: str, version: int, name: str = "", software_version: str = "") -> Asked:
    fields = {"client_software_name": name, "client_software_version": software_version} if version >= 3 else {}
    return Asked(f"ApiVersions: {what}", keys.API_VERSIONS, version, fields)


def coordinator(what: str, version: int, **fields: Any) -> Asked:
    return Asked(f"FindCoordinator: {what}", keys.FIND_COORDINATOR, version, fields)


def producer_id(what: str, version: int = 4, **more: Any) -> Asked:
    fields = {"transactional_id": None, "transaction_timeout_ms": 60_000, **more}
    return Asked(f"InitProducerId: {what}", keys.INIT_PRODUCER_ID, version, fields)


def configs(what: str, *resources: tuple[int, str], version: int = 4, named: list[str] | None = None) -> Asked:
    asked = [{"resource_type": kind, "resource_name": name, "configuration_keys": named} for kind, name in resources]
    return Asked(f"DescribeConfigs: {what}", keys.DESCRIBE_CONFIGS, version, {"resources": asked})


def create(what: str, version: int = 7, name: str = NEW, validate_only: bool = True, **more: Any) -> Asked:
    topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": [], **more}
    fields = {"topics": [topic], "timeout_ms": 10_000, "validate_only": validate_only}
    return Asked(f"CreateTopics: {what}", keys.CREATE_TOPICS, version, fields)


def delete(what: str, *topics: Fields) -> Asked:
    return of(f"DeleteTopics: {what}", keys.DELETE_TOPICS, 6, topics=list(topics), timeout_ms=1000)


def add_partitions(what: str, topic: str, count: int) -> Asked:
    topics = [{"name": topic, "count": count, "assignments": None}]
    asked = f"CreatePartitions: {what}"
    return of(asked, keys.CREATE_PARTITIONS, 3, topics=topics, timeout_ms=1000, validate_only=True)


def describe(what: str, topic: str, limit: int = 10) -> Asked:
    topics, asked = [{"name": topic}], f"DescribeTopicPartitions: {what}"
    return of(asked, keys.DESCRIBE_TOPIC_PARTITIONS, 0, topics=topics, response_partition_limit=limit)


def raw(what: str, api_key: int, version: int, body: bytes) -> Asked:
    return Asked(f"{keys.name_of(api_key)}: {what}", api_key, version, {}, (), body)


TOPIC_TYPE, BROKER_TYPE, LOGGER_TYPE = 2, 4, 8
ASKED: Sequence[Asked] = [
    produce("an unknown topic", topic=UNKNOWN),
    produce("an unknown topic, acks=1", topic=UNKNOWN, acks=1),
    produce("an unknown topic, acks=0", topic=UNKNOWN, acks=0),
    produce("an unknown topic, version 3", topic=UNKNOWN, version=3),
    produce("an unknown topic, version 12", topic=UNKNOWN, version=12),
    produce("an unknown partition", 99),
    produce("an unknown partition, acks=1", 99, acks=1),
    produce("an unknown partition, acks=0", 99, acks=0),
    produce("partition -1", -1),
    produce("partition 2147483647", (1 << 31) - 1),
    produce("an empty name", topic=""),
    produce("an illegal name", topic="a b"),
    produce("an unknown id", topic=STRANGE_ID, version=13),
    produce("the id of all zeros", topic=NO_ID, version=13),
    produce("an unknown partition by id", 99, topic=TOPIC_ID, version=13),
    produce("a known and an unknown partition", 0, 99),
    produce("acks=2", acks=2),
    produce("acks=-2", acks=-2),
    produce("no topics", topic_data=[]),
    produce("a topic without partitions", topic_data=[{"name": WRITTEN, "partition_data": []}]),
    produce("no records", records=b""),
    produce("records cut short", records=ONE[:30]),
    produce("a timeout of -1", timeout_ms=-1, acks=1),
    produce("a partition twice", 0, 0),
    produce("a timestamp two hours ahead", records=stamped(NOW_MS + 2 * HOUR_MS)),
    produce("a timestamp ten days ahead", records=stamped(NOW_MS + 240 * HOUR_MS)),
    produce("a timestamp half an hour ahead", records=stamped(NOW_MS + HOUR_MS // 2)),
    produce("a timestamp of 1970", records=stamped(1)),
    produce("timestamp -1", records=stamped(-1)),
    produce("timestamp -2", records=stamped(-2)),
    produce("a transactional id without a transaction", transactional_id="nobody"),
    raw("version 2", keys.PRODUCE, 2, struct.pack(">hii", 1, 1000, 0)),
    raw("version 99", keys.PRODUCE, 99, b"\0" * 16),
    raw("a body of noise", keys.PRODUCE, 9, b"\xff" * 16),
    raw("an empty body", keys.PRODUCE, 9, b""),
    fetch("an unknown topic", topic=UNKNOWN),
    fetch("an unknown topic, version 4", topic=UNKNOWN, version=4),
    fetch("an unknown partition", partition={"partition": 99}),
    fetch("partition -1", partition={"partition": -1}),
    fetch("an empty name", topic=""),
    fetch("offset -1", partition={"fetch_offset": -1}),
    fetch("offset -5", partition={"fetch_offset": -5}),
    fetch("an offset behind the end", partition={"fetch_offset": 1 << 40}),
    fetch("a later leader epoch", partition={"current_leader_epoch": 1 << 20}),
    fetch("a leader epoch of -7", partition={"current_leader_epoch": -7}),
    fetch("a session's last epoch", session_id=77, session_epoch=-1),
    fetch("session epoch -5", session_id=0, session_epoch=-5),
    fetch("an unknown session", session_id=77, session_epoch=3),
    fetch("session epoch -1", session_id=0, session_epoch=-1),
    fetch("session epoch 5 without a session", session_id=0, session_epoch=5),
    fetch("max_bytes 0", max_bytes=0),
    fetch("max_bytes -1", max_bytes=-1),
    fetch("partition_max_bytes -1", partition={"partition_max_bytes": -1}),
    fetch("min_bytes -1", min_bytes=-1),
    fetch("max_wait_ms -1", max_wait_ms=-1, min_bytes=1, partition={"fetch_offset": 0}),
    fetch("isolation level 7", isolation_level=7),
    fetch("no topics", topics=[]),
    fetch("a topic without partitions", topics=[{"topic": TOPIC, "partitions": []}]),
    fetch("a follower's replica id", replica_id=1),
    fetch("replica id -2", replica_id=-2),
    *(fetch(f"a topic by id, version {each}", topic=TOPIC_ID, version=each) for each in range(13, 19)),
    *(fetch(f"an unknown id, version {each}", topic=STRANGE_ID, version=each) for each in (13, 18)),
    fetch("the id of all zeros", topic=NO_ID, version=13),
    fetch("an unknown partition by id", topic=TOPIC_ID, version=16, partition={"partition": 99}),
    fetch("an offset behind the end, by id", topic=TOPIC_ID, version=17, partition={"fetch_offset": 1 << 40}),
    raw("version 3", keys.FETCH, 3, b"\0" * 32),
    raw("version 99", keys.FETCH, 99, b"\0" * 32),
    raw("noise", keys.FETCH, 12, b"\xff" * 20),
    offsets("an unknown topic", -1, topic=UNKNOWN),
    offsets("an unknown topic, version 1", -1, topic=UNKNOWN, version=1),
    offsets("an unknown partition", -1, index=99),
    offsets("partition -1", -1, index=-1),
    offsets("an empty name", -1, topic=""),
    *(
        offsets(f"timestamp {timestamp}", timestamp, version=version)
        for version in (1, 6, 9, 10, 11)
        for timestamp in (-2, -3, -4, -5, -6, -7, -(1 << 63))
    ),
    offsets("timestamp 0", 0),
    offsets("the largest timestamp", (1 << 63) - 1),
    offsets("a later leader epoch", -1, partition={"current_leader_epoch": 1 << 20}),
    offsets("a leader epoch of -7", -1, partition={"current_leader_epoch": -7}),
    offsets("replica id 0", -1, replica_id=0),
    offsets("replica id -2", -1, replica_id=-2),
    offsets("isolation level 7", -1, isolation_level=7),
    offsets(
        "a partition twice", -1, topics=[{"name": TOPIC, "partitions": [{"partition_index": 0, "timestamp": -1}] * 2}]
    ),
    offsets("no topics", -1, topics=[]),
    raw("version 0", keys.LIST_OFFSETS, 0, struct.pack(">ii", -1, 0)),
    raw("version 99", keys.LIST_OFFSETS, 99, b"\0" * 16),
    metadata("an unknown topic", [{"name": UNKNOWN}]),
    metadata("an unknown topic twice", [{"name": UNKNOWN}] * 2),
    metadata("an empty name", [{"name": ""}]),
    metadata("an illegal name", [{"name": "a b"}]),
    metadata("a name too long", [{"name": "x" * 250}]),
    metadata("no topics", []),
    metadata("an unknown id", [{"topic_id": STRANGE_ID, "name": None}]),
    metadata("the id of all zeros", [{"topic_id": NO_ID, "name": None}]),
    metadata("an id in version 11", [{"topic_id": STRANGE_ID, "name": "x"}], 11),
    metadata("a null name in version 11", [{"topic_id": NO_ID, "name": None}], 11),
    metadata("a null name and an id in version 11", [{"topic_id": STRANGE_ID, "name": None}], 11),
    metadata("an unknown topic, version 1", [{"name": "a b"}], 1),
    raw("version 99", keys.METADATA, 99, b"\0" * 8),
    raw("noise", keys.METADATA, 9, b"\xff" * 12),
    raw("a count beyond the bytes", keys.METADATA, 1, struct.pack(">i", 1000)),
    raw("a negative count", keys.METADATA, 1, struct.pack(">i", -2)),
    versions("version 0", 0),
    versions("version 3", 3, "kproxy", "1.0"),
    versions("an empty name", 3),
    versions("an empty software version", 3, "kproxy"),
    versions("a name with a space", 3, "k proxy", "1.0"),
    versions("a name that ends with a dash", 3, "kproxy-", "1.0"),
    versions("a name that begins with a dot", 4, ".kproxy", "1.0"),
    versions("a software version with a slash", 4, "kproxy", "1/0"),
    versions("a name not of ASCII", 3, "kpröxy", "1.0"),
    versions("a name with a line's end", 3, "kproxy\n", "1.0"),
    versions("a dot and a dash within", 4, "k-p.roxy", "1.0-rc.1"),
    raw("version 99", keys.API_VERSIONS, 99, b"\0"),
    raw("version -1", keys.API_VERSIONS, -1, b"\0"),
    coordinator("an empty group", 3, key="", key_type=0),
    coordinator("an unknown type", 3, key="g", key_type=9),
    coordinator("an unknown type, version 4", 4, coordinator_keys=["g"], key_type=9),
    coordinator("no keys", 4, coordinator_keys=[], key_type=0),
    coordinator("an empty transactional id", 4, coordinator_keys=[""], key_type=1),
    coordinator("a share group's key that is none", 6, coordinator_keys=["g"], key_type=2),
    raw("version 99", keys.FIND_COORDINATOR, 99, b"\0" * 8),
    producer_id("version 0", 0),
    producer_id("an empty transactional id", transactional_id=""),
    producer_id("an epoch without an id", producer_id=-1, producer_epoch=5),
    producer_id("an id without an epoch", producer_id=5, producer_epoch=-1),
    producer_id("an id and an epoch", producer_id=5, producer_epoch=5),
    producer_id("a timeout of 0", transaction_timeout_ms=0),
    configs("a topic", (TOPIC_TYPE, TOPIC)),
    configs("an unknown topic", (TOPIC_TYPE, UNKNOWN)),
    configs("an illegal topic", (TOPIC_TYPE, "a b")),
    configs("an empty topic", (TOPIC_TYPE, "")),
    configs("the broker that Metadata names", (BROKER_TYPE, NODE)),
    configs("that broker, version 1", (BROKER_TYPE, NODE), version=1),
    configs("that broker and topics", (TOPIC_TYPE, TOPIC), (BROKER_TYPE, NODE), (TOPIC_TYPE, UNKNOWN)),
    configs("that broker twice", (BROKER_TYPE, NODE), (BROKER_TYPE, NODE)),
    configs("that broker, one name", (BROKER_TYPE, NODE), named=["log.retention.ms"]),
    configs("that broker, no names", (BROKER_TYPE, NODE), named=[]),
    configs("that broker and the default", (BROKER_TYPE, NODE), (BROKER_TYPE, "")),
    configs("all brokers' default", (BROKER_TYPE, "")),
    configs("an unknown broker", (BROKER_TYPE, "777")),
    configs("broker -1", (BROKER_TYPE, "-1")),
    configs("a broker that is no number", (BROKER_TYPE, "one")),
    configs("a broker that is too large a number", (BROKER_TYPE, "99999999999")),
    configs("that broker's loggers", (LOGGER_TYPE, NODE)),
    configs("an unknown broker's loggers", (LOGGER_TYPE, "777")),
    configs("an unknown type", (77, "x")),
    configs("type 0", (0, "x")),
    configs("nothing"),
    create("a topic"),
    create("a topic that exists", name=TOPIC),
    create("an empty name", name=""),
    create("an illegal name", name="a/b"),
    create("no partitions", num_partitions=0),
    create("-2 partitions", num_partitions=-2),
    create("a replication factor of 0", replication_factor=0),
    create("a replication factor of 77", replication_factor=77),
    create(
        "replicas on an unknown broker",
        num_partitions=-1,
        replication_factor=-1,
        assignments=[{"partition_index": 0, "broker_ids": [777]}],
    ),
    create("an unknown configuration", configs=[{"name": "no.such", "value": "1"}]),
    create("version 2", 2),
    of("CreateTopics: none", keys.CREATE_TOPICS, 7, topics=[], timeout_ms=1000, validate_only=True),
    of("DeleteTopics: an unknown topic", keys.DELETE_TOPICS, 5, topic_names=[UNKNOWN], timeout_ms=1000),
    delete("an unknown id", {"name": None, "topic_id": STRANGE_ID}),
    delete("a name and an id", {"name": UNKNOWN, "topic_id": STRANGE_ID}),
    delete("none"),
    add_partitions("an unknown topic", UNKNOWN, 3),
    add_partitions("fewer", TOPIC, 0),
    of("DescribeCluster: brokers", keys.DESCRIBE_CLUSTER, 1, endpoint_type=1),
    of("DescribeCluster: controllers", keys.DESCRIBE_CLUSTER, 1, endpoint_type=2),
    of("DescribeCluster: endpoint type 7", keys.DESCRIBE_CLUSTER, 1, endpoint_type=7),
    of("DescribeCluster: fenced brokers", keys.DESCRIBE_CLUSTER, 2, include_fenced_brokers=True),
    describe("an unknown topic", UNKNOWN),
    describe("an illegal topic", "a b"),
    describe("a limit of -1", TOPIC, -1),
    of(
        "OffsetForLeaderEpoch: an unknown topic",
        keys.OFFSET_FOR_LEADER_EPOCH,
        4,
        replica_id=-1,
        topics=[{"topic": UNKNOWN, "partitions": [{"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}]}],
    ),
    of("DescribeLogDirs: all", keys.DESCRIBE_LOG_DIRS, 4, topics=None),
    of(
        "DescribeQuorum: the metadata",
        keys.DESCRIBE_QUORUM,
        1,
        topics=[{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}],
    ),
    of("DescribeGroups: an unknown group", keys.DESCRIBE_GROUPS, 5, "group_state", groups=[UNKNOWN]),
    of("DescribeGroups v6: an unknown group", keys.DESCRIBE_GROUPS, 6, "group_state", groups=[UNKNOWN]),
    of("DeleteGroups: an unknown group", keys.DELETE_GROUPS, 2, groups_names=[UNKNOWN]),
    of("DeleteGroups: no group", keys.DELETE_GROUPS, 2, groups_names=[]),
    of(
        "OffsetDelete: an unknown group",
        keys.OFFSET_DELETE,
        0,
        group_id=UNKNOWN,
        topics=[{"name": TOPIC, "partitions": [{"partition_index": 0}]}],
    ),
    of("ConsumerGroupDescribe: an unknown group", keys.CONSUMER_GROUP_DESCRIBE, 0, group_ids=[UNKNOWN]),
    of(
        "ConsumerGroupHeartbeat: an unknown member",
        keys.CONSUMER_GROUP_HEARTBEAT,
        0,
        group_id=UNKNOWN,
        member_id="nobody",
        member_epoch=5,
    ),
    *(
        of(
            f"DeleteRecords: {what}",
            keys.DELETE_RECORDS,
            2,
            "low_watermark",
            topics=[{"name": name, "partitions": [{"partition_index": index, "offset": offset}]}],
            timeout_ms=9,
        )
        for what, name, index, offset in (
            ("from the start", TOPIC, 0, 0),
            ("past the end", TOPIC, 0, 99),
            ("offset -5", TOPIC, 0, -5),
            ("an unknown partition", TOPIC, 77, 0),
            ("an unknown topic", UNKNOWN, 0, 0),
        )
    ),
    *(
        of(
            f"DescribeProducers: {what}",
            keys.DESCRIBE_PRODUCERS,
            0,
            topics=[{"name": name, "partition_indexes": [index]}],
        )
        for what, name, index in (
            ("a partition", TOPIC, 0),
            ("an unknown partition", TOPIC, 77),
            ("an unknown topic", UNKNOWN, 0),
        )
    ),
    of("DescribeTransactions: an unknown id", keys.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[UNKNOWN]),
    of("ListTransactions: all", keys.LIST_TRANSACTIONS, 0),
    *(
        of(
            f"IncrementalAlterConfigs: {what}",
            keys.INCREMENTAL_ALTER_CONFIGS,
            1,
            resources=[
                {
                    "resource_type": kind,
                    "resource_name": resource,
                    "configs": [{"name": name, "config_operation": operation, "value": value}],
                }
            ],
            validate_only=True,
        )
        for what, kind, resource, name, operation, value in (
            ("a topic", TOPIC_TYPE, TOPIC, "retention.ms", 0, "5000"),
            ("a value that is none", TOPIC_TYPE, TOPIC, "retention.ms", 0, "soon"),
            ("an unknown name", TOPIC_TYPE, TOPIC, "no.such", 0, "1"),
            ("an unknown operation", TOPIC_TYPE, TOPIC, "retention.ms", 9, "5000"),
            ("an unknown topic", TOPIC_TYPE, UNKNOWN, "retention.ms", 0, "5000"),
            ("an unknown broker", BROKER_TYPE, "777", "log.cleaner.threads", 0, "1"),
            ("the default of brokers", BROKER_TYPE, "", "log.cleaner.threads", 0, "1"),
            ("the broker that Metadata names", BROKER_TYPE, NODE, "log.cleaner.threads", 0, "1"),
            ("an unknown type", 77, "x", "a", 0, "1"),
        )
    ),
    of(
        "ElectLeaders: an unknown topic",
        keys.ELECT_LEADERS,
        2,
        election_type=0,
        topic_partitions=[{"topic": UNKNOWN, "partitions": [0]}],
        timeout_ms=99,
    ),
    of("ListPartitionReassignments: all", keys.LIST_PARTITION_REASSIGNMENTS, 0, topics=None, timeout_ms=99),
    of(
        "AlterPartitionReassignments: an unknown topic",
        keys.ALTER_PARTITION_REASSIGNMENTS,
        0,
        topics=[{"name": UNKNOWN, "partitions": [{"partition_index": 0, "replicas": [1]}]}],
        timeout_ms=99,
    ),
    of(
        "DescribeAcls: all",
        keys.DESCRIBE_ACLS,
        2,
        resource_type_filter=1,
        pattern_type_filter=1,
        operation=1,
        permission_type=1,
    ),
    of("DescribeClientQuotas: all", keys.DESCRIBE_CLIENT_QUOTAS, 1, components=[], strict=False),
    of("DescribeUserScramCredentials: unknown", keys.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, users=[{"name": "no"}]),
    of(
        "UpdateFeatures: unknown",
        keys.UPDATE_FEATURES,
        1,
        timeout_ms=99,
        validate_only=True,
        feature_updates=[{"feature": "no.such", "max_version_level": 1, "upgrade_type": 1}],
    ),
    of("ListConfigResources: groups", keys.LIST_CONFIG_RESOURCES, 1, resource_types=[32]),
    of("ListConfigResources: an unknown type", keys.LIST_CONFIG_RESOURCES, 1, resource_types=[77]),
    committed("no groups", 8),
    committed("a group twice", 8, None, {"name": UNKNOWN, "partition_indexes": [0]}),
    committed("an unknown topic", 9, {"name": UNKNOWN, "partition_indexes": [0]}),
    committed("all topics", 10, None),
    committed("an unknown id", 10, {"topic_id": STRANGE_ID, "partition_indexes": [0, 1]}),
    committed("a topic", 10, {"topic_id": TOPIC_ID, "partition_indexes": [0, 99]}),
    commit("an unknown id", STRANGE_ID),
    commit("the id of all zeros", NO_ID),
    commit("an unknown partition by id", TOPIC_ID, index=99),
    of(
        "EndTxn: an unknown id",
        keys.END_TXN,
        3,
        transactional_id=UNKNOWN,
        producer_id=5,
        producer_epoch=0,
        committed=True,
    ),
    of(
        "AddPartitionsToTxn: an unknown id",
        keys.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id=UNKNOWN,
        v3_and_below_producer_id=5,
        v3_and_below_producer_epoch=0,
        v3_and_below_topics=[{"name": TOPIC, "partitions": [0]}],
    ),
    of(
        "AddPartitionsToTxn: as a broker",
        keys.ADD_PARTITIONS_TO_TXN,
        5,
        transactions=[{"transactional_id": UNKNOWN, "topics": [{"name": TOPIC, "partitions": [0]}]}],
    ),
    raw("it was not negotiated", keys.SASL_HANDSHAKE, 1, b"\0\5PLAIN"),
    raw("nobody has it", 999, 0, b""),
    raw("key -1", -1, 0, b""),
]

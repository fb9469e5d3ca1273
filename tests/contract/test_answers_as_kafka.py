"""Apache Kafka is right: requests with odd versions, fields, names and numbers, answered by the proxy and the brokers.

Each request goes to Apache Kafka directly and through the proxy, and to the reference brokers. Where an answer differs
on purpose, `PROXY_DIFFERS` or `BROKER_DIFFERS` says how and why. A difference that is listed and not seen fails, too.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from kproxy.broker.apis.registry import OFFERED
from kproxy.proxy.apis import APIS, KEY_TYPES, SERVED, Handling
from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes
from kproxy_codec.coordination import GROUP, TRANSACTION
from kproxy_codec.framing import request_header
from tests.contract.asked import (
    ADMINISTRATION,
    BROKER_TYPE,
    LOGGER_TYPE,
    NEW,
    NODE,
    TOPIC,
    TOPIC_ID,
    TOPIC_TYPE,
    UNKNOWN,
    WRITTEN,
    Asked,
    Fields,
)
from tests.support.brokers.oracle import NODES, ONE, PATIENCE_S, Side
from tests.support.brokers.real_kafka import RealKafka
from tests.support.brokers.reference_broker import Closed, RawClient
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import kafka_proxy, port_of
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

NO_ID, STRANGE_ID = uuid.UUID(int=0), uuid.UUID("9b4b2b3e-1111-4222-8333-944444444444")
CLOSED, SILENT = "closed", "silent"
HOUR_MS = 3_600_000
NOW_MS = round(time.time() * 1000)


class Differs(NamedTuple):
    """What is answered on purpose instead of Kafka's answer."""

    answer: str
    why: str


# Requests


def produce(
    what: str, *, topic: str = WRITTEN, index: int = 0, records: bytes = ONE, version: int = 9, **more: Any
) -> Asked:
    fields = {"acks": -1, "timeout_ms": 10_000, **more}
    partitions = [{"index": index, "records": records}]
    fields.setdefault("topic_data", [{"name": topic, "partition_data": partitions}])
    return Asked(f"Produce: {what}", keys.PRODUCE, version, fields)


def stamped(first: int) -> bytes:
    return bytes(build_batch([b"v"], timestamp=first))


def fetch(what: str, *, topic: str = TOPIC, version: int = 11, partition: Fields | None = None, **more: Any) -> Asked:
    asked = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20, **(partition or {})}
    fields = {"max_wait_ms": 0, "min_bytes": 0, "max_bytes": 1 << 20, **more}
    fields.setdefault("topics", [{"topic": topic, "partitions": [asked]}])
    return Asked(f"Fetch: {what}", keys.FETCH, version, fields)


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


def raw(what: str, api_key: int, version: int, body: bytes) -> Asked:
    return Asked(f"{keys.name_of(api_key)}: {what}", api_key, version, {}, (), body)


ASKED: Sequence[Asked] = [
    produce("an unknown topic", topic=UNKNOWN),
    produce("an unknown topic, acks=1", topic=UNKNOWN, acks=1),
    produce("an unknown topic, acks=0", topic=UNKNOWN, acks=0),
    produce("an unknown topic, version 3", topic=UNKNOWN, version=3),
    produce("an unknown topic, version 12", topic=UNKNOWN, version=12),
    produce("an unknown partition", index=99),
    produce("an unknown partition, acks=1", index=99, acks=1),
    produce("an unknown partition, acks=0", index=99, acks=0),
    produce("partition -1", index=-1),
    produce("partition 2147483647", index=(1 << 31) - 1),
    produce("an empty name", topic=""),
    produce("an illegal name", topic="a b"),
    produce(
        "an unknown id",
        version=13,
        topic_data=[{"topic_id": STRANGE_ID, "partition_data": [{"index": 0, "records": ONE}]}],
    ),
    produce(
        "the id of all zeros",
        version=13,
        topic_data=[{"topic_id": NO_ID, "partition_data": [{"index": 0, "records": ONE}]}],
    ),
    produce(
        "an unknown partition by id",
        version=13,
        topic_data=[{"topic_id": TOPIC_ID, "partition_data": [{"index": 99, "records": ONE}]}],
    ),
    produce(
        "a known and an unknown partition",
        topic_data=[
            {"name": WRITTEN, "partition_data": [{"index": 0, "records": ONE}, {"index": 99, "records": ONE}]},
        ],
    ),
    produce("acks=2", acks=2),
    produce("acks=-2", acks=-2),
    produce("no topics", topic_data=[]),
    produce("a topic without partitions", topic_data=[{"name": WRITTEN, "partition_data": []}]),
    produce("no records", records=b""),
    produce("records cut short", records=ONE[:30]),
    produce("a timeout of -1", timeout_ms=-1, acks=1),
    produce(
        "a partition twice",
        topic_data=[
            {"name": WRITTEN, "partition_data": [{"index": 0, "records": ONE}, {"index": 0, "records": ONE}]},
        ],
    ),
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
        for version in (1, 6, 9)
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
        assignments=[
            {"partition_index": 0, "broker_ids": [777]},
        ],
    ),
    create("an unknown configuration", configs=[{"name": "no.such", "value": "1"}]),
    create("version 2", 2),
    Asked("CreateTopics: none", keys.CREATE_TOPICS, 7, {"topics": [], "timeout_ms": 1000, "validate_only": True}),
    Asked("DeleteTopics: an unknown topic", keys.DELETE_TOPICS, 5, {"topic_names": [UNKNOWN], "timeout_ms": 1000}),
    Asked(
        "DeleteTopics: an unknown id",
        keys.DELETE_TOPICS,
        6,
        {"topics": [{"name": None, "topic_id": STRANGE_ID}], "timeout_ms": 1000},
    ),
    Asked(
        "DeleteTopics: a name and an id",
        keys.DELETE_TOPICS,
        6,
        {"topics": [{"name": UNKNOWN, "topic_id": STRANGE_ID}], "timeout_ms": 1000},
    ),
    Asked("DeleteTopics: none", keys.DELETE_TOPICS, 6, {"topics": [], "timeout_ms": 1000}),
    Asked(
        "CreatePartitions: an unknown topic",
        keys.CREATE_PARTITIONS,
        3,
        {"topics": [{"name": UNKNOWN, "count": 3, "assignments": None}], "timeout_ms": 1000, "validate_only": True},
    ),
    Asked(
        "CreatePartitions: fewer",
        keys.CREATE_PARTITIONS,
        3,
        {"topics": [{"name": TOPIC, "count": 0, "assignments": None}], "timeout_ms": 1000, "validate_only": True},
    ),
    Asked("DescribeCluster: brokers", keys.DESCRIBE_CLUSTER, 1, {"endpoint_type": 1}),
    Asked("DescribeCluster: controllers", keys.DESCRIBE_CLUSTER, 1, {"endpoint_type": 2}),
    Asked("DescribeCluster: endpoint type 7", keys.DESCRIBE_CLUSTER, 1, {"endpoint_type": 7}),
    Asked(
        "DescribeTopicPartitions: an unknown topic",
        keys.DESCRIBE_TOPIC_PARTITIONS,
        0,
        {"topics": [{"name": UNKNOWN}], "response_partition_limit": 10},
    ),
    Asked(
        "DescribeTopicPartitions: an illegal topic",
        keys.DESCRIBE_TOPIC_PARTITIONS,
        0,
        {"topics": [{"name": "a b"}], "response_partition_limit": 10},
    ),
    Asked(
        "DescribeTopicPartitions: a limit of -1",
        keys.DESCRIBE_TOPIC_PARTITIONS,
        0,
        {"topics": [{"name": TOPIC}], "response_partition_limit": -1},
    ),
    Asked(
        "OffsetForLeaderEpoch: an unknown topic",
        keys.OFFSET_FOR_LEADER_EPOCH,
        4,
        {
            "replica_id": -1,
            "topics": [
                {"topic": UNKNOWN, "partitions": [{"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}]}
            ],
        },
    ),
    Asked("DescribeLogDirs: all", keys.DESCRIBE_LOG_DIRS, 4, {"topics": None}),
    Asked(
        "DescribeQuorum: the metadata",
        keys.DESCRIBE_QUORUM,
        1,
        {"topics": [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]},
    ),
    Asked("ListGroups: all", keys.LIST_GROUPS, 4, {}),
    *ADMINISTRATION,
    Asked(
        "OffsetFetch: an unknown group",
        keys.OFFSET_FETCH,
        7,
        {"group_id": UNKNOWN, "topics": None, "require_stable": False},
    ),
    Asked(
        "OffsetFetch: an unknown topic",
        keys.OFFSET_FETCH,
        7,
        {"group_id": UNKNOWN, "topics": [{"name": UNKNOWN, "partition_indexes": [0]}], "require_stable": False},
    ),
    Asked(
        "OffsetCommit: an unknown topic",
        keys.OFFSET_COMMIT,
        7,
        {
            "group_id": UNKNOWN,
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "group_instance_id": None,
            "topics": [
                {
                    "name": UNKNOWN,
                    "partitions": [
                        {
                            "partition_index": 0,
                            "committed_offset": 1,
                            "committed_leader_epoch": -1,
                            "committed_metadata": "",
                        }
                    ],
                }
            ],
        },
    ),
    Asked(
        "Heartbeat: an unknown member",
        keys.HEARTBEAT,
        4,
        {"group_id": UNKNOWN, "generation_id": 1, "member_id": "nobody"},
    ),
    Asked(
        "LeaveGroup: an unknown member",
        keys.LEAVE_GROUP,
        5,
        {"group_id": UNKNOWN, "members": [{"member_id": "nobody"}]},
    ),
    Asked(
        "JoinGroup: a session of 1 ms",
        keys.JOIN_GROUP,
        9,
        {
            "group_id": UNKNOWN,
            "session_timeout_ms": 1,
            "rebalance_timeout_ms": 1,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        },
    ),
    Asked(
        "SyncGroup: an unknown member",
        keys.SYNC_GROUP,
        5,
        {
            "group_id": UNKNOWN,
            "generation_id": 1,
            "member_id": "nobody",
            "protocol_type": "consumer",
            "protocol_name": "range",
        },
    ),
    Asked(
        "EndTxn: an unknown id",
        keys.END_TXN,
        3,
        {"transactional_id": UNKNOWN, "producer_id": 5, "producer_epoch": 0, "committed": True},
    ),
    Asked(
        "AddPartitionsToTxn: an unknown id",
        keys.ADD_PARTITIONS_TO_TXN,
        3,
        {
            "v3_and_below_transactional_id": UNKNOWN,
            "v3_and_below_producer_id": 5,
            "v3_and_below_producer_epoch": 0,
            "v3_and_below_topics": [{"name": TOPIC, "partitions": [0]}],
        },
    ),
    raw("it was not negotiated", keys.SASL_HANDSHAKE, 1, b"\0\5PLAIN"),
    raw("nobody has it", 999, 0, b""),
    raw("key -1", -1, 0, b""),
]


# Differences on purpose


_NOT_OFFERED = "the API is not offered, and ApiVersions says so"


def not_offered(offered: Container[int]) -> dict[str, Differs]:
    """Requests of APIs that Kafka has and the side does not offer."""
    known = [each for each in ASKED if each.api_key in APIS and each.api_key != keys.SASL_HANDSHAKE]
    return {each.what: Differs(CLOSED, _NOT_OFFERED) for each in known if each.api_key not in offered}


_ONCE = "the answer has each partition once; a client that names one twice would not know what became of which"
_NO_EPOCHS = "no answer of the proxy has a leader epoch, so none of a request can be compared"
_FOLLOWER = "a follower's fetch would move the high watermark; followers have a listener of their own"
_BY_PARTITION = "an answer that may be merged from several brokers has a broker's error in each partition"
_MALFORMED = "a count below -1 is malformed; Kafka takes it for -1"
_KAFKAS_FAULT = "Kafka fails with an internal error"
_A_PROXY = "that broker is a proxy, whose configuration cannot be altered"
_NO_TRANSACTIONS = "the reference brokers keep no transactions, and say so"

PROXY_DIFFERS: Mapping[str, Differs] = {
    **not_offered(SERVED),
    "Produce: a partition twice": Differs("INVALID_REQUEST", _ONCE),
    "Fetch: a later leader epoch": Differs("NONE, NONE", _NO_EPOCHS),
    "Fetch: isolation level 7": Differs("NONE, UNKNOWN_SERVER_ERROR", _BY_PARTITION),
    "Fetch: a follower's replica id": Differs(CLOSED, _FOLLOWER),
    "ListOffsets v6: a later leader epoch": Differs("NONE, offset 1", _NO_EPOCHS),
    "ListOffsets v6: a leader epoch of -7": Differs("NONE, offset 1", _NO_EPOCHS),
    "METADATA: a negative count": Differs(CLOSED, _MALFORMED),
    "DescribeLogDirs: all": Differs("NONE, NONE, NONE, NONE", "the proxy tells those of all three brokers"),
    "IncrementalAlterConfigs: the broker that Metadata names": Differs("INVALID_REQUEST", _A_PROXY),
}
BROKER_DIFFERS: Mapping[str, Differs] = {
    **not_offered(OFFERED),
    "Produce: a partition twice": Differs("INVALID_REQUEST, INVALID_REQUEST", _ONCE),
    "Fetch: max_bytes -1": Differs("NONE, NONE", _KAFKAS_FAULT),
    "Fetch: partition_max_bytes -1": Differs("NONE, NONE", _KAFKAS_FAULT),
    "Fetch: isolation level 7": Differs("NONE, NONE", _KAFKAS_FAULT),
    "Fetch: a follower's replica id": Differs(CLOSED, _FOLLOWER),
    "ListOffsets v6: isolation level 7": Differs("NONE, offset 1", _KAFKAS_FAULT),
    "Metadata: the id of all zeros": Differs("UNKNOWN_TOPIC_ID", _KAFKAS_FAULT),
    "METADATA: a negative count": Differs(CLOSED, _MALFORMED),
    "FindCoordinator: an empty transactional id": Differs("CLUSTER_AUTHORIZATION_FAILED", _NO_TRANSACTIONS),
    "DescribeConfigs: that broker's loggers": Differs("INVALID_REQUEST", "the reference brokers have no such loggers"),
}


# Answers


class Place(NamedTuple):
    """Where requests go: a broker that leads the topic's partition, or the proxy. `names` fill in the fields."""

    port: int
    names: Mapping[Any, Any]
    coordinators: Mapping[int, int]


def place_of(port: int, topic: str) -> Place:
    with RawClient("127.0.0.1", port) as client:
        described = client.metadata(topic, create=False)
        written = client.metadata(written_of(topic), create=False).topics[0]
    node = next(str(broker.node_id) for broker in described.brokers if broker.port == port)
    unused = uuid.uuid4().hex[:10]
    names = {TOPIC: topic, WRITTEN: written.name, TOPIC_ID: written.topic_id, NODE: node}
    names |= {NEW: f"new-{unused}", UNKNOWN: f"unknown-{unused}"}
    return Place(port, names, {kind: coordinator_port(port, kind, names[UNKNOWN]) for kind in (GROUP, TRANSACTION)})


def written_of(topic: str) -> str:
    return f"{topic}-written"


def coordinator_port(port: int, kind: int, key: str) -> int:
    """The port of the coordinator, as soon as it serves; brokers without any are asked themselves."""

    def served() -> int | None:
        with RawClient("127.0.0.1", port) as client:
            [found] = client.request(keys.FIND_COORDINATOR, 4, coordinator_keys=[key], key_type=kind).coordinators
            if found.error_code in (error_codes.INVALID_REQUEST, error_codes.CLUSTER_AUTHORIZATION_FAILED):
                return port
            if found.error_code:
                return None
        with RawClient("127.0.0.1", found.port) as client:
            if kind == GROUP:
                beat = {"group_id": key, "generation_id": 1, "member_id": "nobody"}
                error_code = client.request(keys.HEARTBEAT, 4, **beat).error_code
            else:
                end = {"transactional_id": key, "producer_id": 5, "producer_epoch": 0, "committed": True}
                error_code = client.request(keys.END_TXN, 3, **end).error_code
        is_loading = error_code in (error_codes.COORDINATOR_LOAD_IN_PROGRESS, error_codes.NOT_COORDINATOR)
        return None if is_loading or error_code == error_codes.COORDINATOR_NOT_AVAILABLE else int(found.port)

    found: int = wait_for(served, PATIENCE_S, "a coordinator")
    return found


def port_for(place: Place, asked: Asked) -> int:
    handling = APIS[asked.api_key].handling if asked.api_key in APIS else None
    key_types = {**KEY_TYPES, Handling.EACH_GROUP: GROUP, Handling.EACH_TRANSACTION: TRANSACTION}
    if handling not in key_types or asked.api_key == keys.INIT_PRODUCER_ID:
        return place.port
    return place.coordinators[key_types[handling]]


def filled(value: Any, names: Mapping[Any, Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: filled(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, names) for each in value]
    return names.get(value, value) if isinstance(value, str) else value


def ask(place: Place, asked: Asked) -> str:
    """The error codes of the answer in their order, by name, and the values that are shown; or CLOSED, SILENT."""
    with RawClient("127.0.0.1", port_for(place, asked)) as client:
        try:
            if asked.body is not None:
                client.send_bytes(request_header(asked.api_key, asked.version, 1, b"raw") + asked.body)
                client.receive_frame()
                return "answered"
            fields = filled(asked.fields, place.names)
            if fields.get("acks") == 0:
                client.send(asked.api_key, asked.version, answered=False, **fields)
                return CLOSED if client.is_closed() else SILENT
            answer = client.request(asked.api_key, asked.version, **fields).to_dict()
        except Closed:
            return CLOSED
    return ", ".join(outcomes(answer, asked.shown)) or "no error code"


def outcomes(part: Any, shown: Sequence[str]) -> Iterator[str]:
    if isinstance(part, Mapping):
        for name, value in part.items():
            if name == "error_code":
                yield error_codes.name_of(value)
            elif name in shown:
                yield f"{name} {value}"
            else:
                yield from outcomes(value, shown)
    elif isinstance(part, list | tuple):
        for each in part:
            yield from outcomes(each, shown)


def await_producer_ids(side: Side, node_id: int) -> None:
    """A broker of Kafka that has just started has none yet."""

    def gives() -> bool:
        asked = {"transactional_id": None, "transaction_timeout_ms": 60_000}
        return not client.request(keys.INIT_PRODUCER_ID, 0, **asked).error_code

    with side.client(node_id) as client:
        wait_for(gives, PATIENCE_S, "a producer id")


class Answers(NamedTuple):
    """The answers by request."""

    kafka: Mapping[str, str]
    proxy: Mapping[str, str]
    brokers: Mapping[str, str]


def ask_all(place: Place) -> dict[str, str]:
    return {each.what: ask(place, each) for each in ASKED}


@pytest.fixture(scope="module")
def proxy(real_kafka: RealKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    with kafka_proxy(tmp_path_factory.mktemp("proxy"), real_kafka.bootstrap) as process:
        yield process


@pytest.fixture(scope="module")
def answers(sides: dict[str, Side], proxy: KproxyProcess) -> Answers:
    topic = f"asked-{uuid.uuid4().hex[:10]}"
    for side in sides.values():
        side.create(topic)
        side.create(written_of(topic))
        with side.client(1) as client:
            assert client.produce(topic, 0, ONE).error_code == 0
        for node_id in NODES:
            await_producer_ids(side, node_id)
    ports = [sides["real"].port(1), port_of(proxy), sides["ours"].port(1)]
    with ThreadPoolExecutor(len(ports)) as pool:
        return Answers(*pool.map(ask_all, [place_of(port, topic) for port in ports]))


def differences(kafka: Mapping[str, str], others: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {what: (answer, others[what]) for what, answer in kafka.items() if others[what] != answer}


def test_requests_have_distinct_names() -> None:
    assert len({each.what for each in ASKED}) == len(ASKED) >= 100
    assert PROXY_DIFFERS.keys() | BROKER_DIFFERS.keys() <= {each.what for each in ASKED}


def test_proxy_answers_as_kafka(answers: Answers) -> None:
    seen = differences(answers.kafka, answers.proxy)
    assert seen == {what: (answers.kafka[what], each.answer) for what, each in PROXY_DIFFERS.items()}


def test_reference_brokers_answer_as_kafka(answers: Answers) -> None:
    seen = differences(answers.kafka, answers.brokers)
    assert seen == {what: (answers.kafka[what], each.answer) for what, each in BROKER_DIFFERS.items()}

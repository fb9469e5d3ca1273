"""Define the requests of a user with some rights, of every kind that ACLs decide about, for test_acls_as_kafka.py."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

from kproxy_codec import api_keys as keys
from tests.support.clients.raw_client import batch, control_frame, produce_frame
from tests.support.wire.record_batches import build_batch

RUN = uuid.uuid4().hex[:8]
# Topics: alice may do as their names say.
READ, WRITE, BOTH, DESCRIBE, HIDDEN, MISSING = (
    f"{kind}-{RUN}" for kind in ("read", "write", "both", "describe", "hidden", "missing")
)
NEW = f"new-{RUN}"
TOPICS = (READ, WRITE, BOTH, DESCRIBE, HIDDEN)


class Case(NamedTuple):
    api_key: int
    version: int
    frame: bytes


def case(api_key: int, version: int, **fields: Any) -> Case:
    return Case(api_key, version, control_frame(api_key, version, **fields))


def named(names: Iterable[str], **more: Any) -> list[dict[str, Any]]:
    """An entry for each name, all with the same fields."""
    return [{"name": each, **more} for each in names]


def offsets(topics: Iterable[str]) -> list[dict[str, Any]]:
    committed = {"committed_offset": 0, "committed_leader_epoch": -1, "committed_metadata": ""}
    return named(topics, partitions=[{"partition_index": 0, **committed}])


def resources(topics: Iterable[str], **more: Any) -> list[dict[str, Any]]:
    """Topics to configure."""
    return [{"resource_type": 2, "resource_name": each, **more} for each in topics]


def metadata(version: int, topics: list[dict[str, Any]] | None, **more: Any) -> Case:
    return case(keys.METADATA, version, topics=topics, **more)


def fetch(version: int) -> Case:
    entry = {"partition": 0, "current_leader_epoch": -1, "fetch_offset": 0, "log_start_offset": -1}
    topics = [{"topic": each, "partitions": [{**entry, "partition_max_bytes": 1_000}]} for each in ALL]
    bounds = {"replica_id": -1, "max_wait_ms": 0, "min_bytes": 0, "max_bytes": 1_000_000, "isolation_level": 0}
    return case(keys.FETCH, version, topics=topics, forgotten_topics_data=[], rack_id="", **bounds)


ALL = (READ, WRITE, BOTH, DESCRIBE, HIDDEN)
PARTITIONS = {topic: [0] for topic in ALL}
PLAIN_BATCH = batch(0, producer_id=-1)
TRANSACTIONAL = bytes(build_batch(producer_id=1, producer_epoch=0, base_sequence=0, is_transactional=True))
NO_MEMBER: dict[str, Any] = {"member_id": "", "generation_id": -1}
COMMIT: dict[str, Any] = {"member_id": "", "generation_id_or_member_epoch": -1}
PRODUCER: dict[str, Any] = {"producer_id": 1, "producer_epoch": 0}
ADDED: dict[str, Any] = {f"v3_and_below_{name}": value for name, value in PRODUCER.items()}
SOME_NEW = f"new-{RUN}-x"
ALTERED = [
    *resources((SOME_NEW, *ALL), configs=[]),
    {"resource_type": 4, "resource_name": "1", "configs": []},
    {"resource_type": 32, "resource_name": "mine", "configs": []},
]
CASES: dict[str, Case] = {
    "produce": Case(keys.PRODUCE, 9, produce_frame(PARTITIONS, records=PLAIN_BATCH)),
    "produce v3": Case(keys.PRODUCE, 3, produce_frame(PARTITIONS, records=PLAIN_BATCH, version=3)),
    "produce, another's transaction": Case(
        keys.PRODUCE, 9, produce_frame({BOTH: [0]}, records=TRANSACTIONAL, transactional_id="other")
    ),
    "fetch": fetch(12),
    "fetch v4": fetch(4),
    "list offsets": case(
        keys.LIST_OFFSETS,
        6,
        replica_id=-1,
        isolation_level=0,
        topics=named(ALL, partitions=[{"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}]),
    ),
    **{
        f"metadata v{version}": metadata(version, named(ALL), **more)
        for version, more in {0: {}, 1: {}, 4: {}, 8: {}, 9: {}, 12: {"allow_auto_topic_creation": False}}.items()
    },
    "metadata, a missing topic": metadata(9, [{"name": MISSING}, {"name": READ}], allow_auto_topic_creation=True),
    "metadata, a hidden topic that is missing": metadata(9, [{"name": f"hidden-{uuid.uuid4().hex}"}]),
    "offset commit": case(keys.OFFSET_COMMIT, 8, group_id="mine", topics=offsets(ALL), **COMMIT),
    "offset commit, another group": case(keys.OFFSET_COMMIT, 8, group_id="other", topics=offsets((READ,)), **COMMIT),
    "offset fetch": case(keys.OFFSET_FETCH, 7, group_id="mine", topics=named(ALL, partition_indexes=[0])),
    "offset fetch of two groups": case(
        keys.OFFSET_FETCH,
        9,
        groups=[
            {"group_id": "mine", "topics": named(ALL, partition_indexes=[0])},
            {"group_id": "other", "topics": None},
        ],
    ),
    **{
        f"offset fetch{of}, another group": case(
            keys.OFFSET_FETCH, version, group_id="other", topics=named([READ], partition_indexes=[0])
        )
        for of, version in {"": 7, " v1": 1}.items()
    },
    "heartbeat": case(keys.HEARTBEAT, 4, group_id="other", **NO_MEMBER),
    "sync group": case(
        keys.SYNC_GROUP,
        5,
        group_id="other",
        assignments=[],
        protocol_type="consumer",
        protocol_name="range",
        **NO_MEMBER,
    ),
    "leave group": case(keys.LEAVE_GROUP, 4, group_id="other", members=[]),
    "join group": case(
        keys.JOIN_GROUP,
        5,
        group_id="other",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        member_id="",
        protocol_type="consumer",
        protocols=[{"name": "range", "metadata": b""}],
    ),
    "find coordinator": case(keys.FIND_COORDINATOR, 3, key="other", key_type=0),
    "find coordinator v0": case(keys.FIND_COORDINATOR, 0, key="other"),
    "find coordinator of a transaction": case(keys.FIND_COORDINATOR, 3, key="other", key_type=1),
    "find coordinators": case(keys.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=["other", "mine", "third"]),
    "init producer id, another's": case(
        keys.INIT_PRODUCER_ID, 4, transactional_id="other", transaction_timeout_ms=1_000
    ),
    "init producer id": case(keys.INIT_PRODUCER_ID, 4, transactional_id=None, transaction_timeout_ms=1_000),
    "add partitions, another's": case(
        keys.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id="other",
        v3_and_below_topics=named([BOTH], partitions=[0]),
        **ADDED,
    ),
    "add partitions": case(
        keys.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id="tx-1",
        v3_and_below_topics=named(ALL, partitions=[0]),
        **ADDED,
    ),
    "add offsets, another's": case(keys.ADD_OFFSETS_TO_TXN, 3, transactional_id="other", group_id="mine", **PRODUCER),
    "add offsets, another group": case(
        keys.ADD_OFFSETS_TO_TXN, 3, transactional_id="tx-1", group_id="other", **PRODUCER
    ),
    "end transaction": case(keys.END_TXN, 3, transactional_id="other", committed=True, **PRODUCER),
    "commit offsets, another's": case(
        keys.TXN_OFFSET_COMMIT,
        3,
        transactional_id="other",
        group_id="mine",
        topics=offsets((READ,)),
        **PRODUCER,
        **NO_MEMBER,
    ),
    "commit offsets, another group": case(
        keys.TXN_OFFSET_COMMIT,
        3,
        transactional_id="tx-1",
        group_id="other",
        topics=offsets((READ,)),
        **PRODUCER,
        **NO_MEMBER,
    ),
    "create topics": case(
        keys.CREATE_TOPICS,
        5,
        topics=named((NEW, "other-topic"), num_partitions=1, replication_factor=1, assignments=[], configs=[]),
        timeout_ms=10_000,
        validate_only=True,
    ),
    "create partitions": case(
        keys.CREATE_PARTITIONS,
        3,
        topics=named((SOME_NEW, HIDDEN, READ), count=3, assignments=None),
        timeout_ms=10_000,
        validate_only=True,
    ),
    "delete topics": case(keys.DELETE_TOPICS, 5, topic_names=[SOME_NEW, HIDDEN, READ], timeout_ms=10_000),
    "delete topics v1": case(keys.DELETE_TOPICS, 1, topic_names=[HIDDEN, READ], timeout_ms=10_000),
    "delete topics v6": case(
        keys.DELETE_TOPICS, 6, topics=named((SOME_NEW, HIDDEN, READ), topic_id=uuid.UUID(int=0)), timeout_ms=10_000
    ),
    "describe configs": case(
        keys.DESCRIBE_CONFIGS,
        4,
        resources=[
            *resources(ALL, configuration_keys=["segment.bytes"]),
            {"resource_type": 4, "resource_name": "1", "configuration_keys": ["node.id"]},
        ],
    ),
    "alter configs": case(keys.ALTER_CONFIGS, 2, resources=ALTERED, validate_only=True),
    "alter configs incrementally": case(keys.INCREMENTAL_ALTER_CONFIGS, 1, resources=ALTERED, validate_only=True),
    "list groups": case(keys.LIST_GROUPS, 5, states_filter=[], types_filter=[]),
    "describe groups": case(keys.DESCRIBE_GROUPS, 6, groups=["mine", "other"]),
    "delete groups": case(keys.DELETE_GROUPS, 2, groups_names=["mine", "other"]),
    "delete offsets": case(
        keys.OFFSET_DELETE, 0, group_id="mine", topics=named([READ], partitions=[{"partition_index": 0}])
    ),
    "describe consumer groups": case(keys.CONSUMER_GROUP_DESCRIBE, 1, group_ids=["mine", "other"]),
    "heartbeat of another consumer group": case(
        keys.CONSUMER_GROUP_HEARTBEAT, 1, group_id="other", member_id="m", member_epoch=0, subscribed_topic_names=[READ]
    ),
    "heartbeat with a hidden topic": case(
        keys.CONSUMER_GROUP_HEARTBEAT,
        1,
        group_id="mine",
        member_id="m",
        member_epoch=0,
        subscribed_topic_names=[READ, HIDDEN],
    ),
    "delete records": case(
        keys.DELETE_RECORDS,
        2,
        topics=named((SOME_NEW, *ALL), partitions=[{"partition_index": 0, "offset": 0}]),
        timeout_ms=10_000,
    ),
    "offsets for leader epochs": case(
        keys.OFFSET_FOR_LEADER_EPOCH,
        4,
        replica_id=-1,
        topics=[
            {"topic": each, "partitions": [{"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}]}
            for each in ALL
        ],
    ),
    "describe producers": case(keys.DESCRIBE_PRODUCERS, 0, topics=named(ALL, partition_indexes=[0])),
    "list transactions": case(keys.LIST_TRANSACTIONS, 1),
    "describe transactions": case(keys.DESCRIBE_TRANSACTIONS, 0, transactional_ids=["tx-1", "other"]),
    "list config resources": case(keys.LIST_CONFIG_RESOURCES, 1, resource_types=[2]),
    "describe log dirs": case(keys.DESCRIBE_LOG_DIRS, 4, topics=None),
    "elect leaders": case(keys.ELECT_LEADERS, 2, election_type=0, topic_partitions=None, timeout_ms=1_000),
    "list reassignments": case(keys.LIST_PARTITION_REASSIGNMENTS, 0, topics=None, timeout_ms=1_000),
    "describe ACLs": case(
        keys.DESCRIBE_ACLS, 3, resource_type_filter=1, pattern_type_filter=1, operation=1, permission_type=1
    ),
    "create ACLs": case(
        keys.CREATE_ACLS,
        3,
        creations=[
            {
                "resource_type": 2,
                "resource_name": READ,
                "resource_pattern_type": 3,
                "principal": "User:mallory",
                "host": "*",
                "operation": 3,
                "permission_type": 3,
            }
        ],
    ),
    "delete ACLs": case(
        keys.DELETE_ACLS,
        3,
        filters=[
            {
                "resource_type_filter": 2,
                "resource_name_filter": "nothing",
                "pattern_type_filter": 3,
                "operation": 1,
                "permission_type": 1,
            }
        ],
    ),
    "describe client quotas": case(keys.DESCRIBE_CLIENT_QUOTAS, 1, components=[], strict=False),
    "alter client quotas": case(
        keys.ALTER_CLIENT_QUOTAS,
        1,
        entries=[{"entity": [{"entity_type": "client-id", "entity_name": "c"}], "ops": []}],
        validate_only=True,
    ),
    "alter users": case(
        keys.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=[{"name": "mallory", "mechanism": 1}], upsertions=[]
    ),
    "describe quorum": case(
        keys.DESCRIBE_QUORUM, 1, topics=[{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]
    ),
    "update features": case(
        keys.UPDATE_FEATURES,
        1,
        timeout_ms=1_000,
        validate_only=True,
        feature_updates=[{"feature": "no.such", "max_version_level": 1, "upgrade_type": 1}],
    ),
    "describe cluster": case(keys.DESCRIBE_CLUSTER, 1),
    "describe topic partitions": case(
        keys.DESCRIBE_TOPIC_PARTITIONS, 0, topics=named(sorted(ALL)), response_partition_limit=100, cursor=None
    ),
}


# Here Kafka's messages name objects of its code, or are missing.

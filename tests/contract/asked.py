"""Requests that are asked of Apache Kafka and of others alike: their shape, and those that administer the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kproxy_codec import api_keys as keys

# Replaced in the fields of requests: a topic to read, one to write, a name for one to create, a name that nothing has,
# and the broker that Metadata names.
TOPIC, TOPIC_ID, WRITTEN, NEW, UNKNOWN, NODE = "TOPIC", "TOPIC_ID", "WRITTEN", "NEW", "UNKNOWN", "NODE"
TOPIC_TYPE, BROKER_TYPE, LOGGER_TYPE = 2, 4, 8

Fields = Mapping[str, Any]


class Asked(NamedTuple):
    """One request. `shown`: the fields whose values are compared besides the error codes; `body`: bytes instead of
    `fields`."""

    what: str
    api_key: int
    version: int
    fields: Fields
    shown: tuple[str, ...] = ()
    body: bytes | None = None


ADMINISTRATION: Final[list[Asked]] = [
    Asked("DescribeGroups: an unknown group", keys.DESCRIBE_GROUPS, 5, {"groups": [UNKNOWN]}, ("group_state",)),
    Asked("DescribeGroups v6: an unknown group", keys.DESCRIBE_GROUPS, 6, {"groups": [UNKNOWN]}, ("group_state",)),
    Asked("DeleteGroups: an unknown group", keys.DELETE_GROUPS, 2, {"groups_names": [UNKNOWN]}),
    Asked("DeleteGroups: no group", keys.DELETE_GROUPS, 2, {"groups_names": []}),
    Asked(
        "OffsetDelete: an unknown group",
        keys.OFFSET_DELETE,
        0,
        {"group_id": UNKNOWN, "topics": [{"name": TOPIC, "partitions": [{"partition_index": 0}]}]},
    ),
    Asked("ConsumerGroupDescribe: an unknown group", keys.CONSUMER_GROUP_DESCRIBE, 0, {"group_ids": [UNKNOWN]}),
    Asked(
        "ConsumerGroupHeartbeat: an unknown member",
        keys.CONSUMER_GROUP_HEARTBEAT,
        0,
        {"group_id": UNKNOWN, "member_id": "nobody", "member_epoch": 5},
    ),
    *(
        Asked(
            f"DeleteRecords: {what}",
            keys.DELETE_RECORDS,
            2,
            {"topics": [{"name": name, "partitions": [{"partition_index": index, "offset": offset}]}], "timeout_ms": 9},
            ("low_watermark",),
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
        Asked(
            f"DescribeProducers: {what}",
            keys.DESCRIBE_PRODUCERS,
            0,
            {"topics": [{"name": name, "partition_indexes": [index]}]},
        )
        for what, name, index in (
            ("a partition", TOPIC, 0),
            ("an unknown partition", TOPIC, 77),
            ("an unknown topic", UNKNOWN, 0),
        )
    ),
    Asked("DescribeTransactions: an unknown id", keys.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [UNKNOWN]}),
    Asked("ListTransactions: all", keys.LIST_TRANSACTIONS, 0, {}),
    *(
        Asked(
            f"IncrementalAlterConfigs: {what}",
            keys.INCREMENTAL_ALTER_CONFIGS,
            1,
            {
                "resources": [
                    {
                        "resource_type": kind,
                        "resource_name": resource,
                        "configs": [{"name": name, "config_operation": operation, "value": value}],
                    }
                ],
                "validate_only": True,
            },
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
    Asked(
        "ElectLeaders: an unknown topic",
        keys.ELECT_LEADERS,
        2,
        {"election_type": 0, "topic_partitions": [{"topic": UNKNOWN, "partitions": [0]}], "timeout_ms": 99},
    ),
    Asked("ListPartitionReassignments: all", keys.LIST_PARTITION_REASSIGNMENTS, 0, {"topics": None, "timeout_ms": 99}),
    Asked(
        "AlterPartitionReassignments: an unknown topic",
        keys.ALTER_PARTITION_REASSIGNMENTS,
        0,
        {"topics": [{"name": UNKNOWN, "partitions": [{"partition_index": 0, "replicas": [1]}]}], "timeout_ms": 99},
    ),
    Asked(
        "DescribeAcls: all",
        keys.DESCRIBE_ACLS,
        2,
        {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1, "permission_type": 1},
    ),
    Asked("DescribeClientQuotas: all", keys.DESCRIBE_CLIENT_QUOTAS, 1, {"components": [], "strict": False}),
    Asked(
        "DescribeUserScramCredentials: unknown", keys.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, {"users": [{"name": "no"}]}
    ),
    Asked(
        "UpdateFeatures: unknown",
        keys.UPDATE_FEATURES,
        1,
        {
            "timeout_ms": 99,
            "validate_only": True,
            "feature_updates": [{"feature": "no.such", "max_version_level": 1, "upgrade_type": 1}],
        },
    ),
    Asked("ListConfigResources: groups", keys.LIST_CONFIG_RESOURCES, 1, {"resource_types": [32]}),
    Asked("ListConfigResources: an unknown type", keys.LIST_CONFIG_RESOURCES, 1, {"resource_types": [77]}),
]

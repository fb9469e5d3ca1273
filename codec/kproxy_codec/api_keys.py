"""Name Kafka's API keys, and tell from which version each one's messages are flexible (KIP-482)."""

from __future__ import annotations

from typing import Final

PRODUCE: Final = 0
FETCH: Final = 1
LIST_OFFSETS: Final = 2
METADATA: Final = 3
OFFSET_COMMIT: Final = 8
OFFSET_FETCH: Final = 9
FIND_COORDINATOR: Final = 10
JOIN_GROUP: Final = 11
HEARTBEAT: Final = 12
LEAVE_GROUP: Final = 13
SYNC_GROUP: Final = 14
DESCRIBE_GROUPS: Final = 15
LIST_GROUPS: Final = 16
SASL_HANDSHAKE: Final = 17
API_VERSIONS: Final = 18
CREATE_TOPICS: Final = 19
DELETE_TOPICS: Final = 20
DELETE_RECORDS: Final = 21
INIT_PRODUCER_ID: Final = 22
OFFSET_FOR_LEADER_EPOCH: Final = 23
ADD_PARTITIONS_TO_TXN: Final = 24
ADD_OFFSETS_TO_TXN: Final = 25
END_TXN: Final = 26
WRITE_TXN_MARKERS: Final = 27
TXN_OFFSET_COMMIT: Final = 28
DESCRIBE_ACLS: Final = 29
CREATE_ACLS: Final = 30
DELETE_ACLS: Final = 31
DESCRIBE_CONFIGS: Final = 32
ALTER_CONFIGS: Final = 33
ALTER_REPLICA_LOG_DIRS: Final = 34
DESCRIBE_LOG_DIRS: Final = 35
SASL_AUTHENTICATE: Final = 36
CREATE_PARTITIONS: Final = 37
CREATE_DELEGATION_TOKEN: Final = 38
RENEW_DELEGATION_TOKEN: Final = 39
EXPIRE_DELEGATION_TOKEN: Final = 40
DESCRIBE_DELEGATION_TOKEN: Final = 41
DELETE_GROUPS: Final = 42
ELECT_LEADERS: Final = 43
INCREMENTAL_ALTER_CONFIGS: Final = 44
ALTER_PARTITION_REASSIGNMENTS: Final = 45
LIST_PARTITION_REASSIGNMENTS: Final = 46
OFFSET_DELETE: Final = 47
DESCRIBE_CLIENT_QUOTAS: Final = 48
ALTER_CLIENT_QUOTAS: Final = 49
DESCRIBE_USER_SCRAM_CREDENTIALS: Final = 50
ALTER_USER_SCRAM_CREDENTIALS: Final = 51
DESCRIBE_QUORUM: Final = 55
UPDATE_FEATURES: Final = 57
ENVELOPE: Final = 58
DESCRIBE_CLUSTER: Final = 60
DESCRIBE_PRODUCERS: Final = 61
DESCRIBE_TRANSACTIONS: Final = 65
LIST_TRANSACTIONS: Final = 66
CONSUMER_GROUP_HEARTBEAT: Final = 68
CONSUMER_GROUP_DESCRIBE: Final = 69
GET_TELEMETRY_SUBSCRIPTIONS: Final = 71
PUSH_TELEMETRY: Final = 72
LIST_CONFIG_RESOURCES: Final = 74
DESCRIBE_TOPIC_PARTITIONS: Final = 75
# Keys of this project: single reader/writer (kproxy_codec.own), and the fences that a proxy binds at a broker for it.
OWN: Final = 20311
BIND_FENCES: Final = 20312

_NAMES: dict[int, str] = {value: name for name, value in globals().items() if name.isupper() and isinstance(value, int)}

NEVER_FLEXIBLE = 1 << 15

# From Kafka's message schemas ("flexibleVersions"); keys that this table lacks are flexible from version 0.
FLEXIBLE_FROM: dict[int, int] = {
    PRODUCE: 9,
    FETCH: 12,
    LIST_OFFSETS: 6,
    METADATA: 9,
    OFFSET_COMMIT: 8,
    OFFSET_FETCH: 6,
    FIND_COORDINATOR: 3,
    JOIN_GROUP: 6,
    HEARTBEAT: 4,
    LEAVE_GROUP: 4,
    SYNC_GROUP: 4,
    DESCRIBE_GROUPS: 5,
    LIST_GROUPS: 3,
    SASL_HANDSHAKE: NEVER_FLEXIBLE,
    API_VERSIONS: 3,
    CREATE_TOPICS: 5,
    DELETE_TOPICS: 4,
    DELETE_RECORDS: 2,
    INIT_PRODUCER_ID: 2,
    OFFSET_FOR_LEADER_EPOCH: 4,
    ADD_PARTITIONS_TO_TXN: 3,
    ADD_OFFSETS_TO_TXN: 3,
    END_TXN: 3,
    WRITE_TXN_MARKERS: 1,
    TXN_OFFSET_COMMIT: 3,
    DESCRIBE_ACLS: 2,
    CREATE_ACLS: 2,
    DELETE_ACLS: 2,
    DESCRIBE_CONFIGS: 4,
    ALTER_CONFIGS: 2,
    ALTER_REPLICA_LOG_DIRS: 2,
    DESCRIBE_LOG_DIRS: 2,
    SASL_AUTHENTICATE: 2,
    CREATE_PARTITIONS: 2,
    CREATE_DELEGATION_TOKEN: 2,
    RENEW_DELEGATION_TOKEN: 2,
    EXPIRE_DELEGATION_TOKEN: 2,
    DESCRIBE_DELEGATION_TOKEN: 2,
    DELETE_GROUPS: 2,
    ELECT_LEADERS: 2,
    INCREMENTAL_ALTER_CONFIGS: 1,
    OFFSET_DELETE: NEVER_FLEXIBLE,
    DESCRIBE_CLIENT_QUOTAS: 1,
    ALTER_CLIENT_QUOTAS: 1,
}


def name_of(api_key: int) -> str:
    """The key's name in upper case with underscores, such as LIST_OFFSETS; "API_KEY_n" for an unknown key."""
    return _NAMES.get(api_key, f"API_KEY_{api_key}")


def is_flexible(api_key: int, api_version: int) -> bool:
    """Whether this version's messages use compact types and tagged fields."""
    return api_version >= FLEXIBLE_FROM.get(api_key, 0)

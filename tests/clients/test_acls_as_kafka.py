"""The proxy's ACL rules decide as Kafka's authorizer does: the same requests of the same user have the same errors.

Each request is sent to a real Kafka broker with StandardAuthorizer and to the proxy, which has the same rules, before a
listener of that broker on which everybody may do everything. Unchanged clients get the same exceptions from both.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from kproxy_codec import api_keys as keys
from tests.support.clients.raw_client import RawClient, batch, control_frame, produce_frame
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.security import refused_clients
from tests.support.security import sasl_client as sasl
from tests.support.security.secured_kafka import SecuredKafka, start_secured_kafka
from tests.support.wire.record_batches import build_batch

pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

RUN = uuid.uuid4().hex[:8]
# Topics: alice may do as their names say.
READ, WRITE, BOTH, DESCRIBE, HIDDEN, MISSING = (
    f"{kind}-{RUN}" for kind in ("read", "write", "both", "describe", "hidden", "missing")
)
NEW = f"new-{RUN}"
TOPICS = (READ, WRITE, BOTH, DESCRIBE, HIDDEN)

RULES = f"""
[[acls]]
principal = "User:alice"
operations = ["read"]
topics = ["read-*", "both-*"]
groups = ["mine"]
[[acls]]
principal = "User:alice"
operations = ["write"]
topics = ["write-*", "both-{RUN}"]
transactional_ids = ["tx-*"]
[[acls]]
principal = "User:*"
operations = ["describe"]
topics = ["{DESCRIBE}"]
[[acls]]
principal = "User:alice"
operations = ["create", "delete", "alter"]
topics = ["new-*"]
[[acls]]
principal = "User:alice"
operations = ["read"]
topics = ["read-denied"]
effect = "deny"
"""


def bindings() -> list[AclBinding]:
    """The same rules for Kafka. Its configurations have operations of their own, which are `describe` here."""
    topic, group, tx = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID
    prefix, literal = ResourcePatternType.PREFIXED, ResourcePatternType.LITERAL
    operations = AclOperation
    wanted = [
        (topic, "read-", prefix, "User:alice", operations.READ),
        (topic, "both-", prefix, "User:alice", operations.READ),
        (group, "mine", literal, "User:alice", operations.READ),
        (topic, "write-", prefix, "User:alice", operations.WRITE),
        (topic, BOTH, literal, "User:alice", operations.WRITE),
        (tx, "tx-", prefix, "User:alice", operations.WRITE),
        (topic, DESCRIBE, literal, "User:*", operations.DESCRIBE),
        *(
            (topic, "new-", prefix, "User:alice", each)
            for each in (operations.CREATE, operations.DELETE, operations.ALTER, operations.ALTER_CONFIGS)
        ),
        *(
            (topic, each, prefix, "User:alice", operations.DESCRIBE_CONFIGS)
            for each in ("read-", "write-", "both-", "new-")
        ),
        (topic, DESCRIBE, literal, "User:*", operations.DESCRIBE_CONFIGS),
    ]
    allow = AclPermissionType.ALLOW
    return [AclBinding(kind, name, form, who, "*", what, allow) for kind, name, form, who, what in wanted]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with start_secured_kafka(tmp_path_factory.mktemp("secured")) as kafka:
        for topic in TOPICS:
            kafka.plain.create_topic(topic, 1)
        for done in kafka.plain.admin().create_acls(bindings()).values():
            done.result(30)
        yield kafka


@contextlib.contextmanager
def proxy_with(kafka: SecuredKafka, directory: Path, rules: str) -> Iterator[KproxyProcess]:
    config = directory / "kproxy.toml"
    users = sasl.users_file(directory)
    config.write_text(f'[sasl]\nmechanisms = "PLAIN"\nusers = "{users}"\nwithout_tls = true\n{rules}')
    arguments = ["serve", "--config", config, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    arguments += ["--ownership", "kafka", "--bootstrap", kafka.plain.bootstrap]
    with serving(arguments, directory / "stderr") as process:
        yield process


@pytest.fixture(scope="module")
def proxy(secured: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    with proxy_with(secured, tmp_path_factory.mktemp("proxy"), RULES) as process:
        yield process


@contextlib.asynccontextmanager
async def connected(address: str, name: str = "alice") -> AsyncIterator[RawClient]:
    client = await RawClient().connect(int(address.rpartition(":")[2]))
    client.send(sasl.handshake("PLAIN"))
    assert (await client.answer(keys.SASL_HANDSHAKE, 1)).message.error_code == 0
    client.send(sasl.authenticate(sasl.plain(name, sasl.USERS[name])))
    assert (await client.answer(keys.SASL_AUTHENTICATE, 2)).message.error_code == 0
    try:
        yield client
    finally:
        client.abort()


def codes(answer: Any) -> set[int]:
    """The error codes in an answer."""
    return {each for each in errors(answer).values() if isinstance(each, int)}


def errors(value: Any, path: str = "") -> dict[str, Any]:
    """Every error code and message in an answer, by the names and numbers on the way to it."""
    found: dict[str, Any] = {}
    if isinstance(value, dict):
        names = ("name", "key", "topic", "group_id", "transactional_id", "user", "resource_name")
        for field in (*names, "partition_index", "partition", "index", "topic_id"):
            if isinstance(value.get(field), str | int) and value.get(field) not in ("", None):
                path += f"/{value[field]}"
        for key, each in value.items():
            if key in ("error_code", "partition_error_code", "error_message"):
                found[f"{path}:{key}"] = each
            elif isinstance(each, dict | list):
                found |= errors(each, path)
    elif isinstance(value, list):
        for each in value:
            found |= errors(each, path)
    return found


class Case(NamedTuple):
    api_key: int
    version: int
    frame: bytes


def case(api_key: int, version: int, **fields: Any) -> Case:
    return Case(api_key, version, control_frame(api_key, version, **fields))


def _offsets(topics: tuple[str, ...], **more: Any) -> list[dict[str, Any]]:
    entry = {
        "partition_index": 0,
        "committed_offset": 0,
        "committed_leader_epoch": -1,
        "committed_metadata": "",
        **more,
    }
    return [{"name": topic, "partitions": [entry]} for topic in topics]


def _metadata(version: int, topics: list[dict[str, Any]] | None, **more: Any) -> Case:
    return case(keys.METADATA, version, topics=topics, **more)


def _fetch(version: int) -> Case:
    entry = {"partition": 0, "current_leader_epoch": -1, "fetch_offset": 0, "log_start_offset": -1}
    topics = [{"topic": each, "partitions": [{**entry, "partition_max_bytes": 1_000}]} for each in ALL]
    bounds = {"replica_id": -1, "max_wait_ms": 0, "min_bytes": 0, "max_bytes": 1_000_000, "isolation_level": 0}
    return case(keys.FETCH, version, topics=topics, forgotten_topics_data=[], rack_id="", **bounds)


ALL = (READ, WRITE, BOTH, DESCRIBE, HIDDEN)
PARTITIONS = {topic: [0] for topic in ALL}
PLAIN_BATCH = batch(0, producer_id=-1)
TRANSACTIONAL = bytes(build_batch(producer_id=1, producer_epoch=0, base_sequence=0, is_transactional=True))
NO_MEMBER: dict[str, Any] = {"member_id": "", "generation_id": -1}
CASES: dict[str, Case] = {
    "produce": Case(keys.PRODUCE, 9, produce_frame(PARTITIONS, records=PLAIN_BATCH)),
    "produce v3": Case(keys.PRODUCE, 3, produce_frame(PARTITIONS, records=PLAIN_BATCH, version=3)),
    "produce, another's transaction": Case(
        keys.PRODUCE, 9, produce_frame({BOTH: [0]}, records=TRANSACTIONAL, transactional_id="other")
    ),
    "fetch": _fetch(12),
    "fetch v4": _fetch(4),
    "list offsets": case(
        keys.LIST_OFFSETS,
        6,
        replica_id=-1,
        isolation_level=0,
        topics=[
            {"name": each, "partitions": [{"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}]}
            for each in ALL
        ],
    ),
    **{
        f"metadata v{version}": _metadata(version, [{"name": each} for each in ALL], **more)
        for version, more in {0: {}, 1: {}, 4: {}, 8: {}, 9: {}, 12: {"allow_auto_topic_creation": False}}.items()
    },
    "metadata, a missing topic": _metadata(9, [{"name": MISSING}, {"name": READ}], allow_auto_topic_creation=True),
    "metadata, a hidden topic that is missing": _metadata(9, [{"name": f"hidden-{uuid.uuid4().hex}"}]),
    "offset commit": case(
        keys.OFFSET_COMMIT,
        8,
        group_id="mine",
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=_offsets(ALL),
    ),
    "offset commit, another group": case(
        keys.OFFSET_COMMIT,
        8,
        group_id="other",
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=_offsets((READ,)),
    ),
    "offset fetch": case(
        keys.OFFSET_FETCH, 7, group_id="mine", topics=[{"name": each, "partition_indexes": [0]} for each in ALL]
    ),
    "offset fetch, another group": case(
        keys.OFFSET_FETCH, 7, group_id="other", topics=[{"name": READ, "partition_indexes": [0]}]
    ),
    "offset fetch v1, another group": case(
        keys.OFFSET_FETCH, 1, group_id="other", topics=[{"name": READ, "partition_indexes": [0]}]
    ),
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
        v3_and_below_producer_id=1,
        v3_and_below_producer_epoch=0,
        v3_and_below_topics=[{"name": BOTH, "partitions": [0]}],
    ),
    "add partitions": case(
        keys.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id="tx-1",
        v3_and_below_producer_id=1,
        v3_and_below_producer_epoch=0,
        v3_and_below_topics=[{"name": each, "partitions": [0]} for each in ALL],
    ),
    "add offsets, another's": case(
        keys.ADD_OFFSETS_TO_TXN, 3, transactional_id="other", producer_id=1, producer_epoch=0, group_id="mine"
    ),
    "add offsets, another group": case(
        keys.ADD_OFFSETS_TO_TXN, 3, transactional_id="tx-1", producer_id=1, producer_epoch=0, group_id="other"
    ),
    "end transaction": case(keys.END_TXN, 3, transactional_id="other", producer_id=1, producer_epoch=0, committed=True),
    "commit offsets, another's": case(
        keys.TXN_OFFSET_COMMIT,
        3,
        transactional_id="other",
        group_id="mine",
        producer_id=1,
        producer_epoch=0,
        topics=_offsets((READ,)),
        **NO_MEMBER,
    ),
    "commit offsets, another group": case(
        keys.TXN_OFFSET_COMMIT,
        3,
        transactional_id="tx-1",
        group_id="other",
        producer_id=1,
        producer_epoch=0,
        topics=_offsets((READ,)),
        **NO_MEMBER,
    ),
    "create topics": case(
        keys.CREATE_TOPICS,
        5,
        topics=[
            {"name": each, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
            for each in (NEW, "other-topic")
        ],
        timeout_ms=10_000,
        validate_only=True,
    ),
    "create partitions": case(
        keys.CREATE_PARTITIONS,
        3,
        topics=[{"name": each, "count": 3, "assignments": None} for each in (f"new-{RUN}-x", HIDDEN, READ)],
        timeout_ms=10_000,
        validate_only=True,
    ),
    "delete topics": case(keys.DELETE_TOPICS, 5, topic_names=[f"new-{RUN}-x", HIDDEN, READ], timeout_ms=10_000),
    "delete topics v1": case(keys.DELETE_TOPICS, 1, topic_names=[HIDDEN, READ], timeout_ms=10_000),
    "delete topics v6": case(
        keys.DELETE_TOPICS,
        6,
        topics=[{"name": each, "topic_id": uuid.UUID(int=0)} for each in (f"new-{RUN}-x", HIDDEN, READ)],
        timeout_ms=10_000,
    ),
    "describe configs": case(
        keys.DESCRIBE_CONFIGS,
        4,
        resources=[
            *({"resource_type": 2, "resource_name": each, "configuration_keys": ["segment.bytes"]} for each in ALL),
            {"resource_type": 4, "resource_name": "1", "configuration_keys": ["node.id"]},
        ],
    ),
    "alter configs": case(
        keys.ALTER_CONFIGS,
        2,
        resources=[
            *({"resource_type": 2, "resource_name": each, "configs": []} for each in (f"new-{RUN}-x", *ALL)),
            {"resource_type": 4, "resource_name": "1", "configs": []},
            {"resource_type": 32, "resource_name": "mine", "configs": []},
        ],
        validate_only=True,
    ),
    "alter configs incrementally": case(
        keys.INCREMENTAL_ALTER_CONFIGS,
        1,
        resources=[
            *({"resource_type": 2, "resource_name": each, "configs": []} for each in (f"new-{RUN}-x", *ALL)),
            {"resource_type": 4, "resource_name": "1", "configs": []},
            {"resource_type": 32, "resource_name": "mine", "configs": []},
        ],
        validate_only=True,
    ),
    "list groups": case(keys.LIST_GROUPS, 5, states_filter=[], types_filter=[]),
    "describe groups": case(keys.DESCRIBE_GROUPS, 6, groups=["mine", "other"]),
    "delete groups": case(keys.DELETE_GROUPS, 2, groups_names=["mine", "other"]),
    "delete offsets": case(
        keys.OFFSET_DELETE, 0, group_id="mine", topics=[{"name": READ, "partitions": [{"partition_index": 0}]}]
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
        topics=[{"name": each, "partitions": [{"partition_index": 0, "offset": 0}]} for each in (f"new-{RUN}-x", *ALL)],
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
    "describe producers": case(
        keys.DESCRIBE_PRODUCERS, 0, topics=[{"name": each, "partition_indexes": [0]} for each in ALL]
    ),
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
        keys.DESCRIBE_QUORUM,
        1,
        topics=[{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}],
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
        keys.DESCRIBE_TOPIC_PARTITIONS,
        0,
        topics=[{"name": each} for each in sorted(ALL)],
        response_partition_limit=100,
        cursor=None,
    ),
}


# Here Kafka's messages name objects of its code, or are missing.
IN_KAFKAS_WORDS = {
    keys.DESCRIBE_GROUPS,
    keys.CONSUMER_GROUP_DESCRIBE,
    keys.CONSUMER_GROUP_HEARTBEAT,
    keys.LIST_PARTITION_REASSIGNMENTS,
    keys.DESCRIBE_ACLS,
    keys.CREATE_ACLS,
    keys.DELETE_ACLS,
    keys.DESCRIBE_CLIENT_QUOTAS,
    keys.ALTER_USER_SCRAM_CREDENTIALS,
    keys.UPDATE_FEATURES,
}


async def ask(address: str, asked: Case, name: str = "alice") -> dict[str, Any]:
    async with connected(address, name) as client:
        client.send(asked.frame)
        told: dict[str, Any] = (await client.answer(asked.api_key, asked.version, 30)).message.to_dict()
        return told


@pytest.mark.parametrize("name", CASES)
async def test_a_request_has_the_same_errors(secured: SecuredKafka, proxy: KproxyProcess, name: str) -> None:
    asked = CASES[name]
    deadline = asyncio.get_running_loop().time() + 30
    while True:
        direct, through = await ask(secured.secured, asked), await ask(proxy.kafka, asked)
        expected, got = errors(direct), errors(through)
        # A coordinator that is loading is no answer.
        if not {14, 15, 16} & {*expected.values(), *got.values()} or asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.2)
    print(name, expected)
    if asked.api_key in IN_KAFKAS_WORDS:
        expected, got = (
            {path: code for path, code in each.items() if not path.endswith("message")} for each in (expected, got)
        )
    assert got == expected


# What unchanged clients attempt, as alice unless it is "another's", and the error that refuses it.
GONE, HIDDEN_GONE = f"write-gone-{RUN}", f"hidden-gone-{RUN}"
NAMES = {"read": READ, "write": WRITE, "both": BOTH, "hidden": HIDDEN, "gone": GONE, "hidden-gone": HIDDEN_GONE}
NAMES |= {"describe": DESCRIBE}
ATTEMPTS = {
    "write read": "TopicAuthorization",
    "write hidden": "TopicAuthorization",
    "write hidden-gone": "TopicAuthorization",
    # She may write to it, but not create it.
    "write gone": "TopicAuthorization",
    "write-idempotently read": "TopicAuthorization",
    # An idempotent producer needs a topic that its user may write to.
    "another's:write-idempotently describe": "ClusterAuthorization",
    "transact other both": "TransactionalIdAuthorization",
    "transact tx-1 read": "TopicAuthorization",
    "transact tx-1 both other": "GroupAuthorization",
    "read write": "TopicAuthorization",
    "read hidden": "TopicAuthorization",
    "join other both": "GroupAuthorization",
    "join mine hidden": "TopicAuthorization",
    "commit other both": "GroupAuthorization",
    "commit mine write": "TopicAuthorization",
    "create-topic other-topic": "TopicAuthorization",
    "delete-topic read": "TopicAuthorization",
    "delete-topic hidden": "TopicAuthorization",
    "add-partitions read": "TopicAuthorization",
    "describe-topic hidden": "TopicAuthorization",
    "describe-topic hidden-gone": "TopicAuthorization",
    "describe-topic gone": "UnknownTopicOrPart",
    "describe-settings hidden": "TopicAuthorization",
    "describe-broker-settings": "ClusterAuthorization",
    "ends-of hidden": "TopicAuthorization",
    "offsets-of-group other": "GroupAuthorization",
    "delete-records read": "TopicAuthorization",
    "alter-settings read": "TopicAuthorization",
    "describe-group other": "GroupAuthorization",
    "delete-group other": "GroupAuthorization",
    "elect-leaders read": "ClusterAuthorization",
    "describe-acls": "ClusterAuthorization",
    "create-acl read": "ClusterAuthorization",
    "delete-acl read": "ClusterAuthorization",
    "alter-user alice": "ClusterAuthorization",
}
# Kafka's text names objects of its code.
IN_OTHER_WORDS = {"describe-acls", "create-acl read", "delete-acl read", "alter-user alice"}
# These clients wait in such a case, and their users get no reason; at Kafka, too.
WITHOUT_REASON = {
    ("librdkafka", "read hidden"),
    ("librdkafka", "commit other both"),
    ("librdkafka", "ends-of hidden"),
}
# Kafka has them.
NOT_OFFERED = ("create-token", "describe-tokens")
UNSUPPORTED = ("UnsupportedVersion", "UnsupportedFeature", "IncompatibleBrokerVersion")


# Clients in Python get the same answers as these.
@pytest.mark.parametrize("client", refused_clients.CLIENTS)
def test_client_gets_same_exceptions_as_from_kafka(secured: SecuredKafka, proxy: KproxyProcess, client: str) -> None:
    attempts = [each for each in (*ATTEMPTS, *NOT_OFFERED) if (client, each) not in WITHOUT_REASON]
    users = refused_clients.Users("alice", "bob")
    direct, through = refused_clients.attempted(client, [secured.secured, proxy.kafka], attempts, NAMES, users)
    assert len(direct) >= 14
    for attempt in direct:
        print(f"{attempt}: {through[attempt]}")
        if attempt in NOT_OFFERED:
            assert any(each.lower() in _plain(through[attempt]) for each in UNSUPPORTED), attempt
            assert not any(each.lower() in _plain(direct[attempt]) for each in UNSUPPORTED), attempt
        else:
            assert ATTEMPTS[attempt].lower() in _plain(direct[attempt])
            assert ATTEMPTS[attempt].lower() in _plain(through[attempt])
            assert through[attempt] == direct[attempt] or attempt in IN_OTHER_WORDS


def _plain(outcome: str) -> str:
    return outcome.lower().replace("_", "")


async def _named(address: str, asked: Case, name: str) -> set[str]:
    return {topic["name"] for topic in (await ask(address, asked, name))["topics"] if topic["name"].endswith(RUN)}


@pytest.mark.parametrize(("name", "seen"), [("alice", {READ, WRITE, BOTH, DESCRIBE}), ("bob", {DESCRIBE})])
@pytest.mark.parametrize("version", [0, 1, 5, 9, 12])
async def test_all_topics_request_returns_only_visible_topics(
    secured: SecuredKafka, proxy: KproxyProcess, name: str, seen: set[str], version: int
) -> None:
    asked = _metadata(version, [] if version == 0 else None)
    assert await _named(secured.secured, asked, name) == seen
    assert await _named(proxy.kafka, asked, name) == seen


async def test_topic_is_hidden_by_id_too(secured: SecuredKafka, proxy: KproxyProcess) -> None:
    ids = await _topic_ids(secured)
    asked = _metadata(12, [{"topic_id": ids[topic], "name": None} for topic in (READ, HIDDEN)])
    direct, through = await ask(secured.secured, asked), await ask(proxy.kafka, asked)

    def told(answer: dict[str, Any]) -> list[tuple[Any, Any, int]]:
        return sorted((str(each["topic_id"]), each["name"], each["error_code"]) for each in answer["topics"])

    assert told(through) == told(direct)
    assert HIDDEN not in str(through)


async def _topic_ids(kafka: SecuredKafka) -> dict[str, uuid.UUID]:
    client = await RawClient().connect(int(kafka.plain.bootstrap.rpartition(":")[2]))
    client.send(control_frame(keys.METADATA, 12, topics=None))
    message = (await client.answer(keys.METADATA, 12)).message
    client.abort()
    return {topic.name: topic.topic_id for topic in message.topics}


async def test_no_topic_is_created_by_asking_for_it(secured: SecuredKafka, proxy: KproxyProcess) -> None:
    wanted = f"read-{uuid.uuid4().hex[:8]}"
    for version in (0, 1, 3, 4, 9, 12):
        answer = await ask(proxy.kafka, _metadata(version, [{"name": wanted}]))
        assert [topic["error_code"] for topic in answer["topics"]] == [29], version
    assert wanted not in await _topic_ids(secured)


async def test_new_rules_count_at_once_on_open_connections(secured: SecuredKafka, tmp_path: Path) -> None:
    with proxy_with(secured, tmp_path, RULES) as process:
        async with connected(process.kafka) as client:

            async def produced() -> int:
                client.send(produce_frame({BOTH: [0]}, records=PLAIN_BATCH))
                return (await client.answer()).codes[BOTH, 0]

            # Often enough that the route is proven, and the compiled path takes it.
            for _ in range(5):
                assert await produced() == 0
            config = tmp_path / "kproxy.toml"
            text = config.read_text()
            config.write_text(text.replace(f', "both-{RUN}"', ""))
            deadline = asyncio.get_running_loop().time() + 120
            while await produced() == 0:
                assert asyncio.get_running_loop().time() < deadline
            for _ in range(5):
                assert await produced() == 29
            config.write_text(text + "[[acls]]\nnonsense = 1\n")
            while "reload failed" not in process.stderr():
                assert asyncio.get_running_loop().time() < deadline
                assert await produced() == 29
                await asyncio.sleep(0.05)
            config.write_text(text)
            while await produced() != 0:
                assert asyncio.get_running_loop().time() < deadline


async def test_dry_run_logs_denials_and_refuses_nothing(secured: SecuredKafka, tmp_path: Path) -> None:
    with proxy_with(secured, tmp_path, "[access]\ndry_run = true\n" + RULES) as process:
        answer = await ask(process.kafka, CASES["produce"])
        assert codes(answer) == {0}
        assert "access would be denied" in process.stderr()


async def test_missing_rules_deny_everything(secured: SecuredKafka, tmp_path: Path) -> None:
    with proxy_with(secured, tmp_path, "") as process:
        assert codes(await ask(process.kafka, CASES["produce"])) == {29}
        assert (await ask(process.kafka, _metadata(9, None)))["topics"] == []
        assert "no ACLs" in process.stderr()

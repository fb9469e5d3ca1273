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
from typing import Any

import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from kproxy_codec import api_keys as keys
from tests.clients.acl_cases import (
    ALL,
    BOTH,
    CASES,
    DESCRIBE,
    HIDDEN,
    PLAIN_BATCH,
    READ,
    RUN,
    TOPICS,
    WRITE,
    Case,
    case,
    metadata,
    offsets,
)
from tests.support.clients.raw_client import RawClient, control_frame, produce_frame
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import kafka_proxy
from tests.support.security import refused_clients
from tests.support.security import sasl_client as sasl
from tests.support.security.secured_kafka import SecuredKafka, start_secured_kafka

pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

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
    with kafka_proxy(directory, kafka.plain.bootstrap, "--config", str(config)) as process:
        yield process


@pytest.fixture(scope="module")
def proxy(secured: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    with proxy_with(secured, tmp_path_factory.mktemp("proxy"), RULES) as process:
        yield process


@contextlib.asynccontextmanager
async def connected(address: str, name: str = "alice") -> AsyncIterator[RawClient]:
    client = await sasl.logged_in(await RawClient().connect(int(address.rpartition(":")[2])), name)
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
async def test_request_has_the_same_errors(secured: SecuredKafka, proxy: KproxyProcess, name: str) -> None:
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
# These clients wait in such a case or ignore it, and their users get no reason; at Kafka, too.
WITHOUT_REASON = {
    ("librdkafka", "read hidden"),
    ("librdkafka", "commit other both"),
    ("librdkafka", "ends-of hidden"),
    # An empty list.
    ("librdkafka", "describe-acls"),
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
    asked = metadata(version, [] if version == 0 else None)
    assert await _named(secured.secured, asked, name) == seen
    assert await _named(proxy.kafka, asked, name) == seen


async def test_topic_is_hidden_by_id_too(secured: SecuredKafka, proxy: KproxyProcess) -> None:
    ids = await _topic_ids(secured)
    asked = metadata(12, [{"topic_id": ids[topic], "name": None} for topic in (READ, HIDDEN)])
    direct, through = await ask(secured.secured, asked), await ask(proxy.kafka, asked)

    def told(answer: dict[str, Any]) -> list[tuple[Any, Any, int]]:
        return sorted((str(each["topic_id"]), each["name"], each["error_code"]) for each in answer["topics"])

    assert told(through) == told(direct)
    assert HIDDEN not in str(through)


@pytest.mark.parametrize("key", [keys.FETCH, keys.OFFSET_COMMIT, keys.OFFSET_FETCH])
async def test_reads_by_id_have_the_same_errors(secured: SecuredKafka, proxy: KproxyProcess, key: int) -> None:
    ids = await _topic_ids(secured)
    named = [{"topic_id": each} for each in (*(ids[topic] for topic in ALL), uuid.uuid4())]
    read = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1_000}
    fetched = [{**each, "partitions": [read]} for each in named]
    committed = [{**each, "partitions": offsets(("",))[0]["partitions"]} for each in named]
    asked = {
        keys.FETCH: case(keys.FETCH, 17, topics=fetched, max_wait_ms=0, min_bytes=0, max_bytes=1_000_000),
        keys.OFFSET_COMMIT: case(keys.OFFSET_COMMIT, 10, group_id="mine", topics=committed),
        keys.OFFSET_FETCH: case(
            keys.OFFSET_FETCH,
            10,
            groups=[{"group_id": "mine", "topics": [{**each, "partition_indexes": [0]} for each in named]}],
        ),
    }[key]

    async def told(address: str) -> dict[str, int]:
        answer = await ask(address, asked)
        whole = answer["groups"][0] if key == keys.OFFSET_FETCH else answer
        topics = whole["responses" if key == keys.FETCH else "topics"]
        return {str(each["topic_id"]): each["partitions"][0]["error_code"] for each in topics}

    through, direct = await told(proxy.kafka), await told(secured.secured)
    assert through == direct
    assert {*direct.values()} == {0, 29, 100}


async def _topic_ids(kafka: SecuredKafka) -> dict[str, uuid.UUID]:
    client = await RawClient().connect(int(kafka.plain.bootstrap.rpartition(":")[2]))
    client.send(control_frame(keys.METADATA, 12, topics=None))
    message = (await client.answer(keys.METADATA, 12)).message
    client.abort()
    return {topic.name: topic.topic_id for topic in message.topics}


async def test_no_topic_is_created_by_asking_for_it(secured: SecuredKafka, proxy: KproxyProcess) -> None:
    wanted = f"read-{uuid.uuid4().hex[:8]}"
    for version in (0, 1, 3, 4, 9, 12):
        answer = await ask(proxy.kafka, metadata(version, [{"name": wanted}]))
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
        assert (await ask(process.kafka, metadata(9, None)))["topics"] == []
        assert "ACLs are empty" in process.stderr()

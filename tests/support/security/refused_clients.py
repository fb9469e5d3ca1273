"""Run unchanged clients that attempt requests an ACL refuses, and record the exceptions that their users get.

An attempt is a word and its objects, as in "write secret" or "transact tx-1 open other": topics by a name of the test
(`names`), other objects unchanged. The attempt "another's:write open" is another user's. Each client makes the attempts
that its interface allows, at several clusters at once.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka
from confluent_kafka import admin as librdkafka_admin

from tests.support.brokers.kafka_jars import client_classpath
from tests.support.clients.java import java_program
from tests.support.security.sasl_client import USERS

OK = "ok"
ANOTHERS = "another's:"
WITHIN_S = 20.0
JAVA_TIMEOUT_S = 300.0
# librdkafka has no consumer without a group, so all users who may read must have access to this group.
READERS = "mine"
# Outcomes by attempt.
Outcomes = dict[str, str]
_SOURCE = Path(__file__).parents[1] / "clients" / "RefusedClient.java"


class Users(NamedTuple):
    """The users of attempts: `name`, and `another` for attempts in ANOTHERS."""

    name: str
    another: str

    def of(self, attempt: str) -> str:
        return self.another if attempt.startswith(ANOTHERS) else self.name


# librdkafka


def _of_librdkafka(error: Any) -> str:
    kind = "fatal " if error.fatal() else ""
    return f"{kind}{error.name()}: {error.str()}"


def _librdkafka_writes(settings: dict[str, Any], topic: str, **more: Any) -> str:
    producer, outcome = confluent_kafka.Producer({**settings, "message.timeout.ms": 20_000, **more}), list[str]()

    def delivered(error: Any, _: object) -> None:
        outcome.append(OK if error is None else _of_librdkafka(error))

    producer.produce(topic, b"x", on_delivery=delivered)
    producer.flush(WITHIN_S)
    producer.purge()
    return outcome[0]


def _librdkafka_writes_idempotently(settings: dict[str, Any], topic: str) -> str:
    # A fatal error is raised by flush. With an error_cb as well, Python finds two errors at once.
    return _librdkafka_writes(settings, topic, **{"enable.idempotence": True})


def _librdkafka_transacts(settings: dict[str, Any], transactional_id: str, topic: str, group: str = "") -> str:
    producer = confluent_kafka.Producer({**settings, "transactional.id": transactional_id})
    producer.init_transactions(WITHIN_S)
    producer.begin_transaction()
    if group:
        consumer = confluent_kafka.Consumer({**settings, "group.id": group})
        place = confluent_kafka.TopicPartition(topic, 0, 0)
        producer.send_offsets_to_transaction([place], consumer.consumer_group_metadata(), WITHIN_S)
    else:
        producer.produce(topic, b"x")
    producer.commit_transaction(WITHIN_S)
    return OK


def _librdkafka_polls(settings: dict[str, Any], prepare: Callable[[confluent_kafka.Consumer], None]) -> str:
    consumer = confluent_kafka.Consumer({**settings, "auto.offset.reset": "earliest"})
    try:
        prepare(consumer)
        message = consumer.poll(WITHIN_S)
        if message is None or message.error() is None:
            return OK
        return _of_librdkafka(message.error())
    finally:
        consumer.close()


def _librdkafka_reads(settings: dict[str, Any], topic: str) -> str:
    place = confluent_kafka.TopicPartition(topic, 0, 0)
    return _librdkafka_polls({**settings, "group.id": READERS}, lambda consumer: consumer.assign([place]))


def _librdkafka_joins(settings: dict[str, Any], group: str, topic: str) -> str:
    return _librdkafka_polls({**settings, "group.id": group}, lambda consumer: consumer.subscribe([topic]))


def _librdkafka_commits(settings: dict[str, Any], group: str, topic: str) -> str:
    consumer = confluent_kafka.Consumer({**settings, "group.id": group})
    try:
        consumer.commit(offsets=[confluent_kafka.TopicPartition(topic, 0, 1)], asynchronous=False)
    finally:
        consumer.close()
    return OK


def _by_admin(ask: Callable[[Any, str], Mapping[Any, Any]]) -> Callable[..., str]:
    def run(settings: dict[str, Any], name: str = "") -> str:
        admin = librdkafka_admin.AdminClient(settings)
        for each in ask(admin, name).values():
            each.result(WITHIN_S)
        return OK

    return run


def _configs(admin: Any, name: str) -> Mapping[Any, Any]:
    kind = librdkafka_admin.ResourceType.TOPIC
    if not name:
        kind, name = librdkafka_admin.ResourceType.BROKER, str(min(admin.list_topics(timeout=WITHIN_S).brokers))
    return admin.describe_configs([librdkafka_admin.ConfigResource(kind, name)])  # type: ignore[no-any-return]


def _alters(admin: Any, name: str) -> Mapping[Any, Any]:
    entry = librdkafka_admin.ConfigEntry(
        "retention.ms", "1000000", incremental_operation=librdkafka_admin.AlterConfigOpType.SET
    )
    kind = librdkafka_admin.ResourceType.TOPIC
    resource = librdkafka_admin.ConfigResource(kind, name, incremental_configs=[entry])
    return admin.incremental_alter_configs([resource])  # type: ignore[no-any-return]


_Filter = librdkafka_admin.AclBindingFilter


def _acl(kind: type[Any], topic: str | None) -> Any:
    literal, allow = librdkafka_admin.ResourcePatternType.LITERAL, librdkafka_admin.AclPermissionType.ALLOW
    read = librdkafka_admin.AclOperation.READ
    return kind(librdkafka_admin.ResourceType.TOPIC, topic, literal, "User:mallory", "*", read, allow)


_SCRAM = librdkafka_admin.ScramCredentialInfo(librdkafka_admin.ScramMechanism.SCRAM_SHA_256, 4_096)
_LIBRDKAFKA: Mapping[str, Callable[..., str]] = {
    "write": _librdkafka_writes,
    "write-idempotently": _librdkafka_writes_idempotently,
    "transact": _librdkafka_transacts,
    "read": _librdkafka_reads,
    "join": _librdkafka_joins,
    "commit": _librdkafka_commits,
    "create-topic": _by_admin(lambda admin, name: admin.create_topics([librdkafka_admin.NewTopic(name, 1)])),
    "delete-topic": _by_admin(lambda admin, name: admin.delete_topics([name])),
    "add-partitions": _by_admin(lambda admin, name: admin.create_partitions([librdkafka_admin.NewPartitions(name, 9)])),
    "describe-topic": _by_admin(lambda admin, name: admin.describe_topics(confluent_kafka.TopicCollection([name]))),
    "describe-settings": _by_admin(_configs),
    "describe-broker-settings": _by_admin(_configs),
    "ends-of": _by_admin(
        lambda admin, name: admin.list_offsets(
            {confluent_kafka.TopicPartition(name, 0): librdkafka_admin.OffsetSpec.latest()}
        )
    ),
    "offsets-of-group": _by_admin(
        lambda admin, name: admin.list_consumer_group_offsets([confluent_kafka.ConsumerGroupTopicPartitions(name)])
    ),
    "delete-records": _by_admin(lambda admin, name: admin.delete_records([confluent_kafka.TopicPartition(name, 0, 0)])),
    "alter-settings": _by_admin(_alters),
    "describe-group": _by_admin(lambda admin, name: admin.describe_consumer_groups([name])),
    "delete-group": _by_admin(lambda admin, name: admin.delete_consumer_groups([name])),
    "elect-leaders": _by_admin(
        lambda admin, name: {
            name: admin.elect_leaders(confluent_kafka.ElectionType.PREFERRED, [confluent_kafka.TopicPartition(name, 0)])
        }
    ),
    "describe-acls": _by_admin(lambda admin, name: {name: admin.describe_acls(_acl(_Filter, None))}),
    "create-acl": _by_admin(lambda admin, name: admin.create_acls([_acl(librdkafka_admin.AclBinding, name)])),
    "delete-acl": _by_admin(lambda admin, name: admin.delete_acls([_acl(_Filter, name)])),
    # confluent-kafka crashes when it is refused the description of users.
    "alter-user": _by_admin(
        lambda admin, name: admin.alter_user_scram_credentials(
            [librdkafka_admin.UserScramCredentialUpsertion(name, _SCRAM, b"secret")]
        )
    ),
}


def librdkafka(bootstrap: str, user: str, word: str, *objects: str) -> str:
    settings = {"bootstrap.servers": bootstrap, "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
    settings |= {"sasl.username": user, "sasl.password": USERS[user]}
    try:
        return _LIBRDKAFKA[word]({**settings, "log_level": 0}, *objects)
    except confluent_kafka.KafkaException as exception:
        return _of_librdkafka(exception.args[0])


# Java


def _java(bootstraps: Sequence[str], attempts: Sequence[str], names: Mapping[str, str], users: Users) -> list[Outcomes]:
    """Kafka's own clients, all in one process; see RefusedClient.java."""
    login = "org.apache.kafka.common.security.plain.PlainLoginModule"
    jaas = {user: f'{login} required username="{user}" password="{USERS[user]}";' for user in users}
    command = java_program(_SOURCE, client_classpath("4.3.1"))
    command += [",".join(bootstraps), ",".join(attempts), jaas[users.another]]
    command += ["security.protocol=SASL_PLAINTEXT", "sasl.mechanism=PLAIN", f"sasl.jaas.config={jaas[users.name]}"]
    command += [f"name.{name}={topic}" for name, topic in names.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    outcomes: list[Outcomes] = [{} for _ in bootstraps]
    for line in done.stdout.splitlines():
        number, attempt, outcome = line.split("\t")
        outcomes[int(number)][attempt] = _stable(outcome)
    return outcomes


# All clients

CLIENTS = ("librdkafka", "java")


def attempted(
    client: str, bootstraps: Sequence[str], attempts: Iterable[str], names: Mapping[str, str], users: Users
) -> list[Outcomes]:
    """The outcomes of the attempts that the client can make, for each of `bootstraps`."""
    if client == "java":
        return _java(bootstraps, [*attempts], names, users)

    def at(bootstrap: str) -> Outcomes:
        outcomes = {}
        for each in attempts:
            word, *objects = each.removeprefix(ANOTHERS).split()
            if word in _LIBRDKAFKA:
                named = [names.get(one, one) for one in objects]
                outcomes[each] = _stable(librdkafka(bootstrap, users.of(each), word, *named))
        return outcomes

    with ThreadPoolExecutor(len(bootstraps)) as pool:
        return [*pool.map(at, bootstraps)]


def _stable(outcome: str) -> str:
    """The part of an outcome that is the same at two clusters: without addresses, node ids, and times."""
    outcome = re.sub(r"\(after \d+ ?ms\)|[][{}'\"]", "", outcome)
    return re.sub(r"(?<=broker )\d+|(?<=Coordinator/)\d+|127\.0\.0\.1:\d+(?:/\w+)?", "N", outcome)

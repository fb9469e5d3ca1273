"""Unchanged clients that attempt what an ACL refuses, and the exceptions that their users get.

An attempt is a word and its objects, as in "write secret" or "transact tx-1 open other": topics by a name of the test's
(`names`), groups, transactional ids and all else as they are. An attempt "another's:write open" is another user's. Each
client makes those that its interface has, at several clusters at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import aiokafka  # type: ignore[import-untyped]
import aiokafka.admin  # type: ignore[import-untyped]
import confluent_kafka
import kafka
import kafka.admin
import kafka.errors
from confluent_kafka import admin as librdkafka_admin

from tests.support.brokers.kafka_jars import client_classpath, pyspark_jars
from tests.support.clients.java import SHORT_JAVA, java_executable
from tests.support.security.sasl_client import USERS

OK = "ok"
ANOTHERS = "another's:"
WITHIN_S = 20.0
JAVA_TIMEOUT_S = 300.0
# librdkafka has no consumer without a group; everybody who may read at all must be allowed this one.
READERS = "mine"
# By attempt.
Outcomes = dict[str, str]
_SOURCE = Path(__file__).parents[1] / "clients" / "RefusedClient.java"


class Users(NamedTuple):
    """The users of attempts: `name`, and `another` for those of ANOTHERS."""

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


# kafka-python


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _kafka_python_writes(settings: dict[str, Any], topic: str, **more: Any) -> None:
    limits = {"max_block_ms": 20_000, "delivery_timeout_ms": 20_000, "request_timeout_ms": 10_000, "linger_ms": 0}
    producer = kafka.KafkaProducer(**settings, **limits, **{"enable_idempotence": False, **more})
    try:
        producer.send(topic, b"x").get(WITHIN_S)
    finally:
        producer.close(0)


def _kafka_python_transacts(settings: dict[str, Any], transactional_id: str, topic: str, group: str = "") -> None:
    producer = kafka.KafkaProducer(**settings, transactional_id=transactional_id, max_block_ms=20_000)
    try:
        producer.init_transactions()
        producer.begin_transaction()
        if group:
            place = kafka.TopicPartition(topic, 0)
            producer.send_offsets_to_transaction(
                {place: kafka.OffsetAndMetadata(0, "", -1)}, kafka.ConsumerGroupMetadata(group, -1, "", None)
            )
        else:
            producer.send(topic, b"x").get(WITHIN_S)
        producer.commit_transaction()
    finally:
        producer.close(0)


@contextlib.contextmanager
def _kafka_python_consumer(settings: dict[str, Any], group: str | None = None) -> Any:
    consumer = kafka.KafkaConsumer(**settings, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False)
    try:
        yield consumer
    finally:
        consumer.close(autocommit=False)


def _kafka_python_polls(consumer: Any) -> None:
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        if consumer.poll(timeout_ms=500):
            return


def _kafka_python_reads(settings: dict[str, Any], topic: str) -> None:
    with _kafka_python_consumer(settings) as consumer:
        consumer.assign([kafka.TopicPartition(topic, 0)])
        _kafka_python_polls(consumer)


def _kafka_python_joins(settings: dict[str, Any], group: str, topic: str) -> None:
    with _kafka_python_consumer(settings, group) as consumer:
        consumer.subscribe([topic])
        _kafka_python_polls(consumer)


def _kafka_python_commits(settings: dict[str, Any], group: str, topic: str) -> None:
    with _kafka_python_consumer(settings, group) as consumer:
        consumer.commit({kafka.TopicPartition(topic, 0): kafka.OffsetAndMetadata(0, "", -1)})


def _kafka_python_admin(ask: Callable[[Any, str], object]) -> Callable[[dict[str, Any], str], None]:
    def run(settings: dict[str, Any], name: str) -> None:
        admin = kafka.KafkaAdminClient(**settings, request_timeout_ms=10_000)
        try:
            ask(admin, name)
        finally:
            admin.close()

    return run


_KAFKA_PYTHON: Mapping[str, Callable[..., None]] = {
    "write": _kafka_python_writes,
    "write-idempotently": lambda settings, topic: _kafka_python_writes(settings, topic, enable_idempotence=True),
    "transact": _kafka_python_transacts,
    "read": _kafka_python_reads,
    "join": _kafka_python_joins,
    "commit": _kafka_python_commits,
    "create-topic": _kafka_python_admin(lambda admin, name: admin.create_topics([kafka.admin.NewTopic(name, 1, 1)])),
    "delete-topic": _kafka_python_admin(lambda admin, name: admin.delete_topics([name])),
    "add-partitions": _kafka_python_admin(
        lambda admin, name: admin.create_partitions({name: kafka.admin.NewPartitions(9)})
    ),
    "offsets-of-group": _kafka_python_admin(lambda admin, name: admin.list_group_offsets({name: None})),
    "describe-users": _kafka_python_admin(lambda admin, name: admin.describe_user_scram_credentials([name])),
    "alter-user": _kafka_python_admin(
        lambda admin, name: admin.alter_user_scram_credentials(
            [kafka.admin.UserScramCredentialUpsertion(name, kafka.admin.ScramMechanism.SCRAM_SHA_256, "secret")]
        )
    ),
}


def kafka_python(bootstrap: str, user: str, word: str, *objects: str) -> str:
    settings = {"bootstrap_servers": bootstrap, "security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN"}
    settings |= {"sasl_plain_username": user, "sasl_plain_password": USERS[user]}
    try:
        _KAFKA_PYTHON[word](settings, *objects)
    except kafka.errors.KafkaError as error:
        return _told(error)
    return OK


# aiokafka


async def _aiokafka_writes(settings: dict[str, Any], topic: str, **more: Any) -> None:
    producer = aiokafka.AIOKafkaProducer(**settings, request_timeout_ms=10_000, **more)
    await producer.start()
    try:
        await producer.send_and_wait(topic, b"x")
    finally:
        await producer.stop()


async def _aiokafka_transacts(settings: dict[str, Any], transactional_id: str, topic: str, group: str = "") -> None:
    producer = aiokafka.AIOKafkaProducer(**settings, transactional_id=transactional_id)
    try:
        await producer.start()
        await producer.begin_transaction()
        if group:
            await producer.send_offsets_to_transaction({aiokafka.TopicPartition(topic, 0): 0}, group)
        else:
            await producer.send_and_wait(topic, b"x")
        await producer.commit_transaction()
    finally:
        await producer.stop()


@contextlib.asynccontextmanager
async def _aiokafka_consumer(settings: dict[str, Any], *topics: str, group: str | None = None) -> Any:
    consumer = aiokafka.AIOKafkaConsumer(
        *topics, **settings, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False
    )
    try:
        await consumer.start()
        yield consumer
    finally:
        await consumer.stop()


async def _aiokafka_reads(settings: dict[str, Any], topic: str) -> None:
    async with _aiokafka_consumer(settings) as consumer:
        consumer.assign([aiokafka.TopicPartition(topic, 0)])
        await consumer.getone()


async def _aiokafka_joins(settings: dict[str, Any], group: str, topic: str) -> None:
    async with _aiokafka_consumer(settings, topic, group=group) as consumer:
        await consumer.getone()


async def _aiokafka_commits(settings: dict[str, Any], group: str, topic: str) -> None:
    async with _aiokafka_consumer(settings, group=group) as consumer:
        place = aiokafka.TopicPartition(topic, 0)
        consumer.assign([place])
        await consumer.commit({place: 0})


_AIOKAFKA: Mapping[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "write": _aiokafka_writes,
    "write-idempotently": lambda settings, topic: _aiokafka_writes(settings, topic, enable_idempotence=True),
    "transact": _aiokafka_transacts,
    "read": _aiokafka_reads,
    "join": _aiokafka_joins,
    "commit": _aiokafka_commits,
}


def aiokafka_client(bootstrap: str, user: str, word: str, *objects: str) -> str:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)

    async def run() -> None:
        settings = {"bootstrap_servers": bootstrap, "security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN"}
        settings |= {"sasl_plain_username": user, "sasl_plain_password": USERS[user]}
        async with asyncio.timeout(WITHIN_S):
            await _AIOKAFKA[word](settings, *objects)

    try:
        asyncio.run(run())
    except (aiokafka.errors.KafkaError, TimeoutError) as error:
        return _told(error)
    return OK


# Java


def _java(bootstraps: Sequence[str], attempts: Sequence[str], names: Mapping[str, str], users: Users) -> list[Outcomes]:
    """Kafka's own clients, all in one process; see RefusedClient.java."""
    login = "org.apache.kafka.common.security.plain.PlainLoginModule"
    jaas = {user: f'{login} required username="{user}" password="{USERS[user]}";' for user in users}
    compiler = pyspark_jars("janino-*.jar", "commons-compiler-*.jar")
    classpath = f"{compiler}{os.pathsep}{client_classpath('4.3.1')}"
    command = [java_executable(), *SHORT_JAVA, "-cp", classpath, "org.codehaus.janino.SimpleCompiler", str(_SOURCE)]
    command += ["RefusedClient", ",".join(bootstraps), ",".join(attempts), jaas[users.another]]
    command += ["security.protocol=SASL_PLAINTEXT", "sasl.mechanism=PLAIN", f"sasl.jaas.config={jaas[users.name]}"]
    command += [f"name.{name}={topic}" for name, topic in names.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    outcomes: list[Outcomes] = [{} for _ in bootstraps]
    for line in done.stdout.splitlines():
        number, attempt, outcome = line.split("\t")
        outcomes[int(number)][attempt] = _stable(outcome)
    return outcomes


# All of them

_PYTHONS: Mapping[str, tuple[Callable[..., str], Mapping[str, object]]] = {
    "librdkafka": (librdkafka, _LIBRDKAFKA),
    "kafka-python": (kafka_python, _KAFKA_PYTHON),
    "aiokafka": (aiokafka_client, _AIOKAFKA),
}
CLIENTS = (*_PYTHONS, "java")


def attempted(
    client: str, bootstraps: Sequence[str], attempts: Iterable[str], names: Mapping[str, str], users: Users
) -> list[Outcomes]:
    """The outcomes of those of the attempts that the client can make, for each of `bootstraps`."""
    if client == "java":
        return _java(bootstraps, [*attempts], names, users)
    attempt, words = _PYTHONS[client]

    def at(bootstrap: str) -> Outcomes:
        outcomes = {}
        for each in attempts:
            word, *objects = each.removeprefix(ANOTHERS).split()
            if word in words:
                named = [names.get(one, one) for one in objects]
                outcomes[each] = _stable(attempt(bootstrap, users.of(each), word, *named))
        return outcomes

    with ThreadPoolExecutor(len(bootstraps)) as pool:
        return [*pool.map(at, bootstraps)]


def _stable(outcome: str) -> str:
    """The part of an outcome that two clusters have in common: without addresses, ids of nodes, and times.

    Nor has it brackets: aiokafka names a topic by itself or in a set, as it happens.
    """
    outcome = re.sub(r"\(after \d+ ?ms\)|[][{}'\"]", "", outcome)
    return re.sub(r"(?<=broker )\d+|(?<=Coordinator/)\d+|127\.0\.0\.1:\d+(?:/\w+)?", "N", outcome)

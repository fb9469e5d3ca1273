"""Kafka's command line tools against a real cluster, direct and through the proxy: the table of outcomes holds."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import confluent_kafka
import pytest

from tests.support.brokers.real_kafka import RealKafka, start_real_kafka
from tests.support.clients.group_members import LibrdkafkaMember
from tests.support.clients.kafka_io import TIMEOUT_S
from tests.support.clients.kafka_tools import (
    DIRECT,
    PROXIED,
    Command,
    Ran,
    Side,
    Tools,
    commands,
    kafka_tools,
    unexpected,
)
from tests.support.processes.served import kafka_proxy

# The very first run downloads Kafka's jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

TABLE = commands()
PARTITIONS = 3
RECORDS = 10
FIRST_TIME_MS = 1_700_000_000_000
# The proxy's id where it has no fleet.
PROXY_ID = 1_000_000
# Numbers that appear nowhere else in what tools show.
FIRST_ID = 711
READS = re.compile(r"\b(describe|list)\b")
# Brokers learn of a change after the controller's answer.
SETTLES_S = 1.0
# So that the tools for ACLs, quotas and share groups work; everybody may do everything.
OPTIONS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "share.coordinator.state.topic.num.partitions": 1,
}


class Pair:
    """The two sides, each with its own topics and groups, and the tools."""

    def __init__(self, tools: Tools, kafka: RealKafka, proxy: str, files: Path) -> None:
        nodes = [broker.node_id for broker in kafka.brokers]
        self._tools = tools
        self.sides = (
            Side(DIRECT, kafka.bootstrap, nodes, files, nodes),
            Side(PROXIED, proxy, [PROXY_ID], files, nodes),
        )

    def unexpected(self, rows: Sequence[Command]) -> list[str]:
        """Run the commands, all direct and then all through the proxy; tell what is not as the table says."""
        direct, proxied = ([*self._run(rows, side)] for side in self.sides)
        return [problem for each in zip(rows, direct, proxied, strict=True) if (problem := unexpected(*each))]

    def _run(self, rows: Sequence[Command], side: Side) -> Iterator[Ran]:
        is_settled = True
        for row in rows:
            if READS.search(row.run) and not is_settled:
                time.sleep(SETTLES_S)
            is_settled = READS.search(row.run) is not None
            yield self._tools.run(row, side)

    def prepare_share_groups(self, side: Side) -> None:
        """A share group that has been used, and that reads from the earliest record, as another one will."""
        direct = f"--bootstrap-server {self.sides[0].kafka}"
        reset = "--alter --entity-type groups --add-config share.auto.offset.reset=earliest --entity-name"
        configs, consumer = (TABLE[script][0].main for script in ("kafka-configs", "kafka-console-share-consumer"))
        for run in (f"{direct} {reset} SHARE", f"{direct} {reset} SHARE-console"):
            assert self._tools.run(Command("", configs, run), side).status == "0"
        reading = f"{direct} --topic TOPIC --group SHARE --max-messages 5"
        assert self._tools.run(Command("", consumer, reading), side).status == "0"


@contextlib.contextmanager
def pair(kafka: RealKafka, directory: Path) -> Iterator[Pair]:
    """Both sides with records, and groups that have committed."""
    with kafka_proxy(directory, kafka.bootstrap) as proxy, kafka_tools() as tools:
        made = Pair(tools, kafka, proxy.kafka, directory)
        for side in made.sides:
            kafka.create_topic(side.names["TOPIC"], PARTITIONS)
            produce(kafka.bootstrap, side.names["TOPIC"])
            commit(kafka.bootstrap, side.names["GROUP"], side.names["TOPIC"])
        yield made


def produce(bootstrap: str, topic: str) -> None:
    """Write the same to each partition, at times of its own for each record."""
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    for partition, record in itertools.product(range(PARTITIONS), range(RECORDS)):
        producer.produce(topic, b"%d" % record, partition=partition, timestamp=FIRST_TIME_MS + record)
    assert producer.flush(TIMEOUT_S) == 0


def commit(bootstrap: str, group: str, topic: str) -> None:
    """Commit as a group that has no members afterwards."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    places = [confluent_kafka.TopicPartition(topic, partition, 5) for partition in range(PARTITIONS)]
    consumer.commit(offsets=places, asynchronous=False)
    consumer.close()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A cluster in which everything is there that a tool can show: members and an open transaction as well."""
    directory = tmp_path_factory.mktemp("tools")
    with contextlib.ExitStack() as stack:
        kafka = stack.enter_context(start_real_kafka(directory / "kafka", 3, first_id=FIRST_ID, more=OPTIONS))
        made = stack.enter_context(pair(kafka, directory))
        open_producers = []
        for side in made.sides:
            kafka.create_topic(side.names["PENDING"], 1)
            member = LibrdkafkaMember(side.kafka, side.names["TOPIC"], side.names["MEMBERS"])
            stack.enter_context(member).wait_for_values({b"%d" % each for each in range(RECORDS)})
            made.prepare_share_groups(side)
            open_producers.append(open_transaction(kafka.bootstrap, side.names["TRANSACTION"], side.names["PENDING"]))
        yield made


def open_transaction(bootstrap: str, transactional_id: str, topic: str) -> confluent_kafka.Producer:
    settings = {"bootstrap.servers": bootstrap, "transactional.id": transactional_id, "log_level": 0}
    producer = confluent_kafka.Producer({**settings, "transaction.timeout.ms": 900_000})
    producer.init_transactions(TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic, b"pending")
    assert producer.flush(TIMEOUT_S) == 0
    return producer


@pytest.mark.long
@pytest.mark.parametrize("script", TABLE)
def test_kafkas_tool_ends_as_the_table_says(full: Pair, script: str) -> None:
    problems = full.unexpected(TABLE[script])
    assert problems == [], "\n".join(problems)


def test_some_tools_end_as_direct(real_kafka: RealKafka, tmp_path: Path) -> None:
    rows = [row for row in itertools.chain(*TABLE.values()) if row.short]
    with pair(real_kafka, tmp_path) as sides:
        problems = sides.unexpected(rows)
    assert problems == [], "\n".join(problems)

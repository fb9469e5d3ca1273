"""Clients keep working through a proxy while its brokers are rolled from Kafka 3.9 to 4, and back.

The cluster's metadata.version stays that of 3.9, because with a later one no broker of 3.9 would start. During the roll
Java and librdkafka write, idempotently, and two groups read. The brokers' common versions change at the start and at
the end; a client that uses a withdrawn version must find that out by itself. Nothing is lost or doubled, and no client
is restarted.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.test_rolled_cluster import PARTITIONS, READ_TIMEOUT_S, Writers, roll
from tests.support.brokers.kafka_jars import EARLIER_KAFKA_VERSION, KAFKA_VERSION
from tests.support.brokers.leader_moves import check_numbered
from tests.support.brokers.real_kafka import RealKafka, start_real_kafka
from tests.support.clients.group_members import KafkaPythonMember, LibrdkafkaMember
from tests.support.clients.kafka_io import read_topic
from tests.support.processes.served import kafka_proxy
from tests.support.waiting import wait_for

# The first run downloads jars.
pytestmark = [pytest.mark.java, pytest.mark.long, pytest.mark.timeout(1800)]

CATCH_UP_S = 300.0


@pytest.fixture
def earlier_kafka(tmp_path: Path) -> Iterator[RealKafka]:
    with start_real_kafka(tmp_path / "kafka", 3, version=EARLIER_KAFKA_VERSION) as cluster:
        yield cluster


def test_releases_are_rolled_under_clients(earlier_kafka: RealKafka, tmp_path: Path) -> None:
    with kafka_proxy(tmp_path / "proxy", earlier_kafka.bootstrap) as proxy:
        writers, group = Writers(earlier_kafka, proxy.kafka, None), f"rolled-{uuid.uuid4().hex[:10]}"
        with (
            LibrdkafkaMember(proxy.kafka, writers.topics["java"], group) as first,
            KafkaPythonMember(proxy.kafka, writers.topics["librdkafka"], f"{group}-2") as second,
        ):
            with writers:
                for version in (KAFKA_VERSION, EARLIER_KAFKA_VERSION):
                    for broker in earlier_kafka.brokers:
                        broker.version = version
                        roll(earlier_kafka, broker, writers, "stopped")
            for member, (client, run) in zip((first, second), writers.results().items(), strict=True):
                assert run.errors == {}, client
                read = read_topic(earlier_kafka.bootstrap, writers.topics[client], PARTITIONS, run.sent, READ_TIMEOUT_S)
                check_numbered(read, run.acknowledged, run.sent, PARTITIONS)
                wait_for(lambda member=member, sent=run.sent: len(member.values) >= sent, CATCH_UP_S, "all is read")
        # They have closed, and so committed.
        assert all(member.closed_in_s < CATCH_UP_S for member in (first, second))

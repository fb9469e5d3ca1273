"""Python's three clients against a running `kproxy dev`, with default settings and the proxy as their only address.

Each writes records with and without keys, gets their offsets, and reads them back. Partitions are assigned by hand;
`tests/integration/broker/test_groups.py` has the groups.
"""

from __future__ import annotations

import uuid

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tests.support.clients.python_clients import CLIENTS, at, check, read, write
from tests.support.processes.dev import KproxyProcess

PARTITIONS = 6
RECORDS = 1_000
TIMEOUT_S = 60.0


@pytest.fixture
def topic(dev_cluster: KproxyProcess) -> str:
    """A topic of its own for each test, with partitions on every broker."""
    name = f"clients-{uuid.uuid4().hex[:10]}"
    admin = AdminClient({"bootstrap.servers": dev_cluster.kafka})
    admin.create_topics([NewTopic(name, PARTITIONS)])[name].result(TIMEOUT_S)
    return name


def records() -> list[tuple[bytes | None, bytes]]:
    """Keys and values: small and large ones, without a key, and values that are no text."""
    return [
        (None if number % 10 == 0 else b"key-%d" % (number % 50), bytes([number % 256]) * (1 + 7 * (number % 301)))
        for number in range(RECORDS)
    ]


@pytest.mark.parametrize("client", CLIENTS)
def test_client_writes_and_reads(dev_cluster: KproxyProcess, topic: str, client: str) -> None:
    settings = at(client, dev_cluster.kafka)
    written = write(client, settings, topic, records())
    check(written, read(client, settings, topic, PARTITIONS, RECORDS), PARTITIONS)


@pytest.mark.parametrize("client", CLIENTS)
def test_topic_is_made_by_being_written_to(dev_cluster: KproxyProcess, client: str) -> None:
    topic = f"made-by-{client}-{uuid.uuid4().hex[:8]}"
    write(client, at(client, dev_cluster.kafka), topic, [(None, b"first")])
    metadata = AdminClient({"bootstrap.servers": dev_cluster.kafka}).list_topics(topic, timeout=TIMEOUT_S)
    assert metadata.topics[topic].error is None


def test_clients_learn_of_the_proxy_only(dev_cluster: KproxyProcess, topic: str) -> None:
    metadata = AdminClient({"bootstrap.servers": dev_cluster.kafka}).list_topics(topic, timeout=TIMEOUT_S)
    addresses = {f"{broker.host}:{broker.port}" for broker in metadata.brokers.values()}
    assert addresses == {dev_cluster.kafka}
    leaders = {each.leader for each in metadata.topics[topic].partitions.values()}
    assert leaders == set(metadata.brokers)
    assert len(metadata.topics[topic].partitions) == PARTITIONS

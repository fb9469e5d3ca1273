"""The pages about an own Kafka and about a sidecar do what they say, in front of a real Apache Kafka cluster."""

from __future__ import annotations

import shlex
from pathlib import Path

import confluent_kafka
import pytest

from tests.support.brokers.real_kafka import RealKafka
from tests.support.pages import blocks, shell
from tests.support.processes.dev import serving

pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

TIMEOUT_S = 60.0
# The page's addresses of brokers, and of the proxy.
BROKERS = ("broker-1:9092,broker-2:9092", "kafka-0.kafka.svc:9092,kafka-1.kafka.svc:9092")


def arguments_of(page: str, real_kafka: RealKafka, *advertised: str) -> list[str]:
    """What the page tells `kproxy serve`, with the brokers that there are and free ports."""
    [text] = [each.text for each in blocks(page, "sh") if each.text.startswith("kproxy serve")]
    words = shlex.split(text.replace("\\\n", " "))[1:]
    [named] = {*BROKERS} & {*words}
    ports = {"0.0.0.0:9092": "127.0.0.1:0", "127.0.0.1:9092": "127.0.0.1:0", "127.0.0.1:9644": "127.0.0.1:0"}
    words = [real_kafka.bootstrap if word == named else ports.get(word, word) for word in words]
    for address in advertised:
        # Clients of this test reach the address that it listens at.
        at = words.index(address)
        assert words[at - 1] == "--advertise"
        del words[at - 1 : at + 1]
    return words


def read_on(bootstrap: str, topic: str, group: str) -> bytes | None:
    """The group's next record, committed."""
    reading = {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest"}
    consumer = confluent_kafka.Consumer(reading)
    consumer.subscribe([topic])
    try:
        [message] = consumer.consume(1, TIMEOUT_S)
        assert message.error() is None
        consumer.commit(message, asynchronous=False)
        return message.value()
    finally:
        consumer.close()


def write(bootstrap: str, topic: str, value: bytes) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    producer.produce(topic, value)
    assert producer.flush(TIMEOUT_S) == 0


def test_application_moves_to_the_proxy_and_back(real_kafka: RealKafka, tmp_path: Path) -> None:
    topic = real_kafka.create_topic("docs-kafka", 1)
    write(real_kafka.bootstrap, topic, b"before")
    with serving(arguments_of("start-kafka.md", real_kafka, "proxy.example:9092"), tmp_path / "stderr") as proxy:
        _install, _serve, doctor, look = blocks("start-kafka.md", "sh")
        said = shell(doctor.text.replace("proxy.example:9092", proxy.kafka), tmp_path)
        assert {line.split()[0] for line in said.splitlines()} == {"ok"}
        assert read_on(proxy.kafka, topic, topic) == b"before"
        write(proxy.kafka, topic, b"through")
        looks = look.text.replace("127.0.0.1:9644", proxy.admin).replace("top ", f"top --once --admin {proxy.admin} ")
        said = shell(looks, tmp_path)
        assert "serving, 3 brokers" in said
        assert topic in said
        assert 'kproxy_requests_total{api="PRODUCE"' in said
    # The rollback: the brokers again, and the group goes on.
    assert read_on(real_kafka.bootstrap, topic, topic) == b"through"


def test_sidecar_names_itself_alone(real_kafka: RealKafka, tmp_path: Path) -> None:
    topic = real_kafka.create_topic("docs-sidecar", 1)
    with serving(arguments_of("sidecar.md", real_kafka), tmp_path / "stderr") as proxy:
        write(proxy.kafka, topic, b"beside")
        cluster = confluent_kafka.Producer({"bootstrap.servers": proxy.kafka}).list_topics(timeout=TIMEOUT_S)
        assert [f"{each.host}:{each.port}" for each in cluster.brokers.values()] == [proxy.kafka]
    assert read_on(real_kafka.bootstrap, topic, topic) == b"beside"

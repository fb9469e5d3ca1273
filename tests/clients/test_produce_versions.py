"""Unchanged clients that speak each version of Produce write through `kproxy serve` to real Apache Kafka.

The proxy's counters, not a client's documentation, show the version on the wire. Every record is read back three times:
by the broker's own answer, through the proxy, and for Java clients also with the client that wrote it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager

import aiokafka  # type: ignore[import-untyped]
import kafka
import pytest

from kproxy_codec.record_batch import iterate_batches
from tests.support.brokers.kafka_jars import CLIENT_VERSIONS, client_classpath, kafka_classpath
from tests.support.brokers.real_kafka import RealKafka
from tests.support.clients.java_client import run_java_client
from tests.support.clients.kafka_io import Placed, Record, read_topic
from tests.support.clients.librdkafka_client import run_librdkafka
from tests.support.clients.old_kafka_python import run_old_kafka_python
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import page, samples

# The first run of all downloads the jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

PARTITIONS = 6
RECORDS = 240
TIMEOUT_S = 60.0
LINGER_MS = 5
COMPRESSIONS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
# Release of kafka-clients -> the version of Produce that it speaks with Kafka 4.3.
JAVA = {
    "0.11.0.3": 3,
    "1.0.2": 5,
    "1.1.1": 5,
    "2.0.1": 6,
    "2.1.1": 7,
    "2.3.1": 7,
    "2.4.1": 8,
    "2.7.2": 8,
    "2.8.2": 9,
    "3.6.2": 9,
    "3.7.2": 10,
    "3.8.1": 11,
    "3.9.1": 11,
    "4.0.2": 12,
    "4.1.1": 13,
    "4.3.1": 13,
}
# `make test` runs these, which speak a version of each form that the message has.
ALWAYS = ("4.3.1",)
PYTHONS_ALWAYS = ((0, 11), (1, 0), (2, 4), None)
# What kafka-python 3 is told that the brokers are -> the version of Produce that it speaks to them.
KAFKA_PYTHON = {(0, 11): 3, (1, 0): 5, (2, 0): 6, (2, 1): 7, (2, 4): 8, None: 9}
# kafka-python 2.0.2, likewise.
OLD_KAFKA_PYTHON = {"0.11": 3, "1.0": 4}
# Number of a record -> its partition and offset.
Acknowledged = dict[int, tuple[int, int]]


def produced(proxy: KproxyProcess) -> Counter[str]:
    """The requests of Produce that the proxy has had, by version."""
    found = samples(page(proxy.admin, "/metrics")[1])
    labelled = ((dict(labels), count) for (name, labels), count in found.items() if name == "kproxy_requests_total")
    return Counter({each["version"]: int(count) for each, count in labelled if each["api"] == "PRODUCE"})


@contextmanager
def speaking(proxy: KproxyProcess, version: int) -> Iterator[None]:
    """Check that what is produced meanwhile comes in this version alone."""
    before = produced(proxy)
    yield
    assert {*(produced(proxy) - before)} == {str(version)}


@pytest.fixture
def topic(real_kafka: RealKafka) -> str:
    return real_kafka.create_topic(f"versions-{uuid.uuid4().hex[:10]}", PARTITIONS)


def settings(proxy: KproxyProcess, **more: object) -> dict[str, object]:
    """What Java and librdkafka are told; all else is their default."""
    return {"bootstrap.servers": proxy.kafka, "linger.ms": LINGER_MS, **more}


def some_records(*, with_null_headers: bool = True) -> list[Record]:
    """With and without key, value and headers; empty ones, large ones, and headers twice or without a value."""
    records = []
    for number in range(RECORDS):
        key = None if number % 10 == 0 else b"key-%d" % (number % 50)
        value: bytes | None = bytes([number % 256]) * (97 * (number % 201))
        if number % 17 == 1 and key is not None:
            value = None
        headers: tuple[tuple[str, bytes | None], ...] = ()
        if number % 3:
            headers = (("number", b"%d" % number), ("empty", b""), ("number", b"again"))
            headers += (("null", None),) if with_null_headers else ()
        records.append(Record(key, value, number % PARTITIONS, headers))
    return records


def check_read(read: list[Placed], sent: list[Record]) -> None:
    """Every partition holds what was sent to it, in that order, from offset 0 on, and nothing else."""
    for partition in range(PARTITIONS):
        found = [each for each in read if each.partition == partition]
        assert [each.offset for each in found] == list(range(len(found))), f"partition {partition}"
        records = [Record(each.key, each.value, partition, each.headers) for each in found]
        assert records == [each for each in sent if each.partition == partition], f"partition {partition}"


def check_acknowledged(acknowledged: Acknowledged, sent: list[Record]) -> None:
    """Each record was acknowledged at the very place where it must be."""
    expected = {
        number: (record.partition, sum(each.partition == record.partition for each in sent[:number]))
        for number, record in enumerate(sent)
    }
    assert acknowledged == expected


def check(
    proxy: KproxyProcess,
    real_kafka: RealKafka,
    topic: str,
    acknowledged: Acknowledged,
    sent: list[Record],
    compression: str = "none",
) -> None:
    check_acknowledged(acknowledged, sent)
    check_read(read_topic(real_kafka.bootstrap, topic, PARTITIONS, len(sent)), sent)
    check_read(read_topic(proxy.kafka, topic, PARTITIONS, len(sent)), sent)
    stored = [broker.stored(topic, partition) for broker in real_kafka.brokers for partition in range(PARTITIONS)]
    assert {batch.compression for data in stored for batch in iterate_batches(data)} == {COMPRESSIONS[compression]}


def test_every_release_has_its_jars() -> None:
    assert tuple(JAVA) == CLIENT_VERSIONS
    spoken = {*JAVA.values(), *KAFKA_PYTHON.values(), *OLD_KAFKA_PYTHON.values()}
    assert spoken == set(range(3, 14)), "a version that no client here speaks"


def test_each_form_is_spoken_without_the_long_tests() -> None:
    # aiokafka speaks version 7, librdkafka version 10.
    often = {*(JAVA[release] for release in ALWAYS), *(KAFKA_PYTHON[told] for told in PYTHONS_ALWAYS), 7, 10}
    # The first, those with a log's beginning, errors of records, compact fields, leaders in answers, and topics' ids.
    assert often >= {3, 5, 8, 9, 10, 13}


@pytest.mark.parametrize(
    ("release", "version"),
    [pytest.param(*each, marks=() if each[0] in ALWAYS else pytest.mark.long) for each in JAVA.items()],
)
def test_java_produces_with_its_client_version(
    proxy: KproxyProcess, real_kafka: RealKafka, topic: str, release: str, version: int
) -> None:
    sent = some_records()
    with speaking(proxy, version):
        run = run_java_client(client_classpath(release), topic, sent, settings(proxy), read_back=PARTITIONS)
    assert run.errors == {}
    check_read(run.read, sent)
    check(proxy, real_kafka, topic, run.acknowledged, sent)


def test_librdkafka_produces_with_version_10(proxy: KproxyProcess, real_kafka: RealKafka, topic: str) -> None:
    sent = some_records()
    with speaking(proxy, 10):
        run = run_librdkafka(topic, sent, settings(proxy))
    assert run.errors == {}
    check(proxy, real_kafka, topic, run.acknowledged, sent)


@pytest.mark.parametrize(
    ("api_version", "version"),
    [pytest.param(*each, marks=() if each[0] in PYTHONS_ALWAYS else pytest.mark.long) for each in KAFKA_PYTHON.items()],
)
def test_kafka_python_produces_with_its_version(
    proxy: KproxyProcess, real_kafka: RealKafka, topic: str, api_version: tuple[int, ...] | None, version: int
) -> None:
    sent = some_records(with_null_headers=False)
    producer = kafka.KafkaProducer(bootstrap_servers=proxy.kafka, api_version=api_version, linger_ms=LINGER_MS)
    with closing(producer), speaking(proxy, version):
        futures = [
            producer.send(topic, record.value, record.key, [*record.headers], record.partition) for record in sent
        ]
        producer.flush(TIMEOUT_S)
        places = [future.get(TIMEOUT_S) for future in futures]
    acknowledged = {number: (place.partition, place.offset) for number, place in enumerate(places)}
    check(proxy, real_kafka, topic, acknowledged, sent)


# It sends no ApiVersions. Today's kafka-python speaks version 3, too.
@pytest.mark.parametrize(
    ("api_version", "version"),
    [
        pytest.param(*each, marks=pytest.mark.long if each[1] in KAFKA_PYTHON.values() else ())
        for each in OLD_KAFKA_PYTHON.items()
    ],
)
def test_old_kafka_python_produces_with_its_version(
    proxy: KproxyProcess, real_kafka: RealKafka, topic: str, api_version: str, version: int
) -> None:
    sent = some_records(with_null_headers=False)
    with speaking(proxy, version):
        run = run_old_kafka_python(proxy.kafka, topic, sent, api_version=api_version)
    assert run.errors == {}
    check(proxy, real_kafka, topic, run.acknowledged, sent)


async def test_aiokafka_produces_with_its_version(proxy: KproxyProcess, real_kafka: RealKafka, topic: str) -> None:
    sent = some_records()
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=proxy.kafka, linger_ms=LINGER_MS)
    with speaking(proxy, 7):
        async with producer:
            futures = [
                await producer.send(topic, record.value, record.key, record.partition, headers=[*record.headers])
                for record in sent
            ]
            places = await asyncio.wait_for(asyncio.gather(*futures), TIMEOUT_S)
    acknowledged = {number: (place.partition, place.offset) for number, place in enumerate(places)}
    await asyncio.to_thread(check, proxy, real_kafka, topic, acknowledged, sent)


# Only librdkafka leaves a compression out by itself: of Java's all but one are long.
@pytest.mark.parametrize(
    ("client", "compression"),
    [
        *(("librdkafka", each) for each in ("gzip", "lz4", "zstd")),
        pytest.param("librdkafka", "snappy", marks=pytest.mark.long),
        ("java", "zstd"),
        *(pytest.param("java", each, marks=pytest.mark.long) for each in ("gzip", "snappy", "lz4")),
    ],
)
def test_compressed_batches_arrive_as_they_were_sent(
    proxy: KproxyProcess, real_kafka: RealKafka, topic: str, client: str, compression: str
) -> None:
    """That no client silently leaves the compression out, as librdkafka does where ApiVersions tells it too little."""
    sent = some_records()
    told = settings(proxy, **{"compression.type": compression})
    if client == "java":
        run = run_java_client(kafka_classpath(), topic, sent, told, read_back=PARTITIONS)
        check_read(run.read, sent)
    else:
        run = run_librdkafka(topic, sent, told)
    assert run.errors == {}
    check(proxy, real_kafka, topic, run.acknowledged, sent, compression)

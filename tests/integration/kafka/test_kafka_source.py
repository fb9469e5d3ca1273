"""`kproxy serve` with owners from a real Apache Kafka cluster, and with a fixed table, in front of the same brokers."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiokafka  # type: ignore[import-untyped]
import confluent_kafka
import kafka
import pytest

from kproxy.runtime.process import spawn
from kproxy.trail.rows import Range
from kproxy_codec import api_keys as keys
from tests.support.audit.audit_trails import is_whole, trails_in_topic
from tests.support.brokers.kafka_jars import kafka_classpath
from tests.support.brokers.real_kafka import RealKafka
from tests.support.brokers.reference_broker import RawClient
from tests.support.clients.java import SHORT_JAVA, java_executable
from tests.support.clients.kafka_io import produce, read_partition, read_with_aiokafka
from tests.support.clients.raw_client import RawClient as RawProducer
from tests.support.clients.raw_client import batch, produce_frame
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.processes.served import counted, kafka_proxy, page
from tests.support.waiting import wait_for

# The very first run downloads Kafka's jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

PARTITIONS = 6
RECORDS = 1_000
MOVED_RECORDS = 20_000
KEYS = 100
TIMEOUT_S = 60.0
# partition, offset, key, value
Record = tuple[int, int, bytes | None, bytes | None]


@pytest.fixture(scope="module")
def proxy(real_kafka: RealKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    with kafka_proxy(tmp_path_factory.mktemp("proxy"), real_kafka.bootstrap) as process:
        yield process


@pytest.fixture
def topic(real_kafka: RealKafka) -> str:
    return real_kafka.create_topic(f"real-{uuid.uuid4().hex[:10]}", PARTITIONS)


def read_all(bootstrap: str, topic: str, count: int, partitions: int = PARTITIONS) -> list[Record]:
    """Return the first `count` records of a topic, and those that follow at once; ordered within each partition."""
    settings = {"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer(settings)
    try:
        first = confluent_kafka.OFFSET_BEGINNING
        consumer.assign([confluent_kafka.TopicPartition(topic, each, first) for each in range(partitions)])
        read: list[Record] = []
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            batch = [each for each in consumer.consume(count, 0.5) if each.error() is None]
            read += [(each.partition(), each.offset(), each.key(), each.value()) for each in batch]
            if len(read) >= count and not batch:
                return read
            assert time.monotonic() < deadline, f"{len(read)} of {count} records within {TIMEOUT_S} s"
    finally:
        consumer.close()


def check(read: list[Record], sent: list[tuple[bytes, bytes]]) -> None:
    """Check that each record occurs once, no offset is missing, and each key is in sending order."""
    assert sorted((key, value) for _, _, key, value in read) == sorted(sent)
    for partition in range(PARTITIONS):
        offsets = [offset for each, offset, _, _ in read if each == partition]
        assert offsets == list(range(len(offsets))), f"partition {partition}"
        assert offsets, f"nothing in partition {partition}"
    for key in {key for key, _ in sent}:
        assert len({partition for partition, _, each, _ in read if each == key}) == 1
        assert [value for _, _, each, value in read if each == key] == [value for each, value in sent if each == key]


def numbered(count: int) -> list[tuple[bytes, bytes]]:
    return [(b"key-%d" % (number % KEYS), b"%d" % number) for number in range(count)]


def produce_librdkafka(
    bootstrap: str, topic: str, records: list[tuple[bytes, bytes]], pause: Callable[[int], None] = lambda _: None
) -> None:
    """Produce with an idempotent producer, 5 requests in flight; all is acknowledged on return."""
    errors: list[object] = []
    acknowledged = 0

    def delivered(error: object, _: object) -> None:
        nonlocal acknowledged
        acknowledged += error is None
        if error is not None:
            errors.append(error)

    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 2, "batch.num.messages": 50}
    )
    for number, (key, value) in enumerate(records):
        producer.produce(topic, value, key, on_delivery=delivered)
        producer.poll(0)
        pause(number)
    assert producer.flush(TIMEOUT_S) == 0, "not all was acknowledged in time"
    assert errors == []
    assert acknowledged == len(records)


def highest_produce(proxy: KproxyProcess) -> int:
    """The highest version of Produce that is offered."""
    host, _, port = proxy.kafka.rpartition(":")
    with RawClient(host, int(port)) as client:
        offered = client.request(keys.API_VERSIONS, 0).api_keys
    return next(int(each.max_version) for each in offered if each.api_key == keys.PRODUCE)


def test_topic_ids_are_used_where_cluster_has_them(proxy: KproxyProcess) -> None:
    assert highest_produce(proxy) == 13


async def test_requests_of_many_partitions_stay_on_plain_path(proxy: KproxyProcess, real_kafka: RealKafka) -> None:
    """Kafka answers the partitions of a request in hash table order, not in the request's order."""
    partitions, requests = range(30), 20
    topic = real_kafka.create_topic(f"real-{uuid.uuid4().hex[:10]}", len(partitions))
    names = ("kproxy_plain_path_requests_total", "kproxy_plain_path_left_total")
    producer = await RawProducer().connect(int(proxy.kafka.rpartition(":")[2]))
    try:
        producer.send(produce_frame({topic: partitions}, records=batch(producer_id=-1)))
        assert set((await producer.answer()).codes.values()) == {0}
        before = [counted(proxy.admin, name) for name in names]
        frames = [
            produce_frame({topic: partitions}, records=batch(producer_id=-1), correlation_id=number)
            for number in range(1, 1 + requests)
        ]
        producer.send(*frames)
        for number in range(1, 1 + requests):
            results = (await producer.answer()).results
            assert [(each.partition_index, each.error_code) for each in results] == [(each, 0) for each in partitions]
            assert [each.fields["base_offset"] for each in results] == [number] * len(partitions)
    finally:
        producer.close()
    assert [counted(proxy.admin, name) - start for name, start in zip(names, before, strict=True)] == [requests, 0]


def test_idempotent_librdkafka_keeps_every_record(proxy: KproxyProcess, topic: str) -> None:
    sent = numbered(RECORDS)
    produce_librdkafka(proxy.kafka, topic, sent)
    check(read_all(proxy.kafka, topic, RECORDS), sent)


def test_kafka_python_keeps_every_record(proxy: KproxyProcess, topic: str, real_kafka: RealKafka) -> None:
    sent = numbered(RECORDS)
    producer = kafka.KafkaProducer(bootstrap_servers=proxy.kafka)
    try:
        futures = [producer.send(topic, value, key) for key, value in sent]
        producer.flush(TIMEOUT_S)
        places = {(place.partition, place.offset) for place in (future.get(TIMEOUT_S) for future in futures)}
    finally:
        producer.close()
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=proxy.kafka, auto_offset_reset="earliest", consumer_timeout_ms=TIMEOUT_S * 1000
    )
    try:
        consumer.assign([kafka.TopicPartition(topic, each) for each in range(PARTITIONS)])
        read = [(each.partition, each.offset, each.key, each.value) for _, each in zip(sent, consumer, strict=False)]
    finally:
        consumer.close()
    check(read, sent)
    assert {(partition, offset) for partition, offset, _, _ in read} == places
    # The brokers hold the records that the proxy reports.
    assert sorted(read_all(real_kafka.bootstrap, topic, RECORDS)) == sorted(read)


async def test_aiokafka_keeps_every_record(proxy: KproxyProcess, topic: str) -> None:
    sent = numbered(RECORDS)
    async with aiokafka.AIOKafkaProducer(bootstrap_servers=proxy.kafka, enable_idempotence=True) as producer:
        futures = [await producer.send(topic, value, key) for key, value in sent]
        await asyncio.wait_for(asyncio.gather(*futures), TIMEOUT_S)
    check(await read_with_aiokafka(proxy.kafka, topic, PARTITIONS, RECORDS, TIMEOUT_S), sent)


@pytest.mark.long
async def test_java_tools_write_and_read(proxy: KproxyProcess, topic: str, tmp_path: Path) -> None:
    async def run(main_class: str, *arguments: str) -> str:
        process = await spawn(
            *(java_executable(), *SHORT_JAVA, "-cp", kafka_classpath(), main_class, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            said, complained = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, (said + complained).decode()
        return said.decode()

    payloads = [f"{number:05d} " + "x" * 300 for number in range(100)]
    (tmp_path / "payloads").write_text("\n".join(payloads))
    wrote = await run(
        "org.apache.kafka.tools.ProducerPerformance",
        *("--bootstrap-server", proxy.kafka, "--topic", topic, "--num-records", str(RECORDS)),
        *("--throughput", "-1", "--payload-file", str(tmp_path / "payloads")),
    )
    assert re.search(rf"^{RECORDS} records sent, ", wrote, re.MULTILINE), wrote
    read = await asyncio.to_thread(read_all, proxy.kafka, topic, RECORDS)
    assert len(read) == RECORDS
    in_partition = [value.decode() for partition, _, _, value in read if partition == 0 and value is not None]
    assert set(in_partition) <= set(payloads)
    lines = await run(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", proxy.kafka, "--topic", topic, "--partition", "0", "--offset", "earliest"),
        *("--max-messages", str(len(in_partition))),
    )
    assert lines.splitlines() == in_partition


def test_write_creates_a_topic(proxy: KproxyProcess, real_kafka: RealKafka) -> None:
    for _ in range(3):
        topic = f"made-{uuid.uuid4().hex[:10]}"
        began = time.monotonic()
        values = produce(proxy.kafka, topic, [b"first", b"second"], partition=2)
        # Well before the next regular read of the table.
        assert time.monotonic() - began < 25
        assert read_partition(real_kafka.bootstrap, topic, 2, 2) == values
        assert read_partition(proxy.kafka, topic, 2, 2) == values


def test_answers_name_only_the_proxy(proxy: KproxyProcess, topic: str, real_kafka: RealKafka) -> None:
    host, _, port = proxy.kafka.rpartition(":")
    real_ids = {broker.node_id for broker in real_kafka.brokers}
    with RawClient(host, int(port)) as client:
        for version in range(14):
            fields: dict[str, object] = {"topics": [{"name": topic}]}
            if version >= 10:
                fields["topics"] = [{"name": topic, "topic_id": None}]
            answer = client.request(keys.METADATA, version, **fields)
            assert [(each.host, each.port) for each in answer.brokers] == [(host, int(port))], version
            proxy_id = answer.brokers[0].node_id
            assert proxy_id not in real_ids
            partitions = answer.topics[0].partitions
            assert len(partitions) == PARTITIONS
            for each in partitions:
                assert (each.leader_id, [*each.replica_nodes], [*each.isr_nodes]) == (proxy_id, [proxy_id], [proxy_id])
        answer = client.request(keys.DESCRIBE_CLUSTER, 1)
        assert [(each.host, each.port) for each in answer.brokers] == [(host, int(port))]
        answer = client.request(keys.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[{"name": topic}], response_partition_limit=9)
        assert {each.leader_id for each in answer.topics[0].partitions} == {proxy_id}
        answer = client.request(keys.FIND_COORDINATOR, 3, key="some-group", key_type=0)
        assert answer.error_code or (answer.host, answer.port) == (host, int(port))


@pytest.mark.long
def test_leader_moves_before_each_retry_lose_nothing(proxy: KproxyProcess, topic: str, real_kafka: RealKafka) -> None:
    """An owner that is looked up at the refusal is outdated at the retry."""
    stop = threading.Event()
    sent = numbered(MOVED_RECORDS)

    moves = 0

    def keep_moving() -> None:
        nonlocal moves
        while not stop.wait(0.3):
            real_kafka.move_leaders(topic)
            moves += 1

    def pause(number: int) -> None:
        """Let the last records wait until the leaders have moved often enough."""
        if number % 100 == 0:
            time.sleep(0.025)
        if number == MOVED_RECORDS - 100:
            wait_for(lambda: moves >= 10 or moving.done(), TIMEOUT_S, "the leaders have moved")

    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(keep_moving)
        try:
            produce_librdkafka(proxy.kafka, topic, sent, pause)
        finally:
            stop.set()
        moving.result()
    check(read_all(real_kafka.bootstrap, topic, MOVED_RECORDS), sent)
    check(read_all(proxy.kafka, topic, MOVED_RECORDS), sent)


@pytest.mark.long
def test_idempotent_producer_survives_death_of_broker(proxy: KproxyProcess, topic: str, real_kafka: RealKafka) -> None:
    victim = real_kafka.brokers[real_kafka.leaders(topic)[0] - 1]

    def kill_half_way(number: int) -> None:
        if number == MOVED_RECORDS // 2:
            victim.kill()
        elif number % 100 == 0:
            time.sleep(0.02)

    sent = numbered(MOVED_RECORDS)
    try:
        produce_librdkafka(proxy.kafka, topic, sent, kill_half_way)
        assert not victim.running
        assert victim.node_id not in real_kafka.leaders(topic).values()
        check(read_all(proxy.kafka, topic, MOVED_RECORDS), sent)
    finally:
        victim.start()
        victim.wait_started()
    real_kafka.wait_until_in_sync([topic])
    check(read_all(real_kafka.bootstrap, topic, MOVED_RECORDS), sent)


@pytest.mark.long
def test_broker_that_kafka_dropped_stays_in_metrics(proxy: KproxyProcess, real_kafka: RealKafka) -> None:
    """Kafka drops a dead broker from its metadata within seconds, and an alert waits for longer."""
    victim = real_kafka.brokers[2]
    series = f'kproxy_broker_up{{broker="{victim.node_id}"}} '
    wait_for(lambda: counted(proxy.admin, series) == 1)
    try:
        victim.kill()

        def is_dropped_and_down() -> bool:
            # From one moment: on a busy machine Kafka may drop another broker for a while.
            text = page(proxy.admin, "/metrics")[1]
            return "kproxy_table_brokers 2.0\n" in text and f"{series}0.0\n" in text

        wait_for(is_dropped_and_down)
    finally:
        victim.start()
        victim.wait_started()
    wait_for(lambda: counted(proxy.admin, series) == 1)


@pytest.mark.long
def test_idempotent_producer_survives_hung_broker(proxy: KproxyProcess, topic: str, real_kafka: RealKafka) -> None:
    victim = real_kafka.brokers[real_kafka.leaders(topic)[0] - 1]

    def pause_half_way(number: int) -> None:
        if number == MOVED_RECORDS // 2:
            victim.pause()
        elif number % 100 == 0:
            time.sleep(0.02)

    sent = numbered(MOVED_RECORDS)
    try:
        produce_librdkafka(proxy.kafka, topic, sent, pause_half_way)
        check(read_all(proxy.kafka, topic, MOVED_RECORDS), sent)
    finally:
        victim.resume()
    real_kafka.wait_until_in_sync([topic])
    # Unanswered records that reached it before it hung are not duplicated.
    check(read_all(real_kafka.bootstrap, topic, MOVED_RECORDS), sent)


@pytest.mark.parametrize("inline", [True, pytest.param(False, marks=pytest.mark.long)])
def test_fixed_table_serves_its_topics(real_kafka: RealKafka, topic: str, tmp_path: Path, inline: bool) -> None:
    leaders = real_kafka.leaders(topic)
    brokers = "".join(f'{broker.node_id} = "{broker.address}"\n' for broker in real_kafka.brokers)
    owners = [leaders[index] for index in range(PARTITIONS)]
    table = f'[brokers]\n{brokers}[[topics]]\nname = "{topic}"\nowners = {owners}\n'
    file = tmp_path / "file.toml"
    if inline:
        file.write_text(f'[ownership]\nownership = "static"\n{table}')
        source: list[str | Path] = ["--config", file]
    else:
        file.write_text(table)
        source = ["--ownership", "static", "--table", file]
    with serving(["serve", "--listen", "127.0.0.1:0", *source], tmp_path / "stderr") as proxy:
        assert set(proxy.fields) == {"kafka"}
        assert highest_produce(proxy) == 12, "a fixed table knows no topic ids"
        sent = numbered(RECORDS)
        produce_librdkafka(proxy.kafka, topic, sent)
        check(read_all(proxy.kafka, topic, RECORDS), sent)
        # An unlisted topic has no owner, although the brokers would have created it.
        producer = confluent_kafka.Producer({"bootstrap.servers": proxy.kafka, "message.timeout.ms": 2000})
        errors: list[object] = []
        producer.produce(f"{topic}-other", b"x", on_delivery=lambda error, _: errors.append(error))
        producer.flush(TIMEOUT_S)
        assert len(errors) == 1
        assert errors[0] is not None
        assert proxy.stop() == 0


def test_audit_trail_is_kept_in_the_cluster(real_kafka: RealKafka, topic: str, tmp_path: Path) -> None:
    trail = f"trail-{topic}"
    more = ("--audit-sink", f"topic:{trail}", "--audit-interval-s", "0.5")
    with kafka_proxy(tmp_path / "audited", real_kafka.bootstrap, *more) as process:
        produce(process.kafka, topic, [b"%d" % n for n in range(100)])
    (rows,) = trails_in_topic(real_kafka.bootstrap, trail).values()
    assert is_whole(rows)
    assert sum(row.record_count for row in rows if isinstance(row, Range) and row.topic == topic) == 100


def test_doctor_passes_the_cluster(real_kafka: RealKafka, topic: str) -> None:
    ended = run_kproxy("doctor", "--bootstrap", real_kafka.bootstrap, "--topic", topic, "--json")
    findings = json.loads(ended.stdout)["findings"]
    assert (ended.status, {finding["result"] for finding in findings}) == (0, {"ok"}), findings
    assert [finding["check"] for finding in findings].count("kafka.named") == 3

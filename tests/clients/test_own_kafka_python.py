"""Unchanged kafka-python clients own what they write and read, through two proxies with `own_sync`.

What a claimant does after each answer is in test_own_claimant, and with another client library in test_own_clients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import kafka
import pytest
from kafka.errors import PolicyViolationError

from kproxy.claims.client import OwnNotOffered, OwnRefused, Severed, own_sync
from tests.support.claims.owned_topics import PARTITIONS, WRITERS, OwnedTopics
from tests.support.waiting import PATIENCE_S, wait_for

CHECK_EVERY_S = 0.5
SOME_TIME_S = 1.0


@contextmanager
def producers(site: OwnedTopics, count: int = 2, **settings: Any) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        found = []
        for number in range(count):
            found.append(kafka.KafkaProducer(bootstrap_servers=site.bootstrap, client_id=f"sync-{number}", **settings))
            stack.callback(found[-1].close, 5)
        yield found


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def write(producer: Any, topic: str, value: bytes, partition: int = 0) -> None:
    producer.send(topic, value, partition=partition).get(PATIENCE_S)


def is_free(producer: Any, *resources: str) -> bool:
    """Whether nobody owns any of them: what nobody owns is granted with generation 1, whatever is asked for."""
    try:
        with own_sync(producer, WRITERS, resources, 1) as ownership:
            return set(ownership.generations.values()) == {1}
    except OwnRefused:
        return False


def test_claims_use_the_producers_own_connections(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()
    # Once refused, an idempotent one asks for a new epoch, and until that is there it fails all with the same error.
    with producers(owned_topics, enable_idempotence=False) as (owner, other):
        with own_sync(owner, WRITERS, [(topic, each) for each in range(PARTITIONS)], 3) as ownership:
            assert ownership.is_valid
            assert ownership.generations == {f"{topic}/{each}": 3 for each in range(PARTITIONS)}
            assert min(ownership.fences.values()) > 0
            for partition in range(PARTITIONS):
                write(owner, topic, b"owned", partition)
                with pytest.raises(PolicyViolationError):
                    write(other, topic, b"not owned", partition)
            left = owner.send(topic, b"what is left is sent", partition=0)
        assert left.is_done
        assert not ownership.is_valid
        with pytest.raises(PolicyViolationError):
            write(owner, topic, b"not any more")
        wait_for(lambda: is_free(other, f"{topic}/0"))
    assert owned_topics.log(topic) == [b"owned", b"what is left is sent"]


def test_earlier_records_do_not_use_the_claiming_connection(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()
    with producers(owned_topics, 1, linger_ms=5_000, enable_idempotence=False) as (producer,):
        before = producer.send(topic, b"before", partition=0)
        with own_sync(producer, WRITERS, [f"{topic}/0"], 1):
            with pytest.raises(PolicyViolationError):
                before.get(0)
            within = producer.send(topic, b"within", partition=0)
        assert within.get(0).offset == 0
    assert owned_topics.log(topic) == [b"within"]


def test_severed_writer_sends_nothing_after_its_successor(
    owned_topics: OwnedTopics, threads: ThreadPoolExecutor
) -> None:
    topic = owned_topics.topic()
    told: list[Severed] = []
    knew: list[bool] = []
    written = threading.Event()

    def write_on() -> None:
        with own_sync(first, WRITERS, [f"{topic}/0"], 2, on_severed=told.append) as ownership:
            for number in range(1_000_000):
                ownership.check()
                sent = first.send(topic, b"first %d" % number, partition=0)
                sent.add_errback(lambda _: knew.append(ownership.severed is not None and not ownership.is_valid))
                if number == 200:
                    written.set()

    with producers(owned_topics, retries=0, enable_idempotence=False) as (first, second):
        writing = threads.submit(write_on)
        assert written.wait(PATIENCE_S)
        with own_sync(second, WRITERS, [f"{topic}/0"], 2) as ownership:
            write(second, topic, b"second 0")
            with pytest.raises(Severed, match=f"{topic}/0 of the group writers is not owned any more"):
                writing.result(PATIENCE_S)
            for number in range(1, 50):
                write(second, topic, b"second %d" % number)
            assert ownership.is_valid
    assert len(told) == 1
    assert knew, "some were under way"
    assert all(knew), "whoever hears of a failure can know why"
    log = owned_topics.log(topic)
    assert log[log.index(b"second 0") :] == [b"second %d" % number for number in range(50)]


def test_reclaim_precedes_any_write_on_new_connection(
    owned_topics: OwnedTopics,
) -> None:
    topic = owned_topics.topic()
    with producers(owned_topics, 1) as (producer,):
        sent = []
        resources = [(topic, each) for each in range(PARTITIONS)]
        with own_sync(producer, WRITERS, resources, 2, reclaim=True) as ownership:
            before = ownership.fences
            for number in range(300):
                sent.append(producer.send(topic, b"%d" % number, partition=0))
                if number % 100 == 50:
                    owned_topics.cut()
                time.sleep(0.001)
            for each in sent:
                each.get(PATIENCE_S)
            assert ownership.is_valid
            assert all(ownership.fences[each] > fence for each, fence in before.items())
    assert owned_topics.log(topic) == [b"%d" % number for number in range(300)]


def test_silently_cut_connection_is_detected(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()

    def owning() -> None:
        with own_sync(producer, WRITERS, [f"{topic}/0"], 2, check_every_s=CHECK_EVERY_S) as ownership:
            for proxy in owned_topics.proxies:
                proxy.freeze()
            assert ownership.wait_severed(PATIENCE_S) is not None

    with producers(owned_topics, 1) as (producer,):
        with pytest.raises(Severed):
            owning()
        owned_topics.cut()


def test_only_owner_of_two_group_readers_gets_records(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()

    def taken_over() -> None:
        with own_sync(first, "readers", [f"{topic}/0"], 1) as ownership:
            assert values(first, 1) == [b"one"]
            with own_sync(second, "readers", [f"{topic}/0"], 1):
                assert ownership.wait_severed(PATIENCE_S) is not None
                write(producer, topic, b"two")
                assert values(second, 2) == [b"one", b"two"]
                # By itself it would read again, on a connection that nothing is claimed on; not within the block.
                assert first.poll(timeout_ms=500) == {}

    with ExitStack() as stack:
        (producer,) = stack.enter_context(producers(owned_topics, 1))
        stack.enter_context(own_sync(producer, WRITERS, [f"{topic}/0"], 1))
        write(producer, topic, b"one")
        first, second = (stack.enter_context(reader(owned_topics, topic)) for _ in range(2))
        with pytest.raises(Severed):
            taken_over()


@contextmanager
def reader(site: OwnedTopics, topic: str) -> Iterator[Any]:
    """Of its partition 0, from the beginning."""
    consumer = kafka.KafkaConsumer(bootstrap_servers=site.bootstrap, enable_auto_commit=False, group_id=None)
    try:
        partition = kafka.TopicPartition(topic, 0)
        consumer.assign([partition])
        consumer.seek(partition, 0)
        yield consumer
    finally:
        consumer.close()


def values(consumer: Any, count: int) -> list[bytes]:
    read: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(read) < count:
        assert time.monotonic() < deadline
        for records in consumer.poll(timeout_ms=200).values():
            read += [each.value for each in records]
    return read


def test_producer_with_pinned_api_version_can_own(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()
    with ExitStack() as stack:
        (producer,) = stack.enter_context(producers(owned_topics, 1, api_version=(2, 6)))
        stack.enter_context(own_sync(producer, WRITERS, [f"{topic}/0"], 1))
        write(producer, topic, b"owned")
    assert owned_topics.log(topic) == [b"owned"]


def test_brokers_without_a_proxy_offer_nothing_to_own(owned_topics: OwnedTopics) -> None:
    producer = kafka.KafkaProducer(bootstrap_servers=owned_topics.broker_addresses)
    try:
        with pytest.raises(OwnNotOffered, match="connect it to a kproxy"), own_sync(producer, WRITERS, ["a job"], 2):
            pytest.fail("nobody can grant it")
    finally:
        producer.close()

"""Unchanged aiokafka clients own what they write and read, through two proxies: `own` of kproxy.claims.client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiokafka
import pytest
from aiokafka.errors import PolicyViolationError
from aiokafka.protocol.produce import ProduceRequest

from kproxy.claims.client import OwnNotOffered, OwnRefused, Severed, own
from kproxy_codec.error_codes import NONE
from tests.support.claims.owned_topics import PARTITIONS, WRITERS, OwnedTopics
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.wire.record_batches import build_batch

CHECK_EVERY_S = 0.5
SOME_TIME_S = 0.3


@asynccontextmanager
async def producers(site: OwnedTopics, count: int = 2, **settings: Any) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            producer = aiokafka.AIOKafkaProducer(
                bootstrap_servers=site.bootstrap, client_id=f"writer-{number}", acks="all", **settings
            )
            await producer.start()
            stack.push_async_callback(producer.stop)
            found.append(producer)
        yield found


async def write(producer: Any, topic: str, value: bytes, partition: int = 0) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await producer.send_and_wait(topic, value, partition=partition)


async def leaders(producer: Any, topic: str) -> list[int]:
    """Whom the client has been told of, by partition."""
    await producer.client.force_metadata_update()
    return [
        producer.client.cluster.leader_for_partition(aiokafka.TopicPartition(topic, each)) for each in range(PARTITIONS)
    ]


@asynccontextmanager
async def somebody_owning(owning: Any) -> AsyncIterator[asyncio.Task[None]]:
    """A task that owns it until it is severed; it does so within the block."""
    entered = asyncio.Event()

    async def own_on() -> None:
        async with owning:
            entered.set()
            await asyncio.sleep(PATIENCE_S)

    task = asyncio.create_task(own_on())
    await asyncio.wait_for(entered.wait(), PATIENCE_S)
    yield task
    task.cancel()
    await asyncio.wait([task])


async def is_free(producer: Any, *resources: str) -> bool:
    """Whether nobody owns any of them: what nobody owns is granted with generation 1, whatever is asked for."""
    try:
        async with own(producer, WRITERS, resources, 1, cancels_body=False) as ownership:
            return set(ownership.generations.values()) == {1}
    except OwnRefused:
        return False


async def test_claims_use_the_producers_own_connections(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()
    async with producers(owned_topics) as (owner, other):
        await other.partitions_for(topic)
        resources = [(topic, each) for each in range(PARTITIONS)]
        async with own(owner, WRITERS, resources, 3) as ownership:
            assert ownership.is_valid
            assert ownership.generations == {f"{topic}/{each}": 3 for each in range(PARTITIONS)}
            assert min(ownership.fences.values()) > 0
            assert len(set(await leaders(owner, topic))) == 2, "both proxies hold some of them"
            for partition in range(PARTITIONS):
                await write(owner, topic, b"owned", partition)
                with pytest.raises(PolicyViolationError):
                    await write(other, topic, b"not owned", partition)
        assert not ownership.is_valid
        assert ownership.severed is None
        assert set(ownership.fences) == {f"{topic}/{each}" for each in range(PARTITIONS)}
        with pytest.raises(PolicyViolationError):
            await write(owner, topic, b"not any more")
    assert owned_topics.log(topic) == [b"owned"]


async def test_resources_are_free_after_leaving_the_block(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()
    async with producers(owned_topics) as (first, second):
        async with own(first, WRITERS, [f"{topic}/0", "a job"], 7):
            sent = await first.send(topic, b"what is left is sent", partition=0)
        assert (await sent).offset == 0
        await eventually(lambda: is_free(second, f"{topic}/0", "a job"))


async def test_earlier_records_do_not_use_the_claiming_connection(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()
    async with producers(owned_topics, 1, linger_ms=1_000) as (producer,):
        before = await producer.send(topic, b"before", partition=0)
        async with own(producer, WRITERS, [f"{topic}/0"], 1):
            assert before.done()
            assert isinstance(before.exception(), PolicyViolationError)
            within = await producer.send(topic, b"within", partition=0)
        assert (await within).offset == 0
    assert owned_topics.log(topic) == [b"within"]


async def test_severed_writer_sends_nothing_after_its_successor(
    owned_topics: OwnedTopics,
) -> None:
    topic = owned_topics.topic()
    seen: list[tuple[str, bool]] = []
    failed: list[bool] = []

    async with producers(owned_topics) as (first, second):
        written = asyncio.Event()

        async def write_on() -> None:
            async with own(first, WRITERS, [f"{topic}/0"], 2, on_severed=lambda _: seen.append(("told", True))) as held:

                def done(sent: asyncio.Future[Any]) -> None:
                    if sent.exception() is not None:
                        failed.append(held.severed is not None and not held.is_valid)

                for number in range(1_000_000):
                    sent = await first.send(topic, b"first %d" % number, partition=0)
                    sent.add_done_callback(done)
                    if number == 100:
                        written.set()
                    # As many are under way as one likes; the client resends them by itself.
                    await asyncio.sleep(0)

        writing = asyncio.create_task(write_on())
        await written.wait()
        async with own(second, WRITERS, [f"{topic}/0"], 2) as ownership:
            await write(second, topic, b"second 0")
            with pytest.raises(Severed, match=f"{topic}/0 of the group writers is not owned any more"):
                await asyncio.wait_for(writing, PATIENCE_S)
            for number in range(1, 50):
                await write(second, topic, b"second %d" % number)
            assert ownership.is_valid
    assert seen == [("told", True)]
    assert failed, "some were under way"
    assert all(failed), "whoever hears of a failure can know why"
    log = owned_topics.log(topic)
    assert log[log.index(b"second 0") :] == [b"second %d" % number for number in range(50)]


async def test_reclaim_precedes_any_write_on_new_connection(
    owned_topics: OwnedTopics,
) -> None:
    topic = owned_topics.topic()
    async with producers(owned_topics, 1, enable_idempotence=True) as (producer,):
        sent = []
        async with own(producer, WRITERS, [(topic, each) for each in range(PARTITIONS)], 2, reclaim=True) as ownership:
            before = ownership.fences
            for number in range(300):
                sent.append(await producer.send(topic, b"%d" % number, partition=0))
                if number % 100 == 50:
                    await asyncio.to_thread(owned_topics.cut)
                await asyncio.sleep(0.001)
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*sent)
            assert ownership.is_valid
            assert all(ownership.fences[each] > fence for each, fence in before.items())
    assert owned_topics.log(topic) == [b"%d" % number for number in range(300)]


async def test_write_before_disconnect_is_noticed_waits_too(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()
    async with AsyncExitStack() as stack:
        (producer,) = await stack.enter_async_context(producers(owned_topics, 1))
        ownership = await stack.enter_async_context(own(producer, WRITERS, [f"{topic}/0"], 2, reclaim=True))
        held = ownership._claimant.held[f"{topic}/0"]
        # The library sees this at once, and opens another connection; it closes this one some steps later.
        held.connection._reader.feed_eof()
        request = ProduceRequest(None, -1, 30_000, [(topic, [(0, build_batch([b"held back"]))])])
        answer = await asyncio.wait_for(producer.client.send(held.node, request), PATIENCE_S)
        ((_, ((_, error_code, *_),)),) = answer.topics
        assert error_code == NONE
    assert owned_topics.log(topic) == [b"held back"]


async def test_reclaiming_takes_nothing_from_a_successor(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()

    async def reclaiming() -> None:
        plan = own(first, WRITERS, [f"{topic}/0"], 2, reclaim=True, timeout_s=5.0, cancels_body=False)
        async with plan as ownership, own(second, WRITERS, [f"{topic}/0"], 2) as successor:
            late = await first.send(topic, b"late", partition=0)
            await asyncio.wait_for(ownership.wait_severed(), PATIENCE_S)
            with pytest.raises(PolicyViolationError):
                await late
            assert successor.is_valid

    async with producers(owned_topics) as (first, second):
        with pytest.raises(Severed, match=r"it could not be claimed again: .* is owned with a generation above 1"):
            await reclaiming()
    assert owned_topics.log(topic) == []


async def test_silently_cut_connection_is_detected(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()

    async def owning() -> None:
        async with own(producer, WRITERS, [f"{topic}/0"], 2, check_every_s=CHECK_EVERY_S):
            for proxy in owned_topics.proxies:
                await asyncio.to_thread(proxy.freeze)
            await asyncio.Event().wait()

    async with producers(owned_topics, 1) as (producer,):
        with pytest.raises(Severed):
            await asyncio.wait_for(owning(), PATIENCE_S)
        await asyncio.to_thread(owned_topics.cut)


async def test_whole_group_is_owned_on_one_connection(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()
    async with AsyncExitStack() as stack:
        first, second = await stack.enter_async_context(producers(owned_topics))
        owning = await stack.enter_async_context(somebody_owning(own(first, WRITERS, [f"{topic}/1"], 4)))
        ownership = await stack.enter_async_context(own(second, WRITERS, None, 1))
        with pytest.raises(Severed):
            await owning
        assert ownership.resources == ()
        assert ownership.generations == {"": 4}
        for partition in range(PARTITIONS):
            await write(second, topic, b"whole", partition)
        assert len(set(await leaders(second, topic))) == 1
    assert owned_topics.log(topic, 1) == [b"whole"]


async def test_only_owner_of_two_group_readers_gets_records(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()

    async def taken_over() -> None:
        async with own(first, "readers", [f"{topic}/0"], 1, cancels_body=False) as ownership:
            assert (await first.getone()).value == b"one"
            async with own(second, "readers", [f"{topic}/0"], 1):
                await ownership.wait_severed()
                await write(producer, topic, b"two")
                assert [(await second.getone()).value for _ in range(2)] == [b"one", b"two"]
                # By itself it would read again, on a connection that nothing is claimed on; not within the block.
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(first.getone(), SOME_TIME_S)

    async with AsyncExitStack() as stack:
        (producer,) = await stack.enter_async_context(producers(owned_topics, 1))
        await stack.enter_async_context(own(producer, WRITERS, [f"{topic}/0"], 1))
        await write(producer, topic, b"one")
        first, second = [await stack.enter_async_context(reader(owned_topics, topic)) for _ in range(2)]
        with pytest.raises(Severed):
            await asyncio.wait_for(taken_over(), PATIENCE_S)
        assert (await asyncio.wait_for(first.getone(), PATIENCE_S)).value == b"two"


@asynccontextmanager
async def reader(site: OwnedTopics, topic: str) -> AsyncIterator[Any]:
    """Of its partition 0, from the beginning."""
    consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=site.bootstrap, enable_auto_commit=False)
    await consumer.start()
    try:
        partition = aiokafka.TopicPartition(topic, 0)
        consumer.assign([partition])
        consumer.seek(partition, 0)
        yield consumer
    finally:
        await consumer.stop()


async def test_uncancelled_block_ends_by_itself(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()

    async def owning() -> None:
        plan = own(first, WRITERS, [f"{topic}/0"], 1, cancels_body=False)
        async with plan as ownership, own(second, WRITERS, [f"{topic}/0"], 1):
            severed = await asyncio.wait_for(ownership.wait_severed(), PATIENCE_S)
            assert severed.resources == (f"{topic}/0",)
            with pytest.raises(Severed):
                ownership.check()
            with pytest.raises(PolicyViolationError):
                await write(first, topic, b"late")
            ended.append("the block")

    ended: list[str] = []
    async with producers(owned_topics) as (first, second):
        with pytest.raises(Severed):
            await asyncio.wait_for(owning(), PATIENCE_S)
    assert ended == ["the block"]


async def test_block_errors_and_outside_cancellation_are_not_hidden(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()
    async with producers(owned_topics) as (producer, other):
        with pytest.raises(ZeroDivisionError):
            async with own(producer, WRITERS, [f"{topic}/0"], 2):
                raise ZeroDivisionError

        async with somebody_owning(own(producer, WRITERS, [f"{topic}/0"], 2)) as task:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await eventually(lambda: is_free(other, f"{topic}/0"))
        # Who is severed while nothing is left to interrupt is told all the same, and the task is as before.
        with pytest.raises(Severed):
            async with own(producer, WRITERS, [f"{topic}/0"], 2) as ownership:
                ownership._claimant._driver.shut(ownership._claimant.held[f"{topic}/0"].connection)
        await asyncio.sleep(0)
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0

        async def cancelled_meanwhile() -> None:
            async with own(producer, WRITERS, [f"{topic}/0"], 2) as ownership:
                ownership._claimant._driver.shut(ownership._claimant.held[f"{topic}/0"].connection)
                task.cancel()

        task = asyncio.create_task(cancelled_meanwhile())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelling() == 1
        await eventually(lambda: is_free(producer, f"{topic}/0"))


async def test_client_owns_in_one_block_at_once(owned_topics: OwnedTopics) -> None:
    topic = owned_topics.topic()
    async with producers(owned_topics, 1) as (producer,), own(producer, WRITERS, [f"{topic}/0"], 2) as ownership:
        with pytest.raises(RuntimeError, match="already owns resources"):
            async with own(producer, WRITERS, [f"{topic}/1"], 2):
                pytest.fail("it would share its connections")
        assert ownership.is_valid


async def test_stopped_client_owns_nothing_and_is_told(owned_topics: OwnedTopics) -> None:
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=owned_topics.bootstrap)
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="is not running: start it before"):
                async with own(producer, WRITERS, ["a job"], 2):
                    pytest.fail("it has no connections")
            await producer.start()
            await producer.stop()


async def test_brokers_without_a_proxy_offer_nothing_to_own(owned_topics: OwnedTopics) -> None:
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=owned_topics.broker_addresses)
    await producer.start()
    try:
        with pytest.raises(OwnNotOffered, match="does not offer the Own API; connect it to a kproxy"):
            async with own(producer, WRITERS, ["a job"], 2):
                pytest.fail("nobody can grant it")
    finally:
        await producer.stop()

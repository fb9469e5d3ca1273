"""Keeping writer fences in etcd: the answers if etcd is slow, silent or reports a different fence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kproxy.broker.apis import bind_fences, produce
from kproxy.broker.cluster import ClusterView
from kproxy.broker.config import BrokerConfig
from kproxy.broker.context import Bindings, Broker, Request
from kproxy.broker.fence_keeper import CONCURRENT_FENCES, FenceKeeper
from kproxy.broker.keys import FenceValue, Keys, TopicValue, decode_value, encode_value
from kproxy.broker.partition import Partition, ReplicaSettings
from kproxy.broker.replica_manager import ReplicaManager
from kproxy.broker.writer_fence import KeptFence
from kproxy.etcd import delete_op, put_op
from kproxy_codec import error_codes
from kproxy_codec.api_keys import BIND_FENCES, PRODUCE
from kproxy_codec.framing import parse_request_header, request_header, response_header
from kproxy_codec.own import NO_FENCE, BoundFence, FenceBinding, encode_bind_fences_request, parse_bind_fences_response
from kproxy_codec.primitives import INT32
from tests.support.brokers.replica_group import TOPIC_ID
from tests.support.clients.raw_client import Answer, produce_frame
from tests.support.models import simulated_etcd
from tests.support.models.simulated_etcd import EtcdStore, Link, SimulatedEtcdClient
from tests.support.waiting import eventually
from tests.support.wire.record_batches import build_batch
from tests.unit.broker.replicas import lead, replica

KEYS = Keys("/p")
PARTITIONS = 3 * CONCURRENT_FENCES
REFUSED = error_codes.POLICY_VIOLATION
TIMED_OUT = error_codes.REQUEST_TIMED_OUT
NOT_AVAILABLE = error_codes.COORDINATOR_NOT_AVAILABLE
NOT_LEADER = error_codes.NOT_LEADER_OR_FOLLOWER
UNKNOWN = error_codes.UNKNOWN_TOPIC_OR_PARTITION
INVALID = error_codes.INVALID_REQUEST


class Stage:
    """A broker that leads all partitions of a topic, with a simulated etcd."""

    def __init__(self, directory: Path) -> None:
        self.store = EtcdStore(time.monotonic)
        self.client = SimulatedEtcdClient(self.store)
        self.view = ClusterView(KEYS)
        self.leases = ReplicaManager(
            self.client,
            self.view,
            cast(Any, None),
            1,
            settings_of=lambda *_: ReplicaSettings(1, time.monotonic),
            on_identity_lost=lambda _: None,
        )
        self.deposed: list[Partition] = []
        self.keeper = FenceKeeper(self.client, self.view, on_deposed=self.deposed.append)
        nobody = cast(Any, None)
        config = BrokerConfig(1, directory, ())
        self.broker = Broker(config, "cluster", self.view, self.leases, nobody, nobody, self.keeper, nobody)
        self.bindings: Bindings = {}
        self._directory = directory

    async def lead(self, topic: str = "t", partitions: int = PARTITIONS) -> list[Partition]:
        value = TopicValue(TOPIC_ID, [[1]] * partitions, {})
        await self.client.txn([], [put_op(KEYS.topic(topic), encode_value(value))])
        self.view.on_snapshot(self.store.snapshot(self.view.prefixes))
        led = []
        for index in range(partitions):
            taken = await self.client.txn([], [put_op(KEYS.lease(topic, index), b"1")])
            partition = replica(self._directory / f"{topic}-{index}", 1, index, topic=topic)
            led.append(lead(partition, token=taken.revision))
            self.leases.partitions[topic.encode(), index] = partition
        return led

    def close(self) -> None:
        for partition in self.leases.partitions.values():
            partition.close()

    async def grant(self) -> int:
        return (await self.client.txn([], [put_op("/p/claim", b"x")])).revision

    def kept(self, index: int = 0) -> tuple[int, bool] | None:
        found = self.store.get(KEYS.fence("t", index))
        if found is None:
            return None
        value = decode_value(found.value, FenceValue)
        return value.fence, value.is_owned

    async def ask(self, *asked: FenceBinding, bindings: Bindings | None = None) -> list[BoundFence]:
        message = request_header(BIND_FENCES, 0, 1, b"test") + encode_bind_fences_request(asked)
        frame = memoryview(INT32.pack(len(message)) + message)
        bindings = self.bindings if bindings is None else bindings
        answer = bind_fences.handle(self.broker, Request(frame, parse_request_header(frame), bindings))
        body = await answer if isinstance(answer, Awaitable) else answer
        assert body is not None
        reply = response_header(BIND_FENCES, 0, 1) + b"".join(body)
        return list(parse_bind_fences_response(INT32.pack(len(reply)) + reply))

    async def produce(self, bound: int, index: int = 0) -> int:
        """Write on a connection that was bound before the topic was recreated."""
        frame = memoryview(bytearray(produce_frame({"t": [index]}, records=bytes(build_batch()), acks=1)))
        request = Request(frame, parse_request_header(frame), {(b"t", index): bound})
        answer = produce.handle(self.broker, request)
        body = await answer if isinstance(answer, Awaitable) else answer
        assert body is not None
        reply = response_header(PRODUCE, 9, 1) + b"".join(body)
        [code] = Answer(INT32.pack(len(reply)) + reply, PRODUCE, 9).codes.values()
        return code

    async def bind(self, fence: int, *, is_released: bool = False) -> tuple[int, int]:
        [bound] = await self.ask(FenceBinding("t", 0, fence, is_released))
        return bound.error_code, bound.fence


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    await stage.lead()
    yield stage
    stage.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(simulated_etcd, "CALL_TIMEOUT_S", 0.1)
    return


# Requests that etcd does not answer


@pytest.mark.usefixtures("impatient")
async def test_unanswered_transaction_assumes_nothing(stage: Stage) -> None:
    first, second = await stage.grant(), await stage.grant()
    assert await stage.bind(first) == (0, first)
    stage.client.link = Link.DEAF
    # The keeper asked etcd before, so it knows the latest fence.
    stage.keeper._latest = second
    assert await stage.bind(second) == (TIMED_OUT, first)
    assert stage.bindings == {(b"t", 0): first}
    assert stage.kept() == (second, True), "it was done"
    stage.client.link = Link.FAST
    assert await stage.bind(first) == (0, first), "it is not known here"
    assert await stage.bind(second) == (0, second)
    assert await stage.bind(first) == (REFUSED, second)


@pytest.mark.usefixtures("impatient")
async def test_late_transaction_neither_undoes_nor_is_undone(stage: Stage) -> None:
    fences = [await stage.grant() for _ in range(3)]
    stage.keeper._latest = fences[-1]
    stage.client.link = Link.SLOW
    assert await stage.bind(fences[0]) == (TIMED_OUT, NO_FENCE)
    stage.client.link = Link.FAST
    assert await stage.bind(fences[2]) == (0, fences[2])
    stage.client.apply_pending(0)
    assert stage.kept() == (fences[2], True)
    assert await stage.bind(fences[1]) == (REFUSED, fences[2])


@pytest.mark.usefixtures("impatient")
async def test_late_first_transaction_is_adopted(stage: Stage) -> None:
    fences = [await stage.grant() for _ in range(3)]
    stage.keeper._latest = fences[-1]
    stage.client.link = Link.SLOW
    assert await stage.bind(fences[1]) == (TIMED_OUT, NO_FENCE)
    stage.client.apply_pending(0)
    stage.client.link = Link.FAST
    assert await stage.bind(fences[0]) == (REFUSED, fences[1]), "etcd keeps a higher one"
    assert await stage.bind(fences[2]) == (0, fences[2])


@pytest.mark.usefixtures("impatient")
async def test_bind_not_sent_to_etcd_is_told_apart(stage: Stage) -> None:
    fence = await stage.grant()
    stage.client.link = Link.CUT
    assert await stage.bind(fence) == (NOT_AVAILABLE, NO_FENCE)
    assert stage.bindings == {}


async def test_time_limit_is_shared_by_all_partitions(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind_fences, "FENCE_TIMEOUT_S", 0.2)
    # Etcd itself gives up much later.
    monkeypatch.setattr(simulated_etcd, "CALL_TIMEOUT_S", 600.0)
    fence = await stage.grant()
    assert await stage.bind(fence) == (0, fence)
    stage.client.link = Link.SLOW
    asked = [FenceBinding("t", index, fence) for index in range(PARTITIONS)]
    async with asyncio.timeout(60):
        bound = await stage.ask(*asked)
    assert [each.error_code for each in bound] == [0] + [TIMED_OUT] * (PARTITIONS - 1)
    assert stage.bindings == {(b"t", 0): fence}
    stage.client.link = Link.FAST
    assert {each.error_code for each in await stage.ask(*asked)} == {0}


# Answers of etcd


async def test_deposed_broker_is_not_the_leader(stage: Stage) -> None:
    fence = await stage.grant()
    await stage.client.txn([], [delete_op(KEYS.lease("t", 0))])
    await stage.client.txn([], [put_op(KEYS.lease("t", 0), b"2")])
    assert await stage.bind(fence) == (NOT_LEADER, NO_FENCE)
    assert stage.deposed == [stage.leases.partitions[b"t", 0]]
    assert stage.kept() is None


async def test_deleted_topic_keeps_no_fence(stage: Stage) -> None:
    fence = await stage.grant()
    await stage.client.txn([], [delete_op(KEYS.topic("t"))])
    assert await stage.bind(fence) == (UNKNOWN, NO_FENCE)
    assert stage.kept() is None
    assert stage.bindings == {}


async def test_fence_of_a_past_history_is_refused(stage: Stage) -> None:
    fence = await stage.grant()
    assert await stage.bind(fence + 1_000) == (INVALID, NO_FENCE)
    stage.keeper._latest = fence + 1_000
    stage.view.on_restored()
    assert await stage.bind(fence + 1_000) == (INVALID, NO_FENCE)
    assert await stage.bind(fence) == (0, fence)


async def test_unreadable_fence_is_not_overwritten(stage: Stage) -> None:
    await stage.client.txn([], [put_op(KEYS.fence("t", 0), b"what?")])
    assert await stage.bind(await stage.grant()) == (NOT_AVAILABLE, NO_FENCE)
    found = stage.store.get(KEYS.fence("t", 0))
    assert found is not None
    assert found.value == b"what?"


# Many requests at once


async def test_fence_transactions_in_flight_are_bounded(stage: Stage) -> None:
    fences = [await stage.grant() for _ in range(4)]
    stage.keeper._latest = fences[-1]
    stage.client.link = Link.SLOW
    asking = [
        asyncio.create_task(stage.ask(FenceBinding("t", index, fence), bindings={}))
        for index in range(PARTITIONS)
        for fence in fences
    ]
    most = 0
    await eventually(lambda: len(stage.client.pending) == CONCURRENT_FENCES)
    while any(not each.done() for each in asking):
        pending = [call for call in stage.client.pending if call.name == "Txn"]
        keys = [call.request.success[0].request_put.key for call in pending]
        assert len(keys) == len(set(keys)) <= CONCURRENT_FENCES
        most = max(most, len(keys))
        if pending:
            stage.client.apply_pending(0)
            stage.client.answer_pending(0)
        await asyncio.sleep(0)
    assert most == CONCURRENT_FENCES
    answers = [task.result()[0] for task in asking]
    assert {each.error_code for each in answers[3::4]} == {0}, "the highest of each partition"
    assert {stage.kept(index) for index in range(PARTITIONS)} == {(fences[-1], True)}


async def test_bind_behind_a_higher_fence_is_refused_locally(stage: Stage) -> None:
    lower, higher = await stage.grant(), await stage.grant()
    stage.keeper._latest = higher
    stage.client.link = Link.SLOW
    first = asyncio.create_task(stage.bind(higher))
    await eventually(lambda: len(stage.client.pending) == 1)
    second = asyncio.create_task(stage.bind(lower))
    await asyncio.sleep(0.01)
    stage.client.apply_pending(0)
    stage.client.answer_pending(0)
    assert (await first, await second) == ((0, higher), (REFUSED, higher))
    assert not stage.client.pending


async def test_known_fence_is_answered_while_another_waits(stage: Stage) -> None:
    known, higher = await stage.grant(), await stage.grant()
    assert await stage.bind(known) == (0, known)
    stage.keeper._latest = higher
    stage.client.link = Link.SLOW
    waiting = asyncio.create_task(stage.bind(higher))
    await eventually(lambda: len(stage.client.pending) == 1)
    assert await stage.bind(known) == (0, known)
    assert not waiting.done()
    stage.client.apply_pending(0)
    stage.client.answer_pending(0)
    assert await waiting == (0, higher)


async def test_abandoned_request_leaves_partition_to_the_next(stage: Stage) -> None:
    """Its connection has ended."""
    fences = [await stage.grant() for _ in range(2)]
    stage.keeper._latest = fences[-1]
    stage.client.link = Link.SLOW
    given_up = asyncio.create_task(stage.bind(fences[0]))
    await eventually(lambda: len(stage.client.pending) == 1)
    following = asyncio.create_task(stage.bind(fences[1]))
    await asyncio.sleep(0.01)
    given_up.cancel()
    await eventually(lambda: len(stage.client.pending) == 2)
    for _ in range(2):
        stage.client.apply_pending(0)
        stage.client.answer_pending(0)
    # The first request was applied, so the second one's compare failed, and the keeper puts the fence again.
    await eventually(lambda: len(stage.client.pending) == 1)
    stage.client.apply_pending(0)
    stage.client.answer_pending(0)
    assert await following == (0, fences[1])


# Fences of connections


async def test_connections_bound_partitions_are_limited_without_deleted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bind_fences, "MAX_BINDINGS", 4)
    fence = await stage.grant()
    for index in range(4):
        assert (await stage.ask(FenceBinding("t", index, fence)))[0].error_code == 0
    assert (await stage.ask(FenceBinding("t", 4, fence)))[0].error_code == INVALID
    stage.bindings[b"gone", 0] = stage.bindings.pop((b"t", 3))
    assert (await stage.ask(FenceBinding("t", 4, fence)))[0].error_code == 0
    assert sorted(stage.bindings) == [(b"t", index) for index in (0, 1, 2, 4)]


async def test_bind_before_leadership_applies_to_later_writes(stage: Stage) -> None:
    fence = await stage.grant()
    led = stage.leases.partitions.pop((b"t", 0))
    assert await stage.bind(fence) == (NOT_LEADER, NO_FENCE)
    assert stage.bindings == {(b"t", 0): fence}
    led.writers.keep(KeptFence(fence, True, 1))
    assert led.refusal_of_writer(fence) is None
    led.close()


async def test_write_to_recreated_topic_stays_behind_its_fence(stage: Stage) -> None:
    """Nobody has bound a fence at the new topic, and connections know only its name."""
    older, newer = await stage.grant(), await stage.grant()
    assert [await stage.produce(each) for each in (newer, older, newer)] == [0, REFUSED, 0]
    assert [await stage.produce(each, 1) for each in (older, newer, older)] == [0, 0, REFUSED]
    assert [stage.kept(index) for index in (0, 1)] == [(newer, True)] * 2
    assert stage.leases.partitions[b"t", 1].log_end_offset == 2


@pytest.mark.usefixtures("impatient")
async def test_unkept_fence_allows_no_write_without_etcd(stage: Stage) -> None:
    fence = await stage.grant()
    stage.client.link = Link.DEAF
    assert await stage.produce(fence) == error_codes.LEADER_NOT_AVAILABLE
    assert stage.leases.partitions[b"t", 0].log_end_offset == 0
    stage.client.link = Link.FAST
    assert await stage.produce(fence) == 0
    assert await stage.produce(fence + 1_000) == error_codes.LEADER_NOT_AVAILABLE, "of a history that is no more"

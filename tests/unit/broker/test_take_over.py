"""A take-over that finds its own key: it does not overwrite what etcd has changed meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

import pytest

from kproxy.broker.cluster import Topic
from kproxy.broker.keys import Keys, PartitionKey, StateValue, TopicValue, decode_value, encode_value
from kproxy.broker.lease_txn import Taken, TakeOver
from kproxy.etcd import EtcdUnavailable, delete_op, put_op
from tests.support.brokers.replica_group import on_disk
from tests.support.models.simulated_etcd import EtcdStore, Link, SimulatedEtcdClient

KEYS = Keys("/p")
KEY = PartitionKey("t", 0)
TOPIC_ID = uuid.UUID(int=7)
ALL = [on_disk(1), on_disk(2)]
LAST_EPOCH = 4


class Stage:
    """Broker 1's lease key and state in etcd, from an epoch that it has led before."""

    def __init__(self) -> None:
        self.store = EtcdStore(lambda: 0.0)
        self.client = SimulatedEtcdClient(self.store)
        self.lease_id = 0
        self.state = StateValue(LAST_EPOCH, ALL, TOPIC_ID)

    async def begin(self) -> None:
        self.lease_id = (await self.client.lease_grant(10)).lease_id
        await self.client.txn([], [put_op(KEYS.topic("t"), encode_value(TopicValue(TOPIC_ID, [[1, 2]], {})))])
        await self.client.txn([], [put_op(KEYS.lease(*KEY), b"1", self.lease_id)])
        await self.client.txn([], [put_op(KEYS.state(*KEY), encode_value(self.state))])

    async def take_over(
        self, meanwhile: Callable[[], None] | None = None, *, answer_is_lost: bool = False
    ) -> Taken | None:
        """Make an attempt; `meanwhile` happens after it has seen the key, while its next transaction is on its way.

        With `answer_is_lost` etcd applies that transaction, but its answer is lost.
        """
        found = self.store.get(KEYS.topic("t"))
        assert found is not None
        topic = Topic("t", TOPIC_ID, [[1, 2]], {}, found.create_revision, found.mod_revision)
        attempt = TakeOver(self.client, KEYS, 1, KEY, topic).attempt
        next_state = StateValue(LAST_EPOCH + 1, ALL, TOPIC_ID)
        self.client.link = Link.SLOW
        task = asyncio.create_task(attempt(self.lease_id, next_state, 0, known_epoch=LAST_EPOCH))
        await self._let_through()
        await self._let_through(meanwhile, lost=answer_is_lost)
        if answer_is_lost:
            await self._let_through()
        return await task

    async def _let_through(self, before: Callable[[], None] | None = None, *, lost: bool = False) -> None:
        while not self.client.count_pending(applied=False):
            await asyncio.sleep(0)
        if before is not None:
            before()
        (call,) = self.client.pending
        self.client.apply_pending(0)
        if lost:
            call.response = EtcdUnavailable("the answer was lost", maybe_applied=True)
        self.client.answer_pending(0)

    def stored(self) -> StateValue:
        found = self.store.get(KEYS.state(*KEY))
        assert found is not None
        return decode_value(found.value, StateValue)

    def change(self, key: str, value: bytes | None) -> None:
        """Change a key as another broker."""
        operation = delete_op(key) if value is None else put_op(key, value)
        kind = operation.message.WhichOneof("request")
        name = {"request_put": "Put", "request_delete_range": "DeleteRange"}[kind]
        self.store.apply(name, getattr(operation.message, kind))


@pytest.fixture
async def stage() -> Stage:
    stage = Stage()
    await stage.begin()
    return stage


async def test_epoch_begins_under_a_previously_led_key(stage: Stage) -> None:
    taken = await stage.take_over()
    assert taken is not None
    assert taken.state == stage.stored()
    assert stage.stored().leader_epoch == LAST_EPOCH + 1


async def test_lost_answer_to_new_epoch_is_found(stage: Stage) -> None:
    taken = await stage.take_over(answer_is_lost=True)
    found = stage.store.get(KEYS.state(*KEY))
    assert taken is not None
    assert found is not None
    assert (taken.state, taken.value, taken.revision) == (stage.stored(), found.value, found.mod_revision)
    assert stage.stored().leader_epoch == LAST_EPOCH + 1


async def test_isr_that_was_changed_meanwhile_stays(stage: Stage) -> None:
    """A change made before a shrink must not bring back brokers that have left."""
    shrunk = StateValue(LAST_EPOCH, ALL[:1], TOPIC_ID)
    taken = await stage.take_over(lambda: stage.change(KEYS.state(*KEY), encode_value(shrunk)))
    assert taken is None
    assert stage.stored() == shrunk


async def test_no_epoch_is_begun_without_the_key(stage: Stage) -> None:
    taken = await stage.take_over(lambda: stage.change(KEYS.lease(*KEY), None))
    assert taken is None
    assert stage.stored() == stage.state

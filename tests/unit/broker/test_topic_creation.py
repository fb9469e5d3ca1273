"""A topic and the states of its partitions are created together, in any number of transactions."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from kproxy.broker.cluster import ClusterView
from kproxy.broker.config import BrokerConfig
from kproxy.broker.keys import BrokerValue, Keys, ReplicaKey, StateValue, TopicValue, decode_value, encode_value
from kproxy.broker.topics import NewTopic, TopicAdmin, TopicOutcome
from kproxy.etcd import EtcdUnavailable, TxnCompare, TxnOp, TxnResult, put_op
from kproxy_codec import error_codes
from tests.support.models.simulated_etcd import EtcdStore, SimulatedEtcdClient

KEYS = Keys("/p")
# etcd's own limit (--max-txn-ops).
MOST_OPERATIONS = 128
# Needs three transactions that write states and one that begins the creation.
MANY = 250
LOG_IDS = {node_id: uuid.uuid4() for node_id in (1, 2, 3)}


class Site:
    """A simulated etcd with three live brokers. `before_txn` is awaited before each transaction of a creation."""

    def __init__(self) -> None:
        self.store = EtcdStore(lambda: 0.0)
        self.client = SimulatedEtcdClient(self.store)
        self.transactions = 0
        self.before_txn: Callable[[int], Awaitable[None]] | None = None

    async def begin(self) -> None:
        for node_id, log_id in LOG_IDS.items():
            value = encode_value(BrokerValue(node_id, "h", 9, 9, log_id))
            await self.client.txn([], [put_op(KEYS.broker(node_id), value)])

    def admin(self, *, watched: bool = False) -> TopicAdmin:
        """A broker's TopicAdmin. If `watched`, its transactions are counted, and `before_txn` is called before each."""
        client = _Watched(self) if watched else self.client
        return TopicAdmin(client, ClusterView(KEYS), BrokerConfig(1, Path("unused"), ("unused",)))  # type: ignore[arg-type]

    async def create(self, partitions: int, *, watched: bool = False) -> tuple[uuid.UUID, int]:
        """Create the topic; return its planned id, and the error code. Raises EtcdError."""
        admin = self.admin(watched=watched)
        planned = await admin.plan(NewTopic("t", partitions, 3))
        assert not isinstance(planned, TopicOutcome)
        return planned.topic_id, (await admin.create("t", planned)).error_code

    def topic(self) -> TopicValue | None:
        found = self.store.get(KEYS.topic("t"))
        return None if found is None else decode_value(found.value, TopicValue)

    def check_is_whole(self, topic_id: uuid.UUID, partitions: int) -> None:
        """Check that the topic and all its states have that id."""
        topic = self.topic()
        assert topic is not None
        assert (topic.topic_id, len(topic.replicas)) == (topic_id, partitions)
        for index, replicas in enumerate(topic.replicas):
            found = self.store.get(KEYS.state("t", index))
            assert found is not None, index
            state = decode_value(found.value, StateValue)
            isr = [ReplicaKey(each, LOG_IDS[each]) for each in sorted(replicas)]
            assert state == StateValue(-1, isr, topic_id), index


class _Watched:
    def __init__(self, site: Site) -> None:
        self._site = site

    def __getattr__(self, name: str) -> object:
        return getattr(self._site.client, name)

    async def txn(
        self, compares: Sequence[TxnCompare], success: Sequence[TxnOp], failure: Sequence[TxnOp] = ()
    ) -> TxnResult:
        assert max(len(compares), len(success), len(failure)) <= MOST_OPERATIONS
        number, self._site.transactions = self._site.transactions, self._site.transactions + 1
        if self._site.before_txn is not None:
            await self._site.before_txn(number)
        return await self._site.client.txn(compares, success, failure)


@pytest.fixture
async def site() -> Site:
    site = Site()
    await site.begin()
    return site


@pytest.mark.parametrize(("partitions", "transactions"), [(1, 1), (100, 1), (101, 3), (MANY, 4)])
async def test_states_are_created_with_topic(site: Site, partitions: int, transactions: int) -> None:
    topic_id, error_code = await site.create(partitions, watched=True)
    assert (error_code, site.transactions) == (error_codes.NONE, transactions)
    site.check_is_whole(topic_id, partitions)
    assert site.store.get(KEYS.creating("t")) is None


@pytest.mark.parametrize("dies_before", range(4))
async def test_creation_that_dies_leaves_no_topic(site: Site, dies_before: int) -> None:
    async def die(number: int) -> None:
        if number == dies_before:
            raise EtcdUnavailable("the broker dies here")

    site.before_txn = die
    assert (await site.create(MANY, watched=True))[1] == error_codes.REQUEST_TIMED_OUT
    assert site.topic() is None
    topic_id, error_code = await site.create(MANY)
    assert error_code == error_codes.NONE
    site.check_is_whole(topic_id, MANY)


@pytest.mark.parametrize("others", [1, MANY])
@pytest.mark.parametrize("comes_before", range(4))
async def test_competing_creation_is_applied_whole(site: Site, comes_before: int, others: int) -> None:
    made: list[uuid.UUID] = []

    async def create_other(number: int) -> None:
        if number == comes_before:
            other_id, error_code = await site.create(others)
            assert error_code == error_codes.NONE
            made.append(other_id)

    site.before_txn = create_other
    assert (await site.create(MANY, watched=True))[1] == error_codes.TOPIC_ALREADY_EXISTS
    site.check_is_whole(made[0], others)


@pytest.mark.parametrize("comes_before", range(4))
async def test_late_deletion_spares_states_of_next_topic(site: Site, comes_before: int) -> None:
    """The deletion still has pages to delete when the next topic of that name is created."""
    await site.create(MANY)
    deleted = site.admin()
    found = site.store.get(KEYS.topic("t"))
    assert found is not None
    deleted._view.apply_put(KEYS.topic("t"), found.value, lease_id=0, revision=found.mod_revision)
    topic, txn = deleted._view.topics["t"], site.client.txn
    pages: list[tuple[Sequence[TxnCompare], Sequence[TxnOp]]] = []

    async def keep_back(
        compares: Sequence[TxnCompare], success: Sequence[TxnOp], failure: Sequence[TxnOp] = ()
    ) -> TxnResult:
        if pages or site.topic() is None:
            pages.append((compares, success))
            return TxnResult(True, 0, 0, ())
        return await txn(compares, success, failure)

    site.client.txn = keep_back  # type: ignore[method-assign]
    assert (await deleted.delete(topic)).error_code == error_codes.NONE
    site.client.txn = txn  # type: ignore[method-assign]
    assert len(pages) == 5

    async def apply(number: int) -> None:
        if number == comes_before:
            for page in pages:
                await txn(*page)

    site.before_txn = apply
    topic_id, error_code = await site.create(MANY, watched=True)
    assert error_code == error_codes.NONE
    site.check_is_whole(topic_id, MANY)

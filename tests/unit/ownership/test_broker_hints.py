"""Questions to brokers about owners while etcd is silent: which answers count, for how long, and how many are asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kproxy.ownership import broker_hints
from kproxy.ownership.broker_hints import BURST, RATE_PER_S, BrokerHints
from kproxy.ownership.lease_keys import Partition
from kproxy.routing.topology import NO_OWNER, Address, Topology
from kproxy.security.broker_auth import BrokerAuth
from kproxy_codec.error_codes import LEADER_NOT_AVAILABLE
from tests.unit.ownership.test_kafka_metadata import BROKERS, PORT, ScriptedBroker, partition, topic

T0, T1 = Partition(b"t", 0), Partition(b"t", 1)


def yes() -> bool:
    return True


@asynccontextmanager
async def hints_of(*brokers: ScriptedBroker) -> AsyncIterator[tuple[BrokerHints, Topology]]:
    """`t-0` and `t-1` belong to broker 1, which is down; the given brokers have ids from 11 on."""
    topology = Topology()
    topology.set_broker(1, Address(BROKERS[1], PORT))
    async with AsyncExitStack() as stack:
        for number, broker in enumerate(brokers, 11):
            await stack.enter_async_context(broker.serve())
            topology.set_broker(number, Address("127.0.0.1", broker.port))
        for index in (0, 1):
            topology.set_owner(b"t", index, 1, 5)
        yield BrokerHints(topology, BrokerAuth()), topology


def leads(*leaders: int) -> ScriptedBroker:
    """A reference broker that reports these leaders of `t`."""
    broker = ScriptedBroker()
    broker.is_reference = True
    broker.topics = [topic(*(partition(index, leader, 7) for index, leader in enumerate(leaders)))]
    return broker


async def test_hint_names_leader_and_address() -> None:
    broker = leads(2, 2)
    async with hints_of(broker) as (hints, topology):
        assert await hints.ask([T0], yes)
        assert (topology.owner(*T0), topology.owner(*T1)) == (2, 1)
        assert topology.owner_revision(*T0) == 5
        assert topology.address(2) == Address(BROKERS[2], PORT)
        assert topology.address(3) is None
        assert not await hints.ask([T0], yes)
        topology.drop_hints()
        assert (topology.owner(*T0), topology.address(2)) == (1, None)
    assert broker.asked_for == [["t"], ["t"]]


async def test_hint_moves_address_of_known_leader() -> None:
    async with hints_of(leads(1)) as (hints, topology):
        topology.set_broker(1, Address("127.0.0.99", PORT))
        assert await hints.ask([T0], yes)
        assert (topology.owner(*T0), topology.address(1)) == (1, Address(BROKERS[1], PORT))


async def test_brokers_without_leases_are_not_asked() -> None:
    """KafScale's brokers report leaders that are not lease owners."""
    broker = leads(2)
    broker.is_reference = False
    async with hints_of(broker) as (hints, topology):
        assert not await hints.ask([T0], yes)
        assert topology.owner(*T0) == 1
    assert broker.asked == 0


async def test_broker_that_lost_its_lease_is_passed_over() -> None:
    lost = leads()
    lost.topics = [{**topic(), "error_code": LEADER_NOT_AVAILABLE}]
    async with hints_of(lost, leads(2)) as (hints, topology):
        while not lost.asked:
            topology.drop_hints()
            assert await hints.ask([T0], yes)
            assert topology.owner(*T0) == 2


@pytest.mark.parametrize("leader", [NO_OWNER, 99], ids=["none", "unknown"])
async def test_leader_without_address_is_no_hint(leader: int) -> None:
    async with hints_of(leads(leader)) as (hints, topology):
        assert not await hints.ask([T0], yes)
        assert (topology.owner(*T0), topology.is_hinted) == (1, False)


async def test_change_during_a_question_replaces_the_hint() -> None:
    broker = leads(2, 2)
    broker.holds.clear()
    async with hints_of(broker) as (hints, topology):
        asking = asyncio.ensure_future(hints.ask([T0, T1], yes))
        while not broker.asked:
            await asyncio.sleep(0.001)
        topology.set_owner(b"t", 0, 3, 6)
        broker.holds.set()
        assert await asking
        assert (topology.owner(*T0), topology.owner(*T1)) == (3, 2)


async def test_answer_after_etcd_returns_is_no_hint() -> None:
    async with hints_of(leads(2)) as (hints, topology):
        assert not await hints.ask([T0], lambda: False)
        assert not topology.is_hinted


async def test_hanging_broker_leaves_time_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_hints, "TIMEOUT_S", 0.1)
    hung = leads(3)
    hung.holds.clear()
    async with hints_of(hung, leads(2)) as (hints, topology):
        while not hung.asked:
            topology.drop_hints()
            assert await hints.ask([T0], yes)
            assert topology.owner(*T0) == 2


async def test_hanging_brokers_end_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_hints, "ASK_S", 0.1)
    hung = leads(3)
    hung.holds.clear()
    async with hints_of(hung) as (hints, topology):
        assert not await hints.ask([T0], yes)
        assert topology.owner(*T0) == 1


async def test_questions_keep_their_pace() -> None:
    broker = leads(2)
    async with hints_of(broker) as (hints, _):
        began = time.monotonic()
        for _ in range(BURST + 3):
            await hints.ask([T0], yes)
        assert time.monotonic() - began >= 2.5 / RATE_PER_S
    assert broker.asked == BURST + 3

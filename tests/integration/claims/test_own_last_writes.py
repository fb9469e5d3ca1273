"""Brokers without fences: a claim waits for the last writes of a writer that has ended.

The test scripts the brokers, so that it knows their requests and answers; claims go through a real etcd.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec
import pytest
import pytest_asyncio

from kproxy.etcd import EtcdClient
from kproxy.proxy.claims import attach
from kproxy_codec.api_keys import API_VERSIONS, BIND_FENCES, PRODUCE
from kproxy_codec.error_codes import NONE, NOT_LEADER_OR_FOLLOWER, POLICY_VIOLATION, REQUEST_TIMED_OUT
from kproxy_codec.framing import response_header
from kproxy_codec.own import (
    BIND_FENCES_VERSION,
    BoundFence,
    FenceBinding,
    encode_bind_fences_response,
    parse_bind_fences_request,
)
from kproxy_codec.partitioned import with_length
from tests.support.brokers.kafscale import KafScaleBroker
from tests.support.brokers.scripted_upstream import HOST, Asked, DeafListener, ScriptedUpstream
from tests.support.claims.own_client import OwnClient
from tests.support.claims.own_services import own_service
from tests.support.etcd.embedded import running
from tests.support.processes.running_proxy import RunningProxy, running_proxy
from tests.support.processes.served import ServedBroker
from tests.support.waiting import PATIENCE_S, eventually

GROUP = "writers"
# Shorter than any wait for an answer, longer than the claims here take.
OWN_TIMEOUT_S = 0.2
UNSETTLED_S = 1.0
RESOURCE = "t/0"


class Site:
    """Two proxies before one broker."""

    def __init__(self, client: EtcdClient, prefix: str, stack: AsyncExitStack, broker: ScriptedUpstream) -> None:
        self._client = client
        self._prefix = prefix
        self._stack = stack
        self.broker = broker
        self.proxies: list[RunningProxy] = []

    async def start(self) -> None:
        for number in range(2):
            times = {"timeout_s": OWN_TIMEOUT_S, "unsettled_s": UNSETTLED_S}
            own = own_service(self._client, self._prefix, port=19_092 + number, writer_groups={"t": GROUP}, **times)
            await self._stack.enter_async_context(running(own.run()))
            # A dial to a deaf broker lasts until that broker answers.
            limits = {"own_unsettled_s": UNSETTLED_S, "connect_timeout_s": PATIENCE_S}
            proxy = await self._stack.enter_async_context(
                running_proxy(self.broker, own=own, limits=limits, follows_versions=True)
            )
            await self._stack.enter_async_context(attach(own, proxy.context))
            proxy.own(1, "t", (0, 1))
            proxy.own(1, "free", (0,))
            self.proxies.append(proxy)
            await own.wait_ready()

    async def client(self, proxy: int = 0) -> OwnClient:
        client = await OwnClient.connect(HOST, self.proxies[proxy].port)
        self._stack.push_async_callback(client.close)
        return client

    async def owner(self, proxy: int = 0) -> OwnClient:
        client = await self.client(proxy)
        await claim_until_granted(client)
        return client

    async def writes(self, owner: OwnClient, acks: int = -1) -> Asked:
        """Write, and return the request that arrives at the broker, which does not answer it."""
        owner.send_produce("t", 0, b"last", acks)
        return await self.broker.next()

    def have_patience(self, unsettled_s: float = 1_000.0) -> None:
        """Keep later writes unsettled for that time or, by default, until they are answered."""
        for proxy in self.proxies:
            assert proxy.context.own is not None
            proxy.context.own.unsettled.unsettled_s = unsettled_s
            proxy.context.limits = msgspec.structs.replace(proxy.context.limits, own_unsettled_s=unsettled_s)

    def unsettled(self, proxy: int = 0) -> list[tuple[str, int]]:
        own = self.proxies[proxy].context.own
        assert own is not None
        return own.unsettled.places()


async def claim(client: OwnClient, resource: str = RESOURCE, generation: int = 1) -> int:
    (owned,) = (await client.own(GROUP, [(resource, generation)])).resources
    return owned.error_code


async def claim_until_granted(client: OwnClient, resource: str = RESOURCE) -> None:
    """Claim until granted: the earlier writes settle soon."""
    async with asyncio.timeout(PATIENCE_S):
        while (code := await claim(client, resource)) != NONE:
            assert code == REQUEST_TIMED_OUT


@pytest_asyncio.fixture
async def site(request: pytest.FixtureRequest, etcd_client: EtcdClient, etcd_prefix: str) -> AsyncIterator[Site]:
    kind_of_broker = getattr(request, "param", ServedBroker)
    async with AsyncExitStack() as stack:
        site = Site(etcd_client, etcd_prefix, stack, kind_of_broker(1))
        await site.start()
        yield site


async def closes(owner: OwnClient) -> None:
    await owner.close()


async def resets(owner: OwnClient) -> None:
    owner.abort()


async def stays(owner: OwnClient) -> None:
    """Check that the claim severs it."""


@pytest.mark.parametrize(
    ("site", "successor_at"),
    [
        pytest.param(ServedBroker, 0, id="same proxy", marks=pytest.mark.long),
        pytest.param(ServedBroker, 1, id="another proxy"),
        pytest.param(KafScaleBroker, 1, id="KafScale's broker"),
    ],
    indirect=["site"],
)
@pytest.mark.parametrize(("acks", "ends"), [(-1, stays), (1, closes), (0, closes), (0, stays), (-1, resets)])
async def test_claim_waits_for_answers_to_earlier_writes(
    site: Site, acks: int, ends: Callable[[OwnClient], Awaitable[None]], successor_at: int
) -> None:
    site.have_patience()
    owner, successor = await site.owner(), await site.client(successor_at)
    asked = await site.writes(owner, acks)
    assert asked.fields["acks"] == (acks or 1)
    await ends(owner)
    assert await claim(successor) == REQUEST_TIMED_OUT
    assert await owner.wait_closed(PATIENCE_S)
    assert await claim(successor) == REQUEST_TIMED_OUT
    assert asked.connection.is_open
    asked.answer()
    await claim_until_granted(successor)
    assert site.unsettled() == []
    assert await site.broker.is_silent()
    await asked.connection.until_closed()
    assert site.proxies[0].counters["acks0.undeliverable"] == 0


@pytest.mark.parametrize(("acks", "successor_at"), [(-1, 0), (0, 1)])
async def test_write_lost_with_its_connection_is_awaited(site: Site, acks: int, successor_at: int) -> None:
    """The owner continues: the same batch, resent and answered, does not settle its first copy."""
    owner, successor = await site.owner(), await site.client(successor_at)
    asked = await site.writes(owner, acks)
    began = asyncio.get_running_loop().time()
    asked.connection.abort()
    await eventually(lambda: site.unsettled() == [("t", 0)])
    if acks != 0:
        owner.send_produce("t", 0, b"again", acks)
        (await site.broker.next()).answer()
    await claim_until_granted(successor)
    assert asyncio.get_running_loop().time() - began >= 0.95 * UNSETTLED_S


async def test_write_lost_after_its_writer_left_is_awaited(site: Site) -> None:
    site.have_patience()
    owner, successor = await site.owner(), await site.client(1)
    asked = await site.writes(owner)
    assert await claim(successor) == REQUEST_TIMED_OUT
    site.have_patience(UNSETTLED_S)
    began = asyncio.get_running_loop().time()
    asked.connection.abort()
    await claim_until_granted(successor)
    assert asyncio.get_running_loop().time() - began >= 0.95 * UNSETTLED_S


async def test_idle_claimant_keeps_its_connection(site: Site) -> None:
    owner, idle = await site.owner(), await site.client()
    context = site.proxies[0].context
    context.limits = msgspec.structs.replace(context.limits, idle_s=0.3)
    await eventually(lambda: context.counters["clients.idle"] == 1)
    await asyncio.sleep(0.3)
    assert await claim(owner, "t/1") == NONE
    await idle.close()


async def test_unanswered_write_is_awaited_until_timeout(site: Site) -> None:
    owner, successor = await site.owner(), await site.client(1)
    asked = await site.writes(owner)
    began = asyncio.get_running_loop().time()
    await owner.close()
    await claim_until_granted(successor)
    assert asyncio.get_running_loop().time() - began >= 0.95 * UNSETTLED_S
    await asked.connection.until_closed()


@pytest.mark.parametrize(("acks", "ends"), [(-1, stays), (0, closes)])
async def test_unwritten_request_is_never_sent(
    site: Site, acks: int, ends: Callable[[OwnClient], Awaitable[None]]
) -> None:
    owner, successor = await site.owner(), await site.client(1)
    site.have_patience()
    with DeafListener() as deaf:
        later = ServedBroker(2)
        for proxy in site.proxies:
            proxy.topology.set_broker(2, deaf.address)
            proxy.own(2, "t", (0,))
        owner.send_produce("t", 0, b"late", acks)
        await eventually(lambda: site.proxies[0].context.budget.held > 0)
        await ends(owner)
        await claim_until_granted(successor)
        assert site.unsettled() == []
        await deaf.open(later)
        assert await later.is_silent(1.5)
        await later.stop()
    assert site.proxies[0].counters["acks0.undeliverable"] == (acks == 0)


@pytest.mark.parametrize("acks", [-1, 0])
async def test_uncertain_lease_stops_waiting_retries(site: Site, acks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped finds its timers due before it learns that its lease has ended."""
    owner = await site.owner()
    asked = await site.writes(owner, acks)
    asked.answer(results={("t", 0): NOT_LEADER_OR_FOLLOWER})
    (await site.broker.next()).answer(results={("t", 0): NOT_LEADER_OR_FOLLOWER})
    await eventually(lambda: site.proxies[0].retries(6) == 2)
    monkeypatch.setattr(site.proxies[0].context.own, "is_live", lambda: False)
    assert await owner.wait_closed(PATIENCE_S)
    assert await site.broker.is_silent(0.3)


@pytest.mark.parametrize("acks", [-1, 0])
async def test_uncertain_lease_stops_requests_waiting_for_dial(
    site: Site, acks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await site.owner()
    with DeafListener() as deaf:
        later = ServedBroker(2)
        site.proxies[0].topology.set_broker(2, deaf.address)
        site.proxies[0].own(2, "t", (0,))
        owner.send_produce("t", 0, b"late", acks)
        await eventually(lambda: site.proxies[0].context.budget.held > 0)
        monkeypatch.setattr(site.proxies[0].context.own, "is_live", lambda: False)
        await deaf.open(later)
        assert await owner.wait_closed(PATIENCE_S)
        assert await later.is_silent()
        await later.stop()


async def test_other_partitions_and_topics_are_not_awaited(site: Site) -> None:
    site.have_patience()
    owner, successor = await site.owner(), await site.client()
    free = await site.client()
    await site.writes(owner)
    free.send_produce("free", 0, b"unanswered")
    await site.broker.next()
    await owner.close()
    await free.close()
    await claim_until_granted(successor, "t/1")
    assert site.unsettled() == [("t", 0)]


class FencingBroker(ServedBroker):
    """A broker that accepts every binding."""

    def take(self, asked: Asked) -> None:
        if asked.header.api_key == BIND_FENCES:
            bound = [BoundFence(each.topic, each.partition_index, NONE, each.fence) for each in bindings(asked)]
            head = response_header(BIND_FENCES, BIND_FENCES_VERSION, asked.header.correlation_id)
            asked.connection.write(b"".join(with_length([head, encode_bind_fences_response(bound)])))
        elif asked.header.api_key == API_VERSIONS:
            asked.answer_message(
                api_keys=[
                    {"api_key": PRODUCE, "min_version": 0, "max_version": 9},
                    {"api_key": BIND_FENCES, "min_version": 0, "max_version": 0},
                ]
            )
        else:
            super().take(asked)


def bindings(asked: Asked) -> tuple[FenceBinding, ...]:
    return parse_bind_fences_request(asked.frame, asked.header)


@pytest.mark.parametrize("site", [FencingBroker], indirect=True)
@pytest.mark.parametrize("ends", [stays, closes])
async def test_claim_at_fencing_brokers_does_not_wait(site: Site, ends: Callable[[OwnClient], Awaitable[None]]) -> None:
    site.have_patience()
    owner, successor = await site.owner(), await site.client(1)
    asked = await site.writes(owner)
    await ends(owner)
    await claim_until_granted(successor)
    await asked.connection.until_closed()
    # A proxy that does not know the fences yet would wait.
    assert site.unsettled() == [("t", 0)]


async def test_group_claim_waits_for_each_partition(site: Site) -> None:
    site.have_patience()
    owner, successor = await site.owner(), await site.client(1)
    asked = await site.writes(owner)
    await owner.close()
    (owned,) = (await successor.own(GROUP, None)).resources
    assert owned.error_code == REQUEST_TIMED_OUT
    asked.answer()
    async with asyncio.timeout(PATIENCE_S):
        while (await successor.own(GROUP, None)).resources[0].error_code != NONE:
            pass


async def test_acks_0_is_confirmed_only_with_writer_groups(site: Site) -> None:
    client = await site.client()
    client.send_produce("free", 0, b"free", 0)
    assert (await site.broker.next()).fields["acks"] == 0


async def test_parts_beside_refused_acks_0_are_awaited(site: Site) -> None:
    """A request for two partitions, of which it owns one: the connection ends over the other, in the same step."""
    site.have_patience()
    owner, successor = await site.owner(), await site.client(1)
    (await site.writes(owner, 0)).answer()
    owner.send_produce_many({("t", 0): b"owned", ("t", 1): b"not"}, 0)
    asked = await site.broker.next()
    assert asked.partitions == [("t", 0)]
    assert await owner.wait_closed(PATIENCE_S)
    assert site.proxies[0].context.tally.drops[b"t"] == {POLICY_VIOLATION: 1}
    assert await claim(successor) == REQUEST_TIMED_OUT
    asked.answer()
    await claim_until_granted(successor)


async def test_stopping_proxy_reports_unsettled_writes(site: Site) -> None:
    owner, successor = await site.owner(), await site.client(1)
    site.have_patience()
    await site.writes(owner)
    assert await claim(successor) == REQUEST_TIMED_OUT
    async with asyncio.timeout(PATIENCE_S):
        await site.proxies[0].listener.stop()
    assert site.unsettled() == [("t", 0)]
    assert await claim(successor) == REQUEST_TIMED_OUT


@pytest.mark.parametrize("has_it", [False, True], ids=["it claims it", "it raises its generation"])
async def test_read_during_its_readers_claim_is_handed_over(site: Site, has_it: bool) -> None:
    reader, own = await site.client(1), site.proxies[1].context.own
    assert own is not None
    own.timeout_s = PATIENCE_S
    generation = 2 if has_it else 1
    assert (await reader.own(GROUP, [(RESOURCE, 1)] if has_it else [])).error_code == NONE
    fetched = reader.send_fetch("t", 0, 0)
    read = await site.broker.next()
    site.have_patience()
    last_write = own.unsettled.begin("t", 0)
    claimed = reader.send_own(GROUP, [(RESOURCE, generation)])

    def is_claimed() -> bool:
        row = own.table.owner(GROUP, RESOURCE)
        return row is not None and row.generation == generation

    await eventually(is_claimed, what="it is claimed")
    read.answer()
    assert not await reader.wait_closed(0.2)
    assert not fetched.done()
    own.unsettled.done(last_write)
    assert (await fetched).error_code == NONE
    assert (await claimed).resources[0].error_code == NONE

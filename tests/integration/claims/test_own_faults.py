"""Faults of a proxy that holds its clients' claims: others can claim in time, and former owners cannot write."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from kproxy.claims.keys import decode_claim
from kproxy_codec.error_codes import COORDINATOR_NOT_AVAILABLE, NONE, POLICY_VIOLATION
from kproxy_codec.own import OwnedResource
from tests.support.claims.own_cases import Place, Pool, writers_of
from tests.support.claims.own_client import OwnClient
from tests.support.claims.own_proxies import OwnSite, on_site
from tests.support.claims.owned_topics import RelayThread
from tests.support.etcd.embedded import Relay
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.worker_processes import worker_pids
from tests.support.waiting import PATIENCE_S

# Workers are restarted after a second.
RESTART_S = PATIENCE_S
SLOW_S = 0.1
LOST_ANSWERS = 5


class Victim:
    """A proxy with two workers that reaches etcd through a relay."""

    def __init__(self, process: KproxyProcess, relay: Relay, thread: RelayThread) -> None:
        self.process, self.relay, self.thread = process, relay, thread

    @property
    def worker(self) -> int:
        """The worker process that holds the claims."""
        return worker_pids(self.process)[1]

    def signal(self, number: int) -> None:
        os.kill(self.worker, number)

    def delay(self, seconds: float) -> None:
        def set_delay() -> None:
            self.relay.delay_s = seconds

        self.thread.call(set_delay)

    async def connect(self) -> OwnClient:
        """Connect to its first worker, which may be restarting."""
        async with asyncio.timeout(RESTART_S):
            while 1 not in worker_pids(self.process):
                await asyncio.sleep(0.05)
        pool = Pool([self.process])
        client = await pool.connect(Place(0, 1))
        await pool.close()
        return client


@pytest.fixture(scope="module")
def victim(own_site: OwnSite) -> Iterator[Victim]:
    relay = Relay(own_site.etcd_endpoint)
    with RelayThread() as thread:
        thread.run(relay.open())
        with own_site.proxy("--workers", "2", etcd=relay.endpoint) as process:
            yield Victim(process, relay, thread)
        thread.run(relay.shut())


class Fault(NamedTuple):
    """A fault of the victim, from its client's claim until another client's claim."""

    what: str
    begin: Callable[[Victim], None]
    end: Callable[[Victim], None]


FAULTS = [
    Fault("nothing", lambda victim: None, lambda victim: None),
    Fault("kill -9", lambda victim: victim.signal(signal.SIGKILL), lambda victim: None),
    Fault(
        "stopped for longer than its lease",
        lambda victim: victim.signal(signal.SIGSTOP),
        lambda victim: victim.signal(signal.SIGCONT),
    ),
    Fault(
        "etcd out of reach",
        lambda victim: victim.thread.call(victim.relay.blackhole),
        lambda victim: victim.thread.run(victim.relay.restore()),
    ),
    Fault("etcd far away", lambda victim: victim.delay(SLOW_S), lambda victim: victim.delay(0)),
    Fault("its connections to etcd cut", lambda victim: victim.thread.run(victim.relay.cut()), lambda victim: None),
]
# `make test` has these.
ALWAYS = ("kill -9", "stopped for longer than its lease", "etcd out of reach")


async def _writes_on(client: OwnClient, topic: str, acknowledged: int) -> int:
    """Write until refused. Return the number of acknowledged records, including earlier ones."""
    try:
        while (await client.produce(topic, 0, b"A %d" % acknowledged)).error_code == NONE:
            acknowledged += 1
    except (ConnectionError, TimeoutError):
        pass
    return acknowledged


async def _claims(client: OwnClient, topic: str, generation: int = 1) -> int:
    """Request the claim until it is granted. Return the fence."""
    while True:
        (found,) = (await client.own(writers_of(topic), [(f"{topic}/0", generation)])).resources
        if found.error_code == NONE:
            return found.fence
        assert found.error_code == COORDINATOR_NOT_AVAILABLE, found


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, id=each.what, marks=() if each.what in ALWAYS else pytest.mark.long) for each in FAULTS],
)
@on_site
async def test_client_claims_resources_of_a_troubled_proxy(own_site: OwnSite, victim: Victim, fault: Fault) -> None:
    topic = own_site.topic(f"fault: {fault.what}")

    owner, successor = await victim.connect(), await own_site.pool.connect(Place(0, 1))
    first = await _claims(owner, topic)
    assert (await owner.produce(topic, 0, b"A 0")).error_code == NONE
    writing = asyncio.create_task(_writes_on(owner, topic, 1))
    await asyncio.sleep(0.1)
    fault.begin(victim)
    second = await _claims(successor, topic)
    assert second > first
    assert (await successor.produce(topic, 0, b"B 0")).error_code == NONE
    fault.end(victim)
    assert await owner.wait_closed(PATIENCE_S), "it has lost its claim, and is served"
    acknowledged = await asyncio.wait_for(writing, PATIENCE_S)
    assert (await successor.produce(topic, 0, b"B 1")).error_code == NONE
    # The victim recovers, and serves again.
    owner = await victim.connect()
    assert await _claims(owner, topic) > second
    assert await successor.wait_closed(PATIENCE_S)
    assert (await owner.produce(topic, 0, b"C 0")).error_code == NONE
    written = [each.value.decode() for each in (await owner.fetch(topic, 0, 0)).records]
    of_owner = written[: written.index("B 0")]
    assert of_owner[:acknowledged] == [f"A {number}" for number in range(acknowledged)]
    # The last record may be in the log without an answer.
    assert len(of_owner) <= acknowledged + 1
    assert written[len(of_owner) :] == ["B 0", "B 1", "C 0"]
    await owner.close()


@on_site
async def test_stopped_readers_proxy_hands_over_nothing(own_site: OwnSite, victim: Victim) -> None:
    """Brokers do not guard reads: the proxy itself must notice that its lease is over, whatever it does first."""
    topic = own_site.topic("stopped reader")

    async def reads(client: OwnClient) -> int:
        (found,) = (await client.own("readers", [(f"{topic}/0", 1)])).resources
        assert found.error_code == NONE
        return (await client.fetch(topic, 0, 0)).error_code

    reader, successor = await victim.connect(), await own_site.pool.connect(Place(0, 1))
    writer = await own_site.pool.connect(Place(1, 1))
    await _claims(writer, topic)
    assert (await writer.produce(topic, 0, b"for one reader alone")).error_code == NONE
    assert await reads(reader) == NONE
    victim.signal(signal.SIGSTOP)
    asked = [reader.send_fetch(topic, 0, 0) for _ in range(20)]
    assert await reads(successor) == NONE
    victim.signal(signal.SIGCONT)
    for each in asked:
        try:
            assert (await each).error_code == POLICY_VIOLATION
        except ConnectionError:
            break
    assert await reader.wait_closed(PATIENCE_S)
    assert await reads(successor) == NONE
    await successor.close()
    await writer.close()


@on_site
async def test_new_reader_waits_until_old_reader_is_severed(own_site: OwnSite, victim: Victim) -> None:
    topic = own_site.topic("slow to sever")

    async def reads_on(client: OwnClient) -> float:
        """Fetch until it is refused. Return the time at which the last permitted fetch began."""
        latest = 0.0
        try:
            while True:
                began_at = time.monotonic()
                if (await client.fetch(topic, 0, 0)).error_code != NONE:
                    return latest
                latest = began_at
        except ConnectionError:
            return latest

    reader, successor = await victim.connect(), await own_site.pool.connect(Place(0, 1))
    await reader.own("readers", [(f"{topic}/0", 1)])
    victim.delay(SLOW_S)
    reading = asyncio.create_task(reads_on(reader))
    await asyncio.sleep(SLOW_S)
    (found,) = (await successor.own("readers", [(f"{topic}/0", 1)])).resources
    granted_at = time.monotonic()
    assert found.error_code == NONE
    assert 0 < await asyncio.wait_for(reading, PATIENCE_S) < granted_at
    victim.delay(0)
    await successor.close()


@on_site
async def test_claim_interrupted_by_etcd_outage_is_made_later(own_site: OwnSite, victim: Victim) -> None:
    topic = own_site.topic("etcd goes")

    client = await victim.connect()
    await client.own(writers_of(topic), [])
    victim.thread.call(victim.relay.blackhole)
    claiming = asyncio.create_task(_claims(client, topic))
    await asyncio.sleep(0.2)
    victim.thread.run(victim.relay.restore())
    fence = await asyncio.wait_for(claiming, PATIENCE_S)
    assert (await client.produce(topic, 0, b"A")).error_code == NONE
    other = await own_site.pool.connect(Place(1, 1))
    assert await _claims(other, topic) > fence
    assert await client.wait_closed(PATIENCE_S)
    await other.close()


@on_site
async def test_claim_with_lost_etcd_answer_keeps_its_fence(own_site: OwnSite, victim: Victim) -> None:
    """Repeatedly: etcd stores the claim, the proxy gets no answer, and the client requests it again."""
    topic = own_site.topic("lost answers")
    key = own_site.keys.claim(writers_of(topic), f"{topic}/0")

    async def revision_of(generation: int) -> int:
        """Wait for the claim with this generation. Return its fence."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await own_site.etcd.get(key)
                if found is not None and decode_claim(found.value).generation == generation:
                    return found.mod_revision
                await asyncio.sleep(0.005)

    client = await victim.connect()
    await _claims(client, topic)
    unheard = 0
    for generation in range(2, 2 + LOST_ANSWERS):
        victim.thread.call(victim.relay.deafen)
        answer = client.send_own(writers_of(topic), [(f"{topic}/0", generation)])
        claimed_at = await revision_of(generation)
        victim.thread.run(victim.relay.cut())
        (found,) = (await answer).resources
        if found.error_code != NONE:
            unheard += found.error_code == COORDINATOR_NOT_AVAILABLE
            (found,) = (await client.own(writers_of(topic), [(f"{topic}/0", generation)])).resources
        assert found == OwnedResource(f"{topic}/0", NONE, generation, claimed_at)
        assert (await client.produce(topic, 0, b"A")).error_code == NONE
    assert unheard, "every answer was heard, which shows nothing"
    await client.close()

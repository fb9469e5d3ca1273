"""Acknowledged records under faults, with three real brokers, a real etcd and a real proxy."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import pytest
import pytest_asyncio

from kproxy.broker.election import START_GRACE_S
from kproxy.etcd import EtcdError
from kproxy_codec import error_codes
from tests.support.brokers.faulty_site import FaultySite, faulty_site
from tests.support.clients.attempts import Attempt, Writer, judge
from tests.support.clients.idempotent_writers import IdempotentWriter
from tests.support.etcd.etcd_cluster import EtcdCluster
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.processes.served import port_of
from tests.support.waiting import PATIENCE_S, eventually

TTL_S = 2
LAG_S = 1.0
IDS = (1, 2, 3)
# Other outcomes of a write with acks=all: a timeout, or too few in-sync replicas before or after the append.
NO_ACK = {error_codes.REQUEST_TIMED_OUT, error_codes.NOT_ENOUGH_REPLICAS, error_codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND}

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Trio(NamedTuple):
    """Brokers 1, 2 and 3 and a proxy in front of them."""

    site: FaultySite
    proxy: KproxyProcess

    async def topic(self, name: str, *, first: int = 1, partitions: int = 1) -> str:
        """A topic led by `first`, with all replicas in sync."""
        replicas = [first, *(node_id for node_id in IDS if node_id != first)]
        await self.site.put_topic(name, [replicas] * partitions)
        for partition in range(partitions):
            await self.site.led_by(name, partition, [first])
            await self.site.in_sync(name, partition, IDS)
        return name

    def direct(self, topic: str, *, acks: int = -1) -> Writer:
        return Writer(topic, self.site.addresses, acks=acks, name=f"direct{acks}")

    def proxied(self, topic: str) -> Writer:
        return Writer(topic, lambda: [("127.0.0.1", port_of(self.proxy))], name="proxied")

    async def recovered(self, topic: str, *writers: Writer) -> None:
        """Wait until all brokers have the same log again, which matches the writers' accounts."""
        await self.site.in_sync(topic, 0, IDS)
        log = await self.site.same_logs(topic, 0, IDS)
        for writer in writers:
            judge(log, writer.attempts, may_lose=writer.acks == 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(etcd_cluster: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trio]:
    directory, prefix = tmp_path_factory.mktemp("trio"), "/trio"
    async with faulty_site(etcd_cluster, prefix, directory) as site:
        await site.add(IDS, lease_ttl_s=TTL_S, isr_lag_s=LAG_S)
        arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--prefix", prefix]
        arguments += ["--etcd", ",".join(etcd_cluster.endpoints)]
        with serving(arguments, directory / "proxy") as proxy:
            yield Trio(site, proxy)


@pytest_asyncio.fixture(loop_scope="module")
async def trio(started: Trio) -> Trio:
    await started.site.heal()
    return started


async def acked_since(writer: Writer, since: float) -> Attempt:
    return await asyncio.to_thread(writer.next_ack, since, PATIENCE_S)


# Owners that die or leave


async def test_dead_or_released_partition_is_soon_written_again(
    trio: Trio, record_property: Callable[[str, object], None]
) -> None:
    topic, idle = await trio.topic("in-time"), await trio.topic("never-written")
    async with trio.direct(topic) as direct, trio.proxied(topic) as proxied:
        # The target is the lease's time plus 2.5 s; `pytest -s` prints the value on this machine.
        for how in ("kill -9", "SIGTERM"):
            await asyncio.gather(*(acked_since(writer, time.monotonic()) for writer in (direct, proxied)))
            owner = trio.site.brokers[await trio.site.led_by(topic, 0, IDS)]
            began = time.monotonic()
            if how == "SIGTERM":
                owner.signal(signal.SIGTERM)
            else:
                await owner.down()
            for each in (topic, idle):
                await trio.site.led_by(each, 0, set(IDS) - {owner.node_id})
            led_at = time.monotonic()
            await asyncio.gather(*(acked_since(writer, led_at + 0.2) for writer in (direct, proxied)))
            for writer in (direct, proxied):
                pause_s = writer.longest_pause_s(began)
                record_property(f"{how}, {writer.name}: longest pause, s", round(pause_s, 3))
                print(f"{how}, {writer.name}: longest pause {pause_s:.3f} s, a new leader after {led_at - began:.3f} s")
                assert pause_s < PATIENCE_S
            if how == "SIGTERM":
                await asyncio.to_thread(owner.process.wait, PATIENCE_S)
            await trio.site.heal()
            await trio.site.in_sync(topic, 0, IDS)
    await trio.recovered(topic, direct, proxied)


async def test_owner_returning_after_another_reuses_no_offset(trio: Trio) -> None:
    """It never stops: its state in memory is older than the other's writes."""
    topic = await trio.topic("a-b-a")
    owners = [1]
    async with trio.direct(topic) as writer:
        while not any(owner == 1 for owner in owners[2:]) or len(owners) < 5:
            owners.append(await _taken_from(trio, topic, owners[-1]))
            await acked_since(writer, time.monotonic())
            await trio.site.in_sync(topic, 0, IDS)
            assert len(owners) < 20, f"it does not come back: {owners}"
    await trio.recovered(topic, writer)
    state = await trio.site.state(topic)
    assert state is not None
    assert state.leader_epoch >= len(owners) - 1


async def _taken_from(trio: Trio, topic: str, owner: int) -> int:
    """End the owner's lease until another broker has the partition; return it. The owner may be the fastest itself."""
    for _ in range(20):
        lease = await trio.site.client.get(trio.site.keys.lease(topic, 0))
        assert lease is not None
        await trio.site.client.lease_revoke(lease.lease_id)

        async def is_taken(before: int = lease.lease_id) -> int | None:
            found = await trio.site.client.get(trio.site.keys.lease(topic, 0))
            return int(found.value) if found is not None and found.lease_id != before else None

        now: int = await eventually(is_taken, what=f"{topic}-0 is led", ignored=(EtcdError,))
        if now != owner:
            return now
    raise AssertionError(f"broker {owner} takes it again each time")


# Cut off


async def test_leader_without_followers_acknowledges_nothing_they_lack(trio: Trio) -> None:
    for attempt in range(5):
        if await _is_cut_off_from_its_followers(trio, f"lonely-{attempt}"):
            return
    raise AssertionError("the leadership moved each time")


async def _is_cut_off_from_its_followers(trio: Trio, name: str) -> bool:
    """False if the leadership moved: a stall of the machine may end its lease."""
    topic = await trio.topic(name)
    leader = trio.site.brokers[1]
    async with trio.direct(topic) as writer, trio.direct(topic, acks=1) as hasty:
        await acked_since(writer, 0.0)
        leader.replication_way.blackhole()
        cut_at = time.monotonic()

        async def stays() -> bool:
            state = await trio.site.state(topic)
            return state is not None and state.leader_epoch == 0

        async def is_alone() -> bool:
            state = await trio.site.state(topic)
            return state is not None and {each.node_id for each in state.isr} == {1}

        def codes() -> set[int | None]:
            return {each.error_code for each in list(writer.attempts) if each.sent_at > cut_at}

        async def is_refused() -> bool:
            return error_codes.NOT_ENOUGH_REPLICAS in codes() and await is_alone()

        async def is_over() -> bool:
            return await is_refused() or not await stays()

        await eventually(is_over, "the writer is refused", ignored=(EtcdError,))
        await asyncio.sleep(0.5)
        acked = [each for each in writer.acked if each.sent_at > cut_at]
        told = codes() - {None}
        hasty_acked = await acked_since(hasty, time.monotonic())
        stayed = await stays()
        if stayed:
            assert not acked
            assert told <= {*NO_ACK, error_codes.NOT_LEADER_OR_FOLLOWER}, "6 is what the others say"
            assert hasty_acked.offset > 0, "acks=1 asks nobody"
        await leader.heal()
        await acked_since(writer, time.monotonic())
    await trio.recovered(topic, writer, hasty)
    return stayed


@pytest.mark.parametrize("how", [pytest.param("refused", marks=pytest.mark.long), "silent"])
async def test_leader_cut_off_from_etcd_is_replaced(trio: Trio, how: str) -> None:
    """Clients and followers still reach it, and one stubborn client contacts no other broker."""
    topic = await trio.topic(f"cut-off-{how}")
    old = trio.site.brokers[1]
    stubborn = [Writer(topic, lambda: [old.client_address], acks=acks, name=f"stubborn{acks}") for acks in (0, 1, -1)]
    async with trio.direct(topic) as writer, stubborn[0], stubborn[1], stubborn[2]:
        await acked_since(writer, 0.0)
        await old.cut_off_from_etcd(how)
        await trio.site.led_by(topic, 0, [2, 3])
        led_at = time.monotonic()
        new = await acked_since(writer, led_at)
        await asyncio.sleep(0.5)
        late = [each for each in stubborn[1].acked + stubborn[2].acked if each.sent_at > led_at]
        assert not late, f"acknowledged by the old leader after {new}: {late}"
        await old.heal()
    await trio.recovered(topic, writer, *stubborn)


# Brokers that die and return


async def test_three_killed_brokers_lose_no_acknowledged_record(trio: Trio) -> None:
    topic = await trio.topic("blackout")
    async with trio.direct(topic) as writer:
        await acked_since(writer, time.monotonic() + 0.3)
        for broker in trio.site.brokers.values():
            broker.signal(signal.SIGKILL)
        await asyncio.gather(*(broker.down() for broker in trio.site.brokers.values()))
        await trio.site.heal()
        await acked_since(writer, time.monotonic())
    await trio.recovered(topic, writer)


async def test_broker_with_wiped_disk_catches_up(trio: Trio) -> None:
    topic = await trio.topic("wiped", first=2)
    wiped = trio.site.brokers[3]
    async with trio.direct(topic) as writer:
        await acked_since(writer, time.monotonic() + 0.3)
        await wiped.down()
        shutil.rmtree(wiped.data_dir)
        await wiped.up()
        await trio.site.in_sync(topic, 0, IDS)
    assert writer.acked[0].offset == 0
    await trio.recovered(topic, writer)
    # It counts as a full replica again.
    await asyncio.gather(*(trio.site.brokers[node_id].down() for node_id in (1, 2)))
    await trio.site.led_by(topic, 0, [3])
    await trio.site.heal()
    await trio.recovered(topic, writer)


async def test_broker_with_lost_disk_does_not_lead(trio: Trio) -> None:
    """It is still in sync according to etcd. It returns first, dies, and returns once more before the others do."""
    topic = await trio.topic("wiped-first")
    lost = trio.site.brokers[2]
    async with trio.direct(topic) as writer:
        await acked_since(writer, time.monotonic() + 0.3)
    await asyncio.gather(*(broker.down() for broker in trio.site.brokers.values()))
    shutil.rmtree(lost.data_dir)
    await lost.up()
    await lost.down()
    await lost.up()
    await asyncio.sleep(START_GRACE_S + 0.5)
    assert await trio.site.owner(topic) is None, "it leads"
    await trio.site.heal()
    await trio.recovered(topic, writer)


@pytest.mark.long
async def test_serial_broker_kills_keep_records_complete_and_ordered(trio: Trio) -> None:
    """Idempotent producers with several requests in flight, one through the proxy and one directly."""
    topics = [await trio.topic("rolling-proxied", partitions=3), await trio.topic("rolling-direct", partitions=3)]
    ways = [trio.proxy.kafka, trio.site.bootstrap]
    writers = [IdempotentWriter(bootstrap, topic, 3) for bootstrap, topic in zip(ways, topics, strict=True)]
    async with writers[0], writers[1]:
        for node_id in IDS:
            for writer in writers:
                await asyncio.to_thread(writer.wait_for_more, 200)
            await trio.site.brokers[node_id].down()
            await asyncio.sleep(0.5)
            await trio.site.brokers[node_id].up()
            for topic in topics:
                for partition in range(3):
                    await trio.site.in_sync(topic, partition, IDS)
    for writer, topic in zip(writers, topics, strict=True):
        for partition in range(3):
            log = await trio.site.same_log_bytes(topic, partition, IDS)
            writer.judge(partition, log, may_repeat=writer is writers[1])

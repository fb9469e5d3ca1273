"""A broker cut off from etcd but not from clients: it accepts and serves nothing once its lease has ended."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

from kproxy_codec import error_codes
from kproxy_codec.api_keys import FIND_COORDINATOR, METADATA
from tests.support.brokers.faulty_site import FaultyBroker, FaultySite, faulty_site
from tests.support.brokers.reference_broker import fetch
from tests.support.clients.attempts import Writer, judge, stored
from tests.support.etcd.etcd_cluster import EtcdCluster, running_cluster
from tests.support.waiting import PATIENCE_S, eventually

TTL_S = 2
ALL_ACKS = (0, 1, -1)
NOT_LEADER = error_codes.NOT_LEADER_OR_FOLLOWER


# With one replica, which no other broker can replace. A leader with followers: test_replication_faults.


async def test_broker_without_etcd_majority_takes_nothing_after_lease(etcd_prefix: str, tmp_path: Path) -> None:
    async with running_cluster(tmp_path / "etcd") as etcd, faulty_site(etcd, etcd_prefix, tmp_path) as site:
        await site.add([1], etcd_members=[0], has_followers=False, lease_ttl_s=TTL_S)
        await site.put_topic("t1", [[1]] * 3)
        async with AsyncExitStack() as stack:
            writers = await _start_writers(site, stack)
            for member in etcd.members[1:]:
                await member.freeze()
            # An isolated etcd leader considers itself the leader for some time.
            await eventually(lambda: not etcd.members[0].leads(), "the member that is left steps down")
            cut_at = time.monotonic()
            await asyncio.sleep(TTL_S + 0.5)
            await asyncio.to_thread(_serves_nothing, site.brokers[1])
            for member in etcd.members[1:]:
                member.thaw()
            healed_at = time.monotonic()
            await _wait_for_acks(writers, healed_at)
        _judge_cut(site, writers, cut_at + TTL_S, healed_at)


async def test_reads_without_etcd_wait_for_no_new_topic(
    etcd_cluster: EtcdCluster, etcd_prefix: str, tmp_path: Path
) -> None:
    """A client asks for its coordinator and names a topic that is new: both would be created in etcd."""
    async with faulty_site(etcd_cluster, etcd_prefix, tmp_path) as site:
        await site.add([1], has_followers=False, lease_ttl_s=12)
        await site.put_topic("t1", [[1]])
        await site.led_by("t1", 0, [1])
        await site.brokers[1].cut_off_from_etcd("silent")
        told = await asyncio.to_thread(_asks_for_what_is_new, site.brokers[1])
    assert told == (error_codes.COORDINATOR_NOT_AVAILABLE, error_codes.UNKNOWN_TOPIC_OR_PARTITION, error_codes.NONE)


def _asks_for_what_is_new(broker: FaultyBroker) -> tuple[int, int, int]:
    with broker.client() as client:
        coordinator = client.request(FIND_COORDINATOR, 1, key="group", key_type=0)
        (topic,) = client.request(METADATA, 4, topics=[{"name": "new"}], allow_auto_topic_creation=True).topics
        return coordinator.error_code, topic.error_code, fetch(client, "t1", max_wait_ms=0).error_code


async def _start_writers(site: FaultySite, stack: AsyncExitStack) -> list[Writer]:
    """Start a writer for each kind of acks; wait until each possible one is acknowledged."""
    writers = []
    for partition, acks in enumerate(ALL_ACKS):
        await site.led_by("t1", partition, [1])
        writer = Writer("t1", site.addresses, partition=partition, acks=acks, pause_s=0.02)
        writers.append(await stack.enter_async_context(writer))
    await _wait_for_acks(writers, 0.0)
    return writers


async def _wait_for_acks(writers: list[Writer], after: float) -> None:
    for writer in writers:
        if writer.acks:
            await asyncio.to_thread(writer.next_ack, after, PATIENCE_S)


def _serves_nothing(broker: FaultyBroker) -> None:
    with broker.client() as client:
        found = fetch(client, "t1", max_wait_ms=0)
    assert (found.error_code, found.records or b"") == (NOT_LEADER, b"")


def _judge_cut(site: FaultySite, writers: list[Writer], lease_ended_at: float, healed_at: float) -> None:
    for writer in writers:
        log = stored(site.log_bytes(1, "t1", writer.partition))
        judge(log, writer.attempts)
        late = [each for each in writer.attempts if lease_ended_at < each.sent_at and each.answered_at < healed_at]
        assert late, "nothing was tried"
        assert not [each for each in late if each.is_acked]
        assert not {each.value for each in late} & {value for _, value in log}

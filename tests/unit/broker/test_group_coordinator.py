"""The coordinator over a real log of one replica: what an append that fails leaves, take-over, rewriting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.groups.coordinator import Commit, GroupCoordinator, partition_for
from kproxy.broker.groups.group import CommittedOffset, Join, Joined, Options, Protocol, Sync
from kproxy.broker.keys import PartitionKey
from kproxy.broker.partition import Partition
from kproxy.broker.topics import CONSUMER_OFFSETS
from kproxy_codec import error_codes as codes
from tests.support.brokers.replica_group import TOPIC_ID, Fence
from tests.support.waiting import eventually
from tests.unit.broker.replicas import lead, replica

NOBODY = ("", None, -1)
SEGMENT_BYTES = 4_000


class Site:
    """One partition of the topic, led here or not, and coordinators over it one after another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fence = Fence()
        self.led: Partition | None = None
        self.topic = Topic(CONSUMER_OFFSETS, TOPIC_ID, [[1]], {}, 1, 1)
        self.epoch = 0
        self.coordinator: GroupCoordinator
        self.tasks: list[asyncio.Task[None]] = []

    def lead(self, *, min_isr: int = 1) -> None:
        """Open the log and lead; a new coordinator begins."""
        self.epoch += 1
        opened = replica(self.directory, topic=CONSUMER_OFFSETS, min_isr=min_isr, segment_bytes=SEGMENT_BYTES)
        self.led = lead(opened, epoch=self.epoch, token=self.epoch, fence=self.fence)
        view = cast(ClusterView, type("View", (), {"topics": {CONSUMER_OFFSETS: self.topic}}))
        options = Options(initial_delay_s=0.0, min_session_s=0.1)
        self.coordinator = GroupCoordinator(view, lambda *_: self.led, time.monotonic, options, 20_000)
        self.change()
        self.tasks.append(asyncio.create_task(self.coordinator.run()))

    def change(self) -> None:
        self.coordinator.leader_changed(PartitionKey(CONSUMER_OFFSETS, 0))

    def lose(self) -> None:
        partition, self.led = self.led, None
        if partition is not None:
            partition.close()
        self.change()

    async def commit(self, group: str, offset: int, partition_index: int = 0) -> int:
        asked = Commit("t", partition_index, CommittedOffset(offset, -1, "", 0))
        return (await self.coordinator.commit(group, NOBODY, [asked]))[0]

    async def offsets(self, group: str) -> dict[int, int]:
        async def loaded() -> Any:
            code, found = await self.coordinator.fetch(group, None)
            return code != codes.COORDINATOR_LOAD_IN_PROGRESS and (code, found)

        code, found = await eventually(loaded)
        assert code == codes.NONE
        return {index: each.offset for (_, index), each in found.items()}

    async def join(self, group: str, member_id: str = "", session_s: float = 10.0) -> Joined:
        protocols = (Protocol("range", b""),)
        asked = Join(member_id, None, "c", session_s, 10.0, "consumer", protocols, needs_id=False)
        return await self.coordinator.join(group, asked)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """A site that leads, and has read its journal."""
    site = Site(tmp_path / f"{CONSUMER_OFFSETS}-0")
    site.lead()
    await site.offsets("g")
    yield site
    for task in site.tasks:
        task.cancel()
    site.lose()


@pytest.mark.parametrize(
    ("group", "partition"), [("", 0), ("g", 3), ("hello", 22), ("Hello World", 26), ("polygenelubricants", 0)]
)
def test_group_has_the_partition_that_kafka_gives_it(group: str, partition: int) -> None:
    assert partition_for(group, 50) == partition


async def test_group_survives_take_over(site: Site) -> None:
    joined = await site.join("g")
    member = joined.member_id
    asked = Sync(member, None, 1, None, None, {member: b"all"})
    assert (await site.coordinator.sync("g", asked)).assignment == b"all"
    assert await site.commit("other", 5) == codes.NONE
    site.lose()
    assert site.coordinator.heartbeat("g", member, None, 1) == codes.NOT_COORDINATOR
    site.lead()
    assert site.coordinator.heartbeat("g", member, None, 1) == codes.COORDINATOR_LOAD_IN_PROGRESS
    assert await site.offsets("other") == {0: 5}
    assert site.coordinator.heartbeat("g", member, None, 1) == codes.NONE
    assert (await site.coordinator.sync("g", asked._replace(assignments={}))).assignment == b"all"


async def test_refused_append_changes_nothing(site: Site) -> None:
    site.lose()
    site.lead(min_isr=2)
    await site.offsets("g")
    assert await site.commit("g", 1) == codes.COORDINATOR_NOT_AVAILABLE
    joined = await site.join("g")
    assert (joined.error_code, joined.generation) == (codes.COORDINATOR_NOT_AVAILABLE, -1)
    assert site.coordinator.listed() == (codes.NONE, [])


async def test_nothing_is_answered_without_a_lease(site: Site) -> None:
    joined = await site.join("g")
    site.fence.live = False
    assert site.coordinator.heartbeat("g", joined.member_id, None, 1) == codes.NOT_COORDINATOR
    assert await site.commit("g", 1) == codes.NOT_COORDINATOR
    assert (await site.coordinator.fetch("g", None))[0] == codes.NOT_COORDINATOR


@pytest.mark.parametrize("how", ["lose", "close"])
async def test_waiting_member_hears_that_the_coordinator_went(site: Site, how: str) -> None:
    first = await site.join("g")
    waiting = asyncio.create_task(site.join("g"))
    await eventually(lambda: site.coordinator.listed()[1][0].waiting())
    if how == "lose":
        site.lose()
    else:
        site.coordinator.close()
    assert (await waiting).error_code == codes.NOT_COORDINATOR
    assert first.generation == 1


async def test_silent_member_is_removed_in_time(site: Site) -> None:
    await site.join("g", session_s=0.2)
    await eventually(lambda: site.coordinator.listed()[1][0].state.value == "Empty")


async def test_journal_is_rewritten_and_stays_small(site: Site) -> None:
    joined = await site.join("member")
    for offset in range(1, 1_500):
        assert await site.commit(f"g{offset % 7}", offset, offset % 3) == codes.NONE
        if offset % 50 == 0:
            assert site.led is not None
            site.led.log.flush()
    assert site.led is not None
    await eventually(lambda: site.led is not None and site.led.log_start_offset > 0)
    assert site.led.log.size_in_bytes < 60_000
    before = {group: await site.offsets(group) for group in (f"g{n}" for n in range(7))}
    assert all(before.values())
    site.lose()
    site.lead()
    assert {group: await site.offsets(group) for group in before} == before
    assert site.coordinator.heartbeat("member", joined.member_id, None, 1) == codes.NONE


async def test_deleted_group_does_not_come_back(site: Site) -> None:
    assert await site.commit("g", 7) == codes.NONE
    assert await site.coordinator.delete("g") == codes.NONE
    site.lose()
    site.lead()
    assert await site.offsets("g") == {}
    assert site.coordinator.described("g") == codes.GROUP_ID_NOT_FOUND

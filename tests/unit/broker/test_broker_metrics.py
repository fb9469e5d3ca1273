"""A broker's `/metrics` and its page for people change with the state that they show."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp.test_utils import make_mocked_request

from kproxy.broker.cluster import ClusterView
from kproxy.broker.disk import FLUSH_BOUNDS_S, FlushTimes
from kproxy.broker.keys import Keys, StateValue, TopicValue, encode_value
from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.log import Log
from kproxy.broker.page import BrokerPages, BrokerStatus
from kproxy.etcd.lease import LeaseFence
from kproxy.runtime import tasks
from tests.support.brokers.replica_group import ISR_LAG_S, TOPIC_ID, Group, append, broker_value
from tests.support.processes.served import samples
from tests.unit.broker.replicas import fetch, replica

WELL = BrokerStatus("", 8.7, 1, 0, 0.4, 3, 2)


class Page:
    """The page of broker 1 of a group, assembled like a server's."""

    def __init__(self, group: Group) -> None:
        self.status = WELL
        self.view = ClusterView(Keys("/test"))
        self.hosted = {(b"t", 0): group.replicas[1]}
        self.ended = Counter[str]()
        self.isr_keeper = SimpleNamespace(shrinks=0, expansions=0)
        self.not_opened = SimpleNamespace(not_opened=0)
        self.disk = SimpleNamespace(failure="")
        leases = SimpleNamespace(hosted=self.hosted, ended=self.ended, replicas=self.not_opened, disk=self.disk)
        keeper = cast(Any, self.isr_keeper)
        self.pages = BrokerPages(1, self.view, cast(Any, leases), keeper, lambda: self.status)
        self._revision = 0

    def tell(self, key: str, value: Any) -> None:
        self._revision += 1
        self.view.apply_put(key, encode_value(value), lease_id=1, revision=self._revision)

    async def __call__(self, name: str, **labels: str) -> float | None:
        """The value of `kproxy_broker_{name}` with exactly these labels, None if there is no such series."""
        body, _ = await self.pages.metrics("")
        return samples(body.decode()).get((f"kproxy_broker_{name}", tuple(sorted(labels.items()))))


@pytest.fixture
def page(group: Group) -> Page:
    return Page(group)


async def test_leader_is_in_all_totals(group: Group, page: Page) -> None:
    leader = group.elect(1)
    append(leader, producer_id=5, producer_epoch=0, base_sequence=0)
    append(leader)
    fetch(group, 2, 3, 2, 3)
    append(leader)
    totals = {"partitions": 1, "led_partitions": 1, "producer_ids": 1, "dirty_logs": 1, "failed_logs": 0}
    totals |= {"under_replicated_partitions": 0, "under_min_isr_partitions": 0}
    for name, value in totals.items():
        assert await page(name) == value, name


async def test_follower_counts_as_no_leader(group: Group, page: Page) -> None:
    append(group.elect(2))
    group.fetch(1)
    assert (await page("partitions"), await page("led_partitions"), await page("dirty_logs")) == (1, 0, 1)


async def test_lagging_follower_shows_in_lag_then_isr(group: Group, page: Page) -> None:
    leader = group.elect(1)
    append(leader)
    assert await page("max_follower_lag_records") == 1, "nobody has told anything yet"
    fetch(group, 2, 3, 2, 3)
    assert await page("max_follower_lag_records") == 0
    append(leader)
    append(leader)
    group.clock.now += 4
    fetch(group, 2, 2)
    assert await page("max_follower_lag_records") == 2
    group.clock.now += ISR_LAG_S
    group.fetch(2)
    group.look_at_isr()
    assert (await page("under_replicated_partitions"), await page("under_min_isr_partitions")) == (1, 0)
    group.clock.now += ISR_LAG_S + 1
    group.look_at_isr()
    assert (await page("under_replicated_partitions"), await page("under_min_isr_partitions")) == (1, 1)
    assert (await page.pages.summary()).splitlines() == [
        "kproxy broker 1: ready",
        "",
        "lease    8.7 s left; lapsed 1, lost 0 times",
        "leads    1 of the 1 partitions that it keeps",
        "lacking  1 of these lack a replica; 1 refuse acks=all",
    ]


async def test_leader_with_uncertain_lease_is_not_counted(group: Group, page: Page) -> None:
    group.elect(1)
    group.fences[1].live = False
    assert await page("led_partitions") == 0


async def test_offline_partition_of_dead_brokers_is_counted(group: Group, page: Page) -> None:
    keys = page.view.keys
    page.tell(keys.topic("elsewhere"), TopicValue(TOPIC_ID, [[2], [3]], {}))
    page.tell(keys.state("elsewhere", 1), StateValue(0, [], TOPIC_ID))
    assert await page("offline_partitions") == 1


async def test_partition_once_led_without_leader_is_offline(group: Group, page: Page) -> None:
    keys = page.view.keys
    assert await page("offline_partitions") == 0, "its topic is not known"
    page.tell(keys.topic("t"), TopicValue(TOPIC_ID, [[1, 2, 3]], {}))
    assert await page("offline_partitions") == 0, "it was never led"
    page.tell(keys.state("t", 0), StateValue(0, [], TOPIC_ID))
    assert await page("offline_partitions") == 1
    page.view.apply_put(keys.lease("t", 0), b"2", lease_id=1, revision=9)
    assert await page("offline_partitions") == 1, "its owner is dead"
    page.view.apply_put(keys.broker(2), encode_value(broker_value(2)), lease_id=1, revision=10)
    assert (await page("offline_partitions"), await page("live_brokers")) == (0, 1)


async def test_only_own_leases_are_counted(group: Group, page: Page) -> None:
    keys = page.view.keys
    page.tell(keys.topic("t"), TopicValue(TOPIC_ID, [[1, 2, 3]], {}))
    page.view.apply_put(keys.lease("t", 0), b"1", lease_id=7, revision=3)
    assert await page("leases") == 0, "it has no lease"
    page.view.apply_put(keys.broker(1), encode_value(broker_value(1)), lease_id=8, revision=4)
    assert await page("leases") == 0, "a predecessor's"
    page.view.apply_put(keys.lease("t", 0), b"1", lease_id=8, revision=5)
    assert await page("leases") == 1


async def test_full_disk_counts_as_failed_log(group: Group, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = group.elect(1)

    def append_fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as full:
        full.setattr(Log, "append", append_fails)
        append(leader)
    assert await page("failed_logs") == 1
    append(leader)
    assert await page("failed_logs") == 0


async def test_failing_disk_counts_all_logs_as_failed(group: Group, page: Page) -> None:
    page.not_opened.not_opened = 1
    page.disk.failure = "the disk does not answer for 5 s"
    assert await page("failed_logs") == 2


async def test_losses_and_changes_are_counted(group: Group, page: Page) -> None:
    page.ended["its lease key is gone"] += 2
    page.isr_keeper.shrinks, page.isr_keeper.expansions = 3, 4
    page.not_opened.not_opened = 1
    page.status = BrokerStatus("no live lease", 0.0, 2, 5, 12.5, 3, 2)
    assert await page("leaderships_ended_total", reason="its lease key is gone") == 2
    assert (await page("isr_shrinks_total"), await page("isr_expansions_total")) == (3, 4)
    assert await page("failed_logs") == 1
    assert (await page("lease_losses_total"), await page("lease_remaining_seconds")) == (5, 0)
    assert (await page("ready"), await page("etcd_age_seconds")) == (0, 12.5)
    assert (await page("client_connections"), await page("follower_connections")) == (3, 2)
    assert await page("lease_lapses_total") == 2
    assert "lapsed 2, lost 5 times" in (await page.pages.summary())
    readiness = await page.pages.readiness()
    assert (readiness.ready, readiness.text) == (False, "no live lease")
    assert (await page.pages.liveness()).ready


async def test_failed_flushes_are_timed_too(group: Group, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    # A flush that a thread of an earlier test has begun counts elsewhere.
    flushes = FlushTimes()
    for module in ("page", "segment"):
        monkeypatch.setattr(f"kproxy.broker.{module}.FLUSHES", flushes)
    leader = group.elect(1)
    append(leader)
    leader.log.flush()
    assert sum(flushes.buckets) == 1
    assert flushes.seconds > 0
    assert await page("flush_duration_seconds_count") == 1
    assert await page("dirty_logs") == 0
    times = FlushTimes()
    with pytest.raises(OSError, match="worn out"), times.timed():
        raise OSError("worn out")
    assert times.buckets == [1] + [0] * len(FLUSH_BOUNDS_S)


async def test_totals_cover_all_replicas(
    group: Group, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas are read in portions, over several turns of the event loop."""
    monkeypatch.setattr(tasks, "TURN_S", -1.0)
    others = []
    for index in range(1, 5):
        other = replica(tmp_path / f"t-{index}", 1, index, clock=group.clock)
        other.become_follower(2, Leadership(0, 1))
        page.hosted[b"t", index] = other
        others.append(other)
    assert await page("partitions") == 5
    others[0].close()
    assert await page("partitions") == 4
    for other in others[1:]:
        other.close()


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after=x", "owner=x"])
async def test_wrong_query_for_partitions_is_refused(page: Page, query: str) -> None:
    (route,) = page.pages.routes()
    answer: Any = await cast(Any, route).handler(make_mocked_request("GET", f"/partitions?{query}"))
    assert answer.status == 400, answer.text


def test_lease_reports_its_ttl_and_late_renewals() -> None:
    now = 100.0
    fence = LeaseFence(1, lambda: now)
    assert fence.remaining_s == 0
    fence.renew(100.0, 10)
    assert fence.remaining_s == pytest.approx(9)
    now = 108.0
    fence.renew(107.0, 10)
    assert fence.lapses == 0
    now = 116.0
    assert (fence.is_live(), fence.remaining_s) == (False, 0)
    fence.renew(116.0, 10)
    assert (fence.is_live(), fence.lapses) == (True, 1)
    fence.break_for_good()
    fence.renew(130.0, 10)
    assert (fence.remaining_s, fence.lapses) == (0, 1)

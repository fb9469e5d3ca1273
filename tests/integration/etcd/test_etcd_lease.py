"""Leases: their renewals, their ends, and their holders' knowledge."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, LeaseLost
from kproxy.etcd import lease as lease_module
from kproxy.etcd.lease import lease_keep_alive
from kproxy.etcd.messages import Lease
from tests.support.etcd.embedded import Relay, connected, freeze, kill, own_etcd, running
from tests.support.waiting import PATIENCE_S, eventually


class Renewals:
    def __init__(self) -> None:
        self.sent_at: list[float] = []
        self.ttls: set[int] = set()

    def __call__(self, sent_at: float, ttl_s: int) -> None:
        self.sent_at.append(sent_at)
        self.ttls.add(ttl_s)

    async def next(self) -> None:
        count = len(self.sent_at)
        await eventually(lambda: len(self.sent_at) > count)

    async def of(self, client: EtcdClient, lease: Lease) -> None:
        await lease_keep_alive(client, lease.lease_id, clock=time.monotonic, on_renewed=self)


async def test_unrenewed_lease_ends_with_its_keys(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    lease = await etcd_client.lease_grant(1)
    assert lease.ttl_s >= 2, "etcd grants no less than this; whoever counts on 1 s is wrong"
    await etcd_client.put(f"{etcd_prefix}/a", b"", lease_id=lease.lease_id)

    async def is_gone() -> bool:
        return await etcd_client.get(f"{etcd_prefix}/a") is None

    await eventually(is_gone)


async def test_renewals_keep_lease_and_report_send_time(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (_, client):
        for _ in range(5):
            if await are_in_time(client):
                return
    raise AssertionError("renewals come later than a lease lives")


async def are_in_time(client: EtcdClient) -> bool:
    """False if the machine stalled for about the lease's TTL, which proves nothing."""
    lease, left_alone = await client.lease_grant(1), await client.lease_grant(1)
    assert lease.ttl_s == 1
    await client.put("/kept", b"", lease_id=lease.lease_id)
    await client.put("/left-alone", b"", lease_id=left_alone.lease_id)
    renewals = Renewals()
    started = ended = time.monotonic()
    is_kept = False
    with contextlib.suppress(LeaseLost):
        async with running(renewals.of(client, lease)):
            while await client.get("/left-alone") is not None:
                assert time.monotonic() < started + PATIENCE_S
                await asyncio.sleep(0.05)
            ended = time.monotonic()
            is_kept = await client.get("/kept") is not None
    gaps = [later - earlier for earlier, later in pairwise([started, *renewals.sent_at, time.monotonic()])]
    if max(gaps) > 0.8 * lease.ttl_s:
        return False
    assert is_kept
    assert renewals.ttls == {lease.ttl_s}
    assert all(started <= sent_at <= ended for sent_at in renewals.sent_at)
    # A sleep may end a clock tick early, and times are taken on both sides of it: no gap is exact.
    assert min(gaps[1:-1]) >= 0.9 * lease.ttl_s / lease_module.RENEWALS_PER_TTL
    return True


async def test_silently_dead_connection_does_not_cost_the_lease(tmp_path: Path) -> None:
    async with (
        own_etcd(tmp_path) as (server, direct),
        Relay(server.endpoint) as relay,
        connected(EtcdClient([relay.endpoint])) as client,
    ):
        lease = await client.lease_grant(16)
        await direct.put("/kept", b"", lease_id=lease.lease_id)
        renewals = Renewals()
        async with running(renewals.of(client, lease)):
            await renewals.next()
            relay.freeze()
            frozen = time.monotonic()
            await renewals.next()
            assert renewals.sent_at[-1] > frozen
            assert await direct.get("/kept") is not None


async def test_send_time_precedes_the_request(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (server, client):
        lease = await client.lease_grant(12)
        renewals = Renewals()
        async with running(renewals.of(client, lease)):
            await renewals.next()
            # etcd is suspended at the next renewal; its answer comes late, and extends nothing.
            await freeze(server)
            stopped = time.monotonic()
            interval_s = lease.ttl_s / lease_module.RENEWALS_PER_TTL
            await asyncio.sleep(interval_s + 0.6)
            os.kill(server.pid, signal.SIGCONT)
            woken = time.monotonic()
            await renewals.next()
        assert stopped < renewals.sent_at[-1] < woken


async def test_revoked_lease_ends_the_renewals(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    lease = await etcd_client.lease_grant(8)
    await etcd_client.put(f"{etcd_prefix}/a", b"", lease_id=lease.lease_id)
    renewals = Renewals()
    keep_alive = asyncio.ensure_future(renewals.of(etcd_client, lease))
    await renewals.next()
    await etcd_client.lease_revoke(lease.lease_id)
    assert await etcd_client.get(f"{etcd_prefix}/a") is None
    before = len(renewals.sent_at)
    with pytest.raises(LeaseLost, match=f"{lease.lease_id:x}"):
        await asyncio.wait_for(keep_alive, PATIENCE_S)
    assert len(renewals.sent_at) == before, "no renewal of a lease that is gone is reported"
    await etcd_client.lease_revoke(lease.lease_id)


async def test_renewals_continue_after_etcd_restart(tmp_path: Path) -> None:
    async with own_etcd(tmp_path) as (server, client):
        lease = await client.lease_grant(20)
        renewals = Renewals()
        async with running(renewals.of(client, lease)) as task:
            await renewals.next()
            await kill(server)
            during = len(renewals.sent_at)
            await asyncio.sleep(0.3)
            assert not task.done(), "an etcd that is away says nothing about the lease"
            assert len(renewals.sent_at) == during
            await server.start()
            await renewals.next()


async def test_lease_that_ended_during_outage_is_lost(etcd: EmbeddedEtcd) -> None:
    async with connected(EtcdClient([etcd.endpoint])) as client:
        lease = await client.lease_grant(2)
        await client.lease_revoke(lease.lease_id)
        renewals = Renewals()
        with pytest.raises(LeaseLost):
            await renewals.of(client, lease)
        assert renewals.sent_at == []


async def test_cancelled_renewals_let_the_lease_expire(etcd_client: EtcdClient) -> None:
    lease = await etcd_client.lease_grant(60)
    renewals = Renewals()
    async with running(renewals.of(etcd_client, lease)) as task:
        await renewals.next()
    assert task.cancelled()
    await etcd_client.put("/still-there", b"", lease_id=lease.lease_id)
    await etcd_client.lease_revoke(lease.lease_id)

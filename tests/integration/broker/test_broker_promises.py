"""The documented promises about a broker's lease and the ISR, with real brokers and etcd's own counters."""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kproxy.broker.keys import Keys
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from tests.support.brokers.reference_broker import start_broker, start_brokers
from tests.support.brokers.topics import put_topic
from tests.support.etcd.embedded import own_etcd
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

# etcd's metrics of granted leases, and of the streams that keep leases alive and watch.
GRANTED = "etcd_debugging_lease_granted"
STREAMS = "grpc_server_started"


RENEWALS = "grpc_server_msg_received"


def samples_of(server: EmbeddedEtcd) -> list[Sample]:
    with urllib.request.urlopen(f"{server.endpoint}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
    return [sample for family in families for sample in family.samples]


def renewals(server: EmbeddedEtcd) -> float:
    """The number of lease renewals."""
    return sum(
        sample.value
        for sample in samples_of(server)
        if sample.name == f"{RENEWALS}_total" and sample.labels["grpc_method"] == "LeaseKeepAlive"
    )


def counts(server: EmbeddedEtcd) -> dict[str, float]:
    counted = {}
    for sample in samples_of(server):
        if sample.name == f"{GRANTED}_total":
            counted["leases"] = sample.value
        elif sample.name == f"{STREAMS}_total" and sample.labels["grpc_method"] in ("LeaseKeepAlive", "Watch"):
            counted[sample.labels["grpc_method"]] = sample.value
    return counted


async def led(client: EtcdClient, keys: Keys, topic: str, partitions: int) -> set[int]:
    """Wait until all partitions are led; return the leases of their keys."""
    deadline = time.monotonic() + 60
    while True:
        kvs = (await client.get_prefix(f"{keys.leases}{topic}/")).kvs
        if len(kvs) == partitions:
            return {kv.lease_id for kv in kvs}
        assert time.monotonic() < deadline, f"{len(kvs)} of {partitions} are led"
        await asyncio.sleep(0.05)


async def test_all_partitions_share_one_lease_and_stream(tmp_path: Path) -> None:
    """Whatever their number: a lease and a stream for each would burden etcd."""
    keys = Keys("/p")
    async with own_etcd(tmp_path / "etcd") as (server, client):
        before = await asyncio.to_thread(counts, server)
        assert before["LeaseKeepAlive"] == 0
        with start_broker(1, tmp_path / "1", server.endpoint, "/p", lease_ttl_s=12) as broker:
            seen = []
            for topic, partitions in (("few", 1), ("many", 200)):
                await put_topic(client, keys, topic, [[1]] * partitions)
                leases = await led(client, keys, topic, partitions)
                renewed = await asyncio.to_thread(renewals, server)
                await asyncio.to_thread(wait_for, lambda renewed=renewed: renewals(server) > renewed, what="a renewal")
                found = await client.get(keys.broker(1))
                assert found is not None
                assert leases == {found.lease_id}
                seen.append(await asyncio.to_thread(counts, server))
            assert "lease lost" not in broker.log()
    assert seen[0]["leases"] - before["leases"] == 1
    assert seen[0]["LeaseKeepAlive"] == 1
    assert seen[1] == seen[0], "more partitions cost more leases or streams"


async def in_sync(client: EtcdClient, keys: Keys, wanted: set[int], topic: str = "t") -> float:
    """Wait until the ISR is `wanted`; return the time."""
    deadline = time.monotonic() + 60
    while True:
        found = await client.get(keys.state(topic, 0))
        seen_at = time.monotonic()
        isr = {each[0] for each in json.loads(found.value)["isr"]} if found else None
        if isr == wanted:
            return seen_at
        assert seen_at < deadline, f"the ISR is {isr}, not {wanted}"
        await asyncio.sleep(0.05)


# The difference between the clocks of two processes.
CLOCK_S = 0.1


async def test_stalled_follower_leaves_isr_only_after_the_lag(
    etcd: EmbeddedEtcd, etcd_client: EtcdClient, etcd_prefix: str, tmp_path: Path
) -> None:
    """It is suspended, not dead: its connections and its lease exist."""
    keys, lag_s = Keys(etcd_prefix), 4.0
    with ExitStack() as stack:
        brokers = start_brokers((1, 2), tmp_path, etcd.endpoint, etcd_prefix, lease_ttl_s=60, isr_lag_s=lag_s)
        leader, follower = await asyncio.to_thread(stack.enter_context, brokers)
        await put_topic(etcd_client, keys, "t", [[1, 2]])
        await in_sync(etcd_client, keys, {1, 2})
        with leader.client() as client:

            def written_since() -> float | None:
                asked_at = time.monotonic()
                return asked_at if client.produce("t", 0, build_batch(), acks=-1).error_code == 0 else None

            # The last fetch comes after this time, because the leader's answer waits for it.
            asked_at = await asyncio.to_thread(wait_for, written_since, what="the leader")
        stopped_at = time.monotonic()
        follower.signal(signal.SIGSTOP)
        out_at = await in_sync(etcd_client, keys, {1})
        assert psutil.Process(follower.process.pid).status() == psutil.STATUS_STOPPED
        assert await etcd_client.get(keys.broker(2)) is not None, "its lease has ended, and that threw it out"
        print(f"out of the ISR {out_at - stopped_at:.2f} s after it stopped, at a lag of {lag_s} s")
        assert out_at > asked_at + lag_s - CLOCK_S
        follower.signal(signal.SIGCONT)
        await in_sync(etcd_client, keys, {1, 2})

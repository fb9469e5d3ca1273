"""The leader of three replicas has a failing disk: another one leads soon, and no record is lost."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec import error_codes
from tests.support.brokers.faulty_disk import HANGS, FaultyDisk, build_shim
from tests.support.brokers.reference_broker import BrokerProcess, create_topic
from tests.support.clients.idempotent_writers import IdempotentWriter
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

IDS = (1, 2, 3)
TOPIC = "t"
# A leader gives up after half of this.
LAG_S = 4.0
LEASE_TTL_S = 4
OPTIONS: dict[str, Any] = {
    "lease_ttl_s": LEASE_TTL_S,
    "isr_lag_s": LAG_S,
    "flush_interval_s": 0.2,
    "default_replication_factor": 3,
    # Long enough for another attempt of a preferred leader while its disk fails.
    "leader_rebalance_s": 2.0,
}


class Site:
    """Three brokers; the first is the preferred leader of the only partition, and its disk may fail."""

    def __init__(self, brokers: list[BrokerProcess], disk: FaultyDisk) -> None:
        self.brokers = brokers
        self.disk = disk
        with brokers[0].client() as client:
            create_topic(client, TOPIC, [IDS])
        wait_for(lambda: self.leader() == 1 and self.in_sync() == [*IDS])

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.address for broker in self.brokers)

    def partition(self) -> Any:
        with self.brokers[1].client() as client:
            return client.metadata(TOPIC).topics[0].partitions[0]

    def leader(self) -> int:
        return int(self.partition().leader_id)

    def in_sync(self) -> list[int]:
        return sorted(self.partition().isr_nodes)

    def led_by_first(self) -> int:
        """The number of times that the broker with the failing disk has taken the partition."""
        return self.brokers[0].log().count("partition acquired")


@contextmanager
def site(etcd: EmbeddedEtcd, prefix: str, directory: Path, **options: Any) -> Iterator[Site]:
    brokers = [BrokerProcess(each, directory / str(each), etcd.endpoint, prefix, **OPTIONS, **options) for each in IDS]
    disk = FaultyDisk(build_shim(directory), brokers[0].data_dir)
    brokers[0].environ = disk.environ
    with ExitStack() as stack:
        for broker in brokers:
            stack.callback(broker.stop)
            broker.start(wait=False)
        yield Site([broker.wait_ready() for broker in brokers], disk)


FAULTS = [
    ("always", "write", errno.EIO),
    ("interval", "sync", HANGS),
    ("interval", "read", errno.EIO),
    ("interval", "write", errno.ENOSPC),
    ("interval", "write", HANGS),
    ("always", "sync", errno.EIO),
    ("interval", "sync", errno.EIO),
    ("always", "sync", HANGS),
]


@pytest.mark.long(but=1)
@pytest.mark.parametrize(("flush", "operation", "fault"), FAULTS)
async def test_another_leads_while_leaders_disk_fails(
    etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path, flush: str, operation: str, fault: int | str
) -> None:
    with site(etcd, etcd_prefix, tmp_path, flush=flush) as site_:
        async with IdempotentWriter(site_.bootstrap, TOPIC, 1) as writer:
            gap_s = await asyncio.to_thread(fail_and_mend, site_, writer, {operation: fault})
        what = fault if isinstance(fault, str) else errno.errorcode[fault]
        print(f"\nflush {flush}, {operation} {what}: longest time without a write {gap_s:.1f} s")
        # Without a proxy librdkafka sees that a batch is refused because of the one before it, and begins a new epoch.
        writer.judge(0, log_bytes(site_), may_repeat=True)


def fail_and_mend(site_: Site, writer: IdempotentWriter, faults: dict[str, int | str]) -> float:
    """Let the disk fail and recover; return the longest time without a write, in seconds."""
    writer.wait_for_more(50)
    with site_.disk.fails(**faults):
        wait_for(lambda: site_.leader() in (2, 3), what="another leads")
        led = site_.led_by_first()
        writer.wait_for_more(50)
        # Several times the interval of checks for a preferred leader.
        time.sleep(2 * LAG_S)
        assert site_.led_by_first() == led, "it took the partition back while its disk fails"
        assert site_.leader() in (2, 3)
    wait_for(lambda: site_.in_sync() == [*IDS] and site_.leader() == 1, what="it leads again")
    writer.wait_for_more(50)
    return writer.longest_pause_s()


def test_leader_without_another_in_sync_keeps_lead(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> None:
    with site(etcd, etcd_prefix, tmp_path, min_insync_replicas=1) as site_, site_.brokers[0].client() as client:
        for broker in site_.brokers[1:]:
            broker.kill()
        wait_for(lambda: [*client.metadata(TOPIC).topics[0].partitions[0].isr_nodes] == [1])
        assert client.produce(TOPIC, 0, build_batch([b"v"])).error_code == error_codes.NONE
        with site_.disk.fails(write=errno.ENOSPC):
            end = time.monotonic() + 2 * LAG_S
            while time.monotonic() < end:
                assert client.produce(TOPIC, 0, build_batch([b"v"])).error_code == error_codes.KAFKA_STORAGE_ERROR
                time.sleep(0.1)
        assert client.produce(TOPIC, 0, build_batch([b"v"])).base_offset == 1
        assert site_.led_by_first() == 1


@pytest.mark.long(but=1)
@pytest.mark.parametrize("flush", ["always", "interval"])
def test_stop_with_hanging_disk_is_bounded(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path, flush: str) -> None:
    """The lease ends, and so does the process, although the disk does not recover."""
    with (
        site(etcd, etcd_prefix, tmp_path, flush=flush) as site_,
        site_.brokers[0].client() as client,
        site_.disk.fails(sync=HANGS),
    ):
        client.send_produce(TOPIC, 0, build_batch([b"v"]), timeout_ms=60_000)
        wait_for(lambda: b"v" in log_bytes(site_))
        began = time.monotonic()
        site_.brokers[0].process.terminate()
        wait_for(lambda: site_.leader() in (2, 3), what="another leads")
        led_s = time.monotonic() - began
        assert site_.brokers[0].process.wait(60) == 0
        print(f"\nflush {flush}: after SIGTERM another led in {led_s:.1f} s, end in {time.monotonic() - began:.1f} s")


def log_bytes(site_: Site) -> bytes:
    return b"".join(path.read_bytes() for path in (site_.brokers[0].data_dir / f"{TOPIC}-0").glob("*.log"))

"""Brokers whose fsync takes longer than their lease: they keep it, and serve requests that do not need the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec import error_codes
from tests.support.brokers.reference_broker import BrokerProcess, RawClient, create_topic, start_brokers
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

IDS = (1, 2, 3)
# A machine that stalls for seconds ends no lease.
LEASE_TTL_S = 12
# Longer than a lease lives.
STALL_S = 14.0
PAUSE_S = 0.1
SEGMENT_BYTES = 20_000
VALUE = b"x" * 9_000
OPTIONS: dict[str, Any] = {
    "disk_may_stall": 1,
    "lease_ttl_s": LEASE_TTL_S,
    "segment_bytes": SEGMENT_BYTES,
    "flush_interval_s": 0.2,
    "default_replication_factor": 3,
    # No replica should leave the ISR.
    "isr_lag_s": 60,
}


class Site:
    """Three brokers, and a topic of which each leads one partition; all replicas are in sync."""

    def __init__(self, brokers: list[BrokerProcess], stack: ExitStack, topic: str) -> None:
        self.brokers = brokers
        self.topic = topic
        self._stack = stack
        with brokers[0].client() as client:
            orders = [[*IDS[first:], *IDS[:first]] for first in range(3)]
            create_topic(client, topic, orders)
            wait_for(lambda: client.leaders(topic) == {0: 1, 1: 2, 2: 3})
            wait_for(lambda: all(sorted(each.isr_nodes) == list(IDS) for each in self.partitions(client)))
        # Each leader has written in its epoch, and all replicas have it on the disk.
        for partition in range(3):
            result = self.client(partition).produce(topic, partition, build_batch([b"first"]), timeout_ms=30_000)
            assert result.error_code == error_codes.NONE

    def partitions(self, client: RawClient) -> Any:
        return client.metadata(self.topic).topics[0].partitions

    def client(self, broker: int) -> RawClient:
        """One more connection to a broker, by its index."""
        return self._stack.enter_context(self.brokers[broker].client())

    @contextmanager
    def stalled(self, broker: int) -> Iterator[None]:
        """That broker's disk completes no fsync until the block ends."""
        directory = self.brokers[broker].data_dir
        told = directory.with_name(f"{directory.name}.stalled")
        told.touch()
        try:
            yield
        finally:
            told.unlink()

    def files(self, broker: int, partition: int) -> list[Path]:
        return sorted((self.brokers[broker].data_dir / f"{self.topic}-{partition}").glob("*.log"))

    def epochs(self) -> list[tuple[int, int]]:
        with self.brokers[0].client() as client:
            return [(each.leader_id, each.leader_epoch) for each in self.partitions(client)]

    def check_leases(self, epochs: list[tuple[int, int]]) -> None:
        """Check that no broker lost its lease or leads again."""
        assert self.epochs() == epochs
        for broker in self.brokers:
            assert "lease lost" not in broker.log()


@contextmanager
def site(etcd: EmbeddedEtcd, directory: Path, topic: str, **options: Any) -> Iterator[Site]:
    with (
        start_brokers(IDS, directory, etcd.endpoint, f"/{topic}", **{**OPTIONS, **options}) as brokers,
        ExitStack() as stack,
    ):
        yield Site(brokers, stack, topic)


@pytest.mark.parametrize("slow", ["follower", pytest.param("leader", marks=pytest.mark.long)])
def test_flush_always_delays_only_acks_that_need_disk(etcd: EmbeddedEtcd, tmp_path: Path, slow: str) -> None:
    """The first broker leads partition 0. Its acks=all waits for the leader's disk and any follower's, acks=1 only for
    the leader's; all requests that need no stalled disk are answered meanwhile."""
    stalled = 0 if slow == "leader" else 1
    with site(etcd, tmp_path, f"slow-{slow}", flush="always") as site_:
        epochs, topic = site_.epochs(), site_.topic
        # Each fills half a segment, so segments begin within it.
        all_acks = [site_.client(0) for _ in range(10)]
        one_ack = site_.client(0)
        asking, third = site_.client(stalled), site_.client(2)
        with site_.stalled(stalled):
            for number, client in enumerate(all_acks):
                client.send_produce(topic, 0, build_batch([b"all-%d " % number + VALUE]), acks=-1, timeout_ms=60_000)
            one_ack.send_produce(topic, 0, build_batch([b"one " + VALUE]), acks=1, timeout_ms=60_000)
            if slow == "follower":
                assert one_ack.produced().error_code == error_codes.NONE, "the leader's disk is well"
            for broker in {0, stalled}:
                wait_for(lambda broker=broker: b"all-" in b"".join(map(Path.read_bytes, site_.files(broker, 0))))
            end = time.monotonic() + STALL_S
            while time.monotonic() < end:
                assert asking.leaders(topic) == {0: 1, 1: 2, 2: 3}
                result = third.produce(topic, 2, build_batch([b"v"]), acks=1)
                assert result.error_code == error_codes.NONE
                time.sleep(PAUSE_S)
            waiting = all_acks if slow == "follower" else [*all_acks, one_ack]
            assert all(client.silent_for(0.01) for client in waiting), "answered before the disk has it"
            site_.check_leases(epochs)
        answers = [client.produced() for client in waiting]
        assert {answer.error_code for answer in answers} == {error_codes.NONE}
        assert len({answer.base_offset for answer in answers}) == len(answers)
        site_.check_leases(epochs)

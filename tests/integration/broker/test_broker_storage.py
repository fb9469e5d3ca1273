"""Brokers and their disks: full disks, killed writers, torn tails, and clients' reads after retention."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kproxy.broker.snapshot import read_snapshot
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec import error_codes
from kproxy_codec.record_batch import iterate_batches
from tests.support.brokers.reference_broker import (
    LASTING_TTL_S,
    BrokerProcess,
    RawClient,
    create_topic,
    fetch,
    start_broker,
)
from tests.support.brokers.small_disk import small_disk
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

DISK_BYTES = 512 << 10
VALUE = b"x" * 20_000
# A starting broker also reads these bytes besides its logs.
OTHER_BYTES = 4_000_000


def read_values(client: RawClient, topic: str, offset: int = 0) -> list[int]:
    """The base offsets of all batches from `offset` on."""
    found: list[int] = []
    while True:
        result = fetch(client, topic, offset, max_bytes=10 << 20, max_wait_ms=0, min_bytes=0)
        assert result.error_code == error_codes.NONE
        batches = list(iterate_batches(bytes(result.records or b"")))
        if not batches:
            return found
        found += [batch.base_offset for batch in batches]
        offset = batches[-1].last_offset + 1


def produce_until_refused(client: RawClient, topic: str) -> tuple[int, Any]:
    """Return the number of accepted batches, and the first refusal."""
    for taken in range(200):
        result = client.produce(topic, 0, build_batch([VALUE]))
        if result.error_code != error_codes.NONE:
            return taken, result
        assert result.base_offset == taken
    raise AssertionError("the disk takes everything")


def test_full_disk_is_reported_and_broker_recovers(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    """After kill -9 in mid-write, exactly the acknowledged records exist."""
    topic = "full"
    options: dict[str, Any] = {"flush": "always", "segment_bytes": 2 * DISK_BYTES, "lease_ttl_s": 10}
    with (
        small_disk(tmp_path / "broker", DISK_BYTES) as disk,
        start_broker(1, disk.path, etcd.endpoint, "/full", **options) as broker,
    ):
        with broker.client() as client:
            assert client.metadata(topic).topics[0].error_code == error_codes.NONE
            disk.confine(broker.process.pid)
            taken, refused = produce_until_refused(client, topic)
            directory = disk.path / f"{topic}-0"
            assert refused.error_code == error_codes.KAFKA_STORAGE_ERROR
            assert f"the disk mounted at {disk.path if disk.path.is_mount() else '/'}" in refused.error_message
            assert str(directory) in refused.error_message
            assert refused.base_offset == -1
            for _ in range(3):
                assert client.produce(topic, 0, build_batch([VALUE])).error_code == error_codes.KAFKA_STORAGE_ERROR
            assert read_values(client, topic) == list(range(taken)), "what was refused can be read"
            on_disk = {path.name: path.stat().st_size for path in directory.iterdir()}
            disk.free()
            assert client.produce(topic, 0, build_batch([VALUE])).base_offset == taken
            assert set(on_disk) <= {path.name for path in directory.iterdir()}
        broker.kill()
        assert "torn log tail removed" not in broker.log()
        with max(directory.glob("*.log")).open("ab") as torn:
            torn.write(build_batch([VALUE])[:5000])
        broker.start()
        with broker.client() as client:
            wait_for(lambda: client.leaders(topic)[0] == 1)
            assert read_values(client, topic) == list(range(taken + 1))
            assert client.produce(topic, 0, build_batch([b"v"])).base_offset == taken + 1
        assert "torn log tail removed" in broker.log()


def test_only_replica_without_tail_leads_after_accepted_loss(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    topic = "cut"
    with start_broker(1, tmp_path / "1", etcd.endpoint, "/cut", segment_bytes=50_000) as broker:
        with broker.client() as client:
            wait_for(lambda: client.leaders(topic) == {0: 1})
            for offset in range(20):
                assert client.produce(topic, 0, build_batch([VALUE])).base_offset == offset
        assert broker.terminate() == 0
        directory = tmp_path / "1" / f"{topic}-0"
        for lost in sorted(directory.glob("*.log"))[-2:]:
            lost.unlink()
        broker.start()
        with broker.client() as client:
            told = wait_for(lambda: next((line for line in broker.log().splitlines() if "log not opened" in line), ""))
            assert "ends at offset 16; all below offset 20 was on the disk" in told
            assert "to accept the loss, stop the broker, remove checkpoint.json" in told
            assert client.leaders(topic) == {0: -1}
            assert client.produce(topic, 0, build_batch([VALUE])).error_code == error_codes.NOT_LEADER_OR_FOLLOWER
        assert broker.terminate() == 0
        (directory / "checkpoint.json").unlink()
        broker.start()
        with broker.client() as client:
            wait_for(lambda: client.leaders(topic) == {0: 1})
            assert client.produce(topic, 0, build_batch([VALUE])).base_offset == 16


def bytes_behind_snapshot(directory: Path) -> int:
    snapshot = read_snapshot(directory, 1 << 62)
    assert snapshot is not None
    index, _ = snapshot
    later = [path for path in directory.glob("*.log") if int(path.stem) >= index.base_offset]
    return sum(path.stat().st_size for path in later) - index.size_in_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has read")
def test_start_reads_only_records_behind_snapshot(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    topic, batch, segments = "long", build_batch([bytes(900_000)]), 4
    directory = tmp_path / "1" / f"{topic}-0"
    taken = 0
    with start_broker(1, tmp_path / "1", etcd.endpoint, "/long", segment_bytes=10 * len(batch)) as broker:

        def produce(client: RawClient, count: int) -> None:
            nonlocal taken
            for _ in range(count):
                assert client.produce(topic, 0, batch).base_offset == taken
                taken += 1

        def read_at_start() -> int:
            """Return how much the broker has read when it leads; then read all records."""
            with broker.client() as client:
                wait_for(lambda: client.leaders(topic) == {0: 1})
                told = Path(f"/proc/{broker.process.pid}/io").read_text().split()
                assert told[0] == "rchar:"
                assert read_values(client, topic) == list(range(taken))
            return int(told[1])

        with broker.client() as client:
            wait_for(lambda: client.leaders(topic) == {0: 1})
            produce(client, 10 * segments)
            wait_for(lambda: len(list(directory.glob("*.index"))) == segments - 1)
            wait_for((directory / "log.snapshot").exists)
            produce(client, 3)
        broker.kill()
        behind = bytes_behind_snapshot(directory)
        assert 3 * len(batch) <= behind < taken * len(batch) / 2
        broker.start()
        assert read_at_start() < behind + OTHER_BYTES
        assert broker.terminate() == 0
        assert bytes_behind_snapshot(directory) == 0
        broker.start()
        assert read_at_start() < OTHER_BYTES


def in_sync(client: RawClient, topic: str) -> list[int]:
    return sorted(client.metadata(topic).topics[0].partitions[0].isr_nodes)


def accepted(result: Any) -> Any:
    """The answer to a produce; None if it was refused because too few replicas are in sync."""
    return None if result.error_code == error_codes.NOT_ENOUGH_REPLICAS else result


def test_follower_without_room_delays_no_one_and_recovers(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    topic = "replicated"
    options: dict[str, Any] = {"lease_ttl_s": LASTING_TTL_S, "isr_lag_s": 5.0, "segment_bytes": 2 * DISK_BYTES}
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path / "2", DISK_BYTES))
        brokers = [
            BrokerProcess(each, tmp_path / str(each), etcd.endpoint, "/no-room", **options) for each in (1, 2, 3)
        ]
        for broker in brokers:
            stack.callback(broker.stop)
            broker.start(wait=False)
        leader, follower, _ = (broker.wait_ready() for broker in brokers)
        client = stack.enter_context(leader.client())
        create_topic(client, topic, [[1, 2, 3]])
        wait_for(lambda: client.leaders(topic)[0] == 1 and in_sync(client, topic) == [1, 2, 3])
        disk.confine(follower.process.pid)
        for offset in range(2 * DISK_BYTES // len(VALUE)):
            # On a machine that stalls, the third may also leave for a moment; refused batches are not written.
            taken = wait_for(lambda: accepted(client.produce(topic, 0, build_batch([VALUE]))))
            assert taken.base_offset == offset
        wait_for(lambda: in_sync(client, topic) == [1, 3])
        assert "replica not written" in follower.log()
        assert f"the disk mounted at {disk.path if disk.path.is_mount() else '/'}" in follower.log()
        disk.free()
        wait_for(lambda: in_sync(client, topic) == [1, 2, 3])
        logs = [tmp_path / str(each) / f"{topic}-0" for each in (1, 2, 3)]
        contents = {b"".join(path.read_bytes() for path in sorted(log.glob("*.log"))) for log in logs}
        assert len(contents) == 1, "the logs differ"

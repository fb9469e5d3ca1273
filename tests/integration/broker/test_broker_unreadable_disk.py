"""Brokers with a bad sector in one file: only its partition goes out of service, with a log line."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec import error_codes
from kproxy_codec.record_batch import iterate_batches
from tests.support.brokers.faulty_disk import FaultyDisk, build_shim
from tests.support.brokers.reference_broker import BrokerProcess, RawClient, fetch
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

BAD, WELL = "bad", "well"
BATCHES = 20
VALUE = b"x" * 3_000
SECTOR = 4 * 4096
LEASE_TTL_S = 5


class Site:
    """A broker with two topics of BATCHES batches each, and its disk."""

    def __init__(self, broker: BrokerProcess, disk: FaultyDisk) -> None:
        self.broker = broker
        self.disk = disk

    def path(self, name: str) -> Path:
        return self.broker.data_dir / f"{BAD}-0" / name

    def break_sector(self, name: str, position: int) -> None:
        self.disk.lose_sector(self.path(name), position)

    def restart(self) -> None:
        """Kill and restart the broker: after a clean stop it would not read the segments."""
        self.broker.kill()
        self.broker.start()

    def log_line(self, event: str) -> str:
        return next((line for line in self.broker.log().splitlines() if event in line), "")


@pytest.fixture
def site(etcd: EmbeddedEtcd, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    data_dir = tmp_path.resolve() / "1"
    disk = FaultyDisk(build_shim(tmp_path), data_dir)
    broker = BrokerProcess(1, data_dir, etcd.endpoint, f"/{tmp_path.name}", lease_ttl_s=LEASE_TTL_S)
    broker.environ = disk.environ
    try:
        with broker.start().client() as client:
            for topic in (BAD, WELL):
                wait_for(lambda topic=topic: client.leaders(topic) == {0: 1})
                for offset in range(BATCHES):
                    assert client.produce(topic, 0, build_batch([VALUE])).base_offset == offset
        yield Site(broker, disk)
    finally:
        broker.stop()


def fetched(client: RawClient, topic: str, offset: int) -> tuple[int, list[int]]:
    """Return the error code and the base offsets of the batches."""
    result = fetch(client, topic, offset, max_wait_ms=0, min_bytes=0)
    records, found = bytes(result.records or b""), []
    while len(records) >= 61 and len(records) >= 12 + int.from_bytes(records[8:12], "big"):
        batch = next(iterate_batches(records))
        found.append(batch.base_offset)
        records = records[batch.end :]
    return result.error_code, found


@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("00000000000000000000.log", SECTOR),
        pytest.param("00000000000000000000.log", 0, marks=pytest.mark.long),
        ("partition.json", 0),
    ],
    ids=["records", "the first record", "identity"],
)
def test_unreadable_file_keeps_one_partition_closed(site: Site, name: str, position: int) -> None:
    site.break_sector(name, position)
    site.restart()
    with site.broker.client() as client:
        wait_for(lambda: client.leaders(WELL) == {0: 1})
        assert fetched(client, WELL, 0) == (error_codes.NONE, list(range(BATCHES)))
        assert client.produce(WELL, 0, build_batch([VALUE])).base_offset == BATCHES
        line = wait_for(lambda: site.log_line("log not opened"))
        assert str(site.path(name)) in line
        assert "Input/output error" in line
        assert client.leaders(BAD) == {0: -1}
        # A disk that recovers needs no restart.
        site.disk.recover()
        wait_for(lambda: client.leaders(BAD) == {0: 1})
        assert client.produce(BAD, 0, build_batch([VALUE])).base_offset == BATCHES
    assert site.broker.terminate() == 0


def test_sector_failing_later_affects_only_its_reads(site: Site) -> None:
    sector = SECTOR // len(build_batch([VALUE]))
    site.break_sector("00000000000000000000.log", SECTOR)
    with site.broker.client() as client:
        error_code, found = fetched(client, BAD, 0)
        assert (error_code, found) == (error_codes.NONE, list(range(sector))), "batches before it are well"
        assert fetched(client, BAD, sector) == (error_codes.KAFKA_STORAGE_ERROR, [])
        assert fetched(client, BAD, BATCHES - 2) == (error_codes.NONE, [BATCHES - 2, BATCHES - 1])
        assert fetched(client, WELL, 0) == (error_codes.NONE, list(range(BATCHES)))
        assert client.produce(BAD, 0, build_batch([VALUE])).base_offset == BATCHES
        assert "00000000000000000000.log cannot be read at byte" in site.log_line("read failed")
    assert site.broker.process.poll() is None
    site.broker.signal(signal.SIGTERM)

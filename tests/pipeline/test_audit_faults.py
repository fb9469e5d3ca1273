"""The audit finds and names every fault of acknowledged records, and reports intact records as intact.

Spark, proxies, and reference brokers without fencing. All tests share one story: rows are written and two owners assign
the same offsets; one proxy is killed before it has shipped its trail; logs are tampered with and audited.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.trail.rows import Range, decode_page
from tests.pipeline.audit_sites import (
    PREFIX,
    Audited,
    AuditedProxies,
    ForgeableCluster,
    audit,
    metrics,
    raw_client,
    write,
)
from tests.pipeline.forging import Offsets, append_again, cut_off
from tests.support.brokers.reference_broker import RawClient
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
CLEAN = {("clean", 0): 300, ("clean", 1): 300, ("clean", 2): 300}
FORGED = {("cut", 0): 400, ("twice", 0): 400}
BEFORE, LATE, AFTER, UNSENT = 5, 3, 20, 100
SLEEPER, OTHER = 1, 2


@dataclass(frozen=True)
class Story:
    """The steps taken, and the audit's results."""

    forged: Audited
    overlaps: list[float]
    alarms: list[str]
    late: list[Offsets]
    cut: Offsets
    doubled: tuple[Offsets, Offsets]
    killed: str
    trail: Path


@pytest.fixture(scope="module")
def story(spark: Any, etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    directory = tmp_path_factory.mktemp("audited")
    with ExitStack() as stack:
        cluster = ForgeableCluster(directory / "brokers", etcd.endpoint, stack)
        both_follow = [[SLEEPER, OTHER]] * 2
        cluster.create(
            {"clean": [[1, 2], [2, 1], [1, 2]], "cut": [[2]], "twice": [[2]], "split": both_follow, "unsent": [[2]]}
        )
        flags = ("--etcd", etcd.endpoint, "--prefix", PREFIX, "--alone")
        proxies = AuditedProxies(directory, flags, stack)
        one, other = (proxies.start(interval_s=0.5) for _ in range(2))
        write(spark, one.kafka, {**CLEAN, **FORGED})
        with raw_client(one) as first, raw_client(one) as second:
            late = _acknowledged_late(cluster, [first, second])
        cluster.sleeper.stop()
        # Partition 0 through the same proxy, partition 1 through another; each gets one batch.
        for partition, proxy in enumerate((one, other)):
            write(spark, proxy.kafka, {("split", partition): AFTER}, acks=1, linger_ms=10_000)
        wait_for(
            lambda: metrics(one)["kproxy_audit_overlapping_records_total"] == LATE,
            what="the proxy that saw both owners tells",
        )
        overlaps = [metrics(proxy)["kproxy_audit_overlapping_records_total"] for proxy in (one, other)]
        assert [one.stop(), other.stop()] == [0, 0]

        killed = proxies.start(interval_s=5)
        write(spark, killed.kafka, {("unsent", 0): UNSENT})
        killed.signal(signal.SIGKILL)
        killed.wait()
        assert proxies.start(interval_s=5, listen=killed.kafka).stop() == 0
        cluster.forged.terminate()
        cut = cut_off(cluster.log("cut", 0), 2)
        doubled = append_again(cluster.log("twice", 0), 1)
        cluster.forged.start()
        topics = ["clean", "cut", "twice", "split", "unsent"]
        wait_for(lambda: all(OTHER in cluster.leaders(topic).values() for topic in topics), what="broker 2 leads")
        forged = audit(cluster.forged.address, proxies.trail, topics)
        alarms = [line for line in one.stderr().splitlines() if "offsets assigned twice" in line]
        yield Story(forged, overlaps, alarms, late, cut, doubled, killed.kafka, proxies.trail)


def _acknowledged_late(cluster: ForgeableCluster, clients: Sequence[RawClient]) -> list[Offsets]:
    """Broker 1 sleeps past its lease with batches for both partitions in its sockets, and acknowledges them late.

    By then broker 2 owns both partitions without these batches. It has all earlier records (acks=all), so that the
    offsets that it assigns begin at the same place.
    """
    for partition, client in enumerate(clients):
        client.produce("split", partition, build_batch([b"before"] * BEFORE), acks=-1)
    cluster.put_to_sleep()
    for partition, client in enumerate(clients):
        client.send_produce("split", partition, build_batch([b"late"] * LATE), acks=1, timeout_ms=60_000)
    wait_for(lambda: cluster.leaders("split") == {0: OTHER, 1: OTHER}, what="broker 2 takes over")
    cluster.wake()
    answers = [client.produced() for client in clients]
    assert [answer.error_code for answer in answers] == [0, 0], "it fenced itself off"
    return [Offsets(answer.base_offset, answer.base_offset + LATE - 1) for answer in answers]


def test_records_that_are_there_once_are_counted(story: Story) -> None:
    for (topic, partition), rows in CLEAN.items():
        found = story.forged.partition(topic, partition)
        assert (found.acked, found.present, found.end_offset) == (rows, rows, rows)
        assert (found.lost, found.removed, found.duplicated, found.overlapped, found.unclaimed) == (0, 0, 0, 0, 0)
        assert set(found.owners) <= {SLEEPER, OTHER}


def test_offset_given_twice_by_one_proxy_is_reported(story: Story) -> None:
    assert story.overlaps == [LATE, 0], "the other one has seen one owner of each partition"
    (alarm,) = story.alarms
    first, last = story.late[0]
    for word in ("topic=split", "partition=0", f"first_offset={first}", f"last_offset={last}", "[error"):
        assert word in alarm
    assert {f"owner={OTHER}", f"earlier_owner={SLEEPER}"} <= set(alarm.split())


@pytest.mark.parametrize("partition", [0, 1], ids=["through one proxy", "through two"])
def test_offsets_given_by_two_owners_name_both(story: Story, partition: int) -> None:
    (found,) = story.forged.of("overlap", "split", partition)
    assert (found.first_offset, found.last_offset) == story.late[partition]
    assert found.records == LATE
    ownerships = {(found.owner, found.revision), (found.other_owner, found.other_revision)}
    assert ownerships == _ownerships(story, partition)
    for owner, revision in ownerships:
        assert f"by broker {owner} at revision {revision}" in found.detail
    assert story.forged.partition("split", partition).overlapped == LATE


def _ownerships(story: Story, partition: int) -> set[tuple[int, int]]:
    """The owners that acknowledged these offsets, by the trails."""
    rows = [row for file in story.trail.glob("*.jsonl") for row in decode_page(file.read_bytes())]
    found = {
        (row.owner, row.revision)
        for row in rows
        if isinstance(row, Range)
        and (row.topic, row.partition) == ("split", partition)
        and story.late[partition].first in row.spans[0::2]
    }
    assert {owner for owner, _ in found} == {SLEEPER, OTHER}
    return found


def test_records_missing_from_a_log_are_found(story: Story) -> None:
    (found,) = story.forged.of("lost", "cut", 0)
    assert (found.first_offset, found.last_offset, found.records) == (*story.cut, story.cut.records)
    assert found.owner == OTHER
    assert found.revision > 0
    assert found.producer_id >= 0
    assert f"the log ends earlier, at offset {story.cut.first}" in found.detail
    counted = story.forged.partition("cut", 0)
    rows = FORGED["cut", 0]
    assert (counted.acked, counted.lost, counted.present) == (rows, story.cut.records, rows - story.cut.records)


def test_duplicate_batch_in_a_log_is_found(story: Story) -> None:
    (found,) = story.forged.of("duplicate", "twice", 0)
    original, copy = story.doubled
    assert (found.first_offset, found.last_offset, found.records) == (*copy, copy.records)
    assert (found.producer_id >= 0, found.producer_epoch) == (True, 0)
    assert f"at offset {copy.first} of twice/0 is already at offset {original.first}" in found.detail
    counted = story.forged.partition("twice", 0)
    assert (counted.duplicated, counted.lost, counted.unclaimed) == (copy.records, 0, copy.records)


def test_unshipped_trail_of_killed_proxy_is_unproven(story: Story) -> None:
    (found,) = story.forged.of("tail")
    assert found.proxy == story.killed
    assert "killed or cut off" in found.detail
    assert found.from_ms < found.to_ms
    counted = story.forged.partition("unsent", 0)
    assert (counted.acked, counted.lost, counted.unclaimed) == (0, 0, UNSENT)
    assert counted.unproven


def test_audit_finds_only_the_faults_and_fails(story: Story) -> None:
    kinds = sorted((each.kind, each.topic) for each in story.forged.findings)
    assert kinds == [
        ("duplicate", "twice"),
        ("lost", "cut"),
        ("overlap", "split"),
        ("overlap", "split"),
        ("tail", None),
    ]
    assert story.forged.exit_status == 1

"""The audit of real Apache Kafka: batches removed from the middle of a log are lost, those of retention are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from kproxy_codec.record_batch import iterate_batches
from tests.pipeline.audit_sites import Audited, AuditedProxies, audit, write
from tests.pipeline.forging import Offsets, cut_out
from tests.support.brokers.real_kafka import start_real_kafka

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]

ROWS = {("kept", 0): 200, ("kept", 1): 200, ("holed", 0): 400, ("retained", 0): 400}
PARTITIONS = {"kept": 2, "holed": 1, "retained": 1}
HOLE = 2


@dataclass(frozen=True)
class Story:
    """The changes to logs, and the audit's results."""

    audited: Audited
    hole: Offsets
    log_start_offset: int


@pytest.fixture(scope="module")
def story(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    directory = tmp_path_factory.mktemp("audited-kafka")
    with ExitStack() as stack:
        kafka = stack.enter_context(start_real_kafka(directory / "kafka", 1))
        (broker,) = kafka.brokers
        for topic, partitions in PARTITIONS.items():
            kafka.create_topic(topic, partitions)
        proxies = AuditedProxies(directory, ("--ownership", "kafka", "--bootstrap", kafka.bootstrap), stack)
        proxy = proxies.start(interval_s=0.5)
        write(spark, proxy.kafka, ROWS)
        assert proxy.stop() == 0
        batches = list(iterate_batches(broker.stored("retained", 0)))
        log_start_offset = batches[len(batches) // 2].base_offset
        kafka.delete_records("retained", 0, before=log_start_offset)
        broker.terminate()
        hole = cut_out(broker.log_directory("holed", 0), HOLE)
        broker.start()
        yield Story(audit(kafka.bootstrap, proxies.trail, list(PARTITIONS)), hole, log_start_offset)


def test_batch_cut_from_a_log_is_lost(story: Story) -> None:
    (found,) = story.audited.findings
    assert (found.kind, found.topic, found.partition) == ("lost", "holed", 0)
    assert (found.first_offset, found.last_offset, found.records) == (*story.hole, story.hole.records)
    assert found.owner == 1
    assert "the log does not have them" in found.detail
    counted = story.audited.partition("holed", 0)
    rows = ROWS["holed", 0]
    assert (counted.acked, counted.lost, counted.present) == (rows, story.hole.records, rows - story.hole.records)
    assert story.audited.exit_status == 1


def test_expired_records_are_not_counted_as_lost(story: Story) -> None:
    counted = story.audited.partition("retained", 0)
    rows, removed = ROWS["retained", 0], story.log_start_offset
    assert 0 < removed < rows
    assert (counted.acked, counted.removed, counted.present, counted.lost) == (rows, removed, rows - removed, 0)
    assert counted.log_start_offset == removed


def test_untouched_partitions_are_complete(story: Story) -> None:
    for topic, partition in (("kept", 0), ("kept", 1)):
        counted = story.audited.partition(topic, partition)
        assert (counted.acked, counted.present, counted.lost, counted.unclaimed) == (200, 200, 0, 0)
        assert not counted.unproven

"""An audit from a given time on reads what it needs of trails and logs, and omits nothing."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import confluent_kafka
import pytest

from kproxy.pipeline.audit.log_client import LogClient
from kproxy.pipeline.audit.run import TRAIL_LOOKBACK_MS, AuditJob, audit_here
from kproxy.pipeline.audit.trail_place import TOPIC, TrailPlace
from kproxy.trail.rows import Row, encode_page
from tests.pipeline.audit_sites import Audited
from tests.support.audit.forged_trail import ForgedTrail, now_ms
from tests.support.clients.kafka_io import TIMEOUT_S, produce
from tests.support.processes.dev import KproxyProcess

pytestmark = pytest.mark.timeout(600)

HOUR_MS = 3_600_000
OLD, NEW, VALUE_BYTES = 200, 10, 10_000


def ship(bootstrap: str, topic: str, rows: Sequence[Row]) -> None:
    """Write a page at the time when its last row was closed."""
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    producer.produce(topic, encode_page(rows), partition=0, timestamp=rows[-1].at)
    assert producer.flush(TIMEOUT_S) == 0


def test_audit_from_time_judges_only_later_acknowledgements(
    dev_cluster: KproxyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, now = uuid.uuid4().hex[:10], now_ms()
    idle, busy, trail_topic = f"idle-{name}", f"busy-{name}", f"trail-{name}"
    from_ms = now - 60_000
    for topic in (idle, busy):
        produce(dev_cluster.kafka, topic, [b"v" * VALUE_BYTES] * OLD)
    produce(dev_cluster.kafka, busy, [b"v"] * NEW)
    lives, torn = ForgedTrail("a" * 16, "lives:9092"), ForgedTrail("b" * 16, "torn:9092")
    killed = ForgedTrail("c" * 16, "killed:9092")
    # Rows far before the first that are read, at their beginning, in the look-back, and in the judged part.
    lives.began_ms = torn.began_ms = from_ms - TRAIL_LOOKBACK_MS - 8 * HOUR_MS
    ship(dev_cluster.kafka, trail_topic, [lives.begin(), lives.acked(idle, 0, OLD), torn.begin()])
    lives.began_ms = from_ms - TRAIL_LOOKBACK_MS
    ship(dev_cluster.kafka, trail_topic, [lives.mark()])
    lives.began_ms = killed.began_ms = from_ms - 4 * HOUR_MS
    ship(dev_cluster.kafka, trail_topic, [lives.acked(busy, 0, OLD), killed.begin()])
    lives.began_ms = torn.began_ms = now - 30_000
    last = [lives.acked(busy, OLD, NEW), lives.acked(busy, OLD + NEW, 3), torn.end(), lives.end()]
    ship(dev_cluster.kafka, trail_topic, last)

    fetched: list[int] = []
    fetch = LogClient.fetch

    def counting(*arguments: Any) -> Any:
        answer = fetch(*arguments)
        fetched.append(len(answer.records or b""))
        return answer

    monkeypatch.setattr(LogClient, "fetch", counting)
    job = AuditJob(bootstrap=dev_cluster.kafka, trail=TrailPlace(TOPIC, trail_topic), from_ms=from_ms)
    result = audit_here(job)

    audited = Audited(result.results)
    counted = audited.partition(busy, 0)
    assert (counted.acked, counted.present, counted.lost) == (NEW + 3, NEW, 3)
    (lost,) = audited.of("lost", busy, 0)
    assert (lost.first_offset, lost.last_offset) == (OLD + NEW, OLD + NEW + 2)
    # A proxy killed hours ago may have acknowledged more since; of another one rows are missing.
    assert [found.proxy for found in audited.of("tail")] == ["killed:9092"]
    assert [found.proxy for found in audited.of("gap")] == ["torn:9092"]
    assert 0 < sum(fetched) < 100_000, "of 4 MB"
    # A mark and two rows lie in the look-back; one or a few batches of the log were read.
    assert len(last) + 3 < result.rows <= len(last) + 3 + NEW

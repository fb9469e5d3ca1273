"""What new rows add to an audit, while the earlier ones stay as they were audited."""

from __future__ import annotations

from typing import Any

import pytest

from kproxy.pipeline.audit.tables import AuditRules, audit_increment
from tests.support.trails import BEGAN_AT, Row, Trail, batch, bounds, bounds_frame, log_frame, trail_frame

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

WINDOW_MS = 10_000


def audited(spark: Any, new: list[Row], earlier: list[Row], log: list[Row]) -> Any:
    limits = [bounds("busy", 500), bounds("idle", 500)]
    frames = trail_frame(spark, new), trail_frame(spark, earlier), log_frame(spark, log), bounds_frame(spark, limits)
    return audit_increment(*frames, AuditRules(read_at_ms=BEGAN_AT + 70_000, window_ms=WINDOW_MS, goes_on=True))


def test_new_rows_are_judged_with_the_earlier_ones_of_their_partitions(spark: Any) -> None:
    trail = Trail()
    trail.acked("busy", 0, 100, at=11_000)
    trail.acked("idle", 0, 100, at=12_000)
    trail.acked("busy", 100, 100, at=25_000)
    # What follows is new: it goes on, fills a window up, and gives offsets out that were given out long ago.
    split = len(trail.rows)
    trail.acked("busy", 200, 50, at=26_000)
    trail.acked("busy", 50, 10, at=41_000, owner=2, revision=9)
    trail.acked("busy", 250, 100, at=42_000, owner=2, revision=9)
    trail.end(60_000)
    # The begin was seen long ago; of the log there is nothing of the other topic, and nobody asks.
    earlier, new = trail.rows[1:split], trail.rows[split:]
    log = [batch("busy", 0, 300)]
    tables = audited(spark, [*new, earlier[-1]], earlier, log)

    windows = sorted(
        (row.window_start.timestamp() * 1000 - BEGAN_AT, row.acked, row.lost) for row in tables.windows.collect()
    )
    assert windows == [(20_000, 150, 0), (40_000, 110, 50)]
    (partition,) = tables.partitions.collect()
    assert (partition.topic, partition.acked, partition.overlapped, partition.lost) == ("busy", 350, 10, 50)
    assert partition.ownership_changes == 1
    found = sorted((row.kind, row.first_offset, row.last_offset) for row in tables.findings.collect())
    assert found == [("lost", 300, 349), ("overlap", 50, 59)]
    spark.catalog.clearCache()


def test_a_row_that_is_missing_between_earlier_and_new_ones_is_a_gap(spark: Any) -> None:
    trail = Trail()
    for n in range(6):
        trail.acked("busy", n * 10, 10, at=10_000 + n * 1000)
    trail.end(60_000)
    tables = audited(spark, trail.rows[4:], trail.rows[1:3], [batch("busy", 0, 60)])
    (found,) = tables.findings.collect()
    assert (found.kind, found.sequence, found.to_ms) == ("gap", 3, BEGAN_AT + 13_000)
    spark.catalog.clearCache()

"""What new rows add to an audit, while the earlier ones stay as they were audited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kproxy.pipeline.audit.run import fitted, keep
from kproxy.pipeline.audit.tables import AuditRules, Tables, audit_increment
from tests.support.trails import BEGAN_AT, Row, Trail, batch, bounds, bounds_frame, log_frame, trail_frame

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

WINDOW_MS = 10_000


@contextmanager
def audited(spark: Any, new: list[Row], earlier: list[Row], log: list[Row]) -> Iterator[Tables]:
    limits = [bounds("busy", 500), bounds("idle", 500)]
    frames = trail_frame(spark, new), trail_frame(spark, earlier), log_frame(spark, log), bounds_frame(spark, limits)
    rules = AuditRules(read_at_ms=BEGAN_AT + 70_000, window_ms=WINDOW_MS, goes_on=True)
    with fitted(spark, 0):
        yield audit_increment(*frames, rules, keep)


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
    with audited(spark, [*new, earlier[-1]], earlier, log) as tables:
        windows = [(row.window_start.timestamp(), row.acked, row.lost) for row in tables.windows.collect()]
        (partition,) = tables.partitions.collect()
        found = [(row.kind, row.first_offset, row.last_offset) for row in tables.findings.collect()]
    assert sorted(windows) == [(BEGAN_AT / 1000 + 20, 150, 0), (BEGAN_AT / 1000 + 40, 110, 50)]
    assert (partition.topic, partition.acked, partition.overlapped, partition.lost) == ("busy", 350, 10, 50)
    assert partition.ownership_changes == 1
    assert sorted(found) == [("lost", 300, 349), ("overlap", 50, 59)]


def test_a_row_that_is_missing_between_earlier_and_new_ones_is_a_gap(spark: Any) -> None:
    trail = Trail()
    for n in range(6):
        trail.acked("busy", n * 10, 10, at=10_000 + n * 1000)
    trail.end(60_000)
    with audited(spark, trail.rows[4:], trail.rows[1:3], [batch("busy", 0, 60)]) as tables:
        (found,) = tables.findings.collect()
    assert (found.kind, found.sequence, found.to_ms) == ("gap", 3, BEGAN_AT + 13_000)

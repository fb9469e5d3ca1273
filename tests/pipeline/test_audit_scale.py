"""How an audit runs: with little in memory and much in files it has the same result; and when it waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kproxy.pipeline.audit import run
from kproxy.pipeline.audit.run import FEW, acknowledged_by_one, fitted, judge, keep
from kproxy.pipeline.audit.schemas import LOST
from kproxy.pipeline.audit.tables import NAMES, AuditRules, Tables, read_results
from tests.support.audit.trails import BEGAN_AT, Trail, batch, bounds, bounds_frame, log_frame, trail_frame

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

PARTITIONS, ADAPTIVE = "spark.sql.shuffle.partitions", "spark.sql.adaptive.enabled"


@pytest.mark.parametrize(
    ("rows", "partitions"), [(0, "1"), (FEW, "1"), (FEW + 1, None), (299_999, None), (30_000_000, "100")]
)
def test_settings_follow_input_size_and_are_reset(spark: Any, rows: int, partitions: str | None) -> None:
    before = spark.conf.get(PARTITIONS), spark.conf.get(ADAPTIVE)
    with fitted(spark, rows):
        assert spark.conf.get(PARTITIONS) == (partitions or before[0])
    assert (spark.conf.get(PARTITIONS), spark.conf.get(ADAPTIVE)) == before


@pytest.mark.long
def test_results_are_equal_from_memory_and_files(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trail = Trail()
    trail.acked("t", 0, 100, at=11_000)
    trail.acked("t", 50, 100, at=12_000, owner=2, revision=9)
    trail.end(60_000)
    rules = AuditRules(read_at_ms=BEGAN_AT + 70_000)
    frames = (
        trail_frame(spark, trail.rows),
        log_frame(spark, [batch("t", 0, 140)]),
        bounds_frame(spark, [bounds("t", 140)]),
    )
    rows, log, limits = (keep("", frame) for frame in frames)

    def judged(place: str) -> dict[str, list[Any]]:
        output = str(tmp_path / place)
        amount, tables = judge(spark, rows, log, limits, rules, keep, output, {"made": "now"})
        assert amount == len(trail.rows) + 1
        written, about = read_results(spark, output)
        assert about == {"made": "now"}
        assert collected(tables) == collected(written)
        return collected(tables)

    in_memory = judged("memory")
    assert [row.kind for row in in_memory["findings"]] == [LOST, "overlap"]
    monkeypatch.setattr(run, "stays_in_memory", lambda session, rows: False)
    assert judged("files") == in_memory


def test_single_replica_acknowledgements_are_reported_by_partition(spark: Any) -> None:
    trail = Trail()
    trail.acked("t", 0, 100, acks=1)
    trail.acked("t", 100, 5, 110, 10, acks=1)
    trail.acked("t", 120, 10)
    trail.acked("t", 7, 1, partition=1, acks=1)
    trail.acked("by-all", 0, 10)
    trail.end(60_000)
    assert acknowledged_by_one(trail_frame(spark, trail.rows)) == {("t", 0): 120, ("t", 1): 8}


def collected(tables: Tables) -> dict[str, list[Any]]:
    return {name: sorted(getattr(tables, name).collect(), key=str) for name in NAMES}

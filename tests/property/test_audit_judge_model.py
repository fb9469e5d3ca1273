"""Compare the audit's judge with a model that judges every offset separately, on random small histories.

Each run has new seeds. `KPROXY_SEEDS=1000 KPROXY_FIRST_SEED=5000` judges these histories; a failure names its seed.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterator

from kproxy.pipeline.audit.judge import (
    Amounts,
    Batch,
    Bounds,
    PartitionPart,
    Windows,
    judge_log,
    repeats,
)
from kproxy.pipeline.audit.rules import AuditRules
from kproxy.pipeline.audit.trail_rows import TrailRow
from tests.support.audit.histories import COUNTED, JUDGED, WINDOW_MS, History, bounds_of, judge, make
from tests.support.audit.trails import BEGAN_AT, Row, judged_here, trail_rows

FIRST_SEED = int(os.environ.get("KPROXY_FIRST_SEED", secrets.randbelow(1 << 31)))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("KPROXY_SEEDS", "300")))
# Histories have 80 offsets or more, so they cover several ranges.
BITS = 4
RANGES = 16
RULES = AuditRules(read_at_ms=BEGAN_AT + 2_000_000, window_ms=WINDOW_MS, max_findings=100_000)


def histories() -> Iterator[tuple[int, list[Row], History]]:
    for seed in SEEDS:
        trail, history = make(seed)
        trail.end(1_000_000)
        yield seed, trail.rows, history


def test_histories_are_of_every_kind() -> None:
    """Each kind is in a tenth of the histories; duplicates, the rarest, are in 18 %."""
    seen: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + 500):
        seen.update({name: 1 for name, count in judge(make(seed)[1]).counts.items() if count})
    assert all(seen[name] >= 50 for name in COUNTED), f"from seed {FIRST_SEED}: {seen}"


def test_audit_matches_the_offset_by_offset_model() -> None:
    for seed, rows, history in histories():
        expected = judge(history)
        results = judged_here(rows, history.log, [bounds_of(seed, history)], RULES)
        (partition,) = results.partitions
        assert {name: partition[name] for name in COUNTED} == {name: expected.counts[name] for name in COUNTED}, seed
        for row in results.windows:
            window = round(row["window_start"].timestamp() * 1000)
            assert {name: row[name] for name in JUDGED} == {name: expected.windows[window][name] for name in JUDGED}, (
                seed
            )
        for kind, offsets in (("lost", expected.lost), ("overlap", expected.overlapped)):
            told: set[int] = set()
            possible: set[int] = set()
            for row in results.findings:
                # A batch that lacks records does not show which ones.
                named = possible if "the batch there lacks" in row["detail"] else told
                if row["kind"] == kind:
                    named.update(range(row["first_offset"], row["last_offset"] + 1))
            assert told <= offsets <= told | possible, f"seed {seed}, {kind}"


def judged_in_ranges(rows: list[Row], history: History) -> tuple[Windows, PartitionPart]:
    ranges = [row for row in trail_rows(rows) if row.kind == "range"]
    batches = [Batch(*(row[name] for name in Batch._fields)) for row in history.log]
    limits = Bounds(*(bounds_of(0, history)[name] for name in Bounds._fields))
    probes = [(at, each) for each in repeats(batches) for at in (each.batch.base_offset, each.first_base_offset)]
    windows: Windows = {}
    whole = PartitionPart()
    for number in range(RANGES):
        start, end = number << BITS, (number + 1) << BITS

        def is_here(row: TrailRow, start: int = start, end: int = end) -> bool:
            return any(first < end and first + count > start for first, count in row.ranges)

        here = [each for each in probes if start <= each[0] < end]
        there = [each for each in batches if each.base_offset < end and each.last_offset >= start]
        parts, part, _ = judge_log(filter(is_here, ranges), there, limits, RULES, start, end, here)
        whole.add(part, RULES.max_findings)
        for window, amounts in parts.items():
            windows.setdefault(window, Amounts()).add(amounts)
    return windows, whole


def test_judged_ranges_add_up_to_the_whole() -> None:
    for seed, rows, history in histories():
        expected = judge(history, BITS)
        windows, whole = judged_in_ranges(rows, history)
        counts = whole.amounts.counts
        assert {name: counts[name] for name in COUNTED} == {name: expected.counts[name] for name in COUNTED}, seed
        for window, amounts in windows.items():
            told = {name: amounts.counts[name] for name in JUDGED}
            assert told == {name: expected.windows[window][name] for name in JUDGED}, f"seed {seed}, window {window}"
        results = judged_here(rows, history.log, [bounds_of(seed, history)], RULES)
        islands = Counter(island.kind for island in whole.islands)
        assert islands == whole.found - Counter(duplicate=whole.found["duplicate"], corrupt=whole.found["corrupt"]), (
            seed
        )
        (partition,) = results.partitions
        assert (partition["producers"], partition["batches"]) == (len(whole.amounts.producers), counts["batches"]), seed
        told_islands = {(each.kind, each.start, each.end) for each in whole.islands}
        for row in results.findings:
            if row["kind"] == "overlap":
                assert ("overlap", row["first_offset"], row["last_offset"] + 1) in told_islands, seed

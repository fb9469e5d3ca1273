"""The audit reports the times that a trail does not prove, by missing rows and trails without an end."""

from __future__ import annotations

import random
import re
import secrets
from collections import defaultdict
from typing import Any

import pytest

from kproxy.pipeline.audit.findings import of_unproven
from kproxy.pipeline.audit.proof import TrailPart, Unproven, joined, trails, unproven
from kproxy.pipeline.audit.rules import SHIPPING_MS
from kproxy.pipeline.audit.steps import parts_by_block
from kproxy.pipeline.audit.trail_place import parse_place
from kproxy.pipeline.audit.trail_rows import TrailRow, rows_in
from kproxy.trail.signature import chained, digest
from tests.support.audit.trails import BEGAN_AT, INTERVAL_MS, Row, Trail, page, shared_names, trail_rows

READ_AT = 1_000_000


def long_trail(proxy: str, rows: int, *, ends: bool = True) -> Trail:
    """A row for each second, from second 1 on."""
    trail = Trail(proxy, proxy)
    for n in range(1, rows):
        trail.acked("topic", n * 10, 10, at=n * 1000)
    if ends:
        trail.end(rows * 1000)
    return trail


def without(trail: Trail, *sequences: int) -> list[Row]:
    return [row for row in trail.rows if row["sequence"] not in sequences]


def seconds(*times: int) -> tuple[int, ...]:
    return tuple(BEGAN_AT + time * 1000 for time in times)


def gap(sequence: int, missing: int, begin: int, end: int) -> tuple[Any, ...]:
    """The gap from `begin`, less the time that a row may stay open, to `end`, in seconds."""
    return ("gap", sequence, missing, BEGAN_AT + begin * 1000 - INTERVAL_MS, BEGAN_AT + end * 1000)


def tail(sequence: int, begin_ms: int, end: int) -> tuple[Any, ...]:
    return ("tail", sequence, 0, BEGAN_AT + begin_ms, BEGAN_AT + end * 1000)


def second_life(first_end: bool) -> list[Row]:
    first, second = Trail("twice", "1"), Trail("twice", "2", began=50_000)
    first.acked("topic", 0, 10, at=20_000)
    if first_end:
        first.end(30_000)
    second.end(60_000)
    return first.rows + second.rows


def replicas() -> list[Row]:
    """Three proxies of one address: the second was killed, and the third began too late to be its restart."""
    first, second, third = (
        Trail("shared", "1"),
        Trail("shared", "2", began=10_000),
        Trail("shared", "3", began=850_000),
    )
    second.mark(800_000)
    first.end(900_000)
    third.end(950_000)
    return first.rows + second.rows + third.rows


def handed_over() -> list[Row]:
    """The first proxy still answers its clients when the second already serves; the third is a restart."""
    first, second, third = (
        Trail("handed", "1"),
        Trail("handed", "2", began=90_000),
        Trail("handed", "3", began=300_000),
    )
    first.end(100_000)
    second.mark(200_000)
    third.end(310_000)
    return first.rows + second.rows + third.rows


def marked(at: int) -> Trail:
    trail = Trail("marked", "marked")
    trail.acked("topic", 0, 10, at=1_000)
    trail.mark(at)
    return trail


# Rows as read, and what they leave unproven.
CASES: dict[str, tuple[list[Row], list[tuple[Any, ...]]]] = {
    "whole": (long_trail("whole", 200).rows, []),
    "one row missing": (without(long_trail("p", 200), 70), [gap(70, 1, 69, 71)]),
    "rows at a boundary of pieces": (without(long_trail("p", 200), 63, 64, 65), [gap(63, 3, 62, 66)]),
    "whole pieces missing": (without(long_trail("p", 400), *range(60, 333)), [gap(60, 273, 59, 333)]),
    "several": (without(long_trail("p", 200), 5, 7, 150), [gap(5, 1, 4, 6), gap(7, 1, 6, 8), gap(150, 1, 149, 151)]),
    "missing and there twice": (
        without(long_trail("p", 200), 5) + long_trail("p", 200).rows[8:30],
        [gap(5, 1, 4, 6)],
    ),
    "the head is missing": (without(long_trail("p", 200), 0, 1, 2), [("gap", 0, 3, *seconds(-61, 3))]),
    "everything twice": (long_trail("p", 200).rows * 2, []),
    "killed": (long_trail("p", 200, ends=False).rows, [tail(199, 199_000 - INTERVAL_MS, READ_AT // 1000)]),
    "killed when idle": (marked(9_000).rows, [tail(2, 9_000, READ_AT // 1000)]),
    "killed and started again": (second_life(first_end=False), [tail(1, 20_000 - INTERVAL_MS, 50)]),
    "stopped and started again": (second_life(first_end=True), []),
    "killed, of several that share a name": (replicas(), [tail(1, 800_000, READ_AT // 1000)]),
    "killed after it was handed over to": (handed_over(), [tail(1, 200_000, 300)]),
    "another of the same name hides no hole": (
        shared_names(),
        [("gap", 0, 1, *seconds(-61, 25)), tail(1, 20_000 - INTERVAL_MS, READ_AT // 1000)],
    ),
    # The trail does not say how long this proxy kept a row open.
    "killed, and its begin is lost": (
        without(long_trail("p", 200, ends=False), 0),
        [("gap", 0, 1, *seconds(-61, 1)), tail(199, 199_000 - 61_000, READ_AT // 1000)],
    ),
}

# Cases with a live proxy, whose time bounds the other findings.
LIVING: dict[str, tuple[list[Row], list[tuple[Any, ...]]]] = {
    "lives, heard of a moment ago": (marked(READ_AT - 9_000).rows, []),
    "lives, and another was killed": (
        marked(READ_AT - 9_000).rows + long_trail("p", 200, ends=False).rows,
        [tail(199, 199_000 - INTERVAL_MS, READ_AT // 1000 - 9)],
    ),
}


def parts_of(rows: list[Row], *, split: random.Random | None = None) -> dict[tuple[str, str], TrailPart]:
    """Each trail in one part, or joined from several."""
    found: dict[tuple[str, str], list[TrailPart]] = {}
    for row in trail_rows(rows):
        found.setdefault((row.proxy, row.incarnation), []).append(row.part())
    parts = {}
    for name, each in found.items():
        cut = split.choice(each).first if split else 0
        pieces = [[part for part in each if (part.first < cut) == is_low] for is_low in (True, False)]
        first, *rest = [joined(piece) for piece in pieces if piece]
        for later in rest:
            first.add(later)
        parts[name] = first
    return parts


def missing_in(rows: list[Row], split: random.Random | None = None, **judged: Any) -> list[Unproven]:
    given = {"read_at_ms": BEGAN_AT + READ_AT, "shipping_ms": SHIPPING_MS, **judged}
    return unproven(trails(parts_of(rows, split=split)), **given)


def unproven_of(rows: list[Row], split: random.Random | None = None, **judged: Any) -> list[tuple[Any, ...]]:
    return sorted(each[:1] + each[3:7] for each in missing_in(rows, split, **judged))


def all_cases(split: random.Random | None = None) -> dict[str, list[tuple[Any, ...]]]:
    """The findings of all cases, judged together; a proxy's name begins with its case's name."""
    rows = [{**row, "proxy": f"{name}/{row['proxy']}"} for name, (told, _) in CASES.items() for row in told]
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in CASES}
    for each in missing_in(rows, split):
        found[each.proxy.partition("/")[0]].append((each.kind, *each[3:7]))
    return {name: sorted(each) for name, each in found.items()}


@pytest.fixture(scope="module")
def judged() -> dict[str, list[tuple[Any, ...]]]:
    return all_cases()


@pytest.mark.parametrize("name", CASES)
def test_missing_trail_is_unproven_for_its_possible_time(judged: dict[str, list[tuple[Any, ...]]], name: str) -> None:
    assert judged[name] == sorted(CASES[name][1])


def test_joined_parts_prove_what_the_whole_does(judged: dict[str, list[tuple[Any, ...]]]) -> None:
    seed = secrets.randbelow(1 << 31)
    split = random.Random(seed)
    for _ in range(10):
        assert all_cases(split) == judged, f"seed {seed}"


def test_parts_of_tasks_join_as_single_rows() -> None:
    seed = secrets.randbelow(1 << 31)
    draw = random.Random(seed)
    for name, (told, _) in CASES.items():
        tasks: tuple[list[TrailRow], ...] = ([], [], [])
        for row in trail_rows(told):
            draw.choice(tasks).append(row)
        parts = defaultdict(list)
        for proxy, incarnation, _, part in ((*block, part) for task in tasks for block, part in parts_by_block(task)):
            parts[proxy, incarnation].append(part)
        assert {trail: joined(each) for trail, each in parts.items()} == parts_of(told), f"{name}, seed {seed}"


@pytest.mark.parametrize("name", LIVING)
def test_live_trail_is_not_reported_as_unended(name: str) -> None:
    rows, expected = LIVING[name]
    assert unproven_of(rows) == expected


def test_trail_filling_a_file_counts_as_live() -> None:
    rows = marked(READ_AT - 70_000).rows
    assert len(unproven_of(rows)) == 1
    assert unproven_of(rows, shipping_ms=parse_place("parquet:/trail").shipping_ms) == []


def test_only_judged_times_are_unproven() -> None:
    rows = without(long_trail("p", 200, ends=False), 20, 100)
    found = unproven_of(rows, from_ms=BEGAN_AT + 96_000, to_ms=BEGAN_AT + 300_000)
    assert found == [("gap", 100, 1, *seconds(96, 101)), ("tail", 199, 0, *seconds(194, 300))]


def test_live_trail_is_not_dead_in_wider_audit() -> None:
    rows = marked(READ_AT - 9_000).rows + long_trail("killed", 200, ends=False).rows
    found = missing_in(rows, to_ms=BEGAN_AT + READ_AT + 60_000)
    said = {each.proxy: of_unproven(each)["detail"] for each in found}
    assert "continues: its last rows before the end of this audit had not arrived" in said["marked"]
    assert "killed or cut off" in said["killed"]


def test_many_gaps_are_reported_as_one() -> None:
    rows = without(long_trail("p", 5_001), *range(1, 5_000, 2))
    found = missing_in(rows, read_at_ms=BEGAN_AT + 6_000_000)
    assert len(found) == 1_000
    assert sum(each.missing for each in found) == 2_500
    assert found[-1].to_ms == BEGAN_AT + 5_000_000


def test_altered_row_makes_its_time_unproven() -> None:
    lines: list[bytes] = []
    for row in long_trail("p", 6).rows:
        lines.append(chained(page([row]).encode(), digest(lines[-1]) if lines else ""))

    def judged(*changed: bytes) -> list[tuple[Any, ...]]:
        rows = [row for line in changed for row in rows_in(line)]
        missing = unproven(
            trails({("p", "p"): joined([row.part() for row in rows])}),
            read_at_ms=BEGAN_AT + READ_AT,
            shipping_ms=0,
        )
        return [(each.kind, each.sequence, each.missing, each.from_ms, each.to_ms) for each in missing]

    assert judged(*lines) == []
    for number in range(5):
        altered = lines[number].replace(b'"at":', b'"at": ')
        stripped = re.sub(rb',"previous":"\w*"', b"", altered)
        for line in (altered, stripped):
            found = judged(*lines[:number], line, *lines[number + 1 :])
            assert gap(number, 0, number, number + 1) in found
    # Rows of releases without digests.
    assert judged(*(re.sub(rb',"previous":"\w*"', b"", line) for line in lines)) == []
    (told,) = map(of_unproven, [Unproven("gap", "p", "p", 3, 0, 0, 1)])
    assert told["detail"].startswith("Row 3 of the trail of p, or the row after it, was altered")

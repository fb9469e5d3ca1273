"""Reduce an audit's result tables to the facts of its report.

`Limits` bounds what is kept, whatever the number of partitions, windows and findings: the worst are kept, windows are
joined until they fit, and everything else is counted. Each part of a table is reduced where it is: only what is kept
comes to this process.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from kproxy.pipeline.audit.columns import FINDING_KINDS, GAP, OVERLAP, TAIL
from kproxy.pipeline.audit.report_facts import (
    SUMMED,
    Facts,
    Finding,
    FindingCount,
    Grid,
    Holding,
    Partition,
    State,
    Sums,
    Verdict,
    Which,
)
from kproxy.pipeline.audit.steps import Results, in_ms

# Kinds of findings that leave all topics unproven for some time.
HOLES: Final = (GAP, TAIL)
# There are few kinds of findings; foreign tables must not fill the report with more.
KINDS_AT_MOST: Final = 32
OWNERS_OF_A_PARTITION: Final = 16

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """The size of a report. `drawn`: partitions in plots; `columns`: steps of time; `holdings`: of a partition."""

    partitions: int = 60
    drawn: int = 40
    columns: int = 96
    findings: int = 50
    holdings: int = 30


def gather(results: Results, about: Mapping[str, str], limits: Limits | None = None) -> Facts:
    """Return the facts of the result tables, the same for the same tables."""
    limits = limits or Limits()
    whole = _Counted()
    for part in results.partitions.over(partial(_count, limits.partitions)):
        whole.add(part, limits.partitions)
    partitions = tuple(map(_partition, whole.worst))
    drawn = frozenset(one.which for one in partitions[: limits.drawn])
    findings = list(results.findings)
    counts, conflicts = _finding_counts(findings)
    holes = [row for row in findings if row["kind"] in HOLES and row["from_ms"] is not None]
    states: dict[Which, list[int]] = {}
    grid = None
    if extents := list(results.windows.over(_extents)):
        begins, ends, lengths = zip(*extents, strict=True)
        grid = _grid(min(begins), max(ends), max(lengths), holes, limits)
        for (which, step), state in results.windows.over(partial(_worst_states, drawn, grid)):
            steps = states.setdefault(which, [0] * grid.columns)
            steps[step] = max(steps[step], state)
    if not states:
        grid = None
    holdings, hidden = _holdings(results.owners.over(partial(_first_owners, drawn, limits.holdings)), limits.holdings)
    return Facts(
        verdict=Verdict(
            Sums(**whole.sums),
            trail_faults=sum(counts[kind].findings for kind in HOLES if kind in counts),
            conflicts=conflicts,
        ),
        topics=len(whole.topics),
        partitions=partitions,
        findings=_findings(findings, limits.findings),
        finding_counts=counts,
        grid=grid,
        states={which: tuple(_STATES[state] for state in steps) for which, steps in sorted(states.items())},
        trail_holes=_trail_holes(grid, holes) if grid else (),
        holdings=holdings,
        hidden_holdings=hidden,
        about=dict(about),
    )


@dataclass(slots=True)
class _Counted:
    """The counted partitions: the sums of all, their topics, and the rows of the worst."""

    sums: Counter[str] = field(default_factory=Counter)
    topics: set[str] = field(default_factory=set)
    worst: list[Row] = field(default_factory=list)

    def add(self, other: _Counted, most: int) -> None:
        self.sums.update(other.sums)
        self.topics |= other.topics
        self.worst = heapq.nsmallest(most, self.worst + other.worst, key=_worst_first)


def _count(most: int, rows: Iterable[Row]) -> Iterator[_Counted]:
    whole = _Counted()

    def counting() -> Iterator[Row]:
        for row in rows:
            whole.sums.update({name: row[name] or 0 for name in SUMMED})
            whole.sums.update(partitions=1, unproven=int(bool(row["unproven"])))
            whole.topics.add(row["topic"])
            yield row

    whole.worst = heapq.nsmallest(most, counting(), key=_worst_first)
    yield whole


def _worst_first(row: Row) -> tuple[Any, ...]:
    names = ("lost", "overlapped", "duplicated", "unproven", "removed", "acked")
    return (*(-int(row[name] or 0) for name in names), row["topic"], row["partition"])


def _partition(row: Row) -> Partition:
    sums = Sums(partitions=1, unproven=int(bool(row["unproven"])), **{name: int(row[name] or 0) for name in SUMMED})
    return Partition(
        topic=row["topic"],
        partition=row["partition"],
        sums=sums,
        owners=tuple(row["owners"] or ())[:OWNERS_OF_A_PARTITION],
        producers=int(row["producers"] or 0),
        log_start_offset=row["log_start_offset"],
        end_offset=row["end_offset"],
        p50_ms=row["p50_ms"],
        p99_ms=row["p99_ms"],
        max_ms=row["max_ms"],
    )


def _finding_counts(rows: Sequence[Row]) -> tuple[dict[str, FindingCount], int]:
    """Return the counts by kind, and the number of overlaps between two brokers."""
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_kind[row["kind"]].append(row)
    counts = {}
    for kind in sorted(by_kind)[:KINDS_AT_MOST]:
        # The table may list fewer than `of_kind`.
        found = max(len(by_kind[kind]), *(row["of_kind"] or 0 for row in by_kind[kind]))
        counts[kind] = FindingCount(found, sum(row["records"] or 0 for row in by_kind[kind]))
    return counts, sum(row["owner"] != row["other_owner"] for row in by_kind[OVERLAP])


def _findings(rows: Sequence[Row], most: int) -> tuple[Finding, ...]:
    """Return the worst kinds first, of each the findings with the most records."""
    places = {kind: number for number, kind in enumerate(FINDING_KINDS)}

    def order(row: Row) -> tuple[Any, ...]:
        names = ("from_ms", "topic", "partition", "first_offset", "proxy", "sequence")
        least = tuple((row[name] is None, row[name] if row[name] is not None else 0) for name in names)
        return places.get(row["kind"], len(places)), -(row["records"] or -1), *least, row["detail"]

    return tuple(
        Finding(**{name: row[name] for name in Finding.__slots__}) for row in heapq.nsmallest(most, rows, key=order)
    )


def _extents(rows: Iterable[Row]) -> Iterator[tuple[int, int, int]]:
    """Yield when the first window begins, when the last one ends, and how long one is."""
    times = [(in_ms(row["window_start"]), in_ms(row["window_end"])) for row in rows]
    if times:
        begin, end = min(times)
        yield begin, max(end for _, end in times), max(1, end - begin)


def _worst_states(only: Collection[Which], grid: Grid, rows: Iterable[Row]) -> Iterable[tuple[tuple[Which, int], int]]:
    """Return the worst state of each partition and step."""
    worst: dict[tuple[Which, int], int] = {}
    for row in rows:
        if (which := (row["topic"], row["partition"])) in only:
            key = which, _column(grid, in_ms(row["window_start"]))
            worst[key] = max(worst.get(key, 0), _state(row))
    return worst.items()


def _grid(start: int, end: int, window: int, holes: Sequence[Row], limits: Limits) -> Grid:
    """Return a grid of all windows and of the holes in the trails, as far as the windows stay visible."""
    windows = max(1, -(-(end - start) // window))
    begins = [row["from_ms"] for row in holes]
    ends = [row["to_ms"] for row in holes if row["to_ms"] is not None]
    most = max(1, windows // 4)
    before = min(max(0, -(-(start - min(begins)) // window)), most) if begins else 0
    behind = min(max(0, -(-(max(ends) - end) // window)), most) if ends else 0
    windows += before + behind
    together = -(-windows // limits.columns)
    return Grid(start - before * window, window * together, -(-windows // together), together)


_STATES: Final = tuple(State)


def _state(row: Row) -> int:
    is_so = {
        State.LOST: row["lost"],
        State.OVERLAPPED: row["overlapped"],
        State.DUPLICATED: row["duplicated"],
        State.UNPROVEN: row["unproven"],
        State.REMOVED: row["removed"] + (row["deleted"] or 0),
        State.COMPLETE: row["acked"],
    }
    return _STATES.index(next((state for state, holds in is_so.items() if holds), State.NOTHING))


def _trail_holes(grid: Grid, holes: Sequence[Row]) -> tuple[int, ...]:
    """Return the steps with holes. A hole concerns all topics, even if no acknowledgements are known for that time."""
    steps: set[int] = set()
    for row in holes:
        last = max(grid.end_ms if row["to_ms"] is None else row["to_ms"], row["from_ms"])
        if row["from_ms"] < grid.end_ms and last >= grid.start_ms:
            steps.update(range(_column(grid, row["from_ms"]), _column(grid, last) + 1))
    return tuple(sorted(steps))


def _first_owners(
    only: Collection[Which], most: int, rows: Iterable[Row]
) -> Iterator[tuple[Which, list[Holding], int]]:
    """Yield the first owners of each partition, and the number of all."""
    names = ("owner", "revision", "first_acked_at", "last_acked_at", "records")
    kept: dict[Which, list[Holding]] = defaultdict(list)
    for row in rows:
        if (which := (row["topic"], row["partition"])) in only:
            kept[which].append(Holding(*(row[name] for name in names)))
    return ((which, _first(each, most), len(each)) for which, each in kept.items())


def _holdings(parts: Iterable[tuple[Which, list[Holding], int]], most: int) -> tuple[dict[Which, list[Holding]], int]:
    """Return the first owners of each partition, and the number of the others."""
    kept: dict[Which, list[Holding]] = defaultdict(list)
    total = 0
    for which, some, count in parts:
        total += count
        kept[which] = _first(kept[which] + some, most)
    return dict(sorted(kept.items())), total - sum(map(len, kept.values()))


def _first(holdings: Iterable[Holding], most: int) -> list[Holding]:
    return heapq.nsmallest(most, holdings, key=lambda one: (one.first_ms, one.revision, one.owner))


def _column(grid: Grid, ms: int) -> int:
    """Return the step of the grid that a time is in; times outside count in the first or last one."""
    return min(max((ms - grid.start_ms) // grid.step_ms, 0), grid.columns - 1)

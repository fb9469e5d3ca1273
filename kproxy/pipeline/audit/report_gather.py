"""Reduce an audit's result tables to the facts of its report.

`Limits` bounds what is kept, whatever the number of partitions, windows and findings: the worst are kept, windows are
joined until they fit, and everything else is counted. A `Reduced` reads a table's rows in any order and can be added to
another `Reduced`, so executors can reduce large tables in parts.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kproxy.pipeline.audit.columns import FINDING_KINDS, GAP, OVERLAP, TAIL
from kproxy.pipeline.audit.report_facts import (
    SUMMED,
    Cell,
    Facts,
    Finding,
    FindingCount,
    Grid,
    Holding,
    Partition,
    State,
    Sums,
    Verdict,
)

# Kinds of findings that leave all topics unproven for some time.
HOLES: Final = (GAP, TAIL)
# There are few kinds of findings; foreign tables must not fill the report with more.
KINDS_AT_MOST: Final = 32
OWNERS_OF_A_PARTITION: Final = 16

Row = Mapping[str, Any]
Which = tuple[str, int]


class Reduced(Protocol):
    """The result of reducing a table."""

    def read(self, row: Row) -> None: ...

    def add(self, other: Any) -> None: ...


R = TypeVar("R", bound=Reduced)


class Source(Protocol):
    """The result tables. `listed`: the rows of the findings, which are bounded."""

    def listed(self) -> Sequence[Row]: ...

    def fold(self, table: str, begin: Callable[[], R], only: Collection[Which] | None = None) -> R:
        """Reduce a table, or only its rows of some partitions."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The size of a report. `drawn`: partitions in plots; `columns`: steps of time; `holdings`: of a partition."""

    partitions: int = 60
    drawn: int = 40
    columns: int = 96
    findings: int = 50
    holdings: int = 30


def gather(source: Source, about: Mapping[str, str], limits: Limits | None = None) -> Facts:
    """Return the facts of the result tables, the same for the same tables. Errors are those of `source`."""
    limits = limits or Limits()
    totals = source.fold("partitions", partial(_Partitions, limits.partitions))
    partitions = tuple(map(_partition, totals.worst()))
    drawn = [(one.topic, one.partition) for one in partitions[: limits.drawn]]
    findings = source.listed()
    counts, conflicts = _finding_counts(findings)
    holes = [row for row in findings if row["kind"] in HOLES and row["from_ms"] is not None]
    grid = _grid(source.fold("windows", _Extent), holes, limits)
    holdings = source.fold("owners", partial(_Holdings, limits.holdings), drawn)
    return Facts(
        verdict=Verdict(
            totals.sums(),
            trail_faults=sum(counts[kind].findings for kind in HOLES if kind in counts),
            conflicts=conflicts,
        ),
        topics=len(totals.topics),
        partitions=partitions,
        findings=_findings(findings, limits.findings),
        finding_counts=counts,
        grid=grid,
        cells=source.fold("windows", partial(_Cells, grid), drawn).cells() if grid else (),
        trail_holes=_trail_holes(grid, holes) if grid else (),
        holdings=holdings.first(),
        hidden_holdings=holdings.hidden(),
        about=dict(about),
    )


class _Partitions:
    """The sums of all partitions, and the worst partitions."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sums: Counter[str] = Counter()
        self._worst: list[Row] = []
        self.topics: set[str] = set()

    def read(self, row: Row) -> None:
        self._sums.update({name: row[name] or 0 for name in SUMMED})
        self._sums.update(partitions=1, unproven=int(bool(row["unproven"])))
        self.topics.add(row["topic"])
        self._worst.append(row)
        self._trim(2 * self._most)

    def add(self, other: _Partitions) -> None:
        self._sums.update(other._sums)
        self.topics |= other.topics
        self._worst += other._worst
        self._trim(self._most)

    def _trim(self, room: int) -> None:
        if len(self._worst) > room:
            self._worst = self.worst()

    def worst(self) -> list[Row]:
        return heapq.nsmallest(self._most, self._worst, key=_worst_first)

    def sums(self) -> Sums:
        return Sums(**{name: self._sums[name] for name in Sums.__slots__})


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


def _ms(row: Row, name: str) -> int:
    seconds: float = row[name].timestamp()
    return round(seconds * 1000)


class _Extent:
    """When the first window begins and the last one ends, and the length of the longest."""

    def __init__(self) -> None:
        self.times: tuple[int, int, int] | None = None

    def read(self, row: Row) -> None:
        begin, end = _ms(row, "window_start"), _ms(row, "window_end")
        self._join((begin, end, end - begin))

    def add(self, other: _Extent) -> None:
        if other.times is not None:
            self._join(other.times)

    def _join(self, other: tuple[int, int, int]) -> None:
        begin, end, length = self.times or other
        self.times = min(begin, other[0]), max(end, other[1]), max(length, other[2])


def _grid(extent: _Extent, holes: Sequence[Row], limits: Limits) -> Grid | None:
    """Return a grid of all windows and of the holes in the trails, as far as the windows stay visible."""
    if extent.times is None:
        return None
    start, end, window = extent.times
    window = max(1, window)
    windows = max(1, -(-(end - start) // window))
    begins = [row["from_ms"] for row in holes]
    ends = [row["to_ms"] for row in holes if row["to_ms"] is not None]
    most = max(1, windows // 4)
    before = min(max(0, -(-(start - min(begins)) // window)), most) if begins else 0
    behind = min(max(0, -(-(max(ends) - end) // window)), most) if ends else 0
    windows += before + behind
    together = -(-windows // limits.columns)
    return Grid(start - before * window, window * together, -(-windows // together), together)


class _Cells:
    """The worst state of each partition in each step of the grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._states: dict[tuple[str, int, int], int] = {}

    def read(self, row: Row) -> None:
        self._note((row["topic"], row["partition"], _column(self._grid, _ms(row, "window_start"))), _state(row))

    def add(self, other: _Cells) -> None:
        for key, state in other._states.items():
            self._note(key, state)

    def _note(self, key: tuple[str, int, int], state: int) -> None:
        self._states[key] = max(state, self._states.get(key, 0))

    def cells(self) -> tuple[Cell, ...]:
        return tuple(Cell(*key, _STATES[state]) for key, state in sorted(self._states.items()))


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


class _Holdings:
    """The first owners of each partition, and their number in all."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: dict[Which, list[Row]] = defaultdict(list)
        self._counts: Counter[Which] = Counter()

    def read(self, row: Row) -> None:
        which = row["topic"], row["partition"]
        self._counts[which] += 1
        self._keep(which, [row], 2 * self._most)

    def add(self, other: _Holdings) -> None:
        self._counts.update(other._counts)
        for which, rows in other._rows.items():
            self._keep(which, rows, self._most)

    def _keep(self, which: Which, rows: Sequence[Row], room: int) -> None:
        self._rows[which] += rows
        if len(self._rows[which]) > room:
            self._rows[which] = self._first(which)

    def _first(self, which: Which) -> list[Row]:
        names = ("first_acked_at", "revision", "owner")
        return heapq.nsmallest(self._most, self._rows[which], key=lambda row: tuple(row[name] for name in names))

    def first(self) -> tuple[Holding, ...]:
        names = ("topic", "partition", "owner", "revision", "first_acked_at", "last_acked_at", "records")
        return tuple(
            Holding(*(row[name] for name in names)) for which in sorted(self._rows) for row in self._first(which)
        )

    def hidden(self) -> int:
        return sum(max(0, count - self._most) for count in self._counts.values())


def _column(grid: Grid, ms: int) -> int:
    """Return the step of the grid that a time is in; times outside count in the first or last one."""
    return min(max((ms - grid.start_ms) // grid.step_ms, 0), grid.columns - 1)

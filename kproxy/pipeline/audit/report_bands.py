"""The report's plots with a row for each partition: whether all is there, and who acknowledged it.

States and owners are told apart by hatching, marks and labels as well as by colour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from kproxy.pipeline.audit.report_axes import (
    DAY_MS,
    LETTER_PT,
    RIGHT_IN,
    Plot,
    axes_on,
    boxes_path,
    drawn_twice,
    in_order,
    mark,
    name_rows,
    not_drawn,
    owner_numbers,
    owner_style,
    row_labels,
    time_axis,
)
from kproxy.pipeline.audit.report_facts import Facts, Grid, Holding, Partition, State
from kproxy.pipeline.audit.report_svg import POINTS_PER_INCH, colour
from kproxy.pipeline.audit.report_words import STATE_NAMES, counted, duration
from kproxy.pipeline.audit.schemas import LOST, OVERLAP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIMELINES_AT_MOST: Final = 20
LANES_AT_MOST: Final = 3
BAR_TALL: Final = 0.42
# What is marked in a cell of the state, and on a partition's bars: mark, colour, and what is said of it.
STATE_MARKS: Final = {State.LOST: "x", State.OVERLAPPED: "D", State.DUPLICATED: "+"}
FINDING_MARKS: Final = {
    OVERLAP: ("D", "overlapped", "A diamond: offsets given out twice."),
    LOST: ("X", "lost", "A cross: records lost."),
}


def completeness(facts: Facts, grid: Grid) -> Plot:
    drawn = in_order(facts, {(cell.topic, cell.partition) for cell in facts.cells})
    states = {(cell.topic, cell.partition, cell.column): cell.state for cell in facts.cells}
    rows = [
        [states.get((one.topic, one.partition, column), State.NOTHING) for column in range(grid.columns)]
        for one in drawn
    ]
    names = [one.name for one in drawn]
    if facts.trail_holes:
        holes = set(facts.trail_holes)
        rows.insert(0, [State.UNPROVEN if column in holes else State.NOTHING for column in range(grid.columns)])
        names.insert(0, "trails")
    height = 0.75 + 0.24 * max(len(rows), 2)

    def paint(figure: Figure, wide: bool) -> None:
        labels, left_in = row_labels(names, wide=wide)
        axes = axes_on(figure, left_in=left_in)
        name_rows(axes, labels)
        for state in State:
            _paint_state(axes, grid, rows, state)
        time_axis(axes, grid.start_ms, grid.end_ms, wide=wide)

    seen = {state: sum(row.count(state) for row in rows[1 if facts.trail_holes else 0 :]) for state in State}
    told = ", ".join(f"{seen[state]:,} {STATE_NAMES[state]}" for state in reversed(State) if seen[state])
    step = f"steps of {duration(grid.step_ms)}"
    wide, narrow = drawn_twice("completeness", height, paint)
    return Plot(
        name="completeness",
        title="Completeness",
        caption=f"Each partition over time, in {step}, the worst of a step shown."
        + (" The row “trails” shows when a proxy's own record has a hole." if facts.trail_holes else "")
        + not_drawn(facts, len(drawn)),
        alternative=f"{counted(len(drawn), 'partition')} in {counted(grid.columns, 'step')}: {told}.",
        wide=wide,
        narrow=narrow,
    )


def _paint_state(axes: Axes, grid: Grid, rows: Sequence[Sequence[State]], state: State) -> None:
    """All cells of one state, neighbours joined."""
    from matplotlib.patches import PathPatch

    runs = [(y, begin, end) for y, row in enumerate(rows) for begin, end in _runs(row, state)]
    if not runs:
        return
    left, step = grid.start_ms / DAY_MS, grid.step_ms / DAY_MS
    half = 0.06 if state is State.NOTHING else 0.4
    boxes = [(left + begin * step, left + end * step, y - half, y + half) for y, begin, end in runs]
    fill = colour("line" if state is State.NOTHING else state.value)
    hatched = {"hatch": "/////", "hatchcolor": colour("hatch")} if state is State.UNPROVEN else {}
    axes.add_patch(PathPatch(boxes_path(boxes), facecolor=fill, edgecolor="none", linewidth=0, **hatched))
    if state in STATE_MARKS:
        middles = [(left + (column + 0.5) * step, y) for y, begin, end in runs for column in range(begin, end)]
        mark(axes, middles, STATE_MARKS[state], colour("paper"), size=4.0)


def _runs(row: Sequence[State], state: State) -> list[tuple[int, int]]:
    """Where `row` has `state`: first column and the one behind the last, for each stretch."""
    edges = [at for at in range(len(row) + 1) if _is(row, at, state) != _is(row, at - 1, state)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _is(row: Sequence[State], at: int, state: State) -> bool:
    return 0 <= at < len(row) and row[at] is state


def ownership(facts: Facts, grid: Grid) -> Plot:
    held = defaultdict(list)
    for holding in facts.holdings:
        held[holding.topic, holding.partition].append(holding)
    worst = [(one.topic, one.partition) for one in facts.partitions if (one.topic, one.partition) in held]
    drawn = in_order(facts, set(worst[:TIMELINES_AT_MOST]))
    shown = [holding for one in drawn for holding in held[one.topic, one.partition]]
    begin = min([grid.start_ms, *(holding.first_ms for holding in shown)])
    end = max([grid.end_ms, *(holding.last_ms for holding in shown)])
    numbers = owner_numbers(facts)
    lanes = [_lanes(held[one.topic, one.partition]) for one in drawn]
    # Two owners at once lie under each other, which takes room.
    tops = [0.0, *accumulate(0.45 + 0.45 * (max(row) + 1) for row in lanes)]
    marks = _marks(facts, drawn, tops)

    def paint(figure: Figure, wide: bool) -> None:
        labels, left_in = row_labels([one.name for one in drawn], wide=wide)
        axes = axes_on(figure, left_in=left_in)
        name_rows(axes, labels)
        axes.set_ylim(tops[-1], 0)
        axes.set_yticks([top + 0.23 + 0.225 * (max(row) + 1) for top, row in zip(tops, lanes, strict=False)], labels)
        ms_per_point = (end - begin) / ((figure.get_size_inches()[0] - left_in - RIGHT_IN) * POINTS_PER_INCH)
        bars = [
            _Bar(holding, top + 0.25 + 0.45 * lane, ms_per_point)
            for one, top, row in zip(drawn, tops, lanes, strict=False)
            for holding, lane in zip(held[one.topic, one.partition], row, strict=True)
        ]
        _paint_bars(axes, bars, numbers)
        for kind, (shape, shade, _) in FINDING_MARKS.items():
            if marks[kind]:
                mark(axes, marks[kind], shape, colour(shade), size=7.5)
        time_axis(axes, begin, end, wide=wide)

    wide, narrow = drawn_twice("ownership", 0.65 + 0.44 * max(tops[-1], 2), paint)
    changes = sum(one.sums.ownership_changes for one in drawn)
    told = " ".join(name for kind, (_, _, name) in FINDING_MARKS.items() if marks[kind])
    hidden = counted(facts.hidden_holdings, "more stretch", "more stretches")
    return Plot(
        name="ownership",
        title="Who acknowledged when",
        caption="One bar for each owner and ownership revision (r), from its first acknowledgement to its last. "
        + told
        + (f" {hidden} of ownership did not fit." if facts.hidden_holdings else "")
        + not_drawn(facts, len(drawn)),
        alternative=f"{counted(len(drawn), 'partition')}, {counted(len(shown), 'stretch', 'stretches')} of ownership, "
        f"{counted(changes, 'change')} of owner; the table of partitions names the owners.",
        wide=wide,
        narrow=narrow,
    )


def _marks(facts: Facts, drawn: Sequence[Partition], tops: Sequence[float]) -> dict[str, list[tuple[float, float]]]:
    marks: dict[str, list[tuple[float, float]]] = {kind: [] for kind in FINDING_MARKS}
    rows = {(one.topic, one.partition): top for one, top in zip(drawn, tops, strict=False)}
    for found in facts.findings:
        if found.kind not in marks or found.topic is None or found.partition is None or found.from_ms is None:
            continue
        if (found.topic, found.partition) in rows:
            marks[found.kind].append((found.from_ms / DAY_MS, rows[found.topic, found.partition] + 0.12))
    return marks


class _Bar:
    """A holding where it is drawn: in days since the epoch and in rows; at least two points wide, or nobody sees it."""

    def __init__(self, holding: Holding, top: float, ms_per_point: float) -> None:
        self.owner = holding.owner
        self.left = holding.first_ms / DAY_MS
        self.right = max(holding.last_ms, holding.first_ms + 2 * ms_per_point) / DAY_MS
        self.top = top
        self.bottom = top + BAR_TALL
        points = (self.right - self.left) * DAY_MS / ms_per_point if ms_per_point else 0
        names = (
            f"broker {holding.owner} r{holding.revision}",
            f"{holding.owner} r{holding.revision}",
            str(holding.owner),
        )
        self.label = next((name for name in names if len(name) * LETTER_PT + 4 < points), "")


def _paint_bars(axes: Axes, bars: Sequence[_Bar], numbers: dict[int | None, int]) -> None:
    from matplotlib.patches import PathPatch

    of_number = defaultdict(list)
    for bar in bars:
        of_number[numbers[bar.owner]].append((bar.left, bar.right, bar.top, bar.bottom))
    for number, boxes in sorted(of_number.items()):
        axes.add_patch(PathPatch(boxes_path(boxes), **owner_style(number)))
    ticks = boxes_path([(bar.left, bar.left, bar.top, bar.bottom) for bar in bars])
    axes.add_patch(PathPatch(ticks, facecolor="none", edgecolor=colour("ink"), linewidth=1.2))
    for bar in bars:
        if bar.label:
            middle = (bar.left, (bar.top + bar.bottom) / 2)
            axes.annotate(bar.label, middle, xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)


def _lanes(holdings: Sequence[Holding]) -> list[int]:
    ends: list[int] = []
    lanes = []
    for holding in holdings:
        free = [lane for lane, end in enumerate(ends) if end <= holding.first_ms]
        lane = free[0] if free else min(len(ends), LANES_AT_MOST - 1)
        if lane == len(ends):
            ends.append(holding.last_ms)
        ends[lane] = max(ends[lane], holding.last_ms)
        lanes.append(lane)
    return lanes

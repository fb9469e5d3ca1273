"""Draw the report's plots as SVG for the inside of an HTML page.

Two plots: the state of each partition over time, and its owners over time. matplotlib is imported when the first plot
is drawn, never before. It ignores the user's settings, opens no window, and gives the same text for the same facts: no
date, no random ids.

Colours have names (`colour("lost")`). They are drawn as placeholders and written as CSS variables (`var(--lost)`), so
one drawing fits light and dark pages. Text stays text, for screen readers, search and copying. States and owners also
differ by hatching, marks and labels, not by colour alone.
"""

from __future__ import annotations

import io
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from kproxy.pipeline.audit.report_facts import Facts, Grid, Holding, Partition, State
from kproxy.pipeline.audit.report_text import STATE_NAMES, counted, duration, printable, shortened, utc
from kproxy.pipeline.audit.schemas import LOST, OVERLAP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path


OWNER_COLOURS: Final = 9
_NAMES: Final = (
    *("paper", "ink", "muted", "line", "complete", "removed", "unproven", "duplicated", "overlapped", "lost", "hatch"),
    *(f"owner-{number}" for number in range(OWNER_COLOURS)),
)
# Nearly black, one for each name; nothing else is drawn in these colours.
_PLACEHOLDERS: Final = {name: f"#0102{number:02x}" for number, name in enumerate(_NAMES, 16)}

POINTS_PER_INCH: Final = 72
_SETTINGS: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.edgecolor": _PLACEHOLDERS["line"],
    "axes.labelcolor": _PLACEHOLDERS["muted"],
    "xtick.color": _PLACEHOLDERS["line"],
    "ytick.color": _PLACEHOLDERS["line"],
    "xtick.labelcolor": _PLACEHOLDERS["muted"],
    "ytick.labelcolor": _PLACEHOLDERS["ink"],
    "text.color": _PLACEHOLDERS["ink"],
    "grid.color": _PLACEHOLDERS["line"],
    "grid.linewidth": 0.5,
    "hatch.linewidth": 1.0,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "path.simplify": True,
    "timezone": "UTC",
}
_TAG: Final = re.compile(r"<[^>]*>")
_LONG_FLOAT: Final = re.compile(r"-?\d+\.\d{3,}")
_FONT: Final = re.compile(r"font-family: [^;\"]*;?\s*")
_ID: Final = re.compile(r'(\bid="|href="#|url\(#)')
# SVG allows CSS variables in a style, but not in every attribute.
_FILL: Final = re.compile(r'fill="(#0102[0-9a-f]{2})"')
_NAMESPACE: Final = re.compile(r'\sxmlns(?::\w+)?="[^"]*"')


def colour(name: str) -> str:
    return _PLACEHOLDERS[name]


def draw(name: str, width: float, height: float, paint: Callable[[Figure], None]) -> str:
    """Return the `<svg>` element that `paint` draws; `width` and `height` in inches, `name` prefixes its ids."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    text = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The font lacks a letter. The browser uses another font anyway.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        settings: Any = {**_SETTINGS, "svg.hashsalt": name}
        matplotlib.rcParams.update(settings)
        figure = Figure(figsize=(width, height), facecolor="none")
        FigureCanvasSVG(figure)
        paint(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing, facecolor="none")
    return _for_a_page(text.getvalue(), name)


def _for_a_page(svg: str, name: str) -> str:
    """Remove prologue, namespaces and sizes, which only a file needs; prefix ids and insert the page's colours."""
    svg = svg[svg.index("<svg") :]
    # matplotlib's style sheet would apply to the whole page. The page has the same rules for drawings.
    for element in ("metadata", "style"):
        svg = re.sub(rf"<{element}\b.*?</{element}>", "", svg, flags=re.DOTALL)
    names = {placeholder: f"var(--{own})" for own, placeholder in _PLACEHOLDERS.items()}

    def rewrite(match: re.Match[str]) -> str:
        tag = _NAMESPACE.sub("", match[0]).replace("xlink:href", "href")
        if tag.startswith("<svg"):
            tag = re.sub(r'\s(?:width|height|version)="[^"]*"', "", tag)
        tag = _LONG_FLOAT.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag)
        tag = _FONT.sub("", tag)
        tag = _FILL.sub(r'style="fill: \1"', tag)
        tag = _ID.sub(rf"\g<1>{name}-", tag)
        return re.sub(r"#0102[0-9a-f]{2}", lambda hexadecimal: names.get(hexadecimal[0], hexadecimal[0]), tag)

    return _TAG.sub(rewrite, svg).strip()


WIDE_IN: Final = 10.4
NARROW_IN: Final = 5.2
# Room for half of the last tick label.
RIGHT_IN: Final = 0.3
_BOTTOM_IN = 0.5
DAY_MS: Final = 86_400_000
# Later times are beyond matplotlib's calendar.
LAST_DATE_MS: Final = 253_000_000_000_000
LETTER_PT: Final = 6.0
HATCHES: Final = ("", "//", "\\\\", "--", "||", "xx", "++", "////", "--||")


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot, drawn for wide and for narrow screens. `alternative` is its text for screen readers."""

    name: str
    title: str
    caption: str
    alternative: str
    wide: str
    narrow: str


def drawn_twice(name: str, height_in: float, paint: Callable[[Figure, bool], None]) -> tuple[str, str]:
    wide = draw(f"{name}-wide", WIDE_IN, height_in, lambda figure: paint(figure, True))
    return wide, draw(f"{name}-narrow", NARROW_IN, height_in, lambda figure: paint(figure, False))


def axes_on(figure: Figure, *, left_in: float, top_in: float = 0.15) -> Axes:
    width, height = figure.get_size_inches()
    return figure.add_axes(
        (
            left_in / width,
            _BOTTOM_IN / height,
            (width - left_in - RIGHT_IN) / width,
            (height - top_in - _BOTTOM_IN) / height,
        )
    )


def time_axis(axes: Axes, begin_ms: int, end_ms: int, *, wide: bool) -> None:
    """Set up an x axis of days since the epoch. Ticks show the clock or the date, whichever differs; UTC."""
    from matplotlib.dates import DAILY, HOURLY, MINUTELY, MONTHLY, SECONDLY, AutoDateLocator
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    end_ms = max(end_ms, begin_ms + 1)
    axes.set_xlim(begin_ms / DAY_MS, end_ms / DAY_MS)
    if begin_ms < 0 or end_ms > LAST_DATE_MS:
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda days, _: duration(days * DAY_MS - begin_ms)))
        axes.set_xlabel(f"since {utc(begin_ms)} UTC")
        return
    locator = AutoDateLocator(tz="UTC", minticks=3, maxticks=8 if wide else 4)  # type: ignore[no-untyped-call]
    # The locator's largest steps (30 s, 30 min, …) give too many ticks for axes just below the next unit's range.
    for unit, next_unit in ((SECONDLY, 60), (MINUTELY, 60), (HOURLY, 24), (DAILY, 31), (MONTHLY, 12)):
        locator.intervald[unit] = [*locator.intervald[unit], next_unit]
    axes.xaxis.set_major_locator(locator)
    part = next(part for longest_ms, part in _SHOWN if end_ms - begin_ms <= longest_ms)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda days, _: utc(round(days * DAY_MS))[part]))
    day, last_day = utc(begin_ms)[:10], utc(max(begin_ms, end_ms - 1))[:10]
    axes.set_xlabel(f"{day} (UTC)" if day == last_day else f"{day} to {last_day} (UTC)")


# The longest axis in ms, and the part of `2026-11-21 20:15:00.250` that its ticks show.
_SHOWN: Final = (
    (5_000, slice(11, 23)),
    (600_000, slice(11, 19)),
    (DAY_MS, slice(11, 16)),
    (4 * DAY_MS, slice(5, 16)),
    (1000 * DAY_MS, slice(0, 10)),
    (float("inf"), slice(0, 7)),
)


def row_labels(names: Sequence[str], *, wide: bool) -> tuple[list[str], float]:
    """Return the names, shortened to fit beside a plot, and their width in inches."""
    cut = [shortened(printable(name), 34 if wide else 16) for name in names]
    return cut, 0.25 + max((len(name) for name in cut), default=0) * LETTER_PT / POINTS_PER_INCH


def name_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def mark(axes: Axes, at: Sequence[tuple[float, float]], mark: str, shade: str, *, size: float) -> None:
    x, y = zip(*at, strict=True)
    axes.plot(x, y, linestyle="none", marker=mark, markersize=size, color=shade, markeredgewidth=1.4, clip_on=False)


def boxes_path(boxes: Sequence[tuple[float, float, float, float]]) -> Path:
    """Join rectangles (left, right, top, bottom) into one path, so that thousands are one small element."""
    from matplotlib.path import Path

    corners = [((a, c), (b, c), (b, d), (a, d), (a, c)) for a, b, c, d in boxes]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    return Path([corner for box in corners for corner in box], codes)


def in_order(facts: Facts, keys: set[tuple[str, int]]) -> list[Partition]:
    """Return the partitions `keys`, sorted by name."""
    chosen = [one for one in facts.partitions if (one.topic, one.partition) in keys]
    return sorted(chosen, key=lambda one: (one.topic, one.partition))


def not_drawn(facts: Facts, drawn: int) -> str:
    hidden = facts.sums.partitions - drawn
    return f" Not drawn: {counted(hidden, 'partition')}, none worse than these." if hidden > 0 else ""


def owner_numbers(facts: Facts) -> dict[int | None, int]:
    """Return each owner's number, which selects its colour and hatching in all plots."""
    owners = sorted({one.owner for one in facts.holdings})
    return {**{owner: place % (OWNER_COLOURS - 1) for place, owner in enumerate(owners)}, None: OWNER_COLOURS - 1}


def owner_style(number: int) -> dict[str, Any]:
    return {
        "facecolor": colour(f"owner-{number}"),
        "edgecolor": colour("paper"),
        "hatch": HATCHES[number],
        "hatchcolor": colour("hatch"),
        "linewidth": 0.8,
    }


TIMELINES_AT_MOST: Final = 20
LANES_AT_MOST: Final = 3
BAR_TALL: Final = 0.42
# Marks in the cells of a state, and on a partition's bars: mark, colour, and its text in the caption.
STATE_MARKS: Final = {State.LOST: "x", State.OVERLAPPED: "D", State.DUPLICATED: "+"}
FINDING_MARKS: Final = {
    OVERLAP: ("D", "overlapped", "A diamond: offsets assigned twice."),
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
        + (" The row “trails” shows when a proxy's trail has a gap." if facts.trail_holes else "")
        + not_drawn(facts, len(drawn)),
        alternative=f"{counted(len(drawn), 'partition')} in {counted(grid.columns, 'step')}: {told}.",
        wide=wide,
        narrow=narrow,
    )


def _paint_state(axes: Axes, grid: Grid, rows: Sequence[Sequence[State]], state: State) -> None:
    """Draw all cells of one state, neighbours joined."""
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
    """Return the half-open runs of columns in which `row` has `state`."""
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
    # Bars of owners at the same time are drawn below each other, so such a row is taller.
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
    """The place of a holding, in days since the epoch and in rows; at least two points wide, to be visible."""

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


def plots(facts: Facts) -> list[Plot]:
    """Draw the plots for which there is data."""
    if facts.grid is None:
        return []
    made = []
    if facts.cells:
        made.append(completeness(facts, facts.grid))
    if facts.holdings:
        made.append(ownership(facts, facts.grid))
    return made

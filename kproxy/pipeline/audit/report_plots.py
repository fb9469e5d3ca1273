"""Draw the report's two plots: the state of each partition over time, and the owners who acknowledged over time.

A plot is a table with a row for each partition: its name, and a drawing of the time. Drawings have their heights in
pixels and their places in time in percent, so that one drawing fits phones and desktops and its text keeps its size.
Colours are variables of the page's style sheet, for light and dark pages; states and owners also differ by hatching,
and each bar has a title.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from kproxy.pipeline.audit.report_facts import Facts, Grid, Holding, State
from kproxy.pipeline.audit.report_text import (
    STATE_NAMES,
    counted,
    duration,
    escaped,
    owner_in_words,
    printable,
    shortened,
    span_in_words,
    utc,
)

# Strokes in a tile of 8 by 8 pixels. Those of faults have the colour of the paper.
_RISING: Final = "M-1 1L1-1M0 8L8 0M7 9L9 7"
_FALLING: Final = "M-1 7L1 9M0 0L8 8M7-1L9 1"
_LEVEL: Final = "M0 4H8"
_UPRIGHT: Final = "M4 0V8"
OWNER_HATCHES: Final = (
    *("", _RISING, _FALLING, _LEVEL, _UPRIGHT, _RISING + _FALLING, _LEVEL + _UPRIGHT, "M2 0V8M6 0V8"),
)
STATE_HATCHES: Final = {
    State.COMPLETE: ("", "hatch"),
    State.REMOVED: (_LEVEL, "hatch"),
    State.UNPROVEN: (_RISING, "hatch"),
    State.DUPLICATED: ("M4 1V7M1 4H7", "paper"),
    State.OVERLAPPED: ("M4 1L7 4L4 7L1 4z", "paper"),
    State.LOST: ("M1 1L7 7M7 1L1 7", "paper"),
}
ROW_PX: Final = 20
BAR_PX: Final = 16
NAME_AT_MOST: Final = 36
TIMELINES_AT_MOST: Final = 20
LANES_AT_MOST: Final = 3
# The pixels for a percent of the time on a phone. What fits there fits everywhere.
PERCENT_PX: Final = 3.4
LETTER_PX: Final = 7

DAY_MS: Final = 86_400_000
LAST_DATE_MS: Final = 253_402_300_799_999
TICKS_AT_MOST: Final = 5
_STEPS: Final = (
    *(unit * count for unit in (1, 10, 100) for count in (1, 2, 5)),
    *(unit * count for unit in (1000, 60_000) for count in (1, 2, 5, 10, 15, 30)),
    *(3_600_000 * count for count in (1, 2, 3, 6, 12)),
    *(DAY_MS * count * 10**power for power in range(7) for count in (1, 2, 5)),
)
# The longest time in ms, and the part of `2026-11-21 20:15:00.250` that its ticks show.
_SHOWN: Final = (
    *((5_000, slice(11, 23)), (600_000, slice(11, 19)), (DAY_MS, slice(11, 16)), (4 * DAY_MS, slice(5, 16))),
    (float("inf"), slice(0, 10)),
)


@dataclass(frozen=True, slots=True)
class Time:
    """The time that a plot shows."""

    begin_ms: int
    end_ms: int

    def percent(self, ms: float) -> float:
        return round((ms - self.begin_ms) * 100 / max(1, self.end_ms - self.begin_ms), 2)

    def ticks(self) -> tuple[str, list[tuple[float, str]]]:
        """Return the days, and a few round times as (percent, label); beyond the calendar only the first time."""
        if self.begin_ms < 0 or self.end_ms > LAST_DATE_MS:
            return "UTC", [(0.0, utc(self.begin_ms))]
        long_ms = max(1, self.end_ms - self.begin_ms)
        step = next(step for step in _STEPS if long_ms < step * TICKS_AT_MOST)
        part = next(part for longest_ms, part in _SHOWN if long_ms <= longest_ms)
        times = range(-(-self.begin_ms // step) * step, self.end_ms + 1, step)
        first, last = utc(self.begin_ms)[:10], utc(self.begin_ms + long_ms - 1)[:10]
        days = f"{first} (UTC)" if first == last else f"{first} to {last} (UTC)"
        return days, [(self.percent(ms), utc(ms)[part]) for ms in times]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a row. `labels`: texts to write into it, of which the first that fits is taken; it has an edge then."""

    from_ms: int
    to_ms: int
    fill: str
    title: str
    height: int = BAR_PX
    labels: Sequence[str] = ()

    def drawn(self, time: Time, lane: int) -> str:
        left, right = time.percent(self.from_ms), time.percent(self.to_ms)
        top = lane * ROW_PX + (ROW_PX - self.height) / 2
        drawing = (
            f'<rect x="{left:g}%" y="{top:g}" width="{right - left:.4g}%" height="{self.height}" fill="{self.fill}">'
            f"<title>{escaped(self.title)}, {span_in_words(self.from_ms, self.to_ms)}</title></rect>"
        )
        if self.labels:
            drawing += f'<rect class="edge" x="{left:g}%" y="{top:g}" width="1.5" height="{self.height}"/>'
        room = (right - left) * PERCENT_PX
        if label := next((label for label in self.labels if len(label) * LETTER_PX + 6 < room), ""):
            drawing += f'<text x="{left:g}%" dx="5" y="{top + self.height - 4:g}">{label}</text>'
        return drawing


# A row of a plot: the partition, what the drawing shows for screen readers, the bars.
Row = tuple[str, str, Sequence[Bar]]


def plots(facts: Facts) -> str:
    """Return the plots for which there is data, as HTML."""
    grid = facts.grid
    if grid is None:
        return ""
    tiles = {state.value: hatch for state, hatch in STATE_HATCHES.items()}
    tiles |= {f"owner-{number}": (strokes, "hatch") for number, strokes in enumerate(OWNER_HATCHES)}
    patterns = "".join(
        f'<pattern id="{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" style="fill:var(--{name})"/><path d="{strokes}" style="stroke:var(--{colour})"/>'
        "</pattern>"
        for name, (strokes, colour) in tiles.items()
    )
    return (
        f'<svg class="patterns" width="0" height="0" aria-hidden="true">{patterns}</svg>'
        f"{_completeness(facts, grid) if facts.states else ''}{_ownership(facts, grid) if facts.holdings else ''}"
    )


def _plot(name: str, title: str, caption: str, key: Iterable[tuple[str, str]], time: Time, rows: Iterable[Row]) -> str:
    """Return a plot; `key` has the fills of the legend and their meanings."""
    days, ticks = time.ticks()
    lines = "".join(f'<line x1="{at:g}%" x2="{at:g}%" y2="100%"/>' for at, _ in ticks)
    labels = "".join(
        f'<text x="{at:g}%" y="14" text-anchor="{"start" if at < 10 else "end" if at > 90 else "middle"}">'
        f"{label}</text>"
        for at, label in ticks
    )
    keys = "".join(
        f'<li><svg width="16" height="16" aria-hidden="true"><rect width="16" height="16" fill="{fill}"/></svg>'
        f"{escaped(text)}</li>"
        for fill, text in key
    )
    body = ""
    for row, told, bars in rows:
        lanes = _lanes(bars)
        drawing = "".join(bar.drawn(time, lane) for bar, lane in zip(bars, lanes, strict=True))
        body += (
            f'<tr><th scope="row">{escaped(shortened(printable(row), NAME_AT_MOST))}</th><td>'
            f'<svg height="{(max(lanes) + 1) * ROW_PX}" role="img"><title>{escaped(f"{row}: {told}")}</title>{lines}'
            f"{drawing}</svg></td></tr>"
        )
    return (
        f'<h2 id="{name}">{title}</h2><figure aria-labelledby="{name}"><figcaption>{escaped(caption)}</figcaption>'
        f'<ul class="key">{keys}</ul><table class="plot"><tbody>{body}</tbody><tfoot><tr><th>{days}</th>'
        f'<td><svg height="20" aria-hidden="true">{labels}</svg></td></tr></tfoot></table></figure>'
    )


def _lanes(bars: Sequence[Bar]) -> list[int]:
    """Return the lane of each bar: bars that overlap in time are in different lanes."""
    ends: list[int] = []
    lanes = []
    for bar in bars:
        free = [lane for lane, end in enumerate(ends) if end <= bar.from_ms]
        lane = free[0] if free else min(len(ends), LANES_AT_MOST - 1)
        if lane == len(ends):
            ends.append(bar.to_ms)
        ends[lane] = max(ends[lane], bar.to_ms)
        lanes.append(lane)
    return lanes


def _not_drawn(facts: Facts, drawn: int) -> str:
    hidden = facts.sums.partitions - drawn
    return f" Not drawn: {counted(hidden, 'partition')}, none worse than these." if hidden > 0 else ""


def _completeness(facts: Facts, grid: Grid) -> str:
    rows = {f"{topic}/{partition}": states for (topic, partition), states in sorted(facts.states.items())}
    caption = f"Each partition over time, in steps of {duration(grid.step_ms)}, the worst of a step shown."
    if facts.trail_holes:
        holes = [State.UNPROVEN if at in facts.trail_holes else State.NOTHING for at in range(grid.columns)]
        rows = {"trails": holes, **rows}
        caption += " The row “trails” shows when a proxy's trail has a gap."
    seen = {state for row in rows.values() for state in row}
    return _plot(
        "completeness",
        "Completeness",
        caption + _not_drawn(facts, len(facts.states)),
        [(_fill(state), STATE_NAMES[state]) for state in reversed(State) if state in seen],
        Time(grid.start_ms, grid.end_ms),
        [_states(name, grid, row) for name, row in rows.items()],
    )


def _fill(state: State) -> str:
    return "var(--line)" if state is State.NOTHING else f"url(#{state.value})"


def _states(name: str, grid: Grid, states: Sequence[State]) -> Row:
    """Return the plot's row of states, with equal neighbours joined."""
    bars, begin = [], grid.start_ms
    for state, run in groupby(states):
        end = begin + grid.step_ms * len(list(run))
        height = 2 if state is State.NOTHING else BAR_PX
        bars.append(Bar(begin, end, _fill(state), STATE_NAMES[state], height))
        begin = end
    counts = [(states.count(state), STATE_NAMES[state]) for state in reversed(State) if state in states]
    told = ", ".join(f"{count:,} {state}" for count, state in counts)
    return name, f"of {counted(grid.columns, 'step')} {told}", bars


def _ownership(facts: Facts, grid: Grid) -> str:
    worst = [one.which for one in facts.partitions if one.which in facts.holdings]
    drawn = {which: facts.holdings[which] for which in sorted(worst[:TIMELINES_AT_MOST])}
    shown = [holding for each in drawn.values() for holding in each]
    time = Time(
        min([grid.start_ms, *(holding.first_ms for holding in shown)]),
        max([grid.end_ms, *(holding.last_ms for holding in shown)]),
    )
    owners = sorted({holding.owner for holding in shown})
    fills = {owner: f"url(#owner-{place % len(OWNER_HATCHES)})" for place, owner in enumerate(owners)}
    caption = "One bar for each owner and ownership revision (r), from its first acknowledgement to its last."
    if facts.hidden_holdings:
        caption += f" {counted(facts.hidden_holdings, 'more stretch', 'more stretches')} of ownership did not fit."
    return _plot(
        "ownership",
        "Who acknowledged when",
        caption + _not_drawn(facts, len(drawn)),
        # With more owners, several have the same fill.
        [(fills[owner], f"broker {owner}") for owner in owners if len(owners) <= len(OWNER_HATCHES)],
        time,
        [_owners(f"{topic}/{partition}", each, fills) for (topic, partition), each in drawn.items()],
    )


def _owners(name: str, holdings: Sequence[Holding], fills: Mapping[int, str]) -> Row:
    bars = [
        Bar(
            one.first_ms,
            one.last_ms,
            fills[one.owner],
            f"{owner_in_words(one.owner, one.revision)}, {counted(one.records, 'record')}",
            labels=(f"broker {one.owner} r{one.revision}", f"{one.owner} r{one.revision}", str(one.owner)),
        )
        for one in holdings
    ]
    return name, ", ".join(owner_in_words(one.owner, one.revision) for one in holdings), bars

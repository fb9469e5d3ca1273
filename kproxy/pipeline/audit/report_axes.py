"""What the report's plots have in common: their two sizes, axes, rows with names, marks, and the looks of owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kproxy.pipeline.audit.report_facts import Facts, Partition
from kproxy.pipeline.audit.report_svg import OWNER_COLOURS, POINTS_PER_INCH, colour, draw
from kproxy.pipeline.audit.report_words import counted, duration, printable, shortened, utc

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path

WIDE_IN: Final = 10.4
NARROW_IN: Final = 5.2
# Room for half of the last time's label.
RIGHT_IN: Final = 0.3
DAY_MS: Final = 86_400_000
# Beyond the calendar that dates are drawn with.
LAST_DATE_MS: Final = 253_000_000_000_000
LETTER_PT: Final = 6.0
HATCHES: Final = ("", "//", "\\\\", "--", "||", "xx", "++", "////", "--||")


@dataclass(frozen=True, slots=True)
class Plot:
    """One drawing, for wide and for narrow screens. `alternative` is for who cannot see it."""

    name: str
    title: str
    caption: str
    alternative: str
    wide: str
    narrow: str


def drawn_twice(name: str, height_in: float, paint: Callable[[Figure, bool], None]) -> tuple[str, str]:
    wide = draw(f"{name}-wide", WIDE_IN, height_in, lambda figure: paint(figure, True))
    return wide, draw(f"{name}-narrow", NARROW_IN, height_in, lambda figure: paint(figure, False))


def axes_on(figure: Figure, *, left_in: float, top_in: float = 0.15, bottom_in: float = 0.5) -> Axes:
    width, height = figure.get_size_inches()
    return figure.add_axes(
        (
            left_in / width,
            bottom_in / height,
            (width - left_in - RIGHT_IN) / width,
            (height - top_in - bottom_in) / height,
        )
    )


def time_axis(axes: Axes, begin_ms: int, end_ms: int, *, wide: bool) -> None:
    """Of times in days since the epoch: clock or date, whichever tells the ticks apart. In UTC, as its label says."""
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
    # Its steps end at half a minute and the like, which are too many ticks for what is not yet three minutes long.
    for unit, next_unit in ((SECONDLY, 60), (MINUTELY, 60), (HOURLY, 24), (DAILY, 31), (MONTHLY, 12)):
        locator.intervald[unit] = [*locator.intervald[unit], next_unit]
    axes.xaxis.set_major_locator(locator)
    part = next(part for longest_ms, part in _SHOWN if end_ms - begin_ms <= longest_ms)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda days, _: utc(round(days * DAY_MS))[part]))
    day, last_day = utc(begin_ms)[:10], utc(max(begin_ms, end_ms - 1))[:10]
    axes.set_xlabel(f"{day} (UTC)" if day == last_day else f"{day} to {last_day} (UTC)")


# What of `2026-11-21 20:15:00.250` is written at the ticks of an axis that is at most so long.
_SHOWN: Final = (
    (5_000, slice(11, 23)),
    (600_000, slice(11, 19)),
    (DAY_MS, slice(11, 16)),
    (4 * DAY_MS, slice(5, 16)),
    (1000 * DAY_MS, slice(0, 10)),
    (float("inf"), slice(0, 7)),
)


def row_labels(names: Sequence[str], *, wide: bool) -> tuple[list[str], float]:
    """Names cut to what fits beside a plot, and how many inches that takes."""
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
    """Rectangles (left, right, top, bottom) as one path: thousands of them stay one small element."""
    from matplotlib.path import Path

    corners = [((a, c), (b, c), (b, d), (a, d), (a, c)) for a, b, c, d in boxes]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    return Path([corner for box in corners for corner in box], codes)


def in_order(facts: Facts, keys: set[tuple[str, int]]) -> list[Partition]:
    """By name, for eyes that look for one."""
    chosen = [one for one in facts.partitions if (one.topic, one.partition) in keys]
    return sorted(chosen, key=lambda one: (one.topic, one.partition))


def not_drawn(facts: Facts, drawn: int) -> str:
    hidden = facts.sums.partitions - drawn
    return f" Not drawn: {counted(hidden, 'partition')}, none worse than these." if hidden > 0 else ""


def owner_numbers(facts: Facts) -> dict[int | None, int]:
    """Which colour and hatching an owner has in all plots."""
    owners = sorted(
        {one.owner for one in facts.holdings} | {flow.owner for flow in facts.flows if flow.owner is not None}
    )
    return {**{owner: place % (OWNER_COLOURS - 1) for place, owner in enumerate(owners)}, None: OWNER_COLOURS - 1}


def owner_style(number: int) -> dict[str, Any]:
    return {
        "facecolor": colour(f"owner-{number}"),
        "edgecolor": colour("paper"),
        "hatch": HATCHES[number],
        "hatchcolor": colour("hatch"),
        "linewidth": 0.8,
    }


def owner_name(owner: int | None) -> str:
    return "other brokers" if owner is None else f"broker {owner}"

"""Plots of `bench.plain` as SVG files, in the style of the audit's report, for light and dark pages.

The report's plots use the colours of their page's style sheet. A file has its own style sheet, with the same values.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.plain_figures import DIRECT, HAPROXY, KPROXY, PERCENTILES, Figures
from kproxy.pipeline.audit.report_html import STYLE
from kproxy.pipeline.audit.report_plots import OWNER_COLOURS, axes_on, colour, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 9.0
HEIGHT_IN = 3.6
LEFT_IN = 0.9
_COLOURS = {DIRECT: "owner-8", HAPROXY: "owner-1", KPROXY: "owner-0"}
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif'
_VARIABLE = re.compile(r"(--[\w-]+):\s*([^;]+);")


def write_plots(figures: Figures, directory: Path) -> list[Path]:
    """Plot CPU time, its ratios to haproxy's if there are any, and latency; return the files written."""
    plots: dict[str, Callable[[Axes], None]] = {
        "plain-cpu": lambda axes: _paint_cpu(axes, figures),
        "plain-latency": lambda axes: _paint_latency(axes, figures),
    }
    if HAPROXY in figures.cpu:
        plots["plain-ratio"] = lambda axes: _paint_ratio(axes, figures)
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, paint in sorted(plots.items()):
        path = directory / f"{name}.svg"
        path.write_text(drawn(name, paint), encoding="utf-8")
        written.append(path)
    return written


def drawn(name: str, paint: Callable[[Axes], None]) -> str:
    """A whole SVG file."""

    def paint_figure(figure: Figure) -> None:
        paint(axes_on(figure, left_in=LEFT_IN, top_in=0.35))

    svg = draw(name, WIDTH_IN, HEIGHT_IN, paint_figure)
    size = f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH_IN * 96:.0f}" height="{HEIGHT_IN * 96:.0f}" '
    begin = svg.index(">") + 1
    head = svg[:begin].replace("<svg ", f"<svg {size}", 1)
    return f"{head}\n<style>{_style()}</style>\n{svg[begin:]}\n"


def _style() -> str:
    """The report's colours for light and for dark pages, and the relevant lines of matplotlib's style sheet."""
    light, _, dark = STYLE.partition("@media (prefers-color-scheme: dark)")
    dark = dark.partition("} }")[0]
    one, other = (" ".join(f"{name}:{value};" for name, value in _VARIABLE.findall(part)) for part in (light, dark))
    return (
        f"svg {{ {one} font-family: {_FONT}; background: var(--paper); }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {other} }} }} "
        "svg * { stroke-linejoin: round; stroke-linecap: butt; }"
    )


def _colour(name: str, number: int) -> str:
    """The colour of a contestant; peers have others than the rest."""
    return colour(_COLOURS.get(name, f"owner-{2 + number % (OWNER_COLOURS - 3)}"))


def _paint_bars(
    axes: Axes, groups: Sequence[str], values: dict[str, list[list[float]]], label: Callable[[float], str]
) -> None:
    """A bar for the median of each, with a line from the lowest to the highest."""
    wide = 0.8 / len(values)
    for number, (name, by_group) in enumerate(values.items()):
        places = [group + (number - (len(values) - 1) / 2) * wide for group in range(len(groups))]
        medians = [statistics.median(found) for found in by_group]
        axes.bar(
            places,
            medians,
            wide * 0.92,
            color=_colour(name, number),
            edgecolor=colour("ink"),
            linewidth=0.6,
            label=name,
        )
        axes.vlines(places, [min(f) for f in by_group], [max(f) for f in by_group], colors=colour("ink"), linewidth=1.2)
        for place, median, found in zip(places, medians, by_group, strict=True):
            axes.annotate(
                label(median),
                (place, max(found)),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                bbox={"facecolor": colour("paper"), "edgecolor": "none", "pad": 0.5},
            )
    axes.set_xticks(range(len(groups)), groups, color=colour("ink"))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(values), borderaxespad=0.1)


def _set_log_scale(axes: Axes, values: dict[str, list[list[float]]]) -> None:
    """Set an axis from the power of ten below the least value, with plain numbers at the powers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    found = [value for by_group in values.values() for group in by_group for value in group]
    axes.set_yscale("log")
    axes.set_ylim(10 ** math.floor(math.log10(min(found))), 1.8 * max(found))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _paint_cpu(axes: Axes, figures: Figures) -> None:
    shapes = [shape.name for shape in figures.shapes]
    values = {name: [by_shape[shape] for shape in shapes] for name, by_shape in figures.cpu.items()}
    _set_log_scale(axes, values)
    _paint_bars(axes, shapes, values, lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.1f}")
    axes.set_ylabel("CPU µs per request")
    axes.set_xlabel("partitions × batch of a request")


def _paint_ratio(axes: Axes, figures: Figures) -> None:
    shapes = [shape.name for shape in figures.shapes]
    floor = figures.cpu[HAPROXY]
    values = {
        name: [[one / other for one, other in zip(by_shape[shape], floor[shape], strict=True)] for shape in shapes]
        for name, by_shape in figures.cpu.items()
        if name != HAPROXY
    }
    _paint_bars(axes, shapes, values, lambda value: f"{value:.1f}×")
    axes.axhline(1.0, color=colour("ink"), linewidth=1.0, linestyle="--")
    axes.set_ylabel("CPU time × haproxy's")
    axes.set_xlabel("partitions × batch of a request")


def _paint_latency(axes: Axes, figures: Figures) -> None:
    values = {name: [found.of(percent) for percent in PERCENTILES] for name, found in figures.latency.items()}
    _set_log_scale(axes, values)
    _paint_bars(axes, [f"p{percent}" for percent in PERCENTILES], values, lambda value: f"{value:,.0f}")
    axes.set_ylabel(f"µs at {figures.rate:,} requests/s")

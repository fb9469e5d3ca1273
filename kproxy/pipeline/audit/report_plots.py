"""The report's plots of what flowed, and how fast; and the list of all plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kproxy.pipeline.audit.report_axes import (
    DAY_MS,
    Plot,
    axes_on,
    drawn_twice,
    owner_name,
    owner_numbers,
    owner_style,
    time_axis,
)
from kproxy.pipeline.audit.report_bands import completeness, ownership
from kproxy.pipeline.audit.report_facts import Facts, Flow, Grid, Latency
from kproxy.pipeline.audit.report_svg import colour
from kproxy.pipeline.audit.report_words import duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plots(facts: Facts) -> list[Plot]:
    """Those for which there is something to draw."""
    if facts.grid is None:
        return []
    made = []
    if facts.cells:
        made.append(completeness(facts, facts.grid))
    if facts.holdings:
        made.append(ownership(facts, facts.grid))
    if facts.flows:
        made.append(_throughput(facts, facts.grid))
    if facts.latencies:
        made.append(_latency(facts, facts.grid))
    return made


def _throughput(facts: Facts, grid: Grid) -> Plot:
    numbers = owner_numbers(facts)
    owners = sorted({flow.owner for flow in facts.flows}, key=lambda owner: (owner is None, owner or 0))
    rates = {owner: _rates(facts.flows, owner, grid) for owner in owners}

    def paint(figure: Figure, wide: bool) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        per_row = 5 if wide else 3
        legend_in = 0.24 * -(-len(owners) // per_row) + 0.1
        axes = axes_on(figure, left_in=0.75, top_in=legend_in)
        edges = [(grid.start_ms + column * grid.step_ms) / DAY_MS for column in range(grid.columns + 1)]
        below = [0.0] * (grid.columns + 1)
        for owner in owners:
            above = [low + rate for low, rate in zip(below, [*rates[owner], rates[owner][-1]], strict=True)]
            style = owner_style(numbers[owner])
            axes.fill_between(edges, below, above, step="post", label=owner_name(owner), **style)
            below = above
        axes.stairs(below[:-1], edges, color=colour("ink"), linewidth=1.0, baseline=None)
        axes.set_ylim(0, max(below) * 1.05 or 1)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: _short(rate)))
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.set_ylabel("records/s")
        time_axis(axes, grid.start_ms, grid.end_ms, wide=wide)
        figure.legend(
            loc="upper left", bbox_to_anchor=(0.0, 1.0), ncols=per_row, handlelength=1.6, columnspacing=1.2, borderpad=0
        )

    wide, narrow = drawn_twice("throughput", 3.0, paint)
    total = {owner: sum(flow.records for flow in facts.flows if flow.owner == owner) for owner in owners}
    told = ", ".join(f"{owner_name(owner)} {total[owner]:,}" for owner in owners)
    return Plot(
        name="throughput",
        title="Throughput by owner",
        caption=f"Acknowledged records a second, stacked, in steps of {duration(grid.step_ms)}.",
        alternative=f"Records acknowledged in all: {told}.",
        wide=wide,
        narrow=narrow,
    )


def _rates(flows: Sequence[Flow], owner: int | None, grid: Grid) -> list[float]:
    rates = [0.0] * grid.columns
    for flow in flows:
        if flow.owner == owner:
            rates[flow.column] += flow.records * 1000 / grid.step_ms
    return rates


def _short(rate: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:g} {unit}"
    return f"{rate:g}"


def _latency(facts: Facts, grid: Grid) -> Plot:
    lines: list[tuple[str, str, Any, float]] = [
        ("p50_ms", "median", "-", 2.2),
        ("p95_ms", "95 %", (0, (6, 2)), 1.6),
        ("p99_ms", "99 %", (0, (3, 1.5)), 1.6),
        ("max_ms", "longest", (0, (1, 1.2)), 1.3),
    ]

    def paint(figure: Figure, wide: bool) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axes = axes_on(figure, left_in=0.75, top_in=0.4)
        by_column = {latency.column: latency for latency in facts.latencies}
        middles = [(grid.start_ms + (column + 0.5) * grid.step_ms) / DAY_MS for column in range(grid.columns)]
        for name, label, dashes, thick in lines:
            values = [_or_nan(by_column.get(column), name) for column in range(grid.columns)]
            alone = "o" if len(by_column) * 8 < grid.columns or grid.columns < 3 else None
            axes.plot(
                middles,
                values,
                linestyle=dashes,
                linewidth=thick,
                marker=alone,
                markersize=4,
                color=colour("ink" if name == "p50_ms" else "muted"),
                label=label,
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: duration(ms)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        time_axis(axes, grid.start_ms, grid.end_ms, wide=wide)
        figure.legend(
            loc="upper left", bbox_to_anchor=(0.0, 1.0), ncols=4, handlelength=2.6, columnspacing=1.2, borderpad=0
        )

    wide, narrow = drawn_twice("latency", 2.8, paint)
    worst = max(facts.latencies, key=lambda latency: latency.p99_ms)
    highest = max(latency.max_ms for latency in facts.latencies)
    return Plot(
        name="latency",
        title="Time to acknowledge",
        caption="From a request's first byte to the broker's acknowledgement: in each step of "
        f"{duration(grid.step_ms)} the slowest partition's.",
        alternative=f"The 99th percentile is {duration(worst.p99_ms)} at its highest, the longest {duration(highest)}.",
        wide=wide,
        narrow=narrow,
    )


def _or_nan(latency: Latency | None, name: str) -> float:
    # A logarithmic axis has no place for nothing; a microsecond is less than can be measured here.
    return float("nan") if latency is None else max(float(getattr(latency, name)), 0.001)

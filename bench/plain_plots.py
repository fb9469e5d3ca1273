"""Draw the plots of `bench.plain` as SVG files, in the colours of the audit's report, for light and dark pages."""

from __future__ import annotations

import html
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.plain_figures import DIRECT, HAPROXY, KPROXY, PERCENTILES, Figures
from kproxy.pipeline.audit.report_html import TEMPLATE

WIDTH, HEIGHT = 864, 346
LEFT, RIGHT, TOP, BOTTOM = 80, 850, 40, 300
_COLOURS = {DIRECT: "removed", HAPROXY: "owner-1", KPROXY: "owner-0"}
# Of peers.
_OTHERS = ("owner-2", "owner-3", "owner-4", "owner-5")
_VARIABLE = re.compile(r"(--[\w-]+):\s*([^;]+);")

# The values of each contestant, for each group of bars.
Values = dict[str, list[list[float]]]


def write_plots(figures: Figures, directory: Path) -> list[Path]:
    """Plot CPU time, its ratios to haproxy's if there are any, and latency; return the files written."""
    shapes = [shape.name for shape in figures.shapes]
    cpu = {name: [by_shape[shape] for shape in shapes] for name, by_shape in figures.cpu.items()}
    latency = {name: [found.of(percent) for percent in PERCENTILES] for name, found in figures.latency.items()}
    plots = {
        "plain-cpu": drawn(
            "CPU µs per request, by partitions × batch of a request", shapes, cpu, lambda value: f"{value:,.3g}"
        ),
        "plain-latency": drawn(
            f"latency in µs at {figures.rate:,} requests/s",
            [f"p{percent}" for percent in PERCENTILES],
            latency,
            lambda value: f"{value:,.0f}",
        ),
    }
    if HAPROXY in cpu:
        ratios = {
            name: [
                [one / other for one, other in zip(ones, others, strict=True)]
                for ones, others in zip(groups, cpu[HAPROXY], strict=True)
            ]
            for name, groups in cpu.items()
            if name != HAPROXY
        }
        title = "CPU time × haproxy's, by partitions × batch of a request"
        plots["plain-ratio"] = drawn(title, shapes, ratios, lambda value: f"{value:.1f}×", logarithmic=False)
    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / f"{name}.svg" for name in sorted(plots)]
    for path in written:
        path.write_text(plots[path.stem], encoding="utf-8")
    return written


def drawn(
    title: str, groups: Sequence[str], values: Values, label: Callable[[float], str], *, logarithmic: bool = True
) -> str:
    """Return an SVG file: a bar for the median of each contestant, with a line from the lowest to the highest."""
    ticks, height = _scale(
        [value for by_group in values.values() for group in by_group for value in group], logarithmic
    )
    parts = [f'<text x="10" y="22">{html.escape(title)}</text>']
    for tick in ticks:
        y = BOTTOM - height(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" style="stroke:var(--line)"/>')
        parts.append(f'<text class="muted" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    group_wide = (RIGHT - LEFT) / len(groups)
    wide = group_wide * 0.8 / len(values)
    for place, (name, by_group) in enumerate(values.items()):
        colour = _COLOURS.get(name, _OTHERS[place % len(_OTHERS)])
        fill = f'style="fill:var(--{colour});stroke:var(--ink)"'
        key = RIGHT - 110 * (len(values) - place)
        parts.append(f'<rect x="{key}" y="12" width="12" height="12" {fill}/>')
        parts.append(f'<text x="{key + 18}" y="22">{html.escape(name)}</text>')
        for group, found in enumerate(by_group):
            left = LEFT + group * group_wide + group_wide * 0.1 + place * wide
            median, low, high = (height(value) for value in (statistics.median(found), min(found), max(found)))
            parts.append(
                f'<rect x="{left:.1f}" y="{BOTTOM - median:.1f}" width="{wide * 0.92:.1f}" '
                f'height="{median:.1f}" {fill}/>'
            )
            middle = left + wide * 0.46
            parts.append(f'<path d="M{middle:.1f} {BOTTOM - low:.1f}V{BOTTOM - high:.1f}" style="stroke:var(--ink)"/>')
            parts.append(
                f'<text class="value" x="{middle:.1f}" y="{BOTTOM - high - 4:.1f}" text-anchor="middle">'
                f"{label(statistics.median(found))}</text>"
            )
    for group, name in enumerate(groups):
        middle = LEFT + (group + 0.5) * group_wide
        parts.append(f'<text x="{middle:.1f}" y="{BOTTOM + 20}" text-anchor="middle">{html.escape(name)}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img"><title>{html.escape(title)}</title><style>{_style()}</style>\n{body}\n</svg>\n'
    )


def _scale(values: Sequence[float], logarithmic: bool) -> tuple[list[float], Callable[[float], float]]:
    """Return the ticks of an axis, and the height in pixels of a value."""
    tall, most = BOTTOM - TOP - 20, max(values)
    if logarithmic:
        lowest = math.floor(math.log10(min(values)))
        decades = max(1.0, math.log10(most) - lowest)
        ticks = [10.0**power for power in range(lowest, math.floor(math.log10(most)) + 1)]
        return ticks, lambda value: tall * (math.log10(value) - lowest) / decades
    unit = 10.0 ** math.floor(math.log10(most))
    step = next(unit * part for part in (0.2, 0.5, 1, 2) if most <= 5 * unit * part)
    return [step * count for count in range(int(most / step) + 1)], lambda value: tall * value / most


def _style() -> str:
    """Return the report's colours for light and for dark pages, and the fonts."""
    light, _, dark = TEMPLATE.partition("@media (prefers-color-scheme: dark)")
    dark = dark.partition("} }")[0]
    one, other = (" ".join(f"{name}:{value};" for name, value in _VARIABLE.findall(part)) for part in (light, dark))
    return (
        f"svg {{ {one} background: var(--paper); font: 13px system-ui, sans-serif; }} text {{ fill: var(--ink); }} "
        f".muted {{ fill: var(--muted); }} .value {{ font-size: 11px; }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {other} }} }}"
    )

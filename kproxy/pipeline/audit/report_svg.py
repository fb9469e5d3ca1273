"""matplotlib as this report uses it: SVG for the inside of an HTML page, in the page's own colours.

matplotlib is imported by the first drawing and never before. No setting of the user's reaches it, no window is opened,
and the same drawing is the same text on every run: no date, no random ids.

Colours are named (`colour("lost")`), drawn as placeholders, and leave as CSS variables (`var(--lost)`), so that one
drawing is right on light and on dark paper. Text stays text: it can be read aloud, searched and copied.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWNER_COLOURS: Final = 9
_NAMES: Final = (
    *("paper", "ink", "muted", "line", "complete", "removed", "unproven", "duplicated", "overlapped", "lost", "hatch"),
    *(f"owner-{number}" for number in range(OWNER_COLOURS)),
)
# Nobody else draws in these: nearly black, and each its own.
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
# As an attribute a colour may not be a variable everywhere; as a style it may.
_FILL: Final = re.compile(r'fill="(#0102[0-9a-f]{2})"')
_NAMESPACE: Final = re.compile(r'\sxmlns(?::\w+)?="[^"]*"')


def colour(name: str) -> str:
    return _PLACEHOLDERS[name]


def draw(name: str, width: float, height: float, paint: Callable[[Figure], None]) -> str:
    """What `paint` draws on a figure of so many inches, as an `<svg>` element. `name` keeps its ids apart."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    text = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        # A letter that the font lacks: the browser's font is another one anyway.
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
    """Without what only a file needs: prologue, namespaces, sizes. With ids of its own and the page's colours."""
    svg = svg[svg.index("<svg") :]
    # Its style sheet would hold for the whole page; the page's own says the same for drawings.
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

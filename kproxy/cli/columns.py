"""Tables for anything but a terminal: plain columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click


def echo_columns(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print them under their headings, each column as wide as it must be."""
    cells = [tuple(headings), *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

"""Read a trail in this process, without Spark, from files on this machine.

Text that is not a trail row is skipped, such as the partial last line of a killed proxy (`trail_rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kproxy.errors import StartupError
from kproxy.pipeline.audit.trail_place import PATTERNS, TrailPlace
from kproxy.pipeline.audit.trail_rows import TrailRow, closed_since, rows_in, rows_of_files
from kproxy.trail.signature import Signatures


def read_files(
    place: TrailPlace, from_ms: int | None = None, signatures: Signatures | None = None
) -> Iterator[TrailRow]:
    """Yield the rows closed from `from_ms` on. Raise StartupError if a file cannot be read."""
    for file in files_of(place):
        yield from closed_since(from_ms, file_rows(file, signatures))


def files_of(place: TrailPlace) -> list[Path]:
    """Return the trail's files with a final name, sorted by name and so by time."""
    return sorted(Path(place.name).glob(PATTERNS[place.kind]))


def file_rows(file: Path, signatures: Signatures | None = None) -> Iterator[TrailRow]:
    """Yield the rows of one file. Raise StartupError if it cannot be read."""
    try:
        yield from _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file, signatures)
    except OSError as error:
        raise StartupError(f"The trail could not be read: {file}: {error.strerror or error}.") from error


def _json_rows(file: Path, signatures: Signatures | None) -> Iterator[TrailRow]:
    with file.open("rb") as lines:
        for line in lines:
            yield from rows_in(line, None, signatures)


def _parquet_rows(file: Path) -> Iterator[TrailRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise StartupError("A trail in Parquet files needs pyarrow: pip install 'kproxy-kafka[parquet]'.") from error
    from kproxy.trail.parquet_sink import SCHEMA

    names = [name for name in TrailRow.__slots__ if name in SCHEMA.names]
    try:
        # Files of other releases may lack columns, or have more columns or narrower numbers.
        opened = pyarrow.parquet.ParquetFile(file)
        there = [name for name in names if name in opened.schema_arrow.names]
        for batch in opened.iter_batches(columns=there):
            table = pyarrow.Table.from_batches([batch])
            columns = {name: table.column(name).cast(SCHEMA.field(name).type).to_pylist() for name in there}
            rows = zip(*columns.values(), strict=True)
            yield from rows_of_files(dict(zip(columns, row, strict=True)) for row in rows)
    except pyarrow.ArrowException as error:
        raise StartupError(f"The trail could not be read: {file}: {error}.") from error

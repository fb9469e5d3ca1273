"""The flights' files for the stream, and the message that each row must make."""

from __future__ import annotations

import csv
import io
import itertools
import json
import zipfile
from pathlib import Path

import pytest

from kproxy.demo.flights import (
    COLUMNS,
    TOTAL_ROWS,
    Flights,
    Stopped,
    file_sizes,
    fingerprint,
    locate_archive,
    message_of,
    write_files,
)
from kproxy.errors import StartupError

# The source's lines, unchanged.
ROW = "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z".split(",")  # noqa: SIM905
CANCELLED = "2013,1,2,NA,1545,NA,NA,1910,NA,AA,133,NA,JFK,LAX,NA,2475,15,45,2013-01-02T20:00:00Z".split(",")  # noqa: SIM905


def _archive(path: Path, rows: list[list[str]], header: list[str] | None = None) -> Path:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header or list(COLUMNS), *rows])
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("flights.csv", text.getvalue())
    return path


def _laid_down(flights: Flights) -> list[list[list[str]]]:
    """The rows of the files, header included, in the order in which a stream reads them: by modification time."""
    files = sorted(flights.directory.iterdir(), key=lambda path: path.stat().st_mtime)
    return [list(csv.reader(path.read_text().splitlines())) for path in files]


@pytest.mark.parametrize(
    ("rows", "files", "sizes"),
    [(10, 5, [2, 2, 2, 2, 2]), (12, 5, [3, 3, 2, 2, 2]), (3, 5, [1, 1, 1]), (1, 5, [1]), (7, 1, [7])],
)
def test_files_are_even_in_size_and_nonempty(rows: int, files: int, sizes: list[int]) -> None:
    assert file_sizes(rows, files) == sizes


def test_rows_are_numbered_in_source_order(tmp_path: Path) -> None:
    source = [[*ROW[:10], str(number), *ROW[11:]] for number in range(100, 111)]

    flights = write_files(_archive(tmp_path / "f.zip", source), tmp_path / "out", rows=11, files=4)

    files = _laid_down(flights)
    assert [len(rows) - 1 for rows in files] == list(flights.file_rows) == [3, 3, 3, 2]
    assert all(rows[0] == ["n", *COLUMNS] for rows in files)
    together = [row for rows in files for row in rows[1:]]
    assert together == [[str(n), *row] for n, row in enumerate(source, start=1)]


def test_modification_times_of_files_rise_by_whole_seconds(tmp_path: Path) -> None:
    flights = write_files(_archive(tmp_path / "f.zip", [ROW] * 5), tmp_path / "out", rows=5, files=5)

    times = [path.stat().st_mtime for path in sorted(flights.directory.iterdir())]
    assert [after - before for before, after in itertools.pairwise(times)] == [1, 1, 1, 1]


def test_limit_takes_only_the_first_rows(tmp_path: Path) -> None:
    flights = write_files(_archive(tmp_path / "f.zip", [ROW, CANCELLED, ROW]), tmp_path / "out", rows=2, files=5)

    assert flights.rows == 2
    assert [rows[1][0] for rows in _laid_down(flights)] == ["1", "2"]
    assert list(flights.fingerprints) == [fingerprint(*message_of(1, ROW)), fingerprint(*message_of(2, CANCELLED))]


def test_row_becomes_tail_number_and_json() -> None:
    key, value = message_of(7, ROW)

    assert key == b"N14228"
    assert value.startswith(b'{"n":7,"year":2013,"month":1,"day":1,"dep_time":517,')
    assert list(json.loads(value)) == ["n", *COLUMNS]
    assert json.loads(value)["flight"] == 1545
    assert json.loads(value)["carrier"] == "UA"


def test_na_is_json_null_and_a_null_key() -> None:
    key, value = message_of(7, CANCELLED)

    assert key is None
    assert {name for name, cell in json.loads(value).items() if cell is None} == {
        "dep_time", "dep_delay", "arr_time", "arr_delay", "tailnum", "air_time",
    }  # fmt: skip


@pytest.mark.parametrize("other", [(b"N1", b"value "), (b"N1 ", b"value"), (None, b"value"), (b"N1value", b"")])
def test_fingerprint_distinguishes_messages(other: tuple[bytes | None, bytes]) -> None:
    assert fingerprint(b"N1", b"value") != fingerprint(*other)


def test_archive_with_other_columns_is_refused(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "f.zip", [ROW], header=["x", *list(COLUMNS)[1:]])

    with pytest.raises(StartupError, match="does not hold the columns"):
        write_files(archive, tmp_path / "out", rows=1, files=1)


def test_archive_that_ends_early_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="holds only 2 flights"):
        write_files(_archive(tmp_path / "f.zip", [ROW] * 2), tmp_path / "out", rows=3, files=1)


def test_writer_stops_on_request(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        write_files(
            _archive(tmp_path / "f.zip", [ROW] * 5_000), tmp_path / "out", rows=5_000, files=2, stopping=lambda: True
        )


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    heard: list[int] = []
    write_files(_archive(tmp_path / "f.zip", [ROW] * 5_000), tmp_path / "o", rows=5_000, files=2, on_rows=heard.append)

    assert heard == [4_096, 5_000]


@pytest.mark.long
def test_installed_package_holds_all_flights() -> None:
    with zipfile.ZipFile(locate_archive()) as zipped, zipped.open("flights.csv") as raw:
        rows = list(csv.DictReader(io.TextIOWrapper(raw)))

    assert len(rows) == TOTAL_ROWS
    assert list(rows[0]) == list(COLUMNS)
    assert sum(row["tailnum"] == "NA" for row in rows) == 2_512

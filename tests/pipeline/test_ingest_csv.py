"""CSV files as other programs write them, value by value, on a real Spark and without Kafka."""

from __future__ import annotations

import csv
import io
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow
import pyarrow.csv
import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.ingest import sources, transforms
from tests.pipeline.ingest_rows import infer, read_files

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

COLUMNS = ("id", "name", "n")
SCHEMA = "id STRING, name STRING, n STRING"
ODD = (
    "plain",
    'say "hi"',
    '"',
    '""',
    "two\nlines",
    '"quoted"\n\n"twice"',
    "ends in one\n",
    " spaces ",
    "back\\slash",
    'back\\"quote',
    "a,b;c\td",
    "#no comment",
    "it's",
    "naïve ✓",
    "",
)
ROWS = [(str(number), value, other) for number, (value, other) in enumerate(zip(ODD, reversed(ODD), strict=True), 1)]


def written(*, bom: str = "", rows: Any = ROWS, **dialect: Any) -> bytes:
    """Write with Python's csv module."""
    text = io.StringIO(newline="")
    csv.writer(text, **dialect).writerows([COLUMNS, *rows])
    return (bom + text.getvalue()).encode()


# As DataFrame(...).to_csv(index=False) writes it: rows end with newlines only, quotes appear only where needed.
PANDAS = b'id,name,n\n1,"say ""hi""",1.5\n2,"two\nlines",\n3,,"a,b"\n'


def read(spark: Any, directory: Path, **options: str) -> list[Any]:
    return read_files(spark, f"csv:{directory}", SCHEMA, source_options=options)


def of_file(rows: list[Any], name: str) -> list[Any]:
    named = [row for row in rows if row[transforms.FILE].endswith(f"/{name}")]
    return sorted(named, key=lambda row: int(row[transforms.ROW].rpartition(":")[2]))


def values(row: Any) -> list[str]:
    # An empty field is null; the csv module does not distinguish it from "".
    return [row[name] or "" for name in COLUMNS]


def test_csv_of_other_programs_is_read_correctly(spark: Any, tmp_path: Path) -> None:
    files = {
        "python.csv": written(),
        "unix.csv": written(lineterminator="\n"),
        "all_quoted.csv": written(quoting=csv.QUOTE_ALL),
        "bom.csv": written(bom="\ufeff"),
        "pandas.csv": PANDAS,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    rows = read(spark, tmp_path)
    for name, content in files.items():
        expected = list(csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True))[1:]
        found = of_file(rows, name)
        assert [values(row) for row in found] == expected, name
        assert {row[transforms.CORRUPT] for row in found} == {None}
        assert [row[transforms.ROW].rpartition("/")[2] for row in found] == [f"{name}#0:{n}" for n in range(len(found))]


# A null, an empty text and a null number, as other programs write them. pandas and Python's csv distinguish the first
# two only if they quote all values that are not null.
EMPTY: dict[str, tuple[bytes, list[str | None]]] = {
    "polars": (b'id,name,n\n1,,\n2,"",\n', [None, ""]),
    "duckdb": (b'id,name,n\n1,,\n2,"",\n', [None, ""]),
    "pandas": (b"id,name,n\n1,,\n2,,\n", [None, None]),
    "csv": (b"id,name,n\r\n1,,\r\n2,,\r\n", [None, None]),
    "csv all quoted": (b'"id","name","n"\r\n"1","",""\r\n"2","",""\r\n', ["", ""]),
    "csv not null": (b'"id","name","n"\r\n1,,\r\n2,"",\r\n', [None, ""]),
}


def test_quoted_empty_field_is_an_empty_text(spark: Any, tmp_path: Path) -> None:
    table = pyarrow.table({"id": [1, 2], "name": [None, ""], "n": pyarrow.array([None, None], pyarrow.int64())})
    pyarrow.csv.write_csv(table, tmp_path / "pyarrow.csv")
    table.to_pandas().to_csv(tmp_path / "pandas.csv", index=False)
    assert (tmp_path / "pandas.csv").read_bytes() == EMPTY["pandas"][0]
    for name, (content, _) in EMPTY.items():
        (tmp_path / f"{name}.csv").write_bytes(content)
    rows = read_files(spark, f"csv:{tmp_path}", "id INT, name STRING, n LONG")
    assert [row[transforms.REASON] for row in rows] == [None] * 2 * (len(EMPTY) + 1)
    told = {name: [row["name"] for row in rows if f"/{quote(name)}.csv" in row[transforms.FILE]] for name in EMPTY}
    assert told == {name: names for name, (_, names) in EMPTY.items()}
    assert [row["name"] for row in rows if "/pyarrow.csv" in row[transforms.FILE]] == [None, ""]
    assert {row["n"] for row in rows} == {None}

    (tmp_path / "na.csv").write_text('id,name,n\n1,NA,NA\n2,"",\n')
    options = {"nullValue": "NA", "pathGlobFilter": "na.csv"}
    named = read_files(spark, f"csv:{tmp_path}", "id INT, name STRING, n LONG", source_options=options)
    assert [(row["name"], row["n"]) for row in named] == [(None, None), ("", None)]


# By type: values with their results, and invalid values.
VALUES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "INT": ({"7": 7, "-7": -7, "+07": 7}, ("7.0", "7 ", "1e3", "2147483648", "x", "٧")),
    "DECIMAL(6,2)": (
        {"1.23": Decimal("1.23"), "1.2300": Decimal("1.23"), ".5": Decimal("0.5"), "12e-1": Decimal("1.2")},
        ("1.239", "12345", "1239e-3", "1f", "NaN", "9999.995"),
    ),
    "DECIMAL(38,4)": ({"1.5": Decimal("1.5")}, ("1.00001",)),
    "DOUBLE": ({"1.5": 1.5, "1.": 1.0, "-1E3": -1000.0, "5": 5.0}, ("1f", "1d", "0x1p3", " 1", "1_0", "one")),
    "FLOAT": ({"1.5": 1.5}, ("1f", "0x1p3")),
    "BOOLEAN": ({"true": True, "False": False}, ("1", "yes", "t")),
    "DATE": (
        {"2026-01-02": date(2026, 1, 2), "2026-1-2": date(2026, 1, 2)},
        ("2026-01-01T23:59:59", "2026-01-04 junk", "2026-02-30", "2026", "2026-01"),
    ),
    "TIMESTAMP": (
        {
            "2026-01-02": datetime(2026, 1, 2),
            "2026-01-02T03:04:05Z": datetime(2026, 1, 2, 3, 4, 5),
            "2026-01-02 03:04:05.123456+01:00": datetime(2026, 1, 2, 2, 4, 5, 123456),
        },
        ("10:00", "T10:00:00", "2026-01-04 junk", "2026-01-02T25:00:00", "1767312000"),
    ),
    "TIMESTAMP_NTZ": (
        {"2026-01-02 03:04": datetime(2026, 1, 2, 3, 4)},
        ("10:00", "2026-01-02T03:04:05Z", "2026-01-02 03:04 Europe/Paris"),
    ),
}


def test_text_is_a_valid_value_or_corrupt(spark: Any, tmp_path: Path) -> None:
    schema = ", ".join(f"c{number} {kind}" for number, kind in enumerate(VALUES))
    names = [f"c{number}" for number in range(len(VALUES))]
    cases: list[tuple[str, str, Any]] = []
    for name, (good, bad) in zip(names, VALUES.values(), strict=True):
        cases += [(name, text, value) for text, value in good.items()]
        cases += [(name, text, "corrupt") for text in bad]
    lines = [",".join(text if name == each else "" for each in names) for name, text, _ in cases]
    (tmp_path / "a.csv").write_text("\n".join([",".join(names), *lines, ""]))
    rows = read_files(spark, f"csv:{tmp_path}", schema)
    assert len(rows) == len(cases)
    for (name, text, value), line, row in zip(cases, lines, rows, strict=True):
        if value == "corrupt":
            assert (row[transforms.REASON], row[transforms.CORRUPT]) == ("corrupt", line), (name, text)
        else:
            expected = value.replace(tzinfo=UTC).astimezone().replace(tzinfo=None) if name == "c7" else value
            assert (row[transforms.REASON], row[name]) == (None, expected), (name, text)


def test_formats_and_names_of_numbers_are_options(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("d,f\n02.01.2026,1.5\n2026-01-02,2\n,nan\n,inf\n")
    options = {"dateFormat": "dd.MM.yyyy", "nanValue": "nan"}
    rows = read_files(spark, f"csv:{tmp_path}", "d DATE, f DOUBLE", source_options=options)
    assert [row[transforms.REASON] for row in rows] == [None, "corrupt", "not finite", "corrupt"]
    assert rows[0]["d"] == date(2026, 1, 2)
    with pytest.raises(StartupError, match="--source-option locale is not supported"):
        read_files(spark, f"csv:{tmp_path}", "d DATE, f DOUBLE", source_options={"locale": "de-DE"})


def test_spreadsheet_csv_options_are_respected(spark: Any, tmp_path: Path) -> None:
    rows = [(1, "one\r\ntwo", "x;y"), (2, 'say "hi"', "cr\ralone")]
    (tmp_path / "a.csv").write_bytes(written(bom="\ufeff", rows=rows, delimiter=";"))
    found = of_file(read(spark, tmp_path, sep=";", lineSep="\r\n"), "a.csv")
    assert [values(row) for row in found] == [[str(row[0]), *row[1:]] for row in rows]


def test_unreadable_rows_are_reported_with_their_text(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,name,n\n1,a\n2,b,c,d\n3,"x\ny"\n4,e,f\n"5,g,open\n6,"h",i\n7,j,k\n')
    # Rows so long that they cross the parser's buffers.
    long = [(number, "x\n" * 600 if number % 3 else "short\n", "z") for number in range(2_000)]
    lines = "".join(f'{n},"{text}"\n' if n % 7 == 0 else f'{n},"{text}",{z}\n' for n, text, z in long)
    (tmp_path / "long.csv").write_text("id,name,n\n" + lines)
    # This header ends with a newline alone.
    (tmp_path / "mixed.csv").write_bytes(b"id,name,n\n1,a,b\r\n2,c,d\n")
    rows = read(spark, tmp_path)

    found = of_file(rows, "a.csv")
    good = [values(row) for row in found if row[transforms.CORRUPT] is None]
    assert good == [["4", "e", "f"], ["7", "j", "k"]]
    corrupt = [row[transforms.CORRUPT] for row in found if row[transforms.CORRUPT] is not None]
    assert corrupt[:3] == ["1,a", "2,b,c,d", '3,"x\ny"']
    assert "5,g,open" in "".join(corrupt[3:])
    assert '6,"h' in "".join(corrupt[3:])

    told = {n: row[transforms.CORRUPT] for n, row in enumerate(of_file(rows, "long.csv"))}
    assert {n: text for n, text in told.items() if text is not None} == {
        n: f'{n},"{text}"' for n, text, _ in long if n % 7 == 0
    }
    (left, right) = of_file(rows, "mixed.csv")
    assert left[transforms.CORRUPT] == '1,a,"b\r"'
    assert right[transforms.CORRUPT] is None


def test_invalid_utf_8_row_is_reported_without_encoding(spark: Any, tmp_path: Path) -> None:
    latin = "id,name,n\n1,é,x\n2,plain,y\n".encode("latin-1")
    files = {
        "latin.csv": latin,
        "middle.csv": b"\xef\xbb\xbfid,name,n\n1,a,x\n2,b,\xff\n3,\xc3\xa9,\x00\n",
        "pair.csv": b"id,name,n\n1,\xed\xa0\xbd,x\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for options in ({}, {"multiLine": "false"}):
        rows = read(spark, tmp_path, **options)
        told = {name: [(row[transforms.REASON], row["id"]) for row in of_file(rows, name)] for name in files}
        assert told == {
            "latin.csv": [("corrupt", "1"), (None, "2")],
            "middle.csv": [(None, "1"), ("corrupt", "2"), (None, "3")],
            "pair.csv": [("corrupt", "1")],
        }
    assert values(of_file(rows, "middle.csv")[2]) == ["3", "é", "\0"]
    binary = read_files(
        spark,
        f"csv:{tmp_path}",
        SCHEMA.replace("n STRING", "n BINARY"),
        source_options={"pathGlobFilter": "m*"},
    )
    assert [row[transforms.REASON] for row in binary] == [None, "corrupt", None]
    assert of_file(rows, "latin.csv")[0][transforms.CORRUPT] == "1,\ufffd,x"

    named = {"encoding": "ISO-8859-1", "pathGlobFilter": "latin.csv"}
    assert [values(row) for row in read(spark, tmp_path, **named)] == [["1", "é", "x"], ["2", "plain", "y"]]
    (tmp_path / "utf-16.csv").write_bytes("id,name,n\n1,é,x\n".encode("utf-16"))
    named = {"encoding": "UTF-16", "pathGlobFilter": "utf-16.csv"}
    assert [values(row) for row in read(spark, tmp_path, **named)] == [["1", "é", "x"]]
    # With a named encoding, U+FFFD in the file is kept.
    (tmp_path / "there.csv").write_text("id,name,n\n1,\ufffd,x\n")
    named = {"encoding": "UTF-8", "pathGlobFilter": "there.csv"}
    assert [values(row) for row in read(spark, tmp_path, **named)] == [["1", "\ufffd", "x"]]


def test_header_in_unnamed_encoding_infers_no_schema(spark: Any, tmp_path: Path) -> None:
    for encoding in ("utf-16", "latin-1"):
        (tmp_path / "a.csv").write_bytes("id,é,n\n1,a,x\n".encode(encoding))
        with pytest.raises(StartupError, match=r"is not UTF-8: name its encoding with --source-option encoding="):
            infer(spark, f"csv:{tmp_path}")
    found = infer(spark, f"csv:{tmp_path}", encoding="ISO-8859-1")
    assert found.names == ["id", "é", "n"]


@pytest.mark.parametrize("header", ["s,s", "id,ID"])
def test_header_with_duplicate_name_is_refused(spark: Any, tmp_path: Path, header: str) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n1,2\n")
    name = header.partition(",")[0]
    with pytest.raises(StartupError, match=f"has the name {name} twice.*--schema with other names.*enforceSchema=true"):
        infer(spark, f"csv:{tmp_path}")
    with pytest.raises(StartupError, match=f"--schema has the name {name} twice"):
        sources.parse_schema(header.replace(",", " INT, ") + " INT")
    options = {"enforceSchema": "true"}
    (row,) = read_files(spark, f"csv:{tmp_path}", "a INT, b INT", source_options=options)
    assert (row["a"], row["b"]) == (1, 2)


def test_one_line_rows_are_split_on_request(spark: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1_000)
    (tmp_path / "a.csv").write_bytes(written(rows=[(n, 'say "hi"', "x") for n in range(100)]))
    whole = read(spark, tmp_path)
    assert {row[transforms.BLOCK] for row in whole} == {0}
    split = read(spark, tmp_path, multiLine="false")
    assert {row[transforms.BLOCK] for row in split} == {0, 1_000}
    assert sorted(map(values, split)) == sorted(map(values, whole))


def test_schema_is_inferred_from_multi_line_rows(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(written(rows=[(1, "two\nlines", 1.5), (2, 'a "b"', 2)]))
    found = infer(spark, f"csv:{tmp_path}")
    assert found.simpleString() == "struct<id:int,name:string,n:double>"


def test_time_without_date_is_inferred_as_text(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("t,at\n10:00,2026-01-02T03:04:05Z\n11:30,2026-01-02 03:04:05.5\n")
    assert infer(spark, f"csv:{tmp_path}").simpleString() == "struct<t:string,at:timestamp>"

"""The kinds of files that other programs write, through an ingest to a topic, value by value.

KINDS is the table of docs/ingest.md. `files/make.py` wrote the files of Polars and DuckDB; the other programs write
theirs here.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pandas
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from kproxy.pipeline.ingest.job import start
from kproxy.pipeline.ingest.options import IngestOptions
from tests.pipeline.files.make import AT, HERE, NAMES, ROWS
from tests.support.clients.kafka_io import read_topic
from tests.support.pages import DOCS
from tests.support.processes.dev import KproxyProcess

SCHEMA: Final = "id LONG, name STRING, amount DOUBLE, price DECIMAL(6,2), day DATE, at TIMESTAMP, ok BOOLEAN"
LOCAL: Final = SCHEMA.replace("amount DOUBLE", "amount STRING").replace("price DECIMAL(6,2)", "price STRING")
POINTS: Final = (
    "double(replace(amount, ',', '.')) AS amount",
    "cast(replace(price, ',', '.') AS DECIMAL(6,2)) AS price",
)
OTHERS: Final = tuple(name for name in NAMES if name not in ("amount", "price"))

_FIRST = {
    "id": 1, "name": "plain", "amount": "1.5", "price": "1.25", "day": "2026-01-02",
    "at": "2026-01-02T03:04:05.123456Z", "ok": True,
}  # fmt: skip
_SECOND = {
    "id": 2, "name": 'say "hi", ✓\nnext', "amount": "-0.1", "price": "-0.01", "day": "1969-12-31",
    "at": "2026-01-02T03:04:05.000000Z", "ok": False,
}  # fmt: skip
_NULLS: Mapping[str, Any] = {**dict.fromkeys(NAMES), "id": 3}
_LAST = {**_FIRST, "id": 4, "name": "", "amount": "1.0E300", "price": "9999.99"}
# The rows of a file that distinguishes a null from an empty text, of one that does not, and of one that has no nulls.
EXACT: Final = [_FIRST, _SECOND, _NULLS, _LAST]
NO_EMPTY: Final = [*EXACT[:3], {**_LAST, "name": None}]
NO_NULL: Final = [*EXACT[:2], {**_NULLS, "name": ""}, _LAST]


def texts(comma: str = ".") -> list[list[str]]:
    """The table's values as texts, as Python and spreadsheets have them."""
    told = []
    for row in ROWS:
        number, name, amount, price, day, at, ok = row
        times = "" if at is None else at.isoformat()
        numbers = ["" if each is None else str(each).replace(".", comma) for each in (amount, price)]
        told.append([str(number), name or "", *numbers, str(day or ""), times, "" if ok is None else str(ok).upper()])
    return told


def by_csv(encoding: str = "utf-8", comma: str = ".", rows: Any = None, **dialect: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        text = io.StringIO(newline="")
        csv.writer(text, **dialect).writerows([NAMES, *(texts(comma) if rows is None else rows)])
        path.write_bytes(text.getvalue().encode(encoding, "replace"))

    return write


def frame() -> pandas.DataFrame:
    found = pandas.DataFrame([dict(zip(NAMES, row, strict=True)) for row in ROWS])
    return found.astype({"amount": "Float64", "ok": "boolean"}).assign(
        day=found["day"].map(lambda day: day and str(day))
    )


def table(**kinds: pyarrow.DataType) -> pyarrow.Table:
    usual = {"id": pyarrow.int64(), "price": pyarrow.decimal128(6, 2), "at": pyarrow.timestamp("us", "UTC")} | kinds
    columns = zip(NAMES, zip(*ROWS, strict=True), strict=True)
    return pyarrow.table({name: pyarrow.array(each, usual.get(name)) for name, each in columns})


def made(path: Path) -> None:
    """Copy the file that `files/make.py` wrote."""
    path.write_bytes((HERE / path.name).read_bytes())


def parquet(table: pyarrow.Table, **options: Any) -> Callable[[Path], None]:
    return lambda path: pyarrow.parquet.write_table(table, path, **options)


def as_json(**options: Any) -> Callable[[Path], None]:
    return lambda path: frame().to_json(path, orient="records", date_format="iso", date_unit="us", **options)


def lines(*texts: str) -> Callable[[Path], None]:
    return lambda path: path.write_text("".join(f"{text}\n" for text in texts))


def compressed(path: Path) -> None:
    frame().to_csv(path, index=False, compression="gzip")
    assert gzip.decompress(path.read_bytes())


class Flags(NamedTuple):
    """What a job is started with beside its source; jobs read all the files that have the same."""

    words: str = ""
    schema: str = SCHEMA
    source_options: tuple[tuple[str, str], ...] = ()
    select: tuple[str, ...] = ()
    on_new_columns: str = "dead-letter"


def options(*pairs: str, **more: Any) -> Flags:
    words = " ".join(f"`--source-option {pair}`" for pair in pairs)
    return Flags(words, source_options=tuple((p.split("=")[0], p.split("=", 1)[1]) for p in pairs), **more)


class Kind(NamedTuple):
    """A file of some program. `told`: its rows in their order, "corrupt" or "new column" for a dead letter."""

    title: str
    file: str
    write: Callable[[Path], None]
    told: list[Any]
    result: str
    flags: Flags = Flags()


AS_IS, ONLY_NULL, ONLY_EMPTY = "as written", "empty texts are null", "null texts are empty"
NANOS: Final = "at div 1000"
EUROPE: Final = options("delimiter=;", schema=LOCAL, select=(*OTHERS, *POINTS))
EUROPE = EUROPE._replace(words=EUROPE.words + ", numbers as STRING with `--select`")
MICROS: Final = Flags(
    f"`at LONG`, `--select 'timestamp_micros({NANOS}) AS at'`",
    schema=SCHEMA.replace("at TIMESTAMP", "at LONG"),
    select=(*(name for name in NAMES if name != "at"), f"timestamp_micros({NANOS}) AS at"),
)
IGNORED: Final = Flags("`--on-new-columns ignore`", on_new_columns="ignore")
ODD: Final = {
    "time": pyarrow.array([1] * 4, pyarrow.time64("us")),
    "uuid": pyarrow.array([b"0123456789abcdef"] * 4, pyarrow.uuid()),
    "half": pyarrow.array([1.5] * 4, pyarrow.float16()),
}


def with_odd() -> pyarrow.Table:
    found = table()
    for name, column in ODD.items():
        found = found.append_column(name, column)
    return found


KINDS: Final = [
    Kind("Python's csv, as it is", "excel.csv", by_csv(), NO_EMPTY, ONLY_NULL),
    Kind("Python's csv, unix dialect", "unix.csv", by_csv(dialect="unix"), NO_NULL, ONLY_EMPTY),
    Kind(
        "pandas `to_csv(index=False)`",
        "pandas.csv",
        lambda path: frame().to_csv(path, index=False),
        NO_EMPTY,
        ONLY_NULL,
    ),
    Kind("the same, compressed", "pandas.csv.gz", compressed, NO_EMPTY, ONLY_NULL),
    Kind(
        "pandas `to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC)`",
        "quoted.csv",
        lambda path: frame().to_csv(path, index=False, quoting=csv.QUOTE_NONNUMERIC),
        NO_NULL,
        ONLY_EMPTY,
    ),
    Kind("Polars `write_csv`", "polars.csv", made, EXACT, AS_IS),
    Kind("DuckDB `COPY … (FORMAT csv, HEADER)`", "duckdb.csv", made, EXACT, AS_IS),
    Kind("pyarrow `write_csv`", "pyarrow.csv", lambda path: pyarrow.csv.write_csv(table(), path), EXACT, AS_IS),
    Kind("a spreadsheet, CSV UTF-8 (byte order mark)", "sheet.csv", by_csv("utf-8-sig"), NO_EMPTY, ONLY_NULL),
    Kind(
        "rows with a column too few or too many",
        "ragged.csv",
        by_csv(rows=[texts()[0], texts()[0][:-1], [*texts()[0], "x"]]),
        [_FIRST, "corrupt", "corrupt"],
        "such rows are corrupt",
    ),
    Kind(
        "numbers as a program prints floats (`1.0`, `1e3`, `1.239`)",
        "floats.csv",
        by_csv(rows=[["1.0", *texts()[0][1:]], ["1e3", *texts()[0][1:]], [*texts()[0][:3], "1.239", *texts()[0][4:]]]),
        ["corrupt"] * 3,
        "no LONG and no DECIMAL(6,2): corrupt",
    ),
    Kind(
        "a spreadsheet in ISO-8859-1, its encoding not named",
        "unnamed.csv",
        by_csv("latin-1", rows=[["1", "é", *texts()[0][2:]], texts()[0]]),
        ["corrupt", _FIRST],
        "rows with `é` are corrupt",
    ),
    Kind(
        "the same, named",
        "latin.csv",
        by_csv("latin-1", rows=[["1", "é", *texts()[0][2:]]]),
        [{**_FIRST, "name": "é"}],
        AS_IS,
        options("encoding=ISO-8859-1"),
    ),
    Kind(
        "a spreadsheet, Unicode text (UTF-16, tabs)",
        "sheet.txt",
        by_csv("utf-16", delimiter="\t"),
        NO_EMPTY,
        ONLY_NULL,
        options("encoding=UTF-16", r"delimiter=\t"),
    ),
    Kind(
        "a spreadsheet of Europe (`;`, decimal commas)",
        "europe.csv",
        by_csv("utf-8-sig", ",", delimiter=";"),
        NO_EMPTY,
        ONLY_NULL,
        EUROPE,
    ),
    Kind(
        "pandas `to_csv(index=False, na_rep='NA')`",
        "na.csv",
        lambda path: frame().to_csv(path, index=False, na_rep="NA"),
        NO_EMPTY,
        ONLY_NULL,
        options("nullValue=NA"),
    ),
    Kind("pandas `to_json(orient='records', lines=True)`", "pandas.json", as_json(lines=True), EXACT, AS_IS),
    Kind("pandas `to_json(orient='records')`", "array.json", as_json(), EXACT, AS_IS),
    Kind("Polars `write_ndjson`", "polars.json", made, EXACT, AS_IS),
    Kind("DuckDB `COPY … (FORMAT json)`", "duckdb.json", made, EXACT, AS_IS),
    Kind(
        "JSON with a new field, a date with a time, half a surrogate pair",
        "odd.json",
        lines('{"id":1,"more":2}', '{"id":1,"day":"2026-01-02T00:00"}', '{"id":1,"name":"\\ud800"}'),
        ["new column", "corrupt", "corrupt"],
        "dead letters",
    ),
    Kind(
        "Python's `json.dump(rows, file, indent=2)`",
        "pretty.json",
        lambda path: path.write_text(json.dumps([{"id": 1, "name": "two\nlines"}, {"id": 2}], indent=2)),
        [{**_NULLS, "id": 1, "name": "two\nlines"}, {**_NULLS, "id": 2}],
        AS_IS,
        options("multiLine=true"),
    ),
    Kind("Polars `write_parquet`", "polars.parquet", made, EXACT, AS_IS),
    Kind("DuckDB `COPY … (FORMAT parquet)`", "duckdb.parquet", made, EXACT, AS_IS),
    Kind(
        "pyarrow `write_table`, with dictionaries, zstd and pages of version 2",
        "pyarrow.parquet",
        parquet(table(), compression="zstd", data_page_version="2.0"),
        EXACT,
        AS_IS,
    ),
    Kind("the same with `int32` for a LONG", "narrow.parquet", parquet(table(id=pyarrow.int32())), EXACT, AS_IS),
    Kind(
        "pyarrow with TIME, UUID and FLOAT16",
        "odd.parquet",
        lambda path: pyarrow.parquet.write_table(with_odd(), path),
        EXACT,
        "without these columns",
        IGNORED,
    ),
    Kind(
        "pandas `to_parquet` with times in nanoseconds",
        "nanos.parquet",
        parquet(table(at=pyarrow.timestamp("ns", "UTC"))),
        EXACT,
        AS_IS,
        MICROS,
    ),
]


def jobs() -> dict[tuple[str, Flags], list[Kind]]:
    """The kinds by format and flags."""
    found: dict[tuple[str, Flags], list[Kind]] = defaultdict(list)
    for kind in KINDS:
        form = "csv" if ".csv" in kind.file or kind.file.endswith(".txt") else kind.file.rpartition(".")[2]
        found[form, kind.flags].append(kind)
    return found


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("form", "flags"), jobs(), ids=lambda each: each if isinstance(each, str) else each.words or "-"
)
def test_files_of_other_programs_keep_their_values(
    spark: Any, dev_cluster: KproxyProcess, tmp_path: Path, form: str, flags: Flags
) -> None:
    kinds = jobs()[form, flags]
    (tmp_path / "in").mkdir()
    for kind in kinds:
        kind.write(tmp_path / "in" / kind.file)
    topic = f"files-{uuid.uuid4().hex[:10]}"
    options = IngestOptions(
        f"{form}:{tmp_path}/in",
        str(tmp_path / "checkpoint"),
        topic=topic,
        bootstrap=dev_cluster.kafka,
        partitions=1,
        schema=flags.schema,
        source_options=dict(flags.source_options),
        select=flags.select,
        value=NAMES,
        headers=(("row", "_kproxy_row"),),
        on_new_columns=flags.on_new_columns,  # type: ignore[arg-type]
        dead_letters=f"json:{tmp_path}/dead",
    )
    query = start(spark, options)
    assert query.awaitTermination(500)
    found: dict[str, dict[int, Any]] = defaultdict(dict)

    def note(row: str, told: Any) -> None:
        file, _, number = unquote(row).rpartition("/")[2].partition("#0:")
        found[file][int(number)] = told

    if any(isinstance(each, dict) for kind in kinds for each in kind.told):
        for record in read_topic(dev_cluster.kafka, topic, 1, 1):
            note((dict(record.headers)["row"] or b"").decode(), json.loads(record.value or b"", parse_float=str))
    if any(isinstance(each, str) for kind in kinds for each in kind.told):
        for letter in spark.read.json(f"{tmp_path}/dead").collect():
            note(letter["row"], letter["reason"])
    told = {kind.file: [found[kind.file][number] for number in sorted(found[kind.file])] for kind in kinds}
    assert told == {kind.file: kind.told for kind in kinds}


def test_page_has_the_table_that_is_tested() -> None:
    rows = [f"| {kind.title} | {kind.flags.words} | {kind.result} |" for kind in KINDS]
    text = (DOCS / "ingest.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in text, "\n".join(rows)
    assert len(KINDS) >= 25
    assert AT.microsecond

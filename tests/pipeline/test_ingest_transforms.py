"""The messages that an ingest makes of its rows, on a real Spark and without Kafka."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.ingest import documents, sources, transforms
from kproxy.pipeline.ingest.options import IngestOptions
from kproxy.pipeline.ingest.transactions import JAR

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

OPTIONS = IngestOptions("csv:in", "ck", topic="flights")


@pytest.fixture
def rows(spark: Any) -> Any:
    """Two rows as from the rate source, with a `value`. They need no task."""
    return transforms.numbered(
        spark.sql(
            "select * from values"
            " (1, 'a', X'ff00', timestamp_seconds(0), array('x'), 10L),"
            " (2, null, null, null, null, 11L)"
            " as t(id, name, raw, at, tags, value)"
        )
    )


def encode(rows: Any, **changes: Any) -> list[Any]:
    encoded = transforms.encoded(transforms.placed(rows), replace(OPTIONS, **changes), batch="job/7")
    return sorted(encoded.collect(), key=lambda row: str(row[transforms.ROW]))


def column(rows: list[Any], name: str) -> list[Any]:
    return [None if row[name] is None else bytes(row[name]) for row in rows]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((), [None, None]),
        (("id",), [b"1", b"2"]),
        (("name",), [b"a", None]),
        (("raw",), [b"\xff\x00", None]),
        (("at",), [b"1970-01-01 00:00:00Z", None]),
        (("tags",), [b'["x"]', None]),
        (("id", "name"), [b'{"id":1,"name":"a"}', b'{"id":2,"name":null}']),
        (("name", "raw"), [b'{"name":"a","raw":"/wA="}', None]),
    ],
)
def test_key_is_column_text_bytes_or_json(rows: Any, key: tuple[str, ...], expected: list[bytes | None]) -> None:
    assert column(encode(rows, key=key), transforms.KEY) == expected


def test_times_are_utc_microseconds_in_any_session_zone(spark: Any) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    local = "timestamp_ntz'2026-11-22 10:00:00.123456' as local, struct(timestamp_micros(123456)) as deep"
    rows = spark.sql(f"select timestamp_micros(1) as at, {local}, 1L as value")
    try:
        (first,) = encode(rows, key=("at",), value=("at", "local", "deep"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert bytes(first[transforms.KEY]) == b"1970-01-01 00:00:00.000001Z"
    assert json.loads(first[transforms.VALUE]) == {
        "at": "1970-01-01T00:00:00.000001Z",
        "local": "2026-11-22T10:00:00.123456",
        "deep": {"col1": "1970-01-01T00:00:00.123456Z"},
    }


def test_non_json_number_is_a_dead_letter(spark: Any) -> None:
    rows = spark.sql(
        "select *, map('k', array(f)) as m, struct(f as x) as s from values (1.5D, 1L), (double('NaN'), 2L),"
        " (double('Infinity'), 3L), (double('-Infinity'), 4L), (null, 5L) as t(f, value)"
    )
    without = ("value",)
    bad = [None, "not finite", "not finite", "not finite", None]

    def reasons(**changes: Any) -> list[str | None]:
        return [row[transforms.REASON] for row in encode(rows, **changes)]

    assert reasons(value=("s.x",)) == bad
    assert reasons(value_column="m") == bad
    assert reasons(value=without, key=("f", "value")) == bad
    assert reasons(value=without, key=("s",)) == bad
    assert reasons(value=without, headers=(("h", "m"),)) == bad
    # Alone, the column is text.
    assert reasons(value=without, key=("f",), headers=(("h", "f"),)) == [None] * 5
    written = encode(rows, select=("value", "if(abs(f) < double('inf'), f, null) AS f"))
    assert [json.loads(row[transforms.VALUE])["f"] for row in written] == [1.5, None, None, None, None]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"value": ("name", "id")}, [b'{"name":"a","id":1}', b'{"name":null,"id":2}']),
        ({"select": ("id + 1 AS more", "name")}, [b'{"more":2,"name":"a"}', b'{"more":3,"name":null}']),
        ({"select": ("id", "* EXCEPT (id, raw, at, tags, value)")}, [b'{"id":1,"name":"a"}', b'{"id":2,"name":null}']),
        ({"select": ("to_json(struct(id, name)) AS v",), "value_column": "v"}, [b'{"id":1,"name":"a"}', b'{"id":2}']),
        ({"value_column": "raw"}, [b"\xff\x00", None]),
        ({"value_column": "name"}, [b"a", None]),
    ],
)
def test_value_is_json_of_columns_or_one_column(
    rows: Any, changes: dict[str, Any], expected: list[bytes | None]
) -> None:
    assert column(encode(rows, **changes), transforms.VALUE) == expected


def test_default_value_is_all_input_columns(rows: Any) -> None:
    (first, _) = encode(rows)
    assert list(json.loads(first[transforms.VALUE])) == ["id", "name", "raw", "at", "tags", "value"]


def test_headers_are_expressions_and_arrays_of_headers(rows: Any) -> None:
    sql = {"from": "'here'", "who": "name", "at": "at", "tags": "tags", "raw": "raw"}
    more = {"*": "array(struct('all', X'00'))", "batch": "_kproxy_batch", "row": "_kproxy_row"}
    (first, second) = encode(rows, headers=tuple({**sql, **more}.items()))
    told = [
        {header["key"]: header["value"] and bytes(header["value"]) for header in row[transforms.HEADERS]}
        for row in (first, second)
    ]
    same = {"from": b"here", "all": b"\0", "batch": b"job/7"}
    at = b"1970-01-01 00:00:00Z"
    assert told[0] == {**same, "who": b"a", "at": at, "tags": b'["x"]', "raw": b"\xff\0", "row": b"10"}
    assert told[1] == {**same, "who": None, "at": None, "tags": None, "raw": None, "row": b"11"}
    assert [header["key"] for header in first[transforms.HEADERS]] == [*sql, "all", "batch", "row"]


@pytest.mark.parametrize("name", ["nme", "name.first", "_kproxy_row", "id`", ""])
def test_missing_column_is_reported_with_existing_ones(rows: Any, name: str) -> None:
    with pytest.raises(StartupError, match=r"there is no column .*: the source has id, name, raw, at, tags, value\."):
        encode(rows, key=(name,))


def test_column_may_have_any_name(spark: Any) -> None:
    odd = spark.sql("select 5 as `a.b``c`, 1L as value")
    (row,) = encode(odd, key=("a.b`c",))
    assert bytes(row[transforms.KEY]) == b"5"
    assert json.loads(row[transforms.VALUE]) == {"a.b`c": 5, "value": 1}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [None, None]),
        ({"key": ("name",)}, [None, None]),
        ({"topic": None, "topic_column": "name"}, [None, "no topic"]),
        ({"topic": None, "topic_column": "at"}, ["no topic", "no topic"]),
        ({"value_column": "raw", "max_message_bytes": 98}, ["too large", None]),
        ({"value_column": "raw", "max_message_bytes": 99}, [None, None]),
        ({"value_column": "raw", "key": ("id",), "max_message_bytes": 99}, ["too large", None]),
        ({"value_column": "raw", "headers": (("k", "'v'"),), "max_message_bytes": 110}, ["too large", None]),
        ({"value_column": "raw", "headers": (("k", "'v'"),), "max_message_bytes": 111}, [None, None]),
    ],
)
def test_unwritable_row_gets_its_reason(rows: Any, changes: dict[str, Any], expected: list[str | None]) -> None:
    assert [row[transforms.REASON] for row in encode(rows, **changes)] == expected


def test_dead_letter_keeps_whole_row_and_no_message(rows: Any) -> None:
    options = replace(OPTIONS, topic=None, topic_column="name", key=("name",), select=("name",))
    encoded = transforms.encoded(transforms.placed(rows), options, batch="job/7")

    (letter,) = transforms.dead_letters(encoded).collect()
    told = (letter["reason"], letter["row"], letter["batch"], letter["record_cut"])
    assert told == ("no topic", "11", "job/7", False)
    assert json.loads(letter["record"])["id"] == 2, "all of the source's columns, not those selected"
    (cut,) = transforms.dead_letters(encoded, excerpt=8).collect()
    assert (cut["record"], cut["record_cut"]) == (letter["record"][:8], True)
    (message,) = transforms.messages(encoded, tasks=2, options=options).collect()
    assert bytes(message["key"]) == b"a"


def test_unparsable_json_is_kept_unchanged(spark: Any) -> None:
    values = ['{"id": 1}', '{"id": "x"}', "nonsense", "null", None]
    records = spark.createDataFrame(
        [(value, "t", 0, offset, None) for offset, value in enumerate(values)],
        "value string, topic string, partition int, offset long, timestamp timestamp",
    )
    parsed = documents.of_records(records, sources.parse_schema("id int"))
    rows = encode(parsed)
    assert [row[transforms.REASON] for row in rows] == [None, "corrupt", "corrupt", "corrupt", "corrupt"]
    assert [row[transforms.CORRUPT] for row in rows] == [None, '{"id": "x"}', "nonsense", "null", ""]
    assert [row[transforms.ROW] for row in rows] == [f"t/0/{offset}" for offset in range(5)]
    assert bytes(rows[0][transforms.VALUE]) == b'{"id":1}'


@pytest.fixture
def small_blocks(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set small blocks, and a session that would put as many files as possible into a task."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1_000)
    spark.conf.set("spark.sql.files.openCostInBytes", "0")
    yield
    spark.conf.unset("spark.sql.files.openCostInBytes")


@pytest.mark.parametrize("cores_worth", ["1", "64"])
@pytest.mark.usefixtures("small_blocks")
def test_line_keeps_its_name_for_any_task_count(spark: Any, tmp_path: Path, cores_worth: str) -> None:
    for name, lines in (("a", 300), ("b", 7), ("c", 1)):
        (tmp_path / f"{name}.csv").write_text("n\n" + "".join(f"{name}-{n:05}\n" for n in range(lines)))
    session = sources.own_session(spark)
    # Spark would use these settings if its blocks had no fixed size.
    session.conf.set("spark.sql.files.minPartitionNum", cores_worth)
    seen: list[Any] = []

    def take(batch: Any, _: int) -> None:
        seen.extend(transforms.placed(batch).orderBy(transforms.ORDER).collect())

    options = replace(OPTIONS, source=f"csv:{tmp_path}", source_options={"multiLine": "false"})
    stream = sources.read(session, options, sources.parse_schema("n string")).writeStream.foreachBatch(take)
    query = stream.trigger(availableNow=True).start()
    assert query.awaitTermination(120)

    names = [row[transforms.ROW] for row in seen]
    assert len(set(names)) == 308
    by_file = [name.rpartition("/")[2] for name in names]
    # 2,702 bytes, 8 for each line: a line belongs to the block of 1,000 bytes that it begins in.
    assert [name for name in by_file if name.startswith("a.csv")][-1].startswith("a.csv#2000:")
    assert {name.partition("#")[2].partition(":")[0] for name in by_file if name.startswith("a.csv")} == {
        "0",
        "1000",
        "2000",
    }
    assert [name for name in by_file if name.startswith("b.csv")] == [f"b.csv#0:{n}" for n in range(7)]
    of_a = [row["n"] for row in seen if row["n"].startswith("a")]
    assert of_a == sorted(of_a), "the order of the lines is not that of the file"


def test_rows_of_a_key_keep_order(spark: Any) -> None:
    # Descending numbers, in several tasks: the sink must restore the order.
    table = spark.range(2_000, 0, -1, 6).selectExpr("id as value", "if(id % 2 = 0, cast(id % 10 as string), null) as k")
    options = replace(OPTIONS, key=("k",), value_column="value")
    encoded = transforms.encoded(transforms.placed(transforms.numbered(table)), options, batch="b")
    tasks = transforms.messages(encoded, tasks=4, options=options).rdd.glom().collect()

    home: dict[bytes, int] = {}
    keyless = []
    for number, task in enumerate(tasks):
        numbers: dict[bytes, list[int]] = {}
        for message in task:
            if message["key"] is not None:
                numbers.setdefault(bytes(message["key"]), []).append(int(message["value"]))
        for key, values in numbers.items():
            assert home.setdefault(key, number) == number
            assert values == sorted(values)
        keyless.append(sum(1 for message in task if message["key"] is None))
    assert len(home) == 5
    assert sum(map(len, tasks)) == 2_000
    assert min(keyless) > 100


def test_schema_errors_are_reported(spark: Any) -> None:
    with pytest.raises(StartupError, match=r"--schema cannot be read \(\[\w+\] .+\): give DDL"):
        sources.parse_schema("id INT, name")


@pytest.mark.parametrize("name", ["KeepTimestamps", "WriteInTransactions"])
def test_class_in_jar_is_its_source_compiled(spark: Any, name: str) -> None:
    package = resources.files("kproxy.pipeline.ingest")
    compiler = spark._jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(spark._jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook((package / f"{name}.java").read_text())
    built = compiler.getBytecodes().get(f"kproxy.{name}")
    with zipfile.ZipFile(io.BytesIO((package / JAR).read_bytes())) as jar:
        assert jar.read(f"kproxy/{name}.class") == bytes(built)

"""JSON documents that deviate from the schema: none loses a field silently. On a real Spark, without Kafka."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.ingest import documents, sources, transforms
from tests.pipeline.ingest_rows import infer, options_of, read_files

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SCHEMA = "id LONG, deep STRUCT<x: STRING>, many ARRAY<STRUCT<a: INT>>, by MAP<STRING, STRUCT<a: INT>>, raw STRING"

# A line and its rows, as JSON; or the reason (with the names of new fields).
LINES: tuple[tuple[str, list[Any]], ...] = (
    ('{"id":1,"deep":{"x":"y"},"many":[{"a":1},null],"by":{"k":{"a":2}}}', [{"id": 1, "deep": {"x": "y"}}]),
    ('  {"id":2}  ', [{"id": 2}]),
    ('[{"id":3},{"id":4}]', [{"id": 3}, {"id": 4}]),
    ("[]", []),
    ("   ", []),
    ('{"id":5,"raw":{"any":[1.5]}}', [{"id": 5, "raw": '{"any":[1.5]}'}]),
    ('{"ID":13,"extra":1}', [["ID", "extra"]]),
    ('{"id":14,"deep":{"x":"y","z":null}}', [["deep.z"]]),
    ('{"id":15,"many":[{"a":1},{"b":2}],"by":{"k":{"c":1}}}', [["many.b", "by.c"]]),
    ('[{"id":16},{"id":17,"new":1}]', [{"id": 16}, ["new"]]),
    ('{"id":20} {"id":21}', ["corrupt"]),
    ('{"id":22}]', ["corrupt"]),
    ('{"id":23}]}', ["corrupt"]),
    ('{"id":24}}', ["corrupt"]),
    ('{"id":25,"id":26}', ["corrupt"]),
    ('{"id":30,"deep":{"x":"y","x":"z"}}', ["corrupt"]),
    ('{"id":31,"many":[{"a":1},{"a":1,"a":2}]}', ["corrupt"]),
    ('{"id":32,"by":{"k":{"a":1},"k":{"a":2}}}', ["corrupt"]),
    ('{"id":33,"by":{"k":{"a":1,"a":2}}}', ["corrupt"]),
    ('{"id":34,"raw":{"a":1,"a":2}}', [{"id": 34, "raw": '{"a":1,"a":2}'}]),
    ('{"id":"x","new":1}', ["corrupt"]),
    ('[{"id":27},{"id":"x"}]', ["corrupt"]),
    ("[28]", ["corrupt"]),
    ("null", ["corrupt"]),
    ('{"id":29', ["corrupt"]),
    ('{"id":1.5}', ["corrupt"]),
)


def told(rows: list[Any]) -> list[Any]:
    """Read rows like those of LINES, without null fields."""
    found: list[Any] = []
    for row in rows:
        if row[transforms.REASON] is None:
            value = json.loads(row[transforms.VALUE])
            found.append({name: each for name, each in value.items() if each is not None})
        else:
            found.append(row[transforms.NEW] or row[transforms.REASON])
    return found


def test_document_is_read_whole_or_reported(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("\ufeff" + "".join(f"{line}\n" for line, _ in LINES))
    rows = read_files(spark, f"json:{tmp_path}", SCHEMA)
    expected = [row for _, rows in LINES for row in rows]
    expected[0] = {**expected[0], "many": [{"a": 1}, None], "by": {"k": {"a": 2}}}
    assert told(rows) == expected
    assert [row[transforms.ROW].rpartition("/")[2] for row in rows] == [f"a.json#0:{n}" for n in range(len(rows))]
    corrupt = [row[transforms.CORRUPT] for row in rows if row[transforms.REASON] == "corrupt"]
    assert corrupt == [line for line, rows in LINES if rows == ["corrupt"]]


AT = "2026-01-02T03:04:05.000000Z"
# Like LINES: values that Spark's own reader would round, truncate, replace, or date by the run's day.
STRICT: tuple[tuple[str, list[Any]], ...] = (
    ('{"m":1.23,"d":"2026-01-02","deep":{"m":0.5}}', [{"m": 1.23, "d": "2026-01-02", "deep": {"m": 0.5}}]),
    ('{"m":1.2300,"d":"2026-1-2"}', [{"m": 1.23, "d": "2026-01-02"}]),
    ('{"m":123e-2}', [{"m": 1.23}]),
    ('{"m":1.239}', ["corrupt"]),
    ('{"m":9999.995}', ["corrupt"]),
    ('{"m":12345}', ["corrupt"]),
    ('{"deep":{"m":0.55}}', ["corrupt"]),
    ('{"by":{"k":0.55}}', ["corrupt"]),
    ('[{"m":1},{"m":1.001}]', ["corrupt"]),
    ('{"d":"2026-01-01T23:59:59"}', ["corrupt"]),
    ('{"d":"2026-01-04 junk"}', ["corrupt"]),
    ('{"f":"1f"}', ["corrupt"]),
    ('{"at":"2026-01-02T03:04:05Z","local":"2026-1-2 03:04"}', [{"at": AT, "local": "2026-01-02T03:04:00.000000"}]),
    ('{"at":"2026-01-02 04:04:05+01:00"}', [{"at": AT}]),
    ('{"at":"2026-01-02T04:04:05.000000000+0100"}', [{"at": AT}]),
    ('{"at":"2026-01-02 04:04:05 Europe/Paris"}', [{"at": AT}]),
    ('{"at":"2026-01-02"}', [{"at": "2026-01-02T00:00:00.000000Z"}]),
    ('{"at":"10:00"}', ["corrupt"]),
    ('{"at":"T10:00:00"}', ["corrupt"]),
    ('{"at":"2026-01-04 junk"}', ["corrupt"]),
    ('{"at":"2026-01-02T25:00:00"}', ["corrupt"]),
    ('{"list":[{"at":"2026-01-02"},{"at":"10:00"}]}', ["corrupt"]),
    ('{"local":"10:00"}', ["corrupt"]),
    ('{"local":"2026-01-02T03:04:05Z"}', ["corrupt"]),
    (r'{"raw":"\ud83d\ude00 \\ud83d"}', [{"raw": "\U0001f600 \\ud83d"}]),
    (r'{"raw":"\ud83d"}', ["corrupt"]),
    (r'{"raw":"\\\udE00x"}', ["corrupt"]),
    (r'{"raw":"\ud83d\\\ude00"}', ["corrupt"]),
)


def test_value_is_exact_or_the_row_is_corrupt(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("".join(f"{line}\n" for line, _ in STRICT))
    schema = "m DECIMAL(6,2), d DATE, f DOUBLE, deep STRUCT<m: DECIMAL(4,1)>, by MAP<STRING, DECIMAL(3,1)>, raw STRING"
    schema += ", at TIMESTAMP, local TIMESTAMP_NTZ, list ARRAY<STRUCT<at: TIMESTAMP>>"
    rows = read_files(spark, f"json:{tmp_path}", schema)
    assert told(rows) == [row for _, rows in STRICT for row in rows]


@pytest.mark.parametrize("text", ['{\n  "id": 1\n}\n', '[\n  {"id": 1},\n  {"id": 2}\n]\n'])
def test_json_over_several_lines_is_named_at_once(spark: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(StartupError, match="has JSON over several lines: give --source-option multiLine=true"):
        infer(spark, f"json:{tmp_path}")
    with pytest.raises(StartupError, match="has JSON over several lines"):
        sources.check_lines(spark, options_of(f"json:{tmp_path}", "id INT"))
    sources.check_lines(spark, options_of(f"json:{tmp_path}", "id INT", source_options={"multiLine": "true"}))
    found = infer(spark, f"json:{tmp_path}", multiLine="true")
    assert found.names == ["id"]


def as_records(spark: Any, values: list[str]) -> Any:
    """Rows of a Kafka source, with values in SQL."""
    table = ", ".join(f"({value}, 't', 0, {offset}L, timestamp_millis(0))" for offset, value in enumerate(values))
    return spark.sql(f"select * from values {table} as records(value, topic, partition, offset, timestamp)")


def test_json_records_stand_alone_with_dead_letter_text(spark: Any) -> None:
    lines = ['{"id":1}', '[{"id":2}]', '{"id":3},{"id":4}', '{"id":5,"new":{"a":1}}', "", '{"id":6}{']
    # Spark would replace a byte that is not UTF-8.
    broken = "unhex(concat(hex('{\"id\":7,\"raw\":\"'), 'ff', hex('\"}')))"
    values = [*(f"cast('{line}' as binary)" for line in lines), broken, "cast(null as binary)"]
    records = as_records(spark, values)
    asked = options_of("json:in")
    opened = documents.of_records(records, sources.parse_schema(SCHEMA))
    encoded = transforms.encoded(transforms.placed(opened), asked, batch="b")
    rows = sorted(encoded.collect(), key=lambda row: str(row[transforms.ROW]))
    assert told(rows) == [{"id": 1}, "corrupt", "corrupt", ["new"], "corrupt", "corrupt", "corrupt", "corrupt"]
    letters = {row["row"]: row for row in transforms.dead_letters(encoded).collect()}
    assert letters["t/0/3"]["reason"] == "new column"
    assert letters["t/0/3"]["record"] == lines[3]
    assert letters["t/0/2"]["record"] == lines[2]


def test_line_with_invalid_utf_8_is_reported(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"id":1,"raw":"\xff"}\n{"id":2,"raw":"\xef\xbf\xbd"}\n')
    (tmp_path / "b.json").write_bytes(b'{"id":3,"raw":"\xed\xa0\x80"}\n{"id":4,"\xff":1}\n{"id":5,"raw":"\xc3\xa4"}\n')
    rows = read_files(spark, f"json:{tmp_path}", SCHEMA)
    assert told(rows) == ["corrupt", {"id": 2, "raw": "\ufffd"}, "corrupt", "corrupt", {"id": 5, "raw": "ä"}]


def test_multi_line_files_and_directory_columns_are_read(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "day=7").mkdir()
    (tmp_path / "day=7" / "a.json").write_text('\ufeff[{"id": 1},\n {"id": 2}]\n')
    (tmp_path / "day=7" / "b.json").write_text('{"id": 3}\n{"id": 4}\n')
    rows = read_files(spark, f"json:{tmp_path}", "id LONG, day STRING", source_options={"multiLine": "true"})
    assert told(rows) == [{"id": 1, "day": "7"}, {"id": 2, "day": "7"}, "corrupt"]
    (tmp_path / "day=7" / "c.json").write_bytes('{"id": 5, "name": "ä"}'.encode("latin-1"))
    options = {"encoding": "ISO-8859-1", "pathGlobFilter": "c.json"}
    latin = read_files(spark, f"json:{tmp_path}", "id LONG, name STRING, day INT", source_options=options)
    assert told(latin) == [{"id": 5, "name": "ä", "day": 7}]


def test_new_fields_are_left_out_on_request(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"id":1,"new":2}\n')
    rows = read_files(spark, f"json:{tmp_path}", "id LONG", on_new_columns="ignore")
    assert told(rows) == [{"id": 1}]


# Known and unknown fields; before each, the part that a double or Spark's own JSON would change.
EXACT: tuple[tuple[str, str], ...] = (
    ("a fraction", '{"id":1,"new":0.1000000000000000055511151231257827}'),
    ("one in a column", '{"id":2,"deep":{"x":"y"},"f":0.1000000000000000055511151231257827,"n":1}'),
    ("digits at its end", '{"id":3,"new":[1.50,1e5,1E400,-0.0,0e0]}'),
    ("integers", '{"id":4,"new":[9223372036854775808,-123456789012345678901234567890,18446744073709551615]}'),
    ("escapes", r'{"id":5,"new":"\u00e9\ud83d\ude00\u0000\/\b\\ \"","k\u00e9y":"é😀"}'),
    ("half of a pair", r'{"id":6,"new":"\ud83d"}'),
    ("null and absent", '{"id":7,"raw":null,"new":null}'),
    ("absent", '{"new":{}}'),
    ("nothing in it", '{"id":8,"new":{},"deep":{},"many":[],"list":[{},[],null]}'),
    ("case", '{"id":9,"ID":10,"Id":{"iD":1}}'),
    ("spaces", '{ "id" : 10 ,\t"new" : [ 1 , { "a b" : " " } ] }'),
    ("nested", '{"id":11,"deep":{"x":"y","z":{"w":1.10}},"by":{"k":{"a":1,"b":2}},"many":[{"a":1,"c":[[]]}]}'),
    ("long", json.dumps({"id": 12, "new": [[{"n": n, "t": "x" * 20}] * 5 for n in range(2_000)]})),
    ("none of them new", '{"raw":"x","id":13}'),
    ("only this", "{}"),
    ("separators", '{"id":14,"new":"\u2028\u2029"}'),
)


def exactly(text: str) -> Any:
    """Read with Python's reader: numbers as written, fields in order, duplicates included."""
    return json.loads(text, parse_float=Decimal, parse_int=Decimal, object_pairs_hook=list)


def added(spark: Any, source: str, schema: str) -> list[Any]:
    rows = read_files(spark, source, schema, on_new_columns="add")
    return [row[transforms.REASON] or bytes(row[transforms.VALUE]).decode() for row in rows]


def test_documents_are_written_unchanged_with_new_fields(spark: Any, tmp_path: Path) -> None:
    documents_ = [document for _, document in EXACT]
    (tmp_path / "a.json").write_text("\ufeff" + "\r\n".join(f" {each} " for each in documents_), newline="")
    # Each is invalid in RFC 8259 or cannot be written unchanged: two of them in fields that the schema lacks.
    refused = (
        "{'id':20}",
        '{"id":21,"new":NaN}',
        '{"id":22,"new":{"a":1,"a":2}}',
        '{"id":23} {"id":24}',
        '[{"id":25}]',
    )
    (tmp_path / "b.json").write_text("\n".join([*refused, '{"id":"x"}', '{"id":26}']) + "\n")
    values = added(spark, f"json:{tmp_path}", f"{SCHEMA}, f DOUBLE, n BYTE")
    assert values == [*documents_, *["corrupt"] * 6, '{"id":26}']
    for (name, document), value in zip(EXACT, values[: len(EXACT)], strict=True):
        assert exactly(value) == exactly(document), name


def test_document_is_unchanged_below_directory_columns(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "day=7").mkdir()
    (tmp_path / "day=7" / "a.json").write_text('{"id":1,"new":1.50}\n{ }\n')
    rows = read_files(spark, f"json:{tmp_path}", "id LONG", on_new_columns="add", key=("day",))
    assert [(bytes(row[transforms.KEY]), bytes(row[transforms.VALUE])) for row in rows] == [
        (b"7", b'{"id":1,"new":1.50}'),
        (b"7", b"{ }"),
    ]


def test_fields_differing_only_in_case_infer_no_schema(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"id":1,"ID":2}\n')
    with pytest.raises(StartupError, match=r"differ only in case \(.*`id`.*\): give a --schema with one of them"):
        infer(spark, f"json:{tmp_path}")


def test_unchanged_documents_have_keys_and_dead_letters(spark: Any) -> None:
    values = ['{"id":1,"x":1.50}', '{"x":1.50}', '[{"id":2}]', '{"f":"NaN","id":3}', '{"f":1e400,"id":4}', "x"]
    records = as_records(spark, [f"cast('{value}' as binary)" for value in values])
    schema = "id LONG, f DOUBLE"
    asked = options_of("kafka:from", schema, from_bootstrap="127.0.0.1:1", key=("id",), on_new_columns="add")
    asked.check()
    opened = documents.of_records(records, sources.parse_schema(schema), verbatim=True)
    encoded = transforms.encoded(transforms.placed(opened), asked, batch="b")
    rows = sorted(encoded.collect(), key=lambda row: str(row[transforms.ROW]))
    assert [row[transforms.REASON] for row in rows] == [None, None, "corrupt", None, None, "corrupt"]
    written = [(row["id"], bytes(row[transforms.VALUE])) for row in rows if not row[transforms.REASON]]
    assert written == [(number, values[at].encode()) for number, at in ((1, 0), (None, 1), (3, 3), (4, 4))]
    assert [row[transforms.KEY] and bytes(row[transforms.KEY]) for row in rows[:2]] == [b"1", None]
    letters = {row["row"]: row["record"] for row in transforms.dead_letters(encoded).collect()}
    assert letters == {"t/0/2": values[2], "t/0/5": values[5]}


def test_schema_is_inferred_from_a_sample(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SAMPLE_FILES", 2)
    for name in ("a", "b", "c [1]", "d"):
        (tmp_path / "day=7").mkdir(exist_ok=True)
        (tmp_path / "day=7" / f"{name}.json").write_text(f'{{"of_{name[0]}": 1}}\n')
    assert infer(spark, f"json:{tmp_path}").names == ["of_b", "of_d", "day"]

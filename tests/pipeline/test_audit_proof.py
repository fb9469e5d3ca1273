"""The audit reports what a trail does not prove: missing rows, trails without an end, unreadable rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.audit import proof
from kproxy.pipeline.audit.findings import of_unproven
from kproxy.pipeline.audit.schemas import TAIL
from kproxy.pipeline.audit.trail import SHIPPING_MS, parse_place, read_files, rows_of
from kproxy.pipeline.spark import SparkFailed, as_spark_failure
from kproxy.trail.parquet_sink import SCHEMA
from tests.support.audit.trails import BEGAN_AT, INTERVAL_MS, SHIPPED_SCHEMA, Row, Trail, shared_names, trail_frame

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

READ_AT = 1_000_000


def long_trail(proxy: str, rows: int, *, ends: bool = True) -> Trail:
    """A row a second, from second 1 on."""
    trail = Trail(proxy, proxy)
    for n in range(1, rows):
        trail.acked("topic", n * 10, 10, at=n * 1000)
    if ends:
        trail.end(rows * 1000)
    return trail


def without(trail: Trail, *sequences: int) -> list[Row]:
    return [row for row in trail.rows if row["sequence"] not in sequences]


def seconds(*times: int) -> tuple[int, ...]:
    return tuple(BEGAN_AT + time * 1000 for time in times)


def gap(sequence: int, missing: int, begin: int, end: int) -> tuple[Any, ...]:
    """From `begin` less what a row may keep, to `end`, in seconds."""
    return ("gap", sequence, missing, BEGAN_AT + begin * 1000 - INTERVAL_MS, BEGAN_AT + end * 1000)


def tail(sequence: int, begin_ms: int, end: int) -> tuple[Any, ...]:
    return ("tail", sequence, 0, BEGAN_AT + begin_ms, BEGAN_AT + end * 1000)


def second_life(first_end: bool) -> list[Row]:
    first, second = Trail("twice", "1"), Trail("twice", "2", began=50_000)
    first.acked("topic", 0, 10, at=20_000)
    if first_end:
        first.end(30_000)
    second.end(60_000)
    return first.rows + second.rows


def replicas() -> list[Row]:
    """Three proxies behind one address: the second was killed, and when the third began that was no restart."""
    first, second, third = (
        Trail("shared", "1"),
        Trail("shared", "2", began=10_000),
        Trail("shared", "3", began=850_000),
    )
    second.mark(800_000)
    first.end(900_000)
    third.end(950_000)
    return first.rows + second.rows + third.rows


def handed_over() -> list[Row]:
    """The first one still answers its clients when the second one serves already; the third is a restart."""
    first, second, third = (
        Trail("handed", "1"),
        Trail("handed", "2", began=90_000),
        Trail("handed", "3", began=300_000),
    )
    first.end(100_000)
    second.mark(200_000)
    third.end(310_000)
    return first.rows + second.rows + third.rows


def marked(at: int) -> Trail:
    trail = Trail("marked", "marked")
    trail.acked("topic", 0, 10, at=1_000)
    trail.mark(at)
    return trail


# Rows as they are read, and what they leave unproven.
CASES: dict[str, tuple[list[Row], list[tuple[Any, ...]]]] = {
    "whole": (long_trail("whole", 200).rows, []),
    "one row missing": (without(long_trail("p", 200), 70), [gap(70, 1, 69, 71)]),
    "rows at a boundary of pieces": (without(long_trail("p", 200), 63, 64, 65), [gap(63, 3, 62, 66)]),
    "whole pieces missing": (without(long_trail("p", 400), *range(60, 333)), [gap(60, 273, 59, 333)]),
    "several": (without(long_trail("p", 200), 5, 7, 150), [gap(5, 1, 4, 6), gap(7, 1, 6, 8), gap(150, 1, 149, 151)]),
    "missing and there twice": (
        without(long_trail("p", 200), 5) + long_trail("p", 200).rows[8:30],
        [gap(5, 1, 4, 6)],
    ),
    "the head is missing": (without(long_trail("p", 200), 0, 1, 2), [("gap", 0, 3, *seconds(-61, 3))]),
    "everything twice": (long_trail("p", 200).rows * 2, []),
    "killed": (long_trail("p", 200, ends=False).rows, [tail(199, 199_000 - INTERVAL_MS, READ_AT // 1000)]),
    "killed when idle": (marked(9_000).rows, [tail(2, 9_000, READ_AT // 1000)]),
    "killed and started again": (second_life(first_end=False), [tail(1, 20_000 - INTERVAL_MS, 50)]),
    "stopped and started again": (second_life(first_end=True), []),
    "killed, of several that share a name": (replicas(), [tail(1, 800_000, READ_AT // 1000)]),
    "killed after it was handed over to": (handed_over(), [tail(1, 200_000, 300)]),
    "another of the same name hides no hole": (
        shared_names(),
        [("gap", 0, 1, *seconds(-61, 25)), tail(1, 20_000 - INTERVAL_MS, READ_AT // 1000)],
    ),
    # Nobody knows any more how long it kept what it had to tell.
    "killed, and its begin is lost": (
        without(long_trail("p", 200, ends=False), 0),
        [("gap", 0, 1, *seconds(-61, 1)), tail(199, 199_000 - 61_000, READ_AT // 1000)],
    ),
}

# Those in which a proxy lives, which is how far everything else is judged as well.
LIVING: dict[str, tuple[list[Row], list[tuple[Any, ...]]]] = {
    "lives, heard of a moment ago": (marked(READ_AT - 9_000).rows, []),
    "lives, and another was killed": (
        marked(READ_AT - 9_000).rows + long_trail("p", 200, ends=False).rows,
        [tail(199, 199_000 - INTERVAL_MS, READ_AT // 1000 - 9)],
    ),
}


def unproven_of(rows: Any, **judged: Any) -> list[tuple[Any, ...]]:
    pieces = proof.pieces(rows)
    trails = proof.trails(pieces)
    end = proof.audit_end(
        trails,
        read_at_ms=BEGAN_AT + READ_AT,
        to_ms=judged.get("to_ms"),
        shipping_ms=judged.get("shipping_ms", SHIPPING_MS),
    )
    tails = proof.tails(trails, end)
    found = proof.unproven(proof.gaps(rows, pieces, trails), tails, end, from_ms=judged.get("from_ms"))
    columns = found.select("proxy", "kind", "sequence", "missing", "from_ms", "to_ms")
    return sorted(tuple(row) for row in columns.collect())


@pytest.fixture(scope="module")
def unproven(spark: Any) -> dict[str, list[tuple[Any, ...]]]:
    """Of all cases at once: a proxy's name begins with its case's."""
    rows = [{**row, "proxy": f"{name}/{row['proxy']}"} for name, (told, _) in CASES.items() for row in told]
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in CASES}
    for proxy, *what in unproven_of(trail_frame(spark, rows)):
        found[proxy.partition("/")[0]].append(tuple(what))
    return found


@pytest.mark.parametrize("name", CASES)
def test_missing_trail_is_unproven_for_its_possible_time(unproven: dict[str, list[tuple[Any, ...]]], name: str) -> None:
    assert sorted(unproven[name]) == sorted(CASES[name][1])


@pytest.mark.parametrize(
    "name", [pytest.param("lives, heard of a moment ago", marks=pytest.mark.long), "lives, and another was killed"]
)
def test_live_trail_is_not_reported_as_unended(spark: Any, name: str) -> None:
    rows, expected = LIVING[name]
    assert [tuple(what) for _, *what in unproven_of(trail_frame(spark, rows))] == expected


@pytest.mark.long
def test_trail_filling_a_file_counts_as_live(spark: Any) -> None:
    rows = trail_frame(spark, marked(READ_AT - 70_000).rows)
    assert len(unproven_of(rows)) == 1
    assert unproven_of(rows, shipping_ms=parse_place("parquet:/trail").shipping_ms) == []


def test_only_the_times_that_are_judged_are_unproven(spark: Any) -> None:
    rows = trail_frame(spark, without(long_trail("p", 200, ends=False), 20, 100))
    found = unproven_of(rows, from_ms=BEGAN_AT + 96_000, to_ms=BEGAN_AT + 300_000)
    assert found == [("p", "gap", 100, 1, *seconds(96, 101)), ("p", "tail", 199, 0, *seconds(194, 300))]


def test_live_trail_is_not_dead_in_wider_audit(spark: Any) -> None:
    told = marked(READ_AT - 9_000).rows + long_trail("killed", 200, ends=False).rows
    rows = trail_frame(spark, told)
    pieces = proof.pieces(rows)
    trails = proof.trails(pieces)
    end = proof.audit_end(trails, read_at_ms=BEGAN_AT + READ_AT, to_ms=BEGAN_AT + READ_AT + 60_000)
    unproven = proof.unproven(proof.gaps(rows, pieces, trails), proof.tails(trails, end), end, from_ms=None)
    said = {row.proxy: row.detail for row in of_unproven(unproven, TAIL).collect()}
    assert "continues: its last rows before the end of this audit had not arrived" in said["marked"]
    assert "killed or cut off" in said["killed"]


def test_rows_that_were_shipped_twice_count_once(spark: Any) -> None:
    many = long_trail("p", 200)
    rows = trail_frame(spark, many.rows + many.rows[10:90] + many.rows[150:151])
    once = proof.each_once(rows, proof.pieces(rows))
    assert sorted(row.sequence for row in once.collect()) == list(range(201))


def page(rows: list[Row]) -> str:
    return "\n".join(json.dumps({name: value for name, value in row.items() if value is not None}) for row in rows)


def told(frame: Any) -> list[Row]:
    return sorted((row.asDict() for row in frame.collect()), key=lambda row: row["sequence"])


def whole(rows: list[Row]) -> list[Row]:
    return [{name: row.get(name) for name in SHIPPED_SCHEMA.names} for row in rows]


BAD = [
    '{"kind":"range","proxy":"p","incarnation":"p","sequence":900,"at":1,"topic":"t","spans":[1]}',
    '{"kind":"range","proxy":"p","incarnation":"p","sequence":901,"at":1}',
    '{"kind":"begin","proxy":"p","sequence":902,"at":1}',
    '{"kind":"other","proxy":"p","incarnation":"p","sequence":903,"at":1}',
    '{"kind":"mark","proxy":"p","incarn',
    "",
]


def test_json_files_are_read_without_torn_rows(spark: Any, tmp_path: Path) -> None:
    trail = long_trail("p", 5)
    (tmp_path / "a.jsonl").write_text("\n".join([page(trail.rows), *BAD]))
    (tmp_path / "a.jsonl.tmp").write_text(page(long_trail("q", 5).rows))
    assert told(read_files(spark, parse_place(f"json:{tmp_path}"))) == whole(trail.rows)


def test_parquet_files_are_read_at_any_integer_width(spark: Any, tmp_path: Path) -> None:
    trail = long_trail("p", 5)
    narrow = trail_frame(spark, trail.rows).drop("shipped_at").withColumn("batches", trail_frame_column("batches"))
    narrow.write.mode("overwrite").parquet(str(tmp_path / "trail"))
    # A killed process left it, and it is not whole.
    (tmp_path / "trail" / "kproxy-audit-1-2-000003.parquet.tmp").write_bytes(b"PAR1")
    assert told(read_files(spark, parse_place(f"parquet:{tmp_path}/trail"))) == whole(trail.rows)


def test_files_of_several_releases_are_read_together(spark: Any, tmp_path: Path) -> None:
    """The columns of one file are not those of all: of the later rows no topic's id may be forgotten."""
    trail = Trail("p", "p")
    trail.acked("topic", 0, 10, at=1_000)
    trail.acked("topic", 10, 10, at=2_000, topic_id="0f")
    rows = [{name: row.get(name) for name in SCHEMA.names} for row in trail.rows]
    earlier = pyarrow.Table.from_pylist(rows[:2], SCHEMA).drop_columns(["topic_id", "mark_ms"])
    later = pyarrow.Table.from_pylist(rows[2:], SCHEMA).append_column("surplus", [["of the future"]])
    for name, table in (("1", earlier), ("2", later)):
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    expected = whole(trail.rows)
    expected[0]["mark_ms"] = None
    assert told(read_files(spark, parse_place(f"parquet:{tmp_path}"))) == expected


def test_a_file_that_is_not_whole_is_named(spark: Any, tmp_path: Path) -> None:
    whole_one = pyarrow.Table.from_pylist([dict.fromkeys(SCHEMA.names)], SCHEMA)
    pyarrow.parquet.write_table(whole_one, tmp_path / "1.parquet")
    (tmp_path / "2.parquet").write_bytes((tmp_path / "1.parquet").read_bytes()[:-100])
    with (
        pytest.raises(SparkFailed, match=r"The trail could not be read: .*2\.parquet"),
        as_spark_failure("The trail could not be read"),
    ):
        read_files(spark, parse_place(f"parquet:{tmp_path}")).collect()


def trail_frame_column(name: str) -> Any:
    from pyspark.sql import functions

    return functions.col(name).cast("int")


def test_topic_pages_are_read_with_their_ship_time(spark: Any) -> None:
    trail = long_trail("p", 5)
    messages = [(bytearray(page(trail.rows[:2]).encode()), 7.0), (bytearray("\n".join(BAD).encode()), 8.0)]
    messages.append((bytearray(page(trail.rows[2:]).encode()), 9.5))
    frame = spark.createDataFrame(messages, "value binary, seconds double").selectExpr(
        "value", "timestamp_millis(cast(seconds * 1000 as long)) as timestamp"
    )
    shipped = [7_000, 7_000, 9_500, 9_500, 9_500, 9_500]
    expected = [{**row, "shipped_at": at} for row, at in zip(whole(trail.rows), shipped, strict=True)]
    assert told(rows_of(frame)) == expected


@pytest.mark.parametrize("text", ["", "topic:", "json", "csv:/tmp"])
def test_invalid_trail_location_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="give topic:NAME, json:DIR or parquet:DIR"):
        parse_place(text)


def test_a_directory_that_is_not_there_is_named(spark: Any, tmp_path: Path) -> None:
    for kind in ("json", "parquet"):
        with pytest.raises(StartupError, match=r"no audit trail in .*nowhere"):
            read_files(spark, parse_place(f"{kind}:{tmp_path}/nowhere"))

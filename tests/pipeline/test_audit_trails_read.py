"""Spark reads trails from files and topics: whole rows, of any release, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.audit.run_spark import OnSpark, spark_in
from kproxy.pipeline.audit.trail_place import JSON, TrailPlace, parse_place
from kproxy.pipeline.audit.trail_rows import TrailRow
from kproxy.pipeline.spark import SparkFailed, as_spark_failure
from kproxy.trail.parquet_sink import SCHEMA
from kproxy.trail.signature import signed
from tests.support.audit.frames import trail_frame
from tests.support.audit.trails import BAD_LINES, Trail, page, trail_rows

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def long_trail(proxy: str, rows: int) -> Trail:
    trail = Trail(proxy, proxy)
    for n in range(1, rows):
        trail.acked("topic", n * 10, 10, at=n * 1000)
    trail.end(rows * 1000)
    return trail


@pytest.fixture
def engine(spark: Any, tmp_path: Path) -> Iterator[OnSpark]:
    with spark_in(spark, str(tmp_path / "_kept")) as engine:
        yield engine


def told(rows: Iterable[TrailRow]) -> list[TrailRow]:
    return sorted(rows, key=lambda row: row.sequence)


def test_json_files_are_read_without_torn_rows(engine: OnSpark, tmp_path: Path) -> None:
    trail = long_trail("p", 5)
    (tmp_path / "a.jsonl").write_text("\n".join([page(trail.rows), *BAD_LINES]))
    (tmp_path / "a.jsonl.tmp").write_text(page(long_trail("q", 5).rows))
    assert told(engine.files(parse_place(f"json:{tmp_path}"), None, None)) == trail_rows(trail.rows)


def test_rows_without_a_signature_are_left_out(engine: OnSpark, tmp_path: Path) -> None:
    trail, key = long_trail("p", 5), b"k" * 16
    lines = [line.encode() for line in page(trail.rows).split("\n")]
    text = b"\n".join([*(signed(line, key) for line in lines[:3]), lines[3], signed(lines[4], b"o" * 16)])
    (tmp_path / "a.jsonl").write_bytes(text)
    place = TrailPlace(JSON, str(tmp_path), (b"other" * 4, key))
    assert told(engine.files(place, None, place.signatures())) == trail_rows(trail.rows[:3])


def test_parquet_files_are_read_at_any_integer_width(spark: Any, engine: OnSpark, tmp_path: Path) -> None:
    trail = long_trail("p", 5)
    narrow = trail_frame(spark, trail.rows).drop("shipped_at").withColumn("batches", trail_frame_column("batches"))
    narrow.write.mode("overwrite").parquet(str(tmp_path / "trail"))
    # A killed process left an incomplete file.
    (tmp_path / "trail" / "kproxy-audit-1-2-000003.parquet.tmp").write_bytes(b"PAR1")
    assert told(engine.files(parse_place(f"parquet:{tmp_path}/trail"), None, None)) == trail_rows(trail.rows)


def test_files_of_several_releases_are_read_together(engine: OnSpark, tmp_path: Path) -> None:
    """Files may lack columns that others have, such as the topic id, which must not be lost."""
    trail = Trail("p", "p")
    trail.acked("topic", 0, 10, at=1_000)
    trail.acked("topic", 10, 10, at=2_000, topic_id="0f")
    rows = [{name: row.get(name) for name in SCHEMA.names} for row in trail.rows]
    earlier = pyarrow.Table.from_pylist(rows[:2], SCHEMA).drop_columns(["topic_id", "mark_ms"])
    later = pyarrow.Table.from_pylist(rows[2:], SCHEMA).append_column("surplus", [["of the future"]])
    for name, table in (("1", earlier), ("2", later)):
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    expected = trail_rows(trail.rows)
    expected[0].mark_ms = None
    assert told(engine.files(parse_place(f"parquet:{tmp_path}"), None, None)) == expected


def test_incomplete_file_is_named(engine: OnSpark, tmp_path: Path) -> None:
    whole_one = pyarrow.Table.from_pylist([dict.fromkeys(SCHEMA.names)], SCHEMA)
    pyarrow.parquet.write_table(whole_one, tmp_path / "1.parquet")
    (tmp_path / "2.parquet").write_bytes((tmp_path / "1.parquet").read_bytes()[:-100])
    with (
        pytest.raises(SparkFailed, match=r"The trail could not be read: .*2\.parquet"),
        as_spark_failure("The trail could not be read"),
    ):
        engine.files(parse_place(f"parquet:{tmp_path}"), None, None)


def trail_frame_column(name: str) -> Any:
    from pyspark.sql import functions

    return functions.col(name).cast("int")


def test_missing_directory_is_named(engine: OnSpark, tmp_path: Path) -> None:
    for kind in ("json", "parquet"):
        with pytest.raises(StartupError, match=r"no audit trail in .*nowhere"):
            engine.files(parse_place(f"{kind}:{tmp_path}/nowhere"), None, None)

"""Spark reads trails from files as the reader without Spark does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.audit.run_spark import spark_in
from kproxy.pipeline.audit.trail_place import parse_place
from kproxy.pipeline.audit.trail_rows import TrailRow
from kproxy.pipeline.spark import SparkFailed, as_spark_failure
from kproxy.trail.parquet_sink import SCHEMA
from kproxy.trail.signature import Signatures
from tests.unit.pipeline.test_audit_trail_reader import (  # noqa: F401
    Reader,
    test_json_files_are_read_without_torn_rows,
    test_parquet_files_of_several_releases_are_read,
    test_rows_without_a_signature_are_left_out,
)

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture
def read(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with spark_in(spark, str(tmp_path_factory.mktemp("kept"))) as engine:

        def read(place: str, from_ms: int | None = None, signatures: Signatures | None = None) -> list[TrailRow]:
            return sorted(engine.files(parse_place(place), from_ms, signatures), key=lambda row: row.sequence)

        yield read


def test_incomplete_file_is_named(read: Reader, tmp_path: Path) -> None:
    whole_one = pyarrow.Table.from_pylist([dict.fromkeys(SCHEMA.names)], SCHEMA)
    pyarrow.parquet.write_table(whole_one, tmp_path / "1.parquet")
    (tmp_path / "2.parquet").write_bytes((tmp_path / "1.parquet").read_bytes()[:-100])
    with (
        pytest.raises(SparkFailed, match=r"The trail could not be read: .*2\.parquet"),
        as_spark_failure("The trail could not be read"),
    ):
        read(f"parquet:{tmp_path}")


def test_missing_directory_is_named(read: Reader, tmp_path: Path) -> None:
    for kind in ("json", "parquet"):
        with pytest.raises(StartupError, match=r"no audit trail in .*nowhere"):
            read(f"{kind}:{tmp_path}/nowhere")

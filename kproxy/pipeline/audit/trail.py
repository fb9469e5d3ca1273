"""Read a trail from its topic or files, one row for each trail row.

Text that is not a trail row is skipped, such as the partial last line of a killed proxy. The row's sequence number is
then missing, which the audit reports as a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.pandas.types import from_arrow_schema

from kproxy.errors import StartupError
from kproxy.pipeline.audit.spark_tasks import SignedLines, rows_of_proxies
from kproxy.pipeline.audit.trail_place import JSON, TrailPlace
from kproxy.trail.parquet_sink import SCHEMA
from kproxy.trail.signature import DIGEST_BYTES


def read_files(session: Any, place: TrailPlace, *, from_ms: int | None = None) -> DataFrame:
    """Return the rows closed from `from_ms` on, with a proxy's columns and `shipped_at`, which is null for files.

    Raise StartupError if there are no files.
    """
    try:
        if place.kind == JSON:
            texts = session.read.option("pathGlobFilter", "*.jsonl").text(place.name)
            lines = texts.select(F.lit(None).cast("long").alias("shipped_at"), F.col("value").alias("line"))
            rows = _rows_in(lines, place.keys)
        else:
            files = session.read.option("pathGlobFilter", "*.parquet")
            # Fails if there are no files. Its schema is unused: other files may have more columns, or wider numbers.
            files.parquet(place.name)
            read = files.schema(from_arrow_schema(SCHEMA)).parquet(place.name)
            nothing = {"shipped_at": "long", "previous": "string", "digest": "string"}
            rows = _checked(read.withColumns({name: F.lit(None).cast(kind) for name, kind in nothing.items()}))
    except AnalysisException as error:
        raise StartupError(
            f"There is no audit trail in {place.name}: is it the directory of `--audit-sink`?"
        ) from error
    return rows if from_ms is None else rows.where(F.col("at") >= from_ms)


def rows_of(pages: DataFrame, keys: Sequence[bytes] = ()) -> DataFrame:
    """Return the rows, as `read_files` does, of `pages` from a topic: PAGES."""
    line = F.explode(F.split(F.col("page").cast("string"), "\n")).alias("line")
    return _rows_in(pages.select("shipped_at", line), keys)


def _rows_in(lines: DataFrame, keys: Sequence[bytes]) -> DataFrame:
    """Return the rows in lines, with `keys` only the signed ones."""
    if keys:
        lines = lines.mapInArrow(SignedLines(tuple(keys)), lines.schema)
    schema = from_arrow_schema(SCHEMA).add("previous", "string")
    digest = F.substring(F.sha2(F.encode("line", "utf-8"), 256), 1, 2 * DIGEST_BYTES).alias("digest")
    parsed = lines.select(F.from_json("line", schema).alias("row"), "shipped_at", digest)
    return _checked(parsed.select("row.*", "shipped_at", "digest"))


def _checked(rows: DataFrame) -> DataFrame:
    """Return the rows that a proxy may have written."""
    return rows.mapInArrow(rows_of_proxies, rows.schema)

"""Rows of trails and logs as Spark's frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from kproxy.pipeline.audit.columns import BOUNDS, LOG, ddl
from kproxy.trail.parquet_sink import SCHEMA
from tests.support.audit.trails import Row

_READ = (
    StructField("previous", StringType()),
    StructField("shipped_at", LongType()),
    StructField("digest", StringType()),
)
SHIPPED_SCHEMA = StructType([*from_arrow_schema(SCHEMA).fields, *_READ])


def _frame(spark: Any, rows: Iterable[Row], names: Iterable[str], schema: Any) -> DataFrame:
    return spark.createDataFrame([tuple(map(row.get, names)) for row in rows], schema).coalesce(1)


def trail_frame(spark: Any, rows: Iterable[Row]) -> DataFrame:
    return _frame(spark, rows, SHIPPED_SCHEMA.names, SHIPPED_SCHEMA)


def log_frame(spark: Any, rows: Iterable[Row]) -> DataFrame:
    return _frame(spark, rows, LOG, ddl(LOG))


def bounds_frame(spark: Any, rows: Iterable[Row]) -> DataFrame:
    return _frame(spark, rows, BOUNDS, ddl(BOUNDS))

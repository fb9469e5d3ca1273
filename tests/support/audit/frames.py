"""Rows of trails and logs as Spark's frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import LongType, StructField, StructType

from kproxy.pipeline.audit.schemas import BOUNDS_SCHEMA, LOG_SCHEMA, TRAIL_SCHEMA
from tests.support.audit.trails import Row

SHIPPED_SCHEMA = StructType([*TRAIL_SCHEMA.fields, StructField("shipped_at", LongType())])


def _frame(spark: Any, rows: Iterable[Row], schema: StructType) -> DataFrame:
    return spark.createDataFrame([tuple(row.get(name) for name in schema.names) for row in rows], schema).coalesce(1)


def trail_frame(spark: Any, rows: Iterable[Row]) -> DataFrame:
    return _frame(spark, rows, SHIPPED_SCHEMA)


def log_frame(spark: Any, rows: Iterable[Row]) -> DataFrame:
    return _frame(spark, rows, LOG_SCHEMA)


def bounds_frame(spark: Any, rows: Iterable[Row]) -> DataFrame:
    return _frame(spark, rows, BOUNDS_SCHEMA)

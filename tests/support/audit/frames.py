"""Rows of trails as Spark's frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from kproxy.trail.parquet_sink import SCHEMA
from tests.support.audit.trails import Row

_READ = (
    StructField("previous", StringType()),
    StructField("shipped_at", LongType()),
    StructField("digest", StringType()),
)
SHIPPED_SCHEMA = StructType([*from_arrow_schema(SCHEMA).fields, *_READ])


def trail_frame(spark: Any, rows: Iterable[Row]) -> DataFrame:
    return spark.createDataFrame([tuple(map(row.get, SHIPPED_SCHEMA.names)) for row in rows], SHIPPED_SCHEMA).coalesce(
        1
    )

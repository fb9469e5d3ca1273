"""The audit's columns (`columns.py`) as schemas of Spark."""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from kproxy.pipeline.audit import columns
from kproxy.pipeline.audit.columns import Columns

_TYPES: Final[dict[str, DataType]] = {
    "string": StringType(),
    "int": IntegerType(),
    "long": LongType(),
    "boolean": BooleanType(),
    "double": DoubleType(),
    "timestamp": TimestampType(),
    "array<int>": ArrayType(IntegerType()),
    "array<long>": ArrayType(LongType()),
}


def as_schema(names: Columns) -> StructType:
    return StructType([StructField(name, _TYPES[kind]) for name, kind in names.items()])


TRAIL_SCHEMA: Final = as_schema(columns.TRAIL)
LOG_SCHEMA: Final = as_schema(columns.LOG)
BOUNDS_SCHEMA: Final = as_schema(columns.BOUNDS)
WINDOWS_SCHEMA: Final = as_schema(columns.WINDOWS)
PARTITIONS_SCHEMA: Final = as_schema(columns.PARTITIONS)
FINDINGS_SCHEMA: Final = as_schema(columns.FINDINGS)
OWNERS_SCHEMA: Final = as_schema(columns.OWNERS)
THROUGHPUT_SCHEMA: Final = as_schema(columns.THROUGHPUT)

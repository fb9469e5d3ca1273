"""The columns that a proxy writes to Parquet files and the columns that the audit reads are the same."""

from __future__ import annotations

from pyspark.sql.pandas.types import from_arrow_schema

from kproxy.pipeline.audit.schemas import TRAIL_SCHEMA
from kproxy.trail.parquet_sink import SCHEMA


def test_proxy_files_have_the_columns_the_audit_reads() -> None:
    assert from_arrow_schema(SCHEMA) == TRAIL_SCHEMA

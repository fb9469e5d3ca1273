"""The tables that an audit results in, and their place on disk: one directory of Parquet files for each.

Whatever is said of an audit, on a terminal or in a report, is made from these tables, so that it can be made again from
the files, and people can ask them other questions with any tool that reads Parquet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from kproxy.errors import StartupError
from kproxy.pipeline.audit.schemas import (
    FINDINGS_SCHEMA,
    OWNERS_SCHEMA,
    PARTITIONS_SCHEMA,
    THROUGHPUT_SCHEMA,
    WINDOWS_SCHEMA,
)
from kproxy.pipeline.spark import as_spark_failure

# What was audited, as label and text; one row each. Last to be written: a directory that has it is whole.
ABOUT = "about"
_ABOUT_SCHEMA = "label string, text string"


@dataclass(frozen=True, slots=True)
class Tables:
    """What an audit found; `kproxy/pipeline/audit/schemas.py` has the columns. None of it is collected by itself.

    `windows`: one row for each topic, partition and window of time. `partitions`: the same over all time.
    `findings`: what is wrong or cannot be known, one row each. `owners`: which broker acknowledged what, from when to
    when, under which ownership revision. `throughput`: records and bytes by window and owner.
    """

    windows: DataFrame
    partitions: DataFrame
    findings: DataFrame
    owners: DataFrame
    throughput: DataFrame


NAMES = tuple(field.name for field in fields(Tables))
SCHEMAS: Final = {
    "windows": WINDOWS_SCHEMA,
    "partitions": PARTITIONS_SCHEMA,
    "findings": FINDINGS_SCHEMA,
    "owners": OWNERS_SCHEMA,
    "throughput": THROUGHPUT_SCHEMA,
}


def write_results(tables: Tables, directory: str, about: Mapping[str, str]) -> None:
    """Write all tables to `directory`, a path or any address that Spark writes to, in the place of earlier ones.

    `about` says what was audited. Raises SparkFailed.
    """
    with as_spark_failure(f"The audit's results could not be written to {directory}"):
        session = tables.partitions.sparkSession
        for name in NAMES:
            getattr(tables, name).write.mode("overwrite").parquet(_place(directory, name))
        rows = [(label, text) for label, text in about.items()]
        session.createDataFrame(rows, _ABOUT_SCHEMA).coalesce(1).write.mode("overwrite").parquet(
            _place(directory, ABOUT)
        )


def read_results(session: SparkSession, directory: str) -> tuple[Tables, dict[str, str]]:
    """The tables in `directory`, and what they are about. Raises StartupError where they are not all there."""
    try:
        # By the files themselves Spark would read one of each table first.
        read = {name: session.read.schema(SCHEMAS[name]).parquet(_place(directory, name)) for name in NAMES}
        about = session.read.schema(_ABOUT_SCHEMA).parquet(_place(directory, ABOUT)).collect()
    except AnalysisException as error:
        raise StartupError(
            f"{directory} has no audit's results: give a directory that `kproxy pipeline audit --output` wrote to."
        ) from error
    return Tables(**read), {row.label: row.text for row in about}


def _place(directory: str, name: str) -> str:
    return f"{directory.rstrip('/') or '/'}/{name}"

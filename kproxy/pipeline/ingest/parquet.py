"""Columns that Parquet files have and the schema lacks: Spark's reader would leave them out without a word."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from kproxy.pipeline.ingest.behind import taken


class NewColumns(Exception):
    """The file at `path` has columns of these `names`, which the schema lacks."""

    def __init__(self, path: str, names: list[str]) -> None:
        super().__init__(f"{path} has what the schema lacks ({', '.join(names)})")
        self.path = path
        self.names = names


def check_files(
    session: SparkSession, checkpoint: str, number: int, schema: StructType, options: Mapping[str, str]
) -> None:
    """Raises NewColumns for the first file of the micro-batch `number` with a column that `schema` lacks.

    Their footers are read for it; `options` are those of Spark's reader. Raises PySparkException for files that cannot
    be read.
    """
    paths = _files_of(session, checkpoint, number)
    # They are names of files, and no patterns.
    reader = session.read.options(**options).option("__globPaths__", "false")
    try:
        if not paths or not lacking(schema, reader.option("mergeSchema", "true").parquet(*paths).schema):
            return
    except PySparkException as error:
        # What differs in a type from file to file cannot be merged, and may well be read as the schema has it.
        if "CANNOT_MERGE" not in str(error):
            raise
    for path in paths:
        if names := lacking(schema, reader.option("mergeSchema", "false").parquet(path).schema):
            raise NewColumns(path, names)


def _files_of(session: SparkSession, checkpoint: str, number: int) -> list[str]:
    """By Spark's own lists: how far into its log of files each micro-batch goes, and that log."""
    end = _log_offset(session, checkpoint, number)
    before = _log_offset(session, checkpoint, number - 1) if number else -1
    log_offset = F.col("log_offset")
    files = taken(session, checkpoint).where((log_offset > before) & (log_offset <= end))
    return sorted({str(row["path"]) for row in files.collect()})


def _log_offset(session: SparkSession, checkpoint: str, number: int) -> int:
    lines = session.read.text(f"{checkpoint}/offsets/{number}").where(F.col("value").contains('"logOffset"'))
    return int(json.loads(lines.collect()[-1]["value"])["logOffset"])


def lacking(schema: DataType, found: DataType, path: str = "") -> list[str]:
    """The names in `found` that `schema` does not have, with those of the columns that they are in. Pure.

    Compared as Spark's Parquet reader does, for which `ID` is `id`.
    """
    if isinstance(schema, StructType) and isinstance(found, StructType):
        known = {field.name.lower(): field.dataType for field in schema.fields}
        names = []
        for field in found.fields:
            kind = known.get(field.name.lower())
            name = f"{path}{field.name}"
            names += [name] if kind is None else lacking(kind, field.dataType, f"{name}.")
        return names
    if isinstance(schema, ArrayType) and isinstance(found, ArrayType):
        return lacking(schema.elementType, found.elementType, path)
    if isinstance(schema, MapType) and isinstance(found, MapType):
        return lacking(schema.valueType, found.valueType, path)
    return []

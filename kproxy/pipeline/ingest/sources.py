"""Where rows come from: the streaming DataFrame of a source, and the schema of one that has none of its own."""

from __future__ import annotations

import json
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import StringType, StructType

from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import FileSource, IngestOptions, KafkaSource, RateSource
from kproxy.pipeline.ingest.transforms import BLOCK, CORRUPT, FILE, MODIFIED
from kproxy.pipeline.spark import SparkFailed, as_spark_failure, cause_in

# A block is what one task reads; lines are counted within it (`transforms.placed`), so it may not depend on how many
# cores there are. Files below this size are a block each.
BLOCK_BYTES: Final = 128 << 20
# A header that does not fit the schema is an error, and not columns that have changed places; a line is looked at as a
# whole, and not only where a column is asked for.
_READER_OPTIONS: Final = {
    "csv": {"header": "true", "enforceSchema": "false", "columnPruning": "false"},
    "json": {},
    "parquet": {},
}
# What cannot be parsed is told, and told where it is looked for: nobody's options may have it become nulls.
_REQUIRED: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}


def own_session(session: SparkSession) -> SparkSession:
    """`session` again, with settings of its own: those that rows are counted by are not everybody's."""
    with as_spark_failure("Spark did not take the job"):
        ours = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())
        # So that neither the number of cores nor that of files has a say in where a block ends.
        ours.conf.set("spark.sql.files.maxPartitionBytes", str(BLOCK_BYTES))
        ours.conf.set("spark.sql.files.openCostInBytes", str(BLOCK_BYTES))
        ours.conf.unset("spark.sql.files.maxPartitionNum")
        # Kafka's sink as Spark's streams use it: by its older interface it would tell nobody what it has counted.
        ours.conf.set("spark.sql.sources.useV1SourceList", "avro,csv,json,orc,parquet,text")
    return ours


def parse_schema(text: str) -> StructType:
    """DDL (`id INT, name STRING`) or Spark's JSON of a schema. Raises StartupError. Needs a session."""
    from pyspark.errors import PySparkException

    try:
        schema = StructType.fromJson(json.loads(text)) if text.lstrip().startswith("{") else StructType.fromDDL(text)
    except (PySparkException, ValueError, KeyError, TypeError) as error:
        raise StartupError(
            f"--schema cannot be read ({cause_in(str(error))}): give DDL, as in 'id INT, name STRING', or Spark's JSON."
        ) from error
    if not isinstance(schema, StructType) or not schema.fields:
        raise StartupError("--schema has no columns: give DDL, as in 'id INT, name STRING', or Spark's JSON.")
    taken = [name for name in schema.names if name.startswith("_kproxy_")]
    if taken:
        raise StartupError(f"--schema has a column {taken[0]}: names that begin with _kproxy_ are taken.")
    return schema


def infer_schema(session: SparkSession, source: FileSource) -> StructType:
    """From the files that are there now, all of which are read for it. Raises StartupError where there are none."""
    options = {"inferSchema": "true", **_READER_OPTIONS[source.format], **source.options, **_REQUIRED}
    with_hint = f"give --schema, or put a file there that has the columns ({source.path})"
    try:
        with as_spark_failure("The schema could not be inferred"):
            found = session.read.format(source.format).options(**options).load(source.path).schema
    except SparkFailed as error:
        if any(known in str(error) for known in ("UNABLE_TO_INFER_SCHEMA", "PATH_NOT_FOUND")):
            raise StartupError(f"there are no files yet to infer a schema from: {with_hint}.") from error
        raise
    schema = StructType([field for field in found.fields if field.name != CORRUPT])
    if not schema.fields:
        raise StartupError(f"no column can be found in the files that are there: {with_hint}.")
    return schema


def read(session: SparkSession, options: IngestOptions, schema: StructType | None) -> DataFrame:
    """The stream of a source; files with the columns that `transforms.placed` needs.

    Raises StartupError where there is nothing at its path, SparkFailed for what else Spark has against it.
    """
    source = options.source
    try:
        with as_spark_failure("The source cannot be read"):
            if isinstance(source, FileSource):
                assert schema is not None  # noqa: S101 - given or inferred by the caller
                return _files(session, source, schema)
            if isinstance(source, KafkaSource):
                return _records(session, source, options.copy_headers)
            return _numbers(session, source)
    except SparkFailed as error:
        if isinstance(source, FileSource) and "PATH_NOT_FOUND" in str(error):
            raise StartupError(
                f"there is nothing at {source.path}: make the directory, files may come later."
            ) from error
        raise


def _files(session: SparkSession, source: FileSource, schema: StructType) -> DataFrame:
    expected = StructType([*schema.fields])
    if source.format != "parquet":
        expected.add(CORRUPT, StringType())
    settings = {**_READER_OPTIONS[source.format], **source.options, **_REQUIRED}
    reader = session.readStream.format(source.format).schema(expected).options(**settings)
    rows = reader.option("maxFilesPerTrigger", source.max_files).load(source.path)
    place = {FILE: "file_path", MODIFIED: "file_modification_time", BLOCK: "file_block_start"}
    return rows.select("*", *(F.col(f"_metadata.{theirs}").alias(ours) for ours, theirs in place.items()))


def _records(session: SparkSession, source: KafkaSource, with_headers: bool) -> DataFrame:
    settings: dict[str, Any] = {
        "startingOffsets": source.starting_offsets,
        "maxOffsetsPerTrigger": source.max_offsets,
        **source.options,
        "kafka.bootstrap.servers": source.bootstrap,
        "subscribe": source.topics,
        "includeHeaders": with_headers,
    }
    return session.readStream.format("kafka").options(**settings).load()


def _numbers(session: SparkSession, source: RateSource) -> DataFrame:
    return session.readStream.format("rate").option("rowsPerSecond", source.rows_per_second).load()

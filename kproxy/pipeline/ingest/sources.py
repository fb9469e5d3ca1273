"""Open a source as a streaming DataFrame, infer its schema, and count the files or records that are left to read."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import StructType

from kproxy.errors import StartupError
from kproxy.pipeline.data_sources import SOURCES
from kproxy.pipeline.ingest import csv_values
from kproxy.pipeline.ingest.csv_values import TIMESTAMP_FORMAT
from kproxy.pipeline.ingest.documents import opened
from kproxy.pipeline.ingest.options import ALL_HEADERS, FILES_PER_CORE, SPARKS, IngestOptions
from kproxy.pipeline.ingest.transforms import BLOCK, CORRUPT, FILE, MODIFIED, TEXT, numbered, quoted
from kproxy.pipeline.spark import SparkFailed, as_spark_failure, cause_in, cloned

# A partition of the stream is one block. Lines are counted within it (`transforms.placed`), so it must not depend on
# the number of cores. Smaller files are a block each.
BLOCK_BYTES: Final = 128 << 20
# RFC 4180: a quote within quotes is doubled, and newlines are allowed there. A header that does not fit the schema is
# an error, not a change of the columns' order. A row is always parsed whole, not only the columns in use.
_CSV: Final = {"header": "true", "escape": '"', "multiLine": "true", "enforceSchema": "false", "columnPruning": "false"}
# By default Spark leaves out files a week older than the newest. This is longer than any file is old.
_MAX_AGE: Final = "100000d"
# Options that tell which files are the source's.
_FILTERS: Final = ("pathglobfilter", "recursivefilelookup")
# Rows that cannot be parsed go to the column CORRUPT. No option of the user may turn them into nulls.
_REQUIRED: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
# The first lines of JSON documents over several lines, and the advice for them.
PRETTY: Final = ("{", "[", "[{")
OVER_LINES: Final = "JSON over several lines: give --source-option multiLine=true"
# Spark's error for a column that it cannot read, such as TIME, UUID and FLOAT16.
PARQUET_TYPE: Final = r"PARQUET_TYPE_ILLEGAL\] Illegal Parquet type: (?P<type>.+?)\.?(?: SQLSTATE|$)"
# The most files that a schema is inferred from.
SAMPLE_FILES: Final = 20
# Characters that make a path a pattern for Hadoop.
_GLOB: Final = re.compile(r"[{}\[\]*?\\]")
_BOM: Final = "\ufeff"
_ALL: Final = (1 << 31) - 1
_LAST: Final = (1 << 63) - 1


def own_session(session: SparkSession) -> SparkSession:
    """Clone `session` with the settings that rows are counted by, so that the caller's stay as they are."""
    with as_spark_failure("Spark did not take the job"):
        ours = cloned(session)
        # So that block boundaries depend neither on the number of cores nor on the number of files.
        ours.conf.set("spark.sql.files.maxPartitionBytes", str(BLOCK_BYTES))
        ours.conf.set("spark.sql.files.openCostInBytes", str(BLOCK_BYTES))
        ours.conf.unset("spark.sql.files.maxPartitionNum")
        # Spark lists a micro-batch's files in a job, by default with a task for each file.
        cores = str(session.sparkContext.defaultParallelism)
        ours.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", cores)
        # Spark has no type for timestamps with nanoseconds. As numbers they keep their digits.
        ours.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")
        # Spark 4.2 refuses half of a surrogate pair, also where it only checks a document that is written as it is.
        ours.conf.set("spark.sql.variant.validateUnicodeInJsonParsing", "false")
    return ours


def parse_schema(text: str) -> StructType:
    """Parse DDL (`id INT, name STRING`) or Spark's JSON of a schema. Raise StartupError. Needs a session."""
    from pyspark.errors import PySparkException

    try:
        schema = StructType.fromJson(json.loads(text)) if text.lstrip().startswith("{") else StructType.fromDDL(text)
    except (PySparkException, ValueError, KeyError, TypeError) as error:
        raise StartupError(
            f"--schema cannot be read ({cause_in(str(error))}): give DDL, as in 'id INT, name STRING', or Spark's JSON."
        ) from error
    if not isinstance(schema, StructType) or not schema.fields:
        raise StartupError("--schema has no columns: give DDL, as in 'id INT, name STRING', or Spark's JSON.")
    if twice := _twice(schema.names):
        raise StartupError(f"--schema has the name {twice} twice, and Spark does not tell ID from id: rename one.")
    taken = [name for name in schema.names if name.startswith("_kproxy_")]
    if taken:
        raise StartupError(f"--schema has a column {taken[0]}: names that begin with _kproxy_ are reserved.")
    return schema


def infer_schema(session: SparkSession, options: IngestOptions) -> StructType:
    """Infer the schema from SAMPLE_FILES of the existing files. Raise StartupError if none can be found."""
    where, sample = options.where, _sample(session, options)
    with_hint = f"give --schema, or put a file there that has the columns ({where})"
    if not sample:
        raise StartupError(f"there are no files yet to infer a schema from: {with_hint}.")
    settings = {
        "inferSchema": "true",
        # By default Spark infers a time without a date as TIMESTAMP, and no row would have a valid value.
        "timestampformat": TIMESTAMP_FORMAT,
        **reader_options(options),
        # Like the stream: paths are not patterns, and directories below the source give columns.
        "__globPaths__": "false",
        **({} if _GLOB.search(where) else {"basePath": where}),
    }
    reader = session.read.options(**settings)
    try:
        with as_spark_failure("The schema could not be inferred"):
            found = reader.format(options.format).load(sample).schema
    except SparkFailed as error:
        if "COLUMN_ALREADY_EXISTS" in str(error):
            raise StartupError(
                f"no schema can be inferred from fields that differ only in case ({cause_in(str(error))}): give a "
                "--schema with one of them (--on-new-columns add writes documents of JSON with all of them)."
            ) from error
        if type_ := re.search(PARQUET_TYPE, str(error)):
            raise StartupError(
                f"a file in {where} has a column of a type that Spark does not read ({type_['type']}): give a "
                "--schema that lacks it, with --on-new-columns ignore."
            ) from error
        raise
    schema = StructType([field for field in found.fields if field.name != CORRUPT])
    odd = any(csv_values.REPLACED in name or "\0" in name for name in schema.names)
    if options.format == "csv" and odd and not csv_values.names_encoding(options.source_options):
        raise StartupError(
            f"the header of a file in {where} is not UTF-8: name its encoding with --source-option "
            "encoding=NAME, for example ISO-8859-1 or UTF-16."
        )
    _check_first_line(reader, options, sample)
    if not schema.fields:
        raise StartupError(f"no column can be found in the files that are there: {with_hint}.")
    return schema


def _sample(session: SparkSession, options: IngestOptions) -> list[str]:
    """Return at most SAMPLE_FILES of the existing files, evenly spread over the sorted names, with the last."""
    paths = sorted(files_there(session, options))
    return paths[:: -math.ceil(len(paths) / SAMPLE_FILES)] if paths else []


def check_lines(session: SparkSession, options: IngestOptions) -> None:
    """Raise StartupError if the existing files have JSON over several lines, which would be corrupt line by line."""
    if options.format == "json" and (sample := _sample(session, options)):
        _check_first_line(session.read.options(**reader_options(options), __globPaths__="false"), options, sample)


def _check_first_line(reader: DataFrameReader, options: IngestOptions, paths: list[str]) -> None:
    """Raise StartupError for a CSV header with a name twice, and for a first line that only begins a JSON document."""
    settings, twice, line = reader_options(options), None, None
    with as_spark_failure(f"The files in {options.where} cannot be read"):
        if options.format == "csv" and settings["header"].lower() == "true":
            columns = reader.csv(paths, inferSchema=False, header=False)
            # The columns from directories have other names.
            row = columns.select(*(name for name in columns.columns if name.startswith("_c"))).first()
            twice = _twice(str(text) for text in row or () if text is not None)
        elif options.format == "json" and settings.get("multiline", "false").lower() == "false":
            line = reader.text(paths).where(F.col("value").rlike(r"\S")).select("value").first()
    if twice is not None:
        raise StartupError(
            f"the header of a file in {options.where} has the name {twice} twice, and Spark does not tell ID from id: "
            "give a --schema with other names, in the order of the columns, and --source-option enforceSchema=true."
        )
    if line is not None and line[0].strip() in PRETTY:
        raise StartupError(f"a file in {options.where} has {OVER_LINES}.")


def _twice(names: Iterable[str]) -> str | None:
    """Return the first name, in lower case, that Spark counts as a duplicate."""
    return next((name for name, count in Counter(map(str.lower, names)).items() if count > 1), None)


def read(session: SparkSession, options: IngestOptions, schema: StructType | None) -> DataFrame:
    """Return the stream of a source.

    Files have the columns that `transforms.placed` needs. Raise StartupError if its path does not exist, SparkFailed
    for any other error of Spark's.
    """
    try:
        with as_spark_failure("The source cannot be read"):
            if options.reads_kafka:
                return _records(session, options)
            if schema is not None and options.reads_files:
                return _files(session, options, schema)
            if options.format == SPARKS:
                return _of_sparks(session, options, schema)
            return numbered(session.readStream.format("rate").option("rowsPerSecond", options.rows_per_second).load())
    except SparkFailed as error:
        if options.reads_files and "PATH_NOT_FOUND" in str(error):
            raise StartupError(
                f"there is nothing at {options.where}: make the directory, files may come later."
            ) from error
        raise


def _files(session: SparkSession, options: IngestOptions, schema: StructType) -> DataFrame:
    settings, where = reader_options(options), options.where
    most = options.max_files_per_trigger or FILES_PER_CORE * session.sparkContext.defaultParallelism
    reader = session.readStream.options(**settings).option("maxFilesPerTrigger", most)
    if options.format == "json":
        wholetext = settings.get("multiline", "false")
        lines = _placed(reader.format("text").option("wholetext", wholetext).load(where))
        return _documents(lines, schema, settings, verbatim=options.verbatim)
    if options.format == "parquet":
        return _placed(reader.format("parquet").schema(schema).load(where))
    texts = reader.options(**{**csv_values.READER_OPTIONS, **settings}).schema(csv_values.texts_of(schema))
    return csv_values.valued(_placed(texts.format("csv").load(where)), schema, settings)


def _of_sparks(session: SparkSession, options: IngestOptions, schema: StructType | None) -> DataFrame:
    name, _, path = options.where.partition(":")
    for source in SOURCES:
        if name == source.name():
            session.dataSource.register(source)
    reader = session.readStream.format(name).options(**options.source_options)
    rows = (reader if schema is None else reader.schema(schema)).load(path or None)
    try:
        return _placed(rows)
    except AnalysisException:
        # Only sources of files tell where a row is from.
        return rows


def _placed(rows: DataFrame) -> DataFrame:
    place = {FILE: "file_path", MODIFIED: "file_modification_time", BLOCK: "file_block_start"}
    return rows.select("*", *(F.col(f"_metadata.{theirs}").alias(ours) for ours, theirs in place.items()))


def _documents(lines: DataFrame, schema: StructType, settings: Mapping[str, str], *, verbatim: bool) -> DataFrame:
    """Parse the `lines` of JSON files, or whole files; columns from directory names (`day=7/`) take precedence."""
    encoding = settings.get("encoding", settings.get("charset", "UTF-8"))
    text = F.col("value")
    if encoding.upper() != "UTF-8":
        text = F.decode(text.cast("binary"), encoding)
    kept = [name for name in lines.columns if name != "value"]
    # These functions keep bytes that are not UTF-8, so they are reported and not replaced by U+FFFD.
    text = F.when(text.startswith(_BOM), F.substring(text, 2, _ALL)).otherwise(text)
    named = lines.select(*map(quoted, kept), text.alias(TEXT))
    by_directory = {name.lower(): name for name in kept if not name.startswith("_kproxy_")}
    inside = StructType([field for field in schema.fields if field.name.lower() not in by_directory])
    rows = opened(named.where(F.col(TEXT).rlike(r"\S")), inside, settings, several=not verbatim, verbatim=verbatim)
    columns = []
    for field in schema.fields:
        there = by_directory.pop(field.name.lower(), None)
        found = F.col(quoted(field.name)) if there is None else F.col(quoted(there)).cast(field.dataType)
        columns.append(found.alias(field.name))
    ours = [name for name in rows.columns if name.startswith("_kproxy_")]
    return rows.select(*columns, *map(quoted, by_directory.values()), *ours)


def reader_options(options: IngestOptions) -> dict[str, str]:
    """Return the options of Spark's reader in lower case; those that are given override the defaults."""
    own = _CSV if options.format == "csv" else {}
    settings = {"maxFileAge": _MAX_AGE, **own, **options.source_options, **_REQUIRED}
    return {name.lower(): value for name, value in settings.items()}


def _records(session: SparkSession, options: IngestOptions) -> DataFrame:
    settings: dict[str, Any] = {
        "startingOffsets": options.starting_offsets,
        "maxOffsetsPerTrigger": options.max_offsets_per_trigger,
        # Leaves out the records of aborted transactions.
        "kafka.isolation.level": "read_committed",
        **options.source_options,
        "kafka.bootstrap.servers": options.source_bootstrap,
        "subscribe": options.where,
        "includeHeaders": ALL_HEADERS in dict(options.headers),
    }
    return session.readStream.format("kafka").options(**settings).load()


class Backlog(NamedTuple):
    """The number of files or records that are left to read; `unit` is `files` or `records`."""

    left: int
    unit: str


def files_there(session: SparkSession, options: IngestOptions) -> set[str]:
    """Return the paths of the source's files, none where its own path is missing. Raise SparkFailed."""
    names = {name: value for name, value in reader_options(options).items() if name in _FILTERS}
    try:
        with as_spark_failure(f"The files in {options.where} cannot be listed"):
            files = session.read.format("binaryFile").options(**names).load(options.where)
            return set(map(_path, files.inputFiles()))
    except SparkFailed as error:
        if "PATH_NOT_FOUND" in str(error):
            return set()
        raise


def files_begun(session: SparkSession, checkpoint: str, *, after: int = -1, until: int = _LAST) -> set[str]:
    """Return the paths of the files that Spark has begun: those `after` an offset in its log of files, and `until` one.

    The log has files: a version in the first line, then a line of JSON for each of the source's. Raise SparkFailed.
    """
    log_offset = F.get_json_object("value", "$.batchId").cast("long")
    with as_spark_failure("Spark's list of files cannot be read"):
        lines = session.read.text(f"{checkpoint}/sources/0").where(F.col("value").startswith("{"))
        wanted = lines.where((log_offset > after) & (log_offset <= until))
        return {_path(row[0]) for row in wanted.select(F.get_json_object("value", "$.path")).collect()}


def _path(uri: str) -> str:
    """Return the path, in one spelling: `file:/x` and `file:///x` are the same."""
    return re.sub("^file:/+", "file:/", unquote(uri))


def records_behind(progress: str | None) -> Backlog | None:
    """Return the backlog of a Kafka source by the JSON of its query's progress, None if that lacks it. Pure."""
    if progress is None:
        return None
    (source,) = json.loads(progress)["sources"]
    latest, end = source["latestOffset"], source["endOffset"]
    if latest is None or end is None:
        return None
    ends = {(topic, number): offset for topic, partitions in end.items() for number, offset in partitions.items()}
    left = [
        max(0, offset - ends.get((topic, number), 0))
        for topic, partitions in latest.items()
        for number, offset in partitions.items()
    ]
    return Backlog(sum(left), "records")

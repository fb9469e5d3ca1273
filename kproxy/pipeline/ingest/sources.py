"""Open a source as a streaming DataFrame, infer its schema, count the files or records that are still to be read."""

from __future__ import annotations

import ast
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import StructType

from kproxy.errors import StartupError
from kproxy.pipeline.ingest import csv_values
from kproxy.pipeline.ingest.documents import opened
from kproxy.pipeline.ingest.options import FileSource, IngestOptions, KafkaSource, RateSource
from kproxy.pipeline.ingest.transforms import (
    BLOCK,
    CORRUPT,
    FILE,
    MODIFIED,
    TEXT,
    quoted,
)
from kproxy.pipeline.spark import SparkFailed, as_spark_failure, cause_in

# One task reads one block. Lines are counted within it (`transforms.placed`), so it must not depend on the number of
# cores. Smaller files are a block each.
BLOCK_BYTES: Final = 128 << 20
# RFC 4180: a quote within quotes is doubled, and newlines are allowed there. A header that does not fit the schema is
# an error, not a change of the columns' order. A row is always parsed whole, not only the columns in use.
_READER_OPTIONS: Final = {
    "csv": {
        "header": "true",
        "escape": '"',
        "multiLine": "true",
        "enforceSchema": "false",
        "columnPruning": "false",
    },
    "json": {},
    "parquet": {},
}
# By default Spark leaves out files a week older than the newest. This is longer than any file is old.
_MAX_AGE: Final = "100000d"
# Options that tell which files are the source's.
_FILTERS: Final = ("pathglobfilter", "recursivefilelookup")
# Rows that cannot be parsed go to the column CORRUPT. No option of the user's may turn them into nulls.
_REQUIRED: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
# The first line of JSON that is written over several, and what to do.
PRETTY: Final = ("{", "[", "[{")
OVER_LINES: Final = "JSON over several lines: give --source-option multiLine=true"
# Spark's error for a column that it cannot read, such as TIME, UUID and FLOAT16.
PARQUET_TYPE: Final = r"PARQUET_TYPE_ILLEGAL\] Illegal Parquet type: (?P<type>.+?)\.?(?: SQLSTATE|$)"
_BOM: Final = "\ufeff"
_ALL: Final = (1 << 31) - 1


def own_session(session: SparkSession) -> SparkSession:
    """Clone `session` with the settings that rows are counted by, so that the caller's stay as they are."""
    with as_spark_failure("Spark did not take the job"):
        ours = SparkSession(session.sparkContext, session._jsparkSession.cloneSession())
        # So that the ends of blocks depend neither on the number of cores nor on that of files.
        ours.conf.set("spark.sql.files.maxPartitionBytes", str(BLOCK_BYTES))
        ours.conf.set("spark.sql.files.openCostInBytes", str(BLOCK_BYTES))
        ours.conf.unset("spark.sql.files.maxPartitionNum")
        # Spark has no type for timestamps with nanoseconds. As numbers they keep their digits.
        ours.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")
        # Use the V2 Kafka sink, as streams do: with the V1 sink observations report nothing.
        ours.conf.set("spark.sql.sources.useV1SourceList", "avro,csv,json,orc,parquet,text")
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
    twice = [name for name, count in Counter(map(str.lower, schema.names)).items() if count > 1]
    if twice:
        raise StartupError(f"--schema has the name {twice[0]} twice, and Spark does not tell ID from id: rename one.")
    taken = [name for name in schema.names if name.startswith("_kproxy_")]
    if taken:
        raise StartupError(f"--schema has a column {taken[0]}: names that begin with _kproxy_ are taken.")
    return schema


def infer_schema(session: SparkSession, source: FileSource) -> StructType:
    """Infer the schema by reading all files that exist now. Raise StartupError if none can be found."""
    options = {"inferSchema": "true", **_reader_options(source)}
    with_hint = f"give --schema, or put a file there that has the columns ({source.path})"
    try:
        with as_spark_failure("The schema could not be inferred"):
            found = session.read.format(source.format).options(**options).load(source.path).schema
            first = _first_line(session, source, options)
    except SparkFailed as error:
        if any(known in str(error) for known in ("UNABLE_TO_INFER_SCHEMA", "PATH_NOT_FOUND")):
            raise StartupError(f"there are no files yet to infer a schema from: {with_hint}.") from error
        if "COLUMN_ALREADY_EXISTS" in str(error):
            raise StartupError(
                f"no schema can be inferred from fields that differ in case alone ({cause_in(str(error))}): give a "
                "--schema with one of them (--on-new-columns add writes documents of JSON with all of them)."
            ) from error
        if type_ := re.search(PARQUET_TYPE, str(error)):
            raise StartupError(
                f"a file in {source.path} has a column of a type that Spark does not read ({type_['type']}): give a "
                "--schema that lacks it, with --on-new-columns ignore."
            ) from error
        raise
    schema = StructType([field for field in found.fields if field.name != CORRUPT])
    if source.format == "csv":
        _check_header(source, schema, first)
    if source.format == "json" and [text.strip() for text in first] in [[text] for text in PRETTY]:
        raise StartupError(f"a file in {source.path} has {OVER_LINES}.")
    if not schema.fields:
        raise StartupError(f"no column can be found in the files that are there: {with_hint}.")
    return schema


def _first_line(session: SparkSession, source: FileSource, options: Mapping[str, str]) -> list[str]:
    """Return the texts of the first row of a CSV file, or the first line of JSON; none where it does not help."""
    reader = session.read.options(**{**options, "inferSchema": "false", "header": "false"})
    if source.format == "csv" and options["header"].lower() == "true":
        columns = reader.csv(source.path)
        # Those of directories have other names.
        row = columns.select(*(name for name in columns.columns if name.startswith("_c"))).first()
    elif source.format == "json" and options.get("multiline", "false").lower() == "false":
        row = reader.text(source.path).where(F.col("value").rlike(r"\S")).select("value").first()
    else:
        row = None
    return [str(text) for text in row or () if text is not None]


def _check_header(source: FileSource, schema: StructType, header: Sequence[str]) -> None:
    odd = any(csv_values.REPLACED in name or "\0" in name for name in schema.names)
    if odd and not csv_values.names_encoding(source.options):
        raise StartupError(
            f"the header of a file in {source.path} is not UTF-8: name its encoding with --source-option "
            "encoding=NAME, for example ISO-8859-1 or UTF-16."
        )
    twice = [name for name, count in Counter(name.lower() for name in header).items() if count > 1]
    if twice:
        raise StartupError(
            f"the header of a file in {source.path} has the name {twice[0]} twice, and Spark does not tell ID from id: "
            "give a --schema with other names, in the order of the columns, and --source-option enforceSchema=true."
        )


def read(session: SparkSession, options: IngestOptions, schema: StructType | None) -> DataFrame:
    """Return the stream of a source.

    Files have the columns that `transforms.placed` needs. Raise StartupError if its path does not exist, SparkFailed
    for any other error of Spark's.
    """
    source = options.source
    try:
        with as_spark_failure("The source cannot be read"):
            if isinstance(source, FileSource):
                assert schema is not None  # noqa: S101 - given or inferred by the caller
                return _files(session, source, schema, verbatim=options.verbatim)
            if isinstance(source, KafkaSource):
                return _records(session, source, options.copies_headers)
            return _numbers(session, source)
    except SparkFailed as error:
        if isinstance(source, FileSource) and "PATH_NOT_FOUND" in str(error):
            raise StartupError(
                f"there is nothing at {source.path}: make the directory, files may come later."
            ) from error
        raise


def _files(session: SparkSession, source: FileSource, schema: StructType, *, verbatim: bool) -> DataFrame:
    settings = _reader_options(source)
    reader = session.readStream.options(**settings).option("maxFilesPerTrigger", source.max_files)
    if source.format == "json":
        wholetext = settings.get("multiline", "false")
        lines = _placed(reader.format("text").option("wholetext", wholetext).load(source.path))
        return _documents(lines, schema, settings, verbatim=verbatim)
    if source.format == "parquet":
        return _placed(reader.format("parquet").schema(schema).load(source.path))
    texts = reader.options(**{**csv_values.READER_OPTIONS, **settings}).schema(csv_values.texts_of(schema))
    return csv_values.valued(_placed(texts.format("csv").load(source.path)), schema, settings)


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


def _reader_options(source: FileSource) -> dict[str, str]:
    """Return the options of Spark's reader in lower case; those of `source` override the defaults."""
    settings = {"maxFileAge": _MAX_AGE, **_READER_OPTIONS[source.format], **source.options, **_REQUIRED}
    return {name.lower(): value for name, value in settings.items()}


def _records(session: SparkSession, source: KafkaSource, with_headers: bool) -> DataFrame:
    settings: dict[str, Any] = {
        "startingOffsets": source.starting_offsets,
        "maxOffsetsPerTrigger": source.max_offsets,
        # Leaves out the records of aborted transactions.
        "kafka.isolation.level": "read_committed",
        **source.options,
        "kafka.bootstrap.servers": source.bootstrap,
        "subscribe": source.topics,
        "includeHeaders": with_headers,
    }
    return session.readStream.format("kafka").options(**settings).load()


def _numbers(session: SparkSession, source: RateSource) -> DataFrame:
    return session.readStream.format("rate").option("rowsPerSecond", source.rows_per_second).load()


# The least pause between counts, in seconds, and as a multiple of a count's duration: listing files may take long.
LEAST_PAUSE_S: Final = 5.0
PAUSE_FACTOR: Final = 5


class Backlog(NamedTuple):
    """The number that is left; `unit` is `files` or `records`."""

    left: int
    unit: str


class FilesLeft:
    """Tell which files no micro-batch has begun to read; Spark is asked for their number only now and then.

    Like Spark's own source it keeps the names of all files.
    """

    def __init__(
        self, session: SparkSession, source: FileSource, checkpoint: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._source = source
        self._checkpoint = checkpoint
        self._clock = clock
        self._not_before = 0.0

    def look(self, *, at_once: bool = False) -> Backlog | None:
        """Count now. None if it is too soon since the last count (unless `at_once`) or the number is not known."""
        began = self._clock()
        if began < self._not_before and not at_once:
            return None
        try:
            with as_spark_failure("The files cannot be listed"):
                found = Backlog(len(self.there() - self._begun()), "files")
        except SparkFailed:
            # Nothing was read yet, so Spark has no list; or files disappeared during the listing.
            found = None
        ended = self._clock()
        self._not_before = ended + max(LEAST_PAUSE_S, PAUSE_FACTOR * (ended - began))
        return found

    def there(self) -> set[str]:
        """Return the files that are there, none where the source's path is missing. Raise SparkFailed."""
        names = {name: value for name, value in _reader_options(self._source).items() if name in _FILTERS}
        try:
            with as_spark_failure(f"The files in {self._source.path} cannot be listed"):
                found = self._session.read.format("binaryFile").options(**names).load(self._source.path).inputFiles()
        except SparkFailed as error:
            if "PATH_NOT_FOUND" in str(error):
                return set()
            raise
        return set(map(_path, found))

    def unread(self, before: set[str]) -> list[str]:
        """Return those of the files `before` that are still there and that no micro-batch has read."""
        left = before & self.there()
        with as_spark_failure("Spark's list of files cannot be read"):
            return sorted(left - self._begun()) if left else []

    def _begun(self) -> set[str]:
        return {_path(row[0]) for row in taken(self._session, self._checkpoint).select("path").collect()}


def taken(session: SparkSession, checkpoint: str) -> DataFrame:
    """Return the files that Spark has begun: path, as a URI, and log_offset (where micro-batches begin and end).

    They are in Spark's log: each of its files has a version in the first line, then a line of JSON for each file.
    """
    lines = session.read.text(f"{checkpoint}/sources/0").where(F.col("value").startswith("{"))
    log_offset = F.get_json_object("value", "$.batchId").cast("long")
    return lines.select(F.get_json_object("value", "$.path").alias("path"), log_offset.alias("log_offset"))


def _path(uri: str) -> str:
    """Return the path as it is shown: `file:/x` and `file:///x` are the same."""
    return re.sub("^([A-Za-z][A-Za-z0-9+.-]*):/+", r"\1:/", unquote(uri))


def records_behind(progress: Mapping[str, Any] | None, last: int = 0) -> Backlog | None:
    """Return the backlog of a Kafka source by the query's last progress, None if that lacks it. Pure.

    `last` is the number of the last micro-batch written; progress of an earlier one is out of date.
    """
    if progress is None or progress["batchId"] < last:
        return None
    total = None
    for source in progress["sources"]:
        latest, end = _offsets(source["latestOffset"]), _offsets(source["endOffset"])
        if latest is None or end is None:
            continue
        total = total or 0
        for topic, partitions in latest.items():
            done = end.get(topic, {})
            total += sum(max(0, offset - done.get(partition, 0)) for partition, offset in partitions.items())
    return None if total is None else Backlog(total, "records")


def _offsets(value: Any) -> dict[str, dict[str, int]] | None:
    """Parse a source's offsets in its progress: an object, its JSON, or (PySpark 4.1) its Python repr.

    None for anything else: an unknown backlog must not end the job.
    """
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            try:
                found = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                return None
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        return None
    return found

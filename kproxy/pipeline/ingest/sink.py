"""Write one micro-batch: its messages to Kafka, and its dead letters.

Spark calls `BatchWriter` by `foreachBatch`.

Invariants
1. Spark commits a micro-batch when the call returns: after each of its rows is acknowledged by its topic or is a dead
   letter. So a kill loses nothing; the one uncommitted micro-batch is written again, with the same rows and number.
2. Dead letters in files are there once: a repeated micro-batch replaces its own.
3. In transactions (`transactions.py`) each row and each dead letter in a topic is there once.
4. Without a place for dead letters the first of them ends the job, and its micro-batch is not committed.

Spark's Parquet reader silently ignores columns of a file that the schema lacks; `check_files` finds them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from kproxy.pipeline.ingest import documents, transforms
from kproxy.pipeline.ingest.options import IngestOptions
from kproxy.pipeline.ingest.sources import files_begun
from kproxy.pipeline.ingest.transactions import JAR, Transactions
from kproxy.pipeline.ingest.transforms import CORRUPT, NAME, NEW, PROBLEM, REASON, REASONS, ROW
from kproxy.pipeline.ingest.values import RegisteredValues
from kproxy.pipeline.kafka_access import spark_options
from kproxy.pipeline.spark import as_spark_failure

# The prefix of the error for a row that cannot be written; a Java stack trace surrounds it.
REFUSED: Final = "kproxy-refused-row"
NEW_IN_FILE: Final = "new column in a file"
# Gives records the timestamps that TIMESTAMP_HEADER tells.
INTERCEPTOR_CLASS: Final = "kproxy.KeepTimestamps"
# A task reads several blocks of files, because each task costs more than a small file. There are more tasks than cores,
# because files differ in size. Their number does not depend on the blocks, whose number only another plan would tell.
TASKS_PER_CORE: Final = 4
OBSERVED_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.005
_V1_SINKS: Final = "spark.sql.sources.useV1SourceList"
# The length of invalid JSON that an error shows.
_BEGINNING: Final = 10
_ROW_BEGINNING: Final = 200


@dataclass(frozen=True, slots=True)
class BatchDone:
    """A micro-batch that was written: `rows` = `written` + the dead letters (`dead`, by reason), in `seconds`."""

    batch: int
    rows: int
    written: int
    dead: Mapping[str, int]
    seconds: float


class Stopped(Exception):
    """The job ends before this micro-batch, of which nothing is written. Java returns the error as text."""


class RefusedFile(Exception):
    """A file has columns that would be lost; nothing of its micro-batch is written. Java returns the error as text."""

    def __init__(self, path: str, names: Sequence[str]) -> None:
        super().__init__("|".join([REFUSED, NEW_IN_FILE, path, ", ".join(names).replace("|", " "), ""]))


class BatchWriter:
    """Write micro-batches of the job `job_id`.

    `schema` is that of files, or of values that are JSON. The writer calls `on_batch` after each micro-batch and
    `stopping` before each, both on the thread of Spark's that calls the writer.
    """

    def __init__(
        self,
        options: IngestOptions,
        job_id: str,
        transactions: Transactions | None = None,
        *,
        tasks: int,
        schema: StructType | None,
        on_batch: Callable[[BatchDone], None],
        stopping: Callable[[], bool],
    ) -> None:
        self._options = options
        self._registered = RegisteredValues(options) if options.value_format is not None else None
        self._job_id = job_id
        self._tasks = tasks
        self._schema = schema
        self._transactions = transactions
        self._on_batch = on_batch
        self._stopping = stopping

    def __call__(self, batch: DataFrame, number: int) -> None:
        if self._stopping():
            raise Stopped
        began = time.monotonic()
        with _v2_sink(batch.sparkSession):
            self._on_batch(self._write(batch, number, began))

    def _write(self, batch: DataFrame, number: int, began: float) -> BatchDone:
        self._check_files(batch.sparkSession, number)
        rows = self.encode(batch, number)
        counts = self._write_messages(rows, number)
        dead = {reason: counts[reason] for reason in REASONS if counts[reason]}
        if dead:
            self._write_dead_letters(rows, number)
        written = counts["rows"] - sum(dead.values())
        return BatchDone(number, counts["rows"], written, dead, time.monotonic() - began)

    def encode(self, batch: DataFrame, number: int) -> DataFrame:
        """Add the messages to the rows. Raise StartupError for a column that does not exist or fit the schema."""
        rows = batch
        if self._options.reads_kafka and self._schema is not None:
            rows = documents.of_records(batch, self._schema, verbatim=self._options.verbatim)
        placed = transforms.placed(rows)
        if self._options.reads_files and not batch.isStreaming:
            # Rows are numbered by then, each block from 0.
            placed = placed.coalesce(TASKS_PER_CORE * self._tasks)
        name = f"{self._job_id}/{number}"
        return transforms.encoded(placed, self._options, batch=name, registered=self._registered)

    def _check_files(self, session: SparkSession, number: int) -> None:
        """Check Parquet files themselves: their rows do not show which columns were ignored."""
        options = self._options
        if options.format == "parquet" and options.on_new_columns != "ignore" and self._schema is not None:
            check_files(session, options.checkpoint, number, self._schema, options.source_options)

    def _write_messages(self, rows: DataFrame, number: int) -> dict[str, int]:
        """Write the messages. Return the number of `rows` and of dead letters by reason, counted while writing."""
        observation = Observation()
        counts = [F.count(F.lit(1)).alias("rows")]
        counts += [F.count(F.when(F.col(REASON) == reason, 1)).alias(reason) for reason in REASONS]
        counted = rows.observe(observation, *counts)
        if self._options.dead_letters is None:
            counted = counted.where(_refuse(rows, REASONS))
        elif self._options.on_new_columns == "fail":
            counted = counted.where(_refuse(rows, ("new column",)))
        self._to_kafka(transforms.messages(counted, tasks=self._tasks, options=self._options), number)
        return _observed(observation) or _counted(rows)

    def _write_dead_letters(self, rows: DataFrame, number: int) -> None:
        topic, directory = self._options.letters_topic, self._options.letters_directory
        if topic is None:
            # The directory has the micro-batch's number, so that a repeated one replaces its files.
            where = f"{str(directory).rstrip('/')}/job={self._job_id}/micro_batch={number}"
            transforms.dead_letters(rows).write.mode("overwrite").json(where)
            return
        excerpt = min(transforms.RECORD_EXCERPT, self._options.max_message_bytes // 16)
        letters = transforms.dead_letters(rows, excerpt=excerpt)
        messages = transforms.as_messages(letters, topic)
        if self._transactions is not None:
            messages = messages.repartition(self._tasks, "value").withColumn(NAME, F.col("value"))
        self._to_kafka(messages, number, "-dead-letters")

    def _to_kafka(self, messages: DataFrame, number: int, suffix: str = "") -> None:
        if self._transactions is not None:
            self._transactions.write(messages, number, suffix)
            return
        messages.write.format("kafka").mode("append").options(**spark_options(producer_options(self._options))).save()


@contextlib.contextmanager
def _v2_sink(session: SparkSession) -> Iterator[None]:
    """Use the V2 Kafka sink, as streams do: with the V1 sink observations report nothing."""
    before = str(session.conf.get(_V1_SINKS))
    session.conf.set(_V1_SINKS, ",".join(name for name in before.split(",") if name != "kafka"))
    try:
        yield
    finally:
        session.conf.set(_V1_SINKS, before)


def _observed(observation: Observation) -> dict[str, int] | None:
    """Return the counts, None if Spark does not report them in time: it may drop events under load."""
    deadline = time.monotonic() + OBSERVED_TIMEOUT_S
    # `Observation.get` alone would wait without a limit.
    while not observation._jo.future().isCompleted():
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return {name: int(count or 0) for name, count in observation.get.items()}


def _counted(rows: DataFrame) -> dict[str, int]:
    """Return the counts of `_write_messages` by reading all `rows` again."""
    by_reason = {row[0]: int(row[1]) for row in rows.groupBy(REASON).count().collect()}
    return {"rows": sum(by_reason.values()), **{reason: by_reason.get(reason, 0) for reason in REASONS}}


def add_jar(session: SparkSession) -> None:
    """Send kproxy's Java classes to the executors of `session`, once. Raise SparkFailed if Spark refuses them."""
    context: Any = session.sparkContext
    with as_spark_failure("The classes for executors were not taken"):
        if JAR not in str(context._jsc.sc().listJars()):
            context._jsc.addJar(str(resources.files(__package__) / JAR))


def producer_options(options: IngestOptions) -> dict[str, str]:
    """Return the producer's options. Its own limits are raised to the job's."""
    producer = dict(options.kafka_options)
    if options.keeps_timestamps:
        theirs = producer.get("interceptor.classes")
        producer["interceptor.classes"] = ",".join(filter(None, [theirs, INTERCEPTOR_CLASS]))
    return {
        "max.request.size": str(max(options.max_message_bytes, 1 << 20)),
        "buffer.memory": str(max(2 * options.max_message_bytes, 32 << 20)),
        **producer,
        "bootstrap.servers": options.bootstrap,
    }


def _refuse(rows: DataFrame, reasons: Sequence[str]) -> Column:
    """Return a column that is true for a row with none of these `reasons`, and ends the job for any other."""
    named = F.lit("")
    if NEW in rows.columns:
        named = F.array_join(NEW, ", ")
        named = F.when(F.col(REASON) == "corrupt", F.substring(F.btrim(CORRUPT), 1, _BEGINNING)).otherwise(named)
    if PROBLEM in rows.columns:
        named = F.when(F.col(REASON) == "not of the schema", F.col(PROBLEM)).otherwise(named)
    # Rows without a name are told by their beginning.
    name = F.coalesce(F.col(ROW), F.substring(transforms.record_of(rows), 1, _ROW_BEGINNING))
    told = (F.col(REASON), *(F.translate(each, "|", " ") for each in (name, F.coalesce(named, F.lit("")))))
    said = F.concat(F.lit(REFUSED), *(F.concat(F.lit("|"), each) for each in told), F.lit("|"))
    refused = F.coalesce(F.col(REASON).isin(*reasons), F.lit(False))
    return F.when(~refused, F.lit(True)).otherwise(F.raise_error(said).isNull())


def check_files(
    session: SparkSession, checkpoint: str, number: int, schema: StructType, options: Mapping[str, str]
) -> None:
    """Raise RefusedFile for the first file of the micro-batch `number` with a column that `schema` lacks.

    It reads the files' footers; `options` are those of Spark's reader. Raise Py4JError or PySparkException for files
    that cannot be read: which of them depends on Spark's version.
    """
    before = _log_offset(session, checkpoint, number - 1) if number else -1
    paths = sorted(files_begun(session, checkpoint, after=before, until=_log_offset(session, checkpoint, number)))
    # The paths are file names, not patterns.
    reader = session.read.options(**options).option("__globPaths__", "false")
    try:
        if not paths or not lacking(schema, reader.option("mergeSchema", "true").parquet(*paths).schema):
            return
    except (Py4JError, PySparkException) as error:
        # A column whose type differs between files cannot be merged, but each file may still fit the schema.
        if "CANNOT_MERGE" not in str(error):
            raise
    for path in paths:
        if names := lacking(schema, reader.option("mergeSchema", "false").parquet(path).schema):
            raise RefusedFile(path, names)


def _log_offset(session: SparkSession, checkpoint: str, number: int) -> int:
    """Return the end of a micro-batch in Spark's log of files."""
    lines = session.read.text(f"{checkpoint}/offsets/{number}").where(F.col("value").contains('"logOffset"'))
    return int(json.loads(lines.collect()[-1]["value"])["logOffset"])


def lacking(schema: DataType, found: DataType, path: str = "") -> list[str]:
    """Return the fields of `found` that `schema` lacks, as paths (`column.field`). Pure.

    Names are compared without case, as Spark's Parquet reader does.
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

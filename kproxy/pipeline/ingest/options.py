"""The options of an ingest job: read and check them without Spark. Invalid ones raise StartupError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kproxy.config import DEFAULT_LISTEN, parse_address, split_list
from kproxy.config.parsing import duration_ms, is_topic_name
from kproxy.errors import StartupError

FILE_FORMATS: Final = ("csv", "json", "parquet")
# Default bounds of a micro-batch, which is written again after a kill.
DEFAULT_FILES: Final = 100
DEFAULT_OFFSETS: Final = 500_000
DEFAULT_ROWS_PER_SECOND: Final = 100
# The default limit of Kafka's producers and brokers.
DEFAULT_MESSAGE_BYTES: Final = 1 << 20
# Spark counts a micro-batch's rows in 32 bits in places, and a task cannot hold a larger record.
MAX_MESSAGE_BYTES: Final = 1 << 30
# The name of a header that stands for all headers of an array, such as those of a record.
ALL_HEADERS: Final = "*"
# The longest header name and the longest topic name; Kafka's own limit is the latter.
MAX_NAME: Final = 249


@dataclass(frozen=True, slots=True)
class FileSource:
    """The files of a directory or pattern `path`, as Spark reads it.

    Each is read once, new ones as they appear. `schema` is DDL or Spark's JSON of a schema; None infers it once.
    `options` are those of Spark's reader. A micro-batch has at most `max_files`.
    """

    format: str
    path: str
    schema: str | None = None
    max_files: int = DEFAULT_FILES
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KafkaSource:
    """The records of `topics` (comma-separated) of the cluster at `bootstrap`, at most `max_offsets` a micro-batch.

    Without a `schema` the columns are Spark's: key, value, topic, partition, offset, timestamp, timestampType, headers.
    With one, values are JSON of that schema, its fields are the columns, and those of Spark are in a column `kafka`,
    which is part of no value unless it is named.
    """

    bootstrap: str
    topics: str
    schema: str | None = None
    starting_offsets: Literal["earliest", "latest"] = "earliest"
    max_offsets: int = DEFAULT_OFFSETS
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RateSource:
    """Rising numbers (columns timestamp and value) at a fixed rate, as a test load."""

    rows_per_second: int = DEFAULT_ROWS_PER_SECOND


Source = FileSource | KafkaSource | RateSource


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The place of rows that cannot be written: JSON files under a directory, or a topic of the target's cluster."""

    kind: Literal["json", "topic"]
    where: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.where}"


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """One job. A job started again with the same `checkpoint` continues.

    source, checkpoint: the source of rows; the directory of the job's progress.
    bootstrap:          `HOST:PORT`, or several: the proxy.
    topic, topic_column: one of the two. `partitions` creates a missing topic.
    select:             SQL expressions that replace the source's columns; empty: these as they are.
    key:                no column: no key; one: its text (bytes if binary); several: JSON of them.
    value_columns:      the value is JSON of these; empty: of all. `value_column`: the value is this column unchanged.
    on_new_columns:     for a row with fields that the schema lacks: end the job, make it a dead letter, leave them out,
                        or add them: the value is the JSON document as it is in the source.
    keep_timestamps:    of a Kafka source: keep the records' timestamps.
    keep_partitions:    of a Kafka source: keep the records' partitions.
    headers:            (name, SQL expression): its text; the name ALL_HEADERS: all headers of an array.
    processing_time:    the interval of micro-batches ("10 seconds"), until stopped; None: read what exists, then end.
    dead_letters:       None: a row that cannot be written ends the job.
    max_message_bytes:  the largest record, with key, headers and Kafka's overhead.
    tasks:              how many tasks write; None: as many as Spark has cores.
    kafka_options:      for the producer and the admin client, with Kafka's names.
    """

    source: Source
    checkpoint: str
    topic: str | None = None
    topic_column: str | None = None
    bootstrap: str = DEFAULT_LISTEN
    partitions: int | None = None
    select: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    value_columns: tuple[str, ...] = ()
    value_column: str | None = None
    on_new_columns: Literal["fail", "dead-letter", "ignore", "add"] = "dead-letter"
    keep_timestamps: bool = True
    keep_partitions: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    processing_time: str | None = None
    dead_letters: DeadLetters | None = None
    max_message_bytes: int = DEFAULT_MESSAGE_BYTES
    tasks: int | None = None
    kafka_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def keeps_timestamps(self) -> bool:
        return self.keep_timestamps and isinstance(self.source, KafkaSource)

    @property
    def takes_new_columns(self) -> bool:
        """Whether a row with fields that the schema lacks is written."""
        return self.on_new_columns in ("ignore", "add")

    @property
    def verbatim(self) -> bool:
        """Whether the value is the JSON document as it is in the source."""
        return self.on_new_columns == "add"

    @property
    def copies_headers(self) -> bool:
        return any(name == ALL_HEADERS for name, _ in self.headers)

    @property
    def target(self) -> str:
        """The target in words."""
        return f"topic {self.topic}" if self.topic is not None else f"the topics named by column {self.topic_column}"

    def check(self) -> None:
        """Raise StartupError for options that are wrong; Spark is not needed."""
        for address in split_list(self.bootstrap, "--bootstrap"):
            parse_address(address, "--bootstrap")
        self._check_target()
        self._check_source()
        self._check_documents()
        if not self.checkpoint:
            raise StartupError(
                "--checkpoint is needed: name a directory of this job's own that will be there next time."
            )
        if self.value_columns and self.value_column is not None:
            raise StartupError("--value is JSON of columns and --value-column one column as it is: give one of them.")
        _within("--max-message-bytes", self.max_message_bytes, 1_000, MAX_MESSAGE_BYTES)
        if self.kafka_options.get("acks", "all") not in ("all", "-1"):
            raise StartupError(
                f"--kafka-option acks={self.kafka_options['acks']} could lose rows that are taken for written: "
                "leave it out."
            )
        if self.tasks is not None:
            _within("--tasks", self.tasks, 1, 100_000)

    def _check_target(self) -> None:
        if self.topic is not None and self.topic_column is not None:
            raise StartupError("--topic is one topic for all rows and --topic-column names it row by row: give one.")
        if self.topic is None and self.topic_column is None:
            raise StartupError("say where to write: --topic NAME, or --topic-column COLUMN that names it row by row.")
        if self.topic is not None:
            check_topic(self.topic, "--topic")
        if self.partitions is not None:
            _within("--partitions", self.partitions, 1, 100_000)
        if self.dead_letters is not None and self.dead_letters.kind == "topic":
            check_topic(self.dead_letters.where, "--dead-letters topic:")
            if self.dead_letters.where == self.topic:
                raise StartupError(f"--dead-letters topic:{self.topic} is the topic that is written to: give another.")

    def _check_documents(self) -> None:
        source = self.source
        has_documents = isinstance(source, KafkaSource) and source.schema is not None
        if isinstance(source, FileSource):
            has_documents = source.format == "json"
        if self.verbatim and (not has_documents or self.value_columns or self.value_column is not None):
            raise StartupError(
                "--on-new-columns add writes JSON documents as they are in the source: it goes with --from json:, or "
                "with --from kafka: and a --schema, and without --value and --value-column."
            )

    def _check_source(self) -> None:
        source = self.source
        if self.keep_partitions and not (isinstance(source, KafkaSource) and self.topic is not None):
            raise StartupError(
                "--keep-partitions goes with --from kafka:TOPIC and --topic: name both, or leave it out."
            )
        if isinstance(source, RateSource):
            _within("--rows-per-second", source.rows_per_second, 1, 100_000_000)
            if self.processing_time is None:
                raise StartupError("--from rate never ends: say how often to write with --trigger, for example 1s.")
            return
        if isinstance(source, FileSource):
            _within("--max-files-per-trigger", source.max_files, 1, 1_000_000)
            return
        _within("--max-offsets-per-trigger", source.max_offsets, 1, 1_000_000_000)
        addresses = set(split_list(source.bootstrap, "--from-bootstrap"))
        for address in addresses:
            parse_address(address, "--from-bootstrap")
        topics = split_list(source.topics, "--from kafka:")
        for topic in topics:
            check_topic(topic, "--from kafka:")
        if self.topic in topics and addresses & set(split_list(self.bootstrap, "--bootstrap")):
            raise StartupError(f"the topic {self.topic} would be copied into itself without end: give another --topic.")


def parse_source(text: str) -> tuple[str, str]:
    """Parse `FORMAT:WHERE` of --from; ("rate", "") for `rate`. Raise StartupError."""
    name, _, where = text.partition(":")
    if name == "rate" and not where:
        return name, ""
    if name in (*FILE_FORMATS, "kafka") and where:
        return name, where
    raise StartupError(
        f"--from {text} is no source: give csv:DIR, json:DIR, parquet:DIR, kafka:TOPIC or rate "
        "(DIR is a directory or a pattern of files)."
    )


def parse_dead_letters(text: str) -> DeadLetters:
    """Parse `json:DIR` or `topic:NAME`. Raise StartupError."""
    name, _, where = text.partition(":")
    if where and name == "json":
        return DeadLetters("json", where)
    if where and name == "topic":
        return DeadLetters("topic", where)
    raise StartupError(f"--dead-letters {text}: give json:DIR for files or topic:NAME for a topic.")


def parse_trigger(text: str) -> str | None:
    """Return the processing time in Spark's form; None for `available-now`. Raise StartupError."""
    if text == "available-now":
        return None
    every_ms = duration_ms(text)
    if every_ms is None:
        raise StartupError(f"--trigger {text}: give available-now, or how often, for example 500ms, 10s, 5m or 1h.")
    return f"{every_ms} milliseconds"


def parse_pair(text: str, flag: str) -> tuple[str, str]:
    """Parse `NAME=WHAT`. Raise StartupError."""
    name, equals, what = text.partition("=")
    if not name or not equals:
        raise StartupError(f"{flag} {text}: give NAME=VALUE.")
    return name, what


def check_topic(name: str, flag: str) -> None:
    """Raise StartupError if Kafka does not allow the topic name."""
    if not is_topic_name(name):
        raise StartupError(
            f"{flag} {name} is no name of a topic: take letters, digits, '.', '_' and '-', at most {MAX_NAME}."
        )


def _within(flag: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise StartupError(f"{flag} {value} is not possible: give {least:,} to {most:,}.")

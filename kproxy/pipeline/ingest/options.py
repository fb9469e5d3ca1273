"""Read and check the options of an ingest job, without Spark. Invalid options raise StartupError."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kproxy.config import DEFAULT_LISTEN, parse_address, split_list
from kproxy.config.parsing import duration_ms, is_topic_name
from kproxy.errors import StartupError

FILE_FORMATS: Final = ("csv", "json", "parquet")
KAFKA: Final = "kafka"
RATE: Final = "rate"
# A source that Spark has by another name (`spark:NAME` or `spark:NAME:PATH`), and rows that a program has already.
SPARKS: Final = "spark"
FRAME: Final = "a DataFrame"
AVAILABLE_NOW: Final = "available-now"
# Default bounds of a micro-batch, which is written again after a kill.
FILES_PER_CORE: Final = 100
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
# The formats of values with a schema in a registry; and the schema that is the subject's latest.
AVRO: Final = "avro"
PROTOBUF: Final = "protobuf"
JSON_SCHEMA: Final = "json-schema"
LATEST: Final = "latest"
_HTTP: Final = re.compile(r"https?://[^/@?#\s]+(/[^?#\s]*)?")
_JSON_LETTERS: Final = "json:"
_TOPIC_LETTERS: Final = "topic:"
_KAFKAS: Final = "kafka."


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """One job: the flags of the command, with the defaults that its help tells (`kproxy.cli.pipeline_ingest`).

    A job started again with the same `checkpoint` continues.

    source:         also SPARKS with a name and a path; or FRAME for rows that are given to `job.start`.
    schema:         DDL or Spark's JSON; None: that of files is inferred once, others are Spark's own.
    select:         SQL expressions that replace the source's columns; empty: these as they are.
    key:            no column: no key; one: its text (bytes if binary); several: JSON of them.
    value_format:   the value's columns by a schema in the `registry`; None: plain JSON.
    value_schema:   the schema's text, or LATEST; None: derived from the columns.
    headers:        (name, SQL expression): its text; the name ALL_HEADERS: all headers of an array.
    dead_letters:   None: a row that cannot be written ends the job.
    kafka_options:  for the producer and the admin client, with Kafka's names.
    """

    source: str
    checkpoint: str
    topic: str | None = None
    topic_column: str | None = None
    bootstrap: str = DEFAULT_LISTEN
    partitions: int | None = None
    schema: str | None = None
    source_options: Mapping[str, str] = field(default_factory=dict)
    from_bootstrap: str | None = None
    starting_offsets: Literal["earliest", "latest"] = "earliest"
    max_files_per_trigger: int | None = None
    max_offsets_per_trigger: int = DEFAULT_OFFSETS
    rows_per_second: int = DEFAULT_ROWS_PER_SECOND
    select: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    value: tuple[str, ...] = ()
    value_column: str | None = None
    value_format: Literal["avro", "protobuf", "json-schema"] | None = None
    value_schema: str | None = None
    registry: str | None = None
    registry_user: str | None = None
    registry_password: str | None = field(default=None, repr=False)
    subject: str | None = None
    on_new_columns: Literal["fail", "dead-letter", "ignore", "add"] = "dead-letter"
    keep_timestamps: bool = True
    keep_partitions: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    trigger: str | None = None
    dead_letters: str | None = None
    max_message_bytes: int = DEFAULT_MESSAGE_BYTES
    tasks: int | None = None
    exactly_once: bool = False
    kafka_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def format(self) -> str:
        """One of FILE_FORMATS, KAFKA, RATE, SPARKS or FRAME."""
        return self.source.partition(":")[0]

    @property
    def where(self) -> str:
        """The files' directory or pattern, the topics, or the name of Spark's source and its path."""
        return self.source.partition(":")[2]

    @property
    def reads_files(self) -> bool:
        return self.format in FILE_FORMATS

    @property
    def reads_kafka(self) -> bool:
        return self.format == KAFKA

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of a Kafka source."""
        return split_list(self.where, "--from kafka:") if self.reads_kafka else ()

    @property
    def source_bootstrap(self) -> str:
        return self.from_bootstrap or self.bootstrap

    @property
    def source_kafka_options(self) -> dict[str, str]:
        """The options of Kafka's clients for a Kafka source."""
        given = self.source_options.items()
        return {name.removeprefix(_KAFKAS): value for name, value in given if name.startswith(_KAFKAS)}

    @property
    def processing_time(self) -> str | None:
        """The interval of micro-batches in Spark's form; None for AVAILABLE_NOW. Raise StartupError."""
        text = self.trigger
        if text is None:
            text = "1s" if self.format == RATE else AVAILABLE_NOW
        every_ms = duration_ms(text)
        if every_ms is None and text != AVAILABLE_NOW:
            raise StartupError(f"Invalid --trigger {text}; expected {AVAILABLE_NOW} or a time such as 500ms or 1h.")
        return None if every_ms is None else f"{every_ms} milliseconds"

    @property
    def letters_directory(self) -> str | None:
        return _after(_JSON_LETTERS, self.dead_letters)

    @property
    def letters_topic(self) -> str | None:
        return _after(_TOPIC_LETTERS, self.dead_letters)

    @property
    def keeps_timestamps(self) -> bool:
        return self.keep_timestamps and self.reads_kafka

    @property
    def takes_new_columns(self) -> bool:
        """Whether a row with fields that the schema lacks is written."""
        return self.on_new_columns in ("ignore", "add")

    @property
    def verbatim(self) -> bool:
        """Whether the value is the JSON document as it is in the source."""
        return self.on_new_columns == "add"

    @property
    def value_subject(self) -> str:
        """The subject of the values' schema in the registry."""
        return self.subject or f"{self.topic}-value"

    @property
    def target(self) -> str:
        """The target in words."""
        return f"topic {self.topic}" if self.topic is not None else f"the topics named by column {self.topic_column}"

    def check(self) -> None:
        """Raise StartupError for options that are wrong; Spark is not needed."""
        has_place = (self.reads_files or self.reads_kafka or self.format == SPARKS) and self.where
        if not has_place and self.source not in (RATE, FRAME):
            raise StartupError(
                f"--from {self.source} is not a source: give csv:DIR, json:DIR, parquet:DIR, kafka:TOPIC or rate "
                "(DIR is a directory or a pattern of files), or name another source of Spark's with --format."
            )
        self._check_numbers()
        addresses = _addresses(self.bootstrap, "--bootstrap")
        theirs = _addresses(self.source_bootstrap, "--from-bootstrap")
        names = [("--topic", self.topic), ("--dead-letters topic:", self.letters_topic)]
        for flag, topic in (*names, *(("--from kafka:", topic) for topic in self.topics)):
            if topic is not None and not is_topic_name(topic):
                raise StartupError(
                    f"{flag} {topic} is not a topic name: use letters, digits, '.', '_' and '-', at most {MAX_NAME}."
                )
        has_documents = self.format == "json" or (self.reads_kafka and self.schema is not None)
        acks = self.kafka_options.get("acks", "all")
        refused = {
            "--topic is one topic for all rows and --topic-column names it row by row: give one.": (
                self.topic is not None and self.topic_column is not None
            ),
            "say where to write: --topic NAME, or --topic-column COLUMN that names it row by row.": (
                self.topic is None and self.topic_column is None
            ),
            "--checkpoint is needed: name a directory of this job's own that will be there next time.": (
                not self.checkpoint and self.source != FRAME
            ),
            "--value is JSON of columns and --value-column one column as it is: give one of them.": (
                self.value and self.value_column is not None
            ),
            f"Invalid --dead-letters {self.dead_letters}; expected json:DIR or topic:NAME.": (
                self.dead_letters is not None and not (self.letters_directory or self.letters_topic)
            ),
            f"--dead-letters topic:{self.topic} is the topic that is written to: give another.": (
                self.topic is not None and self.letters_topic == self.topic
            ),
            f"the topic {self.topic} would be copied into itself without end: give another --topic.": (
                self.topic in self.topics and not addresses.isdisjoint(theirs)
            ),
            f"--kafka-option acks={acks} could lose rows that count as written: leave it out.": (
                acks not in ("all", "-1")
            ),
            "--keep-partitions goes with --from kafka:TOPIC and --topic: name both, or leave it out.": (
                self.keep_partitions and (not self.reads_kafka or self.topic is None)
            ),
            "--from rate never ends: say how often to write with --trigger, for example 1s.": (
                self.processing_time is None and self.format == RATE
            ),
            "--on-new-columns add writes JSON documents as they are in the source: it goes with --from json:, or with "
            "--from kafka: and a --schema, and without --value and --value-column.": (
                self.verbatim and (not has_documents or self.value or self.value_column is not None)
            ),
        }
        for sentence, is_wrong in {**refused, **self._refused_of_registry()}.items():
            if is_wrong:
                raise StartupError(sentence)

    def _refused_of_registry(self) -> dict[str, object]:
        has = self.value_format is not None
        rest = (self.registry, self.registry_user, self.registry_password, self.subject, self.value_schema)
        return {
            "--registry, --registry-user, --subject and --value-schema are for values with a --value-format.": (
                not has and any(each is not None for each in rest)
            ),
            "--value-format needs --registry URL, the address of the schema registry.": has and self.registry is None,
            "Invalid --registry; expected a URL such as https://registry:8081, with its user in --registry-user.": (
                self.registry is not None and not _HTTP.fullmatch(self.registry)
            ),
            "--registry-user needs a password, in --registry-password-file or KPROXY_REGISTRY_PASSWORD.": (
                (self.registry_user is None) != (self.registry_password is None)
            ),
            "--topic-column names many topics: name the one --subject of their values' schema.": (
                has and self.topic is None and self.subject is None
            ),
            "--on-new-columns add writes documents as they are: it goes without --value-format.": has and self.verbatim,
        }

    def _check_numbers(self) -> None:
        for name, least, most in (
            ("partitions", 1, 100_000),
            ("tasks", 1, 100_000),
            ("max_message_bytes", 1_000, MAX_MESSAGE_BYTES),
            ("max_files_per_trigger", 1, 1_000_000),
            ("max_offsets_per_trigger", 1, 1_000_000_000),
            ("rows_per_second", 1, 100_000_000),
        ):
            value: int | None = getattr(self, name)
            if value is not None and not least <= value <= most:
                flag = name.replace("_", "-")
                raise StartupError(f"Invalid --{flag} {value}; expected {least:,} to {most:,}.")


def _after(kind: str, place: str | None) -> str | None:
    return place.removeprefix(kind) if place is not None and place.startswith(kind) else None


def _addresses(text: str, flag: str) -> set[str]:
    found = set(split_list(text, flag))
    for address in found:
        parse_address(address, flag)
    return found


def parse_pair(text: str, flag: str) -> tuple[str, str]:
    """Parse `NAME=WHAT`. Raise StartupError."""
    name, equals, what = text.partition("=")
    if not name or not equals:
        raise StartupError(f"Invalid {flag} {text}; expected NAME=VALUE.")
    return name, what

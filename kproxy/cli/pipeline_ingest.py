"""`kproxy pipeline ingest`: write files, a topic or a counter to a topic, with Spark."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kproxy.cli import start_logging
from kproxy.cli.options import Asked, F, bootstrap_option, flag
from kproxy.cli.pipeline import check_master, kafka_flags, kafka_options, session_options, spark_flags
from kproxy.config.parsing import read_file
from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import (
    AVRO,
    DEFAULT_MESSAGE_BYTES,
    DEFAULT_OFFSETS,
    DEFAULT_ROWS_PER_SECOND,
    FILE_FORMATS,
    FILES_PER_CORE,
    JSON_SCHEMA,
    KAFKA,
    LATEST,
    PROTOBUF,
    RATE,
    SPARKS,
    IngestOptions,
    parse_pair,
)
from kproxy.pipeline.ingest.registry import Registry
from kproxy.pipeline.preflight import check_kafka, check_reachable
from kproxy.pipeline.spark import SparkFailed, pyspark_home

MAX_SCHEMA_BYTES = 1 << 20
INTERRUPTED = 130


def _number(name: str, default: int, text: str) -> Callable[[F], F]:
    return flag(name, "N", text, type=int, default=default)


def _choice(name: str, default: str | None, choices: str, text: str) -> Callable[[F], F]:
    return flag(name, None, text, type=click.Choice(choices.split()), default=default)


@click.command(
    "ingest",
    epilog="Exit status 0 when all rows were written or the job was stopped, 1 if it failed, 2 if it did not start.",
)
@flag("--from source", "FORMAT:WHERE", "csv:, json: or parquet:DIR, kafka:TOPIC, rate. With --format: a path.")
@flag("--format spark_format", "NAME", "Another streaming source of Spark's, such as delta, which loads --from.")
@flag("--topic", "NAME", "The topic to write to.")
@flag("--topic-column", "COLUMN", "Or: the column that names the topic of each row.")
@flag("--checkpoint", "DIR", "The directory for the job's progress, used by no other job.", required=True)
@bootstrap_option("The proxy to write to.")
@flag("--partitions", "N", "Create missing topics with this number of partitions.", type=int)
@flag("--select", "SQL", "A column of the rows, such as 'upper(a) AS a'. [all]", multiple=True)
@flag("--key", "COLUMN[,COLUMN...]", "The key: a column as text, or several as JSON. [no key]")
@flag("--value", "COLUMN[,COLUMN...]", "The columns of the value, as JSON. [all]")
@flag("--value-column", "COLUMN", "The column that is the value, unchanged.")
@_choice("--value-format", None, f"{AVRO} {PROTOBUF} {JSON_SCHEMA}", "With a schema in --registry. [plain JSON]")
@flag("--registry", "URL", "The schema registry (Confluent's API).")
@flag("--registry-user", "NAME", "The user at the registry.")
@flag("--registry-password-file", "FILE", "The file with its password, or set KPROXY_REGISTRY_PASSWORD.")
@flag("--subject", "NAME", "The subject of the schema. [TOPIC-value]")
@flag("--value-schema", "FILE|latest", "The schema, or the subject's latest. [made from the columns]")
@_choice(
    "--on-new-columns",
    "dead-letter",
    "fail dead-letter ignore add",
    "Rows with fields that the schema lacks; add: values are JSON documents as they stand in the source.",
)
@flag("--header headers", "NAME=SQL", "A header; *=ARRAY: all of an array.", multiple=True)
@click.option(
    "--keep-timestamps/--no-keep-timestamps",
    default=True,
    show_default=True,
    help="From kafka: keep the records' timestamps.",
)
@click.option("--keep-partitions", is_flag=True, help="From kafka: keep the records' partition numbers.")
@flag("--schema", "DDL|@FILE", "The columns. [inferred once; of a topic: Spark's]")
@flag("--source-option source_options", "K=V", "A Spark reader option.", multiple=True)
@flag("--from-bootstrap", "H:P[,H:P...]", "From kafka: its cluster. [--bootstrap]")
@_choice("--starting-offsets", "earliest", "earliest latest", "From kafka: where a new job starts.")
@flag("--trigger", "WHEN", "available-now, or an interval such as 10s. [available-now; of rate 1s]")
@flag("--max-files-per-trigger", "N", f"The most files in a micro-batch. [{FILES_PER_CORE} for each core]", type=int)
@_number("--max-offsets-per-trigger", DEFAULT_OFFSETS, "From kafka: the most records in a micro-batch.")
@_number("--rows-per-second", DEFAULT_ROWS_PER_SECOND, "From rate.")
@flag("--dead-letters", "json:DIR|topic:NAME", "Where to put rows that cannot be written. [none: the job fails]")
@_number("--max-message-bytes", DEFAULT_MESSAGE_BYTES, "Treat a larger message as a dead letter.")
@flag("--tasks", "N", "The number of writing tasks. [the number of Spark's cores]", type=int)
@click.option("--exactly-once", is_flag=True, help="Write in transactions, which need Apache Kafka behind --bootstrap.")
@kafka_flags("A Kafka producer option.")
@flag("--metrics", "H:P", "The listen address of metrics for Prometheus.")
@spark_flags
@click.pass_context
def command(context: click.Context, /, bootstrap: Asked, metrics: str | None, **given: Any) -> int:
    """Write files, a topic or a counter to a topic, through the proxy.

    This is a Structured Streaming job, which continues where it was if it is started again with the same --checkpoint.
    No row is lost then. If the job was killed, the rows of the micro-batch under way may be written again without
    --exactly-once, which consumers notice by the headers row=_kproxy_row and batch=_kproxy_batch. Rows of one key keep
    their order.

    \b
      kproxy pipeline ingest --from csv:flights/ --topic flights --partitions 12 --key tailnum --checkpoint ck/f
      kproxy pipeline ingest --from json:in/ --schema 'id LONG, name STRING' --topic a --trigger 10s --checkpoint ck/p
      kproxy pipeline ingest --from kafka:orders --from-bootstrap old:9092 --key key --value-column value \\
          --header '*=headers' --topic orders --checkpoint ck/o
      spark-submit --master yarn $(kproxy pipeline path) ingest --from parquet:s3a://b/in/ --topic events \\
          --checkpoint s3a://b/ck
    """
    start_logging(context, default="warning")
    spark = {name: given.pop(name) for name in ("master", "memory", "conf")}
    bootstrap.addresses()
    given["kafka_options"] = kafka_options(given.pop("kafka_option"), given.pop("command_config"))
    given["headers"] = tuple(parse_pair(text, "--header") for text in given["headers"])
    given["source_options"] = dict(parse_pair(text, "--source-option") for text in given["source_options"])
    if (spark_format := given.pop("spark_format")) is not None:
        is_ours = spark_format in (*FILE_FORMATS, KAFKA, RATE)
        given["source"] = ":".join(filter(None, ("" if is_ours else SPARKS, spark_format, given["source"])))
    elif given["source"] is None:
        raise StartupError("--from is missing: name the source, such as csv:DIR.")
    given["schema"] = _read_text(given["schema"])
    if given["value_schema"] not in (None, LATEST):
        given["value_schema"] = _read_text(f"@{given['value_schema']}", "--value-schema", "the schema's file")
    given["registry_password"] = os.environ.get("KPROXY_REGISTRY_PASSWORD") if given["registry_user"] else None
    if (password_file := given.pop("registry_password_file")) is not None:
        text = _read_text(f"@{password_file}", "--registry-password-file", "the file with the password alone")
        given["registry_password"] = str(text).rstrip("\r\n")
    for name in ("key", "value"):
        given[name] = tuple(column.strip() for column in (given[name] or "").split(",") if column.strip())
    options = IngestOptions(bootstrap=bootstrap.text, **given)
    options.check()
    pyspark_home()
    check_reachable(options.bootstrap, bootstrap.source)
    session = session_options("kproxy ingest", **spark)
    check_master(session)
    check_kafka(options.bootstrap, bootstrap.source, options.kafka_options)
    if options.value_format is not None:
        Registry(options).latest()
    if options.reads_kafka:
        check_kafka(options.source_bootstrap, "--from-bootstrap", options.source_kafka_options)
    try:
        return _run(options, session, metrics)
    except SparkFailed as error:
        click.echo(f"kproxy: the ingest failed: {str(error).rstrip('.')}.", err=True)
        return 1


def _run(options: IngestOptions, session: Any, listen: str | None) -> int:
    from kproxy.pipeline.ingest.job import Stop, run
    from kproxy.pipeline.ingest.progress import Metrics, serving
    from kproxy.pipeline.progress import Report, stopped_by_signals
    from kproxy.pipeline.session import open_session

    metrics, report, stop = Metrics(), Report(), Stop()
    with stopped_by_signals(stop.ask), serving(metrics, listen) as url, report:
        if url:
            report.say(f"Metrics are at {url}")
        starting = report.stage("Spark", "starting")
        with open_session(session) as opened:
            if stop.wanted:
                return INTERRUPTED
            starting.finish(f"version {opened.session.version}")
            run(opened.session, options, report, metrics, stop)
    return 0


def _read_text(text: str | None, flag: str = "--schema", what: str = "a file of DDL or of Spark's JSON") -> str | None:
    if text is None or not text.startswith("@"):
        return text
    content = read_file(Path(text[1:]), flag, MAX_SCHEMA_BYTES, f"give {what}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise StartupError(f"{flag} {text} is not UTF-8 text: give {what}.") from error

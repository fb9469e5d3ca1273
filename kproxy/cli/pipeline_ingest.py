"""`kproxy pipeline ingest`: write files, a topic or a counter to a topic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kproxy.address import Address
from kproxy.cli import start_logging
from kproxy.cli.options import Asked, bootstrap_option
from kproxy.cli.pipeline import check_master, kafka_flags, kafka_options, session_options, spark_flags
from kproxy.config import parse_address
from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import (
    DEFAULT_FILES,
    DEFAULT_MESSAGE_BYTES,
    DEFAULT_OFFSETS,
    DEFAULT_ROWS_PER_SECOND,
    FileSource,
    IngestOptions,
    KafkaSource,
    RateSource,
    Source,
    parse_dead_letters,
    parse_pair,
    parse_source,
    parse_trigger,
)
from kproxy.pipeline.preflight import check_reachable
from kproxy.pipeline.spark import SparkFailed, pyspark_home

MAX_SCHEMA_BYTES = 1 << 20
INTERRUPTED = 130


@click.command(
    "ingest",
    epilog="Exit status 0 when all rows were written or the job was stopped, 1 if it failed, 2 if it did not start.",
)
@click.option(
    "--from", "source", metavar="FORMAT:WHERE", required=True, help="csv:, json: or parquet:DIR, kafka:TOPIC, rate."
)
@click.option("--topic", metavar="NAME", help="The topic to write to.")
@click.option("--topic-column", metavar="COLUMN", help="Or: the column that names the topic of each row.")
@click.option(
    "--checkpoint", metavar="DIR", required=True, help="The directory for the job's progress; of this job alone."
)
@bootstrap_option("The proxy to write to.")
@click.option("--partitions", metavar="N", type=int, help="Create missing topics with this number of partitions.")
@click.option("--key", metavar="COLUMN[,COLUMN...]", help="The key: a column as text, or several as JSON. [no key]")
@click.option("--require-key", is_flag=True, help="Treat a row without a key as a dead letter.")
@click.option("--value", metavar="COLUMN[,COLUMN...]", help="The columns of the value, as JSON. [all]")
@click.option("--value-column", metavar="COLUMN", help="The column that is the value, unchanged.")
@click.option("--drop-nulls", is_flag=True, help="Omit null fields from that JSON.")
@click.option(
    "--on-new-columns",
    type=click.Choice(["fail", "dead-letter", "ignore", "add"]),
    default="dead-letter",
    show_default=True,
    help="Rows with fields that the schema lacks; add: values are JSON documents as they stand in the source.",
)
@click.option(
    "--not-finite",
    type=click.Choice(["dead-letter", "text"]),
    default="dead-letter",
    show_default=True,
    help="How to write NaN and infinities, which JSON does not have.",
)
@click.option("--header", "headers", metavar="NAME=COLUMN", multiple=True, help="A header from a column. (repeatable)")
@click.option("--constant-header", metavar="NAME=TEXT", multiple=True, help="A header with a fixed value. (repeatable)")
@click.option("--copy-headers", is_flag=True, help="From kafka: keep the records' headers.")
@click.option(
    "--keep-timestamps/--no-keep-timestamps",
    default=True,
    show_default=True,
    help="From kafka: keep the records' timestamps.",
)
@click.option("--keep-partitions", is_flag=True, help="From kafka: keep the records' partition numbers.")
@click.option("--batch-header", metavar="NAME", help="Add a header with the micro-batch that wrote the record.")
@click.option("--row-header", metavar="NAME", help="Add a header with the record's row in the source.")
@click.option("--schema", metavar="DDL|@FILE", help="The columns. [inferred once; of a topic: Spark's]")
@click.option("--source-option", metavar="K=V", multiple=True, help="A Spark reader option. (repeatable)")
@click.option("--from-bootstrap", metavar="H:P[,H:P...]", help="From kafka: its cluster. [--bootstrap]")
@click.option(
    "--starting-offsets",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="From kafka: where a new job starts.",
)
@click.option(
    "--trigger", metavar="WHEN", help="available-now, or an interval such as 10s. [available-now; of rate 1s]"
)
@click.option(
    "--max-files-per-trigger",
    metavar="N",
    type=int,
    default=DEFAULT_FILES,
    show_default=True,
    help="The most files in a micro-batch.",
)
@click.option(
    "--max-offsets-per-trigger",
    metavar="N",
    type=int,
    default=DEFAULT_OFFSETS,
    show_default=True,
    help="From kafka: the most records in a micro-batch.",
)
@click.option(
    "--rows-per-second",
    metavar="N",
    type=int,
    default=DEFAULT_ROWS_PER_SECOND,
    show_default=True,
    help="From rate.",
)
@click.option(
    "--dead-letters",
    metavar="json:DIR|topic:NAME",
    help="Where to put rows that cannot be written. [none: the job fails]",
)
@click.option(
    "--max-message-bytes",
    metavar="N",
    type=int,
    default=DEFAULT_MESSAGE_BYTES,
    show_default=True,
    help="Treat a larger message as a dead letter.",
)
@click.option("--tasks", metavar="N", type=int, help="The number of writing tasks. [the number of Spark's cores]")
@kafka_flags("A Kafka producer option.")
@click.option("--metrics", metavar="H:P", help="The listen address of metrics for Prometheus.")
@spark_flags
@click.pass_context
def command(context: click.Context, /, bootstrap: Asked, metrics: str | None, **given: Any) -> int:
    """Write files, a topic or a counter to a topic, through the proxy.

    A Structured Streaming job: started again with the same --checkpoint it goes on where it was. Nothing is lost then.
    What the one micro-batch that was under way had written may be written again, if the job was killed: with
    --batch-header and --row-header consumers can tell. Rows of one key keep their order.

    \b
      kproxy pipeline ingest --from csv:flights/ --topic flights --partitions 12 --key tailnum --checkpoint ck/f
      kproxy pipeline ingest --from json:in/ --schema 'id LONG, name STRING' --topic a --trigger 10s --checkpoint ck/p
      kproxy pipeline ingest --from kafka:orders --from-bootstrap old:9092 --key key --value-column value \\
          --copy-headers --topic orders --checkpoint ck/o
      spark-submit --master yarn $(kproxy pipeline path) ingest --from parquet:s3a://b/in/ --topic events \\
          --checkpoint s3a://b/ck
    """
    start_logging(context, default="warning")
    spark = {name: given.pop(name) for name in ("master", "memory", "conf")}
    bootstrap.addresses()
    options = _options(bootstrap=bootstrap.text, **given)
    options.check()
    pyspark_home()
    check_reachable(options.bootstrap, bootstrap.source)
    if isinstance(options.source, KafkaSource):
        check_reachable(options.source.bootstrap, "--from-bootstrap")
    session = session_options("kproxy ingest", **spark)
    check_master(session)
    try:
        return _run(options, session, metrics)
    except SparkFailed as error:
        click.echo(f"kproxy: the ingest failed: {str(error).rstrip('.')}.", err=True)
        return 1


def _run(options: IngestOptions, session: Any, listen: str | None) -> int:
    from kproxy.pipeline.ingest.job import Stop, run, stopped_by_signals
    from kproxy.pipeline.ingest.progress import Metrics, serving
    from kproxy.pipeline.progress import Report
    from kproxy.pipeline.session import open_session

    metrics, report, stop = Metrics(), Report(), Stop()
    with stopped_by_signals(stop), serving(metrics, listen) as port, report:
        if port:
            report.say(f"Metrics are at http://{Address(parse_address(str(listen), '--metrics').host, port)}/metrics")
        starting = report.stage("Spark", "starting")
        with open_session(session) as opened:
            if stop.wanted:
                return INTERRUPTED
            starting.finish(f"version {opened.session.version}")
            run(opened.session, options, report, metrics, stop)
    return 0


def _options(
    *,
    headers: Sequence[str],
    constant_header: Sequence[str],
    key: str | None,
    value: str | None,
    dead_letters: str | None,
    kafka_option: Sequence[str],
    command_config: Path | None,
    trigger: str | None,
    bootstrap: str,
    source: str,
    schema: str | None,
    source_option: Sequence[str],
    from_bootstrap: str | None,
    starting_offsets: Any,
    max_files_per_trigger: int,
    max_offsets_per_trigger: int,
    rows_per_second: int,
    **same: Any,
) -> IngestOptions:
    """The options that the flags give. Raises StartupError."""
    name, where = parse_source(source)
    reader = dict(parse_pair(text, "--source-option") for text in source_option)
    columns = _read_schema(schema)
    found: Source
    if name == "rate":
        found = RateSource(rows_per_second)
    elif name == "kafka":
        found = KafkaSource(
            from_bootstrap or bootstrap, where, columns, starting_offsets, max_offsets_per_trigger, reader
        )
    else:
        found = FileSource(name, where, columns, max_files_per_trigger, reader)
    return IngestOptions(
        found,
        bootstrap=bootstrap,
        key=_columns(key),
        value_columns=_columns(value),
        headers=tuple(parse_pair(text, "--header") for text in headers),
        constant_headers=tuple(parse_pair(text, "--constant-header") for text in constant_header),
        dead_letters=None if dead_letters is None else parse_dead_letters(dead_letters),
        processing_time=parse_trigger(trigger or ("1s" if name == "rate" else "available-now")),
        kafka_options=kafka_options(kafka_option, command_config),
        **same,
    )


def _columns(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _read_schema(text: str | None) -> str | None:
    if text is None or not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        if path.stat().st_size > MAX_SCHEMA_BYTES:
            raise StartupError(f"--schema {text} is larger than any schema: give a file of DDL or of Spark's JSON.")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise StartupError(f"--schema {text} cannot be read ({why}): give a file of DDL or of Spark's JSON.") from error

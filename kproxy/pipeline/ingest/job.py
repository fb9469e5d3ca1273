"""Start an ingest job: check, claim the checkpoint, start the stream."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType

from kproxy.config import split_list
from kproxy.errors import StartupError
from kproxy.pipeline.ingest import cluster_admin, sources
from kproxy.pipeline.ingest.checkpoint import Checkpoint, Found, Job, settle, source_in_words
from kproxy.pipeline.ingest.java_classes import add_documents_function, add_timestamp_interceptor
from kproxy.pipeline.ingest.options import FileSource, IngestOptions, KafkaSource
from kproxy.pipeline.ingest.sink import BatchDone, BatchWriter
from kproxy.pipeline.spark import as_spark_failure


def start(
    session: SparkSession,
    options: IngestOptions,
    *,
    on_batch: Callable[[BatchDone], None] = lambda done: None,
    say: Callable[[str], None] = lambda sentence: None,
    stopping: Callable[[], bool] = lambda: False,
) -> StreamingQuery:
    """Start the job in `session` and return the running query, which the caller awaits and stops.

    `on_batch` is called after each micro-batch, and `stopping` before each, on another thread; if it returns True, the
    query ends with an error and nothing of that micro-batch is written. `say` gets sentences for the user. Blocks for
    seconds, longer if a schema is inferred. Raise StartupError if the user can fix it, else SparkFailed.
    """
    options.check()
    ours = sources.own_session(session)
    checkpoint = Checkpoint(ours, options.checkpoint)
    found, known = checkpoint.look()
    # Before any topic is created: a different source or target shows without asking the clusters.
    asked = Job(uuid.uuid4().hex, source_in_words(ours, options), options.target)
    settle(known, found, asked, options.checkpoint)
    asked = _ask_clusters(ours, options, asked)
    asked = replace(asked, schema=_given_schema(options))
    job = settle(known, found, asked, options.checkpoint)
    if job.schema is None and isinstance(options.source, FileSource):
        job = replace(job, schema=sources.infer_schema(ours, options.source).json(), schema_inferred=True)
    schema = None if job.schema is None else sources.parse_schema(job.schema)
    writer = BatchWriter(
        options,
        job.job_id,
        tasks=options.tasks or ours.sparkContext.defaultParallelism,
        schema=schema,
        on_batch=on_batch,
        stopping=stopping,
    )
    if options.keeps_timestamps:
        add_timestamp_interceptor(ours)
    if options.verbatim:
        add_documents_function(ours)
    rows = sources.read(ours, options, schema)
    with as_spark_failure("The rows cannot be made into messages"):
        # Resolve the columns now, so that a missing one is an error before anything is written.
        writer.encode(rows, 0).schema  # noqa: B018 - asking for it has Spark resolve every column
    if job != known:
        checkpoint.save(job)
    if schema is not None:
        say(_about_schema(job, found, schema))
    with as_spark_failure("The job did not start"):
        stream = rows.writeStream.foreachBatch(writer).option("checkpointLocation", checkpoint.path)
        named = stream.queryName(f"kproxy ingest {job.job_id}")
        if options.processing_time is None:
            return named.trigger(availableNow=True).start()
        return named.trigger(processingTime=options.processing_time).start()


def _ask_clusters(session: SparkSession, options: IngestOptions, asked: Job) -> Job:
    """Return `asked` with the clusters' ids; create missing topics. Raise StartupError or SparkFailed."""
    with cluster_admin.asking(session, options.bootstrap, "--bootstrap", options.kafka_options) as cluster:
        letters = options.dead_letters
        wanted = [options.topic, letters.where if letters is not None and letters.kind == "topic" else None]
        for topic in wanted:
            if topic is not None and cluster.partitions(topic) is None:
                if options.partitions is None:
                    raise StartupError(
                        f"there is no topic {topic} at --bootstrap {options.bootstrap}: create it, or give "
                        "--partitions N to have it made."
                    )
                cluster.create(topic, options.partitions)
        asked = replace(asked, target_cluster=cluster.cluster_id())
        room = cluster.partitions(options.topic) if options.keep_partitions and options.topic is not None else None
    source = options.source
    if not isinstance(source, KafkaSource):
        return asked
    with cluster_admin.asking(
        session, source.bootstrap, "--from-bootstrap", _client_options(source.options)
    ) as cluster:
        for topic in split_list(source.topics, "--from kafka:"):
            count = cluster.partitions(topic)
            if count is None:
                raise StartupError(f"there is no topic {topic} at --from-bootstrap {source.bootstrap}: check its name.")
            if room is not None and count > room:
                raise StartupError(
                    f"--keep-partitions: topic {topic} has {count} partitions and topic {options.topic} has {room}: "
                    "add some to that one, or leave it out."
                )
        return replace(asked, source_cluster=cluster.cluster_id())


def _client_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return those options of Spark's source that are for Kafka's client."""
    return {name.removeprefix("kafka."): value for name, value in options.items() if name.startswith("kafka.")}


def _given_schema(options: IngestOptions) -> str | None:
    source = options.source
    if not isinstance(source, (FileSource, KafkaSource)) or source.schema is None:
        return None
    return str(sources.parse_schema(source.schema).json())


def _about_schema(job: Job, found: Found, schema: StructType) -> str:
    columns = ", ".join(f"{field.name} {field.dataType.simpleString().upper()}" for field in schema.fields)
    if not job.schema_inferred:
        return f"The schema that was given: {columns}"
    if found is Found.OURS:
        return f"The schema that was inferred when the job first started: {columns}"
    return f"The schema, inferred once from the files that are there now and kept with the checkpoint: {columns}"

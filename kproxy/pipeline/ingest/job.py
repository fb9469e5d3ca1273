"""Run an ingest job: check, claim the checkpoint, start the stream, show progress, serve metrics, stop in order.

States: STARTING -> RUNNING --all read, or failed--> ENDED; RUNNING --signal--> STOPPING --micro-batch done--> ENDED.

Invariants
1. After a first signal the running micro-batch is completed, so that nothing of it is written again. A second signal,
   or one while no micro-batch runs, ends the job at once.
2. When `run` returns or raises, the query has ended; the session is the caller's.

A failure is explained in one sentence, with a remedy. Spark's own text is hundreds of lines of Java.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType

from kproxy.errors import StartupError
from kproxy.pipeline.ingest import sources
from kproxy.pipeline.ingest.checkpoint import Checkpoint, Job, settle, source_in_words
from kproxy.pipeline.ingest.options import FRAME, RATE, IngestOptions
from kproxy.pipeline.ingest.progress import Display, Metrics, Tally
from kproxy.pipeline.ingest.sink import NEW_IN_FILE, REFUSED, BatchDone, BatchWriter, Stopped, add_jar, producer_options
from kproxy.pipeline.ingest.sources import (
    OVER_LINES,
    PARQUET_TYPE,
    PRETTY,
    Backlog,
    files_begun,
    files_there,
    records_behind,
)
from kproxy.pipeline.ingest.transactions import Transactions, tasks_of
from kproxy.pipeline.preflight import check_kafka
from kproxy.pipeline.progress import Report
from kproxy.pipeline.spark import SparkFailed, as_spark_failure, cause_in, kafka_connector


def start(
    session: SparkSession,
    options: IngestOptions,
    *,
    on_batch: Callable[[BatchDone], None] = lambda done: None,
    say: Callable[[str], None] = lambda sentence: None,
    stopping: Callable[[], bool] = lambda: False,
    rows: DataFrame | None = None,
) -> StreamingQuery:
    """Start the job in `session` and return the running query, which the caller awaits and stops.

    `rows`: a stream, if the source is FRAME.
    `on_batch` is called after each micro-batch, and `stopping` before each, on another thread; if it returns True, the
    query ends with an error and nothing of that micro-batch is written. `say` gets sentences for the user. Blocks for
    seconds, longer if a schema is inferred. Raise StartupError if the user can fix it, else SparkFailed.
    """
    options.check()
    if not options.checkpoint or (rows is None) == (options.source == FRAME):
        raise StartupError("a stream needs a checkpoint: name a directory of its own that will be there next time.")
    ours = sources.own_session(session)
    checkpoint = Checkpoint(ours, options.checkpoint)
    known = checkpoint.job()
    # Before any topic is created: a different source or target shows without asking the clusters.
    asked = Job(uuid.uuid4().hex, source_in_words(ours, options), options.target)
    job_id = settle(known, asked, options.checkpoint).job_id
    tasks = options.tasks or ours.sparkContext.defaultParallelism
    transactions = None
    if options.exactly_once:
        unfinished, before = checkpoint.unfinished(), None if known is None else known.tasks
        tasks = tasks_of(options.tasks, before, unfinished, default=tasks, now_ms=time.time() * 1000)
        asked = replace(asked, tasks=tasks)
        transactions = Transactions(ours, producer_options(options), job_id)
    asked = _ask_clusters(ours, options, asked, transactions)
    if options.schema is not None and options.format != RATE:
        asked = replace(asked, schema=sources.parse_schema(options.schema).json())
    job = settle(known, asked, options.checkpoint)
    if job.schema is None and options.reads_files:
        job = replace(job, schema=sources.infer_schema(ours, options).json(), schema_inferred=True)
    elif known is None:
        sources.check_lines(ours, options)
    schema = None if job.schema is None else sources.parse_schema(job.schema)
    writer = BatchWriter(
        options, job.job_id, transactions, tasks=tasks, schema=schema, on_batch=on_batch, stopping=stopping
    )
    if options.keeps_timestamps or options.exactly_once:
        add_jar(ours)
    rows = sources.read(ours, options, schema) if rows is None else rows
    with as_spark_failure("The rows cannot be made into messages"):
        # Resolve the columns now, so that a missing one is an error before anything is written.
        writer.encode(rows, 0).schema  # noqa: B018 - asking for it has Spark resolve every column
    if job != known:
        checkpoint.save(job)
    if schema is not None:
        say(_about_schema(job, known, schema))
    with as_spark_failure("The job did not start"):
        stream = rows.writeStream.foreachBatch(writer).option("checkpointLocation", checkpoint.path)
        named = stream.queryName(f"kproxy ingest {job.job_id}")
        if options.processing_time is None:
            return named.trigger(availableNow=True).start()
        return named.trigger(processingTime=options.processing_time).start()


def write(rows: DataFrame, options: IngestOptions) -> BatchDone:
    """Write a DataFrame that is no stream; a repeat writes all rows again. Raise StartupError or SparkFailed."""
    options.check()
    if options.exactly_once:
        raise StartupError("exactly_once needs a stream and its checkpoint: leave it out for a table of rows.")
    session, done = rows.sparkSession, list[BatchDone]()
    job = _ask_clusters(session, options, Job(uuid.uuid4().hex, options.source, options.target))
    tasks = options.tasks or session.sparkContext.defaultParallelism
    writer = BatchWriter(options, job.job_id, tasks=tasks, schema=None, on_batch=done.append, stopping=lambda: False)
    try:
        writer(rows, 0)
    except (Py4JError, PySparkException) as error:
        raise SparkFailed(f"The rows were not all written: {why(error, options)}") from error
    return done[0]


def _ask_clusters(
    session: SparkSession, options: IngestOptions, asked: Job, transactions: Transactions | None = None
) -> Job:
    """Return `asked` with the clusters' ids; create missing topics. Raise StartupError or SparkFailed."""
    with closing(Cluster(session, options.bootstrap, "--bootstrap", options.kafka_options)) as cluster:
        if transactions is not None:
            transactions.check(options.bootstrap)
        for topic in filter(None, (options.topic, options.letters_topic)):
            if cluster.partitions(topic) is None:
                if options.partitions is None:
                    raise StartupError(
                        f"there is no topic {topic} at --bootstrap {options.bootstrap}: create it, or give "
                        "--partitions N to let the job create it."
                    )
                cluster.create(topic, options.partitions)
        asked = replace(asked, target_cluster=cluster.cluster_id())
        room = cluster.partitions(options.topic) if options.keep_partitions and options.topic is not None else None
    if not options.reads_kafka:
        return asked
    where = options.source_bootstrap
    with closing(Cluster(session, where, "--from-bootstrap", options.source_kafka_options)) as cluster:
        for topic in options.topics:
            count = cluster.partitions(topic)
            if count is None:
                raise StartupError(f"there is no topic {topic} at --from-bootstrap {where}: check its name.")
            if room is not None and count > room:
                raise StartupError(
                    f"--keep-partitions: topic {topic} has {count} partitions and topic {options.topic} has {room}: "
                    "add some to that one, or leave it out."
                )
        return replace(asked, source_cluster=cluster.cluster_id())


def _about_schema(job: Job, known: Job | None, schema: StructType) -> str:
    columns = ", ".join(f"{field.name} {field.dataType.simpleString().upper()}" for field in schema.fields)
    if not job.schema_inferred:
        return f"The schema that was given: {columns}"
    if known is not None:
        return f"The schema that was inferred when the job first started: {columns}"
    return f"The schema, inferred once from the files that are there now and kept with the checkpoint: {columns}"


REQUEST_TIMEOUT_S: Final = 20


class Cluster:
    """The cluster at `bootstrap`, which `flag` gave, asked by the admin client of Spark's Kafka connector.

    This client takes all options that Spark's Kafka sink takes, such as JKS stores, Kerberos and login modules of the
    user's, of which kafka-python knows a few.
    """

    def __init__(self, session: SparkSession, bootstrap: str, flag: str, options: Mapping[str, str]) -> None:
        """Connect with Kafka's `options`.

        Raise StartupError if no Kafka answers or Spark has no Kafka connector, SparkFailed if it is not Kafka.
        """
        check_kafka(bootstrap, flag, options)
        self._jvm: Any = session._jvm
        self._where = f"{flag} {bootstrap}"
        limits = dict.fromkeys(("default.api.timeout.ms", "request.timeout.ms"), str(REQUEST_TIMEOUT_S * 1000))
        try:
            with as_spark_failure(f"{self._where} cannot be asked"):
                client = self._jvm.org.apache.kafka.clients.admin.Admin
                self._admin = client.create({**limits, **options, "bootstrap.servers": bootstrap})
        except TypeError as error:
            # py4j takes a missing class for a package, and a package cannot be called.
            raise StartupError(
                f"Spark was started without its Kafka connector: start it with --packages {kafka_connector()}."
            ) from error

    def close(self) -> None:
        with as_spark_failure(f"{self._where} cannot be left"):
            self._admin.close()

    def cluster_id(self) -> str | None:
        """Return the cluster's id, None if it does not report one."""
        # The id only shows whether two addresses belong to one cluster; without it they are not compared.
        found: str | None = None
        with contextlib.suppress(SparkFailed):
            found = self._await(self._admin.describeCluster().clusterId(), "does not say which cluster it is")
        return found

    def partitions(self, topic: str) -> int | None:
        """Return the number of partitions, None if there is no such topic. Raise SparkFailed if the query fails."""
        asked = self._admin.describeTopics([topic]).allTopicNames()
        found = self._await(asked, f"does not tell of the topic {topic}", unless="UnknownTopicOrPartitionException")
        return None if found is None else len(found.get(topic).partitions())

    def create(self, topic: str, partitions: int) -> None:
        """Create the topic with the cluster's default replication, unless there is one. Raise SparkFailed."""
        optional = self._jvm.java.util.Optional
        new = self._jvm.org.apache.kafka.clients.admin.NewTopic(topic, optional.of(partitions), optional.empty())
        asked = self._admin.createTopics([new]).all()
        self._await(asked, f"could not create the topic {topic}", unless="TopicExistsException")

    def _await(self, future: Any, what: str, unless: str | None = None) -> Any:
        """Return what Kafka answers, None for the error `unless`. Raise SparkFailed for any other."""
        try:
            with as_spark_failure(f"{self._where} {what}"):
                return future.get(REQUEST_TIMEOUT_S, self._jvm.java.util.concurrent.TimeUnit.SECONDS)
        except SparkFailed as error:
            if unless is not None and unless in str(error):
                return None
            raise


POLL_S: Final = 0.25
# The least pause between counts of files, in seconds, and as a multiple of a count's duration: a listing may take long.
LEAST_PAUSE_S: Final = 5.0
PAUSE_FACTOR: Final = 5
# The most files that an error names.
SHOWN_FILES: Final = 5


class Stop:
    """A request to end the job: `wanted` after the running micro-batch, or `at_once` when asked again."""

    wanted = at_once = False

    def ask(self) -> None:
        self.at_once, self.wanted = self.wanted, True


def run(session: SparkSession, options: IngestOptions, report: Report, metrics: Metrics, stop: Stop) -> None:
    """Run the job until it is done or stopped. Raise StartupError, or SparkFailed with the reason."""
    tally = Tally(metrics)
    # Later files are left to the next run.
    before = files_there(session, options) if options.reads_files and options.processing_time is None else set()
    query = start(session, options, on_batch=tally.done, say=report.say, stopping=lambda: stop.wanted)
    try:
        failure = _watch(session, query, options, Display(report, tally), tally, stop)
        if failure is None and before and not stop.wanted:
            left = before & files_there(session, options)
            failure = _about_unread(sorted(left - files_begun(session, options.checkpoint)), options)
    finally:
        with as_spark_failure("The job did not stop"):
            query.stop()
    report.say(tally.summary(options))
    if failure is not None:
        raise SparkFailed(failure)
    if stop.wanted:
        report.say("Stopped before the end: start it again with the same --checkpoint to go on.")


def _about_unread(paths: Sequence[str], options: IngestOptions) -> str | None:
    if not paths:
        return None
    shown = f"as Spark passed over them: {', '.join(paths[:SHOWN_FILES])}"
    more = "" if len(paths) <= SHOWN_FILES else f" and {len(paths) - SHOWN_FILES:,} more"
    return (
        f"{len(paths):,} of the files that {_source(options)} had at first were not read, {shown}{more}: see whether "
        "a --source-option leaves them out (maxFileAge, latestFirst, fileNameOnly), or give them to a job of their own"
    )


def _watch(
    session: SparkSession, query: StreamingQuery, options: IngestOptions, display: Display, tally: Tally, stop: Stop
) -> str | None:
    """Wait until the query has ended. Return the reason if it failed."""
    not_before = 0.0

    def look(*, at_once: bool = False) -> None:
        nonlocal not_before
        began = time.monotonic()
        if options.reads_kafka:
            progress = query.lastProgress
            tally.left(records_behind(None if progress is None else progress.json))
        elif options.reads_files and (at_once or began >= not_before):
            # Nothing was read yet, so Spark has no list; or files disappeared during the listing.
            with contextlib.suppress(SparkFailed):
                left = files_there(session, options) - files_begun(session, options.checkpoint)
                tally.left(Backlog(len(left), "files"))
            ended = time.monotonic()
            not_before = ended + max(LEAST_PAUSE_S, PAUSE_FACTOR * (ended - began))

    try:
        while not query.awaitTermination(POLL_S):
            if stop.at_once or (stop.wanted and not query.status["isTriggerActive"]):
                break
            with as_spark_failure("The job cannot be watched"):
                look()
            display.update()
    except (Py4JError, PySparkException) as error:
        if f"{Stopped.__module__}.{Stopped.__name__}" not in str(error):
            return why(error, options)
    look(at_once=True)
    display.finish()
    return None


_REFUSED: Final = re.compile(re.escape(REFUSED) + r"\|([^|]*)\|([^|]*)\|(?:([^|]*)\|)?")
_WITH_NEW_COLUMNS: Final = (
    "give a --schema that has it, or --on-new-columns dead-letter (or ignore), and start the job again, which writes "
    "this micro-batch again"
)
_WITH_NEW_FILES: Final = (
    "give a --schema that has them, or --on-new-columns ignore to leave them out, and start the job again"
)
_REFUSALS: Final = {
    "corrupt": "it cannot be parsed",
    "new column": "it has what the schema lacks ({names})",
    "not finite": "a number of it is NaN or infinite, which JSON has no number for (--select can make it null or text)",
    "not of the schema": "its value does not fit the schema in the registry ({names})",
    "no topic": "its topic is null or no name of a topic",
    "too large": "its message is larger than --max-message-bytes",
}


def why(error: BaseException, options: IngestOptions) -> str:
    """Return the sentence for the user; `error` is the one that the query ended with."""
    text = str(error)
    refused = _REFUSED.search(text)
    if refused is not None:
        reason = _REFUSALS.get(refused[1], refused[1]).format(names=refused[3])
        if refused[1] == "corrupt" and refused[3] in PRETTY:
            return f"the file of the row {refused[2]} has {OVER_LINES}"
        if refused[1] == NEW_IN_FILE:
            return f"the file {refused[2]} has columns that the schema lacks ({refused[3]}): {_WITH_NEW_FILES}"
        if refused[1] == "new column" and options.on_new_columns == "fail":
            return f"the row {refused[2]} cannot be written, as {reason}: {_WITH_NEW_COLUMNS}"
        return (
            f"the row {refused[2]} cannot be written, as {reason}: give --dead-letters json:DIR (or topic:NAME) for "
            "such rows and start the job again, which writes this micro-batch again"
        )
    for pattern, sentence in _KNOWN.items():
        found = re.search(pattern, text)
        if found is not None:
            return sentence.format(
                **found.groupdict(),
                bootstrap=options.bootstrap,
                target=options.target,
                checkpoint=options.checkpoint,
                source=_source(options),
            )
    return cause_in(text) or type(error).__name__


def _source(options: IngestOptions) -> str:
    return f"{options.where} at {options.source_bootstrap}" if options.reads_kafka else options.where or options.source


# Spark's and Kafka's errors, by a part of their text.
_KNOWN: Final = {
    r"kproxy-later-batch\|(?P<number>\d+)\|": "{target} has micro-batch {number}, which is later: another run of this "
    "job wrote it, or Spark's files in the checkpoint {checkpoint} are older; end that run, or give a new "
    "--checkpoint to start a new job",
    "kproxy-other-rows": "a part of the micro-batch was written, and its rows or keys have changed since: start the "
    "job with its earlier source and options (--select, --key), or once without --exactly-once, which writes this "
    "micro-batch again",
    "ProducerFenced|InvalidProducerEpoch": "a transaction took longer than transaction.timeout.ms, or another attempt "
    "of its task has ended it: start the job again, which writes each row once; if that fails too, make micro-batches "
    "smaller, or raise the limit with --kafka-option up to the brokers' transaction.max.timeout.ms",
    PARQUET_TYPE: "a Parquet file in {source} has a column of a type that Spark does not read ({type}): write the file "
    "without it; or give a --schema that lacks it, with --on-new-columns ignore",
    r"(?:CSV header does not conform|Number of column in CSV header)[^\t]*CSV file: (?P<file>.*)": "the header of "
    "{file} does not name the columns of the schema in their order: if all later files are like it, start the job "
    "again with a matching --schema; otherwise let a separate job read it from another directory, or ignore the names "
    "in headers with --source-option enforceSchema=true (a file that is not UTF-8 needs --source-option encoding=NAME)",
    "MALFORMED_CHARACTER_CODING": "a file in {source} is not in the encoding that --source-option encoding names "
    "(UTF-16 with a document on each line needs its byte order and line end: encoding=UTF-16LE and lineSep=$'\\n')",
    "RecordTooLargeException|MESSAGE_TOO_LARGE|record-too-large": "{target} refuses a message because of its "
    "size: lower --max-message-bytes, with --dead-letters for larger rows, or raise the topic's max.message.bytes",
    r"Partition \d+ of topic \S+ with partition count \d+ is not present": "{target} has fewer partitions than "
    "{source}: add some, or start the job without --keep-partitions",
    "not present in metadata after|UnknownTopicOrPartitionException": "{target} cannot be reached through {bootstrap}: "
    "there is no such topic, or none of its owners answers",
    "TopicAuthorizationException|SaslAuthenticationException|ClusterAuthorizationException|"
    "TransactionalIdAuthorizationException|GroupAuthorizationException": "{bootstrap} refused the "
    "credentials: set them with --kafka-option",
    r"Expiring \d+ record|delivery timeout|TimeoutException.*(ms has passed|appending record)": "{target} did not "
    "acknowledge a record in time through {bootstrap}: start the job again when its brokers are back; nothing "
    "is lost",
    "Some data may have been lost|failOnDataLoss|OffsetOutOfRangeException|KAFKA_DATA_LOSS": "the source {source} no "
    "longer has the next records (retention removed them, or the topic was recreated): give --source-option "
    "failOnDataLoss=false to continue without them",
    "CONCURRENT_STREAM_LOG_UPDATE|[Cc]oncurrent(ly)? (update|using)|Multiple streaming queries": "another run of "
    "this job uses the checkpoint {checkpoint}: end it first",
    "OutOfMemoryError|Java heap space": "Spark ran out of memory: make micro-batches smaller or give it more "
    "(--memory)",
}

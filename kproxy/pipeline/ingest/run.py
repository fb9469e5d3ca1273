"""Run an ingest job: show progress, serve metrics, stop in order.

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
import signal
import threading
from collections.abc import Iterator
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from kproxy.pipeline.ingest.backlog import FilesLeft, records_behind
from kproxy.pipeline.ingest.job import start
from kproxy.pipeline.ingest.options import FileSource, IngestOptions, KafkaSource
from kproxy.pipeline.ingest.progress import Display, Metrics, Tally, summary
from kproxy.pipeline.ingest.sink import NEW_IN_FILE, REFUSED, BatchDone, Stopped
from kproxy.pipeline.progress import Report
from kproxy.pipeline.spark import SparkFailed, as_spark_failure, cause_in

POLL_S: Final = 0.25


class Stop:
    """A request to end the job: `wanted` after the running micro-batch, `at_once` without waiting for it."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._at_once = threading.Event()

    @property
    def wanted(self) -> bool:
        return self._wanted.is_set()

    @property
    def at_once(self) -> bool:
        return self._at_once.is_set()

    def ask(self) -> None:
        """Request the end: the first call after the running micro-batch, the second at once."""
        if self._wanted.is_set():
            self._at_once.set()
        self._wanted.set()


def run(session: SparkSession, options: IngestOptions, report: Report, metrics: Metrics, stop: Stop) -> None:
    """Run the job until it is done or stopped. Raise StartupError, or SparkFailed with the reason."""
    tally = Tally()

    def on_batch(batch: BatchDone) -> None:
        tally.done(batch)
        metrics.done(batch)

    def stopping() -> bool:
        return stop.wanted

    query = start(session, options, on_batch=on_batch, say=report.say, stopping=stopping)
    try:
        failure = _watch(session, query, options, Display(report, tally), tally, metrics, stop)
    finally:
        with as_spark_failure("The job did not stop"):
            query.stop()
    report.say(summary(tally, options))
    if failure is not None:
        raise SparkFailed(failure)
    if stop.wanted:
        report.say("Stopped before the end: start it again with the same --checkpoint to go on.")


def _watch(
    session: SparkSession,
    query: StreamingQuery,
    options: IngestOptions,
    display: Display,
    tally: Tally,
    metrics: Metrics,
    stop: Stop,
) -> str | None:
    """Wait until the query has ended. Return the reason if it failed."""
    files = FilesLeft(session, options.source, options.checkpoint) if isinstance(options.source, FileSource) else None

    def look(*, at_once: bool = False) -> None:
        batches, last, found = tally.batches, tally.last, None
        if files is not None:
            found = files.look(at_once=at_once)
        elif isinstance(options.source, KafkaSource):
            found = records_behind(query.lastProgress, 0 if last is None else last.batch)
        tally.left(found, batches)
        metrics.behind(found)

    try:
        while not query.awaitTermination(POLL_S):
            if stop.at_once or (stop.wanted and not query.status["isTriggerActive"]):
                break
            with as_spark_failure("The job cannot be watched"):
                look()
            display.update()
    except PySparkException as error:
        if Stopped.SAID not in str(error):
            return why(error, options)
    look(at_once=True)
    display.finish()
    return None


@contextlib.contextmanager
def stopped_by_signals(stop: Stop) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM call `stop.ask` while the block runs; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop.ask()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_REFUSED: Final = re.compile(re.escape(REFUSED) + r"\|([^|]*)\|([^|]*)\|(?:([^|]*)\|)?")
_RAISED: Final = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Failed): (.+)$", re.MULTILINE)
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
    "not finite": "a number of it is NaN or infinite, which JSON has no number for (--not-finite text writes its name)",
    "no key": "its key is null",
    "no topic": "its topic is null or no name of a topic",
    "too large": "its message is larger than --max-message-bytes",
}


def why(error: BaseException, options: IngestOptions) -> str:
    """Return the sentence for the user; `error` is the one that the query ended with."""
    text = str(error)
    refused = _REFUSED.search(text)
    if refused is not None:
        reason = _REFUSALS.get(refused[1], refused[1]).format(names=refused[3])
        if refused[1] == NEW_IN_FILE:
            return f"the file {refused[2]} has columns that the schema lacks ({refused[3]}): {_WITH_NEW_FILES}"
        if refused[1] == "new column" and options.on_new_columns == "fail":
            return f"the row {refused[2]} cannot be written, as {reason}: {_WITH_NEW_COLUMNS}"
        return (
            f"the row {refused[2]} cannot be written, as {reason}: give --dead-letters json:DIR (or topic:NAME) for "
            "such rows and start the job again, which writes this micro-batch again"
        )
    for pattern, sentence in _KNOWN:
        found = re.search(pattern, text)
        if found is not None:
            return sentence.format(
                **found.groupdict(),
                bootstrap=options.bootstrap,
                target=options.target,
                checkpoint=options.checkpoint,
                source=_source(options),
            )
    return _cause(text) or type(error).__name__


def _cause(text: str) -> str:
    """Return Java's innermost cause, else the Python error of a micro-batch that Java quotes, else the first line."""
    raised = _RAISED.findall(text)
    return raised[-1].strip() if raised and "Caused by: " not in text else cause_in(text)


def _source(options: IngestOptions) -> str:
    source = options.source
    if isinstance(source, FileSource):
        return source.path
    return f"{source.topics} at {source.bootstrap}" if isinstance(source, KafkaSource) else "rate"


_KNOWN: Final = (
    (
        r"(?:CSV header does not conform|Number of column in CSV header)[^\t]*CSV file: (?P<file>.*)",
        "the header of {file} does not name the columns of the schema in their order: where all files to come are like "
        "it, start the job again with a --schema that fits; else move it to where a job of its own reads, or go by "
        "position whatever headers say with --source-option enforceSchema=true (a file that is not UTF-8 wants "
        "--source-option encoding=NAME)",
    ),
    (
        r"MALFORMED_CHARACTER_CODING",
        "a file in {source} is not in the encoding that --source-option encoding names (UTF-16 with a document on each "
        "line wants its byte order and line end: encoding=UTF-16LE and lineSep=$'\\n')",
    ),
    (
        r"RecordTooLargeException|MESSAGE_TOO_LARGE|record-too-large",
        "{target} takes no message as large as one of these: lower --max-message-bytes, with --dead-letters for what "
        "is larger, or raise the topic's max.message.bytes",
    ),
    (
        r"Partition \d+ of topic \S+ with partition count \d+ is not present",
        "{target} has fewer partitions than {source}: add some, or start the job without --keep-partitions",
    ),
    (
        r"not present in metadata after|UnknownTopicOrPartitionException",
        "{target} cannot be reached through {bootstrap}: there is no such topic, or none of its owners answers",
    ),
    (
        r"TopicAuthorizationException|SaslAuthenticationException|ClusterAuthorizationException",
        "{bootstrap} does not let this job in: give what it wants with --kafka-option",
    ),
    (
        r"Expiring \d+ record|delivery timeout|TimeoutException.*(ms has passed|appending record)",
        "what was written was not acknowledged in time by {target} through {bootstrap}: start the job again when its "
        "brokers are back, nothing is lost",
    ),
    (
        r"Some data may have been lost|failOnDataLoss|OffsetOutOfRangeException|KAFKA_DATA_LOSS",
        "the source {source} no longer has what was to be read next (removed by retention, or the topic was made "
        "anew): give --source-option failOnDataLoss=false to go on without it",
    ),
    (
        r"CONCURRENT_STREAM_LOG_UPDATE|[Cc]oncurrent(ly)? (update|using)|Multiple streaming queries",
        "another run of this job uses the checkpoint {checkpoint}: end it first",
    ),
    (
        r"OutOfMemoryError|Java heap space",
        "Spark ran out of memory: make micro-batches smaller or give it more (--memory)",
    ),
)

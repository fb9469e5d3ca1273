"""The command around a job: progress and metrics while it runs, and an orderly end.

States: STARTING -> RUNNING --all read, or failed--> ENDED; RUNNING --signal--> STOPPING --micro-batch done--> ENDED.

Invariants
1. A first signal lets the micro-batch that is under way come to its end, so that nothing of it is written again; a
   second one, or one while nothing runs, ends the job at once.
2. When `run` returns or raises, the query has ended; the session is its caller's.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from kproxy.pipeline.ingest.backlog import FilesLeft, records_behind
from kproxy.pipeline.ingest.failures import why
from kproxy.pipeline.ingest.job import start
from kproxy.pipeline.ingest.options import FileSource, IngestOptions, KafkaSource
from kproxy.pipeline.ingest.progress import Display, Metrics, Tally, summary
from kproxy.pipeline.ingest.sink import BatchDone, Stopped
from kproxy.pipeline.progress import Report
from kproxy.pipeline.spark import SparkFailed, as_spark_failure

POLL_S: Final = 0.25


class Stop:
    """Whether the job is to end: `wanted` after the micro-batch under way, `at_once` without waiting for it."""

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
        """The first time after the micro-batch, the second time at once."""
        if self._wanted.is_set():
            self._at_once.set()
        self._wanted.set()


def run(session: SparkSession, options: IngestOptions, report: Report, metrics: Metrics, stop: Stop) -> None:
    """Run the job until it is done or stopped. Raises StartupError, and SparkFailed with why it failed."""
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
    """Until the query has ended; why, where it failed."""
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
    """Have Ctrl-C and SIGTERM ask for the end. On the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop.ask()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Run an ingest job: show progress, serve metrics, stop in order.

States: STARTING -> RUNNING --all read, or failed--> ENDED; RUNNING --signal--> STOPPING --micro-batch done--> ENDED.

Invariants
1. After a first signal the running micro-batch is completed, so that nothing of it is written again. A second signal,
   or one while no micro-batch runs, ends the job at once.
2. When `run` returns or raises, the query has ended; the session is the caller's.
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

"""`kproxy pipeline audit --follow`: the trail as a stream, alarms on the terminal, an end that says what it came to."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from rich.console import Console
from rich.text import Text

from kproxy.errors import StartupError
from kproxy.pipeline.audit.follow import Following, Stretch, follow
from kproxy.pipeline.audit.follow_state import FollowState
from kproxy.pipeline.audit.job import AuditJob, check
from kproxy.pipeline.audit.schemas import TRAIL_SCHEMA
from kproxy.pipeline.audit.trail import JSON, TOPIC, only_rows, rows_of
from kproxy.pipeline.ingest.run import Stop, stopped_by_signals
from kproxy.pipeline.progress import Report
from kproxy.pipeline.session import SessionOptions, open_session

PAGES_PER_BATCH: Final = 5_000
FILES_PER_BATCH: Final = 100


def run_follow_job(
    job: AuditJob,
    following: Following,
    spark: SessionOptions,
    *,
    said: Report | None = None,
    output: Console | None = None,
    stop: Stop | None = None,
) -> int:
    """Until it is interrupted; the exit status. Raises StartupError, SparkFailed."""
    if job.output is None:
        raise StartupError("--follow writes results as they come: give --output DIR.")
    if job.to_ms is not None or job.report is not None:
        raise StartupError("--follow has no end: leave --to and --report out.")
    if job.trail.kind == JSON:
        raise StartupError("--follow needs files that are whole when they appear, or a topic: give another --trail.")
    check(job)
    said, stop = said or Report(), stop or Stop()
    with said:
        stage = said.stage("Spark", "starting")
        with open_session(spark, lambda jars: stage.say(f"first start: {jars} jars downloaded")) as opened:
            session = opened.session
            stage.finish(f"version {session.version}, {session.sparkContext.master}")
            stage = said.stage("audit", "waiting for the first rows")
            lines = _Lines(said, output or Console(highlight=False))
            # Spark has set handlers of its own when it was started.
            with stopped_by_signals(stop):
                state = follow(
                    session,
                    pages_of(session, job, following),
                    job,
                    following,
                    parse=_parser(job, following),
                    stretch=_stretch(job),
                    alarm=lines.alarm,
                    told=lambda state: stage.say(_progress(state)),
                    stop=stop,
                )
            stage.finish(_progress(state))
    return 1 if state.failures or (job.strict and state.unproven) else 0


def pages_of(session: Any, job: AuditJob, following: Following) -> DataFrame:
    """What is followed, as a stream: the messages of a topic, or the rows of files."""
    if job.trail.kind != TOPIC:
        reader = session.readStream.schema(TRAIL_SCHEMA).option("pathGlobFilter", "*.parquet")
        return reader.option("maxFilesPerTrigger", FILES_PER_BATCH).parquet(job.trail.name)
    options = {
        "kafka.bootstrap.servers": job.trail_bootstrap or job.bootstrap,
        "subscribe": job.trail.name,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(PAGES_PER_BATCH),
        # What retention took is missing from the trail, and told.
        "failOnDataLoss": "false",
    }
    if (read_from_ms := following.read_from_ms(job)) is not None:
        options |= {"startingTimestamp": str(read_from_ms), "startingOffsetsByTimestampStrategy": "latest"}
    return session.readStream.format("kafka").options(**options).load()


def _stretch(job: AuditJob) -> Stretch:
    if job.trail.kind == TOPIC:
        return Stretch(PAGES_PER_BATCH, F.count(F.lit(1)))
    return Stretch(FILES_PER_BATCH, F.approx_count_distinct(F.input_file_name()))


def _parser(job: AuditJob, following: Following) -> Callable[[DataFrame], DataFrame]:
    if job.trail.kind == TOPIC:
        return rows_of
    # Of a topic no more is read; of files all is.
    is_read = F.col("at") >= (following.read_from_ms(job) or 0)
    return lambda rows: only_rows(rows.withColumn("shipped_at", F.lit(None).cast("long"))).where(is_read)


class _Lines:
    """What stays on the terminal, on stdout: alarms, each when it is found."""

    def __init__(self, said: Report, output: Console) -> None:
        # Where both are a terminal the lines go by way of the progress, which moves out of their way.
        self._console = said.progress if output.is_terminal else output

    def alarm(self, sentence: str, fails: bool) -> None:
        style, word = ("bold red", "ALARM") if fails else ("yellow", "UNPROVEN")
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} "
        self._console.print(Text.assemble(now, (word, style), f" {sentence}"), soft_wrap=True)


def _progress(state: FollowState) -> str:
    found = "nothing wrong" if not state.failures else f"{state.failures:,} alarms"
    unproven = f", {state.unproven:,} times unproven" if state.unproven else ""
    return f"{state.acked:,} records acknowledged, {found}{unproven}"

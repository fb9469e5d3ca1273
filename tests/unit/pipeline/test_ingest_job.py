"""The owner of a checkpoint, and the lag, the stop and the final report of a job."""

from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql.types import ArrayType, DataType, LongType, MapType, StringType, StructField, StructType
from rich.console import Console

from kproxy.errors import StartupError
from kproxy.pipeline.ingest import progress
from kproxy.pipeline.ingest.checkpoint import Job, settle
from kproxy.pipeline.ingest.job import Stop, why
from kproxy.pipeline.ingest.options import IngestOptions
from kproxy.pipeline.ingest.progress import Display, Metrics, Tally
from kproxy.pipeline.ingest.sink import BatchDone, lacking
from kproxy.pipeline.ingest.sources import Backlog, records_behind
from kproxy.pipeline.progress import Report, stopped_by_signals

KNOWN = Job("known", "csv files in file:/in", "topic flights", None, "cluster-1", '{"old": 1}', True)
ASKED = Job("asked", "csv files in file:/in", "topic flights", None, "cluster-1")
OPTIONS = IngestOptions("csv:/in", "/ck", topic="flights")


def test_free_checkpoint_becomes_the_jobs_own() -> None:
    assert settle(None, ASKED, "/ck") == ASKED


def test_restart_continues_job_with_inferred_schema() -> None:
    assert settle(KNOWN, ASKED, "/ck") == KNOWN


def test_later_given_schema_replaces_the_inferred_one() -> None:
    given = replace(ASKED, schema='{"new": 1}')
    assert settle(KNOWN, given, "/ck") == replace(KNOWN, schema='{"new": 1}', schema_inferred=False)


def test_cluster_without_id_is_not_compared() -> None:
    assert settle(KNOWN, replace(ASKED, target_cluster=None), "/ck") == KNOWN


@pytest.mark.parametrize(
    ("known", "asked", "said"),
    [
        (KNOWN, replace(ASKED, source="topic other"), "reads csv files in file:/in, not topic other"),
        (KNOWN, replace(ASKED, target="topic x"), "writes to topic flights, not topic x"),
        (KNOWN, replace(ASKED, target_cluster="cluster-2"), r"--bootstrap \(cluster-1, not cluster-2\)"),
        (
            replace(KNOWN, source_cluster="a"),
            replace(ASKED, source_cluster="b"),
            r"--from-bootstrap \(a, not b\)",
        ),
    ],
)
def test_checkpoint_of_another_job_is_refused(known: Job, asked: Job, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        settle(known, asked, "/ck")


@pytest.mark.parametrize(
    ("latest", "end", "expected"),
    [
        ({"a": {"0": 10, "1": 5}}, {"a": {"0": 7}}, Backlog(8, "records")),
        ({"a": {"0": 10}, "b": {"0": 2}}, {"a": {"0": 10}}, Backlog(2, "records")),
        ({"a": {"0": 10}}, {"a": {"0": 11}}, Backlog(0, "records")),
        (None, None, None),
        ({"a": {"0": 10}}, None, None),
    ],
)
def test_records_behind_are_the_offsets_between(latest: Any, end: Any, expected: Backlog | None) -> None:
    assert records_behind(json.dumps({"sources": [{"latestOffset": latest, "endOffset": end}]})) == expected
    assert records_behind(None) is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "[USER_RAISED_EXCEPTION] kproxy-refused-row|no topic|file:/in/a.csv#0:7| SQLSTATE",
            "file:/in/a.csv#0:7 cannot be",
        ),
        (
            "[USER_RAISED_EXCEPTION] kproxy-refused-row|corrupt|file:/in/a.json#0:0|[{| SQLSTATE",
            "the file of the row file:/in/a.json#0:0 has JSON over several lines: give --source-option multiLine=true",
        ),
        (
            "org.apache.spark.sql.AnalysisException: [PARQUET_TYPE_ILLEGAL] Illegal Parquet type: "
            "FIXED_LEN_BYTE_ARRAY (UUID). SQLSTATE: 42846\n\tat",
            "of a type that Spark does not read (FIXED_LEN_BYTE_ARRAY (UUID)): write the file without it; or",
        ),
        (
            "kproxy-refused-row|new column in a file|file:/in/a.parquet|deep.b, more| SQLSTATE",
            "the file file:/in/a.parquet has columns that the schema lacks (deep.b, more): give a --schema",
        ),
        ("x\nCaused by: o.a.k.c.errors.RecordTooLargeException: y", "lower --max-message-bytes"),
        (
            "Topic flights not present in metadata after 60000 ms.",
            "topic flights cannot be reached through 127.0.0.1:9092",
        ),
        (
            "CSV header does not conform to the schema.\n Header: b\n Schema: a\nCSV file: file:///in/a b.csv\n\tat",
            "the header of file:///in/a b.csv does not name the columns of the schema in their order: ",
        ),
        (
            "a.B: Number of column in CSV header is not equal to number of fields in the schema:\n Header length: 4, "
            "schema size: 3\nCSV file: file:///in/b.csv\n\tat",
            "the header of file:///in/b.csv does not name the columns of the schema in their order: ",
        ),
        ("[MALFORMED_CHARACTER_CODING] Invalid value found when performing `decode` with UTF-16", "encoding=UTF-16LE"),
        ("Expiring 3 record(s) for flights-0:120000 ms has passed", "nothing is lost"),
        (
            "[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log.",
            "another run of this job uses the checkpoint /ck",
        ),
        ("first\n\tat x\nCaused by: a.B: the very cause", "the very cause"),
        ('Reason: Traceback (most recent call last):\n  File "x"\nValueError: it broke\n\tat py4j.A\n', "it broke"),
        ("", "RuntimeError"),
    ],
)
def test_end_is_explained_in_one_sentence(error: str, said: str) -> None:
    assert said in why(RuntimeError(error), OPTIONS)
    assert "\n" not in why(RuntimeError(error), OPTIONS)


def test_summary_counts_rows_dead_letters_and_rest() -> None:
    tally = Tally(Metrics())
    assert tally.line() == "first micro-batch"
    tally.done(BatchDone(0, 10, 10, {}, 1.0))
    tally.done(BatchDone(1, 1_003, 1_000, {"corrupt": 2, "no topic": 1}, 0.5))
    tally.left(Backlog(1, "files"))
    tally.left(None)
    assert tally.line() == "micro-batch 1 · 1,010 rows · 2,000 rows/s · 1 file left · 3 dead letters"
    assert tally.summary(OPTIONS) == (
        "Wrote 1,010 rows to topic flights in 2 micro-batches.\n3 dead letters (2 corrupt, 1 no topic) went to None."
    )


def test_log_gets_a_line_for_new_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    tally, out = Tally(Metrics()), io.StringIO()
    display = Display(Report(progress=Console(file=out)), tally)
    for number in range(2):
        tally.done(BatchDone(number, 10, 10, {}, 1.0))
        display.update()
        display.update()
    assert [line.split(" · ")[0] for line in out.getvalue().splitlines()] == [
        "ingest    micro-batch 0",
        "ingest    micro-batch 1",
    ]


def test_missing_columns_are_found_nested_in_any_case() -> None:
    def struct(**fields: DataType) -> StructType:
        return StructType([StructField(name, kind) for name, kind in fields.items()])

    deep = struct(a=LongType())
    schema = struct(id=LongType(), deep=deep, many=ArrayType(deep), by=MapType(StringType(), deep))
    assert lacking(schema, struct(ID=StringType(), deep=struct(A=LongType()))) == []
    wider = struct(a=LongType(), b=LongType())
    found = struct(id=deep, deep=wider, many=ArrayType(wider), by=MapType(StringType(), wider), more=LongType())
    assert lacking(schema, found) == ["deep.b", "many.b", "by.b", "more"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_without_waiting(number: signal.Signals) -> None:
    stop, before = Stop(), signal.getsignal(number)
    with stopped_by_signals(stop.ask):
        assert (stop.wanted, stop.at_once) == (False, False)
        os.kill(os.getpid(), number)
        assert (stop.wanted, stop.at_once) == (True, False)
        os.kill(os.getpid(), number)
        assert (stop.wanted, stop.at_once) == (True, True)
    assert signal.getsignal(number) is before

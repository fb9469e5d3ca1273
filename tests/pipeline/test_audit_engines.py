"""An audit on Spark says what the audit in this process says, for the same trails and logs.

Each run draws new histories; what fails names their seeds.
"""

from __future__ import annotations

import io
import json
import secrets
import uuid
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.logs import Chunk
from kproxy.pipeline.audit.report_gather import Limits, gather
from kproxy.pipeline.audit.rules import AuditRules
from kproxy.pipeline.audit.run import SPARK, AuditJob, run_audit_job
from kproxy.pipeline.audit.run_spark import OnSpark, spark_in, write_results
from kproxy.pipeline.audit.steps import Results, audit_bags
from kproxy.pipeline.audit.table_files import write_tables
from kproxy.pipeline.audit.trail_place import TOPIC, TrailPlace
from kproxy.pipeline.progress import Report
from kproxy.pipeline.session import SessionOptions
from kproxy.trail.rows import encode_page
from tests.support.audit import cases
from tests.support.audit.forged_trail import ForgedTrail
from tests.support.audit.histories import bounds_of, make
from tests.support.audit.trails import Row, batches_in, bounds_in, judged_here, shared_names, trail_rows
from tests.support.clients.kafka_io import produce
from tests.support.processes.dev import KproxyProcess
from tests.support.rules import examples

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

FIRST_SEED = secrets.randbelow(1 << 31)
SEEDS = range(FIRST_SEED, FIRST_SEED + examples(40))
# Few bits, so that cases and histories meet the boundaries of buckets.
BITS = 5
# A whole partition, one of a deleted topic, and one of the random ones.
UNREAD: dict[TopicPartition, str] = {
    TopicPartition(topic, 0): "it has no leader"
    for topic in ("interleaved", "declared-made-anew", f"seed-{FIRST_SEED}")
}


def inputs() -> tuple[list[Row], list[Row], list[Row], AuditRules]:
    """All cases, random histories, and trails with holes."""
    rows, log, limits, rules = cases.inputs()
    for seed in SEEDS:
        trail, history = make(seed)
        trail.end(200_000)
        rows += trail.rows
        log += history.log
        limits.append(bounds_of(seed, history))
    return rows + shared_names(), log, limits, rules


@pytest.fixture(scope="module")
def here() -> Results:
    return judged_here(*inputs(), UNREAD)


@pytest.fixture(scope="module")
def engine(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnSpark]:
    with spark_in(spark, str(tmp_path_factory.mktemp("kept"))) as engine:
        yield engine


@pytest.fixture(scope="module")
def on_spark(engine: OnSpark) -> Results:
    rows, log, limits, rules = inputs()
    trail = engine.bag([trail_rows(rows[::2]), trail_rows(rows[1::2])]).over(chain.from_iterable)
    chunks = [Chunk(which, batches) for which, batches in batches_in(log).items()]
    logs = engine.bag([chunks[::2], chunks[1::2]]).over(chain.from_iterable)
    return audit_bags(trail, logs, bounds_in(limits), rules, UNREAD, bits=BITS, groups=3)


def comparable(rows: Any, *without: str) -> list[str]:
    """Rows as sorted texts, without values that depend on where ranges of offsets begin."""
    plain = [row if isinstance(row, dict) else row.asDict() for row in rows]
    times = ("window_start", "window_end")
    kept = [{name: value for name, value in row.items() if name not in (*without, *times)} for row in plain]
    for row, each in zip(plain, kept, strict=True):
        each.update({name: round(row[name].timestamp()) for name in times if name in row})
    return sorted(json.dumps(each, sort_keys=True) for each in kept)


@pytest.mark.parametrize("name", ["partitions", "owners", "throughput"])
def test_both_engines_fill_the_same_tables(here: Results, on_spark: Results, name: str) -> None:
    assert comparable(getattr(on_spark, name)) == comparable(getattr(here, name)), f"seeds {SEEDS}"


def test_both_engines_have_the_same_windows(here: Results, on_spark: Results) -> None:
    """Except for resends over a border of buckets, which count where each bucket first sees them."""
    judged = ("acked", "present", "lost", "removed", "deleted", "gone", "overlapped")
    told = comparable(on_spark.windows, *judged)
    assert told == comparable(here.windows, *judged), f"seeds {SEEDS}"
    named = {f"seed-{seed}" for seed in SEEDS}
    exact = [[row for row in rows if row["topic"] not in named] for rows in (on_spark.windows, here.windows)]
    assert comparable(exact[0], "gone", "acked", "deleted") == comparable(exact[1], "gone", "acked", "deleted")


def test_both_engines_have_the_same_findings(here: Results, on_spark: Results) -> None:
    assert comparable(on_spark.findings) == comparable(here.findings), f"seeds {SEEDS}"


def test_both_engines_give_the_same_report(here: Results, on_spark: Results) -> None:
    limits = Limits(partitions=20, drawn=8, columns=7, findings=12, holdings=2)
    facts = [gather(source, {"made": "now"}, limits) for source in (here, on_spark)]
    assert facts[0] == facts[1]


@pytest.mark.parametrize(("rows", "tasks"), [(0, None), (1_000, None), (30_000_000, 150)])
def test_tasks_follow_input_size(spark: Any, rows: int, tasks: int | None) -> None:
    engine = OnSpark(spark, "")
    engine.buckets(rows, 0)
    assert engine.tasks == (tasks or spark.sparkContext.defaultParallelism)


@pytest.mark.parametrize("on", ["here", pytest.param("spark", marks=pytest.mark.long)])
def test_written_results_are_read_by_spark(
    spark: Any, here: Results, on_spark: Results, tmp_path: Path, on: str
) -> None:
    # A second audit replaces the first.
    for _ in range(2):
        if on == "here":
            write_tables(here, str(tmp_path), {"made": "now"})
        else:
            write_results(spark, on_spark, str(tmp_path), {"made": "now"})
    assert spark.read.parquet(f"{tmp_path}/about").collect() == [("made", "now")]
    for name in here.__slots__:
        assert comparable(spark.read.parquet(f"{tmp_path}/{name}").collect()) == comparable(getattr(here, name)), name


@pytest.mark.long
def test_spark_reads_trails_and_logs_of_a_cluster(
    spark: Any, dev_cluster: KproxyProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    name, trail = f"engines-{uuid.uuid4().hex[:10]}", ForgedTrail("f" * 16)
    produce(dev_cluster.kafka, name, [b"value"] * 30)
    produce(dev_cluster.kafka, f"trail-{name}", [encode_page([trail.begin(), trail.acked(name, 0, 33)])])
    job = AuditJob(bootstrap=dev_cluster.kafka, trail=TrailPlace(TOPIC, f"trail-{name}"), engine=SPARK, json=True)
    assert run_audit_job(job, SessionOptions("audit"), display=Report(progress=Console(file=io.StringIO()))) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "Loss"
    counts = {state: document["counts"][state] for state in ("acked", "present", "lost")}
    assert counts == {"acked": 33, "present": 30, "lost": 3}
    # The proxy's trail has no end, so it may have acknowledged more.
    assert document["findings_by_kind"].keys() == {"lost", "tail"}

"""`kproxy pipeline audit --follow`: each fault is reported when it occurs, once, also over a restart."""

from __future__ import annotations

import io
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console

from kproxy.pipeline.audit.follow import BatchBound, Follower, FollowOptions, pages_of, run_follow_job
from kproxy.pipeline.audit.logs import bounds_now, existing
from kproxy.pipeline.audit.run import AuditJob
from kproxy.pipeline.audit.trail import rows_of
from kproxy.pipeline.audit.trail_place import parse_trail
from kproxy.pipeline.ingest.job import Stop
from kproxy.pipeline.progress import Report
from kproxy.pipeline.session import SessionOptions
from kproxy.trail.rows import Row, encode_page
from tests.support.audit.forged_trail import ForgedTrail, now_ms
from tests.support.clients.kafka_io import produce
from tests.support.processes.dev import KproxyProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

TIMEOUT_S = 400.0


class Followed:
    """A trail in a topic of its own, over a topic of its own."""

    def __init__(self, bootstrap: str, directory: Path) -> None:
        name = uuid.uuid4().hex[:10]
        self.bootstrap = bootstrap
        self.topic, self.trail = f"followed-{name}", f"trail-{name}"
        self.directory = directory
        self.job = AuditJob(
            bootstrap=bootstrap, trail=parse_trail(f"topic:{self.trail}"), output=str(directory / "tables")
        )

    def ship(self, *rows: Row) -> None:
        produce(self.bootstrap, self.trail, [encode_page(rows)])

    def ship_at(self, timestamp_ms: int, *rows: Row) -> None:
        """A page that bears the time of another clock, as brokers write it with LogAppendTime."""
        producer = confluent_kafka.Producer({"bootstrap.servers": self.bootstrap})
        producer.produce(self.trail, encode_page(rows), partition=0, timestamp=timestamp_ms)
        assert producer.flush(TIMEOUT_S) == 0

    def topic_id(self) -> str | None:
        (bounds,) = bounds_now(self.bootstrap, [self.topic]).values()
        return bounds.topic_id

    def make_anew(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.delete_topics([self.topic])[self.topic].result(TIMEOUT_S)
        while existing(self.bootstrap, [self.topic]):
            time.sleep(0.1)
        admin.create_topics([NewTopic(self.topic, 1, 1)])[self.topic].result(TIMEOUT_S)


class Run:
    """The command, on a thread beside the test."""

    def __init__(self, followed: Followed) -> None:
        self._stop = Stop()
        self._said = io.StringIO()
        self._status: int | None = None
        self._followed = followed
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def said(self) -> str:
        return self._said.getvalue()

    def _run(self) -> None:
        # A terminal, so that what it says at once is said there.
        console = Console(file=self._said, width=300)
        report = Report(progress=console)
        following = FollowOptions(checkpoint=str(self._followed.directory / "checkpoint"), every_ms=200)
        self._status = run_follow_job(
            self._followed.job, following, SessionOptions("following"), display=report, stop=self._stop, output=console
        )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self._thread.is_alive(), self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.1)

    def end(self) -> int | None:
        self._stop.ask()
        self._thread.join(TIMEOUT_S)
        return self._status


@contextmanager
def following(followed: Followed) -> Iterator[Run]:
    run = Run(followed)
    try:
        yield run
    finally:
        run.end()


@pytest.mark.long
def test_followed_findings_are_reported_once_across_restarts(
    dev_cluster: KproxyProcess, tmp_path: Path, spark: Any
) -> None:
    followed = Followed(dev_cluster.kafka, tmp_path)
    states = tmp_path / "checkpoint"

    def done(batch: int) -> bool:
        return (states / f"state-{batch}.json").exists()

    produce(followed.bootstrap, followed.topic, [b"value"] * 100)
    trail = ForgedTrail("a" * 16, began_ms=now_ms())
    followed.ship(trail.begin(), trail.acked(followed.topic, 0, 60), trail.acked(followed.topic, 60, 40))
    with following(followed) as run:
        run.wait_for(lambda: done(0))
        assert "ALARM" not in run.said
        # A split brain: broker 1 gave these offsets out in the micro-batch before.
        followed.ship(trail.acked(followed.topic, 60, 10, owner=2, revision=9))
        run.wait_for(lambda: "ALARM" in run.said)
        assert run.end() == 1
    assert f"ALARM overlap: {followed.topic}/0 offsets 60 to 69" in run.said

    # It goes on where it was: what was told is not told again, and still the exit status tells of it.
    with following(followed) as again:
        trail.skip()
        followed.ship(trail.acked(followed.topic, 100, 5), trail.mark())
        again.wait_for(lambda: "ALARM lost" in again.said)
        assert again.end() == 1
    assert "ALARM overlap" not in again.said
    assert f"ALARM lost: {followed.topic}/0 offsets 100 to 104" in again.said
    kinds = {row.kind for row in spark.read.parquet(str(tmp_path / "tables" / "findings")).collect()}
    assert {"overlap", "lost", "gap"} <= kinds


class Fed:
    """A follower that is given its micro-batches by hand, at the times that the test says."""

    def __init__(self, spark: Any, followed: Followed, most: int = 100) -> None:
        from pyspark.sql import functions

        self.said: list[str] = []
        self.now_ms = now_ms()
        self._spark = spark
        self.follower = Follower(
            spark,
            followed.job,
            FollowOptions(checkpoint=str(followed.directory / "checkpoint")),
            rows_of,
            BatchBound(most, functions.count(functions.lit(1))),
            alarm=lambda sentence, fails: self.said.append(sentence),
            on_state=lambda state: None,
            wall_ms=lambda: self.now_ms,
        )

    def feed(self, *rows: Row) -> list[str]:
        """A micro-batch of one page; what was said of it."""
        message = "struct<value: binary, timestamp: timestamp>"
        pages = self._spark.createDataFrame([(bytearray(encode_page(rows)), None)], message)
        self.follower.judge(pages, self.follower.state.batch + 1)
        return self._heard()

    def judge_again(self) -> list[str]:
        self.follower.judge_again()
        return self._heard()

    def _heard(self) -> list[str]:
        said, self.said[:] = list(self.said), []
        return said


@pytest.mark.long
def test_silent_trail_is_reported_without_new_input(dev_cluster: KproxyProcess, tmp_path: Path, spark: Any) -> None:
    """The proxy's name has blanks in it, and its topic has been deleted."""
    followed = Followed(dev_cluster.kafka, tmp_path)
    fed = Fed(spark, followed)
    trail = ForgedTrail("b" * 16, proxy="no address:9092", began_ms=fed.now_ms)
    (lost,) = fed.feed(trail.begin(), trail.acked("gone", 0, 5))
    assert "gone/0" in lost
    assert "there is no log of this partition" in lost
    # The command is started again meanwhile.
    again = Fed(spark, followed)
    assert again.follower.state == fed.follower.state
    again.now_ms += 60_000
    (killed,) = again.judge_again()
    assert "The trail of no address:9092 has no end" in killed
    # It was cut off from its sink for longer than anything is kept: what is forgotten is not missing.
    again.now_ms += 3_600_000
    other = ForgedTrail("c" * 16, proxy="other:9092", began_ms=again.now_ms - 5_000)
    assert again.feed(other.begin(), other.mark()) == []
    assert len(again.follower.state.kept) == 1
    trail.began_ms = again.now_ms - 10_000
    assert again.feed(trail.mark()) == []


@pytest.mark.long
def test_excess_losses_are_counted_and_later_ones_reported(
    dev_cluster: KproxyProcess, tmp_path: Path, spark: Any
) -> None:
    followed = Followed(dev_cluster.kafka, tmp_path)
    produce(followed.bootstrap, followed.topic, [b"value"] * 10)
    fed = Fed(spark, followed)
    trail = ForgedTrail("e" * 16, began_ms=fed.now_ms - 151_000)
    said = fed.feed(trail.begin(), *(trail.acked(followed.topic, 1_000 + 2 * n, 1) for n in range(150)))
    assert len(said) == 101
    assert said[-1].startswith("lost: 50 more, too many to tell one by one")
    (next_one,) = fed.feed(trail.acked(followed.topic, 5_000, 500_000))
    assert "offsets 5000 to 504999" in next_one
    assert fed.follower.state.failures == 151
    # The report's numbers are of all, however few are listed.
    rows = spark.read.parquet(str(tmp_path / "tables" / "findings")).collect()
    assert {row["of_kind"] for row in rows} == {150, 151}


@pytest.mark.long
def test_unread_pages_do_not_count_as_silence(dev_cluster: KproxyProcess, tmp_path: Path, spark: Any) -> None:
    fed = Fed(spark, Followed(dev_cluster.kafka, tmp_path), most=1)
    trail = ForgedTrail("d" * 16, began_ms=fed.now_ms - 3_600_000)
    assert fed.feed(trail.begin(), trail.mark()) == []


@pytest.mark.long
def test_recreated_topic_is_compared_with_its_own_log(dev_cluster: KproxyProcess, tmp_path: Path, spark: Any) -> None:
    """What was read of the one before must not stand in for what is lost of this one."""
    followed = Followed(dev_cluster.kafka, tmp_path)
    produce(followed.bootstrap, followed.topic, [b"value"] * 100)
    fed = Fed(spark, followed)
    trail = ForgedTrail("f" * 16, began_ms=fed.now_ms - 10_000)
    assert fed.feed(trail.begin(), trail.acked(followed.topic, 0, 100, topic_id=followed.topic_id())) == []
    followed.make_anew()
    produce(followed.bootstrap, followed.topic, [b"value"] * 10)
    said = fed.feed(trail.acked(followed.topic, 0, 15, topic_id=followed.topic_id()))
    assert sorted(sentence.split(":")[0] for sentence in said) == ["gone", "lost"]
    assert any(sentence.startswith(f"lost: {followed.topic}/0 offsets 10 to 14") for sentence in said)


EDGE_MS, HORIZON_MS = 60_000, 600_000


@pytest.fixture
def since(dev_cluster: KproxyProcess, tmp_path: Path) -> Followed:
    """Followed from a minute ago on, of one topic."""
    followed = Followed(dev_cluster.kafka, tmp_path)
    followed.job = replace(followed.job, from_ms=now_ms() - EDGE_MS, topics=(followed.topic,))
    return followed


def test_audit_from_time_reads_pages_of_slow_clock(since: Followed, spark: Any) -> None:
    """With LogAppendTime brokers date pages, and theirs may be dated before what they tell of was acknowledged."""
    assert since.job.from_ms is not None
    trail = ForgedTrail("a" * 16, began_ms=since.job.from_ms + 5_000)
    since.ship_at(since.job.from_ms - HORIZON_MS - 1_000, ForgedTrail("b" * 16).begin())
    since.ship_at(since.job.from_ms - 30_000, trail.begin(), trail.acked(since.topic, 0, 5))
    pages = pages_of(spark, since.job, FollowOptions(checkpoint="", horizon_ms=HORIZON_MS))
    name = f"pages_{uuid.uuid4().hex}"
    query = rows_of(pages).writeStream.format("memory").queryName(name).trigger(availableNow=True).start()
    assert query.awaitTermination(TIMEOUT_S)
    assert {row.incarnation for row in spark.table(name).collect()} == {"a" * 16}


@pytest.mark.long
def test_audit_from_time_judges_missing_and_late_rows(since: Followed, spark: Any) -> None:
    produce(since.bootstrap, since.topic, [b"value"] * 10)
    assert since.job.from_ms is not None
    edge_ms = since.job.from_ms
    fed = Fed(spark, since)
    fed.now_ms = edge_ms + EDGE_MS
    # It was there long before what is read, and has a row soon after that begins.
    lives = ForgedTrail("a" * 16, "lives:9092", edge_ms - HORIZON_MS + 2_000 - 700_000, sequence=700)
    first = lives.mark()
    lives.began_ms = edge_ms - 702_000
    before = lives.acked(since.topic, 1_000, 5)
    lives.began_ms = edge_ms + 20_000 - 702_000
    rows = [first, before, lives.acked(since.topic, 0, 10), lives.acked("others", 0, 7)]
    lives.began_ms += 20_000
    # Of this one the first that is heard was closed behind the edge: rows before it are missing, and one is late.
    torn = ForgedTrail("b" * 16, "torn:9092", edge_ms + 25_000, sequence=4)
    late = torn.acked(since.topic, 10, 5)
    (missing,) = fed.feed(*rows, lives.mark(), torn.mark())
    assert "missing from the trail of torn:9092" in missing
    (lost,) = [sentence for sentence in fed.feed(late) if "missing" not in sentence]
    assert "offsets 10 to 14" in lost
    assert fed.follower.state.acked == 15

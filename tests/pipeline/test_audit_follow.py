"""`kproxy pipeline audit --follow`: what is wrong is told as it comes, once, also over a restart."""

from __future__ import annotations

import io
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kproxy.observe.audit.rows import Row, encode_page
from kproxy.pipeline.audit.follow import Follower, Following, Stretch
from kproxy.pipeline.audit.follow_job import run_follow_job
from kproxy.pipeline.audit.job import AuditJob
from kproxy.pipeline.audit.places import parse_trail
from kproxy.pipeline.audit.trail import rows_of
from kproxy.pipeline.ingest.run import Stop
from kproxy.pipeline.report import Report
from kproxy.pipeline.session import SessionOptions
from tests.support.dev import KproxyProcess
from tests.support.forged_trail import ForgedTrail, now_ms
from tests.support.kafka_io import produce

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
        following = Following(checkpoint=str(self._followed.directory / "checkpoint"), every_ms=200)
        self._status = run_follow_job(
            self._followed.job, following, SessionOptions("following"), said=report, stop=self._stop, output=console
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


def test_what_is_wrong_is_told_as_it_comes_and_once_also_over_a_restart(
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
            Following(checkpoint=str(followed.directory / "checkpoint")),
            rows_of,
            Stretch(most, functions.count(functions.lit(1))),
            alarm=lambda sentence, fails: self.said.append(sentence),
            told=lambda state: None,
            wall_ms=lambda: self.now_ms,
        )

    def feed(self, *rows: Row) -> list[str]:
        """A micro-batch of one page; what was said of it."""
        message = "struct<value: binary, timestamp: timestamp>"
        pages = self._spark.createDataFrame([(bytearray(encode_page(rows)), None)], message)
        self.follower.judge(pages, self.follower.state.batch + 1)
        return self._heard()

    def look_again(self) -> list[str]:
        self.follower.look_again()
        return self._heard()

    def _heard(self) -> list[str]:
        said, self.said[:] = list(self.said), []
        return said


def test_who_falls_silent_is_told_of_though_nothing_comes_any_more(
    dev_cluster: KproxyProcess, tmp_path: Path, spark: Any
) -> None:
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
    (killed,) = again.look_again()
    assert "The trail of no address:9092 has no end" in killed
    # It was cut off from its sink for longer than anything is kept: what is forgotten is not missing.
    again.now_ms += 3_600_000
    other = ForgedTrail("c" * 16, proxy="other:9092", began_ms=again.now_ms - 5_000)
    assert again.feed(other.begin(), other.mark()) == []
    assert len(again.follower.state.kept) == 1
    trail.began_ms = again.now_ms - 10_000
    assert again.feed(trail.mark()) == []


def test_what_is_not_read_yet_is_no_silence(dev_cluster: KproxyProcess, tmp_path: Path, spark: Any) -> None:
    fed = Fed(spark, Followed(dev_cluster.kafka, tmp_path), most=1)
    trail = ForgedTrail("d" * 16, began_ms=fed.now_ms - 3_600_000)
    assert fed.feed(trail.begin(), trail.mark()) == []

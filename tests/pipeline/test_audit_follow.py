"""`kproxy pipeline audit --follow`: each fault is reported when it occurs, once, also over a restart."""

from __future__ import annotations

import io
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console

from kproxy.errors import StartupError
from kproxy.pipeline.audit.follow import Follower, FollowOptions, run_follow_job
from kproxy.pipeline.audit.log_client import LogClient, LogReadFailed
from kproxy.pipeline.audit.logs import bounds_now, existing
from kproxy.pipeline.audit.run import AuditJob
from kproxy.pipeline.audit.trail_place import parse_trail
from kproxy.pipeline.progress import Report
from kproxy.trail.rows import Row, encode_page
from tests.support.audit.forged_trail import ForgedTrail, now_ms
from tests.support.clients.kafka_io import produce
from tests.support.processes.dev import KproxyProcess

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S = 400.0
EDGE_MS, HORIZON_MS = 60_000, 600_000


class Followed:
    """A trail in its own topic, about another topic."""

    def __init__(self, bootstrap: str, directory: Path) -> None:
        name = uuid.uuid4().hex[:10]
        self.bootstrap = bootstrap
        self.topic, self.trail = f"followed-{name}", f"trail-{name}"
        self.state = directory / "state.json"
        self.job = AuditJob(bootstrap=bootstrap, trail=parse_trail(f"topic:{self.trail}"))

    def ship(self, *rows: Row) -> None:
        produce(self.bootstrap, self.trail, [encode_page(rows)])

    def ship_at(self, timestamp_ms: int, *rows: Row) -> None:
        """Write a page with the time of another clock, as brokers do with LogAppendTime."""
        producer = confluent_kafka.Producer({"bootstrap.servers": self.bootstrap})
        producer.produce(self.trail, encode_page(rows), partition=0, timestamp=timestamp_ms)
        assert producer.flush(TIMEOUT_S) == 0

    def topic_id(self) -> str | None:
        with LogClient(self.bootstrap) as client:
            (bounds,) = bounds_now(client, [self.topic]).values()
        return bounds.topic_id

    def make_anew(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.delete_topics([self.topic])[self.topic].result(TIMEOUT_S)
        with LogClient(self.bootstrap) as client:
            while existing(client, [self.topic]):
                time.sleep(0.1)
        admin.create_topics([NewTopic(self.topic, 1, 1)])[self.topic].result(TIMEOUT_S)


class Run:
    """The command, on a thread beside the test."""

    def __init__(self, followed: Followed) -> None:
        self._stop = threading.Event()
        self._said = io.StringIO()
        self._status: int | None = None
        self._followed = followed
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def said(self) -> str:
        return self._said.getvalue()

    def _run(self) -> None:
        # On a terminal the job prints every finding at once.
        console = Console(file=self._said, width=300)
        options = FollowOptions(self._followed.state, every_ms=200)
        self._status = run_follow_job(
            self._followed.job, options, display=Report(progress=console), stop=self._stop, output=console
        )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self._thread.is_alive(), self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.1)

    def end(self) -> int | None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)
        return self._status


@contextmanager
def following(followed: Followed) -> Iterator[Run]:
    run = Run(followed)
    try:
        yield run
    finally:
        run.end()


def test_followed_findings_are_reported_once_across_restarts(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    followed = Followed(dev_cluster.kafka, tmp_path)
    produce(followed.bootstrap, followed.topic, [b"value"] * 100)
    trail = ForgedTrail("a" * 16, began_ms=now_ms())
    followed.ship(trail.begin(), trail.acked(followed.topic, 0, 60), trail.acked(followed.topic, 60, 40))
    with following(followed) as run:
        run.wait_for(followed.state.exists)
        assert "ALARM" not in run.said
        # A split brain: broker 1 assigned these offsets in an earlier round.
        followed.ship(trail.acked(followed.topic, 60, 10, owner=2, revision=9))
        run.wait_for(lambda: "ALARM" in run.said)
        assert run.end() == 1
    assert f"ALARM overlap: {followed.topic}/0 offsets 60 to 69" in run.said

    # The job continues where it was: it reports nothing again, but the exit status still tells of the finding.
    with following(followed) as again:
        trail.skip()
        followed.ship(trail.acked(followed.topic, 100, 5), trail.mark())
        again.wait_for(lambda: "ALARM lost" in again.said)
        again.wait_for(lambda: "UNPROVEN" in again.said)
        assert again.end() == 1
    assert "ALARM overlap" not in again.said
    assert f"ALARM lost: {followed.topic}/0 offsets 100 to 104" in again.said


class Fed:
    """A follower whose rounds the test calls, at times that it sets."""

    def __init__(self, followed: Followed) -> None:
        self.said: list[str] = []
        self.now_ms = now_ms()
        self._followed = followed
        self.follower = Follower(
            followed.job,
            FollowOptions(followed.state),
            alarm=lambda sentence, fails: self.said.append(sentence),
            wall_ms=lambda: self.now_ms,
        )

    def feed(self, *rows: Row) -> list[str]:
        """Ship the rows, if there are any; return the next round's output."""
        if rows:
            self._followed.ship(*rows)
        self.follower.round()
        said, self.said[:] = list(self.said), []
        return said


def test_unsigned_rows_are_left_out_and_reported(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    followed = Followed(dev_cluster.kafka, tmp_path)
    followed.job = replace(followed.job, trail=followed.job.trail._replace(keys=(b"k" * 16,)))
    fed, trail = Fed(followed), ForgedTrail("a" * 16, began_ms=now_ms())
    assert fed.feed(trail.begin(), trail.acked(followed.topic, 0, 1)) == [
        "Trail rows left out, not signed with the key: 2."
    ]
    assert fed.follower.acked == 0
    assert fed.feed() == []


def test_silent_trail_is_reported_without_new_input(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    """The proxy's name contains blanks, and its topic has been deleted."""
    followed = Followed(dev_cluster.kafka, tmp_path)
    fed = Fed(followed)
    trail = ForgedTrail("b" * 16, proxy="no address:9092", began_ms=fed.now_ms)
    (lost,) = fed.feed(trail.begin(), trail.acked("gone", 0, 5))
    assert "gone/0" in lost
    assert "there is no log of this partition" in lost
    # The command is started again meanwhile.
    again = Fed(followed)
    assert again.feed() == []
    again.now_ms += 60_000
    (killed,) = again.feed()
    assert "The trail of no address:9092 has no end" in killed
    # The proxy had no sink for longer than the horizon: its forgotten rows do not count as missing.
    again.now_ms += 3_600_000
    other = ForgedTrail("c" * 16, proxy="other:9092", began_ms=again.now_ms - 5_000)
    assert again.feed(other.begin(), other.mark()) == []
    trail.began_ms = again.now_ms - 10_000
    assert again.feed(trail.mark()) == []
    # A later start continues beyond the horizon, and knows the trails too.
    later = Fed(followed)
    later.now_ms = again.now_ms
    trail.began_ms += 1_000
    assert later.feed(trail.mark()) == []
    assert later.follower.state.failures == 1


def test_excess_losses_are_counted_and_later_ones_reported(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    followed = Followed(dev_cluster.kafka, tmp_path)
    produce(followed.bootstrap, followed.topic, [b"value"] * 10)
    fed = Fed(followed)
    trail = ForgedTrail("e" * 16, began_ms=fed.now_ms - 151_000)
    said = fed.feed(trail.begin(), *(trail.acked(followed.topic, 1_000 + 2 * n, 1) for n in range(1_150)))
    assert len(said) == 101
    assert said[-1].startswith("lost: 1,050 more, too many to tell one by one")
    (next_one,) = fed.feed(trail.acked(followed.topic, 5_000, 500_000))
    assert "offsets 5000 to 504999" in next_one
    assert fed.follower.state.failures == 1_151


def test_offset_assigned_again_is_found_within_horizon(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    followed = Followed(dev_cluster.kafka, tmp_path)
    produce(followed.bootstrap, followed.topic, [b"value"] * 100)
    fed = Fed(followed)
    trail = ForgedTrail("7" * 16, began_ms=fed.now_ms)
    assert fed.feed(trail.begin(), trail.acked(followed.topic, 0, 10)) == []

    def wait(ms: int) -> None:
        trail.began_ms += ms
        fed.now_ms += ms

    wait(HORIZON_MS - 5_000)
    assert fed.feed(trail.acked(followed.topic, 10, 10)) == []
    (overlap,) = fed.feed(trail.acked(followed.topic, 5, 5, owner=2, revision=9))
    assert "offsets 5 to 9" in overlap
    # The first rows are older than the horizon, so they are forgotten.
    wait(HORIZON_MS + 5_000)
    assert fed.feed(trail.acked(followed.topic, 20, 10)) == []
    assert fed.feed(trail.acked(followed.topic, 0, 5, owner=3, revision=11)) == []


def test_recreated_topic_is_compared_with_its_own_log(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    """Batches of the earlier topic must not stand in for lost ones of this topic."""
    followed = Followed(dev_cluster.kafka, tmp_path)
    produce(followed.bootstrap, followed.topic, [b"value"] * 100)
    fed = Fed(followed)
    trail = ForgedTrail("f" * 16, began_ms=fed.now_ms - 10_000)
    assert fed.feed(trail.begin(), trail.acked(followed.topic, 0, 100, topic_id=followed.topic_id())) == []
    followed.make_anew()
    produce(followed.bootstrap, followed.topic, [b"value"] * 10)
    said = fed.feed(trail.acked(followed.topic, 0, 15, topic_id=followed.topic_id()))
    assert sorted(sentence.split(":")[0] for sentence in said) == ["gone", "lost"]
    assert any(sentence.startswith(f"lost: {followed.topic}/0 offsets 10 to 14") for sentence in said)


@pytest.fixture
def since(dev_cluster: KproxyProcess, tmp_path: Path) -> Followed:
    """A follower of one topic, from a minute ago on."""
    followed = Followed(dev_cluster.kafka, tmp_path)
    followed.job = replace(followed.job, from_ms=now_ms() - EDGE_MS, topics=(followed.topic,))
    return followed


def test_audit_from_time_reads_pages_of_slow_clock(since: Followed) -> None:
    """With LogAppendTime brokers date pages, perhaps earlier than the acknowledgements in them."""
    assert since.job.from_ms is not None
    trail = ForgedTrail("a" * 16, began_ms=since.job.from_ms + 5_000)
    since.ship_at(since.job.from_ms - HORIZON_MS - 1_000, ForgedTrail("b" * 16).begin())
    since.ship_at(since.job.from_ms - 30_000, trail.begin(), trail.acked(since.topic, 0, 5))
    fed = Fed(since)
    fed.now_ms = since.job.from_ms + 10_000
    said = fed.feed()
    assert [sentence.split(":")[0] for sentence in said] == ["lost"]


def test_audit_from_time_judges_missing_and_late_rows(since: Followed) -> None:
    produce(since.bootstrap, since.topic, [b"value"] * 10)
    assert since.job.from_ms is not None
    edge_ms = since.job.from_ms
    fed = Fed(since)
    fed.now_ms = edge_ms + EDGE_MS
    # This proxy began long before the rows that are read, and its first row there follows soon.
    lives = ForgedTrail("a" * 16, "lives:9092", edge_ms - HORIZON_MS + 2_000 - 700_000, sequence=700)
    first = lives.mark()
    lives.began_ms = edge_ms - 702_000
    before = lives.acked(since.topic, 1_000, 5)
    lives.began_ms = edge_ms + 20_000 - 702_000
    rows = [first, before, lives.acked(since.topic, 0, 10), lives.acked("others", 0, 7)]
    lives.began_ms += 20_000
    # The first row of this proxy that is read closed after the edge: rows before it are missing, and one is late.
    torn = ForgedTrail("b" * 16, "torn:9092", edge_ms + 25_000, sequence=4)
    late = torn.acked(since.topic, 10, 5)
    (missing,) = fed.feed(*rows, lives.mark(), torn.mark())
    assert "missing from the trail of torn:9092" in missing
    (lost,) = [sentence for sentence in fed.feed(late) if "missing" not in sentence]
    assert "offsets 10 to 14" in lost
    assert fed.follower.acked == 15


def test_unreadable_partition_is_judged_later(
    dev_cluster: KproxyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(dev_cluster.kafka, tmp_path)
    produce(followed.bootstrap, followed.topic, [b"value"] * 10)
    fed = Fed(followed)
    trail = ForgedTrail("9" * 16, began_ms=fed.now_ms)
    fetch = LogClient.fetch

    def refused(*_: object) -> object:
        raise LogReadFailed("refused")

    monkeypatch.setattr(
        LogClient,
        "fetch",
        lambda self, which, *more: fetch(self, which, *more) if which.topic == followed.trail else refused(),
    )
    (unread,) = fed.feed(trail.begin(), trail.acked(followed.topic, 0, 13))
    assert unread.startswith(f"unread: {followed.topic}/0: The log of")
    assert fed.feed() == []
    monkeypatch.setattr(LogClient, "fetch", fetch)
    (lost,) = fed.feed()
    assert "offsets 10 to 12" in lost
    assert fed.feed(trail.mark()) == []


def test_unusable_state_file_is_named(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    followed = Followed(dev_cluster.kafka, tmp_path)
    followed.state.write_text("{")
    with pytest.raises(StartupError, match=r"--state .*state\.json cannot be read"):
        Fed(followed)
    followed.state.write_text(json.dumps({"begin": {"offsets": "many"}}))
    with pytest.raises(StartupError, match=r"--state .*state\.json cannot be read"):
        Fed(followed)

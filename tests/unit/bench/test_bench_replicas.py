"""The lag of followers is measured by their log files, and never reported too small."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.replicas import QUIET_S, Lags, LagWatch, Replicas, wait_settled
from tests.support.waiting import wait_for


def append(directory: Path, count: int) -> None:
    with (directory / f"{0:020d}.log").open("ab") as file:
        file.write(bytes(count))


@pytest.fixture
def partition(tmp_path: Path) -> Replicas:
    replicas = Replicas(tmp_path / "1", (tmp_path / "2", tmp_path / "3"))
    for directory in (replicas.leader, *replicas.followers):
        directory.mkdir()
        append(directory, 10)
    return replicas


def test_lag_is_counted_per_follower_and_growth() -> None:
    lags = Lags(leader_bytes=10, followers=2)
    lags.leader_has(10, now=1.0)
    assert not lags.is_behind(0)
    assert not lags.is_behind(1)
    lags.leader_has(110, now=2.0)
    lags.leader_has(210, now=5.0)
    assert list(lags.follower_has(0, 109, now=6.0)) == []
    assert list(lags.follower_has(0, 210, now=7.0)) == [5.0, 2.0]
    assert list(lags.follower_has(1, 209, now=8.0)) == [6.0]
    assert not lags.is_behind(0)
    assert lags.is_behind(1), "it lacks a byte of the second growth"


def test_the_lags_of_files_are_watched(partition: Replicas) -> None:
    """The thread of a busy machine sees a growth late: nothing but order is asked of it here."""
    with LagWatch([partition]) as watch:
        wait_for(lambda: watch.polls > 0, what="the first poll")
        append(partition.leader, 100)
        wait_for(another_poll(watch), what="the growth")
        assert watch.lags == []
        append(partition.followers[0], 100)
        append(partition.followers[1], 99)
        wait_for(lambda: len(watch.lags) == 1, what="the lag")
        wait_for(another_poll(watch), what="another poll")
    assert len(watch.lags) == 1
    assert 0 < watch.lags[0] < watch.seconds


def another_poll(watch: LagWatch) -> Callable[[], bool]:
    """Whether a poll has begun and ended since this call."""
    before = watch.polls
    return lambda: watch.polls >= before + 2


def test_followers_settle_with_every_byte_of_their_leader(partition: Replicas) -> None:
    append(partition.leader, 100)
    started = time.monotonic()

    def follow() -> None:
        time.sleep(2 * QUIET_S)
        for directory in partition.followers:
            append(directory, 100)

    thread = threading.Thread(target=follow)
    thread.start()
    settled = wait_settled([partition])
    thread.join()
    assert settled.followers >= started + 2 * QUIET_S
    assert settled.leaders <= settled.followers

"""How far followers are behind is told by their log files, and not better than it is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from bench.replicas import QUIET_S, LagWatch, Replicas, wait_settled

BEHIND_S = 0.15


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


def test_a_lag_is_counted_for_each_follower_and_each_growth(partition: Replicas) -> None:
    with LagWatch([partition]) as watch:
        time.sleep(0.05)
        for _ in range(2):
            append(partition.leader, 100)
            time.sleep(BEHIND_S)
        append(partition.followers[0], 200)
        append(partition.followers[1], 199)
        time.sleep(0.1)
    # The slower one still lacks a byte of the second growth, and that it does is not taken for a lag that ended.
    assert len(watch.lags) == 3
    # A thread that a busy machine holds up sees a growth late.
    assert min(watch.lags) >= BEHIND_S / 3
    assert max(watch.lags) >= BEHIND_S


def test_followers_have_settled_when_they_have_every_byte_of_their_leader(partition: Replicas) -> None:
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

"""The lag of followers is never reported too small."""

from __future__ import annotations

from bench.replicas import Lags


def test_lag_is_counted_by_follower_and_growth() -> None:
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

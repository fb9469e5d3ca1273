"""The state that a following audit keeps of trails, whatever their names and however many there are."""

from __future__ import annotations

import pytest

from kproxy.pipeline.audit.follow_state import TRAILS_AT_MOST, FollowState, trail_key, trail_of


@pytest.mark.parametrize("proxy", ["proxy:9092", "proxy:9092/2", "", "two words", 'a "b", c', "zwölf:9092"])
def test_trail_key_survives_any_proxy_name(proxy: str) -> None:
    assert trail_of(trail_key(proxy, "a b")) == (proxy, "a b")


def test_forgotten_part_of_a_trail_never_shrinks() -> None:
    state = FollowState()
    for count in (5, 9, 7):
        state.forget("a", count)
    assert state.forgotten == {"a": 9}


def test_least_recent_trails_are_dropped_first() -> None:
    state = FollowState()
    for number in range(TRAILS_AT_MOST):
        state.forget(f"{number}", 1)
    state.forget("0", 2)
    state.forget("more", 1)
    assert len(state.forgotten) == TRAILS_AT_MOST
    assert "1" not in state.forgotten
    assert state.forgotten["0"] == 2

"""The state that a following audit keeps of trails, whatever their names and however many there are."""

from __future__ import annotations

import pytest

from kproxy.pipeline.audit.follow_state import TRAILS_AT_MOST, FollowState, trail_key, trail_of


@pytest.mark.parametrize("proxy", ["proxy:9092", "proxy:9092/2", "", "two words", 'a "b", c', "zwölf:9092"])
def test_a_trail_is_known_by_one_text_whatever_its_proxy_is_called(proxy: str) -> None:
    assert trail_of(trail_key(proxy, "a b")) == (proxy, "a b")


def test_what_was_forgotten_of_a_trail_never_becomes_less() -> None:
    state = FollowState()
    for count in (5, 9, 7):
        state.forget("a", count)
    assert state.forgotten == {"a": 9}


def test_of_too_many_trails_those_go_first_that_were_heard_of_longest_ago() -> None:
    state = FollowState()
    for number in range(TRAILS_AT_MOST):
        state.forget(f"{number}", 1)
    state.forget("0", 2)
    state.forget("more", 1)
    assert len(state.forgotten) == TRAILS_AT_MOST
    assert "1" not in state.forgotten
    assert state.forgotten["0"] == 2

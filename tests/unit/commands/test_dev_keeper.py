"""The delay before a part of `kproxy dev` that ended is started again."""

from __future__ import annotations

from kproxy.dev.keeper import MAX_ATTEMPTS, MAX_PAUSE_S, STEADY_S, BackOff


def test_each_pause_is_twice_as_long_up_to_a_bound_and_the_attempts_end() -> None:
    back_off = BackOff()
    pauses = [back_off.pause_s(ran_s=0.0) for _ in range(MAX_ATTEMPTS + 1)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_PAUSE_S, MAX_PAUSE_S, None]


def test_what_ran_for_long_begins_anew() -> None:
    back_off = BackOff()
    for _ in range(4):
        back_off.pause_s(ran_s=STEADY_S / 2)
    assert back_off.pause_s(ran_s=STEADY_S) == 1.0
    assert back_off.pause_s(ran_s=0.0) == 2.0


def test_a_lease_is_waited_for_however_long() -> None:
    back_off = BackOff()
    assert back_off.pause_s(ran_s=STEADY_S, least_s=12.0) == 12.0
    assert back_off.pause_s(ran_s=0.0) == 24.0
    assert back_off.pause_s(ran_s=STEADY_S, least_s=600.0) == 600.0

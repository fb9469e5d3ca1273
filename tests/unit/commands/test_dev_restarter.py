"""The delay before a part of `kproxy dev` that ended is started again."""

from __future__ import annotations

from kproxy.dev.restarter import MAX_ATTEMPTS, MAX_PAUSE_S, STEADY_S, BackOff


def test_pauses_double_to_a_bound_and_attempts_end() -> None:
    back_off = BackOff()
    pauses = [back_off.pause_s(ran_s=0.0) for _ in range(MAX_ATTEMPTS + 1)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_PAUSE_S, MAX_PAUSE_S, None]


def test_long_run_resets_the_attempts() -> None:
    back_off = BackOff()
    for _ in range(4):
        back_off.pause_s(ran_s=STEADY_S / 2)
    assert back_off.pause_s(ran_s=STEADY_S) == 1.0
    assert back_off.pause_s(ran_s=0.0) == 2.0


def test_lease_is_awaited_without_limit() -> None:
    back_off = BackOff()
    assert back_off.pause_s(ran_s=STEADY_S, least_s=12.0) == 12.0
    assert back_off.pause_s(ran_s=0.0) == 24.0
    assert back_off.pause_s(ran_s=STEADY_S, least_s=600.0) == 600.0

"""The slowest permitted arrival of a frame."""

from __future__ import annotations

import pytest

from kproxy.proxy.memory_budget import PRESSED, USUAL, Arrival

TICK_S = 0.1


def cut_after(bytes_per_s: float, *, first: int = 0, seconds: float = 60.0, pressed: bool = False) -> float | None:
    """The time when a frame at this rate, after `first` bytes at once, is too slow; None if never."""
    arrival = Arrival()
    for tick in range(1, int(seconds / TICK_S)):
        now = tick * TICK_S
        arrived = first + int(bytes_per_s * now)
        if arrival.is_too_slow(1000 + now, began=1000.0, arrived=arrived, pauses=0, pressed=pressed):
            return now
    return None


@pytest.mark.parametrize(
    ("bytes_per_s", "first", "pressed", "cut"),
    [
        (0, 4, False, USUAL.window_s),
        (500, 4, False, USUAL.window_s),
        (1100, 4, False, None),
        (1 << 20, 4, False, None),
        # A quick start does not excuse a later stop.
        (0, 50 << 20, False, 2 * USUAL.window_s),
        (1100, 4, True, PRESSED.window_s),
        (200 << 10, 4, True, PRESSED.window_s),
        (300 << 10, 4, True, None),
        (0, 50 << 20, True, 2 * PRESSED.window_s),
    ],
)
def test_slow_frame_is_cut_after_a_window(bytes_per_s: float, first: int, pressed: bool, cut: float | None) -> None:
    found = cut_after(bytes_per_s, first=first, pressed=pressed)
    assert (found is None) == (cut is None)
    if found is not None and cut is not None:
        assert found == pytest.approx(cut, abs=2 * TICK_S)


def test_time_without_reading_does_not_count() -> None:
    arrival = Arrival()
    assert not arrival.is_too_slow(9.0, began=0.0, arrived=4, pauses=0, pressed=False)
    # The session is not read until 100, and again until 200.
    assert not arrival.is_too_slow(100.0, began=0.0, arrived=4, pauses=1, pressed=False)
    assert not arrival.is_too_slow(200.0, began=0.0, arrived=4, pauses=2, pressed=False)
    assert not arrival.is_too_slow(209.0, began=0.0, arrived=4, pauses=2, pressed=False)
    assert arrival.is_too_slow(210.0, began=0.0, arrived=4, pauses=2, pressed=False)


def test_time_before_first_check_does_not_count() -> None:
    arrival = Arrival()
    assert not arrival.is_too_slow(100.0, began=0.0, arrived=4, pauses=1, pressed=False)
    assert not arrival.is_too_slow(109.0, began=0.0, arrived=4, pauses=1, pressed=False)
    assert arrival.is_too_slow(110.0, began=0.0, arrived=4, pauses=1, pressed=False)


def test_next_frame_is_judged_anew() -> None:
    arrival = Arrival()
    assert not arrival.is_too_slow(9.9, began=0.0, arrived=4, pauses=0, pressed=False)
    assert not arrival.is_too_slow(15.0, began=9.95, arrived=4, pauses=0, pressed=False)
    assert arrival.is_too_slow(20.0, began=9.95, arrived=4, pauses=0, pressed=False)

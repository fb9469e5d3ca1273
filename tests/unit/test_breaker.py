"""The breaker of one broker: what opens it, what closes it, how long a probe is waited for."""

from __future__ import annotations

import pytest

from kproxy.routing.breaker import LONGEST_PATIENCE_S, Breaker

TIMEOUT_S = 2.0

# What happens, with its time where it has one; whether the breaker is open after it.
HISTORIES: dict[str, list[tuple[str, float, bool]]] = {
    "an answer keeps it closed": [("asked", 1.0, False), ("answered", 0, False)],
    "silence opens it": [("asked", 1.0, False), ("silent", 0, True)],
    "an answer closes it": [("asked", 1.0, False), ("silent", 0, True), ("asked", 3.0, True), ("answered", 0, False)],
    "more silence keeps it open": [
        ("asked", 1.0, False),
        ("silent", 0, True),
        ("asked", 3.0, True),
        ("silent", 0, True),
    ],
    "one that answers other requests does not hang": [
        ("asked", 1.0, False),
        ("heard", 1.5, False),
        ("silent", 0, False),
    ],
    "what was heard before says nothing": [("heard", 0.9, False), ("asked", 1.0, False), ("silent", 0, True)],
    "what was heard may have been just before": [("asked", 1.0, False), ("heard", 1.0, False), ("silent", 0, True)],
    "the next probe counts by itself": [
        ("asked", 1.0, False),
        ("heard", 1.5, False),
        ("silent", 0, False),
        ("asked", 3.0, False),
        ("silent", 0, True),
    ],
    "it can open again": [
        *[("asked", 1.0, False), ("silent", 0.0, True), ("asked", 3.0, True), ("answered", 0.0, False)],
        *[("asked", 5.0, False), ("silent", 0.0, True)],
    ],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_what_opens_and_closes_it(name: str) -> None:
    breaker = Breaker(TIMEOUT_S)
    for event, now, is_open in HISTORIES[name]:
        if event in ("asked", "heard"):
            getattr(breaker, event)(now)
        else:
            was_open = breaker.is_open
            changed = getattr(breaker, event)()
            assert changed == (was_open != is_open)
        assert breaker.is_open == is_open, (event, now)


@pytest.mark.parametrize(
    ("timeout_s", "patiences"), [(2.0, [2, 2, 4, 8, 8]), (0.5, [0.5, 0.5, 1, 2, 4]), (10.0, [10, 10, 10, 10, 10])]
)
def test_the_longer_it_hangs_the_longer_each_probe_is_waited_for(timeout_s: float, patiences: list[float]) -> None:
    breaker = Breaker(timeout_s)
    waited = []
    for _ in patiences:
        waited.append(breaker.patience_s)
        breaker.asked(0.0)
        breaker.silent()
    assert waited == patiences
    assert max(waited) <= max(timeout_s, LONGEST_PATIENCE_S)
    breaker.answered()
    assert breaker.patience_s == timeout_s

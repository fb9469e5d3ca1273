"""The times at which a broker counts as hung, a failed broker is dialled again, and a connection is cut."""

from __future__ import annotations

import pytest

from kproxy.routing.broker_health import LONGEST_PATIENCE_S, LONGEST_REDIAL_S, Breaker, Redial, is_cut_off

TIMEOUT_S = 2.0

# An event, its time if it has one, and whether the breaker is open afterwards.
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
def test_breaker_opens_and_closes_as_listed(name: str) -> None:
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
def test_probe_timeout_grows_with_the_hang(timeout_s: float, patiences: list[float]) -> None:
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


def test_down_broker_is_dialled_ever_more_slowly() -> None:
    redial, now = Redial(), 100.0
    assert redial.is_due(now)
    pauses = []
    for _ in range(8):
        redial.failed(now)
        failed_at = now
        while not redial.is_due(now):
            now += 0.01
        pauses.append(round(now - failed_at, 1))
    assert pauses == [0.1, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert redial.failures == 8
    redial.failed(100.0)
    assert redial.is_due(100.0 + LONGEST_REDIAL_S)


@pytest.mark.parametrize(
    ("unacknowledged", "retransmits", "probes", "silent_s", "cut_off"),
    [
        (0, 0, 0, 60.0, False),
        (1, 3, 0, TIMEOUT_S, True),
        (1, 2, 0, 2.1, False),
        # Sent again, and acknowledged since.
        (1, 3, 0, 0.3, False),
        (0, 3, 0, 2.1, False),
        # A window that stays closed: its probes are acknowledged, or they are not.
        (0, 0, 1, 2.5, False),
        (0, 0, 3, 2.5, True),
    ],
)
def test_connection_without_acknowledgements_is_cut(
    unacknowledged: int, retransmits: int, probes: int, silent_s: float, cut_off: bool
) -> None:
    assert cut_off is is_cut_off(
        unacknowledged=unacknowledged, retransmits=retransmits, probes=probes, silent_s=silent_s, patience_s=TIMEOUT_S
    )

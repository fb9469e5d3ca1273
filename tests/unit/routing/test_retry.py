"""The number of tries, at one owner and at all of them, and the delays in between."""

from __future__ import annotations

import pytest

from kproxy.routing.retry import (
    MAX_ATTEMPTS,
    MAX_ATTEMPTS_IN_ALL,
    Attempts,
    comes_again,
    deadline_s,
    final_code,
    is_held_back,
)

# Each attempt: the revision it was sent at, and the ownership's revision when it failed.
HISTORIES: dict[str, tuple[list[tuple[int, int]], int, bool]] = {
    "nothing tried": ([], 0, False),
    "one owner": ([(5, 3)] * 2, 2, False),
    "one owner, exhausted": ([(5, 3)] * 3, 3, True),
    "the owner changed under the attempt": ([(5, 6)], 0, False),
    "a new owner, not tried yet": ([(5, 3), (5, 6)], 0, False),
    "a new owner, tried once": ([(5, 3), (5, 3), (6, 6)], 1, False),
    "each refused once while it moves": ([(n, n) for n in range(8)], 1, False),
    "it moves on and on": ([(n, n) for n in range(9)], 1, True),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_attempts_count_per_owner_and_in_total(name: str) -> None:
    history, here, exhausted = HISTORIES[name]
    attempts = Attempts()
    for routed_at, owner_version in history:
        attempts.add(routed_at, owner_version, 0.0)
    assert (attempts.in_all, attempts.here, attempts.exhausted) == (len(history), here, exhausted)
    assert MAX_ATTEMPTS < MAX_ATTEMPTS_IN_ALL


@pytest.mark.parametrize(
    ("timeout_ms", "cap_ms", "seconds"),
    [
        (30_000, 120_000, 27.0),
        (30_000, 20_000, 18.0),
        (1_200, 120_000, 1.08),
        (1_100, 120_000, 1.0),
        (0, 120_000, 1.0),
        (-1, 120_000, 1.0),
    ],
)
def test_deadline_precedes_clients_own_by_a_second(timeout_ms: int, cap_ms: int, seconds: float) -> None:
    assert deadline_s(timeout_ms, cap_ms) == pytest.approx(seconds)


# By Kafka's numbers; test_fanout_retries tests which codes doubt the owner.
EVERY_CODE = range(-1, 140)


def test_some_refusals_result_from_the_batch_before() -> None:
    assert {code for code in EVERY_CODE if is_held_back(code)} == {3, 6, 19, 45, 100}


def test_some_codes_make_clients_resend_the_batch() -> None:
    assert {code for code in EVERY_CODE if comes_again(code)} == {2, 3, 5, 6, 7, 13, 19, 20, 56, 74, 75, 89, 100}


def test_uncertain_batch_gets_7_instead_of_refusal() -> None:
    changed = {code: final for code in EVERY_CODE if (final := final_code(code, is_ambiguous=True)) != code}
    assert changed == dict.fromkeys((3, 5, 6, 19, 100), 7)
    assert all(final_code(code, is_ambiguous=False) == code for code in EVERY_CODE)

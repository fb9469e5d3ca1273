"""The judge of ownership refuses impossible histories. Tests in tests/integration/claims give it possible ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from kproxy_codec.error_codes import NONE, NOT_LEADER_OR_FOLLOWER, POLICY_VIOLATION, REQUEST_TIMED_OUT
from tests.support.claims.own_model import Claimed, Fenced, Granted, Recorded, Written, judge
from tests.support.clients.attempts import Stored
from tests.support.models.linearizability import NEVER, Operation, Undecided, check


def claim(called: float, returned: float, who: str, generation: int, told: Granted | Fenced | None) -> Claimed:
    return Claimed(who, called, returned, who, generation, told)


def write(
    called: float, returned: float, who: str, fence: int, offset: int = -1, code: int | None = NONE, n: int = 0
) -> Written:
    return Written(who, called, returned, who, fence, f"{who}:{fence}:{offset}:{n}".encode(), code, offset)


def recorded(*told: Claimed | Written, ends: dict[str, float] | None = None) -> Recorded:
    claims = [each for each in told if isinstance(each, Claimed)]
    writes = [each for each in told if isinstance(each, Written)]
    connections = {each.connection: NEVER for each in told}
    return Recorded(claims, writes, {**connections, **(ends or {})}, read_at=100.0)


def log_of(history: Recorded) -> list[Stored]:
    """The log if no fault occurred: all writes that have an offset."""
    return sorted(Stored(each.offset, each.value) for each in history.writes if each.offset >= 0)


A, B = "a", "b"
FIRST, SECOND = Granted(1, 10), Granted(2, 20)
GOOD = recorded(claim(0, 1, A, 1, FIRST), write(2, 3, A, 10, 0), claim(4, 5, B, 2, SECOND), write(6, 7, B, 20, 1))
BAD = {
    "two are granted it, one with a fence of before": (
        recorded(claim(0, 1, B, 2, SECOND), claim(2, 3, A, 2, Granted(2, 10))),
        "a fence went back",
    ),
    "one fence for two": (recorded(claim(0, 1, A, 1, FIRST), claim(0, 1, B, 1, FIRST)), "one fence, two owners"),
    "the old owner writes behind the new one": (
        recorded(
            *(claim(0, 1, A, 1, FIRST), claim(2, 3, B, 2, SECOND)),
            *(write(4, 5, B, 20, 0), write(1, NEVER, A, 10, 1, code=None)),
        ),
        "of fence 10, stands behind",
    ),
    "the old owner's write is acknowledged after the new one's grant": (
        recorded(claim(0, 1, A, 1, FIRST), claim(2, 3, B, 2, SECOND), write(4, 5, A, 10, 0)),
        "not linearizable",
    ),
    "the old owner's write is in the log when it was sent after the grant": (
        recorded(claim(0, 1, A, 1, FIRST), claim(2, 3, B, 2, SECOND), write(4, 5, A, 10, 0, code=REQUEST_TIMED_OUT)),
        "not linearizable",
    ),
    "the owner is refused": (
        recorded(claim(0, 1, A, 1, FIRST), write(2, 3, A, 10, code=POLICY_VIOLATION)),
        "not linearizable",
    ),
    "the owner has a lower generation and is not replaced": (
        recorded(claim(0, 1, A, 1, FIRST), claim(2, 3, B, 2, Fenced())),
        "not linearizable",
    ),
    "the owner has a higher generation and is replaced": (
        recorded(claim(0, 1, A, 1, FIRST), claim(2, 3, A, 5, Granted(5, 12)), claim(4, 5, B, 4, Granted(4, 14))),
        "not linearizable",
    ),
    "a generation that nobody asked for": (recorded(claim(0, 1, A, 1, Granted(3, 10))), "not linearizable"),
    "asked for again it has another fence": (
        recorded(claim(0, 1, A, 1, FIRST), claim(2, 3, A, 1, Granted(1, 12))),
        "not linearizable",
    ),
    "it was free before its owner's end": (
        recorded(claim(0, 1, A, 3, FIRST), claim(2, 3, A, 5, Granted(5, 12)), claim(4, 5, B, 2, Granted(1, 14))),
        "not linearizable",
    ),
    "written by whoever owns nothing": (recorded(write(0, 1, A, 0, 0)), "its writer owned nothing"),
    "written without a claim of it": (recorded(write(0, 1, A, 10, 0)), "not linearizable"),
    "refused and in the log": (
        recorded(claim(0, 1, A, 1, FIRST), write(2, 3, A, 10, 0, code=NOT_LEADER_OR_FOLLOWER)),
        "was refused with 6",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_model_refuses_forbidden_histories(name: str) -> None:
    history, reason = BAD[name]
    with pytest.raises(AssertionError, match=reason):
        judge(history, log_of(history))


LOGS: dict[str, tuple[Callable[[list[Stored]], list[Stored]], str]] = {
    "lost": (lambda log: log[1:], "acknowledged at 0, is at None"),
    "twice": (lambda log: [*log, log[0]._replace(offset=2)], "is at 0 and at 2"),
    "elsewhere": (lambda log: [log[0]._replace(offset=1), log[1]._replace(offset=2)], "acknowledged at 0, is at 1"),
    "nobody's": (lambda log: [*log, Stored(2, b"stranger")], "written by nobody"),
}


@pytest.mark.parametrize("name", LOGS)
def test_log_has_each_acknowledged_record_once(name: str) -> None:
    change, reason = LOGS[name]
    judge(GOOD, log_of(GOOD))
    with pytest.raises(AssertionError, match=reason):
        judge(GOOD, change(log_of(GOOD)))


class Collected:
    """Operations whose every order is possible, so that each subset of them is a state."""

    initial: frozenset[int] = frozenset()

    def step(self, state: frozenset[int], operation: Operation) -> Iterable[frozenset[int]]:
        return [state | {operation.input}]


def test_too_many_orders_give_no_verdict() -> None:
    with pytest.raises(Undecided):
        check([Operation("a", 0, 100, value) for value in range(16)], Collected(), max_orders=1000)

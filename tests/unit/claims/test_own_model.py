"""The judge of ownership: on histories written by hand, and on random ones of a proxy without faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy_codec.error_codes import NONE, NOT_LEADER_OR_FOLLOWER, POLICY_VIOLATION, REQUEST_TIMED_OUT
from tests.support.claims.own_model import Claimed, Fenced, Granted, Recorded, Written, judge
from tests.support.clients.attempts import Stored
from tests.support.models.linearizability import NEVER, UNKNOWN


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
    """As it is where nothing went wrong: what has an offset."""
    return sorted(Stored(each.offset, each.value) for each in history.writes if each.offset >= 0)


A, B, C = "a", "b", "c"
FIRST, SECOND = Granted(1, 10), Granted(2, 20)
GOOD = {
    "one after another": recorded(
        claim(0, 1, A, 1, FIRST), write(2, 3, A, 10, 0), claim(4, 5, B, 2, SECOND), write(6, 7, B, 20, 1)
    ),
    "what nobody owns is granted with generation 1": recorded(claim(0, 1, A, 7, FIRST)),
    "generation 0 takes it from anybody, and begins anew": recorded(
        claim(0, 1, A, 1, FIRST), claim(2, 3, A, 9, Granted(9, 12)), claim(4, 5, B, 0, Granted(1, 14))
    ),
    "a lower generation is fenced": recorded(
        claim(0, 1, A, 1, FIRST), claim(2, 3, B, 2, SECOND), claim(4, 5, C, 1, Fenced())
    ),
    "asked for again it is the same": recorded(claim(0, 1, A, 1, FIRST), claim(2, 3, A, 1, FIRST)),
    "the writer of before writes until the claim is answered": recorded(
        *(claim(0, 1, A, 1, FIRST), claim(2, 9, B, 2, SECOND)),
        # Decided it is, and the old writer is still let through.
        *(claim(3, 4, C, 1, Fenced()), write(5, 6, A, 10, 0)),
    ),
    "a write without an answer may come before the next owner's": recorded(
        claim(0, 1, A, 1, FIRST),
        write(2, 3, A, 10, 0, code=None),
        claim(4, 5, B, 2, SECOND),
        write(6, 7, B, 20, 1),
    ),
    "a claim without an answer stands all the same": recorded(
        claim(0, 1, A, 3, UNKNOWN), claim(2, 3, A, 1, Granted(1, 12)), claim(4, 5, B, 0, Granted(1, 14))
    ),
    "a claim that timed out takes effect while its client asks again": recorded(
        claim(0, 1, A, 1, UNKNOWN), claim(2, 3, B, 5, Granted(5, 20)), claim(4, 5, C, 4, Fenced())
    ),
    "what a connection owned is free when it has ended": recorded(
        claim(0, 1, A, 1, FIRST), claim(2, 3, A, 5, Granted(5, 12)), claim(5, 6, B, 2, Granted(1, 14)), ends={A: 4}
    ),
    "a connection that may have ended is refused": recorded(
        claim(0, 1, A, 1, FIRST), write(5, 6, A, 10, code=POLICY_VIOLATION), ends={A: 4}
    ),
    "who owns nothing is refused": recorded(
        claim(0, 1, A, 1, FIRST), write(2, 3, B, 0, code=POLICY_VIOLATION), write(4, 5, A, 10, 0)
    ),
    "a write of before a raise stands behind it": recorded(
        claim(0, 1, A, 1, FIRST), claim(2, 3, A, 2, SECOND), write(1, 5, A, 10, 0), write(6, 7, A, 20, 1)
    ),
}
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


@pytest.mark.parametrize("name", GOOD)
def test_model_accepts_allowed_histories(name: str) -> None:
    judge(GOOD[name], log_of(GOOD[name]))


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
    history = GOOD["one after another"]
    change, reason = LOGS[name]
    with pytest.raises(AssertionError, match=reason):
        judge(history, change(log_of(history)))


# At random


class MadeUp:
    """A run of a proxy without faults: clients claim and write at random, and every step happens at a time of its own.

    What a client is told is known a while after it is so, and sometimes never.
    """

    def __init__(self, seed: int, size: int = 16) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.fence = 0
        self.owner: tuple[str, int, int] | None = None
        self.granted: dict[str, int] = {}
        self.ends: dict[str, float] = dict.fromkeys("abcde", NEVER)
        self.claims: list[Claimed] = []
        self.writes: list[Written] = []
        self.log: list[Stored] = []
        for n in range(size):
            at_random = self.chance.choice(sorted(self.ends))
            who = self.owner[0] if self.owner is not None and self.chance.random() < 0.5 else at_random
            self.now += self.chance.random()
            if self.ends[who] == NEVER:
                self.chance.choice((self._claim, self._write, self._write, self._maybe_end))(who, n)

    @property
    def recorded(self) -> Recorded:
        return Recorded(self.claims, self.writes, self.ends, read_at=self.now + 10)

    def _times(self) -> tuple[float, float]:
        return self.now - self.chance.random() * 2, self.now + self.chance.random() * 2

    def _claim(self, who: str, _: int) -> None:
        asked = self.chance.randrange(4)
        called, returned = self._times()
        is_told = self.chance.random() < 0.9
        told: Granted | Fenced
        if asked and self.owner is not None and self.owner[1] > asked:
            told = Fenced()
        elif asked and self.owner is not None and self.owner[:2] == (who, asked):
            told = Granted(*self.owner[1:])
        else:
            if self.owner is not None and self.owner[0] != who:
                self.ends[self.owner[0]] = called
            self.fence += self.chance.randint(1, 3)
            told = Granted(asked if asked and self.owner is not None else 1, self.fence)
            self.owner = (who, *told)
        if is_told and isinstance(told, Granted):
            self.granted[who] = told.fence
        claimed = Claimed(who, called, returned, who, asked, told)
        self.claims.append(claimed if is_told else claimed._replace(returned=NEVER, told=UNKNOWN))

    def _write(self, who: str, n: int) -> None:
        called, returned = self._times()
        fence, value = self.granted.get(who, 0), f"{who}:{n}".encode()
        if self.owner is None or self.owner[0] != who or not fence:
            self.writes.append(Written(who, called, returned, who, fence, value, POLICY_VIOLATION))
            return
        self.log.append(Stored(len(self.log), value))
        code = self.chance.choice((NONE, NONE, NONE, None, REQUEST_TIMED_OUT))
        offset = self.log[-1].offset if code == NONE else -1
        self.writes.append(
            Written(who, called, returned if code is not None else NEVER, who, fence, value, code, offset)
        )

    def _maybe_end(self, who: str, _: int) -> None:
        if self.chance.random() < 0.3:
            self.ends[who] = self.now - self.chance.random()
            if self.owner is not None and self.owner[0] == who:
                self.owner = None


@given(st.integers(0, 1 << 32))
def test_model_accepts_a_proxy_without_faults(seed: int) -> None:
    run = MadeUp(seed)
    judge(run.recorded, run.log)


@given(st.integers(0, 1 << 32))
def test_record_of_stale_fence_behind_newer_is_refused(seed: int) -> None:
    run = MadeUp(seed, size=30)
    fences = {each.value: each.fence for each in run.writes}
    takeovers = [n for n, pair in enumerate(pairwise(run.log)) if fences[pair[0].value] < fences[pair[1].value]]
    for at in takeovers[:1]:
        values = [value for _, value in run.log]
        values[at], values[at + 1] = values[at + 1], values[at]
        moved = [Stored(offset, value) for offset, value in enumerate(values)]
        offsets = {value: offset for offset, value in moved}
        writes = [each._replace(offset=offsets[each.value]) if each.error_code == NONE else each for each in run.writes]
        with pytest.raises(AssertionError, match="stands behind"):
            judge(run.recorded._replace(writes=writes), moved)

"""The checker of histories: on some by hand, on many real ones, and compared with one that tries all orders."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.linearizability import (
    NEVER,
    UNKNOWN,
    Model,
    Operation,
    Undecided,
    check,
    check_parts,
    timeline,
)


class Register:
    """("write", value) -> "ok", ("read",) -> value, ("swap", value) -> the value before, ("clear", value) -> "ok" while
    it has that value; it begins with 0.
    """

    initial = 0

    def step(self, state: int, operation: Operation) -> Iterable[int]:
        what, *value = operation.input
        if what == "read":
            return [state] if operation.output in (UNKNOWN, state) else []
        if what == "clear":
            return [0] if [state] == value else []
        if what == "swap" and operation.output not in (UNKNOWN, state):
            return []
        return value


REGISTER = Register()


def write(called: float, returned: float, value: int, who: str = "w") -> Operation:
    return Operation(who, called, returned, ("write", value), UNKNOWN if returned == NEVER else "ok")


def read(called: float, returned: float, value: int | None, who: str = "r") -> Operation:
    return Operation(who, called, returned, ("read",), value)


GOOD = {
    "nothing": [],
    "one after another": [write(0, 1, 5), read(2, 3, 5), write(4, 5, 6), read(6, 7, 6)],
    "a read during a write sees what was before": [write(0, 10, 5), read(1, 2, 0)],
    "a read during a write sees it": [write(0, 10, 5), read(1, 2, 5)],
    "a call at the very moment of a return": [write(0, 1, 5), read(1, 2, 0), write(1, 3, 6)],
    "writes that overlap, seen in the order of their returns": [write(0, 5, 1), write(1, 6, 2), read(7, 8, 2)],
    "and the other way round": [write(0, 5, 1), write(1, 6, 2), read(7, 8, 1)],
    "a write that never returned takes effect late": [write(0, NEVER, 5), read(10, 11, 0), read(12, 13, 5)],
    "or never": [write(0, NEVER, 5), read(10, 11, 0)],
    "what never returned may have been impossible": [write(0, 1, 5), Operation("c", 2, NEVER, ("clear", 6))],
    "what repeats takes effect time and again": [
        Operation("w", 0, NEVER, ("write", 5), repeats=True),
        *(read(1, 2, 5), write(3, 4, 6), read(5, 6, 6), read(7, 8, 5)),
    ],
    "who was told nothing may still have done it": [write(0, 1, 5)._replace(output=UNKNOWN), read(2, 3, 5)],
    "a read that never returned": [write(0, 1, 5), read(0, NEVER, None)],
}
BAD = {
    "a value that nobody wrote": [write(0, 1, 5), read(2, 3, 7)],
    "an old value after the new one": [write(0, 1, 5), write(2, 3, 6), read(4, 5, 5)],
    "what a read has seen is not taken back": [write(0, 10, 5), read(1, 2, 5, "a"), read(3, 4, 0, "b")],
    "two reads see two writes in two orders": [
        *(write(0, 5, 1), write(0, 5, 2)),
        *(read(6, 7, 1), read(8, 9, 2)),
    ],
    "a write that never returned takes effect once": [
        *(write(0, NEVER, 5), read(1, 2, 5), write(3, 4, 6), read(5, 6, 6), read(7, 8, 5)),
    ],
    "nothing takes effect before its call": [read(0, 1, 5), write(2, 3, 5)],
}


@pytest.mark.parametrize("name", GOOD)
def test_possible_histories_are_accepted(name: str) -> None:
    assert check(GOOD[name], REGISTER) is None


@pytest.mark.parametrize("name", BAD)
def test_impossible_histories_are_refused(name: str) -> None:
    assert check(BAD[name], REGISTER) is not None


def test_explanation_is_minimal() -> None:
    noise = [operation for at in range(20) for operation in (write(at, at + 0.4, at), read(at + 0.5, at + 0.6, at))]
    crime = [write(30, 31, 100), write(32, 33, 200), read(34, 35, 100), read(36, 37, 100)]
    refuted = check([*noise, *crime], REGISTER)
    assert refuted is not None
    assert refuted.operations == tuple(crime[:3])
    assert refuted.stuck == crime[2]
    text = str(refuted)
    assert "('read',) -> 100" in text
    assert "('write', 200)" in text
    assert "('read',) -> 19" not in text, "what has nothing to do with it is shown"


def test_timeline_shows_overlaps_and_unreturned_calls() -> None:
    first, second = timeline([write(2, NEVER, 6, "late"), write(0, 3, 5, "early")]).splitlines()
    assert first.endswith("early: ('write', 5) -> ok")
    assert second.endswith("late: ('write', 6)")
    assert first.index("|") < second.index("|") < first.rindex("|")
    assert second.split("late")[0].rstrip().endswith(">")


def test_objects_are_checked_apart() -> None:
    def at(register: str, operation: Operation) -> Operation:
        return operation._replace(who=register)

    mixed = [at("a", write(0, 1, 5)), at("b", write(2, 3, 6)), at("a", read(4, 5, 5)), at("b", read(4, 5, 5))]
    assert set(check_parts(mixed, REGISTER, lambda each: each.who)) == {"b"}
    assert check(mixed[:3], REGISTER) is not None, "as one register they are not"


def test_too_many_orders_give_no_verdict() -> None:
    many = [write(0, 100, value) for value in range(16)]
    with pytest.raises(Undecided):
        check(many, REGISTER, max_orders=1000)


# At random


class Draw:
    """Histories of a register that did happen: every operation takes effect at a time of its own, in between its call
    and its return. `value` n is written once at most.
    """

    def __init__(self, data: st.DataObject, size: int) -> None:
        reach = st.floats(0, 3)
        self.history: list[Operation] = []
        state = 0
        for place in range(1, data.draw(st.integers(1, size), "operations") + 1):
            called = place - data.draw(reach)
            returned = place + data.draw(reach)
            what = data.draw(st.sampled_from(("write", "read", "swap")))
            asked = (what,) if what == "read" else (what, place)
            output: Any = {"write": "ok"}.get(what, state)
            took_effect = data.draw(st.booleans()) if data.draw(st.integers(0, 5)) == 0 else None
            if took_effect is not None:
                returned, output = NEVER, UNKNOWN
            self.history.append(Operation(f"client {place}", called, returned, asked, output))
            if what != "read" and took_effect is not False:
                state = place


@given(st.data())
def test_real_histories_are_accepted(data: st.DataObject) -> None:
    history = Draw(data, 12).history
    assert check(history, REGISTER) is None, timeline(history)


@given(st.data())
def test_read_of_unwritten_value_is_refused(data: st.DataObject) -> None:
    history = Draw(data, 8).history
    told = [n for n, each in enumerate(history) if each.input[0] in ("read", "swap") and each.output is not UNKNOWN]
    if told:
        at = data.draw(st.sampled_from(told))
        history[at] = history[at]._replace(output=99)
        assert check(history, REGISTER) is not None, timeline(history)


@given(st.data())
def test_judge_agrees_with_trying_all_orders(data: st.DataObject) -> None:
    history = Draw(data, 5).history
    for at, operation in enumerate(history):
        if operation.input[0] in ("read", "swap") and operation.output is not UNKNOWN and data.draw(st.booleans()):
            history[at] = operation._replace(output=data.draw(st.integers(0, 5)))
    expected = can_be_ordered(history, REGISTER)
    refuted = check(history, REGISTER)
    assert (refuted is None) == expected, timeline(history)
    if refuted is not None:
        assert not can_be_ordered(refuted.operations, REGISTER), f"no explanation: {refuted}"


def can_be_ordered(history: Sequence[Operation], model: Model[int]) -> bool:
    """By trying all orders of all choices of what took effect."""
    returned = [each for each in history if each.returned != NEVER]
    open_ended = [each for each in history if each.returned == NEVER]
    for count in range(len(open_ended) + 1):
        for chosen in itertools.combinations(open_ended, count):
            if any(explains(order, model) for order in itertools.permutations([*returned, *chosen])):
                return True
    return False


def explains(order: Sequence[Operation], model: Model[int]) -> bool:
    latest = -NEVER
    states = {model.initial}
    for operation in order:
        latest = max(latest, operation.called)
        if operation.returned < latest:
            return False
        states = {after for state in states for after in model.step(state, operation)}
    return bool(states)

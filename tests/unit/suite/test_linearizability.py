"""The checker of histories: it refuses impossible ones, and agrees with one that tries all orders."""

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
    """("write", value) -> "ok", ("read",) -> value, ("swap", value) -> the value before; it begins with 0."""

    initial = 0

    def step(self, state: int, operation: Operation) -> Iterable[int]:
        what, *value = operation.input
        if what == "read":
            return [state] if operation.output in (UNKNOWN, state) else []
        if what == "swap" and operation.output not in (UNKNOWN, state):
            return []
        return value


REGISTER = Register()


def write(called: float, returned: float, value: int, who: str = "w") -> Operation:
    return Operation(who, called, returned, ("write", value), UNKNOWN if returned == NEVER else "ok")


def read(called: float, returned: float, value: int | None, who: str = "r") -> Operation:
    return Operation(who, called, returned, ("read",), value)


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


@pytest.mark.parametrize("name", BAD)
def test_impossible_histories_are_refused(name: str) -> None:
    assert check(BAD[name], REGISTER) is not None


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

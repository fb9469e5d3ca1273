"""Check histories of concurrent clients for linearizability: is there a sequential order that explains all answers?

A history is a set of operations, each with the times between which it took effect, once. An operation that never
returned may have taken effect at any time after its call, or never. A history is linearizable if its operations can be
put in an order that respects these times and in which the model, step by step, gives the answers of the clients
(Herlihy and Wing, 1990).

The search goes through the history in order of time, after Lowe ("Testing for linearizability", 2017): it keeps all
orders possible so far, as (state, the operations under way that have taken effect), and places an operation no earlier
than at its return. Orders with the same result are merged, and operations that have returned are forgotten, so memory
grows with the number of operations under way at one time. The search ends at the first return that no order explains.
Independent objects are checked apart (`check_parts`), because linearizability is a property of each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

NEVER: Final = inf
# The output of an operation that reported none, so that any outcome is possible.
UNKNOWN: Final = None
MAX_ORDERS = 200_000
# A long search is not worthwhile while an explanation is shortened.
_MAX_ORDERS_TO_SHRINK = 5_000
_MAX_OPERATIONS_TO_SHRINK = 300
_WIDTH = 48

State = TypeVar("State", bound=Hashable)
Part = TypeVar("Part", bound=Hashable)


class Operation(NamedTuple):
    """All times are of one clock. `returned` is NEVER if there was no answer, `output` is UNKNOWN if it is not known.

    `repeats`: the operation never returns, and may take effect any number of times.
    """

    who: str
    called: float
    returned: float
    input: Any
    output: Any = UNKNOWN
    repeats: bool = False

    def __str__(self) -> str:
        told = "" if self.output is UNKNOWN else f" -> {self.output}"
        return f"{self.who}: {self.input}{told}"


class Model(Protocol[State]):
    """The object as a single client sees it that calls one operation after another. States are immutable."""

    @property
    def initial(self) -> State: ...

    def step(self, state: State, operation: Operation) -> Iterable[State]:
        """The possible states after `operation`; none if its output is impossible in `state`."""
        ...


class Undecided(Exception):
    """The number of orders to search at one time exceeds the limit."""


class Refuted(NamedTuple):
    """Why a history is not linearizable: even `operations` alone are not, and none of them can be left out.

    No order has a place for `stuck` before it returned; `order` is one of the longest, to `state`. `others`: operations
    of the history that may have taken effect at any time after their call, with any outcome, which does not help.
    """

    operations: tuple[Operation, ...]
    stuck: Operation
    order: tuple[Operation, ...]
    state: Any
    others: int

    def __str__(self) -> str:
        order = "".join(f"\n    {operation}" for operation in self.order) or "\n    (nothing)"
        return (
            f"no order of these {len(self.operations)} explains what was told, whatever became of {self.others} others:"
            f"\n{timeline(self.operations)}\n"
            f"One comes as far as\n    {self.stuck}\nwhich cannot follow, in {self.state}:{order}"
        )


class _Path(NamedTuple):
    """An order, from its end."""

    last: int
    before: _Path | None


_Order = tuple[State, frozenset[int]]
_Orders = dict[_Order[State], _Path | None]


def check(operations: Iterable[Operation], model: Model[Any], *, max_orders: int = MAX_ORDERS) -> Refuted | None:
    """Why a history is not linearizable; None if it is. Raises Undecided."""
    history = sorted(operations, key=lambda operation: operation.called)
    stuck = _search(history, model, max_orders)
    return None if stuck is None else _explained(history, model, stuck)


def check_parts(
    operations: Iterable[Operation], model: Model[Any], part: Callable[[Operation], Part]
) -> Mapping[Part, Refuted]:
    """The objects whose operations are not linearizable, with the reasons. Raises Undecided."""
    parts: dict[Part, list[Operation]] = {}
    for operation in operations:
        parts.setdefault(part(operation), []).append(operation)
    found = {each: check(of_it, model) for each, of_it in parts.items()}
    return {each: refuted for each, refuted in found.items() if refuted is not None}


def timeline(operations: Sequence[Operation]) -> str:
    """A line for each operation, in order of the calls: its times, and the operation. `>`: it never returned."""
    times = sorted({time for each in operations for time in (each.called, each.returned) if time != NEVER})
    if not times:
        return ""
    # Columns are by rank, because a microsecond and a second are equally important here.
    column = {time: round(rank * (_WIDTH - 1) / max(1, len(times) - 1)) for rank, time in enumerate(times)}
    lines = []
    for each in sorted(operations, key=lambda operation: operation.called):
        start, end = column[each.called], column.get(each.returned, _WIDTH)
        line = " " * start + "|" + "-" * (end - start - 1) + (">" if each.returned == NEVER else "|")
        until = "" if each.returned == NEVER else f"{each.returned - times[0]:.4f}"
        lines.append(f"  {each.called - times[0]:9.4f}-{until:<9} {line:<{_WIDTH + 1}} {each}")
    return "\n".join(lines)


# The search


class _Stuck(NamedTuple, Generic[State]):
    """The end of the search: the unexplained operation, and the possible orders before it returned."""

    at: int
    orders: _Orders[State]


def _search(history: Sequence[Operation], model: Model[State], max_orders: int) -> _Stuck[State] | None:
    # Calls come before returns at the same time, because they may have overlapped.
    events = [(each.called, 0, number) for number, each in enumerate(history)]
    events += [(each.returned, 1, number) for number, each in enumerate(history) if each.returned != NEVER]
    under_way: dict[int, Operation] = {}
    orders: _Orders[State] = {(model.initial, frozenset()): None}
    for _, is_return, number in sorted(events):
        if not is_return:
            under_way[number] = history[number]
            continue
        explained = _with(number, under_way, orders, model, max_orders)
        if not explained:
            return _Stuck(number, orders)
        orders = explained
        del under_way[number]
    return None


def _with(
    number: int, under_way: Mapping[int, Operation], orders: _Orders[State], model: Model[State], max_orders: int
) -> _Orders[State]:
    """Those orders, and their continuations with operations under way, in which operation `number` has taken effect.

    The operation has returned and is removed from the remembered part of an order.
    """
    found: _Orders[State] = {}
    seen: dict[_Order[State], _Path | None] = dict(orders)
    waiting = list(orders)
    while waiting:
        order = waiting.pop()
        state, effective = order
        if number in effective:
            found.setdefault((state, effective - {number}), seen[order])
            continue
        for other, operation in under_way.items():
            if other in effective:
                continue
            for after in model.step(state, operation):
                longer = (after, effective if operation.repeats else effective | {other})
                if longer not in seen:
                    seen[longer] = _Path(other, seen[order])
                    waiting.append(longer)
        if len(seen) > max_orders:
            raise Undecided(f"more than {max_orders} orders of {len(under_way)} operations under way at one time")
    return found


# The explanation


def _explained(history: Sequence[Operation], model: Model[State], stuck: _Stuck[State]) -> Refuted:
    """Return only the needed operations that were called before the unexplained return."""
    end = history[stuck.at].returned
    # Operations that returned later had not yet returned when the search failed.
    upto = [each if each.returned <= end else each._replace(returned=NEVER) for each in history]
    needed = [number for number, each in enumerate(history) if each.called <= end]
    if len(needed) <= _MAX_OPERATIONS_TO_SHRINK:
        others: list[Operation] = []
        for number in tuple(needed):
            fewer = [each for each in needed if each != number]
            # It may take effect any number of times, which leaves fewer orders to search.
            more_others = [*others, upto[number]._replace(returned=NEVER, output=UNKNOWN, repeats=True)]
            if _is_refuted([*(upto[each] for each in fewer), *more_others], model):
                needed, others = fewer, more_others
    found = _search([upto[each] for each in needed], model, MAX_ORDERS)
    assert found is not None, "a history that cannot be explained was made explicable by leaving out what helps"
    (state, _), path = max(found.orders.items(), key=lambda each: _length(each[1]))
    shown = tuple(history[each] for each in needed)
    return Refuted(shown, shown[found.at], _ordered(shown, path), state, len(history) - len(shown))


def _is_refuted(history: Sequence[Operation], model: Model[Any]) -> bool:
    try:
        return _search(history, model, _MAX_ORDERS_TO_SHRINK) is not None
    except Undecided:
        return False


def _ordered(history: Sequence[Operation], path: _Path | None) -> tuple[Operation, ...]:
    found = []
    while path is not None:
        found.append(history[path.last])
        path = path.before
    return tuple(reversed(found))


def _length(path: _Path | None) -> int:
    length = 0
    while path is not None:
        length, path = length + 1, path.before
    return length

"""The plain path of a Playbook (tests.support.models.playbook): requests that are not in the core."""

from __future__ import annotations

from kproxy.routing.actions import Adopted
from kproxy.routing.fanout import Fanout
from kproxy.routing.in_flight import Piece
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Selection
from tests.support.models.playbook_words import answer_frame, selection_text


def is_plain(piece: Piece, frame: memoryview) -> bool:
    """Whether an answer to one of the core's pieces concerns no other request."""
    exchange = piece.exchange
    if not exchange.is_ordered:
        return True
    plain = exchange.api.plain_answer(exchange.request, piece.selection)
    # A copy, because it is put in order: the core must not need that.
    return plain is not None and plain.is_met(memoryview(bytearray(frame)))


class _Plain:
    """A request: its unanswered parts, by connection."""

    def __init__(self, exchange: Exchange, routed_at: int, parts: dict[int, Selection | None]) -> None:
        self.exchange = exchange
        self.routed_at = routed_at
        self.parts = parts


class PlainRequests:
    """By their sequence."""

    def __init__(self, core: Fanout) -> None:
        self._core = core
        self._table: dict[int, _Plain] = {}

    def __len__(self) -> int:
        return len(self._table)

    def is_due(self, now: float) -> bool:
        return any(plain.exchange.deadline <= now for plain in self._table.values())

    def send(self, exchange: Exchange, routed_at: int) -> list[str]:
        plan = self._core.routes.plan(exchange.request)
        assert plan, "a route is new"
        assert self._core.is_quiet, "a lane is there"
        if self._core.awaits:
            self._core.arrived(exchange)
        parts = {part.connection: part.selection if len(plan) > 1 else None for part in plan}
        self._table[exchange.sequence] = _Plain(exchange, routed_at, parts)
        sequence = exchange.sequence
        return [f"plain c{part.connection}: {sequence} {selection_text(exchange, part.selection)}" for part in plan]

    def answer(self, sequence: int, connection: int, text: str) -> Exchange:
        """A success for one part of several; the others stay unanswered."""
        plain = self._table[sequence]
        exchange, selection = plain.exchange, plain.parts.pop(connection) or []
        assert plain.parts, "the last part ends the request, and the core never hears of it"
        answer = exchange.api.plain_answer(exchange.request, selection)
        results = answer.results(answer_frame(exchange.request, text)) if answer is not None else None
        assert results is not None, "it is no plain success"
        exchange.take_all(selection, results)
        return exchange

    def enter(self) -> list[int]:
        """Move all requests into the core; return the numbers of their pieces."""
        entering = [plain for _, plain in sorted(self._table.items())]
        self._table.clear()
        return self._core.adopt([Adopted(each.exchange, each.routed_at, list(each.parts.items())) for each in entering])

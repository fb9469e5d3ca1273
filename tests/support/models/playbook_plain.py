"""Model the plain path of a Playbook (tests.support.models.playbook): requests that are not in the core."""

from __future__ import annotations

from kproxy.routing.actions import Adopted
from kproxy.routing.fanout import Fanout
from kproxy.routing.in_flight import Piece
from kproxy.routing.merge import Exchange, is_success, match_results
from kproxy.routing.routes import Routes
from kproxy.routing.split import Selection, add_entry, entries_of, split_whole
from kproxy_codec.partitioned import PartitionedRequest
from tests.support.models.playbook_words import answer_frame, selection_text


def is_plain(piece: Piece, frame: memoryview) -> bool:
    """Whether an answer to one of the core's pieces concerns no other request."""
    return not piece.exchange.is_ordered or is_success(piece.exchange, piece.part, memoryview(bytearray(frame)))


def proven_parts(routes: Routes, request: PartitionedRequest) -> dict[int, Selection]:
    """The parts of a request by connection; empty if some partition's route is new."""
    parts: dict[int, Selection] = {}
    for place, ordinal in entries_of(split_whole(request.topics)):
        topic = request.topics[place]
        connection = routes.proven_on(topic.name, topic.partitions[ordinal])
        if connection is None:
            return {}
        add_entry(parts.setdefault(connection, []), place, ordinal)
    return parts


class _Plain:
    """A request on the plain path, with its unanswered parts by connection."""

    def __init__(self, exchange: Exchange, routed_at: int, parts: dict[int, Selection | None]) -> None:
        self.exchange = exchange
        self.routed_at = routed_at
        self.parts = parts


class PlainRequests:
    """The requests on the plain path, by their sequence."""

    def __init__(self, core: Fanout) -> None:
        self._core = core
        self._table: dict[int, _Plain] = {}

    def __len__(self) -> int:
        return len(self._table)

    def is_due(self, now: float) -> bool:
        return any(plain.exchange.deadline <= now for plain in self._table.values())

    def send(self, exchange: Exchange, routed_at: int) -> list[str]:
        parts = proven_parts(self._core.routes, exchange.request)
        assert parts, "a route is new"
        lanes, refused, _ = self._core.gate
        assert not lanes, "a lane is there"
        assert not refused, "a refused batch may come again"
        is_split = len(parts) > 1
        self._table[exchange.sequence] = _Plain(
            exchange, routed_at, {connection: part if is_split else None for connection, part in parts.items()}
        )
        sequence = exchange.sequence
        return [
            f"plain c{connection}: {sequence} {selection_text(exchange, part)}" for connection, part in parts.items()
        ]

    def answer(self, sequence: int, connection: int, text: str) -> Exchange:
        """Take a success for one part of several; the others stay unanswered."""
        plain = self._table[sequence]
        exchange, selection = plain.exchange, plain.parts.pop(connection) or []
        assert plain.parts, "the last part ends the request, and the core never hears of it"
        frame = answer_frame(exchange.request, text)
        assert is_success(exchange, selection, frame), "it is no success"
        response = exchange.api.parse_response(frame, exchange.request.header.api_version)
        for entry, _, topic, ordinal in match_results(exchange, selection, response):
            exchange.take(entry, frame[topic.starts[ordinal] : topic.ends[ordinal]])
        return exchange

    def enter(self) -> list[int]:
        """Move all requests into the core; return the numbers of their pieces."""
        entering = [plain for _, plain in sorted(self._table.items())]
        self._table.clear()
        return self._core.adopt([Adopted(each.exchange, each.routed_at, list(each.parts.items())) for each in entering])

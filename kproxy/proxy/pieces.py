"""What one broker is asked on behalf of one exchange, and which of it is unanswered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping
from typing import Protocol

from codec.partitioned import PlainAnswer
from kproxy.observe.audit.noted import Noted
from kproxy.proxy.upstream import Upstream
from kproxy.routing import retry
from kproxy.routing.identity import lane_key
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Entry, Selection, split_whole


class PieceKeeper(Protocol):
    """Who sends pieces and wants to know what becomes of them."""

    def sent(self, piece: Piece) -> None:
        """A piece that has no answer (acks=0) has left this process."""
        ...

    def unconfirmed(self, piece: Piece) -> None:
        """The connection of a piece that has no answer has ended, with or after what was sent on it last."""
        ...

    def answered(self, piece: Piece, frame: memoryview) -> None:
        """A broker's answer to a piece."""
        ...

    def fail_piece(self, piece: Piece, event: int) -> None:
        """The same event (kproxy.routing.retry) for every entry of a piece."""
        ...


class Piece:
    """The ticket of one broker's answer. `routed_at` is the topology's revision when it was sent.

    One with no `part` is the `whole` of its exchange. `plain` is the answer to it when all goes well, where it is known
    already, and `noted` says what of that is noted for the audit.
    """

    __slots__ = ("exchange", "expects_answer", "keeper", "noted", "part", "plain", "routed_at", "upstream")

    def __init__(
        self,
        keeper: PieceKeeper,
        exchange: Exchange,
        upstream: Upstream,
        part: Selection | None,
        routed_at: int,
        plain: PlainAnswer | None = None,
        noted: Noted | None = None,
    ) -> None:
        self.keeper = keeper
        self.exchange = exchange
        self.upstream = upstream
        self.part = part
        self.routed_at = routed_at
        self.plain = plain
        self.noted = noted
        self.expects_answer = exchange.request.acks != 0

    @property
    def whole(self) -> bool:
        return self.part is None

    @property
    def selection(self) -> Selection:
        """The entries asked for."""
        return split_whole(self.exchange.request.topics) if self.part is None else self.part

    def sent(self) -> None:
        self.keeper.sent(self)

    def unconfirmed(self) -> None:
        self.keeper.unconfirmed(self)

    def answered(self, frame: memoryview) -> None:
        self.keeper.answered(self, frame)

    def lost(self, *, written: bool) -> None:
        self.keeper.fail_piece(self, retry.CONNECTION_LOST if written else retry.NOT_WRITTEN)

    def entries(self) -> Iterable[Entry]:
        return entries_of(self.selection)


def entries_of(selection: Selection) -> Iterable[Entry]:
    for topic_place, ordinals in selection:
        for ordinal in ordinals:
            yield topic_place, ordinal


def ordered_pieces(upstream: Upstream) -> Iterable[Piece]:
    """The unanswered pieces on a connection whose order matters, in order."""
    for ticket in upstream.unanswered():
        if isinstance(ticket, Piece) and ticket.exchange.is_ordered:
            yield ticket


def pieces_of(upstreams: Iterable[Upstream], sequences: Container[int]) -> Iterable[Piece]:
    """The unanswered pieces of these exchanges."""
    for upstream in upstreams:
        for ticket in upstream.unanswered():
            if isinstance(ticket, Piece) and ticket.exchange.sequence in sequences:
                yield ticket


class UnderWay:
    """What of each lane is unanswered: by lane, the sequences of its exchanges. For one client connection.

    It is made when it is first asked for, which is seldom, and kept by `add` and `remove` until
    nobody needs it: one pass over all that is in flight for each error would take the square of it.
    """

    def __init__(self, upstreams: Mapping[int, Upstream]) -> None:
        self._upstreams = upstreams
        # Every request and every answer asks whether there is one: by name, for a call costs more.
        self.sequences: dict[Hashable, set[int]] | None = None

    def of(self, key: Hashable) -> Collection[int]:
        """The sequences that are unanswered in a lane."""
        if self.sequences is None:
            self.sequences = {}
            for upstream in self._upstreams.values():
                for piece in ordered_pieces(upstream):
                    self.add(piece)
        return self.sequences.get(key, ())

    def add(self, piece: Piece) -> None:
        """A piece is sent, or waits for its dial."""
        if self.sequences is not None and piece.exchange.is_ordered:
            for entry in piece.entries():
                self.sequences.setdefault(lane_key(piece.exchange, entry), set()).add(piece.exchange.sequence)

    def remove(self, piece: Piece) -> None:
        """A piece is answered, lost or withdrawn."""
        if self.sequences is None or not piece.exchange.is_ordered:
            return
        for entry in piece.entries():
            key = lane_key(piece.exchange, entry)
            sequences = self.sequences.get(key)
            if sequences is not None:
                sequences.discard(piece.exchange.sequence)
                if not sequences:
                    del self.sequences[key]

    def forget(self) -> None:
        """Nobody asks at the moment, or lanes are called something else by now."""
        self.sequences = None


def withdraw(upstreams: Iterable[Upstream], is_meant: Callable[[Piece], bool]) -> list[Piece]:
    """Take back pieces that no broker has seen."""
    return [
        ticket
        for upstream in upstreams
        for ticket in upstream.withdraw(lambda ticket: isinstance(ticket, Piece) and is_meant(ticket))
        if isinstance(ticket, Piece)
    ]

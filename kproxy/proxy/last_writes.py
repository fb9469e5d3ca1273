"""What a client connection that has ended had written for topics with a writer group, until brokers have answered it.

Before brokers without fences nobody may be granted what is written here while that may still be appended
(kproxy.fencing.settlement). The client's own connection is closed at once; what leads to the brokers stays for it.

Invariants
1. A partition is held from the step of the event loop in which its writer's connection ends: whoever is told that the
   connection has ended is told of this as well.
2. A piece is answered, or lost and then uncertain, before what it holds is let go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kproxy.fencing.settlement import Hold, Place, Settlement
from kproxy.proxy.pieces import Piece, PieceKeeper


def gated_partitions(piece: Piece, settlement: Settlement) -> list[Place]:
    """The partitions of a piece whose topics have a writer group."""
    partitions = map(piece.exchange.partition, piece.entries())
    return [(topic.decode(), index) for topic, index in partitions if topic in settlement.topics]


def note_lost(piece: Piece, settlement: Settlement) -> None:
    """A broker has got a piece, and its answer cannot come any more."""
    for partition in gated_partitions(piece, settlement):
        settlement.note_written_lost(*partition)


class LastWrites:
    """Stands between the brokers' answers and the `keeper` of the pieces they answer."""

    def __init__(self, settlement: Settlement, keeper: PieceKeeper) -> None:
        self._settlement = settlement
        self._keeper = keeper
        self._holds: dict[Piece, list[Hold]] = {}
        self._over = asyncio.Event()

    def hold(self, pieces: Iterable[Piece]) -> None:
        """These are written and not answered; of interest are those for topics with a writer group."""
        for piece in pieces:
            partitions = gated_partitions(piece, self._settlement)
            if partitions and piece not in self._holds:
                self._holds[piece] = [self._settlement.begin(*each) for each in partitions]
                piece.keeper = self

    async def settle(self, timeout_s: float) -> None:
        """Until all are answered or lost, or `hurry` is called."""
        if self._holds:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._over.wait()
            except TimeoutError:
                return

    def hurry(self) -> None:
        """Wait no longer; what is not answered stays unsettled for its time."""
        self._over.set()

    # As the keeper of pieces

    def sent(self, piece: Piece) -> None:
        self._keeper.sent(piece)

    def unconfirmed(self, piece: Piece) -> None:
        self._keeper.unconfirmed(piece)

    def answered(self, piece: Piece, frame: memoryview) -> None:
        try:
            self._keeper.answered(piece, frame)
        finally:
            self._let_go(piece)

    def fail_piece(self, piece: Piece, event: int) -> None:
        try:
            self._keeper.fail_piece(piece, event)
        finally:
            self._let_go(piece)

    def _let_go(self, piece: Piece) -> None:
        for hold in self._holds.pop(piece, ()):
            self._settlement.done(hold)
        if not self._holds:
            self._over.set()

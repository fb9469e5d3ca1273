"""What of one client connection waits its turn (kproxy.routing.lanes), and what an outcome means for that.

Invariants
1. What a lane lets go is not sent at once but at the end of the event (`take_released`): an answer, a lost connection
   or a deadline changes all lanes it concerns first.
2. What a lane gives up is answered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from codec.error_codes import NOT_LEADER_OR_FOLLOWER
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.lane_timer import LaneTimer
from kproxy.proxy.open_exchanges import OpenExchanges
from kproxy.proxy.pieces import Piece
from kproxy.routing.identity import lane_key
from kproxy.routing.lanes import Item, Lanes
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Entry


class Order:
    """The lanes of one client connection; `wake` is called when one of them may be due."""

    def __init__(self, context: ProxyContext, exchanges: OpenExchanges, wake: Callable[[], None]) -> None:
        self._exchanges = exchanges
        self.lanes = Lanes()
        self.timer = LaneTimer(context, self.lanes, wake)
        self._released: list[Item] = []

    def hold_back(self, exchange: Exchange) -> set[Entry]:
        """The entries that must wait, put into their lanes."""
        held: set[Entry] = set()
        for entry in exchange.open_entries():
            key = lane_key(exchange, entry)
            if key in self.lanes:
                self.lanes.hold(key, Item(exchange, entry, NOT_LEADER_OR_FOLLOWER))
                held.add(entry)
        return held

    def settle(self, exchange: Exchange, entry: Entry, *, appended: bool, given_up: bool = False) -> None:
        """Tell the lane, if there is one, of an outcome, and note what it lets go."""
        if self.lanes:
            key = lane_key(exchange, entry)
            release = self.lanes.settled(key, exchange.sequence, appended=appended, given_up=given_up)
            self._released += release.send
            self._exchanges.give_up(release.give_up)

    def settle_pieces(self, withdrawn: Iterable[Piece]) -> None:
        """The same for pieces that no broker gets."""
        for piece in withdrawn:
            for entry in piece.entries():
                self.settle(piece.exchange, entry, appended=False)

    def take_released(self) -> list[Item]:
        """What has been let go since the last call."""
        released, self._released = self._released, []
        return released

"""Forbid sends after the end of a client's connection, and hold the partitions of its last writes.

States of a client
  present   everything may be sent
  parted    it is gone: nothing more is sent for topics with a writer group, whatever the acks
  severed   its claims are, or may be, those of another client: nothing more is sent at all

Transitions
  present         -> parted    its connection ended, and a topic has a writer group
  present, parted -> severed   another client has its claims, or may have them

Invariants
1. If a broker may have seen a batch for a topic with a writer group, the batch is held from the client's end until it
   is answered or lost, and the topic's next writer waits for that. If brokers keep writer fences, it is noted as lost
   instead.
2. A piece is held once.
3. Once a client sends no more (`has_ended_sending`), its batches are not sent a second time, except with acks=0: the
   client may be gone, and send a batch again itself. A batch that no broker has received is still sent once, unless its
   dial takes long: the client may have closed only its sending side, and wait for the answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, auto
from typing import Final

from kproxy.routing.actions import Actions, Hold, NoteLost, View
from kproxy.routing.in_flight import Piece
from kproxy.routing.merge import Exchange, Partition
from kproxy.routing.split import Entry
from kproxy_codec.api_keys import PRODUCE


class ClientState(IntEnum):
    """See the module's docstring."""

    PRESENT = auto()
    PARTED = auto()
    SEVERED = auto()


_NEXT: Final[Mapping[ClientState, Sequence[ClientState]]] = {
    ClientState.PRESENT: (ClientState.PARTED, ClientState.SEVERED),
    ClientState.PARTED: (ClientState.SEVERED,),
    ClientState.SEVERED: (),
}


class ClientEnd:
    """The state of one client; actions go into `actions`."""

    __slots__ = ("_actions", "_state", "_view", "has_ended_sending")

    def __init__(self, view: View, actions: Actions) -> None:
        self._view = view
        self._actions = actions
        self._state = ClientState.PRESENT
        self.has_ended_sending = False

    def move(self, state: ClientState) -> None:
        """Change the state. Raises ValueError if there is no such transition."""
        if state not in _NEXT[self._state]:
            raise ValueError(f"a client cannot go from {self._state.name.lower()} to {state.name.lower()}")
        self._state = state

    def forbids(self, exchange: Exchange, entry: Entry) -> bool:
        """Whether this entry must no longer be sent."""
        if self._state is not ClientState.PARTED:
            return self._state is ClientState.SEVERED
        return exchange.api.api_key == PRODUCE and exchange.topic(entry).name in self._view.gated

    def forbids_again(self, exchange: Exchange) -> bool:
        """Whether this exchange must not be sent a second time."""
        return self.has_ended_sending and exchange.is_ordered and not exchange.is_silent

    def forbids_any_of(self, piece: Piece) -> bool:
        """Whether an entry of this piece must no longer be sent."""
        return any(self.forbids(piece.exchange, entry) for entry in piece.entries())

    def gated_partitions(self, piece: Piece) -> list[Partition]:
        """The partitions of a piece whose topics have a writer group."""
        gated = self._view.gated
        if not gated:
            return []
        partitions = map(piece.exchange.partition, piece.entries())
        return [partition for partition in partitions if partition[0] in gated]

    def hold(self, written: Iterable[Piece]) -> None:
        """Hold the partitions of written pieces for topics with a writer group."""
        for piece in written:
            partitions = self.gated_partitions(piece)
            if not partitions or piece.is_held:
                continue
            if self._view.fenced:
                # These connections end, and fences protect the partitions. Other processes may not know them yet.
                self._actions.add(NoteLost(partitions))
            else:
                piece.is_held = True
                self._actions.add(Hold(piece.number, partitions))

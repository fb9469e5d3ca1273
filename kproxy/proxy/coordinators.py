"""Which broker coordinates a transactional id or a group, as far as brokers have said.

Clients are told that the proxy is every coordinator. Who really is one is read from the brokers' answers to
FindCoordinator: clients ask it before anything else, and again when a broker says NOT_COORDINATOR, so that what is
remembered is put right by the very request with which a client tries to.

Invariant: at most MAX_REMEMBERED coordinators, of keys of at most MAX_KEY_LENGTH characters, are remembered.
"""

from __future__ import annotations

from typing import Final

from codec.control import Message
from codec.error_codes import NONE

MAX_REMEMBERED: Final = 10_000
MAX_KEY_LENGTH: Final = 1_000
# FindCoordinator's key types; version 0 knows groups alone.
GROUP: Final = 0
TRANSACTION: Final = 1
KEY_TYPES_FROM: Final = 1
# From this version FindCoordinator asks and answers for several keys at once (KIP-699).
BATCHED_FROM: Final = 4


class Coordinators:
    """The brokers that were last said to coordinate a key; those not used for longest are forgotten first."""

    def __init__(self) -> None:
        self._brokers: dict[tuple[int, str], int] = {}

    def get(self, key_type: int, key: str) -> int | None:
        broker = self._brokers.pop((key_type, key), None)
        if broker is not None:
            self._brokers[key_type, key] = broker
        return broker

    def remember(self, key_type: int, key: str, broker: int) -> None:
        if len(key) > MAX_KEY_LENGTH:
            return
        self._brokers.pop((key_type, key), None)
        self._brokers[key_type, key] = broker
        if len(self._brokers) > MAX_REMEMBERED:
            del self._brokers[next(iter(self._brokers))]

    def forget(self, key_type: int, key: str) -> None:
        self._brokers.pop((key_type, key), None)

    def take(self, request: Message, answer: Message) -> None:
        """Learn from a broker's answer to FindCoordinator, before the proxy is put into it."""
        batched = answer.version >= BATCHED_FROM
        for found in answer.coordinators if batched else [answer]:
            key = found.key if batched else request.key
            if found.error_code == NONE:
                self.remember(key_type_of(request), key, found.node_id)
            else:
                self.forget(key_type_of(request), key)


def key_type_of(request: Message) -> int:
    """What a FindCoordinator request asks for."""
    return int(request.key_type) if request.version >= KEY_TYPES_FROM else GROUP

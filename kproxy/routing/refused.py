"""Keep batches behind a refused batch from being sent before the client of a connection resends that one.

These are batches of idempotent producers. A client may have sent further batches before it learns that one was refused.
A broker without the producer's state, such as a new owner, would take the first of these for the producer's first, and
then refuse all earlier ones as out of order.

States of a lane
  (unknown)  none of its batches was refused, or its client has begun to send them again
  refused    the last batch refused since then is known

Transitions
  (unknown) -> refused    `note`
  refused   -> (unknown)  `arrived`: a batch up to the last one comes again, or one of another epoch

Invariants
1. A batch behind the last refused one is refused too, so that it is the last one then. If the client never resends the
   refused ones, it gets this error once for each batch, and the next one that comes again is sent.
2. At most MAX_LANES lanes are known, the latest ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

MAX_LANES: Final = 4_096
_MAX_SEQUENCE: Final = (1 << 31) - 1


class Place(NamedTuple):
    """The position of a batch among those of its producer."""

    producer_id: int
    producer_epoch: int
    base_sequence: int

    def is_behind(self, other: Place) -> bool:
        """Whether this batch follows the other in the same epoch; after 2^31-1 sequences restart at 0."""
        distance = (self.base_sequence - other.base_sequence) & _MAX_SEQUENCE
        return self[:2] == other[:2] and 0 < distance <= _MAX_SEQUENCE >> 1


class Refused:
    """The last refused batch, by lane; callers check the public `lanes` for any."""

    __slots__ = ("lanes",)

    def __init__(self) -> None:
        self.lanes: dict[Hashable, Place] = {}

    def note(self, key: Hashable, place: Place) -> None:
        """Note a batch that was refused with an error after which its client resends it."""
        last = self.lanes.pop(key, place)
        self.lanes[key] = last if last.is_behind(place) else place
        if len(self.lanes) > MAX_LANES:
            del self.lanes[next(iter(self.lanes))]

    def arrived(self, key: Hashable, place: Place) -> bool:
        """Note that a batch of a known lane has arrived; return whether it comes too early and must be refused."""
        if place.is_behind(self.lanes[key]):
            return True
        del self.lanes[key]
        return False

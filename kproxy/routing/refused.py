"""Track refused batches that one client connection will resend.

These are batches of idempotent producers. A broker refuses the batches behind such a batch with
OUT_OF_ORDER_SEQUENCE_NUMBER. That is not the later batch's own outcome, and producers overreact to it: librdkafka
begins a new epoch, in which it resends every unacknowledged batch of every partition, including those that an earlier
answer left in doubt. Batches that were appended are then duplicated.

States of a lane
  (unknown)  none of its batches was refused, or its client has begun to send them again
  refused    the first and the last batch refused since then are known

Transitions
  (unknown) -> refused    `note`
  refused   -> (unknown)  `arrived`: a batch up to the last one comes again, or one of another epoch

Invariants
1. A batch is misled if an earlier one of its epoch was refused and has not come again. So a batch that is still out of
   order when it comes again gets that error.
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
    """The first and the last refused batch, by lane; callers check the public `lanes` for any."""

    __slots__ = ("lanes",)

    def __init__(self) -> None:
        self.lanes: dict[Hashable, tuple[Place, Place]] = {}

    def note(self, key: Hashable, place: Place) -> None:
        """Note a batch that was refused with an error after which its client resends it."""
        first, last = self.lanes.pop(key, (place, place))
        if first[:2] != place[:2]:
            first = last = place
        self.lanes[key] = (place if first.is_behind(place) else first, place if place.is_behind(last) else last)
        if len(self.lanes) > MAX_LANES:
            del self.lanes[next(iter(self.lanes))]

    def arrived(self, key: Hashable, place: Place) -> None:
        """Note that a batch of a known lane has arrived from its client."""
        if not place.is_behind(self.lanes[key][1]):
            del self.lanes[key]

    def misleads(self, key: Hashable, place: Place) -> bool:
        """Whether a batch may be out of order because an earlier one was refused."""
        known = self.lanes.get(key)
        return known is not None and place.is_behind(known[0])

"""The batches of idempotent producers that one client connection was refused and is going to send again.

A broker refuses what follows such a batch with OUT_OF_ORDER_SEQUENCE_NUMBER. That is not the later batch's own outcome,
and producers take it for more than it is: librdkafka begins a new epoch, in which it sends again all that is not
acknowledged, of every partition, also what an earlier answer left in doubt; what was appended is there twice then.

States of a lane
  (unknown)  nothing of it was refused, or its client has begun to send that again
  refused    the first and the last batch are known that were refused since

Transitions
  (unknown) -> refused    `note`
  refused   -> (unknown)  `arrived`: a batch up to the last one comes again, or one of another epoch

Invariants
1. A batch is misled where one before it in the same epoch was refused and has not come again. So what is still out of
   order when it comes again is told so.
2. At most MAX_LANES lanes are known, the latest ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

MAX_LANES: Final = 4_096
_MAX_SEQUENCE: Final = (1 << 31) - 1


class Place(NamedTuple):
    """Where a batch stands among those of its producer."""

    producer_id: int
    producer_epoch: int
    base_sequence: int

    def is_behind(self, other: Place) -> bool:
        """Whether it follows the other, of the same epoch; sequences begin again at 0 behind 2^31-1."""
        distance = (self.base_sequence - other.base_sequence) & _MAX_SEQUENCE
        return self[:2] == other[:2] and 0 < distance <= _MAX_SEQUENCE >> 1


class Refused:
    """By lane the first and the last batch that were refused. `lanes` is for looking whether there are any."""

    def __init__(self) -> None:
        self.lanes: dict[Hashable, tuple[Place, Place]] = {}

    def note(self, key: Hashable, place: Place) -> None:
        """A batch was refused with an error upon which its client sends it again."""
        first, last = self.lanes.pop(key, (place, place))
        if first[:2] != place[:2]:
            first = last = place
        self.lanes[key] = (place if first.is_behind(place) else first, place if place.is_behind(last) else last)
        if len(self.lanes) > MAX_LANES:
            del self.lanes[next(iter(self.lanes))]

    def arrived(self, key: Hashable, place: Place) -> None:
        """A batch of a known lane has come from its client."""
        if not place.is_behind(self.lanes[key][1]):
            del self.lanes[key]

    def misleads(self, key: Hashable, place: Place) -> bool:
        """Whether a batch that is out of order may be so because one before it was refused."""
        known = self.lanes.get(key)
        return known is not None and place.is_behind(known[0])

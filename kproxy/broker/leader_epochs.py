"""Record which leader epoch wrote each part of a log (KIP-101), and compare leaderships.

Replicas use the epochs to find where their logs diverge.

State: entries (leader epoch, start offset), both rising. An epoch reaches from its start to the next entry's, the last
one to the log's end.

Invariants
1. No two entries have the same epoch or start offset: an epoch without records loses its entry once the next one begins
   at the same offset.
2. Only retention moves an entry: the first entry begins at the log's start.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from kproxy_codec.fetch import EpochEnd

NO_LEADER_EPOCH = -1
_NONE = EpochEnd(NO_LEADER_EPOCH, -1)


class Leadership(NamedTuple):
    """One broker's time as leader.

    Its leader epoch, and the create revision of the lease key that it held. They rise together, so either tells which
    leadership is newer. But after a restore from a snapshot etcd repeats revisions; so the epoch compares first,
    because the logs confirm it.
    """

    leader_epoch: int
    fencing_token: int


NO_LEADERSHIP = Leadership(NO_LEADER_EPOCH, 0)


class LeaderEpochs:
    """The leader epochs of one log."""

    def __init__(self) -> None:
        self._epochs: list[int] = []
        self._start_offsets: list[int] = []

    def entries(self) -> list[tuple[int, int]]:
        """Return (leader epoch, start offset), oldest first."""
        return list(zip(self._epochs, self._start_offsets, strict=True))

    @property
    def latest(self) -> int:
        """The last assigned epoch, or NO_LEADER_EPOCH."""
        last = self._epochs[-1:]  # In one step: another thread may read while this one truncates.
        return last[0] if last else NO_LEADER_EPOCH

    def assign(self, leader_epoch: int, start_offset: int) -> None:
        """Assign `leader_epoch` to all records from `start_offset` on.

        Has no effect if they have that epoch already. Epochs that began at or above `start_offset` wrote no records and
        are forgotten. Raises ValueError if the epoch is lower than one with records: no leader's log has that.
        """
        if self._epochs and self._epochs[-1] == leader_epoch and self._start_offsets[-1] <= start_offset:
            return
        self.truncate_from_end(start_offset)
        if self.latest > leader_epoch:
            raise ValueError(f"leader epoch {leader_epoch} at offset {start_offset} is lower than {self.latest}")
        if self.latest < leader_epoch:
            self._epochs.append(leader_epoch)
            self._start_offsets.append(start_offset)

    def epoch_at(self, offset: int) -> int:
        """Return the epoch of `offset`; NO_LEADER_EPOCH below the first entry."""
        entry = bisect_right(self._start_offsets, offset) - 1
        return self._epochs[entry] if entry >= 0 else NO_LEADER_EPOCH

    def end_offset_for(self, leader_epoch: int, log_end_offset: int) -> EpochEnd:
        """Return the largest known epoch not above `leader_epoch`, and its end.

        The end is the offset after it (KIP-279); -1 and -1 if there is none.
        """
        entry = bisect_right(self._epochs, leader_epoch) - 1
        if entry < 0:
            return _NONE
        following = entry + 1
        end_offset = self._start_offsets[following] if following < len(self._epochs) else log_end_offset
        return EpochEnd(self._epochs[entry], end_offset)

    def truncate_from_end(self, offset: int) -> None:
        """Forget epochs that begin at or above `offset`, the new end of the log."""
        while self._start_offsets and self._start_offsets[-1] >= offset:
            self._epochs.pop()
            self._start_offsets.pop()

    def truncate_from_start(self, offset: int) -> None:
        """Forget epochs that end at or below `offset`, the new start of the log."""
        first = bisect_right(self._start_offsets, offset) - 1
        if first >= 0:
            del self._epochs[:first]
            del self._start_offsets[:first]
            self._start_offsets[0] = offset

"""Bringing a log in line after its leader changed: the StreamBus text's reconciliation, with one correction.

The text truncates a new leader's and each follower's log to its own high watermark. A follower learns the high
watermark one fetch late, so that rule throws away records that were acknowledged with acks=all (KIP-101). Here a new
leader keeps all it has and begins its epoch at its log's end, and a follower truncates to where leader epochs show that
its log leaves the leader's (KIP-101, KIP-279).

Invariants
1. 0 <= high watermark <= log end offset, on every replica, at all times.
2. A log is never cut below its replica's high watermark: what stands there is committed. A leader that asks for it does
   not hold what was committed, and must not be followed.
"""

from __future__ import annotations

from kproxy.broker.log import Log
from kproxy_codec.fetch import EpochEnd


class Inconsistent(Exception):
    """A log and its high watermark contradict each other, or the leader's log lacks what is committed here."""


class Reconciliation:
    """What a replica does with its log when leadership changes. Without state: one instance serves every partition."""

    def reconcile_as_new_leader(self, log: Log, high_watermark: int, leader_epoch: int) -> int:
        """The offset at which the new epoch begins: the log's end, whatever the high watermark is."""
        log.leader_epochs.assign(leader_epoch, log.log_end_offset)
        return log.log_end_offset

    def reconcile_as_new_follower(self, log: Log, high_watermark: int) -> None:
        """Nothing to do until the leader has told where the logs part."""

    def reconcile_as_follower(self, log: Log, high_watermark: int, leader_end: EpochEnd) -> None:
        """Cut the log off where it leaves the leader's. Raises Inconsistent, OSError, LogFailed."""
        reset_to_offset(log, high_watermark, divergence_point(log, leader_end))


def divergence_point(log: Log, leader_end: EpochEnd) -> int:
    """The first offset at which `log` may differ from the leader's, which has `leader_end` for our last epoch.

    The leader named the largest of its epochs that is not above ours, and where that one ends. Of an epoch that both
    know, the shorter log's end is where they part; where we lack it, our next older epoch's end is (KIP-279).
    """
    own_end = log.leader_epochs.end_offset_for(leader_end.leader_epoch, log.log_end_offset)
    if own_end.leader_epoch < 0:
        return log.log_start_offset
    return min(own_end.end_offset, leader_end.end_offset, log.log_end_offset)


def leader_end_for(log: Log, leader_epoch: int) -> EpochEnd:
    """What a leader tells a follower whose last record is of `leader_epoch`; where even its oldest epoch is newer, the
    logs have nothing below its start in common."""
    end = log.leader_epochs.end_offset_for(leader_epoch, log.log_end_offset)
    return end if end.leader_epoch >= 0 else EpochEnd(leader_epoch, log.log_start_offset)


def reset_to_offset(log: Log, high_watermark: int, offset: int) -> None:
    """Cut `log` off at `offset`. Raises Inconsistent where that is below the high watermark, OSError, LogFailed."""
    if offset < high_watermark:
        raise Inconsistent(
            f"the leader's log leaves this one at offset {offset}, below the high watermark {high_watermark}: "
            f"records that were acknowledged are not there"
        )
    # Also at the log's very end: an epoch that was begun there and wrote nothing is none to go by.
    log.truncate_to(offset)


def validate_consistency(log: Log, high_watermark: int) -> None:
    """Raises Inconsistent unless 0 <= high watermark <= log end offset."""
    if not 0 <= high_watermark <= log.log_end_offset:
        raise Inconsistent(f"high watermark {high_watermark} outside of 0 to the log's end {log.log_end_offset}")

"""Reconcile a log after its leader changed.

This is the StreamBus text's rule, with one correction.

The text truncates a new leader's and each follower's log to its own high watermark. A follower learns the high
watermark one fetch late, so that rule loses records that were acknowledged with acks=all (KIP-101). Here a new leader
keeps its whole log and begins its epoch at the log's end, and a follower truncates to where leader epochs show that its
log diverges from the leader's (KIP-101, KIP-279).

Invariants
1. 0 <= high watermark <= log end offset, on every replica, at all times.
2. A log is never cut off below its replica's high watermark: those records are committed. A leader that asks for it
   lacks committed records and must not be followed.
"""

from __future__ import annotations

from kproxy.broker.log import Log
from kproxy_codec.fetch import EpochEnd


class Inconsistent(Exception):
    """A log and its high watermark contradict each other, or the leader's log lacks records committed here."""


class Reconciliation:
    """Changes a replica's log when leadership changes. Stateless."""

    def reconcile_as_new_leader(self, log: Log, high_watermark: int, leader_epoch: int) -> int:
        """Return the offset at which the new epoch begins: the log's end, whatever the high watermark is."""
        log.leader_epochs.assign(leader_epoch, log.log_end_offset)
        return log.log_end_offset

    def reconcile_as_new_follower(self, log: Log, high_watermark: int) -> None:
        """Do nothing until the leader has said where the logs diverge."""

    def reconcile_as_follower(self, log: Log, high_watermark: int, leader_end: EpochEnd) -> None:
        """Cut the log off where it diverges from the leader's. Raises Inconsistent, OSError, LogFailed."""
        reset_to_offset(log, high_watermark, divergence_point(log, leader_end))


def divergence_point(log: Log, leader_end: EpochEnd) -> int:
    """Return the first offset at which `log` may differ from the leader's.

    `leader_end` is the leader's answer for our last epoch: the largest of its epochs not above ours, and its end. Of an
    epoch that both have, the logs diverge at the shorter one's end; of one that we lack, at the end of our next older
    epoch (KIP-279).
    """
    own_end = log.leader_epochs.end_offset_for(leader_end.leader_epoch, log.log_end_offset)
    if own_end.leader_epoch < 0:
        return log.log_start_offset
    return min(own_end.end_offset, leader_end.end_offset, log.log_end_offset)


def leader_end_for(log: Log, leader_epoch: int) -> EpochEnd:
    """Return a leader's answer to a follower that ends in `leader_epoch`.

    If even the leader's oldest epoch is newer, the logs have nothing below its start in common.
    """
    end = log.leader_epochs.end_offset_for(leader_epoch, log.log_end_offset)
    return end if end.leader_epoch >= 0 else EpochEnd(leader_epoch, log.log_start_offset)


def reset_to_offset(log: Log, high_watermark: int, offset: int) -> None:
    """Cut `log` off at `offset`. Raises Inconsistent if that is below the high watermark, OSError, LogFailed."""
    if offset < high_watermark:
        raise Inconsistent(
            f"the leader's log leaves this one at offset {offset}, below the high watermark {high_watermark}: "
            f"records that were acknowledged are not there"
        )
    # Also at the log's very end: an epoch that was begun there and wrote nothing must not count.
    log.truncate_to(offset)


def validate_consistency(log: Log, high_watermark: int) -> None:
    """Raise Inconsistent unless 0 <= high watermark <= log end offset."""
    if not 0 <= high_watermark <= log.log_end_offset:
        raise Inconsistent(f"high watermark {high_watermark} outside of 0 to the log's end {log.log_end_offset}")

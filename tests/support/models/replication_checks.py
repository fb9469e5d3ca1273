"""Judge whether a replicated partition keeps its promises under any faults of its brokers (for `replication_model`).

The judge sees the answers to producers, the records that consumers read, and every replica's log. It checks these
rules, each with the name that a Violation carries:

  LOST         a batch acknowledged with acks=all, or read by a consumer, is in every later leader's log, at its offset,
               until retention removes it; the same holds on every replica that etcd counts as in sync
  MOVED        no offset is assigned to two records of which one was acknowledged or read
  DIVERGED     below its high watermark a replica has the same batches as all the others
  BACKWARDS    a replica's high watermark never moves back while it is open, and is never above its log's end
  TWO_LEADERS  at most one broker leads with a fence that lives
  ZOMBIE       no broker acknowledges or serves once its fence is dead
  DOUBLED      no batch of an idempotent producer is twice in a leader's log
  WENT_BACK    no consumer is sent back: neither by an offset out of range, nor by a smaller "latest"
  GAVE_WAY     a batch acknowledged with acks=1 is in every later leader's log, at its offset, as long as no broker dies
               or loses its lease: an orderly stop or a hand-over loses nothing
  USURPED      no broker that holds its lease finds its key in etcd on another one
  LINGERS      a broker that has gone, or does not fetch, leaves the ISR in time, if its leader is well
  FENCED       in no log a batch follows one with a higher fence; no batch is acknowledged that was sent after a higher
               fence was granted, or released; an unbound connection writes only after a release
  STUCK        once all faults have ended there is a leader, all replicas are in sync and equal, and producers succeed
  CRASHED      product code raised where it should not
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import NamedTuple, NoReturn

from kproxy_codec.record_batch import HEADER_BYTES, parse_header


class Rule(Enum):
    LOST = "what was committed is lost"
    MOVED = "an offset was given twice"
    DIVERGED = "replicas differ below the high watermark"
    BACKWARDS = "the high watermark moved back or passed the log's end"
    TWO_LEADERS = "two leaders at once"
    ZOMBIE = "a broker acted behind a dead fence"
    DOUBLED = "a resend was appended a second time"
    WENT_BACK = "a consumer was sent back"
    GAVE_WAY = "a move in good order lost what acks=1 acknowledged"
    USURPED = "a broker's key was taken from it"
    LINGERS = "the ISR keeps who is gone"
    FENCED = "a writer got through behind its successor"
    STUCK = "the partition does not recover"
    CRASHED = "product code failed"


class Violation(AssertionError):
    """A broken rule."""

    def __init__(self, rule: Rule, what: str) -> None:
        super().__init__(f"{rule.value}: {what}")
        self.rule = rule


class Stored(NamedTuple):
    """A batch in a log. `identity` is its CRC, which covers producer, sequence and values but not its position."""

    base_offset: int
    last_offset: int
    leader_epoch: int
    identity: int
    producer_id: int
    base_sequence: int


class Replica(NamedTuple):
    """One replica's log as it is now, open or not."""

    node_id: int
    log_start_offset: int
    log_end_offset: int
    batches: dict[int, Stored]


def replica_at(node_id: int, directory: Path) -> Replica:
    """A broker's log as its files have it, whatever state the broker is in."""
    data, start, end = b"", 0, 0
    batches: dict[int, Stored] = {}
    # Not with pathlib, which is slow: this runs for every broker after every step.
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".log"))  # noqa: PTH208
    except FileNotFoundError:
        names = []
    for number, name in enumerate(names):
        end = int(name[:20])
        start = end if number == 0 else start
        with open(f"{directory}/{name}", "rb", 0) as file:  # noqa: PTH123
            data = file.read()
        position = 0
        while len(data) - position >= HEADER_BYTES:
            batch = parse_header(data, position)
            if batch.end > len(data):
                break
            end = batch.last_offset + 1
            position = batch.end
            batches[batch.base_offset] = Stored(
                batch.base_offset,
                batch.last_offset,
                batch.partition_leader_epoch,
                batch.crc,
                batch.producer_id,
                batch.base_sequence,
            )
    return Replica(node_id, start, end, batches)


class Judge:
    """Remembers promises, and compares. `names` gives a batch's value by its identity, for messages."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        # By base offset: identity of the batch acknowledged with acks=all or read, and which of the two.
        self.promised: dict[int, tuple[int, str]] = {}
        # By base offset: identity of the batch below some replica's high watermark.
        self.committed: dict[int, Stored] = {}
        # By base offset: identity of the batch acknowledged with acks=1 since a broker was last lost.
        self.given_way: dict[int, int] = {}
        # According to a leader, retention has removed the batches below this offset.
        self.removed_below = 0
        # By identity: the fence of a batch, and the highest fence granted by then.
        self._fences: dict[int, int] = {}
        self._granted_before: dict[int, int] = {}
        self._granted = 0
        self._released = 0
        self._high_watermarks: dict[object, int] = {}

    def violated(self, rule: Rule, what: str) -> NoReturn:
        raise Violation(rule, what)

    def name(self, identity: int) -> str:
        return self.names.get(identity, f"crc {identity:08x}")

    # Promises

    def acknowledged(self, identity: int, base_offset: int) -> None:
        """A producer got this offset with acks=all."""
        self._promise(identity, base_offset, "acknowledged")

    def read(self, identity: int, base_offset: int) -> None:
        """A consumer got this batch."""
        self._promise(identity, base_offset, "read")

    def acknowledged_alone(self, identity: int, base_offset: int) -> None:
        """A producer got this offset with acks=1."""
        self.given_way[base_offset] = identity

    def broker_lost(self) -> None:
        """A broker has died, or lost its lease or its log: batches acknowledged with acks=1 may be lost with it."""
        self.given_way.clear()

    def _promise(self, identity: int, base_offset: int, how: str) -> None:
        known = self.promised.setdefault(base_offset, (identity, how))
        if known[0] != identity:
            was = f"{self.name(known[0])} was {known[1]} at offset {base_offset}"
            self.violated(Rule.MOVED, f"{was}, and now {self.name(identity)} is {how} there")

    # The present state

    def high_watermark(self, incarnation: object, label: str, high_watermark: int, log_end_offset: int) -> None:
        """An open replica's high watermark; `incarnation` is a hashable value for the time that it is open."""
        before = self._high_watermarks.get(incarnation, 0)
        if high_watermark < before:
            self.violated(Rule.BACKWARDS, f"{label}: from {before} to {high_watermark}")
        if high_watermark > log_end_offset:
            self.violated(Rule.BACKWARDS, f"{label}: {high_watermark} is above the log's end {log_end_offset}")
        self._high_watermarks[incarnation] = high_watermark

    def replica_is_like_others(self, replica: Replica, high_watermark: int) -> None:
        for offset, batch in replica.batches.items():
            if batch.last_offset >= high_watermark:
                continue
            known = self.committed.setdefault(offset, batch)
            if known != batch:
                theirs, ours = self.name(known.identity), self.name(batch.identity)
                self.violated(
                    Rule.DIVERGED,
                    f"broker {replica.node_id} has {ours} at offset {offset} below its high watermark "
                    f"{high_watermark}, others have {theirs} there ({batch} and {known})",
                )

    def holds_what_was_promised(self, replica: Replica, role: str) -> None:
        """Check leaders, and brokers that may be elected."""
        for offset, (identity, how) in self.promised.items():
            if offset < self.removed_below:
                continue
            found = replica.batches.get(offset)
            if found is None or found.identity != identity:
                there = self.name(found.identity) if found is not None else "nothing"
                self.violated(
                    Rule.LOST,
                    f"{self.name(identity)} was {how} at offset {offset}; broker {replica.node_id}, {role}, has "
                    f"{there} there (log from {replica.log_start_offset} to {replica.log_end_offset})",
                )

    def holds_what_is_committed(self, replica: Replica) -> None:
        """Check that replicas that are in sync in etcd have the batches below any replica's high watermark."""
        for offset, batch in self.committed.items():
            if offset >= self.removed_below and replica.batches.get(offset) != batch:
                self.violated(
                    Rule.LOST,
                    f"broker {replica.node_id} is in sync as etcd has it, and lacks {self.name(batch.identity)} at "
                    f"offset {offset}, which is below a high watermark "
                    f"(log from {replica.log_start_offset} to {replica.log_end_offset})",
                )

    def holds_what_gave_way(self, replica: Replica) -> None:
        """Check leaders for batches acknowledged with acks=1."""
        for offset, identity in self.given_way.items():
            found = replica.batches.get(offset)
            if offset >= self.removed_below and (found is None or found.identity != identity):
                self.violated(
                    Rule.GAVE_WAY,
                    f"{self.name(identity)} was acknowledged with acks=1 at offset {offset}; broker {replica.node_id}, "
                    f"the leader, lacks it (log from {replica.log_start_offset} to {replica.log_end_offset})",
                )

    def has_no_doubles(self, replica: Replica) -> None:
        seen: dict[tuple[int, int], int] = {}
        for offset, batch in replica.batches.items():
            if batch.producer_id < 0:
                continue
            first = seen.setdefault((batch.producer_id, batch.base_sequence), offset)
            if first != offset:
                name = self.name(batch.identity)
                self.violated(Rule.DOUBLED, f"broker {replica.node_id} has {name} at offsets {first} and {offset}")

    # Writers' fences

    def sent_behind(self, identity: int, fence: int) -> None:
        """A batch is sent with a fence, 0 for none."""
        self._fences[identity] = fence
        self._granted_before[identity] = self._granted

    def granted(self, fence: int) -> None:
        """A claimant learns that only it may write, or that earlier claimants may not."""
        self._granted = max(self._granted, fence)

    def released(self, fence: int) -> None:
        """All fences granted below this one are given up, even if no client knows it."""
        self._released = max(self._released, fence)

    def let_through(self, identity: int) -> None:
        """A batch was acknowledged."""
        self._may_stand_behind(identity, self._granted_before[identity], "is acknowledged, and was sent after")

    def fences_rise(self, replica: Replica) -> None:
        if not self._granted:
            return
        highest = 0
        for batch in replica.batches.values():
            self._may_stand_behind(batch.identity, highest, f"stands on broker {replica.node_id} behind")
            highest = max(highest, self._fences.get(batch.identity, 0))

    def _may_stand_behind(self, identity: int, highest: int, how: str) -> None:
        fence = self._fences.get(identity, 0)
        if fence < highest and (fence or highest > self._released):
            self.violated(Rule.FENCED, f"{self.name(identity)} of fence {fence} {how} one of fence {highest}")

    def leaders(self, leaders: Iterable[str]) -> None:
        """Check that at most one of the given brokers leads now, with a live fence."""
        found = list(leaders)
        if len(found) > 1:
            self.violated(Rule.TWO_LEADERS, " and ".join(found))

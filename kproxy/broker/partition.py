"""One partition that this broker leads: its log, who may write to it, and who waits for it.

States
  leader    `append_as_leader` and reads are served while the fence lives
  resigned  the broker is stopping: reads go on, writes are refused
  closed    ownership is lost or given up; the log is closed, everything is refused

Transitions
  leader -> resigned   `resign`
  any    -> closed     `close`; there is no way back, a later take-over opens the log anew

Invariants
1. A batch is in the log and answered only if the fence lived before the write and after it. Where it died in between,
   the write is taken back, in the same step of the event loop, before anybody could have read it.
2. `high_watermark` never moves back and never passes the log's end. With one replica they are the same.
3. Producer state is updated only by batches that stand in the log.
4. An offset is given out once: `append_as_leader` runs on one event loop and never awaits.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

import structlog

from codec import error_codes
from codec.record_batch import RecordBatch, assign_offsets
from kproxy.broker.log import Log
from kproxy.broker.producer_state import Verdict
from kproxy.broker.segment import LogFailed, TimestampAndOffset

_logger = structlog.get_logger(__name__)


class Fence(Protocol):
    """Tells whether the lease that ownership rests on is certain to live."""

    def is_live(self) -> bool: ...


class Role(Enum):
    LEADER = "leader"
    RESIGNED = "resigned"
    CLOSED = "closed"


class AppendResult(NamedTuple):
    """`base_offset` is -1 where nothing was appended."""

    error_code: int
    base_offset: int = -1
    error_message: str | None = None


class ReadResult(NamedTuple):
    """Record batches, the last of which may be cut short."""

    error_code: int
    records: bytes = b""


_JUDGED = {
    Verdict.OUT_OF_ORDER: error_codes.OUT_OF_ORDER_SEQUENCE_NUMBER,
    Verdict.FENCED: error_codes.INVALID_PRODUCER_EPOCH,
}
_NOT_LEADER = AppendResult(error_codes.NOT_LEADER_OR_FOLLOWER)


class Partition:
    """A led partition. `fencing_token` is the create revision of the lease key it rests on."""

    def __init__(
        self,
        topic: str,
        partition_index: int,
        topic_id: uuid.UUID,
        log: Log,
        *,
        leader_epoch: int,
        fencing_token: int,
        fence: Fence,
    ) -> None:
        self.topic = topic
        self.partition_index = partition_index
        self.topic_id = topic_id
        self.leader_epoch = leader_epoch
        self.fencing_token = fencing_token
        self.role = Role.LEADER
        self.high_watermark = log.log_end_offset
        self._log = log
        self._fence = fence
        self._waiters: set[Callable[[], None]] = set()

    @property
    def log_start_offset(self) -> int:
        return self._log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        return self._log.log_end_offset

    def serves_reads(self) -> bool:
        return self.role is not Role.CLOSED and self._fence.is_live()

    def append_as_leader(self, records: memoryview, batch: RecordBatch) -> AppendResult:
        """Append one batch that has been checked; its offset and leader epoch are written into `records`.

        6 means that nothing was appended. 7 where a write that must not count could not be taken back.
        """
        if self.role is not Role.LEADER or not self._fence.is_live():
            return _NOT_LEADER
        judgement = self._log.producers.judge(batch)
        if judgement.verdict is Verdict.DUPLICATE:
            return AppendResult(error_codes.NONE, judgement.base_offset)
        if judgement.verdict is not Verdict.ACCEPTED:
            return AppendResult(_JUDGED[judgement.verdict], -1, judgement.detail)
        base_offset = self._log.log_end_offset
        assign_offsets(records, batch, base_offset, self.leader_epoch)
        try:
            self._log.append(records, batch)
        except (OSError, LogFailed) as error:
            _logger.error("append failed", topic=self.topic, partition=self.partition_index, error=str(error))
            return AppendResult(error_codes.KAFKA_STORAGE_ERROR, -1, str(error))
        if not self._fence.is_live():
            return self._take_back()
        self._log.producers.update(batch, base_offset)
        self.high_watermark = self._log.log_end_offset
        if self._waiters:
            self._wake()
        return AppendResult(error_codes.NONE, base_offset)

    def _take_back(self) -> AppendResult:
        try:
            self._log.undo_append()
        except LogFailed as error:
            _logger.error("undo failed", topic=self.topic, partition=self.partition_index, error=str(error))
            return AppendResult(error_codes.REQUEST_TIMED_OUT)
        return _NOT_LEADER

    def read(self, offset: int, max_bytes: int) -> ReadResult:
        """Batches from `offset` on, below the high watermark: the first whole, at most `max_bytes` otherwise."""
        if not self.log_start_offset <= offset <= self.high_watermark:
            return ReadResult(error_codes.OFFSET_OUT_OF_RANGE)
        if offset == self.high_watermark:
            return ReadResult(error_codes.NONE)
        try:
            return ReadResult(error_codes.NONE, self._log.read(offset, max_bytes))
        except (OSError, LogFailed) as error:
            _logger.error("read failed", topic=self.topic, partition=self.partition_index, error=str(error))
            return ReadResult(error_codes.KAFKA_STORAGE_ERROR)

    def find_timestamp(self, timestamp: int) -> TimestampAndOffset | None:
        """As `Log.find_timestamp`. Raises OSError, LogFailed."""
        return self._log.find_timestamp(timestamp)

    def max_timestamp(self) -> TimestampAndOffset:
        """As `Log.max_timestamp`."""
        return self._log.max_timestamp()

    def check_leader_epoch(self, current_leader_epoch: int) -> int:
        """The error code for a request that believes in `current_leader_epoch`; -1 believes nothing (KIP-320)."""
        if current_leader_epoch in (-1, self.leader_epoch):
            return error_codes.NONE
        if current_leader_epoch < self.leader_epoch:
            return error_codes.FENCED_LEADER_EPOCH
        return error_codes.UNKNOWN_LEADER_EPOCH

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, at the next append or when the partition closes."""
        self._waiters.add(wake)

    def remove_waiter(self, wake: Callable[[], None]) -> None:
        self._waiters.discard(wake)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for wake in waiters:
            wake()

    def resign(self) -> None:
        """Refuse writes from now on, and let nobody wait for more."""
        if self.role is Role.LEADER:
            self.role = Role.RESIGNED
            self._wake()

    def flush(self) -> None:
        """Bring the log to the disk; blocks. Raises OSError, LogFailed."""
        self._log.flush()

    def close(self) -> None:
        """Refuse everything from now on and let go of the log. May be called twice."""
        self.role = Role.CLOSED
        self._log.close()
        self._wake()

"""Run one replica of a partition: append and read as leader, copy as follower, and wake the requests that wait.

`replication.partition_replication` decides about roles and the high watermark; this module applies that to the log,
under the fence of the broker's lease.

Invariants
1. A batch is in a leader's log and acknowledged only if the fence was live before the write and after it. If it died in
   between, the write is undone in the same step of the event loop, before it can be read.
2. A leader serves neither clients nor followers unless the fence is certain to live.
3. Producer state is updated only by batches that are in the log.
4. An offset is assigned once: `append_as_leader` runs on one event loop and never awaits.
5. Apart from retention, a follower's log changes only by the answer to its last request, from the leader and in the
   epoch that it follows; any other answer is late and dropped.
6. A replica obeys no leadership older than its newest. `log_maintenance` writes the newest beside the log, soon but not
   at once: the disk would be too slow when a broker fails and many partitions move.
7. A writer that the partition's fence refuses (`writer_fence`) appends no batch, and gets an error even for a
   duplicate.
8. A follower whose leader lacks records that are committed here stops for good; `failure` says why.
9. With `--flush always` a record on a replica is not acknowledged to a producer, not counted in a leader's high
   watermark and not confirmed by a follower's next fetch before it is on that disk. A thread of LogFlusher waits.
10. A replica at rest (`is_at_rest`) has nothing to flush or to write beside its log, and no trouble with its disk. Any
    change ends this state. So thousands of idle replicas need no checks every second.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from typing import NamedTuple

import structlog

from kproxy.broker.config import LogOptions
from kproxy.broker.keys import ReplicaKey, node_ids
from kproxy.broker.leader_epochs import NO_LEADERSHIP, Leadership
from kproxy.broker.log import Log
from kproxy.broker.log_flusher import LogFlusher
from kproxy.broker.producer_state import BatchVerdict
from kproxy.broker.replication.partition_replication import MAX_WAITER_AGE_S, NO_LEADER, Isr, ReplicationManager, Role
from kproxy.broker.segment import LogFailed, TimestampAndOffset
from kproxy.broker.validation import ReplicatedBatchInvalid
from kproxy.broker.writer_fence import UNBOUND, KeptFence, WriterFence
from kproxy.etcd.lease import Clock, LeaseFence, lease_clock
from kproxy_codec import error_codes
from kproxy_codec.fetch import EpochEnd, PartitionFetch, PartitionFetched
from kproxy_codec.partitioned import TOPIC_ID_BYTES
from kproxy_codec.record_batch import RecordBatch, assign_offsets

MAX_REPLICA_FETCH_BYTES = 1 << 20
NO_EPOCH = -1
_logger = structlog.get_logger(__name__)


class AppendResult(NamedTuple):
    """`base_offset` is -1 after an error, the earlier batch's for a duplicate; the answer waits for `last_offset`."""

    error_code: int
    base_offset: int = -1
    error_message: str | None = None
    last_offset: int = -1


class ReadResult(NamedTuple):
    """Record batches, the last one perhaps partial."""

    error_code: int
    records: bytes = b""


class Unreadable(NamedTuple):
    """A read that failed."""

    offset: int
    max_bytes: int


class DiskTrouble(NamedTuple):
    """The fault of a replica's disk; `flush` is the number of a running flush."""

    reason: str
    flush: int = 0


class ReplicaSettings(NamedTuple):
    """The settings of a replica, in seconds.

    `log_options` None: the defaults. `flush_threads` None: the event loop's own.
    """

    node_id: int
    clock: Clock
    isr_lag_s: float = 10.0
    min_insync_replicas: int = 1
    log_options: LogOptions | None = None
    flush_threads: Executor | None = None


_JUDGED = {
    BatchVerdict.OUT_OF_ORDER: error_codes.OUT_OF_ORDER_SEQUENCE_NUMBER,
    BatchVerdict.FENCED: error_codes.INVALID_PRODUCER_EPOCH,
}
_NOT_LEADER = AppendResult(error_codes.NOT_LEADER_OR_FOLLOWER)
ACKS_ALL = -1


# A follower's fence: never renewed, and so never live.
_NO_FENCE = LeaseFence(0, lease_clock)


class Partition:
    """A hosted replica, at first without a leader. `leadership` is the newest obeyed one."""

    def __init__(
        self,
        topic: str,
        partition_index: int,
        topic_id: uuid.UUID,
        log: Log,
        settings: ReplicaSettings,
        log_id: uuid.UUID,
        *,
        obeyed: Leadership = NO_LEADERSHIP,
        unreadable: Unreadable | None = None,
        reconciliation: Reconciliation | None = None,
    ) -> None:
        """`log_id` names the contents of the disk.

        `obeyed` is a leadership that was obeyed before and may not be on the disk, `unreadable` a read that failed
        before.
        """
        self.topic = topic
        self.partition_index = partition_index
        self.topic_id = topic_id
        self.leadership = max(log.leadership, obeyed)
        self.failure = ""
        self.is_at_rest = False
        self.log = log
        # The last write error, as logged; empty after a success.
        self._logged_error: dict[str, object] = {}
        self._write_fails = False
        self.unreadable = unreadable
        self._fence = _NO_FENCE
        self.writers = WriterFence()
        self._reconciliation = reconciliation or Reconciliation()
        self._append_waiters: set[Callable[[], None]] = set()
        self._high_watermark_waiters: set[Callable[[], None]] = set()
        self.replica = ReplicaKey(settings.node_id, log_id)
        self.replication = ReplicationManager(
            self.replica,
            high_watermark=min(max(log.high_watermark_checkpoint, log.log_start_offset), log.log_end_offset),
            log_end=lambda: log.log_end_offset,
            counted_end=lambda: log.counted_end_offset,
            on_high_watermark=self._on_high_watermark,
            min_insync_replicas=settings.min_insync_replicas,
            isr_lag_s=settings.isr_lag_s,
            clock=settings.clock,
        )
        self._flusher = LogFlusher(log, settings.flush_threads, self.replication.log_appended)

    @property
    def role(self) -> Role:
        return self.replication.role

    @property
    def leader_id(self) -> int:
        return self.replication.leader_id

    @property
    def leader_epoch(self) -> int:
        return self.replication.leader_epoch

    @property
    def high_watermark(self) -> int:
        return self.replication.high_watermark

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        return self.log.log_end_offset

    # Roles

    def become_leader(
        self, leadership: Leadership, replicas: Collection[int], isr: Isr, fence: LeaseFence, writers: KeptFence
    ) -> None:
        """Lead as long as `fence` lives; `writers` is the writers' fence in etcd.

        Raises WrongRole, Inconsistent, OSError, LogFailed.
        """
        self.replication.check_follows()
        validate_consistency(self.log, self.high_watermark)
        leader_epoch = leadership.leader_epoch
        start = self._reconciliation.reconcile_as_new_leader(self.log, self.high_watermark, leader_epoch)
        self.leadership, self.is_at_rest = leadership, False
        self._fence = fence
        self.writers = WriterFence(writers)
        self.replication.become_leader(leader_epoch, start, replicas, isr)

    def become_follower(self, leader_id: int, leadership: Leadership) -> None:
        """Follow that broker. Raises WrongRole, OSError, LogFailed."""
        self.replication.check_follows()
        leader_epoch = leadership.leader_epoch
        if (leader_id, leader_epoch) == (self.leader_id, self.leader_epoch):
            return
        if leadership < self.leadership:
            _logger.error(
                "older leader refused",
                **self.log_fields,
                leader_id=leader_id,
                leadership=leadership,
                obeyed=self.leadership,
            )
            self.follow_nobody()
            return
        self.leadership, self.is_at_rest = leadership, False
        self._reconciliation.reconcile_as_new_follower(self.log, self.high_watermark)
        self.replication.become_follower(leader_id, leader_epoch)

    def follow_nobody(self) -> None:
        """Follow no broker: there is no known leader."""
        if self.role is Role.FOLLOWER:
            self.replication.become_follower(NO_LEADER, self.leader_epoch)

    def resign(self) -> None:
        """Refuse writes, and wake waiting reads."""
        self.replication.resign()
        self._wake(self._high_watermark_waiters)

    def close(self) -> None:
        """Refuse all requests and close the log. May be called twice."""
        self.replication.close()
        self._fence = _NO_FENCE
        self.log.close()
        self._flusher.close()
        self._wake(self._high_watermark_waiters)
        self._wake(self._append_waiters)

    # As leader: writes

    def takes_writes(self) -> bool:
        """Return whether this broker leads for certain and has not resigned."""
        return self.role is Role.LEADER and self._fence.is_live()

    def refusal_of_writer(self, bound: int) -> AppendResult | None:
        """Return the error for a writer bound to `bound` that the partition's fence refuses; None if it does not."""
        reason = self.writers.refusal(bound)
        if reason is None:
            return None
        message = f"{self.topic}-{self.partition_index}: {reason}"
        is_early = self.writers.is_above(bound)
        return AppendResult(error_codes.LEADER_NOT_AVAILABLE if is_early else error_codes.POLICY_VIOLATION, -1, message)

    def append_as_leader(
        self, records: memoryview, batch: RecordBatch, acks: int = 1, bound: int = UNBOUND
    ) -> AppendResult:
        """Append one checked batch; write its offset and epoch into `records`.

        `bound` is the writer's fence. Error codes 5, 6, 19, 44, 56 and the producer's own mean that nothing was
        appended; 7 means that the fence died during the write, and it could not be undone. Every answer, even a
        duplicate's, must wait for `wait_for_isr(last_offset)` with acks=all, for `wait_for_disk(last_offset)` with
        acks=1.
        """
        replication, log = self.replication, self.log
        if replication.role is not Role.LEADER or not self._fence.is_live():
            return _NOT_LEADER
        refused = self.refusal_of_writer(bound)
        if refused is not None:
            return refused
        if acks == ACKS_ALL and not replication.has_enough_in_sync:
            return AppendResult(error_codes.NOT_ENOUGH_REPLICAS, -1, self._too_few())
        judgement = log.producers.judge(batch)
        if judgement.verdict is BatchVerdict.DUPLICATE:
            return AppendResult(error_codes.NONE, judgement.base_offset, None, judgement.last_offset)
        if judgement.verdict is not BatchVerdict.ACCEPTED:
            return AppendResult(_JUDGED[judgement.verdict], -1, judgement.detail)
        base_offset = log.log_end_offset
        self.is_at_rest = False
        assign_offsets(records, batch, base_offset, replication.leader_epoch)
        try:
            log.append(records, batch)
        except (OSError, LogFailed) as error:
            self._write_fails = True
            self._log_once("append failed", reason=str(error))
            return AppendResult(error_codes.KAFKA_STORAGE_ERROR, -1, str(error))
        if not self._fence.is_live():
            return self._undo_append()
        if self._logged_error:
            self._logged_error, self._write_fails = {}, False
        log.producers.update(batch, base_offset)
        replication.log_appended()
        self._begin_flush()
        if self._append_waiters:
            self._wake(self._append_waiters)
        return AppendResult(error_codes.NONE, base_offset, None, base_offset + batch.last_offset_delta)

    @property
    def is_flushing(self) -> bool:
        """Whether some records cannot be reported yet because they are being flushed."""
        return self.log.options.flush == "always" and self._flusher.is_flushing

    def _begin_flush(self) -> None:
        if self.log.options.flush == "always":
            self._flusher.begin()

    def _too_few(self) -> str:
        isr, least = node_ids(self.replication.isr.members), self.replication.min_insync_replicas
        return f"{self.topic}-{self.partition_index}: in sync are {isr}, min.insync.replicas is {least}"

    def _undo_append(self) -> AppendResult:
        try:
            self.log.undo_append()
        except LogFailed as error:
            _logger.error("append not undone", **self.log_fields, reason=str(error))
            return AppendResult(error_codes.REQUEST_TIMED_OUT)
        return _NOT_LEADER

    def is_committed(self, offset: int) -> bool:
        """Return whether every in-sync replica has `offset` and this broker may still report it."""
        return self.high_watermark > offset and self._fence.is_live()

    def is_on_disk(self, offset: int) -> bool:
        """Return whether `offset` is here, on the disk if required, and this broker may still report it."""
        return self.log.counted_end_offset > offset and self._fence.is_live()

    async def wait_for_isr(self, offset: int, timeout_s: float) -> int:
        """Wait for all in-sync replicas (ReplicationManager.wait_for_isr); return the producer's error code."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        # The high watermark waits for it too, but a failed flush is answered at once.
        if not await self._wait_until_flushed(offset, timeout_s):
            return error_codes.REQUEST_TIMED_OUT
        error_code = await self.replication.wait_for_isr(offset, deadline - loop.time())
        # A process that was suspended for longer than its lease must not answer as a leader that was replaced.
        if error_code == error_codes.NONE and not self._fence.is_live():
            return error_codes.REQUEST_TIMED_OUT
        return error_code

    async def wait_for_disk(self, offset: int, timeout_s: float) -> int:
        """Wait until `offset` is on the disk; return the producer's error code.

        Return at once if records need not be on the disk. REQUEST_TIMED_OUT (7) after the timeout or a disk error: the
        reopened log may still have the record.
        """
        is_there = await self._wait_until_flushed(offset, timeout_s) and self._fence.is_live()
        return error_codes.NONE if is_there else error_codes.REQUEST_TIMED_OUT

    async def _wait_until_flushed(self, offset: int, timeout_s: float) -> bool:
        if self.log.counted_end_offset > offset:
            return True
        try:
            async with asyncio.timeout(min(timeout_s, MAX_WAITER_AGE_S)):
                return await self._flusher.wait(offset)
        except TimeoutError:
            return False

    # As leader: reads

    def serves_reads(self) -> bool:
        return self.replication.is_leading and self._fence.is_live()

    def read(self, offset: int, max_bytes: int) -> ReadResult:
        """Read batches from `offset`, below the high watermark.

        The first is whole; otherwise at most `max_bytes` are read. Between the high watermark and the log's end the
        result is empty: a consumer that was there before the leader changed waits, and is not reset.
        """
        if not self.log_start_offset <= offset <= self.log_end_offset:
            return ReadResult(error_codes.OFFSET_OUT_OF_RANGE)
        high_watermark = self.high_watermark
        if offset >= high_watermark:
            return ReadResult(error_codes.NONE)
        return self._read_log(offset, max_bytes, None if high_watermark == self.log_end_offset else high_watermark)

    def _read_log(self, offset: int, max_bytes: int, up_to: int | None) -> ReadResult:
        try:
            return ReadResult(error_codes.NONE, self.log.read(offset, max_bytes, up_to=up_to))
        except (OSError, LogFailed) as error:
            # A failed log is reopened, and may be readable then.
            if self.unreadable is None and self.log.failure is None:
                self.unreadable, self.is_at_rest = Unreadable(offset, max_bytes), False
            _logger.error("read failed", **self.log_fields, reason=str(error))
            return ReadResult(error_codes.KAFKA_STORAGE_ERROR)

    def read_whole(self, offset: int, max_bytes: int) -> ReadResult:
        """Read batches from `offset` up to the log's end: a new leader commits its whole log."""
        return self._read_log(offset, max_bytes, None)

    def remove_before(self, offset: int) -> None:
        """Remove whole segments below `offset`, which is committed. Raises OSError, LogFailed."""
        if offset <= self.high_watermark:
            self.log.advance_log_start(offset)
            self.log_shortened()

    def latest_offset(self) -> int | None:
        """Return the high watermark; None until it has reached this leader's epoch: reads do not go back (KIP-207)."""
        return self.high_watermark if self.high_watermark >= self.replication.epoch_start_offset else None

    def find_timestamp(self, timestamp: int) -> TimestampAndOffset | None:
        """Like `Log.find_timestamp`, below the high watermark. Raises OSError, LogFailed."""
        found = self.log.find_timestamp(timestamp)
        return found if found is not None and found.offset < self.high_watermark else None

    def max_timestamp(self) -> TimestampAndOffset:
        """Like `Log.max_timestamp`; (-1, -1) while that batch is not committed, as in Apache Kafka."""
        found = self.log.max_timestamp()
        return found if found.offset < self.high_watermark else TimestampAndOffset(-1, -1)

    def check_leader_epoch(self, current_leader_epoch: int) -> int:
        """Return the error code for a request that names `current_leader_epoch`; -1 names none (KIP-320)."""
        if current_leader_epoch in (NO_EPOCH, self.leader_epoch):
            return error_codes.NONE
        if current_leader_epoch < self.leader_epoch:
            return error_codes.FENCED_LEADER_EPOCH
        return error_codes.UNKNOWN_LEADER_EPOCH

    # As leader: followers

    def replica_asks(self, replica_id: int, asked: PartitionFetch) -> PartitionFetched | None:
        """Note a follower's progress; return the answer if it gets no records.

        The request must name an epoch and a log: without a log any broker could have sent it.
        """
        index = self.partition_index
        if not self.serves_reads():
            return PartitionFetched(index, error_codes.NOT_LEADER_OR_FOLLOWER)
        error_code = self.check_leader_epoch(asked.current_leader_epoch)
        if error_code != error_codes.NONE:
            return PartitionFetched(index, error_code)
        names_log = len(asked.replica_directory_id) == TOPIC_ID_BYTES
        if asked.current_leader_epoch == NO_EPOCH or not names_log or not self.replication.is_follower(replica_id):
            return PartitionFetched(index, error_codes.REPLICA_NOT_AVAILABLE)
        if asked.last_fetched_epoch >= 0:
            leader_end = leader_end_for(self.log, asked.last_fetched_epoch)
            if leader_end.leader_epoch < asked.last_fetched_epoch or leader_end.end_offset < asked.fetch_offset:
                return PartitionFetched(
                    index, error_codes.NONE, self.high_watermark, self.log_start_offset, diverging_epoch=leader_end
                )
        is_compared = asked.fetch_offset > self.log_start_offset or self._has_epoch_up_to(asked.last_fetched_epoch)
        if not is_compared or not self.log_start_offset <= asked.fetch_offset <= self.log_end_offset:
            return self._out_of_range()
        self.replication.replica_fetched(
            ReplicaKey(replica_id, uuid.UUID(bytes=asked.replica_directory_id)), asked.fetch_offset
        )
        return None

    def read_as_replica(self, asked: PartitionFetch, max_bytes: int) -> PartitionFetched:
        """Answer a request that `replica_asks` has noted, then or later."""
        index = self.partition_index
        if not self.serves_reads():
            return PartitionFetched(index, error_codes.NOT_LEADER_OR_FOLLOWER)
        if asked.fetch_offset < self.log_start_offset:
            return self._out_of_range()
        records = b""
        if asked.fetch_offset < self.log_end_offset:
            error_code, records = self._read_log(asked.fetch_offset, min(asked.max_bytes, max_bytes), None)
            if error_code != error_codes.NONE:
                return PartitionFetched(index, error_code)
        return PartitionFetched(index, error_codes.NONE, self.high_watermark, self.log_start_offset, records=records)

    def _out_of_range(self) -> PartitionFetched:
        code = error_codes.OFFSET_OUT_OF_RANGE
        return PartitionFetched(self.partition_index, code, self.high_watermark, self.log_start_offset)

    def _has_epoch_up_to(self, leader_epoch: int) -> bool:
        """Whether the log still shows where a follower that ends in this epoch diverges.

        If retention has removed that, the follower drops its whole log: its records may be another leader's.
        """
        found = self.log.leader_epochs.end_offset_for(leader_epoch, self.log_end_offset)
        return leader_epoch < 0 or found.leader_epoch >= 0

    # As follower

    def next_fetch(self) -> PartitionFetch | None:
        """Return the next request to the leader; None if there is none.

        There is none without a leader, after `failure`, while part of the log is unreadable (it could not lead), and
        while fetched records are not on the disk yet: see `when_flushed`.
        """
        if self.role is not Role.FOLLOWER or self.leader_id == NO_LEADER or self.failure or self.unreadable is not None:
            return None
        log = self.log
        if log.counted_end_offset < log.log_end_offset:
            return None  # the next request reports the state here
        return PartitionFetch(
            self.partition_index,
            self.leader_epoch,
            log.log_end_offset,
            log.leader_epochs.latest,
            log.log_start_offset,
            MAX_REPLICA_FETCH_BYTES,
            self.replica.log_id.bytes,
        )

    def take_fetched(self, asked: PartitionFetch, fetched: PartitionFetched) -> bool:
        """Apply the leader's answer. False: an error; ask again only after a pause."""
        if self.role is not Role.FOLLOWER or self.leader_id == NO_LEADER or asked != self.next_fetch():
            return True  # late: a newer request has replaced it
        self.is_at_rest = False
        try:
            taken = self._take(fetched)
        except Inconsistent as error:
            self.failure = str(error)
            _logger.error("replica stopped", **self.log_fields, reason=self.failure)
        except ReplicatedBatchInvalid as error:
            self._log_once("leader's records refused", leader_id=self.leader_id, reason=str(error))
        except (OSError, LogFailed) as error:
            self._write_fails = True
            self._log_once("replica not written", reason=str(error))
        else:
            if taken:
                self._logged_error, self._write_fails = {}, False
            return taken
        finally:
            self._begin_flush()
        return False

    def when_flushed(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, when a flush has ended, even in failure."""
        self._flusher.add_waiter(wake)

    def _log_once(self, event: str, **what: object) -> None:
        """Log an error once, however often it repeats: the log may be on the full disk."""
        told = {"event": event, **what}
        if told != self._logged_error:
            self._logged_error = told
            _logger.error(event, **self.log_fields, **what)

    @property
    def log_fields(self) -> dict[str, object]:
        """The fields that name the partition in a log event."""
        return {"topic": self.topic, "partition": self.partition_index}

    def _take(self, fetched: PartitionFetched) -> bool:
        log = self.log
        if fetched.error_code == error_codes.OFFSET_OUT_OF_RANGE and fetched.log_start_offset >= log.log_end_offset:
            # The leader's retention has removed the records between, or the point of divergence; it removes only
            # committed records.
            log.reset_to(fetched.log_start_offset)
            self.replication.leader_told(fetched.log_start_offset)
            return True
        if fetched.error_code != error_codes.NONE:
            return False
        if fetched.diverging_epoch is not None:
            before = log.log_end_offset
            self._reconciliation.reconcile_as_follower(log, self.high_watermark, fetched.diverging_epoch)
            _logger.warning("log truncated", **self.log_fields, end_offset=log.log_end_offset, before=before)
            return log.log_end_offset < before
        if fetched.records:
            log.append_replicated(fetched.records)
        self.replication.leader_told(fetched.high_watermark)
        if log.log_start_offset < fetched.log_start_offset <= self.high_watermark:
            log.advance_log_start(fetched.log_start_offset)
        return True

    # The disk

    @property
    def disk_fails(self) -> bool:
        """Whether the last write, read or flush failed."""
        return self._write_fails or self.unreadable is not None or (bool(self.log.failure) and not self.log.is_closed)

    def note_at_rest(self) -> None:
        """Note that there is nothing to flush or write; a failed read is not retried here."""
        self.is_at_rest = not (self.disk_fails or self.log.flush_under_way)

    def disk_trouble(self) -> DiskTrouble | None:
        """Return the disk's current fault; retries a failed read."""
        log = self.log
        if log.failure is not None:
            return DiskTrouble(str(log.failure))
        if self.unreadable is not None and not self._reads_again(*self.unreadable):
            return DiskTrouble(f"the log cannot be read from offset {self.unreadable.offset}")
        if self._write_fails:
            return DiskTrouble("the log cannot be written")
        flush = log.flush_under_way
        return DiskTrouble("a flush of the log does not end", flush) if flush else None

    def _reads_again(self, offset: int, max_bytes: int) -> bool:
        try:
            # Records removed since need not be read.
            if self.log_start_offset <= offset <= self.log_end_offset:
                self.log.read(offset, max_bytes)
        except (OSError, LogFailed):
            return False
        self.unreadable = None
        return True

    # Waiters

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Call `wake` once: when the high watermark or the log's start moves, or the partition closes."""
        self._high_watermark_waiters.add(wake)

    def add_append_waiter(self, wake: Callable[[], None]) -> None:
        """Call `wake` once, at the next append or when the partition closes."""
        self._append_waiters.add(wake)

    def remove_waiter(self, wake: Callable[[], None]) -> None:
        """Remove a waiter of either kind, if present."""
        self._append_waiters.discard(wake)
        self._high_watermark_waiters.discard(wake)

    def log_shortened(self) -> None:
        """Note that retention has moved the log's start, or tried to."""
        self._on_high_watermark()

    def _on_high_watermark(self) -> None:
        self.is_at_rest = False
        if self._high_watermark_waiters:
            self._wake(self._high_watermark_waiters)

    def _wake(self, waiters: set[Callable[[], None]]) -> None:
        woken = list(waiters)
        waiters.clear()
        for wake in woken:
            wake()


class Inconsistent(Exception):
    """A log and its high watermark contradict each other, or the leader's log lacks records committed here."""


class Reconciliation:
    """Change a replica's log when leadership changes. Stateless.

    The StreamBus text truncates a new leader's and each follower's log to its own high watermark. A follower learns the
    high watermark one fetch late, so that rule loses records that were acknowledged with acks=all (KIP-101). Here a new
    leader keeps its whole log and begins its epoch at the log's end, and a follower truncates to where its log diverges
    from the leader's by leader epochs (KIP-101, KIP-279).

    Invariants
    1. 0 <= high watermark <= log end offset, on every replica, at all times.
    2. A log is never cut off below its replica's high watermark: those records are committed. A leader that asks for it
       lacks committed records and must not be followed.
    """

    def reconcile_as_new_leader(self, log: Log, high_watermark: int, leader_epoch: int) -> int:
        """Return the offset at which the new epoch begins: the log's end, whatever the high watermark."""
        log.leader_epochs.assign(leader_epoch, log.log_end_offset)
        return log.log_end_offset

    def reconcile_as_new_follower(self, log: Log, high_watermark: int) -> None:
        """Do nothing until the leader has reported where the logs diverge."""

    def reconcile_as_follower(self, log: Log, high_watermark: int, leader_end: EpochEnd) -> None:
        """Cut the log off where it diverges from the leader's. Raises Inconsistent, OSError, LogFailed."""
        reset_to_offset(log, high_watermark, divergence_point(log, leader_end))


def divergence_point(log: Log, leader_end: EpochEnd) -> int:
    """Return the first offset at which `log` may differ from the leader's.

    `leader_end` is the leader's answer for our last epoch: the largest of its epochs not above ours, and its end. In a
    common epoch the logs diverge at the end of the shorter one; in an epoch that we lack, at the end of our next older
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
            f"the leader's log diverges from this one at offset {offset}, below the high watermark {high_watermark}: "
            f"acknowledged records are missing there"
        )
    # Also at the log's end: an epoch that began there without records must not count.
    log.truncate_to(offset)


def validate_consistency(log: Log, high_watermark: int) -> None:
    """Raise Inconsistent unless 0 <= high watermark <= log end offset."""
    if not 0 <= high_watermark <= log.log_end_offset:
        raise Inconsistent(f"invalid high watermark {high_watermark}; expected 0 to log end {log.log_end_offset}")

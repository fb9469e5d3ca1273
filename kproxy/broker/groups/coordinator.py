"""Coordinate the consumer groups of one broker: those in the partitions of `__consumer_offsets` that it leads.

A group belongs to the partition that Kafka's hash of its id names, and its coordinator is that partition's leader. So
its records have the lease, epochs, fence and in-sync replicas of that partition; etcd has nothing about a group.

States of a shard, the groups of one partition
  absent    this broker does not lead the partition: NOT_COORDINATOR
  loading   it leads, and reads the partition's log: COORDINATOR_LOAD_IN_PROGRESS
  serving   all groups are in memory

Transitions
  absent  -> loading   the partition is led (`leader_changed`)
  loading -> serving   the log is read up to its end, and sessions begin
  any     -> absent    this broker leads it no more, or stops: waiting members are answered NOT_COORDINATOR

Invariants
1. What the journal records changes in memory only after a successful append. (Sessions and pending member ids are not
   recorded.) Memory is dropped with the leadership, so that it never differs from the log.
2. No success is answered without a live lease, nor, except to Heartbeat, ListGroups and DescribeGroups, before all
   in-sync replicas have the group's last record: an answer holds even if this broker dies.
3. Appends, and what they change in memory, happen in one step of the event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import structlog

from kproxy.broker.cluster import ClusterView
from kproxy.broker.groups import journal
from kproxy.broker.groups.group import NEVER, CommittedOffset, Group, Join, Joined, Options, State, Sync, Synced
from kproxy.broker.keys import PartitionKey
from kproxy.broker.partition import ACKS_ALL, Partition
from kproxy.broker.producer_state import wall_ms
from kproxy.broker.segment import LogFailed
from kproxy.broker.topics import CONSUMER_OFFSETS
from kproxy_codec import error_codes
from kproxy_codec.errors import CodecError
from kproxy_codec.record_batch import parse_batch
from kproxy_codec.records import Pair, encode_batch

_logger = structlog.get_logger(__name__)

# Kafka's offsets.commit.timeout.ms.
COMMIT_TIMEOUT_S = 5.0
# Kafka's offsets.retention.minutes and offsets.retention.check.interval.ms.
RETENTION_MS = 7 * 24 * 3_600_000
EXPIRY_INTERVAL_S = 600.0
MAX_GROUPS = 10_000
# Records of offsets in one batch of an expiry or a snapshot.
_BATCH_RECORDS = 500
_READ_BYTES = 1 << 20
# A log up to this size is read on the event loop.
_SMALL_BYTES = 64 << 10
_RETRY_S = 1.0
# The characters of a client's id at the start of a member id.
_MAX_CLIENT_ID = 200

# The codes that clients get, as from Kafka, if the journal refuses a record; any other code is passed on.
_APPEND_CODES = {
    error_codes.NOT_LEADER_OR_FOLLOWER: error_codes.NOT_COORDINATOR,
    error_codes.KAFKA_STORAGE_ERROR: error_codes.NOT_COORDINATOR,
    error_codes.NOT_ENOUGH_REPLICAS: error_codes.COORDINATOR_NOT_AVAILABLE,
    error_codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND: error_codes.COORDINATOR_NOT_AVAILABLE,
    error_codes.REQUEST_TIMED_OUT: error_codes.COORDINATOR_NOT_AVAILABLE,
}


def partition_for(group_id: str, partitions: int) -> int:
    """Return the partition of a group, as Kafka does: Java's hash of the id, without its sign."""
    units = group_id.encode("utf-16-be", "surrogatepass")
    value = 0
    for at in range(0, len(units), 2):
        value = (31 * value + (units[at] << 8 | units[at + 1])) & 0xFFFF_FFFF
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return (0 if signed == -(1 << 31) else abs(signed)) % partitions


class Commit(NamedTuple):
    """An offset to commit; `error_code` says why it cannot be, NONE if it can."""

    topic: str
    partition_index: int
    committed: CommittedOffset
    error_code: int = error_codes.NONE


class _Failed(NamedTuple):
    """An answer to JoinGroup or SyncGroup that has only an error code."""

    error_code: int


_Answer = Joined | Synced | _Failed


@dataclass(slots=True, eq=False)
class _Entry:
    """A group with its record in the journal, the offset of its last record, and the time of its next check."""

    group: Group
    last_offset: int = -1
    record: bytes | None = None
    due_at: float = NEVER


@dataclass(slots=True, eq=False)
class _Shard:
    """The groups of one led partition, and its journal."""

    partition: Partition
    entries: dict[str, _Entry] = field(default_factory=dict)
    loading: asyncio.Task[None] | None = None
    last_offset: int = -1
    # The size at which the journal is rewritten; None while that is done.
    rewrite_at: int | None = None

    @property
    def is_long(self) -> bool:
        """Whether the journal is to be rewritten."""
        return self.rewrite_at is not None and self.partition.log.size_in_bytes >= self.rewrite_at

    def append(self, pairs: Sequence[Pair]) -> tuple[int, int]:
        """Append records in one batch; return the error code and the last offset."""
        records = encode_batch(pairs, wall_ms())
        result = self.partition.append_as_leader(memoryview(records), parse_batch(records), ACKS_ALL)
        if result.error_code == error_codes.NONE:
            self.last_offset = result.last_offset
        return _APPEND_CODES.get(result.error_code, result.error_code), result.last_offset

    async def settled(self, offset: int) -> int:
        """Wait until all in-sync replicas have `offset`; return the error code."""
        if self.partition.is_committed(offset):
            return error_codes.NONE
        error_code = await self.partition.wait_for_isr(offset, COMMIT_TIMEOUT_S)
        if error_code == error_codes.NONE:
            return error_code
        if not self.partition.takes_writes():
            return error_codes.NOT_COORDINATOR
        return _APPEND_CODES.get(error_code, error_code)


@dataclass(eq=False)
class GroupCoordinator:
    """Runs requests on groups. The caller owns the coroutine `run`; `close` ends everything else.

    `rewrite_bytes`: a journal that has grown by so much, and by three times its live records, is rewritten.
    """

    view: ClusterView
    led: Callable[[bytes, int], Partition | None]
    clock: Callable[[], float]
    options: Options
    rewrite_bytes: int

    def __post_init__(self) -> None:
        self._shards: dict[int, _Shard] = {}
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._tokens = itertools.count(1)
        self._due: list[tuple[float, int, _Shard, _Entry]] = []
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    # Shards

    def leader_changed(self, key: PartitionKey) -> None:
        """Load the groups of a partition that this broker leads now, or drop those of one that it leads no more."""
        if key.topic != CONSUMER_OFFSETS or self._closed:
            return
        partition, shard = self.led(key.topic.encode(), key.partition_index), self._shards.get(key.partition_index)
        if shard is not None and shard.partition is not partition:
            self._drop(key.partition_index)
        if partition is not None and key.partition_index not in self._shards:
            shard = self._shards[key.partition_index] = _Shard(partition)
            shard.loading = self._start(self._load(shard))

    def _drop(self, partition_index: int) -> None:
        shard = self._shards.pop(partition_index)
        if shard.loading is not None:
            shard.loading.cancel()
        for entry in shard.entries.values():
            for token in entry.group.waiting():
                self._fail(token, error_codes.NOT_COORDINATOR)

    def close(self) -> None:
        """Drop all groups, and answer the requests that wait."""
        self._closed = True
        for partition_index in list(self._shards):
            self._drop(partition_index)
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, shard: _Shard) -> None:
        """Read the log, in a thread if it is long; try again after an error."""
        told = ""
        while True:
            replay = journal.Replay(self.options)
            try:
                await self._read_into(replay, shard.partition)
                break
            except (OSError, CodecError) as error:
                if str(error) != told:
                    told = str(error)
                    _logger.error("groups not loaded", **shard.partition.log_fields, reason=told)
            await asyncio.sleep(_RETRY_S)
        shard.last_offset, now = shard.partition.log_end_offset - 1, self.clock()
        for group_id, group in replay.restored().items():
            group.begin(now)
            shard.entries[group_id] = _Entry(group, shard.last_offset, replay.values.get(group_id))
            self._schedule(shard, shard.entries[group_id])
        shard.loading, shard.rewrite_at = None, self.rewrite_bytes
        if shard.entries:
            _logger.info("groups loaded", **shard.partition.log_fields, groups=len(shard.entries))

    async def _read_into(self, replay: journal.Replay, partition: Partition) -> None:
        offset = partition.log_start_offset
        is_small = partition.log.size_in_bytes <= _SMALL_BYTES
        while offset < partition.log_end_offset:
            read = partition.read_whole(offset, _READ_BYTES)
            if read.error_code != error_codes.NONE:
                raise OSError(error_codes.name_of(read.error_code))
            offset = replay.feed(read.records) if is_small else await asyncio.to_thread(replay.feed, read.records)

    def _find(self, group_id: str, *, needs_name: bool = False) -> _Shard | int:
        """Return a group's shard, or an error code. With `needs_name` an empty group id is invalid."""
        if needs_name and not group_id:
            return error_codes.INVALID_GROUP_ID
        topic = self.view.topics.get(CONSUMER_OFFSETS)
        shard = self._shards.get(partition_for(group_id, len(topic.replicas))) if topic is not None else None
        if shard is None or not shard.partition.takes_writes():
            return error_codes.NOT_COORDINATOR
        return shard if shard.loading is None else error_codes.COORDINATOR_LOAD_IN_PROGRESS

    # Events

    def _run(
        self, shard: _Shard, group_id: str, event: Callable[[Group], int | None], token: int = 0
    ) -> tuple[int, int]:
        """Run an event on a group, created if needed; return an error code and the offset to wait for.

        If the append to the journal fails, nothing has changed, and the event's own request gets an error.
        """
        entry = shard.entries.get(group_id) or _Entry(Group(group_id, self.options))
        draft = entry.group.draft()
        result = event(draft) or error_codes.NONE
        last_offset = entry.last_offset
        if draft.is_changed:
            draft.changed_ms = wall_ms()
            record = journal.group_record(draft)
            error_code, last_offset = shard.append([record])
            if error_code != error_codes.NONE:
                self._fail(token, error_code)
                return error_code, entry.last_offset
            entry.record = record[1]
        entry.group, entry.last_offset = draft, last_offset
        if draft.is_forgettable and draft.changed_ms < 0:
            shard.entries.pop(group_id, None)
        else:
            shard.entries[group_id] = entry
        self._schedule(shard, entry)
        if draft.answers:
            self._answer(shard, last_offset, draft.answers)
        return result, last_offset

    def _answer(self, shard: _Shard, last_offset: int, answers: list[tuple[int, Joined | Synced]]) -> None:
        """Answer errors at once, and other requests when all in-sync replicas have `last_offset`."""
        told = [each for each in answers if each[1].error_code == error_codes.NONE]
        for token, answer in answers:
            if answer.error_code != error_codes.NONE:
                self._resolve(token, answer)
        if told and last_offset >= 0 and not shard.partition.is_committed(last_offset):
            self._start(self._answer_later(shard, last_offset, told))
        else:
            for token, answer in told:
                self._resolve(token, answer)

    async def _answer_later(self, shard: _Shard, last_offset: int, told: list[tuple[int, Joined | Synced]]) -> None:
        error_code = error_codes.NOT_COORDINATOR
        try:
            error_code = await shard.settled(last_offset)
        finally:
            for token, answer in told:
                if error_code == error_codes.NONE:
                    self._resolve(token, answer)
                else:
                    self._fail(token, error_code)

    def _resolve(self, token: int, answer: _Answer) -> None:
        future = self._waiting.get(token)
        if future is not None and not future.done():
            future.set_result(answer)

    def _fail(self, token: int, error_code: int) -> None:
        self._resolve(token, _Failed(error_code))

    async def _wait(self, shard: _Shard, token: int) -> _Answer:
        future = self._waiting[token]
        try:
            answer = await future
        finally:
            self._waiting.pop(token, None)
        # This task may run late: another broker may be the coordinator by now.
        if answer.error_code == error_codes.NONE and not shard.partition.serves_reads():
            return _Failed(error_codes.NOT_COORDINATOR)
        return answer

    def _token(self) -> int:
        token = next(self._tokens)
        self._waiting[token] = asyncio.get_running_loop().create_future()
        return token

    # Requests of members

    async def join(self, group_id: str, asked: Join) -> Joined:
        """Answer JoinGroup, at once or when the other members have joined."""
        shard = self._find(group_id, needs_name=True)
        if isinstance(shard, int):
            return Joined(shard, asked.member_id)
        entry = shard.entries.get(group_id)
        if entry is None and asked.member_id and self.options.takes_session(asked.session_s):
            return Joined(error_codes.UNKNOWN_MEMBER_ID, asked.member_id)
        if entry is None and self._groups >= MAX_GROUPS:
            return Joined(error_codes.GROUP_MAX_SIZE_REACHED, "")
        new_id = f"{(asked.instance_id or asked.client_id)[:_MAX_CLIENT_ID]}-{uuid.uuid4()}"
        token, now = self._token(), self.clock()
        self._run(shard, group_id, lambda group: group.join(asked, token, new_id, now), token)
        answer = await self._wait(shard, token)
        return answer if isinstance(answer, Joined) else Joined(answer.error_code, asked.member_id)

    async def sync(self, group_id: str, asked: Sync) -> Synced:
        """Answer SyncGroup, at once or when the group's leader has sent the assignments."""
        shard = self._find(group_id, needs_name=True)
        if isinstance(shard, int):
            return Synced(shard)
        if group_id not in shard.entries:
            return Synced(error_codes.UNKNOWN_MEMBER_ID)
        token, now = self._token(), self.clock()
        self._run(shard, group_id, lambda group: group.sync(asked, token, now), token)
        answer = await self._wait(shard, token)
        return answer if isinstance(answer, Synced) else Synced(answer.error_code)

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> int:
        """Answer Heartbeat."""
        shard = self._find(group_id, needs_name=True)
        if isinstance(shard, int):
            return shard
        entry = shard.entries.get(group_id)
        if entry is None:
            return error_codes.UNKNOWN_MEMBER_ID
        return entry.group.heartbeat(member_id, instance_id, generation, self.clock())

    async def leave(self, group_id: str, leaving: Iterable[tuple[str, str | None]]) -> tuple[int, list[int]]:
        """Remove members; return an error code for the group and one for each of them."""
        shard = self._find(group_id, needs_name=True)
        if isinstance(shard, int):
            return shard, []
        codes: list[int] = []
        if group_id not in shard.entries:
            return error_codes.NONE, [error_codes.UNKNOWN_MEMBER_ID for _ in leaving]
        now = self.clock()
        error_code, offset = self._run(
            shard, group_id, lambda group: codes.extend(group.leave(*each, now) for each in leaving)
        )
        if error_code == error_codes.NONE and offset >= 0:
            error_code = await shard.settled(offset)
        return error_code, codes

    # Offsets

    async def commit(
        self, group_id: str, member: tuple[str, str | None, int], commits: Sequence[Commit]
    ) -> tuple[int, Sequence[Commit]]:
        """Commit offsets of a member (its id, instance id, generation); return an error code and the results."""
        shard = self._find(group_id)
        if isinstance(shard, int):
            return shard, commits
        entry, now = shard.entries.get(group_id), self.clock()
        if entry is None and member[2] >= 0:
            return error_codes.GROUP_ID_NOT_FOUND, commits
        if entry is None and self._groups >= MAX_GROUPS:
            return error_codes.INVALID_COMMIT_OFFSET_SIZE, commits
        group = entry.group if entry is not None else Group(group_id, self.options)
        error_code = group.commit_error(*member, now)
        if error_code != error_codes.NONE:
            return error_code, commits
        taken = [each for each in commits if each.error_code == error_codes.NONE]
        new = {(each.topic, each.partition_index) for each in taken} - group.offsets.keys()
        if len(group.offsets) + len(new) > self.options.max_offsets:
            return error_codes.INVALID_COMMIT_OFFSET_SIZE, commits
        if not taken:
            return error_codes.NONE, commits
        entry = entry or _Entry(group)
        error_code = self._put_offsets(shard, entry, [(*each[:2], each.committed) for each in taken])
        if error_code == error_codes.NONE:
            shard.entries[group_id] = entry
            error_code = await shard.settled(entry.last_offset)
        return error_code, commits

    def _put_offsets(
        self, shard: _Shard, entry: _Entry, offsets: Sequence[tuple[str, int, CommittedOffset | None]]
    ) -> int:
        group = entry.group
        error_code, last_offset = shard.append([journal.offset_record(group.group_id, *each) for each in offsets])
        if error_code == error_codes.NONE:
            entry.last_offset = last_offset
            for each in offsets:
                group.apply_offset(*each)
            if shard.is_long:
                self._wake.set()
        return error_code

    async def fetch(
        self, group_id: str, wanted: Iterable[tuple[str, int]] | None
    ) -> tuple[int, dict[tuple[str, int], CommittedOffset | None]]:
        """Read committed offsets, all of them if `wanted` is None; return an error code and the offsets."""
        shard = self._find(group_id)
        if isinstance(shard, int):
            return shard, {}
        entry = shard.entries.get(group_id)
        offsets = entry.group.offsets if entry is not None else {}
        found = {key: offsets.get(key) for key in (offsets if wanted is None else wanted)}
        # An absent group's answer waits too: the removal may not be replicated yet.
        return await shard.settled(entry.last_offset if entry is not None else shard.last_offset), found

    async def delete_offsets(
        self, group_id: str, wanted: Sequence[tuple[str, int]]
    ) -> tuple[int, dict[tuple[str, int], int]]:
        """Remove committed offsets of topics that no member reads; return the group's error code and each offset's."""
        shard = self._find(group_id, needs_name=True)
        if isinstance(shard, int):
            return shard, {}
        entry = shard.entries.get(group_id)
        if entry is None:
            return error_codes.GROUP_ID_NOT_FOUND, {}
        if entry.group.members and entry.group.protocol_type != "consumer":
            return error_codes.NON_EMPTY_GROUP, {}
        is_read = {topic: entry.group.is_subscribed_to(topic) for topic, _ in wanted}
        codes = {key: error_codes.GROUP_SUBSCRIBED_TO_TOPIC if is_read[key[0]] else error_codes.NONE for key in wanted}
        removed = [(*key, None) for key in wanted if not is_read[key[0]] and key in entry.group.offsets]
        error_code = self._put_offsets(shard, entry, removed) if removed else error_codes.NONE
        if error_code == error_codes.NONE and removed:
            error_code = await shard.settled(entry.last_offset)
        return error_code, codes

    # Groups

    @property
    def _groups(self) -> int:
        return sum(len(shard.entries) for shard in self._shards.values())

    def listed(self) -> tuple[int, list[Group]]:
        """List the groups that this broker coordinates; the error code says whether some are still being loaded."""
        serving = [each for each in self._shards.values() if each.partition.takes_writes()]
        is_loading = any(each.loading is not None for each in serving)
        groups = [entry.group for each in serving for entry in each.entries.values()]
        return (error_codes.COORDINATOR_LOAD_IN_PROGRESS if is_loading else error_codes.NONE), groups

    def described(self, group_id: str) -> Group | int:
        """Return a group, or the error code."""
        shard = self._find(group_id)
        if isinstance(shard, int):
            return shard
        entry = shard.entries.get(group_id)
        return entry.group if entry is not None else error_codes.GROUP_ID_NOT_FOUND

    async def delete(self, group_id: str) -> int:
        """Remove a group without members, with its offsets; return the error code."""
        shard = self._find(group_id)
        if isinstance(shard, int):
            return shard
        entry = shard.entries.get(group_id)
        if entry is None:
            return error_codes.GROUP_ID_NOT_FOUND
        if entry.group.state is not State.EMPTY:
            return error_codes.NON_EMPTY_GROUP
        error_code, offset = self._remove(shard, entry, list(entry.group.offsets))
        return await shard.settled(offset) if error_code == error_codes.NONE else error_code

    def _remove(self, shard: _Shard, entry: _Entry, offsets: Sequence[tuple[str, int]]) -> tuple[int, int]:
        """Remove these offsets, and the group if nothing is left of it."""
        group = entry.group
        pairs = [journal.offset_record(group.group_id, *key, None) for key in offsets]
        is_end = not group.members and len(offsets) == len(group.offsets)
        error_code, last_offset = shard.append([*pairs, journal.removal(group.group_id)] if is_end else pairs)
        if error_code == error_codes.NONE:
            entry.last_offset = last_offset
            for key in offsets:
                group.apply_offset(*key, None)
            if is_end:
                del shard.entries[group.group_id]
        return error_code, last_offset

    def topic_deleted(self, topic: str) -> None:
        """Remove the offsets of a topic, so that a new topic of that name has none.

        In one step, because later commits belong to the next topic. Offsets whose removal fails expire later.
        """
        for shard in self._serving():
            for entry in list(shard.entries.values()):
                keys = [key for key in entry.group.offsets if key[0] == topic]
                for start in range(0, len(keys), _BATCH_RECORDS):
                    self._put_offsets(shard, entry, [(*key, None) for key in keys[start : start + _BATCH_RECORDS]])

    # Time

    def _schedule(self, shard: _Shard, entry: _Entry) -> None:
        due_at = entry.group.next_deadline
        if due_at < entry.due_at:
            entry.due_at = due_at
            heapq.heappush(self._due, (due_at, next(self._tokens), shard, entry))
            self._wake.set()

    async def run(self) -> None:
        """Apply time-outs, expire offsets and rewrite journals, until cancelled."""
        expiry_at = self.clock() + EXPIRY_INTERVAL_S
        while True:
            wake_at = min(self._due[0][0] if self._due else NEVER, expiry_at)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wake_at - self.clock())):
                    await self._wake.wait()
            self._wake.clear()
            now = self.clock()
            while self._due and self._due[0][0] <= now:
                self._tick(*heapq.heappop(self._due), now)
            if now >= expiry_at:
                expiry_at = now + EXPIRY_INTERVAL_S
                await self._expire()
            for shard in self._serving():
                if shard.is_long:
                    shard.rewrite_at = None
                    self._start(self._rewrite(shard))

    def _tick(self, due_at: float, _: int, shard: _Shard, entry: _Entry, now: float) -> None:
        if due_at != entry.due_at:
            return  # an earlier check has handled it
        entry.due_at = NEVER
        group_id = entry.group.group_id
        if shard.entries.get(group_id) is not entry or self._shards.get(shard.partition.partition_index) is not shard:
            return
        error_code = error_codes.NONE
        if entry.group.next_deadline <= now:
            error_code, _ = self._run(shard, group_id, partial(Group.tick, now=now))
        if error_code == error_codes.NONE:
            self._schedule(shard, entry)
        else:
            entry.due_at = now + _RETRY_S
            heapq.heappush(self._due, (entry.due_at, next(self._tokens), shard, entry))

    async def _expire(self) -> None:
        """Remove expired offsets, and groups that have nothing else."""
        for shard in self._serving():
            for entry in list(shard.entries.values()):
                gone = entry.group.expired_offsets(wall_ms(), RETENTION_MS)
                for start in range(0, len(gone), _BATCH_RECORDS):
                    self._remove(shard, entry, gone[start : start + _BATCH_RECORDS])
                if not gone and entry.group.is_forgettable:
                    self._remove(shard, entry, [])
                await asyncio.sleep(0)

    def _serving(self) -> list[_Shard]:
        return [each for each in self._shards.values() if each.loading is None and each.partition.takes_writes()]

    # Rewriting a journal

    async def _rewrite(self, shard: _Shard) -> None:
        """Append every live record again, and remove the log before them once all in-sync replicas have them.

        Changes go on meanwhile: each record is written as it is at that moment, so the latest of a key stays the last.
        """
        partition = shard.partition
        begin, before = partition.log_end_offset, partition.log.size_in_bytes
        try:
            written = await self._append_live(shard) and await shard.settled(shard.last_offset) == error_codes.NONE
            live_bytes = partition.log.size_in_bytes - before
            if written:
                partition.remove_before(begin)
                _logger.info("groups' journal rewritten", **partition.log_fields, bytes=live_bytes)
            shard.rewrite_at = partition.log.size_in_bytes + max(self.rewrite_bytes, 3 * live_bytes)
        except (OSError, LogFailed) as error:
            _logger.error("groups' journal not shortened", **partition.log_fields, reason=str(error))

    async def _append_live(self, shard: _Shard) -> bool:
        for group_id in list(shard.entries):
            keys: list[tuple[str, int]] | None = None
            while keys or keys is None:
                entry = shard.entries.get(group_id)
                if entry is None:
                    break
                group, pairs = entry.group, list[Pair]()
                if keys is None:
                    keys, pairs = list(group.offsets), journal.kept(group_id, entry.record)
                part, keys = keys[:_BATCH_RECORDS], keys[_BATCH_RECORDS:]
                pairs += [journal.offset_record(group_id, *key, group.offsets.get(key)) for key in part]
                if pairs and shard.append(pairs)[0] != error_codes.NONE:
                    return False
                await asyncio.sleep(0)
        return True

"""Fetch the partitions that this broker follows.

Each broker that leads a partition followed here has one task, a fetcher, and one connection.

States of a connection
  dialling         the connection is being made, with TLS where `encryption` says so
  authenticating   each side proves to the other that it knows the cluster's secret; frames are small
  open             requests may be sent
  lost             no more requests or answers; pending requests fail

Transitions
  dialling -> authenticating -> open   within CONNECT_TIMEOUT_S
  any -> lost                          the other side closed or broke it, or sent an invalid or unrequested answer;
                                       `close`

Invariants of a connection
1. The other side is not trusted before it has proved that it knows the secret.
2. Answers are matched in order and by correlation_id; an answer that does not match ends the connection.
3. Memory is bounded: frames by the limit of the state, pending answers by the requests sent.

States of a fetcher
  dialling   the leader is not reached yet; tried again with a growing pause
  fetching   one Fetch for all partitions followed from this leader is under way
  resting    there is no partition to ask for now
  ended      nothing is followed from this leader any more, or its address has changed

Transitions
  dialling -> fetching   both sides are authenticated
  fetching -> fetching   the answer is applied; the next request reports what is here, which the leader waits for
  fetching -> resting    there is nothing to ask;   resting -> fetching   a leadership changed, a pause is over
  fetching, resting -> dialling   the connection is lost, or the leader's answer is invalid
  any -> ended           `ReplicaFetchers` sees that leaderships or brokers changed

Invariants of a fetcher
1. A partition is in at most one request at a time, so that an answer always meets the log that it was asked for.
2. An answer has exactly the requested partitions, in their order; otherwise nothing of it counts and the connection
   ends.
3. A partition whose answer could not be applied waits PARTITION_PAUSE_S; the others are fetched meanwhile.
4. A leader that waits for records is hurried when there is something to ask that was not in the request.
5. A request names at most MAX_PARTITIONS partitions and asks for at most MAX_BYTES of records; the next one continues
   where this one ended.
6. Nothing is asked without a live lease: another process may have the broker's id by then, with its own disk, and the
   leader would count our reports as that one's.
7. Where records have to be on the disk, nothing behind them is asked for before they are (`Partition.next_fetch`). A
   disk that is slow, or hangs, delays other partitions by at most FLUSH_PATIENCE_S.
8. However many partitions are followed, replication leaves either side time for its clients: see REST_S_PER_PARTITION.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import structlog

from kproxy.address import Address
from kproxy.broker.cluster import Change, ClusterView, Kind, LiveBroker
from kproxy.broker.keys import ReplicaKey
from kproxy.broker.partition import Partition
from kproxy.broker.replication.authentication import MECHANISM, AuthenticationFailed, FollowerHandshake, Secret
from kproxy.broker.replication.encryption import CLOSED, NO_ENCRYPTION, Encryption, TowardsLeader
from kproxy.runtime.resolver import dial
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.correlation import AwaitedAnswers
from kproxy_codec.errors import CodecError, UnexpectedAnswer
from kproxy_codec.fetch import PartitionFetch, PartitionFetched
from kproxy_codec.framing import (
    FrameReader,
    ReceiveArena,
    frame_message,
    request_header,
    response_body_offset,
)
from kproxy_codec.partitioned import MAX_PARTITIONS
from kproxy_codec.replica_fetch import ReplicaAnswer, encode_replica_fetch, read_replica_answer

CONNECT_TIMEOUT_S = 5.0
UNAUTHENTICATED_FRAME_BYTES = 64 << 10
# Of what a leader says about a failed authentication.
MAX_MESSAGE_CHARACTERS = 500
# A request, and the one that hurries its answer.
MOST_AWAITED = 2
_HANDSHAKE_VERSION = 1
_AUTHENTICATE_VERSION = 2


class LeaderLost(Exception):
    """The connection is unusable or could not be made; the message says why."""


class LeaderConnection(asyncio.BufferedProtocol):
    """A follower's connection, by its broker and data directory, to a leader. See `open`."""

    def __init__(self, follower: ReplicaKey, arena: ReceiveArena, way: TowardsLeader) -> None:
        self._follower = follower
        self._way = way
        self._sender = b"broker-%d" % follower.node_id
        self._reader = FrameReader(UNAUTHENTICATED_FRAME_BYTES, arena)
        self._transport: asyncio.Transport | None = None
        self._awaited: AwaitedAnswers[asyncio.Future[memoryview]] = AwaitedAnswers(self._reader, MOST_AWAITED)
        self._lost_because = ""
        self._is_open = False

    @classmethod
    async def open(
        cls,
        port: int,
        way: TowardsLeader,
        follower: ReplicaKey,
        secret: Secret,
        *,
        arena: ReceiveArena,
        max_answer_bytes: int,
    ) -> LeaderConnection:
        """Connect to that port of the leader and authenticate both sides. Raises LeaderLost."""
        connection = cls(follower, arena, way)
        name = None if way.context is None else way.host
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                await dial(
                    lambda *place: loop.create_connection(
                        lambda: connection, *place, ssl=way.context, server_hostname=name
                    ),
                    way.host,
                    port,
                )
                await connection._authenticate(secret)
        except (OSError, AuthenticationFailed, CodecError) as error:
            connection.close()
            reason = "no answer in time" if isinstance(error, TimeoutError) else way.explain(error)
            raise LeaderLost(reason) from error
        except BaseException:
            connection.close()
            raise
        connection._reader.admit(max_answer_bytes)
        connection._is_open = True
        return connection

    async def _authenticate(self, secret: Secret) -> None:
        handshake = FollowerHandshake(self._follower, secret)
        agreed = await self._control(SASL_HANDSHAKE, _HANDSHAKE_VERSION, mechanism=MECHANISM)
        if agreed.error_code != error_codes.NONE:
            raise AuthenticationFailed(f"{MECHANISM} is refused: {error_codes.name_of(agreed.error_code)}")
        handshake_answer = await self._prove(handshake.first())
        handshake.check(await self._prove(handshake.final(handshake_answer)))

    async def _prove(self, message: bytes) -> bytes:
        answer = await self._control(SASL_AUTHENTICATE, _AUTHENTICATE_VERSION, auth_bytes=message)
        if answer.error_code != error_codes.NONE:
            said = f"the leader says {error_codes.name_of(answer.error_code)}"
            words = str(answer.error_message or "")[:MAX_MESSAGE_CHARACTERS]
            raise AuthenticationFailed(f"{said}: {words}" if words else said)
        return bytes(answer.auth_bytes)

    async def _control(self, api_key: int, version: int, **fields: Any) -> control.Message:
        body = control.encode_request(control.build_request(api_key, version, **fields))
        correlation_id = self._awaited.next_id()
        head = request_header(api_key, version, correlation_id, self._sender)
        frame = await self._ask(correlation_id, frame_message(head, body))
        return control.decode_response(api_key, version, frame[response_body_offset(frame, api_key, version) :])

    # Requests

    def fetch(
        self,
        topics: Sequence[tuple[bytes, Sequence[PartitionFetch]]],
        *,
        max_wait_ms: int,
        min_bytes: int,
        max_bytes: int,
    ) -> asyncio.Future[memoryview]:
        """Request topics by id; the future gets the frame for `read_answer`, or LeaderLost."""
        correlation_id = self._awaited.next_id()
        frame = encode_replica_fetch(
            self._follower.node_id,
            topics,
            correlation_id=correlation_id,
            sender=self._sender,
            max_wait_ms=max_wait_ms,
            min_bytes=min_bytes,
            max_bytes=max_bytes,
        )
        return self._ask(correlation_id, frame)

    @staticmethod
    def read_answer(frame: memoryview) -> ReplicaAnswer:
        """Decode a Fetch answer. Raises LeaderLost for an invalid one, or one that fails as a whole."""
        try:
            answer = read_replica_answer(frame)
        except CodecError as error:
            raise LeaderLost(f"not an answer: {error}") from error
        if answer.error_code != error_codes.NONE:
            raise LeaderLost(f"the leader says {error_codes.name_of(answer.error_code)}")
        return answer

    def _ask(self, correlation_id: int, frame: bytes) -> asyncio.Future[memoryview]:
        answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            answer.set_exception(LeaderLost(self._lost_because or "not connected"))
        else:
            self._awaited.sent(correlation_id, answer)
            self._transport.write(frame)
        return answer

    def close(self) -> None:
        """Close; pending requests fail with LeaderLost. May be called twice."""
        self._lose("closed here")

    def _lose(self, reason: str) -> None:
        self._lost_because = self._lost_because or reason
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        for answer in self._awaited.end():
            if not answer.done():
                answer.set_exception(LeaderLost(self._lost_because))
                # Nobody may await it any more.
                answer.exception()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_open:
            self._lose(CLOSED if exc is None else f"the connection broke: {exc}")
        else:
            self._lose(self._way.explain(exc))

    def eof_received(self) -> bool:
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for answer, frame in self._awaited.receive(nbytes):
                if not answer.done():
                    answer.set_result(frame)
        except UnexpectedAnswer as error:
            self._lose(str(error))
        except CodecError as error:
            self._lose(f"not an answer: {error}")


MAX_WAIT_MS = 500
MIN_BYTES = 1
# The records in one answer, which has to be in memory as a whole.
MAX_BYTES = 4 << 20
# Added to the wait that the request allows the leader.
ANSWER_PATIENCE_S = 10.0
PARTITION_PAUSE_S = 0.1
LONGEST_STEP_S = 0.01
# The wait for applied records to be flushed, so that the next request can ask behind them: most disks take far less.
FLUSH_PATIENCE_S = 0.05
# About the cost of one partition in a request. Beyond PARTITIONS_WITHOUT_REST as much time is left to other tasks
# between an answer and the next request, so that appends to many partitions are fetched together.
REST_S_PER_PARTITION = 30e-6
PARTITIONS_WITHOUT_REST = 200
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
_logger = structlog.get_logger(__name__)

_Asked = list[tuple[Partition, PartitionFetch]]
# By the bytes of the topic id.
_Wire = list[tuple[bytes, list[PartitionFetch]]]


class ReplicaFetchers:
    """Begins and ends fetchers as leaderships change. The caller owns the coroutine `run`."""

    def __init__(
        self,
        replica: ReplicaKey,
        view: ClusterView,
        hosted: Mapping[tuple[bytes, int], Partition],
        secret: Callable[[], Secret],
        arena: ReceiveArena,
        max_answer_bytes: int,
        *,
        may_fetch: Callable[[], bool],
        encryption: Encryption = NO_ENCRYPTION,
    ) -> None:
        """`replica` is this broker and its data directory.

        `hosted` is read anew whenever something changes, `secret` at each connection. `may_fetch`, asked before each
        request, tells whether our lease is certain to live.
        """
        self._replica = replica
        self._view = view
        self._hosted = hosted
        self._secret = secret
        self._arena = arena
        self._max_answer_bytes = max_answer_bytes
        self._may_fetch = may_fetch
        self._encryption = encryption
        self._fetchers: dict[int, _Fetcher] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        view.subscribe(self._on_change)

    def wake(self) -> None:
        """Look at the partitions again: one has another leader, none, or another epoch."""
        self._changed.set()

    def _on_change(self, change: Change) -> None:
        if change.kind in (Kind.BROKER, Kind.SNAPSHOT):
            self.wake()

    async def run(self) -> None:
        """Fetch the followed partitions until cancelled."""
        try:
            while True:
                self._assign()
                # Thousands of changes come when a broker starts or dies: handle them together.
                await asyncio.sleep(len(self._hosted) * REST_S_PER_PARTITION)
                await self._changed.wait()
                self._changed.clear()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _assign(self) -> None:
        followed: dict[int, list[Partition]] = {}
        for partition in self._hosted.values():
            leader = self._view.brokers.get(partition.leader_id)
            if leader is not None and leader.node_id != self._replica.node_id and leader.replication_port:
                followed.setdefault(leader.node_id, []).append(partition)
        for leader_id, fetcher in list(self._fetchers.items()):
            leader = self._view.brokers.get(leader_id)
            if leader_id not in followed or leader is None or _place(leader) != _place(fetcher.leader):
                fetcher.task.cancel()
                del self._fetchers[leader_id]
        for leader_id, partitions in followed.items():
            partitions.sort(key=_by_topic)
            fetcher = self._fetchers.get(leader_id) or self._begin(leader_id)
            fetcher.follow(partitions)

    def _begin(self, leader_id: int) -> _Fetcher:
        fetcher = _Fetcher(self._view.brokers[leader_id], self._open, self._may_fetch)
        self._fetchers[leader_id] = fetcher
        self._tasks.add(fetcher.task)
        fetcher.task.add_done_callback(self._ended)
        return fetcher

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _logger.error("fetcher failed", fetcher=task.get_name(), exc_info=task.exception())
            for leader_id, fetcher in list(self._fetchers.items()):
                if fetcher.task is task:
                    del self._fetchers[leader_id]
            # Another fetcher replaces it, after the pause before a leader is dialled again.
            asyncio.get_running_loop().call_later(LONGEST_PAUSE_S, self.wake)

    async def _open(self, leader: LiveBroker) -> LeaderConnection:
        return await LeaderConnection.open(
            leader.replication_port,
            self._encryption.towards(leader),
            self._replica,
            self._secret(),
            arena=self._arena,
            max_answer_bytes=self._max_answer_bytes,
        )


def _place(leader: LiveBroker) -> tuple[str, int, str]:
    """What a dial depends on."""
    return leader.host, leader.replication_port, leader.replication_tls


def _by_topic(partition: Partition) -> tuple[str, int]:
    return partition.topic, partition.partition_index


class _Fetcher:
    """Fetches the partitions followed from one `leader`; the caller cancels and awaits `task`."""

    def __init__(
        self,
        leader: LiveBroker,
        open_connection: Callable[[LiveBroker], Awaitable[LeaderConnection]],
        may_fetch: Callable[[], bool],
    ) -> None:
        self.leader = leader
        self._leader_id = leader.node_id
        self._open = open_connection
        self._may_fetch = may_fetch
        self._partitions: list[Partition] = []
        self._first = 0  # the place of the partition that the next request begins with
        self._paused: dict[Partition, float] = {}  # until when, on the loop's clock
        self._reason = ""  # why there is no connection, as it was logged
        self._wake: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self.task = asyncio.create_task(self._run(), name=f"fetcher of broker {leader.node_id}")

    def follow(self, partitions: list[Partition]) -> None:
        """Follow these partitions, ordered by topic, from now on."""
        self._partitions = partitions
        self._first = 0
        still = set(partitions)
        self._paused = {partition: until for partition, until in self._paused.items() if partition in still}
        if self._wake is not None:
            self._wake()

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                await self._until_allowed()
                connection = await self._open(self.leader)
                try:
                    while True:
                        if await self._exchange(connection):
                            pause, self._reason = FIRST_PAUSE_S, ""
                finally:
                    connection.close()
            except LeaderLost as error:
                self._log(str(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _log(self, reason: str) -> None:
        """Log each reason once: a leader that is gone is dialled until another broker leads."""
        if reason != self._reason:
            self._reason = reason
            address = str(Address(self.leader.host, self.leader.replication_port))
            _logger.warning("leader not reachable", leader_id=self._leader_id, address=address, reason=reason)

    async def _exchange(self, connection: LeaderConnection) -> bool:
        """Send one request and apply its answer; False if there was nothing to ask. Raises LeaderLost."""
        await self._until_allowed()
        asked, parts = self._next()
        if not asked:
            await self._until(None)
            return False
        wire: _Wire = []
        for partition, fetch in asked:
            topic_id = partition.topic_id.bytes
            if not wire or wire[-1][0] != topic_id:
                wire.append((topic_id, []))
            wire[-1][1].append(fetch)
        max_wait_ms = MAX_WAIT_MS // parts
        answer = connection.fetch(wire, max_wait_ms=max_wait_ms, min_bytes=MIN_BYTES, max_bytes=MAX_BYTES)
        await self._wait_for(connection, answer, asked, self._loop.time() + max_wait_ms / 1000 + ANSWER_PATIENCE_S)
        await self._take(asked, _matched(wire, connection.read_answer(answer.result())))
        await self._until_flushed([partition for partition, _ in asked if partition.is_flushing])
        if len(asked) > PARTITIONS_WITHOUT_REST:
            await asyncio.sleep((len(asked) - PARTITIONS_WITHOUT_REST) * REST_S_PER_PARTITION)
        return True

    def _next(self) -> tuple[_Asked, int]:
        """Choose what to ask now; also return how many requests it takes to ask for everything followed."""
        partitions, first = self._partitions, self._first
        parts = max(1, -(-len(partitions) // MAX_PARTITIONS))
        if first:
            partitions = partitions[first:] + partitions[:first]
        if parts > 1:
            partitions = partitions[:MAX_PARTITIONS]
            self._first = (first + MAX_PARTITIONS) % len(self._partitions)
        return [(partition, fetch) for partition in partitions if (fetch := self._to_ask(partition)) is not None], parts

    def _to_ask(self, partition: Partition) -> PartitionFetch | None:
        if partition.leader_id != self._leader_id:
            return None
        if partition in self._paused:
            if self._loop.time() < self._paused[partition]:
                return None
            del self._paused[partition]
        return partition.next_fetch()

    async def _take(self, asked: _Asked, found: Sequence[PartitionFetched]) -> None:
        """Apply an answer; yield to other tasks in between.

        A partition may have to wait for the disk, and there may be thousands.
        """
        size, last, began_at = 0, 0, time.monotonic()
        for place, ((partition, fetch), fetched) in enumerate(zip(asked, found, strict=True)):
            if fetched.records:
                size += len(fetched.records)
                last = place
            if not partition.take_fetched(fetch, fetched):
                self._paused[partition] = self._loop.time() + PARTITION_PAUSE_S
            if time.monotonic() - began_at > LONGEST_STEP_S:
                await asyncio.sleep(0)
                began_at = time.monotonic()
        if size >= MAX_BYTES // 2:
            # There may have been no room for the partitions behind it: they come first now.
            behind = asked[(last + 1) % len(asked)][0]
            self._first = self._partitions.index(behind) if behind in self._partitions else 0

    # Waiting

    async def _until_allowed(self) -> None:
        # Nothing signals that a lapsed lease was renewed after all, and it is rare.
        while not self._may_fetch():  # noqa: ASYNC110
            await asyncio.sleep(PARTITION_PAUSE_S)

    async def _until_flushed(self, flushing: Sequence[Partition]) -> None:
        for partition in flushing:
            partition.when_flushed(self._hurry)
        end = self._loop.time() + FLUSH_PATIENCE_S
        while any(partition.is_flushing for partition in flushing) and self._loop.time() < end:
            await self._until(None, end, heed_pauses=False)

    def _hurry(self) -> None:
        if self._wake is not None:
            self._wake()

    async def _wait_for(
        self, connection: LeaderConnection, answer: asyncio.Future[memoryview], asked: _Asked, deadline: float
    ) -> None:
        """Wait for `answer`; hurry the leader as soon as there is more to ask. Raises LeaderLost."""
        hurried: asyncio.Future[memoryview] | None = None
        while not answer.done():
            # Once hurried, the end of a pause is ignored: it would be over at every look from then on.
            await self._until(answer, deadline, heed_pauses=hurried is None)
            if answer.done():
                break
            if self._loop.time() >= deadline:
                raise LeaderLost("no answer in time")
            if hurried is None and self._is_more_to_ask(asked):
                # Its answer does not matter: its only purpose is to stand behind the waiting fetch.
                hurried = connection.fetch((), max_wait_ms=0, min_bytes=0, max_bytes=0)
        if hurried is not None:
            try:
                async with asyncio.timeout_at(deadline):
                    await hurried
            except TimeoutError as error:
                raise LeaderLost("no answer in time") from error

    def _is_more_to_ask(self, asked: _Asked) -> bool:
        under_way = {partition for partition, _ in asked}
        return any(each not in under_way and self._to_ask(each) is not None for each in self._partitions)

    async def _until(
        self, answer: asyncio.Future[memoryview] | None, deadline: float | None = None, *, heed_pauses: bool = True
    ) -> None:
        """Wait for an answer, a wake-up, the end of a partition's pause, or `deadline` on the loop's clock."""
        woken = self._loop.create_future()

        def wake(_: object = None) -> None:
            if not woken.done():
                woken.set_result(None)

        ends = [*(self._paused.values() if heed_pauses else ()), *([] if deadline is None else [deadline])]
        timer = self._loop.call_at(min(ends), wake) if ends else None
        self._wake = wake
        if answer is not None:
            answer.add_done_callback(wake)
        try:
            await woken
        finally:
            self._wake = None
            if timer is not None:
                timer.cancel()


def _matched(wire: _Wire, answer: ReplicaAnswer) -> list[PartitionFetched]:
    """Return the results if they are what was asked for. Raises LeaderLost."""
    answered = [(topic_id, [each.partition_index for each in results]) for topic_id, results in answer.topics]
    if answered != [(topic_id, [each.partition_index for each in fetches]) for topic_id, fetches in wire]:
        raise LeaderLost("an answer to something that was not asked")
    return [each for _, results in answer.topics for each in results]

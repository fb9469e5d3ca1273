"""Fetch the records of the partitions that this broker follows from their leaders.

For each broker that leads a followed partition there is one task, a fetcher, which has one connection to that broker.

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
2. Answers are matched in order and by correlation_id; a mismatch ends the connection.
3. Memory is bounded: frames by the limit of the state, pending answers by the requests sent.

States of a fetcher
  dialling   the leader is not reached yet; tried again with a growing pause
  fetching   one Fetch is under way, with the new questions; the leader keeps those that it has not answered
  resting    there is no partition to ask for, and none is open at the leader
  ended      no partition is followed from this leader any more, it is no longer live, or its address has changed

Transitions
  dialling -> fetching   both sides are authenticated
  fetching -> fetching   the answer is applied; the next request reports the new log end, for which the leader waits
  fetching -> resting    there is nothing to ask
  resting -> fetching    a leadership changed, or a partition's pause or flush is over
  fetching, resting -> dialling   the connection is lost, or the leader's answer is invalid
  any -> ended           `ReplicaFetchers` sees that leaderships or brokers changed

Invariants of a fetcher
1. A partition is asked for once, and again when it is answered, or the question would now be another one: the leader
   keeps the question open on this connection (`open_fetches`). So an answer always meets the log that it was asked for.
   A partition that is followed no more, or whose log was opened again, is withdrawn: otherwise the leader would rely on
   records of the earlier log.
2. An answer names open or just withdrawn partitions, each once; otherwise nothing of it counts and the connection ends.
3. A partition whose answer could not be applied waits PARTITION_PAUSE_S; the others are fetched meanwhile.
4. If there is a new question while the leader waits for records, a second request ends that wait.
5. A request asks for at most MAX_PARTITIONS partitions and at most MAX_BYTES of records; the leader first answers
   partitions that had no room before.
6. Without a live lease nothing is asked: another process may have the broker's id, and our reports would count for it.
7. If records must be on the disk, later records are not requested before that (`Partition.next_fetch`). A disk that is
   slow, or hangs, delays other partitions by at most FLUSH_PATIENCE_S.
8. Replication leaves both sides time for clients, however many partitions are followed: see REST_S_PER_PARTITION.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeVar, cast

import structlog

from kproxy.address import Address
from kproxy.broker.cluster import Change, ClusterView, Kind, LiveBroker
from kproxy.broker.keys import PartitionKey, ReplicaKey
from kproxy.broker.partition import Partition
from kproxy.broker.replication.authentication import MECHANISM, AuthenticationFailed, FollowerHandshake, Secret
from kproxy.broker.replication.encryption import CLOSED, NO_ENCRYPTION, Encryption
from kproxy.runtime.resolver import dial
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.correlation import AwaitedAnswers
from kproxy_codec.errors import CodecError, UnexpectedAnswer
from kproxy_codec.fetch import PartitionFetch
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
# Limit on a leader's message about a failed authentication.
MAX_MESSAGE_CHARACTERS = 500
# One request, and a second one that ends its wait.
MOST_AWAITED = 2
_HANDSHAKE_VERSION = 1
_AUTHENTICATE_VERSION = 2


class LeaderLost(Exception):
    """The connection is unusable or could not be made; the message gives the reason."""


class LeaderConnection(asyncio.BufferedProtocol):
    """A follower's connection to a leader, in the name of its broker and data directory. See `open`."""

    def __init__(self, follower: ReplicaKey, arena: ReceiveArena, host: str, encryption: Encryption) -> None:
        self._follower = follower
        self._host = host
        self._encryption = encryption
        self._sender = b"broker-%d" % follower.node_id
        self._reader = FrameReader(UNAUTHENTICATED_FRAME_BYTES, arena)
        self._transport: asyncio.Transport | None = None
        self._awaited: AwaitedAnswers[asyncio.Future[memoryview]] = AwaitedAnswers(self._reader, MOST_AWAITED)
        self._lost_because = ""
        self._is_open = False

    @classmethod
    async def open(
        cls,
        address: Address,
        encryption: Encryption,
        follower: ReplicaKey,
        secret: Secret,
        *,
        arena: ReceiveArena,
        max_answer_bytes: int,
    ) -> LeaderConnection:
        """Connect to the leader at `address` and authenticate both sides. Raises LeaderLost."""
        connection = cls(follower, arena, address.host, encryption)
        context = encryption.dial
        name = None if context is None else address.host
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                await dial(
                    lambda *place: loop.create_connection(
                        lambda: connection, *place, ssl=context, server_hostname=name
                    ),
                    *address,
                )
                await connection._authenticate(secret)
        except (OSError, AuthenticationFailed, CodecError) as error:
            connection.close()
            reason = "no answer in time" if isinstance(error, TimeoutError) else encryption.explain(error, address.host)
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
            raise AuthenticationFailed(f"the leader refuses {MECHANISM}: {error_codes.name_of(agreed.error_code)}")
        handshake_answer = await self._prove(handshake.first())
        handshake.check(await self._prove(handshake.final(handshake_answer)))

    async def _prove(self, message: bytes) -> bytes:
        answer = await self._control(SASL_AUTHENTICATE, _AUTHENTICATE_VERSION, auth_bytes=message)
        if answer.error_code != error_codes.NONE:
            said = f"the leader answers with {error_codes.name_of(answer.error_code)}"
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
        withdrawn: Sequence[tuple[bytes, Sequence[int]]] = (),
        *,
        max_wait_ms: int,
        min_bytes: int,
    ) -> asyncio.Future[memoryview]:
        """Fetch topics by id, and withdraw partitions; the future gets the frame for `read_answer`, or LeaderLost."""
        correlation_id = self._awaited.next_id()
        frame = encode_replica_fetch(
            self._follower.node_id,
            topics,
            withdrawn,
            correlation_id=correlation_id,
            sender=self._sender,
            max_wait_ms=max_wait_ms,
            min_bytes=min_bytes,
            max_bytes=MAX_BYTES,
        )
        return self._ask(correlation_id, frame)

    @staticmethod
    def read_answer(frame: memoryview) -> ReplicaAnswer:
        """Decode a Fetch answer. Raises LeaderLost if it is invalid or fails as a whole."""
        try:
            answer = read_replica_answer(frame)
        except CodecError as error:
            raise LeaderLost(f"invalid answer: {error}") from error
        if answer.error_code != error_codes.NONE:
            raise LeaderLost(f"the leader answers with {error_codes.name_of(answer.error_code)}")
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
                # The future may have no waiter by now.
                answer.exception()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_open:
            self._lose(CLOSED if exc is None else f"the connection broke: {exc}")
        else:
            self._lose(self._encryption.explain(exc, self._host))

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
            self._lose(f"invalid answer: {error}")


MAX_WAIT_MS = 500
MIN_BYTES = 1
# Limit on the records of one answer, which is held in memory as a whole.
MAX_BYTES = 4 << 20
# The time for an answer beyond the wait time in the request.
ANSWER_PATIENCE_S = 10.0
PARTITION_PAUSE_S = 0.1
LONGEST_STEP_S = 0.01
# The longest wait for a flush of applied records before the next request.
FLUSH_PATIENCE_S = 0.05
# About the cost of one partition in a request. Beyond PARTITIONS_WITHOUT_REST other tasks get as much time between an
# answer and the next request, so that appends to many partitions are fetched together.
REST_S_PER_PARTITION = 30e-6
PARTITIONS_WITHOUT_REST = 200
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
_logger = structlog.get_logger(__name__)

_Asked = list[tuple[Partition, PartitionFetch]]
# Topic id and partition index.
_Key = tuple[bytes, int]
_Thing = TypeVar("_Thing")


@dataclass(eq=False)
class ReplicaFetchers:
    """Starts and stops fetchers as leaderships change. The caller owns the coroutine `run`.

    `replica` is this broker and its data directory. `hosted` is read again after each change, `secret` at each
    connection. `may_fetch`, called before each request, returns whether our lease is certain to live.
    """

    replica: ReplicaKey
    view: ClusterView
    hosted: Mapping[tuple[bytes, int], Partition]
    secret: Callable[[], Secret]
    arena: ReceiveArena
    max_answer_bytes: int
    _: KW_ONLY
    may_fetch: Callable[[], bool]
    encryption: Encryption = NO_ENCRYPTION

    def __post_init__(self) -> None:
        self._fetchers: dict[int, _Fetcher] = {}
        self._followed: dict[tuple[bytes, int], tuple[Partition, _Fetcher]] = {}
        # Keys of `hosted` to check again.
        self._stale: set[tuple[bytes, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.view.subscribe(self._on_change)

    def wake(self, key: PartitionKey | None = None) -> None:
        """Check a partition again, or all: it has another leader, none, or another epoch, or was opened or closed.

        One call for all is enough: thousands of changes come when a broker starts or dies.
        """
        if key is None:
            self._stale.update(self.hosted, self._followed)
        else:
            self._stale.add((key.topic.encode(), key.partition_index))
        self._changed.set()

    def _on_change(self, change: Change) -> None:
        if change.kind in (Kind.BROKER, Kind.SNAPSHOT):
            self.wake()

    async def run(self) -> None:
        """Fetch the followed partitions until cancelled."""
        self.wake()
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                stale, self._stale = self._stale, set()
                self._assign(stale)
                await asyncio.sleep(len(stale) * REST_S_PER_PARTITION)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _assign(self, stale: Iterable[tuple[bytes, int]]) -> None:
        for leader_id, fetcher in list(self._fetchers.items()):
            leader = self.view.brokers.get(leader_id)
            if leader is None or _address(leader) != _address(fetcher.leader):
                self._end(leader_id)
        for key in stale:
            partition = self.hosted.get(key)
            wanted = self._fetcher_for(partition.leader_id) if partition is not None else None
            before = self._followed.pop(key, None)
            if before is not None and before != (partition, wanted):
                before[1].leave(before[0])
            if partition is not None and wanted is not None:
                self._followed[key] = partition, wanted
                wanted.follow(partition)
        for leader_id, fetcher in list(self._fetchers.items()):
            if fetcher.is_idle:
                self._end(leader_id)
            fetcher.hurry()

    def _fetcher_for(self, leader_id: int) -> _Fetcher | None:
        leader = self.view.brokers.get(leader_id)
        if leader is None or leader_id == self.replica.node_id:
            return None
        return self._fetchers.get(leader_id) or self._begin(leader_id)

    def _end(self, leader_id: int) -> None:
        self._fetchers.pop(leader_id).task.cancel()

    def _begin(self, leader_id: int) -> _Fetcher:
        fetcher = _Fetcher(self.view.brokers[leader_id], self._open, self.may_fetch)
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
            # Another fetcher replaces it, after the pause before redialling a leader.
            asyncio.get_running_loop().call_later(LONGEST_PAUSE_S, self.wake)

    async def _open(self, leader: LiveBroker) -> LeaderConnection:
        return await LeaderConnection.open(
            _address(leader),
            self.encryption,
            self.replica,
            self.secret(),
            arena=self.arena,
            max_answer_bytes=self.max_answer_bytes,
        )


def _address(leader: LiveBroker) -> Address:
    return Address(leader.host, leader.replication_port)


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
        self._open_connection = open_connection
        self._may_fetch = may_fetch
        self._partitions: set[Partition] = set()
        self._to_ask: dict[Partition, None] = {}
        self._open: dict[_Key, tuple[Partition, PartitionFetch]] = {}
        self._withdrawn: set[_Key] = set()  # the leader may answer these until it sees the withdrawal
        self._paused: dict[Partition, float] = {}  # until when, on the loop's clock
        self._reason = ""  # the last logged reason for a missing connection
        self._wake: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self.task = asyncio.create_task(self._run(), name=f"fetcher of broker {leader.node_id}")

    @property
    def is_idle(self) -> bool:
        """Whether it follows no partition."""
        return not self._partitions

    def follow(self, partition: Partition) -> None:
        """Follow this partition, perhaps again; `hurry` then requests it."""
        key = _key(partition)
        if partition not in self._partitions:
            self._partitions.add(partition)
            # A log that is new here may not know what the leader reported before.
            self._withdrawn.add(key)
        found = self._open.get(key)
        if found is not None and found != (partition, partition.next_fetch()):
            del self._open[key]
            self._withdrawn.add(key)
            found = None
        if found is None and partition not in self._paused:
            self._to_ask[partition] = None

    def leave(self, partition: Partition) -> None:
        """Stop following this partition."""
        self._partitions.discard(partition)
        self._to_ask.pop(partition, None)
        self._paused.pop(partition, None)
        if self._open.pop(_key(partition), None) is not None:
            self._withdrawn.add(_key(partition))

    def _begin_anew(self) -> None:
        """Ask for every partition again: the leader drops the questions of earlier connections."""
        self._open.clear()
        self._withdrawn.clear()
        self._to_ask = {partition: None for partition in self._partitions if partition not in self._paused}

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                await self._until_allowed()
                connection = await self._open_connection(self.leader)
                try:
                    self._begin_anew()
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
        """Log each reason once: a lost leader is redialled until another broker leads."""
        if reason != self._reason:
            self._reason = reason
            address = str(_address(self.leader))
            _logger.warning("leader not reachable", leader_id=self._leader_id, address=address, reason=reason)

    async def _exchange(self, connection: LeaderConnection) -> bool:
        """Send one request and apply its answer; False if there was nothing to request. Raises LeaderLost."""
        await self._until_allowed()
        asked = self._next()
        withdrawn, self._withdrawn = self._withdrawn, set()
        if not self._open and not withdrawn:
            await self._until(None)
            return False
        max_wait_ms = MAX_WAIT_MS if not self._to_ask else 0
        answer = connection.fetch(
            _by_topic_id((partition.topic_id.bytes, fetch) for partition, fetch in asked),
            _by_topic_id(withdrawn),
            max_wait_ms=max_wait_ms,
            min_bytes=MIN_BYTES,
        )
        deadline = self._loop.time() + max_wait_ms / 1000 + ANSWER_PATIENCE_S
        taken: list[Partition] = []
        for frame in await self._wait_for(connection, answer, deadline):
            taken += await self._take(connection.read_answer(frame))
        await self._until_flushed([partition for partition in taken if partition.is_flushing])
        most = max(len(asked), len(taken))
        if most > PARTITIONS_WITHOUT_REST:
            await asyncio.sleep((most - PARTITIONS_WITHOUT_REST) * REST_S_PER_PARTITION)
        return True

    def _next(self) -> _Asked:
        """Choose the next questions, which are open from now on."""
        now = self._loop.time()
        for partition in [partition for partition, until in self._paused.items() if until <= now]:
            del self._paused[partition]
            self._to_ask[partition] = None
        asked: _Asked = []
        while self._to_ask and len(asked) < MAX_PARTITIONS:
            partition = next(iter(self._to_ask))
            del self._to_ask[partition]
            fetch = partition.next_fetch() if partition.leader_id == self._leader_id else None
            if fetch is not None:
                asked.append((partition, fetch))
                self._open[_key(partition)] = partition, fetch
            elif partition.is_flushing:
                partition.when_flushed(partial(self._ask_again, partition))
        return asked

    def _ask_again(self, partition: Partition) -> None:
        if partition in self._partitions:
            self._to_ask[partition] = None
            self.hurry()

    async def _take(self, answer: ReplicaAnswer) -> list[Partition]:
        """Apply an answer and return its partitions; yield to other tasks in between. Raises LeaderLost.

        A partition may need to wait for the disk, and there may be thousands.
        """
        results = [(topic_id, fetched) for topic_id, fetches in answer.topics for fetched in fetches]
        named = [(topic_id, fetched.partition_index) for topic_id, fetched in results]
        if len(set(named)) < len(named) or not all(key in self._open or key in self._withdrawn for key in named):
            raise LeaderLost("the leader's answer matches no request")
        taken: list[Partition] = []
        began_at = time.monotonic()
        for key, (_, fetched) in zip(named, results, strict=True):
            found = self._open.pop(key, None)
            if found is None:
                continue  # withdrawn meanwhile
            partition, fetch = found
            taken.append(partition)
            if partition.take_fetched(fetch, fetched):
                self._to_ask[partition] = None
            else:
                self._paused[partition] = self._loop.time() + PARTITION_PAUSE_S
            if time.monotonic() - began_at > LONGEST_STEP_S:
                await asyncio.sleep(0)
                began_at = time.monotonic()
        return taken

    # Waiting

    async def _until_allowed(self) -> None:
        # No event reports that a lapsed lease was renewed after all; this is rare, so poll.
        while not self._may_fetch():  # noqa: ASYNC110
            await asyncio.sleep(PARTITION_PAUSE_S)

    async def _until_flushed(self, flushing: Sequence[Partition]) -> None:
        for partition in flushing:
            partition.when_flushed(self.hurry)
        end = self._loop.time() + FLUSH_PATIENCE_S
        while any(partition.is_flushing for partition in flushing) and self._loop.time() < end:
            await self._until(None, end, heed_pauses=False)

    def hurry(self) -> None:
        if self._wake is not None:
            self._wake()

    async def _wait_for(
        self, connection: LeaderConnection, answer: asyncio.Future[memoryview], deadline: float
    ) -> list[memoryview]:
        """Wait for `answer`; hurry the leader as soon as there is more to request. Raises LeaderLost."""
        hurried: asyncio.Future[memoryview] | None = None
        while not answer.done():
            # Once hurried, the end of a pause is ignored: it would be over at every look from then on.
            await self._until(answer, deadline, heed_pauses=hurried is None)
            if answer.done():
                break
            now = self._loop.time()
            if now >= deadline:
                raise LeaderLost("no answer in time")
            if hurried is None and (self._to_ask or any(until <= now for until in self._paused.values())):
                # Its only purpose is to end the wait of the earlier fetch.
                hurried = connection.fetch((), max_wait_ms=0, min_bytes=0)
        if hurried is None:
            return [answer.result()]
        try:
            async with asyncio.timeout_at(deadline):
                return [answer.result(), await hurried]
        except TimeoutError as error:
            raise LeaderLost("no answer in time") from error

    async def _until(
        self, answer: asyncio.Future[memoryview] | None, deadline: float | None = None, *, heed_pauses: bool = True
    ) -> None:
        """Wait for an answer, a wake-up, the end of a partition's pause, or `deadline` on the loop's clock."""
        woken = asyncio.Event()
        ends = [*(self._paused.values() if heed_pauses else ()), *([] if deadline is None else [deadline])]
        self._wake = woken.set
        if answer is not None:
            answer.add_done_callback(lambda _: woken.set())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(ends, default=None)):
                    await woken.wait()
        finally:
            self._wake = None


def _key(partition: Partition) -> _Key:
    return partition.topic_id.bytes, partition.partition_index


def _by_topic_id(things: Iterable[tuple[bytes, _Thing]]) -> list[tuple[bytes, list[_Thing]]]:
    grouped: dict[bytes, list[_Thing]] = {}
    for topic_id, thing in things:
        grouped.setdefault(topic_id, []).append(thing)
    return list(grouped.items())

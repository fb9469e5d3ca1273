"""Simulate clients that record every batch they send and judge every answer as it arrives.

`Idempotent` behaves like Java's producer: it has at most five requests in flight, and after a failure sends nothing
until all of them are answered, and then the failed batches, in order. It sends until all are acknowledged. A
transactional one differs in its batches' flag. `Plain` never sends a batch twice, and `Silent` sends with acks=0. All
of them sometimes disconnect with a request half sent or answers unread, and return on another connection. All of them
also read sometimes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final

from kproxy.proxy.client_session import ClientSession
from kproxy.proxy.partitioned_requests import READ_GRACE_S
from tests.simulation import wire
from tests.simulation.dice import What
from tests.simulation.network import SimulatedTransport
from tests.simulation.partitions import OUT_OF_ORDER, RETAINED_BATCHES, Batch, Partition
from tests.simulation.setting import ClientSetting

if TYPE_CHECKING:
    from tests.simulation.world import World

NONE: Final = 0
# Error codes that prove that a batch sent once is not in the log.
NOT_APPENDED: Final = frozenset({2, 3, 5, 6, 10, 19, 29, 44, 45, 56, 87, 100})
# The same for a batch that the proxy may have sent more than once: a failed disk says nothing about the first time.
SAY_NOT_APPENDED: Final = NOT_APPENDED - {56}
# Interval for checking deadlines.
TICK_S: Final = 0.1
CLOCK_S: Final = 1e-6
# The time limit for a read, including the longest wait that it requests.
MOST_READ_S: Final = READ_GRACE_S + 0.05
BATCH_RECORDS: Final = 4
MOST_SENDS: Final = 200
# After more refusals than this a batch is sent with a back-off. Real clients back off from the first refusal on.
SENDS_AT_ONCE: Final = 20
BACKOFF_S: Final = 0.1


class Sent:
    """A request that awaits an answer: the batches of a produce request, or the `partitions` of a read."""

    __slots__ = ("api_key", "batches", "by", "correlation_id", "end", "partitions", "start", "timeout_ms", "version")

    def __init__(self, api_key: int, version: int, correlation_id: int) -> None:
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.batches: list[Batch] = []
        self.partitions: list[Partition] = []
        self.timeout_ms = 0
        # Its place in the byte stream of the connection, and its deadline once it has begun.
        self.start = 0
        self.end = 0
        self.by = 0.0


class Connection:
    """A client's end of one connection (`FarEnd`)."""

    def __init__(self, client: Client, ordinal: int, proxy: int) -> None:
        self.client = client
        self.ordinal = ordinal
        self.proxy = proxy
        self.transport: SimulatedTransport | None = None
        self.session: ClientSession | None = None
        self.in_flight: deque[Sent] = deque()
        self.is_over = False
        self._bytes = b""
        self._sent_bytes = 0
        # Requests that the proxy has not read completely, and those that it has not begun to read.
        self._unread: deque[Sent] = deque()
        self._unbegun: deque[Sent] = deque()
        self._latest_by = 0.0

    def send(self, frame: bytes, sent: Sent) -> None:
        sent.start = self._sent_bytes
        self._sent_bytes += len(frame)
        sent.end = self._sent_bytes
        self._unread.append(sent)
        self._unbegun.append(sent)
        if self.transport is not None:
            self.transport.send(frame)

    def send_half(self, part: bytes) -> None:
        self._sent_bytes += len(part)
        if self.transport is not None:
            self.transport.send(part)

    def fed(self, total: int, now: float) -> None:
        while self._unbegun and self._unbegun[0].start < total:
            sent = self._unbegun.popleft()
            # Answers leave in order, so each waits for those before it.
            self._latest_by = sent.by = max(self._latest_by, now + self.client.patience_s(sent))
        while self._unread and self._unread[0].end <= total:
            sent = self._unread.popleft()
            # A request that was not read in time, because there was no room, is answered when it is read.
            self._latest_by = max(self._latest_by, now)
            sent.by = max(sent.by, now)
            if self.session is not None and not self.session.closed:
                for batch in sent.batches:
                    batch.taken_at = now

    def got(self, data: bytes, written_at: float) -> None:
        if self.is_over:
            return
        data = self._bytes + data if self._bytes else data
        at = 0
        while len(data) >= at + 4 and not self.is_over:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end > len(data):
                break
            self.client.answered(self, data[at:end], written_at)
            at = end
        self._bytes = data[at:]

    def ended(self, *, reset: bool) -> None:
        if not self.is_over:
            if self.transport is not None and not reset:
                self.transport.end()
            self.client.disconnected(self)


class Client:
    """Sends `setting.count` requests. `number` counts from 1 and is the producer id of an idempotent client."""

    def __init__(self, world: World, number: int, setting: ClientSetting, partitions: list[Partition]) -> None:
        self.world = world
        self.number = number
        self.setting = setting
        self.partitions = partitions
        self.left = setting.count
        self.batches: list[Batch] = []
        # Batches of requests that were not sent completely: these must not be in any log.
        self.unsent: list[Batch] = []
        self.connection: Connection | None = None
        self.connections = 0
        self.requests = 0
        self._name = b"client-%d" % number
        self._transactional_id = b"transactions-%d" % number if setting.kind == "transactional" else None
        self._padding = bytes(range(256)) * (setting.padding // 256) + bytes(setting.padding % 256)
        self._numbers: dict[Partition, int] = defaultdict(int)
        self._dice = world.dice
        self._is_waiting = False
        # Whether an intended fault has affected this client, which is then no longer judged.
        self.is_void = False

    def __str__(self) -> str:
        return f"{self.setting.kind} client {self.number} (acks {self.setting.acks})"

    # Differences between kinds of clients

    @property
    def is_done(self) -> bool:
        return not self.left and not (self.connection is not None and self.connection.in_flight)

    def _compose(self) -> list[Batch]:
        """The batches of the next request; none if none may be sent now."""
        raise NotImplementedError

    def _settled(self, batch: Batch, code: int | None) -> None:
        """Handle an answer; None for an answer that will never come."""

    def proxy_of(self, ordinal: int) -> int:
        """The proxy that this connection of the client leads to."""
        return 0

    def patience_s(self, sent: Sent) -> float:
        """The time limit for a request, from its first byte on."""
        if sent.api_key != wire.PRODUCE:
            return MOST_READ_S
        return max(1.0, 0.0009 * min(sent.timeout_ms, self.world.limits.deadline_cap_ms))

    def _read_answer(self, sent: Sent, frame: bytes) -> tuple[int, wire.Results]:
        """The correlation_id and the results. Raises NoMessage."""
        if sent.api_key == wire.PRODUCE:
            return wire.read_produce_response(frame, sent.version)
        return wire.read_read_response(sent.api_key, frame)

    def _take_answer(self, connection: Connection, sent: Sent, results: wire.Results) -> None:
        if sent.api_key == wire.PRODUCE:
            self._take_results(sent, results)
        else:
            self._check(results, [(each.topic, each.index) for each in sent.partitions])

    def _rests_s(self, drawn: float) -> float:
        """The pause between two connections."""
        return 0.1 * drawn

    # Running

    def begin(self) -> None:
        self._wait(self._dice.at(What.PACE, self.number, 0) * 0.02)

    def _wait(self, seconds: float) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self.world.loop.call_later(seconds, self._wake)

    def _wake(self) -> None:
        self._is_waiting = False
        self.go_on()

    def go_on(self) -> None:
        """Send all requests that may be sent now."""
        dice, number = self._dice, self.number
        while not self._is_waiting and not self.world.found:
            if self.is_done:
                self.world.done(self)
                return
            if self.connection is None:
                self.connections += 1
                self.connection = self.world.connect(self, self.connections)
            connection = self.connection
            if len(connection.in_flight) >= self.setting.in_flight:
                return
            batches = self._compose()
            if not batches:
                return
            self.requests += 1
            reads, leaves = self.setting.reads, self.setting.leaves
            if reads and dice.at(What.READ, number, self.requests) < reads:
                self._read(connection)
            self._produce(connection, batches)
            if leaves and (drawn := dice.at(What.LEAVE, number, self.requests)) < leaves:
                self._leave(connection, drawn / leaves)
                return
            paced = dice.at(What.PACE, number, self.requests)
            if paced > 0.6:
                # The mean pause is `pace_s`, but most requests are sent at once.
                self._wait(self.setting.pace_s * (paced - 0.6) * 12.5)

    def _frame(self, batches: list[Batch], version: int, correlation_id: int) -> bytes:
        topics: wire.Asked = []
        for batch in batches:
            partition = batch.partition
            called = partition.topic_id if version >= wire.TOPIC_IDS_FROM else partition.topic
            if topics and topics[-1][0] == called:
                topics[-1][1].append((partition.index, batch.records))
            else:
                topics.append((called, [(partition.index, batch.records)]))
        setting = self.setting
        return wire.produce_request(
            version, correlation_id, self._name, self._transactional_id, setting.acks, setting.timeout_ms, topics
        )

    def _produce(self, connection: Connection, batches: list[Batch]) -> None:
        dice, number = self._dice, self.number
        versions = self.setting.versions
        version = dice.choice(versions, What.VERSION, number, self.requests) if len(versions) > 1 else versions[0]
        sent = Sent(wire.PRODUCE, version, int(dice.at(What.CORRELATION, number, self.requests) * 2**32) - 2**31)
        batches.sort(key=lambda batch: batch.partition.number)
        sent.batches = batches
        for batch in batches:
            batch.connection = connection.ordinal
            batch.sends += 1
        if self.setting.acks:
            sent.timeout_ms = self.setting.timeout_ms
            connection.in_flight.append(sent)
        connection.send(self._frame(batches, version, sent.correlation_id), sent)

    def _read(self, connection: Connection) -> None:
        drawn = self._dice.at(What.READ, -self.number, self.requests)
        api_key = wire.FETCH if drawn < 0.5 else wire.LIST_OFFSETS
        # Reads of one broker, again and again, have a path of their own.
        partitions = self.partitions[:1] if drawn < 0.3 else self.partitions
        topics: dict[bytes, list[int]] = {}
        for partition in partitions:
            topics.setdefault(partition.topic, []).append(partition.index)
        for repeat in range(1 + int(drawn * 10) % 3):
            sent = Sent(api_key, 0, self.requests + (repeat << 20))
            sent.partitions = partitions
            connection.in_flight.append(sent)
            connection.send(wire.read_request(api_key, sent.correlation_id, self._name, topics), sent)

    def _leave(self, connection: Connection, drawn: float) -> None:
        half, drawn = divmod(drawn * 2, 1.0)
        if half:
            partition = self._dice.choice(self.partitions, What.LEAVE, -self.number, self.requests)
            batch = self._new_batch(partition, counts=False)
            frame = self._frame([batch], 9, 0)
            connection.send_half(frame[: int(drawn * len(frame))])
        if connection.transport is not None:
            if drawn < 0.5:
                connection.transport.reset()
            else:
                connection.transport.end()
        self.world.fault("a client leaves")
        self.disconnected(connection)

    def disconnected(self, connection: Connection) -> None:
        """Requests without an answer never get one."""
        connection.is_over = True
        if self.connection is connection:
            self.connection = None
        for sent in connection.in_flight:
            for batch in sent.batches:
                batch.codes.append(None)
                self._settled(batch, None)
        connection.in_flight.clear()
        # The pause exceeds any network delay: with brokers that forget, batches of an earlier connection must not come
        # later.
        self._is_waiting = False
        self._wait(0.05 + self._rests_s(self._dice.at(What.PAUSE, self.number, self.connections)))

    def _new_batch(self, partition: Partition, *, counts: bool = True) -> Batch:
        number = self._numbers[partition] if counts else -len(self.unsent) - 1
        batch_id = self.number << 40 | partition.number << 28 | (number & 0xFFFFFFF)
        count = 1 + int(self._dice.at(What.COUNT, batch_id) * BATCH_RECORDS)
        batch = Batch(batch_id, self.number, partition, number, count)
        batch.acks = self.setting.acks
        if counts:
            self._numbers[partition] += 1
            self.batches.append(batch)
        else:
            self.unsent.append(batch)
        self._identify(batch)
        self.world.cluster.batches[batch_id] = batch
        return batch

    def _identify(self, batch: Batch) -> None:
        """Encode the batch."""
        batch.records = wire.batch(batch.id, batch.count, self._padding, transactional=False)

    def _some_of(self, partitions: list[Partition]) -> list[Partition]:
        """Choose some partitions for the next request, more often one than many."""
        if len(partitions) == 1:
            return partitions
        drawn = self._dice.at(What.PARTITIONS, self.number, self.requests, self.left)
        count = 1 + int(drawn * drawn * len(partitions))
        if count == len(partitions):
            return partitions
        return self._dice.sample(partitions, count, What.PARTITIONS, -self.number, self.requests, self.left)

    # Answers

    def answered(self, connection: Connection, frame: bytes, written_at: float) -> None:
        """Handle a whole answer that the proxy wrote at `written_at`."""
        found = self.world.found
        if not connection.in_flight:
            found.append(f"{self} got an answer too many: {frame[:40]!r}")
            return
        sent = connection.in_flight.popleft()
        try:
            correlation_id, results = self._read_answer(sent, frame)
        except wire.NoMessage as error:
            found.append(f"{self} got {error}")
            return
        if correlation_id != sent.correlation_id:
            found.append(f"{self} got an answer to {correlation_id}, {sent.correlation_id} was due")
            return
        if sent.by and written_at > sent.by + TICK_S + CLOCK_S:
            found.append(f"{self} got an answer at {written_at}, which was due by {sent.by} and a tick")
        self._take_answer(connection, sent, results)
        self.go_on()

    def _check(self, results: wire.Results, asked: list[tuple[bytes, int]]) -> bool:
        answered = [(topic, index) for topic, entries in results for index, _, _ in entries]
        if answered != asked:
            self.world.found.append(f"{self} asked for {asked} and got {answered}")
        return answered == asked

    def _take_results(self, sent: Sent, results: wire.Results) -> None:
        by_id = sent.version >= wire.TOPIC_IDS_FROM
        asked = [
            (batch.partition.topic_id if by_id else batch.partition.topic, batch.partition.index)
            for batch in sent.batches
        ]
        if not self._check(results, asked):
            return
        outcomes = [(code, offset) for _, entries in results for _, code, offset in entries]
        for batch, (code, offset) in zip(sent.batches, outcomes, strict=True):
            batch.codes.append(code)
            if code == NONE:
                batch.offset = offset
                if offset not in batch.places:
                    self.world.found.append(f"{self}: {batch} is acknowledged at {offset}, it is at {batch.places}")
            elif code in SAY_NOT_APPENDED and batch.places and batch.sends == 1:
                self.world.found.append(f"{self}: {batch} was refused, and is at {batch.places}")
            self._settled(batch, code)


class Plain(Client):
    """A client without a producer id, which sends each batch once."""

    def _compose(self) -> list[Batch]:
        if not self.left:
            return []
        self.left -= 1
        return [self._new_batch(partition) for partition in self._some_of(self.partitions)]


class Silent(Plain):
    """A client with acks=0."""


class Idempotent(Client):
    """A client with a producer id, which sends failed batches again until they are acknowledged."""

    def __init__(self, world: World, number: int, setting: ClientSetting, partitions: list[Partition]) -> None:
        super().__init__(world, number, setting, partitions)
        self._to_send: dict[Partition, deque[Batch]] = {partition: deque() for partition in partitions}
        self._failed: list[Batch] = []
        self._unacked: dict[Partition, dict[int, None]] = {partition: {} for partition in partitions}
        self._sequences: dict[Partition, int] = defaultdict(int)

    @property
    def is_done(self) -> bool:
        return self.is_void or (super().is_done and not self._failed and not any(self._to_send.values()))

    def _compose(self) -> list[Batch]:
        if self._failed:
            if self.connection is not None and self.connection.in_flight:
                return []
            for batch in sorted(self._failed, key=lambda each: each.number, reverse=True):
                self._to_send[batch.partition].appendleft(batch)
            self._failed = []
        again = [partition for partition, waiting in self._to_send.items() if waiting]
        if again:
            return [self._to_send[partition].popleft() for partition in self._some_of(again)]
        if not self.left:
            return []
        free = [partition for partition in self.partitions if self._may_begin(partition)]
        if not free:
            return []
        self.left -= 1
        return [self._new_batch(partition) for partition in self._some_of(free)]

    def _may_begin(self, partition: Partition) -> bool:
        """Whether a broker would still recognize the oldest unacknowledged batch after one more.

        The very first batch goes alone: a broker that knows nothing of a producer accepts any sequence. Batches sent
        before the refusal of the first one is known would be accepted in its place, with a proxy or without.
        """
        unacked = self._unacked[partition]
        if not unacked:
            return True
        oldest = min(unacked)
        return oldest > 0 and self._numbers[partition] - oldest < RETAINED_BATCHES

    def _identify(self, batch: Batch) -> None:
        batch.producer = self.number
        batch.sequence = self._sequences[batch.partition]
        if batch.number >= 0:
            self._sequences[batch.partition] += batch.count
            self._unacked[batch.partition][batch.number] = None
        identity = (self.number, 0, batch.sequence)
        is_transactional = self._transactional_id is not None
        batch.records = wire.batch(batch.id, batch.count, self._padding, identity, transactional=is_transactional)

    def _settled(self, batch: Batch, code: int | None) -> None:
        if code == NONE:
            self._unacked[batch.partition].pop(batch.number, None)
            return
        if code == OUT_OF_ORDER:
            is_forgotten = bool(batch.places) and not self.world.setting.knows_again
            if is_forgotten or self.is_beyond_help(batch.partition):
                self.is_void = True
                self.left = 0
                return
            # If all earlier batches are acknowledged, Java gives up such a producer; otherwise librdkafka begins a new
            # epoch.
            self.world.found.append(f"{self}: {batch} is out of order")
        self._failed.append(batch)
        if batch.sends > SENDS_AT_ONCE:
            # A broker that is known to be down causes no wait: its requests are answered at once.
            self._wait(BACKOFF_S)
        if batch.sends > MOST_SENDS:
            self.world.found.append(f"{self}: {batch} is refused for ever")

    def is_beyond_help(self, partition: Partition) -> bool:
        """Whether the order is lost for a reason that no proxy can prevent, with brokers that forget: a batch was
        appended twice because the client sent it again, or a batch reached the proxy after the one before it had been
        given up and before the client knew.
        """
        if self.world.setting.knows_again:
            return False
        mine = [each for each in self.batches if each.partition is partition]
        return any(len(each.places) > 1 for each in mine) or any(
            later.places and before.first_arrived_at <= later.appended_of < before.taken_at
            for place, before in enumerate(mine)
            if before.sends > 1
            for later in mine[place + 1 :]
        )


KINDS: Final[dict[str, type[Client]]] = {
    "plain": Plain,
    "silent": Silent,
    "idempotent": Idempotent,
    "transactional": Idempotent,
}

"""Producers that record every batch they send, and the promises of a proxy to each kind of them.

`Idempotent` does what Java's producer does: at most five requests in flight; after a failure nothing until all of them
are answered, and then the failed batches, in order. It sends until all batches are acknowledged. `Plain` never sends a
batch twice, so a batch that is in the log twice was duplicated on the way. `Silent` sends with acks=0.

All of them cut their requests into random pieces, sometimes leave with a request half sent or answers unread, and come
back on another connection. Every answer is checked as it arrives: it must be the next one due, name exactly the
requested partitions, be in time, and have the offset of the batch in the log.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from tests.support.brokers.scripted_upstream import Partition
from tests.support.clients.raw_client import Answer, RawClient
from tests.support.wire.messages import PRODUCE, request_body, request_frame, sample_request
from tests.support.wire.record_batches import build_batch

NONE = 0
OUT_OF_ORDER = 45
# Kafka remembers this many batches of a producer.
RETAINED_BATCHES = 5
# Error codes that prove that a batch sent once is not in the log.
NOT_APPENDED = frozenset({2, 3, 5, 6, 10, 19, 29, 45, 56, 87})
LEAST_DEADLINE_S = 1.0
# The delay that a loaded machine may add to a deadline.
SLACK_S = 30.0
MOST_PAUSE_S = 0.05


@dataclass
class Batch:
    """One batch of one partition; `codes` are the error codes of its answers, None for an answer that never came."""

    partition: Partition
    number: int
    records: bytes
    connection: int = -1
    codes: list[int | None] = field(default_factory=list)
    offset: int = -1


@dataclass
class Sent:
    """A request in flight; `by` is its deadline."""

    correlation_id: int
    version: int
    batches: dict[Partition, Batch]
    by: float


class Violation(AssertionError):
    """The proxy broke a rule; `producer` and `partition` are the affected ones."""

    def __init__(self, producer: Producer, what: str, partition: Partition | None = None) -> None:
        super().__init__(f"{producer} {what}")
        self.producer = producer
        self.partition = partition


class Producer:
    """`count` requests of up to all of `partitions`, with at most `in_flight` unanswered at a time."""

    acks: ClassVar[tuple[int, ...]] = (-1,)

    def __init__(
        self, name: int, partitions: list[Partition], random: Random, connect: Callable[[], object], *, count: int
    ) -> None:
        self.name = name
        self.random = random
        self.partitions = random.sample(partitions, random.randint(1, len(partitions)))
        self.count = count
        self.in_flight_limit = random.randint(1, 5)
        self.leaves = random.choice((0.0, 0.0, 0.02))
        self.batches: list[Batch] = []
        # Batches of requests that were not sent completely: these must not be in any log.
        self.unsent: list[bytes] = []
        # The partitions in which `judge` found a fault.
        self.suspects: set[Partition] = set()
        self.connections = 0
        self.client: RawClient | None = None
        self._connect = connect
        self._in_flight: deque[Sent] = deque()
        self._numbers: dict[Partition, int] = defaultdict(int)
        self._acks = random.choice(self.acks)
        self._padding = b"x" * random.choice((0, 0, 100, 20_000))

    # Differences between kinds of producers

    def _identity(self, number: int) -> dict[str, int]:
        return {}

    def _is_done(self) -> bool:
        raise NotImplementedError

    def _compose(self) -> dict[Partition, Batch] | None:
        """The batches of the next request; None if none may be sent now."""
        raise NotImplementedError

    def _answered(self, batch: Batch, code: int) -> None:
        """Record an answer that has been checked."""

    def _lost(self, batch: Batch) -> None:
        """Note that the connection ended before the answer."""

    # Running

    async def run(self) -> None:
        while not self._is_done():
            await self._step()
            if self.random.random() < 0.1:
                await asyncio.sleep(self.random.random() * MOST_PAUSE_S)

    async def _step(self) -> None:
        try:
            if self.client is None:
                await self._reconnect()
            sent_one = False
            while len(self._in_flight) < self.in_flight_limit and (batches := self._compose()):
                sent_one = True
                await self._send(batches)
                if self.random.random() < 0.3:
                    break
            if self.random.random() < self.leaves:
                await self._leave()
            elif self._in_flight:
                await self._take_answer()
            elif not sent_one:
                await asyncio.sleep(0.001)
        except (ConnectionError, asyncio.IncompleteReadError):
            self._disconnected()

    async def _reconnect(self) -> None:
        self.client = await self._connect()  # type: ignore[misc]
        self.connections += 1

    async def _leave(self) -> None:
        assert self.client is not None
        if self.random.random() < 0.5:
            batch = self._new_batch(self.random.choice(self.partitions), counts=False)
            frame = self._frame(0, 9, {batch.partition: batch}, 1000)
            self.client.send(frame[: self.random.randrange(len(frame))])
            self.unsent.append(batch.records)
        if self.random.random() < 0.5:
            self.client.abort()
        else:
            self.client.close()
        self._disconnected()

    def _disconnected(self) -> None:
        if self.client is not None:
            self.client.abort()
            self.client = None
        for sent in self._in_flight:
            for batch in sent.batches.values():
                batch.codes.append(None)
                self._lost(batch)
        self._in_flight.clear()

    def _new_batch(self, partition: Partition, *, counts: bool = True) -> Batch:
        number = self._numbers[partition] if counts else -len(self.unsent) - 1
        value = f"{self.name}:{partition}:{number}:".encode() + self._padding
        batch = Batch(partition, number, bytes(build_batch([value], **self._identity(number))))
        if counts:
            self._numbers[partition] += 1
            self.batches.append(batch)
        return batch

    def _frame(self, correlation_id: int, version: int, batches: dict[Partition, Batch], timeout_ms: int) -> bytes:
        topics: dict[str, list[int]] = {}
        for topic, index in batches:
            topics.setdefault(topic, []).append(index)
        request = sample_request(PRODUCE, topics, timeout_ms=timeout_ms, acks=self._acks)
        for topic in request["topic_data"]:
            for entry in topic["partition_data"]:
                entry["records"] = batches[topic["name"], entry["index"]].records
        body = request_body(PRODUCE, version, request)
        return bytes(request_frame(PRODUCE, version, body, correlation_id=correlation_id))

    async def _send(self, batches: dict[Partition, Batch]) -> None:
        assert self.client is not None
        version = self.random.randint(3, 11)
        timeout_ms = self.random.choice((100, 1000, 2000, 4000))
        correlation_id = self.random.randint(-(2**31), 2**31 - 1)
        for batch in batches.values():
            batch.connection = self.connections
        deadline_s = max(LEAST_DEADLINE_S, 0.9 * timeout_ms / 1000)
        if self._acks:
            by = time.monotonic() + deadline_s + SLACK_S
            self._in_flight.append(Sent(correlation_id, version, batches, by))
        frame = self._frame(correlation_id, version, batches, timeout_ms)
        if self.client.is_gone:
            raise ConnectionResetError
        if self.random.random() < 0.1:
            cut = self.random.randrange(len(frame))
            self.client.send(frame[:cut])
            await asyncio.sleep(self.random.random() * 0.01)
            frame = frame[cut:]
            if self.client.is_gone:
                raise ConnectionResetError
        self.client.send(frame)
        await self.client.sent()

    async def _take_answer(self) -> None:
        assert self.client is not None
        sent = self._in_flight[0]
        try:
            frame = await self.client.receive(max(0.0, sent.by - time.monotonic()))
        except TimeoutError:
            raise Violation(self, f"waits for an answer for ever: {sent}") from None
        answer = Answer(frame, PRODUCE, sent.version)
        if answer.correlation_id != sent.correlation_id:
            raise Violation(self, f"got an answer to {answer.correlation_id}, {sent.correlation_id} was due")
        if set(answer.codes) != set(sent.batches):
            raise Violation(self, f"asked for {list(sent.batches)} and got {answer.codes}")
        self._in_flight.popleft()
        for result in answer.results:
            batch = sent.batches[result.topic, result.partition_index]
            offset = result.fields["base_offset"]
            if (result.error_code == NONE) is not (offset >= 0):
                raise Violation(self, f"got code {result.error_code} with offset {offset}")
            batch.codes.append(result.error_code)
            if result.error_code == NONE:
                batch.offset = offset
            self._answered(batch, result.error_code)

    def open_partitions(self) -> list[Partition]:
        """The partitions for which it lacks an expected result."""
        return [] if self._is_done() else self.partitions

    def tail(self, partition: Partition) -> str:
        last = [batch for batch in self.batches if batch.partition == partition][-12:]
        return ", ".join(f"{batch.number}: {batch.codes[-12:]}" for batch in last)

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.name} (acks {self._acks}, connection {self.connections})"

    # Judging

    async def unasked(self) -> bytes:
        """The bytes that the proxy has sent beyond the answers."""
        try:
            return b"" if self.client is None else await self.client.rest()
        except ConnectionError:
            return b""

    def judge(self, logs: dict[Partition, list[bytes]]) -> list[str]:
        """The faults of the logs at the end, for this producer's batches."""
        found = []
        places: dict[Partition, dict[bytes, list[int]]] = {}
        for partition, log in logs.items():
            place = places[partition] = defaultdict(list)
            for offset, records in enumerate(log):
                place[records].append(offset)
        for batch in self.batches:
            at = places[batch.partition][batch.records]
            what = f"{self}: batch {batch.number} of {batch.partition}, answers {batch.codes}, "
            before = len(found)
            if len(at) > 1:
                found.append(f"{what}is there {len(at)} times")
            if NONE in batch.codes and at[:1] != [batch.offset]:
                found.append(f"{what}acknowledged at {batch.offset}, is at {at}")
            if at and len(batch.codes) == 1 and batch.codes[0] in NOT_APPENDED:
                found.append(f"{what}refused, and is there at {at}")
            if len(found) > before:
                self.suspects.add(batch.partition)
        if any(records in place for records in self.unsent for place in places.values()):
            found.append(f"{self}: a batch that was never sent whole is in a log")
        return found + self._judge_order(places)

    def _judge_order(self, places: dict[Partition, dict[bytes, list[int]]]) -> list[str]:
        """Check that, per connection and partition, first occurrences are in the order of sending."""
        found = []
        latest: dict[tuple[Partition, int], tuple[int, int]] = {}
        for batch in self.batches:
            at = places[batch.partition][batch.records]
            if not at:
                continue
            key = batch.partition, batch.connection
            offset, number = latest.get(key, (-1, -1))
            if at[0] < offset:
                found.append(f"{self}: batch {batch.number} of {batch.partition} stands before {number}: {batch.codes}")
                self.suspects.add(batch.partition)
            latest[key] = at[0], batch.number
        return found


class Plain(Producer):
    """A producer without an id, which sends each batch once."""

    acks = (-1, 1)

    def _is_done(self) -> bool:
        return not self.count and not self._in_flight

    def _compose(self) -> dict[Partition, Batch] | None:
        if not self.count:
            return None
        self.count -= 1
        chosen = self.random.sample(self.partitions, self.random.randint(1, len(self.partitions)))
        return {partition: self._new_batch(partition) for partition in chosen}


class Silent(Plain):
    """A producer with acks=0. The order of its batches is not promised, since the proxy awaits no answers."""

    acks = (0,)

    def _compose(self) -> dict[Partition, Batch] | None:
        # Send some requests at once, some after a pause.
        return super()._compose() if self.random.random() < 0.7 else None

    def _judge_order(self, places: dict[Partition, dict[bytes, list[int]]]) -> list[str]:
        return []


class Idempotent(Producer):
    """A producer with an id, which sends failed batches again until they are acknowledged."""

    def __init__(
        self, name: int, partitions: list[Partition], random: Random, connect: Callable[[], object], *, count: int
    ) -> None:
        super().__init__(name, partitions, random, connect, count=count)
        self._to_send: dict[Partition, deque[Batch]] = {partition: deque() for partition in self.partitions}
        self._failed: list[Batch] = []
        self._unacked: dict[Partition, set[int]] = {partition: set() for partition in self.partitions}

    def _identity(self, number: int) -> dict[str, int]:
        return {"producer_id": self.name, "producer_epoch": 0, "base_sequence": max(0, number)}

    def _is_done(self) -> bool:
        return not (self.count or self._in_flight or self._failed or any(self._to_send.values()))

    def _compose(self) -> dict[Partition, Batch] | None:
        if self._failed:
            if self._in_flight:
                return None
            for batch in sorted(self._failed, key=lambda each: each.number, reverse=True):
                self._to_send[batch.partition].appendleft(batch)
            self._failed = []
        again = [partition for partition, waiting in self._to_send.items() if waiting]
        if again:
            chosen = self.random.sample(again, self.random.randint(1, len(again)))
            return {partition: self._to_send[partition].popleft() for partition in chosen}
        free = [partition for partition in self.partitions if self._may_begin(partition)]
        if not self.count or not free:
            return None
        self.count -= 1
        chosen = self.random.sample(free, self.random.randint(1, len(free)))
        return {partition: self._new_batch(partition) for partition in chosen}

    def _may_begin(self, partition: Partition) -> bool:
        """Whether a broker would still recognize the oldest unacknowledged batch after one more.

        The very first batch goes alone: a broker that knows nothing of a producer accepts any sequence. Batches sent
        before the refusal of the first one is known would be accepted in its place, with a proxy or without.
        """
        number, unacked = self._numbers[partition], self._unacked[partition]
        return not unacked or (number - min(unacked) < RETAINED_BATCHES and min(unacked) > 0)

    def _answered(self, batch: Batch, code: int) -> None:
        unacked = self._unacked[batch.partition]
        if code == NONE:
            unacked.discard(batch.number)
            return
        if code == OUT_OF_ORDER:
            # If all earlier batches are acknowledged, Java gives up such a producer; otherwise librdkafka begins a new
            # epoch.
            told = self.tail(batch.partition)
            raise Violation(self, f"batch {batch.number} is out of order: {told}", batch.partition)
        self._failed.append(batch)

    def _lost(self, batch: Batch) -> None:
        self._failed.append(batch)

    def _new_batch(self, partition: Partition, *, counts: bool = True) -> Batch:
        batch = super()._new_batch(partition, counts=counts)
        if counts:
            self._unacked[partition].add(batch.number)
        return batch

    def _judge_order(self, places: dict[Partition, dict[bytes, list[int]]]) -> list[str]:
        """Check that all batches are there in order."""
        found = []
        for partition in self.partitions:
            sent = [batch.records for batch in self.batches if batch.partition == partition]
            at = [places[partition][records][0] for records in sent if places[partition][records]]
            if len(at) != len(sent):
                found.append(f"{self}: {len(sent) - len(at)} batches of {partition} are missing")
            if at != sorted(at):
                found.append(f"{self}: {partition} is out of order: {at}")
        return found

"""Producers and a consumer of a simulated partition, who report their answers to a Judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kproxy.broker.context import Bindings
from kproxy.broker.partition import ACKS_ALL, AppendResult
from kproxy.broker.writer_fence import UNBOUND
from kproxy_codec import error_codes
from kproxy_codec.record_batch import iterate_batches, parse_header
from tests.support.models.replication_checks import Judge, Rule, Violation
from tests.support.models.simulated_broker import PARTITION, SimulatedProcess, State
from tests.support.models.simulated_network import MAX_FETCH_BYTES
from tests.support.wire.record_batches import build_batch


class Sent(NamedTuple):
    """One batch that a producer sends until it is in the log."""

    name: str
    records: bytes
    identity: int
    producer_id: int


class Attempt:
    """One sending of a batch to one broker; `result` is None until there is an answer."""

    def __init__(self, sent: Sent, process: SimulatedProcess, acks: int) -> None:
        self.sent = sent
        self.process = process
        self.acks = acks
        self.result: AppendResult | None = None

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.process.state is State.DEAD


class Producer:
    """An idempotent producer. It sends the next batch when the last one's outcome is known, if need be by resending."""

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
        self.sequence = 0
        self.current: Sent | None = None
        self.attempts: list[Attempt] = []
        self.done: list[Sent] = []


class Clients:
    """Two idempotent producers, others that are not, and one consumer."""

    def __init__(self, judge: Judge, now: Callable[[], float]) -> None:
        self.producers = [Producer(producer_id) for producer_id in (1, 2)]
        self.position = 0
        # A violation found within a task that nobody awaits.
        self.found_meanwhile: Violation | None = None
        self._judge = judge
        self._now = now
        self._latest_seen = 0
        self._names = 0

    def resolve(self, producer: Producer) -> None:
        for attempt in producer.attempts:
            if attempt.result is not None and attempt.result.error_code == error_codes.NONE and producer.current:
                producer.done.append(producer.current)
                producer.current = None
                producer.attempts = []
                return

    def unresolved(self) -> list[Producer]:
        for producer in self.producers:
            self.resolve(producer)
        return [producer for producer in self.producers if producer.current is not None]

    def new_batch(self, producer_id: int, sequence: int) -> Sent:
        self._names += 1
        name = f"p{producer_id}#{self._names}"
        is_idempotent = producer_id >= 0
        # An idempotent producer's batches have two records each, so that sequences are easily distinguished.
        count = 2 if is_idempotent else 1 + self._names % 2
        records = bytes(
            build_batch(
                [name.encode()] * count,
                producer_id=producer_id,
                producer_epoch=0 if is_idempotent else -1,
                base_sequence=sequence * count if is_idempotent else -1,
                timestamp=int(self._now() * 1000),
            )
        )
        identity = parse_header(records).crc
        self._judge.names[identity] = name
        self._judge.sent_behind(identity, UNBOUND)
        return Sent(name, records, identity, producer_id)

    def attempt(self, sent: Sent, process: SimulatedProcess, acks: int) -> Attempt:
        """Send a batch to a broker."""
        attempt = Attempt(sent, process, acks)
        if process.state is not State.DEAD:
            process.loop.create_task(self.send(attempt, {}))
        return attempt

    async def send(self, attempt: Attempt, bindings: Bindings) -> None:
        """Send an attempt on a connection with these bindings."""
        try:
            await self._send_and_judge(attempt, bindings)
        except Violation as violation:
            # Keep it, because nobody awaits this task.
            self.found_meanwhile = violation

    async def _send_and_judge(self, attempt: Attempt, bindings: Bindings) -> None:
        process = attempt.process
        result = await process.produce(bytearray(attempt.sent.records), attempt.acks, bindings)
        if process.state is State.DEAD:
            return
        attempt.result = result
        if result.error_code != error_codes.NONE:
            return
        if process.is_fenced() and attempt.acks != 0:
            self._judge.violated(Rule.ZOMBIE, f"broker {process.node_id} acknowledged {attempt.sent.name}")
        self._judge.let_through(attempt.sent.identity)
        if attempt.acks == ACKS_ALL:
            self._judge.acknowledged(attempt.sent.identity, result.base_offset)
        elif attempt.acks == 1:
            self._judge.acknowledged_alone(attempt.sent.identity, result.base_offset)

    def consume(self, process: SimulatedProcess) -> None:
        """The consumer continues reading, if this broker serves reads."""
        partition = process.leases.led(*PARTITION)
        if process.state is not State.RUNNING or partition is None or not partition.serves_reads():
            return
        latest = partition.latest_offset()
        if latest is not None:
            if latest < self._latest_seen:
                self._judge.violated(Rule.WENT_BACK, f"the latest offset went from {self._latest_seen} to {latest}")
            self._latest_seen = latest
        self.position = max(self.position, partition.log_start_offset)
        result = partition.read(self.position, MAX_FETCH_BYTES)
        if result.error_code == error_codes.OFFSET_OUT_OF_RANGE:
            self._judge.violated(
                Rule.WENT_BACK,
                f"broker {process.node_id} has no offset {self.position}, where the consumer is: its log goes from "
                f"{partition.log_start_offset} to {partition.log_end_offset}",
            )
        for batch in iterate_batches(result.records):
            self._judge.read(batch.crc, batch.base_offset)
            self.position = batch.last_offset + 1

"""The cost of noting an acknowledged batch and judging it, without a proxy around it.

It runs in one process and in loops so short that the least disturbed of them is hardly disturbed at all: on a shared
machine two runs of a proxy (`bench.pipeline_trail`) may differ by more. Requests come from memory, as in a proxy.
"""

from __future__ import annotations

import random
import time
from typing import NamedTuple

from bench.load import ProducerFrames, Shape
from kproxy.routing.merge import Exchange
from kproxy.routing.topology import Topology
from kproxy.trail.acknowledgements import Noted
from kproxy.trail.trail import LOOK_S, Trail
from kproxy_codec.framing import parse_request_header
from kproxy_codec.primitives import INT64
from kproxy_codec.produce import PRODUCE_API, parse_produce

PRODUCERS = 8
# For each producer, between two looks, as on a busy connection.
BATCHES = 500
LOOKS = 60
SHAPE = Shape("one batch", 1, 1 << 10, 1)
_SEED = 1
_ANSWER_BYTES = 256


class Cost(NamedTuple):
    """Nanoseconds per batch: when its answer passes, and at the next look, twice a second."""

    note: float
    judge: float


class _Broker:
    owner = 1


class _Producer:
    """One connection's: its next request, and the answer to it."""

    def __init__(self, trail: Trail, topology: Topology, partition: int) -> None:
        self._frames = ProducerFrames(SHAPE)
        self._acks = trail.connection(topology)
        self.answer = memoryview(bytearray(_ANSWER_BYTES))
        self.partition = partition
        exchange = self.exchange()
        exchange.request.topics[0].partitions[0] = partition
        plain = PRODUCE_API.plain_answer(exchange.request, [(0, [0])])
        noted = self._acks.part(_Broker(), exchange.request, [(0, [0])], plain)
        assert noted is not None  # noqa: S101 - its topic is not left out
        self.noted: Noted = noted
        (self.place,) = plain.gaps

    def exchange(self) -> Exchange:
        frame = memoryview(self._frames())
        return Exchange(PRODUCE_API, parse_produce(frame, parse_request_header(frame)), 1, 0.0)


def cost(*, shared: bool) -> Cost:
    """The least of LOOKS; the producers write to one partition that they share, or each to its own."""
    clock = [0.0]
    trail = Trail(
        "bench",
        "bench",
        clock=lambda: clock[0],
        wall_ms=lambda: int(clock[0] * 1000),
        deadline_cap_ms=1,
        interval_s=LOOK_S,
        offer=lambda page, first, last: None,
    )
    trail.begin()
    topology = Topology()
    producers = [_Producer(trail, topology, 0 if shared else number) for number in range(PRODUCERS)]
    turns = random.Random(_SEED)  # noqa: S311 - whose turn it is
    next_offsets = [0] * PRODUCERS
    notes, judged = [], []
    for _ in range(LOOKS):
        batches = []
        for producer in turns.sample(producers, BATCHES * PRODUCERS, counts=[BATCHES] * PRODUCERS):
            batches.append((producer, producer.exchange(), next_offsets[producer.partition]))
            next_offsets[producer.partition] += SHAPE.records
        notes.append(_noting(batches) - min(_nothing(batches), _nothing(batches)))
        clock[0] += LOOK_S
        before = time.thread_time_ns()
        trail.look()
        judged.append(time.thread_time_ns() - before)
    count = BATCHES * PRODUCERS
    return Cost(min(notes) / count, min(judged) / count)


def _noting(batches: list[tuple[_Producer, Exchange, int]]) -> int:
    before = time.thread_time_ns()
    for producer, exchange, offset in batches:
        INT64.pack_into(producer.answer, producer.place, offset)
        producer.noted.note(exchange, producer.answer)
    return time.thread_time_ns() - before


def _nothing(batches: list[tuple[_Producer, Exchange, int]]) -> int:
    """The same loop, without the measured work."""
    before = time.thread_time_ns()
    for producer, _, offset in batches:
        INT64.pack_into(producer.answer, producer.place, offset)
    return time.thread_time_ns() - before

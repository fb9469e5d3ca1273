"""The size of reads of a broker's connection follows the time that its answers take."""

from __future__ import annotations

import pytest

from kproxy.observe.tally import BROKER_BOUNDS_S, BrokerCounts
from kproxy.plain import ReceiveArena
from kproxy.proxy.answer_memory import LARGE_BYTES
from kproxy.proxy.answer_reader import LEAST_READ_BYTES, AnswerReader
from kproxy.runtime.tasks import TURN_S
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.primitives import INT32

ANSWER_BYTES = 60
# While each read is full, event loops read at most this often at once.
READS_AT_ONCE = 32


class Waiting:
    """Waits for one answer, which takes `seconds` of the upstream's clock."""

    api_key = PRODUCE
    expects_answer = True

    def __init__(self, upstream: Upstream, number: int) -> None:
        self.upstream = upstream
        self.number = number

    def answered(self, frame: memoryview) -> None:
        self.upstream.now += self.upstream.seconds
        self.upstream.taken.append(self.number)


class Upstream(AnswerReader):
    """A connection whose clock advances when it takes an answer."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.taken: list[int] = []
        self.rests = False
        counts = BrokerCounts(BROKER_BOUNDS_S)
        super().__init__(1 << 20, ReceiveArena(), LARGE_BYTES, None, lambda: self.now, counts)

    def _rest(self) -> None:
        self.rests = True

    def await_answers(self, count: int) -> bytes:
        """Send `count` requests; return their answers."""
        ids = [self.next_correlation_id() for _ in range(count)]
        for number, correlation_id in enumerate(ids):
            self._in_flight.sent(correlation_id, Waiting(self, number))  # type: ignore[arg-type]
        filler = bytes(ANSWER_BYTES - 8)
        return b"".join(INT32.pack(ANSWER_BYTES - 4) + INT32.pack(each) + filler for each in ids)

    def turn(self, received: memoryview) -> memoryview:
        """Read as the event loop does in one turn; return the bytes that are left."""
        self.rests = False
        for _ in range(READS_AT_ONCE):
            space = self.get_buffer(-1)
            size = min(len(space), len(received))
            space[:size] = received[:size]
            is_full = size == len(space)
            received = received[size:]
            self.buffer_updated(size)
            if not is_full or self.rests:
                break
        return received


@pytest.mark.parametrize("microseconds", [0, 3, 30, 100])
def test_answer_flood_takes_one_turn_at_once(microseconds: int) -> None:
    upstream = Upstream(microseconds * 1e-6)
    left = memoryview(upstream.await_answers(10_000))
    turns = 0
    while left:
        began = upstream.now
        left = upstream.turn(left)
        turns += 1
        assert upstream.now - began <= 1.01 * max(TURN_S, (1 + LEAST_READ_BYTES // ANSWER_BYTES) * upstream.seconds)
    assert upstream.taken == list(range(10_000))
    # Answers that take no time are taken many at a time.
    assert turns <= 2 + upstream.now / (TURN_S / 4)


def test_slow_answers_make_only_one_turn_long() -> None:
    upstream = Upstream(1e-7)
    assert not upstream.turn(memoryview(upstream.await_answers(4_000)))
    upstream.seconds = 1e-5
    left = memoryview(upstream.await_answers(4_000))
    left = upstream.turn(left)
    while left:
        began = upstream.now
        left = upstream.turn(left)
        assert upstream.now - began <= TURN_S


def test_slow_answer_is_the_last_of_its_turn() -> None:
    upstream = Upstream(1.1 * TURN_S)
    upstream.turn(memoryview(upstream.await_answers(1)))
    assert upstream.rests


def test_few_answers_cause_no_yield() -> None:
    upstream = Upstream(TURN_S / 10)
    assert not upstream.turn(memoryview(upstream.await_answers(LEAST_READ_BYTES // ANSWER_BYTES // 2)))
    assert not upstream.rests

"""Move leaders while a producer writes: the records to write, their pace, and the judgement at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

from tests.support.brokers.real_kafka import RealKafka
from tests.support.clients.kafka_io import Placed, Record

MOVE_EVERY_S = 1.0
# A paced producer gets this number at once, enough to have several batches of each partition under way.
_BURST = 500


class LeaderMoves:
    """How often all leaders of the topic have moved; `count` is not final before the block has ended."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = threading.Event()

    def run(self, real_kafka: RealKafka, topic: str) -> None:
        while not self._stop.wait(MOVE_EVERY_S):
            real_kafka.move_leaders(topic)
            self.count += 1

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def moving_leaders(real_kafka: RealKafka, topic: str) -> Iterator[LeaderMoves]:
    """Move the leaders of all partitions of a topic on, a second after each move, until the block ends."""
    moves = LeaderMoves()
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(moves.run, real_kafka, topic)
        try:
            yield moves
        finally:
            moves.stop()
        moving.result()


def numbered(total: int, partitions: int) -> Iterator[Record]:
    """Records that contain their place: number n is at offset n // partitions of partition n % partitions."""
    for number in range(total):
        yield Record(b"key-%d" % (number % 100), b"%d" % number, number % partitions)


def paced(records: Iterable[Record], per_second: float) -> Iterator[Record]:
    """Yield `records`, on average no faster than `per_second`."""
    began = time.monotonic()
    for number, record in zip(count(), records, strict=False):
        if number % _BURST == 0:
            time.sleep(max(0.0, began + number / per_second - time.monotonic()))
        yield record


def check_numbered(read: list[Placed], acknowledged: dict[int, tuple[int, int]], total: int, partitions: int) -> None:
    """Check that all of `numbered` are in place and acknowledged there: nothing lost, doubled or out of order."""
    assert acknowledged == {number: (number % partitions, number // partitions) for number in range(total)}
    for partition in range(partitions):
        found = [(each.offset, int(each.value or b"-1")) for each in read if each.partition == partition]
        assert found == list(enumerate(range(partition, total, partitions))), f"partition {partition}"

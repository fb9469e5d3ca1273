"""Write with librdkafka, enable.idempotence and acks=all until stopped, and check that every record arrives once."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import confluent_kafka

from kproxy_codec.record_batch import iterate_batches
from tests.support.clients.attempts import ThreadedClient, stored

SETTLE_S = 60
PER_SECOND = 400
# The limit of unacknowledged records, so that an outage does not accumulate too many to read back.
MOST_WAITING = 300


class IdempotentWriter(ThreadedClient):
    """Numbers 0, 1, 2 … to each of a topic's partitions, on a thread of its own.

    `log`: the file where librdkafka writes its reasons for a new epoch.
    """

    def __init__(
        self, bootstrap: str, topic: str, partitions: int, *, per_second: int = PER_SECOND, log: Path | None = None
    ) -> None:
        super().__init__(f"idempotent {topic}")
        self.acked: dict[int, dict[int, int | None]] = defaultdict(dict)
        self.failed: list[str] = []
        self._acked_at = 0.0
        self._longest_pause_s = 0.0
        self.topic = topic
        self._partitions = partitions
        self._pause_s = partitions / per_second
        self._waiting = 0
        self._settle_s = SETTLE_S
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 0,
                **({"log_level": 0} if log is None else {"log_level": 7, "debug": "eos", "logger": _file_logger(log)}),
                # A broker that is away for a moment is soon asked again.
                "reconnect.backoff.max.ms": 500,
                "retry.backoff.max.ms": 200,
                "topic.metadata.refresh.interval.ms": 1000,
            }
        )

    def abandon(self) -> None:
        self._settle_s = 0
        super().abandon()

    def wait_for_more(self, count: int, timeout_s: float = SETTLE_S) -> None:
        """Wait until that many more are acknowledged."""
        wanted = self._count() + count
        deadline = time.monotonic() + timeout_s
        while self._count() < wanted:
            assert time.monotonic() < deadline, f"{self.topic}: {self._count()} of {wanted}; {self.failed[:3]}"
            time.sleep(0.02)

    def judge(self, partition: int, log: bytes, *, may_repeat: bool = False) -> int:
        """Judge everything acknowledged (see `judge`); return how many records are there more than once."""
        assert self.failed == []
        assert self._waiting == 0, f"{self._waiting} never acknowledged"
        try:
            return judge(log, self.acked[partition], may_repeat=may_repeat)
        except AssertionError as error:
            error.add_note(f"{self.topic}-{partition}")
            raise

    def longest_pause_s(self) -> float:
        """The longest time between two acknowledgements, up to the last one."""
        return self._longest_pause_s

    def _count(self) -> int:
        return sum(map(len, list(self.acked.values())))

    def run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            if self._waiting < MOST_WAITING:
                for partition in range(self._partitions):
                    self._producer.produce(self.topic, b"%d" % number, partition=partition, on_delivery=self._delivered)
                    self._waiting += 1
                number += 1
            self._producer.poll(0)
            time.sleep(self._pause_s)
        self._producer.flush(self._settle_s)

    def _delivered(self, error: Any, message: Any) -> None:
        self._waiting -= 1
        if error is None:
            now = time.monotonic()
            self._longest_pause_s = max(self._longest_pause_s, now - (self._acked_at or now))
            self._acked_at = now
            self.acked[message.partition()][int(message.value())] = message.offset()
        else:
            self.failed.append(f"{message.partition()}/{message.value()}: {error}")


def judge(log: bytes, told: Mapping[int, int | None], *, may_repeat: bool = False) -> int:
    """Compare the bytes of a log with the acknowledged numbers and their reported offsets.

    Every number occurs once, in order, at its reported offset. `may_repeat`: without a proxy librdkafka sees that a
    batch is out of order after a refused one. It then begins a new epoch, and resends unacknowledged batches of all
    partitions. No broker, not even Apache Kafka's, recognises these batches (test_librdkafka_epochs). So a new epoch
    may begin with numbers that exist already. Within an epoch no number is duplicated.

    Return how many numbers occur more than once.
    """
    count, following, latest_epoch = len(told), 0, -1
    places: dict[int, list[int]] = defaultdict(list)
    for batch in iterate_batches(log):
        begins, latest_epoch = batch.producer_epoch > latest_epoch, max(latest_epoch, batch.producer_epoch)
        for place, (offset, value) in enumerate(stored(log[batch.position : batch.end])):
            number = int(value)
            in_turn = number == following or (may_repeat and begins and place == 0 and number < following)
            where = f"{number} at {offset}, in epoch {batch.producer_epoch}, where {following} follows"
            assert in_turn, f"{where}; {_differences(log, count)}"
            assert batch.producer_epoch == latest_epoch, f"{where}, after {latest_epoch}; {_differences(log, count)}"
            places[number].append(offset)
            following = number + 1
    assert following == len(places) == count, _differences(log, count)
    # librdkafka reports no offset for a record that it knows to be there only by an answer to a later batch.
    wrong = {number: (told[number], has) for number, has in places.items() if told[number] not in (None, *has)}
    few = dict(islice(wrong.items(), 10))
    assert not wrong, f"told other offsets than it has, {len(wrong)}, (told, has) by number: {few}"
    return sum(len(has) > 1 for has in places.values())


def _differences(log: bytes, count: int) -> str:
    """The differences between a log and the numbers 0 to `count`, each once and in order."""
    offsets: dict[int, list[int]] = defaultdict(list)
    for offset, value in stored(log):
        offsets[int(value)].append(offset)
    numbers = list(offsets)
    found = {
        "lost": [each for each in range(count) if each not in offsets],
        "never acknowledged": [each for each in numbers if each >= count],
        "more than once (number, offsets)": [each for each in offsets.items() if len(each[1]) > 1],
        "behind a later one": [each for earlier, each in pairwise(numbers) if each < earlier],
    }
    told = {name: f"{len(each)}, first {each[:10]}" for name, each in found.items() if each}
    return f"{count} acknowledged; {told}"


def _file_logger(path: Path) -> logging.Logger:
    logger = logging.Logger(path.name)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    return logger

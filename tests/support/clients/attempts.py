"""Write every value once, one after another, record the outcomes, and judge them.

The rules are those of an end-to-end check: a value acknowledged with acks=all is at its offset, a value refused for
good is nowhere, no value is there twice, and the values in the log are in the order of sending.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from kafka.record.memory_records import MemoryRecords

from kproxy_codec import error_codes
from tests.support.brokers.reference_broker import Closed, RawClient
from tests.support.wire.record_batches import build_batch

Address = tuple[str, int]
# Errors from before the append: the value is in no log, and never will be.
REFUSED = frozenset(
    {error_codes.NOT_LEADER_OR_FOLLOWER, error_codes.NOT_ENOUGH_REPLICAS, error_codes.UNKNOWN_TOPIC_OR_PARTITION}
)
PATIENCE_S = 2.0


class Attempt(NamedTuple):
    """One value sent once; times are time.monotonic's. `error_code` is None if no answer came."""

    value: bytes
    acks: int
    sent_at: float
    answered_at: float
    error_code: int | None
    offset: int

    @property
    def is_acked(self) -> bool:
        return self.error_code == error_codes.NONE and self.acks != 0


class ThreadedClient:
    """A client that blocks, on a thread of its own for as long as an `async with` block lasts.

    An exception on the thread is raised at the end of the block. Nothing here may block the test's event loop, because
    its relays would stop.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._guard, name=name, daemon=True)
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abandon() if error is not None else self._stopping.set()
        await asyncio.to_thread(self._thread.join)
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Stop as soon as possible: the test has failed."""
        self._stopping.set()

    def run(self) -> None:
        """Run until `_stopping` is set."""
        raise NotImplementedError

    def _guard(self) -> None:
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - raised again at the end of the block
            self._failure = error


class Writer(ThreadedClient):
    """Writes to one partition, at any of `addresses` that accepts it, on a thread of its own.

    After a refusal or the end of a connection it continues with the next address.
    """

    def __init__(
        self,
        topic: str,
        addresses: Callable[[], Sequence[Address]],
        *,
        partition: int = 0,
        acks: int = -1,
        pause_s: float = 0.005,
        timeout_ms: int = 1000,
        name: str = "w",
    ) -> None:
        super().__init__(name)
        self.attempts: list[Attempt] = []
        self.topic, self.partition, self.acks = topic, partition, acks
        self._addresses = addresses
        self._pause_s = pause_s
        self._timeout_ms = timeout_ms
        self._turn = 0
        self._client: RawClient | None = None

    @property
    def acked(self) -> list[Attempt]:
        return [each for each in self.attempts if each.is_acked]

    @property
    def codes(self) -> Counter[int | None]:
        return Counter(each.error_code for each in self.attempts)

    def next_ack(self, after: float, timeout_s: float) -> Attempt:
        """Wait for the first acknowledged value that was sent after that time."""
        deadline = time.monotonic() + timeout_s
        place = 0
        while True:
            for each in itertools.islice(self.attempts, place, None):
                place += 1
                if each.is_acked and each.sent_at >= after:
                    return each
            assert time.monotonic() < deadline, f"nothing acknowledged within {timeout_s} s: {self.codes}"
            time.sleep(0.01)

    def longest_pause_s(self, since: float) -> float:
        """The longest time between two acknowledgements, from `since` on."""
        times = [since, *(each.answered_at for each in self.acked if each.answered_at >= since)]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def run(self) -> None:
        for number in itertools.count():
            if self._stopping.wait(self._pause_s):
                break
            self._send(b"%s:%d" % (self.name.encode(), number))
        self._disconnect()

    def _send(self, value: bytes) -> None:
        sent_at = time.monotonic()
        code, offset = None, -1
        try:
            if self._client is None:
                addresses = self._addresses()
                host, port = addresses[self._turn % len(addresses)]
                self._client = RawClient(host, port, timeout_s=PATIENCE_S)
            sent_at = time.monotonic()
            result = self._client.produce(
                self.topic,
                self.partition,
                build_batch([value]),
                acks=self.acks,
                answered=self.acks != 0,
                timeout_ms=self._timeout_ms,
            )
            if result is not None:
                code, offset = result.error_code, result.base_offset
        except (OSError, Closed):
            self._disconnect()
        self.attempts.append(Attempt(value, self.acks, sent_at, time.monotonic(), code, offset))
        if code not in (None, error_codes.NONE):
            self._disconnect()

    def _disconnect(self) -> None:
        self._turn += 1
        if self._client is not None:
            self._client.close()
            self._client = None


class Stored(NamedTuple):
    """A record in a log."""

    offset: int
    value: bytes


def stored(batches: bytes) -> list[Stored]:
    """The records in bytes of a log, as kafka-python reads them; a partial last batch is left out."""
    found = []
    records = MemoryRecords(batches)
    while (batch := records.next_batch()) is not None:
        assert batch.validate_crc(), "a batch with a wrong CRC"
        found += [Stored(record.offset, bytes(record.value)) for record in batch]
    return found


def log_bytes(directory: Path) -> bytes:
    """All segments of a log, in order."""
    return b"".join(file.read_bytes() for file in sorted(directory.glob("*.log")))


def judge(log: Sequence[Stored], attempts: Iterable[Attempt], *, may_lose: bool = False) -> None:
    """Compare a log with one writer's records. `may_lose`: acks below all, and the leader died or lost its lease."""
    offsets = [each.offset for each in log]
    assert offsets == sorted(set(offsets)), "an offset was given twice, or they do not rise"
    places: dict[bytes, int] = {}
    for offset, value in log:
        assert value not in places, f"{value!r} is at {places[value]} and at {offset}"
        places[value] = offset
    latest = -1
    for each in attempts:
        place = places.get(each.value)
        if each.is_acked and not (may_lose and place is None):
            assert place == each.offset, f"{each.value!r}, acknowledged at {each.offset}, is at {place}"
        if each.error_code in REFUSED:
            assert place is None, f"{each.value!r} was refused with {each.error_code}, and is at {place}"
        if place is not None:
            assert place > latest, f"{each.value!r} is at {place}, what was sent before it at {latest}"
            latest = place

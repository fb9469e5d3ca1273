"""Run producers that each keep one record in flight to one partition, and record the times of acknowledgements.

Clients run with their default settings and those of the test, in four modes. Record number n has the value n.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any, NamedTuple

import aiokafka  # type: ignore[import-untyped]
import confluent_kafka
import kafka

from tests.support.brokers.kafka_jars import client_classpath
from tests.support.clients.java import java_program
from tests.support.clients.kafka_io import Placed

PAUSE_S = 0.02
IN_TRANSACTION = 5
# The number of records before a producer is replaced.
IN_PRODUCER = 15
TIMEOUT_S = 60.0
_SOURCE = Path(__file__).with_name("SteadyClient.java")


class Mode(NamedTuple):
    """`acks` in the form of clients' settings."""

    acks: str
    is_idempotent: bool = False
    is_transactional: bool = False


MODES = {
    "acks-all": Mode("all"),
    "acks-1": Mode("1"),
    "idempotent": Mode("all", is_idempotent=True),
    "transactional": Mode("all", is_idempotent=True, is_transactional=True),
}


class Writer:
    """One producer's partition; filled while it runs.

    `settings` are further settings of the client. If it `is_renewed`, many producers follow one another.
    """

    def __init__(
        self,
        name: str,
        bootstrap: str,
        topic: str,
        partition: int,
        mode: Mode,
        settings: Mapping[str, Any] = MappingProxyType({}),
        *,
        is_renewed: bool = False,
    ) -> None:
        self.name = name
        self.bootstrap, self.topic, self.partition, self.mode = bootstrap, topic, partition, mode
        self.settings, self.is_renewed = settings, is_renewed
        # The times (time.monotonic) in order.
        self.acknowledged_at: list[float] = []
        # The offsets of all records that must be there, by number; a transaction's records count once it is committed.
        self.kept: dict[int, int] = {}
        self.problems: list[str] = []
        self._pending: dict[int, int] = {}

    @property
    def transactional_id(self) -> str:
        return f"{self.topic}-{self.partition}"

    def acknowledge(self, number: int, offset: int) -> None:
        self.acknowledged_at.append(time.monotonic())
        (self._pending if self.mode.is_transactional else self.kept)[number] = offset

    def commit(self) -> None:
        self.kept |= self._pending
        self._pending.clear()

    def abort(self) -> None:
        self._pending.clear()

    def longest_gap(self, began: float, ended: float) -> float:
        """The longest time without an acknowledgement that overlaps this period."""
        before = [at for at in self.acknowledged_at if at <= began][-1:]
        within = [at for at in self.acknowledged_at if began < at <= ended]
        times = [*before, *within, ended]
        return max(later - earlier for earlier, later in pairwise(times))


class _Session(ABC):
    """One producer. `send` and `commit` raise one of `failures` if the client gave up."""

    failures: tuple[type[Exception], ...]

    @abstractmethod
    def send(self, value: bytes) -> int:
        """Wait for the acknowledgement. Return the offset."""

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def pause(self) -> None:
        time.sleep(PAUSE_S)


class _Librdkafka(_Session):
    failures = (confluent_kafka.KafkaException,)

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        settings: dict[str, Any] = {"bootstrap.servers": writer.bootstrap, "acks": writer.mode.acks, "log_level": 0}
        if writer.mode.is_idempotent:
            settings["enable.idempotence"] = True
        if writer.mode.is_transactional:
            settings["transactional.id"] = writer.transactional_id
        self._producer = confluent_kafka.Producer({**settings, **writer.settings})
        if writer.mode.is_transactional:
            self._producer.init_transactions(TIMEOUT_S)

    def send(self, value: bytes) -> int:
        told: list[tuple[Any, Any]] = []
        self._producer.produce(
            self._writer.topic,
            value,
            partition=self._writer.partition,
            on_delivery=lambda error, message: told.append((error, message)),
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not told:
            assert time.monotonic() < deadline, f"{value!r} has not been acknowledged"
            self._producer.poll(1.0)
        error, message = told[0]
        if error is not None:
            raise confluent_kafka.KafkaException(error)
        offset: int = message.offset()
        return offset

    def begin(self) -> None:
        self._producer.begin_transaction()

    def commit(self) -> None:
        self._finish(self._producer.commit_transaction)

    def abort(self) -> None:
        self._finish(self._producer.abort_transaction)

    def _finish(self, finish: Callable[[float], None]) -> None:
        while True:
            try:
                return finish(TIMEOUT_S)
            except confluent_kafka.KafkaException as exception:
                if not exception.args[0].retriable():
                    raise

    def close(self) -> None:
        self._producer.flush(0)


class _KafkaPython(_Session):
    failures = (kafka.errors.KafkaError,)

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        acks: int | str = writer.mode.acks
        settings = {
            "bootstrap_servers": writer.bootstrap,
            "acks": acks if acks == "all" else int(acks),
            "enable_idempotence": writer.mode.is_idempotent,
            "transactional_id": writer.transactional_id if writer.mode.is_transactional else None,
        }
        self._producer = kafka.KafkaProducer(**{**settings, **writer.settings})
        if writer.mode.is_transactional:
            self._producer.init_transactions()

    def send(self, value: bytes) -> int:
        future = self._producer.send(self._writer.topic, value, partition=self._writer.partition)
        offset: int = future.get(TIMEOUT_S).offset
        return offset

    def begin(self) -> None:
        self._producer.begin_transaction()

    def commit(self) -> None:
        self._producer.commit_transaction()

    def abort(self) -> None:
        self._producer.abort_transaction()

    def close(self) -> None:
        self._producer.close(timeout=1.0)


class _Aiokafka(_Session):
    failures = (aiokafka.errors.KafkaError,)

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._loop = asyncio.new_event_loop()
        self._producer = self._run(self._start())

    async def _start(self) -> Any:
        acks, mode = self._writer.mode.acks, self._writer.mode
        settings = {
            "bootstrap_servers": self._writer.bootstrap,
            "acks": acks if acks == "all" else int(acks),
            "enable_idempotence": mode.is_idempotent,
            "transactional_id": self._writer.transactional_id if mode.is_transactional else None,
        }
        producer = aiokafka.AIOKafkaProducer(**{**settings, **self._writer.settings})
        await producer.start()
        return producer

    def _run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def send(self, value: bytes) -> int:
        sending = self._producer.send_and_wait(self._writer.topic, value, partition=self._writer.partition)
        placed = self._run(asyncio.wait_for(sending, TIMEOUT_S))
        # With acks=0 there is no offset.
        return -1 if placed is None else int(placed.offset)

    def begin(self) -> None:
        self._run(self._producer.begin_transaction())

    def commit(self) -> None:
        self._run(self._producer.commit_transaction())

    def abort(self) -> None:
        self._run(self._producer.abort_transaction())

    def pause(self) -> None:
        # The client does other work meanwhile.
        self._run(asyncio.sleep(PAUSE_S))

    def close(self) -> None:
        self._run(self._producer.stop())
        self._loop.close()


_SESSIONS: dict[str, type[Any]] = {"librdkafka": _Librdkafka, "kafka-python": _KafkaPython, "aiokafka": _Aiokafka}


def _write(writer: Writer, ended: threading.Event) -> None:
    number, most = 0, IN_PRODUCER if writer.is_renewed else sys.maxsize
    while not ended.is_set():
        session: _Session = _SESSIONS[writer.name](writer)
        try:
            until = number + most
            while number < until and not ended.is_set():
                number = _write_some(session, writer, number)
        finally:
            session.close()


def _write_some(session: _Session, writer: Writer, number: int) -> int:
    """Write a record, or the records of a transaction; return the next number."""
    is_transactional = writer.mode.is_transactional
    try:
        if is_transactional:
            session.begin()
        for _ in range(IN_TRANSACTION if is_transactional else 1):
            number += 1
            writer.acknowledge(number - 1, session.send(b"%d" % (number - 1)))
            session.pause()
        if is_transactional:
            session.commit()
            writer.commit()
    except session.failures as failure:
        writer.problems.append(f"{number - 1}: {failure!r}")
        if is_transactional:
            session.abort()
            writer.abort()
    return number


def _write_with_java(version: str, writers: Sequence[Writer], ended: threading.Event) -> None:
    """All writers of one topic, mode and settings, in one process."""
    first = writers[0]
    command = [*java_program(_SOURCE, client_classpath(version)), first.topic]
    command += [str(IN_TRANSACTION if first.mode.is_transactional else 0), f"{PAUSE_S * 1000:.0f}", str(len(writers))]
    for writer in writers:
        command += [writer.bootstrap, str(writer.partition)]
    command += [f"acks={first.mode.acks}", f"enable.idempotence={str(first.mode.is_idempotent).lower()}"]
    # The default since 2.1. Earlier a plain producer gave up at the first move.
    command += ["retries=2147483647", *(f"{name}={value}" for name, value in first.settings.items())]
    by_partition = {str(writer.partition): writer for writer in writers}
    with TemporaryFile() as complained, ThreadPoolExecutor(1) as pool:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complained, text=True)
        assert process.stdin is not None
        stdin = process.stdin
        pool.submit(lambda: (ended.wait(), stdin.close()))
        try:
            for line in process.stdout or ():
                partition, what, *rest = line.split(maxsplit=3)
                _note(by_partition[partition], what, rest)
            status = process.wait(TIMEOUT_S)
        finally:
            ended.set()
            if process.poll() is None:
                process.kill()
                process.wait()
        complained.seek(0)
        assert status == 0, complained.read().decode(errors="replace")[-3000:]


def _note(writer: Writer, what: str, rest: list[str]) -> None:
    if what == "ack":
        writer.acknowledge(int(rest[0]), int(rest[1]))
    elif what == "error":
        writer.problems.append(": ".join(each.strip() for each in rest))
    elif what == "commit":
        writer.commit()
    else:
        writer.abort()


class Running:
    """Writers at work."""

    def __init__(self, writers: Sequence[Writer], jobs: Sequence[Future[None]]) -> None:
        self.writers = writers
        self._jobs = jobs

    def check(self) -> None:
        """Raise the exception of a writer that has ended early."""
        for job in self._jobs:
            if job.done():
                job.result()
                raise AssertionError("a writer has ended before its time")

    def all_acknowledged(self, since: float, count: int, until: float) -> bool:
        """Wait until each writer has that many acknowledgements `since`, or until `until`; return whether each has."""
        while True:
            self.check()
            if all(len([at for at in each.acknowledged_at[-count:] if at > since]) == count for each in self.writers):
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.02)


@contextmanager
def writing(writers: Sequence[Writer]) -> Iterator[Running]:
    """Run all writers until the block ends. Those of kafka-clients are named "java" and the release.

    An exception of a writer is raised at the end of the block, and by `check`.
    """
    ended = threading.Event()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(writers) + 1))
        jobs = [pool.submit(_write, writer, ended) for writer in writers if writer.name in _SESSIONS]
        for name in {writer.name for writer in writers} - set(_SESSIONS):
            by_java = [writer for writer in writers if writer.name == name]
            jobs.append(pool.submit(_write_with_java, name.removeprefix("java "), by_java, ended))
        try:
            yield Running(writers, jobs)
        finally:
            ended.set()
        for job in jobs:
            job.result(TIMEOUT_S)


class Found(NamedTuple):
    """The faults in a writer's partition: the numbers of acknowledged records that are missing or duplicated."""

    lost: int
    twice: int
    is_in_order: bool


def find(writer: Writer, read: Sequence[Placed]) -> Found:
    """Judge the records read from a topic. A duplicate counts at its first place."""
    numbers = {each.offset: int(each.value or b"-1") for each in read if each.partition == writer.partition}
    first = list(dict.fromkeys(numbers.values()))
    lost = sum(numbers.get(offset) != number for number, offset in writer.kept.items())
    return Found(lost, len(numbers) - len(first), first == sorted(first))

"""Run members of consumer groups, of three clients with default settings: each reads in a thread until stopped."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, Self

import confluent_kafka
import kafka
from aiokafka import AIOKafkaConsumer  # type: ignore[import-untyped]

from tests.support.waiting import PATIENCE_S, wait_for


class Member:
    """`read` are (partition, offset, value); `closed_in_s` is how long the client took to close."""

    def __init__(self, bootstrap: str, topic: str, group: str) -> None:
        self.bootstrap, self.topic, self.group = bootstrap, topic, group
        self.read: list[tuple[int, int, bytes]] = []
        self.assigned: frozenset[int] = frozenset()
        self.closed_in_s = float("inf")
        self.stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._guard, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _guard(self) -> None:
        try:
            self.run()
        except Exception as failure:  # noqa: BLE001 - of a thread: raised by `stop`
            self._failure = failure

    def run(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Let it close, which commits what it has read."""
        self.stopping.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "it does not close"
        if self._failure is not None:
            raise self._failure

    @property
    def values(self) -> set[bytes]:
        return {value for _, _, value in self.read}

    def wait_for_values(self, wanted: set[bytes]) -> None:
        wait_for(lambda: self._failure or self.values >= wanted, what=lambda: f"not read: {wanted - self.values}")


class KafkaPythonMember(Member):
    def run(self) -> None:
        consumer = kafka.KafkaConsumer(
            self.topic,
            group_id=self.group,
            bootstrap_servers=self.bootstrap.split(","),
            auto_offset_reset="earliest",
        )
        while not self.stopping.is_set():
            for records in consumer.poll(100).values():
                self.read += [(each.partition, each.offset, each.value) for each in records]
            self.assigned = frozenset(each.partition for each in consumer.assignment())
        begin = time.monotonic()
        consumer.close()
        self.closed_in_s = time.monotonic() - begin


class LibrdkafkaMember(Member):
    def run(self) -> None:
        settings = {"bootstrap.servers": self.bootstrap, "group.id": self.group, "auto.offset.reset": "earliest"}
        consumer = confluent_kafka.Consumer(settings)
        consumer.subscribe([self.topic])
        while not self.stopping.is_set():
            for each in consumer.consume(100, timeout=0.1):
                if each.error() is None:
                    self.read.append((each.partition(), each.offset(), each.value()))
            self.assigned = frozenset(each.partition for each in consumer.assignment())
        begin = time.monotonic()
        consumer.close()
        self.closed_in_s = time.monotonic() - begin


class AiokafkaMember(Member):
    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        consumer: Any = AIOKafkaConsumer(
            self.topic, group_id=self.group, bootstrap_servers=self.bootstrap, auto_offset_reset="earliest"
        )
        await consumer.start()
        while not self.stopping.is_set():
            for records in (await consumer.getmany(timeout_ms=100)).values():
                self.read += [(each.partition, each.offset, each.value) for each in records]
            self.assigned = frozenset(each.partition for each in consumer.assignment())
        begin = time.monotonic()
        await consumer.stop()
        self.closed_in_s = time.monotonic() - begin


MEMBERS: dict[str, type[Member]] = {
    "kafka-python": KafkaPythonMember,
    "librdkafka": LibrdkafkaMember,
    "aiokafka": AiokafkaMember,
}

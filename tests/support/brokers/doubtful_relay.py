"""Relay to a broker, leave one batch without an answer, and refuse another, like a broker that loses followers.

The relay finds both batches by their partition and value. Everything else passes unchanged, one request of a connection
after another, as a broker handles them. The broker must advertise the relay's address.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.error_codes import NOT_ENOUGH_REPLICAS, REQUEST_TIMED_OUT
from tests.support.brokers.scripted_upstream import HOST, PATIENCE_S, Asked, ScriptedUpstream, UpstreamConnection
from tests.support.clients.attempts import stored


class Batch(NamedTuple):
    """A batch of one record."""

    partition: int
    value: bytes


class DoubtfulRelay:
    """At their first arrival `doubtful` is appended and answered 7, `refused` is not appended and answered 19.

    The refusal waits until `behind` has arrived on the same connection. `doubted` is set when the answer to `doubtful`
    is on its way, `arrived` when `refused` has arrived.
    """

    def __init__(self, *, doubtful: Batch, refused: Batch, behind: Batch) -> None:
        self.broker_port = 0
        self.doubted, self.arrived = asyncio.Event(), asyncio.Event()
        self._doubtful, self._refused, self._behind = doubtful, refused, behind
        self._behind_arrived = asyncio.Event()
        self._upstream = ScriptedUpstream(0, self._take)
        self._queues: dict[UpstreamConnection, asyncio.Queue[Asked]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        return self._upstream.port

    def _take(self, asked: Asked) -> None:
        batches = _batches(asked)
        if self._refused in batches:
            self.arrived.set()
        if self._behind in batches:
            self._behind_arrived.set()
        queue = self._queues.get(asked.connection)
        if queue is None:
            queue = self._queues[asked.connection] = asyncio.Queue()
            self._tasks.append(asyncio.create_task(self._relay(asked.connection, queue)))
        queue.put_nowait(asked)

    async def _relay(self, connection: UpstreamConnection, queue: asyncio.Queue[Asked]) -> None:
        reader, writer = await asyncio.open_connection(HOST, self.broker_port)
        try:
            while connection.is_open:
                asked = await queue.get()
                batches = _batches(asked)
                if self._refused in batches and not self._behind_arrived.is_set():
                    async with asyncio.timeout(PATIENCE_S):
                        await self._behind_arrived.wait()
                    asked.answer(results=dict.fromkeys(asked.partitions, NOT_ENOUGH_REPLICAS))
                    continue
                writer.write(asked.frame)
                head = await reader.readexactly(4)
                answer = head + await reader.readexactly(*struct.unpack(">i", head))
                if self._doubtful in batches and not self.doubted.is_set():
                    self.doubted.set()
                    answer = asked.reply(results=dict.fromkeys(asked.partitions, REQUEST_TIMED_OUT))
                if connection.is_open:
                    connection.write(answer)
        finally:
            writer.close()

    async def start(self) -> None:
        await self._upstream.start()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._upstream.stop()
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, EOFError | ConnectionError):
                raise result


def _batches(asked: Asked) -> set[Batch]:
    if asked.header.api_key != PRODUCE:
        return set()
    return {
        Batch(partition, record.value)
        for (_, partition), records in asked.records.items()
        for record in stored(records)
    }


@asynccontextmanager
async def doubtful_relay(*, doubtful: Batch, refused: Batch, behind: Batch) -> AsyncIterator[DoubtfulRelay]:
    relay = DoubtfulRelay(doubtful=doubtful, refused=refused, behind=behind)
    await relay.start()
    try:
        yield relay
    finally:
        with suppress(asyncio.CancelledError):
            await relay.stop()

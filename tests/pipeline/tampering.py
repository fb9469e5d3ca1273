"""Run a TCP relay in place of a faulty proxy: it loses, doubles or swaps one record on its way to the cluster.

kafka-python decodes every produce request and encodes it again without the producer's id and sequence numbers:
otherwise a broker would refuse the batch after a missing one, and drop a duplicate. So a run without a fault is part of
the evidence. If batches must be resent, as when a broker is killed, the numbers must stay (`keep_producers`), and only
a fault that keeps the number of records goes unnoticed. All other bytes pass unchanged. The proxy must advertise the
relay's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.producer import ProduceRequest
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

PRODUCE = 0
READ_SIZE = 1 << 16


@dataclass(frozen=True)
class Record:
    timestamp: int
    key: bytes | None
    value: bytes

    @property
    def n(self) -> int:
        return int(json.loads(self.value)["n"])


@dataclass
class Tamper:
    """A fault to apply once: `change` turns a batch's records into others, or returns None if it cannot."""

    change: Callable[[list[Record]], list[Record] | None]
    victims: set[int] = field(default_factory=set)

    def apply(self, records: list[Record]) -> list[Record]:
        """The bytes to send for `records`. `victims` then has the numbers of missing, duplicated or moved rows."""
        changed = None if self.victims else self.change(records)
        if changed is None:
            return records
        before, after = [record.n for record in records], [record.n for record in changed]
        kept = min(len(before), len(after))
        moved = {n for was, n in zip(before[:kept], after[:kept], strict=True) if was != n}
        lost_or_double = {n for n in before if before.count(n) != after.count(n)}
        self.victims = lost_or_double or moved
        return changed


def drop_one(records: list[Record]) -> list[Record] | None:
    """The records without the second."""
    return records[:1] + records[2:] if len(records) > 1 else None


def double_one(records: list[Record]) -> list[Record] | None:
    """The records with the first duplicated."""
    return records[:1] + records


def swap_two(records: list[Record]) -> list[Record] | None:
    """The records with two neighbours of one key swapped."""
    last_of_key: dict[bytes, int] = {}
    for position, record in enumerate(records):
        if record.key is None:
            continue
        earlier = last_of_key.get(record.key)
        if earlier is not None:
            swapped = list(records)
            swapped[earlier], swapped[position] = swapped[position], swapped[earlier]
            return swapped
        last_of_key[record.key] = position
    return None


class TamperingRelay:
    """Listens on `address` from `start` on, and passes all to `upstream_port`; set that before a client connects."""

    def __init__(self, *, keep_producers: bool = False) -> None:
        self.upstream_port = 0
        self._keep_producers = keep_producers
        self.address = ""
        self.tamper: Tamper | None = None
        self.produce_requests = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        pumps = [
            asyncio.ensure_future(self._pump_requests(reader, upstream_writer)),
            asyncio.ensure_future(_pump(upstream_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            results = await asyncio.gather(*pumps, return_exceptions=True)
            writer.close()
            upstream_writer.close()
            self._connections.discard(task)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, ConnectionError):
                raise result

    async def _pump_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                prefix = await reader.readexactly(4)
                frame = prefix + await reader.readexactly(int.from_bytes(prefix, "big"))
                api_key, api_version = struct.unpack_from(">hh", frame, 4)
                writer.write(self._rewrite(frame, api_version) if api_key == PRODUCE else frame)
                await writer.drain()

    def _rewrite(self, frame: bytes, api_version: int) -> bytes:
        self.produce_requests += 1
        request: Any = ProduceRequest.decode(frame, version=api_version, header=True, framed=True)
        for topic in request.topic_data:
            for partition in topic.partition_data:
                partition.records = self._rebatch(partition.records)
        rewritten: bytes = request.encode(header=True, framed=True)
        return rewritten

    def _rebatch(self, batch: bytes) -> bytes:
        received = DefaultRecordBatch(batch)
        records = [
            Record(record.timestamp, record.key and bytes(record.key), bytes(record.value)) for record in received
        ]
        if self.tamper is not None:
            records = self.tamper.apply(records)
        builder = DefaultRecordBatchBuilder(
            magic=2,
            compression_type=0,
            is_transactional=False,
            producer_id=received.producer_id if self._keep_producers else -1,
            producer_epoch=received.producer_epoch if self._keep_producers else -1,
            base_sequence=received.base_sequence if self._keep_producers else -1,
            batch_size=1 << 30,
        )
        for position, record in enumerate(records):
            builder.append(position, record.timestamp, record.key, record.value, [])
        return bytes(builder.build())


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(READ_SIZE):
        writer.write(data)
        await writer.drain()

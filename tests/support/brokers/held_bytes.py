"""Relay between proxies and a broker, and hold bytes for any time, like a network.

Written bytes arrive in order, even if their sender has ended by then; only `cut` loses them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

HOST = "127.0.0.1"
# The limit of held bytes of one connection; beyond it the relay does not read.
MAX_HELD_BYTES = 16 << 20
# The time in which a broker that has received all bytes and the end closes its side.
LAST_ANSWERS_S = 5.0


Which = Callable[[int], bool]
"""Selects connections, by the port of their client."""


class _Carried:
    """One connection, with the bytes of its client that are not forwarded yet."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[bytes] = asyncio.Queue(maxsize=MAX_HELD_BYTES >> 16)
        self.moving = asyncio.Event()
        self.moving.set()
        # Whether the client has written since the connection was held.
        self.has_written = False
        self.has_ended = False


class Way:
    """The relay to the broker at `target_port`; connections are identified by their clients' ports."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        self._server: asyncio.Server | None = None
        self._carried: dict[int, tuple[asyncio.Task[None], _Carried]] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        await self.cut()

    def hold(self, which: Which) -> int:
        """Hold the bytes of these connections; return the number of connections."""
        found = [carried for port, (_, carried) in self._carried.items() if which(port)]
        for carried in found:
            if carried.moving.is_set():
                carried.moving.clear()
                carried.has_written = False
        return len(found)

    def held(self) -> int:
        """The number of connections with bytes written since they were held."""
        return sum(not carried.moving.is_set() and carried.has_written for _, carried in self._carried.values())

    def left_behind(self) -> int:
        """The number of connections that still exist to deliver their last bytes, though their client is gone."""
        return sum(carried.has_ended for _, carried in self._carried.values())

    def release(self) -> None:
        """Deliver the held bytes."""
        for _, carried in self._carried.values():
            carried.moving.set()

    async def cut(self, which: Which = lambda port: True) -> None:
        """End these connections; the bytes held on them are lost."""
        tasks = [task for port, (task, _) in self._carried.items() if which(port)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        client_port = writer.get_extra_info("peername")[1]
        carried = _Carried()
        self._carried[client_port] = task, carried
        writers = [writer]
        with suppress(OSError, asyncio.CancelledError, TimeoutError):
            try:
                broker_reader, broker_writer = await asyncio.open_connection(HOST, self.target_port)
                writers.append(broker_writer)
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(_take(reader, carried))
                    back = ways.create_task(_answers(broker_reader, writer))
                    await _deliver(carried, broker_writer)
                    async with asyncio.timeout(LAST_ANSWERS_S):
                        await asyncio.wait([back])
            except* (OSError, RuntimeError):
                # When one side ends, end the other side too.
                pass
            finally:
                for each in writers:
                    each.transport.abort()
                del self._carried[client_port]


async def _take(reader: asyncio.StreamReader, carried: _Carried) -> None:
    """Read at once, because the bytes that a client writes before a reset are under way."""
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            await carried.waiting.put(data)
            carried.has_written = True
    carried.has_ended = True
    await carried.waiting.put(b"")


async def _deliver(carried: _Carried, writer: asyncio.StreamWriter) -> None:
    while data := await carried.waiting.get():
        await carried.moving.wait()
        writer.write(data)
        await writer.drain()
    await carried.moving.wait()
    writer.write_eof()


async def _answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        if not writer.is_closing():
            writer.write(data)
            with suppress(ConnectionError):
                await writer.drain()
    if not writer.is_closing():
        writer.transport.abort()

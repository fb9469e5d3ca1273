"""Messages between a supervisor and one worker, over a socket pair that nobody else holds.

The supervisor's only frame is an Assignment. The worker sends Waits at intervals and when the reason for its wait
changes, and then Ready. Instead of any of them it may send Failed. Its admin page is on a socket of its own.
A frame is its length in four bytes and a body. A frame longer than its reader's limit ends the channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Self

import msgspec

from kproxy.config import ProxyConfig

# A configuration may carry a static table of a million partitions.
MAX_ASSIGNMENT_BYTES = 256 << 20
MAX_MESSAGE_BYTES = 64 << 10
CLOSE_TIMEOUT_S = 1.0
_LENGTH = struct.Struct(">I")


class ChannelClosed(Exception):
    """The other side has closed the channel."""


class ChannelMisused(Exception):
    """The other side sent an invalid frame."""


@dataclass(frozen=True)
class Assignment:
    """The task of a worker: `config` has its share of the limits."""

    number: int
    config: ProxyConfig


class Waits(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot serve yet; `sentence` says why."""

    sentence: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker serves; `source` is the ownership source as in the ready line."""

    source: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot start, and ends; `sentence` is that of a StartupError."""

    sentence: str


WorkerMessage = Waits | Ready | Failed
_MESSAGE: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


class Channel:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        """Make a channel of a socket, which it owns from then on."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    async def receive(self, limit: int) -> bytes:
        """Return the next frame. Raises ChannelClosed, ChannelMisused."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > limit:
                raise ChannelMisused(f"a frame of {length} bytes where {limit} are allowed")
            return await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ChannelClosed("the other side has gone") from error

    def send(self, body: bytes) -> None:
        """Send a frame without waiting. Only `receive` reports that the other side has gone."""
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def close(self) -> None:
        """Send what is buffered, for at most CLOSE_TIMEOUT_S, and close."""
        self._writer.close()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        self._writer.transport.abort()


def encode(message: WorkerMessage) -> bytes:
    return msgspec.msgpack.encode(message)


async def next_message(channel: Channel) -> WorkerMessage:
    """Receive a worker's next message. Raises ChannelClosed, ChannelMisused."""
    frame = await channel.receive(MAX_MESSAGE_BYTES)
    try:
        return _MESSAGE.decode(frame)
    except msgspec.MsgspecError as error:
        raise ChannelMisused(f"a frame that is no message: {error}") from error


def assign(channel: Channel, assignment: Assignment) -> None:
    """Send the first frame to a worker."""
    channel.send(pickle.dumps(assignment))


async def next_assignment(channel: Channel) -> Assignment:
    """Receive the assignment. Raises ChannelClosed.

    It unpickles only bytes that its parent sent, over a socket that nobody else ever held.
    """
    assignment = pickle.loads(await channel.receive(MAX_ASSIGNMENT_BYTES))  # noqa: S301 -- see above
    if not isinstance(assignment, Assignment):
        raise ChannelMisused(f"{type(assignment).__name__} where an assignment is due")
    return assignment

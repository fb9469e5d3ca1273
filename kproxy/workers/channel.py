"""Exchange messages between a supervisor and one worker, over a socket pair that no other process holds.

The supervisor's first frame is an Assignment. The worker sends Waits at intervals and when the reason for its wait
changes, and then Ready. Instead of any of these it may send Failed. The worker's admin page has its own socket. If use
is limited over all workers (kproxy.workers.shares), the worker also sends Usage, once a second at most and only if the
use has changed. After Ready the supervisor sends Shares, one at a time: the worker answers with Applied. The supervisor
also sends Reload, which has no answer. A frame is its length in four bytes and a body. A frame longer than its reader's
limit ends the channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Self, TypeVar

import msgspec
from msgspec import Meta

from kproxy.config import ProxyConfig
from kproxy.workers.shares import MOST_CHANGES, Amount, Counts, RateKey, Shares

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
    """The task of a worker: `config` has its share of the limits.

    `parts` has its first shares, by the keys of rates, if they differ from the equal part.
    """

    number: int
    config: ProxyConfig
    parts: Mapping[bytes, int] = field(default_factory=dict)


class Waits(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot serve yet; `sentence` states the reason."""

    sentence: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker serves; `source` is the ownership source as in the ready line."""

    source: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot start, and ends; `sentence` is that of a StartupError."""

    sentence: str


class Usage(msgspec.Struct, frozen=True, tag=True):
    """The use of rates in the last second, as Accounts.uses returns it, and the limited connections."""

    uses: Annotated[list[tuple[RateKey, Amount, bool]], Meta(max_length=MOST_CHANGES)]
    connections: Counts


class Applied(msgspec.Struct, frozen=True, tag=True):
    """The worker uses the Shares with this number."""

    number: int


class Reload(msgspec.Struct, frozen=True, tag=True):
    """Another configuration for the worker, pickled; empty: the file has been refused."""

    config: bytes


SupervisorMessage = Shares | Reload
WorkerMessage = Waits | Ready | Failed | Usage | Applied
_MESSAGE: Final[msgspec.msgpack.Decoder[WorkerMessage]] = msgspec.msgpack.Decoder(WorkerMessage)
_ORDER: Final[msgspec.msgpack.Decoder[SupervisorMessage]] = msgspec.msgpack.Decoder(SupervisorMessage)
_Message = TypeVar("_Message")


class Channel:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        """Make a channel of a socket, which the channel owns from then on."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    async def receive(self, limit: int) -> bytes:
        """Return the next frame. Raises ChannelClosed, ChannelMisused."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > limit:
                raise ChannelMisused(f"a frame of {length} bytes exceeds {limit}")
            return await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ChannelClosed("the other side has closed the channel") from error

    def send(self, body: bytes) -> None:
        """Send a frame without waiting. Only `receive` reports that the other side has closed it."""
        self._writer.write(_LENGTH.pack(len(body)) + body)

    @property
    def is_behind(self) -> bool:
        """Whether some sent bytes still wait for the other side."""
        return self._writer.transport.get_write_buffer_size() > 0

    async def close(self) -> None:
        """Send buffered bytes, for at most CLOSE_TIMEOUT_S, and close."""
        self._writer.close()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        self._writer.transport.abort()


def encode(message: WorkerMessage | SupervisorMessage) -> bytes:
    return msgspec.msgpack.encode(message)


async def next_message(channel: Channel) -> WorkerMessage:
    """Receive a worker's next message. Raises ChannelClosed, ChannelMisused."""
    return _decoded(_MESSAGE, await channel.receive(MAX_MESSAGE_BYTES))


async def next_order(channel: Channel) -> SupervisorMessage:
    """Receive the supervisor's next message after the Assignment. Raises ChannelClosed, ChannelMisused."""
    return _decoded(_ORDER, await channel.receive(MAX_ASSIGNMENT_BYTES))


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes) -> _Message:
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise ChannelMisused(f"a frame that is not a message: {error}") from error


def assign(channel: Channel, assignment: Assignment) -> None:
    """Send the first frame to a worker."""
    channel.send(pickle.dumps(assignment))


async def next_assignment(channel: Channel) -> Assignment:
    """Receive the assignment. Raises ChannelClosed, ChannelMisused."""
    return unpickled(await channel.receive(MAX_ASSIGNMENT_BYTES), Assignment)


def unpickled(body: bytes, kind: type[_Message]) -> _Message:
    """Unpickle `body`, which only the parent process may have sent, over a socket that no other process ever held."""
    thing = pickle.loads(body)  # noqa: S301 -- see above
    if not isinstance(thing, kind):
        raise ChannelMisused(f"received {type(thing).__name__}; expected {kind.__name__}")
    return thing

"""Messages between a supervisor and one worker, over a socket pair that nobody else holds.

The supervisor's first frame is an Assignment. The worker sends Hello, and answers each Ask from then on with an Answer
of its id, in any order. It sends Waits when what it waits for changes, and now and then; and then Ready. Instead of any
of them it may send Failed.
A frame is its length in four bytes and a body. A frame longer than its reader's limit ends the channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

import msgspec

from kproxy.config import ProxyConfig
from kproxy.observe.claims import ClaimsQuery, FreeOrder
from kproxy.observe.exposition import Family
from kproxy.observe.http_page import Readiness
from kproxy.observe.table import TableQuery

# A configuration may carry a static table of a million partitions.
MAX_ASSIGNMENT_BYTES = 256 << 20
MAX_QUESTION_BYTES = 64 << 10
# A page of the table is below 2 MiB, one of claims below 16 MiB whatever they are called; metrics grow with the topics
# whose batches were lost, of which 100 are named.
MAX_ANSWER_BYTES = 16 << 20
# The bound of questions that wait for a worker's answer.
MAX_OPEN_QUESTIONS = 16
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


class AskMetrics(msgspec.Struct, frozen=True, tag=True):
    """Answered by MetricsAnswer."""


class AskReadiness(msgspec.Struct, frozen=True, tag=True):
    """Answered by ReadinessAnswer."""


class AskTable(msgspec.Struct, frozen=True, tag=True):
    """Answered by TableAnswer, or Refused."""

    query: TableQuery


class AskClaims(msgspec.Struct, frozen=True, tag=True):
    """Answered by ClaimsAnswer, or Refused."""

    query: ClaimsQuery


class AskFree(msgspec.Struct, frozen=True, tag=True):
    """Answered by ClaimsAnswer, or Refused."""

    order: FreeOrder


Question = AskMetrics | AskReadiness | AskTable | AskClaims | AskFree


class Ask(msgspec.Struct, frozen=True):
    id: int
    question: Question


class MetricsAnswer(msgspec.Struct, frozen=True, tag=True):
    families: list[Family]


class ReadinessAnswer(msgspec.Struct, frozen=True, tag=True):
    readiness: Readiness


class TableAnswer(msgspec.Struct, frozen=True, tag=True):
    """`page` is the JSON of a TablePage."""

    page: bytes


class ClaimsAnswer(msgspec.Struct, frozen=True, tag=True):
    """`page` is the JSON of a ClaimsPage or a FreeOutcome."""

    page: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The question is invalid; or, by `why`, there is no answer now, or never here."""

    reason: str
    why: Literal["question", "unanswered", "not offered"] = "question"


Reply = MetricsAnswer | ReadinessAnswer | TableAnswer | ClaimsAnswer | Refused


class Answer(msgspec.Struct, frozen=True, tag=True):
    id: int
    reply: Reply


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The worker answers questions, and does not serve yet."""


class Waits(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot serve yet; `sentence` says why."""

    sentence: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker serves; `source` is the ownership source as in the ready line."""

    source: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot start, and ends; `sentence` is that of a StartupError."""

    sentence: str


WorkerMessage = Hello | Waits | Ready | Failed | Answer


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


def encode(message: Ask | WorkerMessage) -> bytes:
    return msgspec.msgpack.encode(message)


_Message = TypeVar("_Message")
_ASK = msgspec.msgpack.Decoder(Ask)
_MESSAGE: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


async def next_ask(channel: Channel) -> Ask:
    """Raises ChannelClosed, ChannelMisused."""
    return _decoded(_ASK, await channel.receive(MAX_QUESTION_BYTES))


async def next_message(channel: Channel) -> WorkerMessage:
    """Raises ChannelClosed, ChannelMisused."""
    return _decoded(_MESSAGE, await channel.receive(MAX_ANSWER_BYTES))


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes) -> _Message:
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise ChannelMisused(f"a frame that is no message: {error}") from error


def assign(channel: Channel, assignment: Assignment) -> None:
    """Send the first frame to a worker."""
    channel.send(pickle.dumps(assignment))


async def next_assignment(channel: Channel) -> Assignment:
    """Raises ChannelClosed. It unpickles only what its parent sent, over a socket that nobody else ever held."""
    assignment = pickle.loads(await channel.receive(MAX_ASSIGNMENT_BYTES))  # noqa: S301 -- see above
    if not isinstance(assignment, Assignment):
        raise ChannelMisused(f"{type(assignment).__name__} where an assignment is due")
    return assignment

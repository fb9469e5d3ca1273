"""What a supervisor and one worker say to each other, over a pair of sockets that nobody else holds.

The supervisor's first frame is an Assignment. A worker says Hello, from when on each Ask is answered by an Answer of
its id, in any order; Waits, as often as what it waits for changes and now and then; and then Ready. Or, instead of any
of them, Failed.
A frame is its length in four bytes and a body; one longer than its reader's limit ends the channel.
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
# So many questions may wait for a worker's answer.
MAX_OPEN_QUESTIONS = 16
CLOSE_TIMEOUT_S = 1.0
_LENGTH = struct.Struct(">I")


class ChannelClosed(Exception):
    """The other side has gone."""


class ChannelMisused(Exception):
    """The other side sent what cannot be understood."""


@dataclass(frozen=True)
class Assignment:
    """What a worker is to do: `config` is its own share of it."""

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
    """The question will not do; or, by `why`, there is no answer at the moment or never here."""

    reason: str
    why: Literal["question", "unanswered", "not offered"] = "question"


Reply = MetricsAnswer | ReadinessAnswer | TableAnswer | ClaimsAnswer | Refused


class Answer(msgspec.Struct, frozen=True, tag=True):
    id: int
    reply: Reply


class Hello(msgspec.Struct, frozen=True, tag=True):
    """It answers questions, and does not serve yet."""


class Waits(msgspec.Struct, frozen=True, tag=True):
    """It is kept from serving; `sentence` says by what."""

    sentence: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """It serves; `source` is what the ready line says of the ownership source."""

    source: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It cannot start, and ends; `sentence` is that of a StartupError."""

    sentence: str


Word = Hello | Waits | Ready | Failed | Answer


class Channel:
    """One end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        """Takes the socket over."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    async def receive(self, limit: int) -> bytes:
        """The next frame. Raises ChannelClosed, ChannelMisused."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > limit:
                raise ChannelMisused(f"a frame of {length} bytes where {limit} are allowed")
            return await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ChannelClosed("the other side has gone") from error

    def send(self, body: bytes) -> None:
        """Nothing is waited for, and nothing said of a side that has gone: whoever receives finds out."""
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def close(self) -> None:
        """What has been said is still sent, for as long as the other side takes to read it, within bounds."""
        self._writer.close()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        self._writer.transport.abort()


def encode(message: Ask | Word) -> bytes:
    return msgspec.msgpack.encode(message)


_Message = TypeVar("_Message")
_ASK = msgspec.msgpack.Decoder(Ask)
_WORD: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


async def next_ask(channel: Channel) -> Ask:
    """Raises ChannelClosed, ChannelMisused."""
    return _decoded(_ASK, await channel.receive(MAX_QUESTION_BYTES))


async def next_word(channel: Channel) -> Word:
    """Raises ChannelClosed, ChannelMisused."""
    return _decoded(_WORD, await channel.receive(MAX_ANSWER_BYTES))


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes) -> _Message:
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise ChannelMisused(f"a frame that is no message: {error}") from error


def assign(channel: Channel, assignment: Assignment) -> None:
    """The first frame to a worker."""
    channel.send(pickle.dumps(assignment))


async def next_assignment(channel: Channel) -> Assignment:
    """Raises ChannelClosed. Unpickled is what our own parent sent, over a socket that nobody else ever held."""
    assignment = pickle.loads(await channel.receive(MAX_ASSIGNMENT_BYTES))  # noqa: S301 -- see above
    if not isinstance(assignment, Assignment):
        raise ChannelMisused(f"{type(assignment).__name__} where an assignment is due")
    return assignment

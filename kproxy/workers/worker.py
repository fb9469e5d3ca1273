"""A worker process: a proxy that shares its port and reports to its supervisor instead of a page of its own.

Invariants
1. It prints nothing on stdout and has no admin page: both are the supervisor's.
2. It answers at most MAX_OPEN_QUESTIONS at a time; more wait in the socket.
3. It answers questions until it has drained.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable

import structlog

from kproxy.errors import StartupError
from kproxy.observe.admin import Unanswered
from kproxy.observe.claims import NotOffered
from kproxy.observe.http_page import Readiness
from kproxy.proxy.front import OwnPages
from kproxy.proxy.run import run_proxy
from kproxy.runtime.tasks import cancel
from kproxy.workers.channel import (
    MAX_OPEN_QUESTIONS,
    Answer,
    Ask,
    AskClaims,
    AskFree,
    AskMetrics,
    AskReadiness,
    AskTable,
    Channel,
    ChannelClosed,
    ClaimsAnswer,
    Failed,
    Hello,
    MetricsAnswer,
    Question,
    ReadinessAnswer,
    Ready,
    Refused,
    Reply,
    TableAnswer,
    Waits,
    encode,
    next_ask,
    next_assignment,
)

# Less than a supervisor waits for an answer.
READINESS_S = 1.5
# The status of a command that cannot start as asked.
NOT_STARTED = 2

log = structlog.get_logger(__name__)


async def run_worker(channel_fd: int) -> int:
    """Serve as the supervisor at the other end of the channel says. Return the exit status."""
    channel = await Channel.over(socket.socket(fileno=channel_fd))
    try:
        assignment = await next_assignment(channel)
        await run_proxy(assignment.config, WorkerFront(channel, assignment.number))
    except ChannelClosed:
        # The supervisor has gone before it sent the assignment: nobody reads a message.
        return NOT_STARTED
    except StartupError as error:
        channel.send(encode(Failed(str(error))))
        return NOT_STARTED
    finally:
        await channel.close()
    return 0


class WorkerFront:
    """Reports to the supervisor."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.worker: int | None = number
        self._channel = channel
        self._answering: asyncio.Task[None] | None = None

    async def open(self, pages: OwnPages) -> None:
        self._channel.send(encode(Hello()))
        self._answering = asyncio.create_task(self._answer_all(pages))

    def waits(self, sentence: str) -> None:
        self._channel.send(encode(Waits(sentence)))

    def ready(self, kafka: str, source: str) -> None:
        self._channel.send(encode(Ready(source)))

    def stops(self) -> None:
        """Do nothing: the supervisor asked for the stop, and reports it for all."""

    async def close(self) -> None:
        if self._answering is not None:
            await cancel(self._answering)

    async def _answer_all(self, pages: OwnPages) -> None:
        places = asyncio.Semaphore(MAX_OPEN_QUESTIONS)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await places.acquire()
                try:
                    ask = await next_ask(self._channel)
                except ChannelClosed:
                    # The supervisor has gone, and kproxy.runtime.process ends this process.
                    return
                task = tasks.create_task(self._answer(pages, ask))
                task.add_done_callback(lambda _: places.release())

    async def _answer(self, pages: OwnPages, ask: Ask) -> None:
        try:
            reply = await _reply(pages, ask.question)
        except Exception as error:  # the boundary: an error of one page must not end the others
            log.exception("supervisor question failed")
            reply = Refused(f"{type(error).__name__}: {error}")
        self._channel.send(encode(Answer(ask.id, reply)))


async def _reply(pages: OwnPages, question: Question) -> Reply:
    match question:
        case AskMetrics():
            return MetricsAnswer(pages.families())
        case AskReadiness():
            try:
                async with asyncio.timeout(READINESS_S):
                    return ReadinessAnswer(await pages.readiness())
            except TimeoutError:
                return ReadinessAnswer(Readiness(ready=False, text="no broker has answered yet"))
        case AskTable(query):
            try:
                return TableAnswer(await pages.table(query))
            except ValueError as error:
                return Refused(str(error))
        case AskClaims(query):
            return await _claims_reply(pages.claims(query))
        case AskFree(order):
            return await _claims_reply(pages.free(order))


async def _claims_reply(page: Awaitable[bytes]) -> Reply:
    try:
        return ClaimsAnswer(await page)
    except ValueError as error:
        return Refused(str(error))
    except Unanswered as error:
        return Refused(str(error), "unanswered")
    except NotOffered as error:
        return Refused(str(error), "not offered")

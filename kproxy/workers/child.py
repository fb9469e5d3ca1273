"""One worker process as its supervisor sees it.

States
  made      nothing runs
  starting  the process runs and may say what it waits for
  serving   it has said Ready
  ended     it has been reaped, and its channel closed

Transitions
  made     -> starting  `start`
  starting -> serving   Ready
  starting -> ended     it ends, having said Failed or nothing: `ready` raises
  serving  -> ended     it ends, however it does

Invariants
1. `wait` returns once, with the exit status, and nothing of the child is left then: no process, task or socket.
2. It is in a session of its own: Ctrl-C in a terminal reaches the supervisor alone, which hands it on once.
3. No more than MAX_OPEN_QUESTIONS are open. Who leaves one unanswered for ANSWER_TIMEOUT_S is asked nothing more until
   it has answered: whoever looks at the admin page waits for a worker that hangs once, not every time. One that has not
   said Hello is asked nothing either.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from kproxy.errors import StartupError
from kproxy.workers.channel import (
    MAX_OPEN_QUESTIONS,
    Answer,
    Ask,
    Assignment,
    Channel,
    ChannelClosed,
    ChannelMisused,
    Failed,
    Hello,
    Question,
    Ready,
    Reply,
    Waits,
    assign,
    encode,
    next_word,
)

ANSWER_TIMEOUT_S = 2.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Launch:
    """How a worker process is started: `arguments` and then `--number N --channel FD`; `pass_fds` stay open in it."""

    arguments: Sequence[str]
    environ: Mapping[str, str]
    pass_fds: Sequence[int]


class Silent(Exception):
    """It does not answer."""


class Child:
    """`on_wait` is told what keeps it from serving; `failure`: why it cannot start, once it has said so."""

    def __init__(self, assignment: Assignment, launch: Launch, on_wait: Callable[[str], None]) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._assignment = assignment
        self._launch = launch
        self._on_wait = on_wait
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._listening: asyncio.Task[None] | None = None
        self.failure = ""
        self._greeted = False
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Reply]] = {}
        self._late: set[int] = set()

    @property
    def pid(self) -> int:
        """Its process id; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    @property
    def serves(self) -> bool:
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None

    async def start(self) -> None:
        """Start the process; it is not ready yet. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                number = self._assignment.number
                self._process = await asyncio.create_subprocess_exec(
                    *(*self._launch.arguments, "--number", str(number), "--channel", str(theirs.fileno())),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    env={**os.environ, **self._launch.environ},
                    pass_fds=(*self._launch.pass_fds, theirs.fileno()),
                    start_new_session=True,
                )
            self._channel = await Channel.over(ours)
        except BaseException:
            ours.close()
            if self._process is not None:
                self._process.kill()
                await self._process.wait()
            raise
        assign(self._channel, self._assignment)
        self._listening = asyncio.create_task(self._listen(self._channel), name=f"worker {number}")

    async def wait(self) -> int:
        """Until it has ended: its exit status, negative for a signal."""
        if self._process is None or self._listening is None or self._channel is None:
            raise RuntimeError("the worker has not been started")
        status = await self._process.wait()
        # What it said last may not have been read yet; its end of the channel is closed, so this ends.
        await asyncio.wait((self._listening,))
        await self._channel.close()
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(Silent("it has ended"))
        if not self.ready.done():
            self.ready.set_exception(StartupError(self.failure or f"worker {self._assignment.number} {how(status)}"))
            # Nobody need ask.
            self.ready.exception()
        self._listening.result()
        return status

    def signal(self, number: signal.Signals) -> None:
        """Nothing where it has ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def ask(self, question: Question) -> Reply:
        """Raises Silent."""
        if self._channel is None or self._listening is None or self._listening.done():
            raise Silent("it has ended")
        if not self._greeted:
            raise Silent("it is starting")
        if self._late or len(self._open) >= MAX_OPEN_QUESTIONS:
            raise Silent("it does not answer")
        ask = Ask(next(self._ids), question)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._open[ask.id] = answer
        self._channel.send(encode(ask))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            self._late.add(ask.id)
            raise Silent("it does not answer") from None
        finally:
            self._open.pop(ask.id, None)

    async def _listen(self, channel: Channel) -> None:
        number = self._assignment.number
        try:
            while True:
                match await next_word(channel):
                    case Hello():
                        self._greeted = True
                    case Waits(sentence):
                        self._on_wait(sentence)
                    case Ready() as ready:
                        self.ready.set_result(ready)
                    case Failed(sentence):
                        self.failure = sentence
                    case Answer(question_id, reply):
                        self._late.discard(question_id)
                        waiting = self._open.get(question_id)
                        if waiting is not None and not waiting.done():
                            waiting.set_result(reply)
        except ChannelClosed:
            # It ends; `wait` tells how.
            return
        except ChannelMisused as error:
            log.error("worker killed: it says what nobody understands", worker=number, reason=str(error))
            self.signal(signal.SIGKILL)


def how(status: int) -> str:
    """How a process ended, for people."""
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"

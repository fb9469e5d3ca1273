"""Run a worker for its supervisor: one process (WorkerProcess), and its place across restarts (Slot).

States of a WorkerProcess
  made      nothing runs
  starting  the process runs and may report the reason for its wait
  serving   it has sent Ready
  ended     it has been reaped, and its channel closed

Transitions
  made     -> starting  `start`
  starting -> serving   Ready
  starting -> ended     it ends, with or without Failed, and `ready` raises
  serving  -> ended     it ends, for any reason

States of a Slot
  empty     no process has run, the first one could not start and is not replaced, or `stop` has ended the last one
  held      a process runs, which starts or serves
  vacant    the last process has ended, and another starts after a pause

Transitions
  empty  -> held    `keep`
  held   -> vacant  the process ends, after it or an earlier one in this slot has served
  held   -> empty   the first process ends before it has served: `keep` fails, and so does the start of all
  vacant -> held    the pause is over: PAUSE_S, doubled each time up to MAX_PAUSE_S, from PAUSE_S again after a process
                    that ran for STEADY_S
  any    -> empty   `stop`

Invariants
1. `WorkerProcess.wait` returns once, with the exit status. No process, task or socket of the worker is left then.
2. A worker is in a session of its own: Ctrl-C in a terminal reaches the supervisor alone, which forwards it once.
3. At most MAX_OPEN_PAGES requests for pages are open. A worker that leaves one unanswered for ANSWER_TIMEOUT_S gets no
   more until it has answered, so that a worker that hangs delays the admin page only once.
4. The counts in a process's last answer are kept after its end, so that a sum over workers never shrinks. Otherwise a
   rate over the sum would show the whole count at once.
5. A process gets another configuration only once it serves, and if it has read its earlier messages.
6. The ledger of shares is told of a process's end after it was reaped and its last message read, and before the next
   process starts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import aiohttp
import structlog
from prometheus_client.core import Metric

from kproxy.config import ProxyConfig
from kproxy.errors import StartupError
from kproxy.observe.exposition import growing, merge, parse
from kproxy.runtime.process import send_signal, spawn
from kproxy.runtime.tasks import cancel
from kproxy.workers.channel import (
    Applied,
    Assignment,
    Channel,
    ChannelClosed,
    ChannelMisused,
    Failed,
    Ready,
    Reload,
    Usage,
    Waits,
    assign,
    encode,
    next_message,
)
from kproxy.workers.shares import Ledger, Shares

ANSWER_TIMEOUT_S = 2.0
MAX_OPEN_PAGES = 16
# A page of the table is below 2 MiB, one of claims below 16 MiB with any names; metrics grow with brokers (7 KiB for
# each of at most 1,000) and with names of topics and clients, which are bounded.
MAX_ANSWER_BYTES = 16 << 20
PAUSE_S = 0.1
MAX_PAUSE_S = 30.0
STEADY_S = 10.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class WorkerCommand:
    """The command of a worker: `arguments`, then `--number N --channel FD`; `pass_fds` stay open in it.

    `pages` is the directory for the sockets of workers' admin pages, None for no admin pages.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str]
    pass_fds: Sequence[int]
    pages: Path | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A page of a worker."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Order:
    """A request to be posted to a page of a worker."""

    body: bytes
    content_type: str


class NoAnswer(Exception):
    """A worker does not answer; the message states the reason."""


@dataclass(eq=False)
class WorkerProcess:
    """One process. `on_wait` is called with the reason why it waits; `failure` is its reason for not starting.

    `on_use` is called with the worker's reports of use.
    """

    assignment: Assignment
    launch: WorkerCommand
    on_wait: Callable[[str], None]
    on_use: Callable[[Usage | Applied], None]

    def __post_init__(self) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._listening: asyncio.Task[None] | None = None
        self.failure = ""
        pages = self.launch.pages
        self._page = pages / f"{self.assignment.number}.sock" if pages is not None else None
        self._open: set[asyncio.Task[Answer]] = set()
        self._late: set[asyncio.Task[Answer]] = set()

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def serves(self) -> bool:
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None

    async def start(self) -> None:
        """Start the process, without waiting until it is ready. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                number = self.assignment.number
                page = ("--page", str(self._page)) if self._page is not None else ()
                self._process = await spawn(
                    *(*self.launch.arguments, "--number", str(number), "--channel", str(theirs.fileno()), *page),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    env={**os.environ, **self.launch.environ},
                    pass_fds=(*self.launch.pass_fds, theirs.fileno()),
                    start_new_session=True,
                )
            self._channel = await Channel.over(ours)
        except BaseException:
            ours.close()
            if self._process is not None:
                send_signal(self._process, signal.SIGKILL)
                await self._process.wait()
            raise
        assign(self._channel, self.assignment)
        self._listening = asyncio.create_task(self._listen(self._channel), name=f"worker {number}")

    async def wait(self) -> int:
        """Wait until the process has ended. Return its exit status, negative for a signal."""
        if self._process is None or self._listening is None or self._channel is None:
            raise RuntimeError("the worker has not been started")
        status = await self._process.wait()
        # Some messages may not have been read yet. The process's end of the channel is closed, so this ends.
        await asyncio.wait((self._listening,))
        await self._channel.close()
        for asked in self._open:
            asked.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        if not self.ready.done():
            failure = self.failure or f"worker {self.assignment.number} {exit_text(status)}"
            self.ready.set_exception(StartupError(failure))
            # This marks the error as retrieved, as nobody has to await it.
            self.ready.exception()
        self._listening.result()
        return status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._process is not None:
            send_signal(self._process, number)

    def tell(self, shares: Shares) -> None:
        """Send the worker, which must serve, its shares."""
        if self._channel is not None:
            self._channel.send(encode(shares))

    def follow(self, config: ProxyConfig | None) -> None:
        """Send the worker a configuration, if it takes one and has another; None: the file has been refused."""
        if config is self.assignment.config or not self.serves or self._channel is None or self._channel.is_behind:
            return
        self._channel.send(encode(Reload(b"" if config is None else pickle.dumps(config))))
        if config is not None:
            self.assignment = dataclasses.replace(self.assignment, config=config)

    async def ask(self, page: str, order: Order | None = None) -> Answer:
        """Get `page`, or send it an `order`. Raises NoAnswer."""
        if self._page is None or self._listening is None or self._listening.done():
            raise NoAnswer("it has ended")
        if self._late or len(self._open) >= MAX_OPEN_PAGES:
            raise NoAnswer("it does not answer")
        asked = asyncio.create_task(self._fetch(self._page, page, order))
        self._open.add(asked)
        asked.add_done_callback(self._close)
        await asyncio.wait((asked,), timeout=ANSWER_TIMEOUT_S)
        if not asked.done():
            self._late.add(asked)
            raise NoAnswer("it does not answer")
        if asked.cancelled():
            raise NoAnswer("it has ended")
        return asked.result()

    def _close(self, asked: asyncio.Task[Answer]) -> None:
        self._open.discard(asked)
        self._late.discard(asked)
        if not asked.cancelled():
            # This marks the error as retrieved, as nobody awaits it after ANSWER_TIMEOUT_S.
            asked.exception()

    async def _fetch(self, socket_path: Path, page: str, order: Order | None) -> Answer:
        url = f"http://worker{page}"
        try:
            async with aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(socket_path)), timeout=aiohttp.ClientTimeout()
            ) as session:
                asking = (
                    session.get(url)
                    if order is None
                    else session.post(url, data=order.body, headers={"Content-Type": order.content_type})
                )
                async with asking as answer:
                    if answer.content_length is None or answer.content_length > MAX_ANSWER_BYTES:
                        raise NoAnswer("its answer is too long")
                    return Answer(answer.status, answer.headers.get("Content-Type", ""), await answer.read())
        except (OSError, aiohttp.ClientError) as error:
            raise NoAnswer("it has ended" if self.serves else "it is starting") from error

    async def _listen(self, channel: Channel) -> None:
        number = self.assignment.number
        try:
            while True:
                match await next_message(channel):
                    case Waits(sentence):
                        self.on_wait(sentence)
                    case Ready() as ready:
                        self.ready.set_result(ready)
                    case Failed(sentence):
                        self.failure = sentence
                    case Usage() | Applied() as use:
                        self.on_use(use)
        except ChannelClosed:
            # The process is ending; `wait` returns its status.
            return
        except ChannelMisused as error:
            log.error("worker killed", worker=number, reason=f"its message is invalid: {error}")
            self.signal(signal.SIGKILL)


def exit_text(status: int) -> str:
    """Describe how a process ended."""
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


@dataclass(eq=False)
class Slot:
    """Restarts a worker. `clock` is in seconds; `on_wait` is called with the reason why the worker waits.

    `ledger` shares the limits that hold over all workers.
    """

    assignment: Assignment
    launch: WorkerCommand
    _: KW_ONLY
    clock: Callable[[], float]
    on_wait: Callable[[str], None]
    ledger: Ledger

    def __post_init__(self) -> None:
        self.number = self.assignment.number
        self.first: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.restarts = 0
        self._process: WorkerProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._counting = asyncio.Lock()
        self._past: list[Metric] = []
        self._last: list[Metric] = []

    @property
    def pid(self) -> int:
        """The id of the process that runs; 0: none."""
        return self._process.pid if self._process is not None else 0

    @property
    def serves(self) -> bool:
        return self._process is not None and self._process.serves

    def keep(self) -> asyncio.Task[None]:
        """Keep a process running until `stop`; the task fails with StartupError if the first one cannot start."""
        self._keeper = asyncio.create_task(self._keep(), name=f"keeper of worker {self.number}")
        return self._keeper

    async def _keep(self) -> None:
        pause_s = PAUSE_S
        while True:
            began = self.clock()
            end, sentence = await self._run_one()
            if not self.first.done():
                raise StartupError(sentence or f"worker {self.number} {end} while it started")
            if self.clock() - began >= STEADY_S:
                pause_s = PAUSE_S
            said = {"reason": sentence} if sentence else {}
            log.error(
                "worker ended", consequence="another is started", worker=self.number, how=end, pause_s=pause_s, **said
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            self.restarts += 1

    async def _run_one(self) -> tuple[str, str]:
        """Run one process. Return how it ended, and why it could not start, or an empty text."""
        assignment = dataclasses.replace(self.assignment, parts=self.ledger.begin(self.number - 1))
        process = self._process = WorkerProcess(assignment, self.launch, self.on_wait, self._on_use)
        process.ready.add_done_callback(self._on_ready)
        # The start is shielded, as a half-started process could not be ended.
        self._starting = asyncio.create_task(process.start())
        try:
            await asyncio.shield(self._starting)
            status = await process.wait()
        except OSError as error:
            self._end()
            return f"could not be started ({error.strerror or error})", ""
        self._end()
        self._past, self._last = growing(merge([self._past, self._last])), []
        return exit_text(status), process.failure

    def _end(self) -> None:
        self._process = None
        self.ledger.end(self.number - 1)

    def _on_ready(self, ready: asyncio.Future[Ready]) -> None:
        if ready.cancelled() or ready.exception() is not None:
            return
        if self._process is not None and self._process.ready is ready:
            self.ledger.serve(self.number - 1)
        if not self.first.done():
            self.first.set_result(ready.result())

    def _on_use(self, message: Usage | Applied) -> None:
        if isinstance(message, Applied):
            self.ledger.applied(self.number - 1, message.number)
        else:
            self.ledger.report(self.number - 1, message.uses, message.connections)

    def tell(self, shares: Shares) -> None:
        """Send the process its shares."""
        if self._process is not None:
            self._process.tell(shares)

    def reload(self, config: ProxyConfig) -> None:
        """Give another configuration to later processes, and by `follow` to the current one."""
        self.assignment = dataclasses.replace(self.assignment, config=config)

    def follow(self, *, refused: bool = False) -> None:
        """Send the process the latest configuration once it takes one, or that the file is `refused`; call often."""
        if self._process is not None:
            self._process.follow(None if refused else self.assignment.config)

    async def ask(self, page: str, order: Order | None = None) -> Answer:
        """Get `page`, or send it an `order`. Raises NoAnswer."""
        if self._process is None:
            raise NoAnswer("it has ended, and another is starting")
        return await self._process.ask(page, order)

    async def ask_counts(self) -> bool:
        """Ask the process for its metrics. Return whether it answered."""
        # One request at a time, as an earlier page must not replace a later one.
        async with self._counting:
            process = self._process
            try:
                # This runs in a thread, as parsing a large page takes a tenth of a second.
                counts = await asyncio.to_thread(parse, (await self.ask("/metrics")).body)
            except NoAnswer:
                return False
            except ValueError as error:
                log.error("worker metrics not read", worker=self.number, reason=str(error))
                return False
            if self._process is not process:
                return False
            self._last = counts
            return True

    def counts(self, *, is_up: bool) -> list[Metric]:
        """Return the metrics as of the last answer; gauges only of a process that `is_up`."""
        return merge([self._last if is_up else growing(self._last), self._past])

    async def stop(self) -> None:
        """End the process with SIGTERM, wait for its end, and start no other."""
        if self._keeper is not None:
            await cancel(self._keeper)
        if self._starting is not None:
            await asyncio.wait((self._starting,))
            if self._starting.exception() is not None:
                self._process = None
        if self._process is not None:
            self._process.signal(signal.SIGTERM)
            await self._process.wait()
            self._process = None

    def kill(self) -> None:
        """End the process with SIGKILL, because it does not stop."""
        if self._process is not None:
            log.error("worker killed", reason="it did not end in time", worker=self.number, pid=self.pid)
            self._process.signal(signal.SIGKILL)

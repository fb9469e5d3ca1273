"""One worker's place: the process that is in it, and those that were before.

States
  empty     nobody has been in it, or the last one could not be started and is not replaced
  held      a child runs: it starts, or serves
  vacant    the last one has ended and another is started after a pause

Transitions
  empty  -> held    `keep`
  held   -> vacant  the child ends after it, or another before it in this place, has served
  held   -> empty   the first one ends before it has served: `keep` fails, and so does the start of all
  vacant -> held    the pause is over: PAUSE_S, doubled each time up to MAX_PAUSE_S, from the beginning again after a
                    child that ran for STEADY_S
  any    -> empty   `stop`

Invariants
1. What a child counted is still counted when it has ended, as of the last time that it was asked: a sum over workers
   never shrinks, or whoever takes rates of it would see all of it happen at once.
2. A child that is being started gets SIGHUP only when it serves; before, the signal would end it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Callable

import structlog

from kproxy.config import Owners
from kproxy.errors import StartupError
from kproxy.observe.exposition import Family, growing, merge
from kproxy.runtime.tasks import cancel
from kproxy.workers.channel import AskMetrics, Assignment, MetricsAnswer, Question, Ready, Reply
from kproxy.workers.child import Child, Launch, Silent, how

PAUSE_S = 0.1
MAX_PAUSE_S = 30.0
STEADY_S = 10.0

log = structlog.get_logger(__name__)


class Slot:
    """`clock` in seconds; `on_wait` is told what keeps a worker from serving."""

    def __init__(
        self, assignment: Assignment, launch: Launch, *, clock: Callable[[], float], on_wait: Callable[[str], None]
    ) -> None:
        self.number = assignment.number
        self.first: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.restarts = 0
        self._assignment = assignment
        self._launch = launch
        self._clock = clock
        self._on_wait = on_wait
        self._child: Child | None = None
        self._starting: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._past: list[Family] = []
        self._last: list[Family] = []

    @property
    def pid(self) -> int:
        """Of the process that runs; 0: none."""
        return self._child.pid if self._child is not None else 0

    @property
    def serves(self) -> bool:
        return self._child is not None and self._child.serves

    def keep(self) -> asyncio.Task[None]:
        """Have a process run in it until `stop`; ends with StartupError where the first one cannot start."""
        self._keeper = asyncio.create_task(self._keep(), name=f"keeper of worker {self.number}")
        return self._keeper

    async def _keep(self) -> None:
        pause_s = PAUSE_S
        while True:
            began = self._clock()
            end, sentence = await self._run_one()
            if not self.first.done():
                raise StartupError(sentence or f"worker {self.number} {end} while it started")
            if self._clock() - began >= STEADY_S:
                pause_s = PAUSE_S
            said = {"reason": sentence} if sentence else {}
            log.error("worker ended, another is started", worker=self.number, how=end, pause_s=pause_s, **said)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            self.restarts += 1

    async def _run_one(self) -> tuple[str, str]:
        """How it ended, and the sentence with which it could not start, empty where there is none."""
        child = self._child = Child(self._assignment, self._launch, self._on_wait)
        child.ready.add_done_callback(self._on_ready)
        # Not to be left half-way: a process that nobody knows of could not be ended.
        self._starting = asyncio.create_task(child.start())
        try:
            await asyncio.shield(self._starting)
            status = await child.wait()
        except OSError as error:
            self._child = None
            return f"could not be started ({error.strerror or error})", ""
        self._child = None
        self._past, self._last = merge([self._past, growing(self._last)]), []
        return how(status), child.failure

    def _on_ready(self, ready: asyncio.Future[Ready]) -> None:
        if not ready.cancelled() and ready.exception() is None and not self.first.done():
            self.first.set_result(ready.result())

    def reload(self, owners: Owners | None) -> None:
        """Have the process read its source anew; those that come after it begin with `owners`."""
        config = dataclasses.replace(self._assignment.config, owners=owners)
        self._assignment = dataclasses.replace(self._assignment, config=config)
        if self._child is not None:
            self._child.ready.add_done_callback(self._hand_on_hangup)

    def _hand_on_hangup(self, ready: asyncio.Future[Ready]) -> None:
        if self._child is not None and self._child.ready is ready and self._child.serves:
            self._child.signal(signal.SIGHUP)

    async def ask(self, question: Question) -> Reply:
        """Raises Silent."""
        if self._child is None:
            raise Silent("it has ended and is started again")
        return await self._child.ask(question)

    async def ask_counts(self) -> bool:
        """Learn what the process counts; whether it said so."""
        child = self._child
        try:
            reply = await self.ask(AskMetrics())
        except Silent:
            return False
        if not isinstance(reply, MetricsAnswer) or self._child is not child:
            return False
        self._last = reply.families
        return True

    def counts(self, *, is_up: bool) -> list[Family]:
        """As last learnt; gauges only of a process that `is_up`."""
        return merge([self._last if is_up else growing(self._last), self._past])

    async def stop(self) -> None:
        """SIGTERM, and nobody follows; until nothing is left of it."""
        if self._keeper is not None:
            await cancel(self._keeper)
        if self._starting is not None:
            await asyncio.wait((self._starting,))
            if self._starting.exception() is not None:
                self._child = None
        if self._child is not None:
            self._child.signal(signal.SIGTERM)
            await self._child.wait()
            self._child = None

    def kill(self) -> None:
        """SIGKILL, for one that does not stop."""
        if self._child is not None:
            log.error("worker killed: it did not end in time", worker=self.number, pid=self.pid)
            self._child.signal(signal.SIGKILL)

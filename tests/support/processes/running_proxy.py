"""Run a proxy in this process, without etcd, for upstreams and clients that a test drives.

`both_loops` runs a test on asyncio's own event loop and on uvloop. It fails the test for an uncaught exception and for
a task of the proxy that is left running. A busy machine may stop a process for longer than the times that a test
checks: a test marked `in_one_go` is run again if it failed during such a stop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, TypeVar

import pytest
import uvloop

from kproxy.claims.service import OwnService
from kproxy.config import Limits
from kproxy.config.listeners import ListenerConfig
from kproxy.config.tls import ListenerTls, Loaded
from kproxy.observe.metrics import Vitals
from kproxy.proxy.admission import Admission
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.server import Listener
from kproxy.routing.fleet import Fleet, Proxy
from kproxy.routing.topology import NO_OWNER, Address, Topology
from kproxy.security.mechanisms import Servers
from kproxy.security.reloading import Reloading
from kproxy.security.sasl import SASL_APIS, Times
from kproxy.trail.rows import Range, decode_page
from kproxy.trail.trail import Trail
from tests.support.brokers.scripted_upstream import HOST, PATIENCE_S, ScriptedUpstream
from tests.support.clients.raw_client import RawClient
from tests.support.wire.messages import topic_id

# One test of each file also runs on asyncio's own loop; `make test-all` runs all tests on both loops.
_ON_BOTH = pytest.mark.parametrize(
    "loop_factory",
    [
        pytest.param(asyncio.SelectorEventLoop, id="asyncio", marks=pytest.mark.long(but_one=True)),
        pytest.param(uvloop.new_event_loop, id="uvloop"),
    ],
)
_Test = TypeVar("_Test", bound=Callable[..., Coroutine[Any, Any, None]])
_IN_ONE_GO: set[Callable[..., Any]] = set()
ATTEMPTS = 5
STOOD_STILL_S = 0.1
LOOK_S = 0.01
# The possible delay of each look.
USUAL_S = 0.005
IDENTITY = Proxy(1_000_000, "proxy.test", 19092)
_PROXY_MODULES = ("kproxy.proxy", "kproxy.routing")


def in_one_go(test: _Test) -> _Test:
    """Run a failed test of `both_loops` again if this process was stopped during it."""
    _IN_ONE_GO.add(test)
    return test


class Pauses:
    """The time for which the event loop did not run: the process was stopped, or it computed.

    The sum counts: on a busy machine a process waits often rather than long.
    """

    def __init__(self) -> None:
        self.lost_s = 0.0
        self._looked_at = 0.0

    async def within(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, and measure pauses meanwhile."""
        self._looked_at = time.monotonic()
        looking = asyncio.create_task(self._look())
        try:
            await work
        finally:
            # The work may end in the same turn as the pause.
            self._note()
            looking.cancel()
            await asyncio.wait((looking,))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._note()

    def _note(self) -> None:
        now = time.monotonic()
        self.lost_s += max(0.0, now - self._looked_at - LOOK_S - USUAL_S)
        self._looked_at = now


def both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine test on both event loops."""

    attempts = ATTEMPTS if test in _IN_ONE_GO else 1

    @functools.wraps(test)
    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **arguments: Any) -> None:
        for attempt in range(1, attempts + 1):
            pauses = Pauses()
            try:
                run_on(loop_factory, pauses.within(test(**arguments)))
            except Exception:
                if attempt == attempts or pauses.lost_s < STOOD_STILL_S:
                    raise
            else:
                return

    signature = inspect.signature(test)
    loop = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), loop])  # type: ignore[attr-defined]
    del run.__wrapped__  # type: ignore[attr-defined]  # or pytest-asyncio would find the coroutine
    return _ON_BOTH(run)


def run_on(loop_factory: Callable[[], asyncio.AbstractEventLoop], work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; an exception that escapes into the event loop fails it, and so do tasks that the proxy leaves."""
    escaped: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
        await work
        # A callback or two may still be pending.
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if _is_the_proxys(task)]
        assert not left, f"tasks left running: {left}"

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(watched())
    assert not escaped, f"escaped into the event loop: {escaped}"


def _is_the_proxys(task: asyncio.Task[Any]) -> bool:
    frame = getattr(task.get_coro(), "cr_frame", None)
    return frame is not None and frame.f_globals.get("__name__", "").startswith(_PROXY_MODULES)


class Owners:
    """An ownership source that reports nothing by itself: it records the partitions it was asked to look up again.

    `on_refresh` may change the topology, as a re-read does.
    """

    def __init__(self) -> None:
        self.refreshed: list[tuple[str, int, int]] = []
        self.on_refresh: Callable[[str, int, int], None] = lambda topic, index, revision: None

    async def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> None:
        # An unknown id is not text.
        name = topic.decode(errors="backslashreplace")
        self.refreshed.append((name, partition_index, seen_revision))
        self.on_refresh(name, partition_index, seen_revision)


class RunningProxy:
    """A proxy on a free port, before upstreams that the test drives."""

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        own: OwnService | None = None,
        mechanisms: Servers | None = None,
        times: Mapping[str, float] = MappingProxyType({}),
        carries: bool = False,
    ) -> None:
        self.topology = Topology()
        self.source = Owners()
        self.pages: list[bytes] = []
        # Every serving proxy has a trail; here only tests read it.
        self.trail = Trail(
            "proxy.test:19092",
            "0123456789abcdef",
            clock=clock,
            wall_ms=lambda: round(clock() * 1000),
            deadline_cap_ms=limits.deadline_cap_ms,
            interval_s=1.0,
            offer=lambda page, first_sequence, last_sequence: self.pages.append(page),
            left_out=[b"left-out"],
        )
        self.context = ProxyContext(
            self.topology,
            self.source,
            Fleet([IDENTITY]),
            limits,
            clock,
            Random(7),
            own=own,
            sasl_apis=SASL_APIS if mechanisms is not None else {},
            trail=self.trail,
        )
        self.admissions: dict[str, Admission] = {}
        if mechanisms is not None:
            lifetimes = Times(clock, time.time, times.get("lifetime_s", 0.0))
            timeout_s = times.get("timeout_s", 10.0)
            self.admissions[""] = Admission(
                mechanisms,
                lifetimes,
                timeout_s=timeout_s,
                counters=self.context.counters,
                carries=carries,
                allows_v0=True,
            )
        self.listener = Listener(limits)
        self.port = 0
        self._revision = 0
        self._clients: list[RawClient] = []

    @property
    def counters(self) -> Counter[str]:
        return self.context.counters

    @property
    def vitals(self) -> Vitals:
        """The listener's present values; nothing else runs meanwhile."""
        looking = self.listener.vitals()
        while True:
            try:
                looking.send(None)
            except StopIteration as done:
                vitals: Vitals = done.value
                return vitals

    def retries(self, event: int) -> int:
        """The number of retries for this cause (kproxy.routing.retry)."""
        return sum(count for (cause, _), count in self.context.tally.retries.items() if cause == event)

    def ranges(self) -> list[Range]:
        """All acknowledgements in the trail; call it once, after `trail.begin`."""
        self.trail.end()
        return [row for page in self.pages for row in decode_page(page) if isinstance(row, Range)]

    def own(self, owner: int, topic: str = "t", partitions: Sequence[int] = (0,)) -> int:
        """Make `owner` (NO_OWNER: nobody) the owner of a topic with an id; return the new revision."""
        self.topology.set_topic_id(topic.encode(), topic_id(topic).bytes)
        for partition_index in partitions:
            self._revision += 1
            self.topology.set_owner(topic.encode(), partition_index, owner, self._revision)
        return self._revision

    def disown(self, topic: str = "t", partitions: Sequence[int] = (0,)) -> int:
        return self.own(NO_OWNER, topic, partitions)

    async def client(self) -> RawClient:
        client = await RawClient().connect(self.port)
        self._clients.append(client)
        return client

    async def stop(self) -> None:
        for client in self._clients:
            client.abort()
        async with asyncio.timeout(2 * PATIENCE_S):
            await self.listener.stop()
        budget = self.context.budget
        assert (budget.held, budget.arriving) == (0, 0), "what was counted for requests was not taken off again"
        assert not budget.waiting
        assert budget.passing is None


@asynccontextmanager
async def running_proxy(
    *upstreams: ScriptedUpstream,
    limits: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    follows_versions: bool = False,
    introduced: bool = True,
    own: OwnService | None = None,
    mechanisms: Servers | None = None,
    times: Mapping[str, float] = MappingProxyType({}),
    carries: bool = False,
    tls: Loaded | None = None,
) -> AsyncIterator[RunningProxy]:
    """A proxy that knows these upstreams; starts those that do not run, and stops everything at the end.

    The proxy asks upstreams for their versions at the start, or if not `introduced` only when a client asks, so that
    only the test's requests arrive. With `mechanisms` clients authenticate by SASL; `times` are its `timeout_s` and
    `lifetime_s`. `carries`: clients' identities are forwarded to brokers. `tls`: the listener's TLS.
    """
    async with AsyncExitStack() as stack:
        proxy = RunningProxy(Limits(**{"drain_s": 1.0, **(limits or {})}), clock, own, mechanisms, times, carries)
        for upstream in upstreams:
            stack.push_async_callback(upstream.stop)
            if not upstream.port:
                await upstream.start()
            proxy.topology.set_broker(upstream.node_id, upstream.address)
        if tls is None:
            proxy.port = await proxy.listener.bind(HOST, 0)
        else:
            reloading = Reloading("tls", [], lambda: tls, counters=proxy.counters)
            listener = ListenerConfig("", Address(HOST, 0), None, tls=ListenerTls(Path(), Path()))
            proxy.port = await proxy.listener.bind_for(listener, reloading, counters=proxy.counters)
        await proxy.listener.serve(proxy.context, admissions=proxy.admissions, follows_versions=follows_versions)
        stack.push_async_callback(proxy.stop)
        if introduced and not follows_versions:
            await introduce(proxy, upstreams)
        yield proxy


running_among_strangers = functools.partial(running_proxy, introduced=False)
"""The same with brokers that have not reported their versions yet, for tests of that."""


async def introduce(proxy: RunningProxy, upstreams: Sequence[ScriptedUpstream]) -> None:
    """Let the proxy learn which versions these upstreams serve."""
    for upstream in upstreams:
        upstream.introduces_itself = True
    await proxy.context.brokers.current()
    for upstream in upstreams:
        upstream.introduces_itself = False

"""Start a proxy, the brokers that own its partitions, and clients: the first step of most tests of the proxy.

`@scene(HOLDS, ANSWERS)` gives its test a `Scene` with one broker for each script, on both event loops. Partition n of
the topic `t` belongs to broker n+1, or to the n-th of `owners`. All other arguments go to `running_proxy`.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum
from typing import Any

from kproxy_codec.api_keys import PRODUCE
from tests.support.brokers.scripted_upstream import (
    SILENCE_S,
    Asked,
    DeafListener,
    Script,
    ScriptedUpstream,
    answers_everything,
)
from tests.support.clients.raw_client import Answer, RawClient, batch, produce_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, in_one_go, running_proxy
from tests.support.waiting import eventually


class Conduct(Enum):
    """The behaviour of a broker without a script."""

    HOLDS = "keeps each request until the test takes and answers it"
    DOWN = "refuses dials until it `rises`, then holds"
    DEAF = "lets dials hang until it `rises`, then holds"
    HANGS = "holds, and answers no probes until it wakes"


HOLDS, DOWN, DEAF, HANGS = Conduct
ANSWERS = answers_everything
T0, T1 = ("t", 0), ("t", 1)
# kproxy.routing.retry: a request that was not written.
NOT_WRITTEN = 65536


class Scene:
    """`now` is the proxy's time if the scene was given one (`at`).

    The client's requests may be numbered: number n is batch n, with correlation id n.
    """

    proxy: RunningProxy

    def __init__(self, at: float) -> None:
        self.now = at
        # By request number.
        self.sent: dict[int, bytes] = {}
        self.brokers: list[ScriptedUpstream] = []
        self.clients: list[RawClient] = []
        self.deaf: dict[int, DeafListener] = {}

    @property
    def broker(self) -> ScriptedUpstream:
        return self.brokers[0]

    @property
    def client(self) -> RawClient:
        return self.clients[0]

    @property
    def sessions(self) -> int:
        """The proxy's client connections."""
        return len(self.proxy.listener._sessions)

    def send(self, *frames: bytes) -> None:
        self.client.send(*frames)

    async def next(self) -> Asked:
        """The next request at the first broker."""
        return await self.broker.next()

    async def answer(self, api_key: int = PRODUCE, api_version: int = 9) -> Answer:
        """The client's next answer."""
        return await self.client.answer(api_key, api_version)

    async def codes(self) -> dict[tuple[str, int], int]:
        """The error codes in the client's next answer."""
        return (await self.answer()).codes

    async def ids(self, count: int) -> list[int]:
        """The correlation ids of the client's next answers."""
        return [(await self.answer()).correlation_id for _ in range(count)]

    async def ask(self, *frames: bytes) -> list[dict[tuple[str, int], int]]:
        """Send a produce request; return its results."""
        self.send(*frames)
        return [await self.codes() for _ in frames]

    def produces(self, *numbers: int, producer_id: int = 7, client: int = 1, **options: Any) -> None:
        """Send a produce request for each of these numbers; `options` are those of `produce_frame`."""
        for number in numbers:
            self.sent[number] = batch(number, producer_id=producer_id)
            self.clients[client - 1].send(produce_frame(records=self.sent[number], correlation_id=number, **options))

    async def takes(self, *numbers: int, at: int = 1) -> list[Asked]:
        """Check that the next requests at broker `at` are these batches, in this order."""
        asked = [await self.brokers[at - 1].next() for _ in numbers]
        assert [{*each.records.values()} for each in asked] == [{self.sent[number]} for number in numbers]
        return asked

    async def accepts(self, *numbers: int, at: int = 1, **answer: Any) -> None:
        """Like `takes`, and answer each with success."""
        for number in numbers:
            (asked,) = await self.takes(number, at=at)
            asked.answer(**answer)

    async def gets(self, *numbers: int) -> list[int]:
        """The codes of t-0 in the client's next answers, which answer exactly these requests in order."""
        came = [await self.answer() for _ in numbers]
        assert [answer.correlation_id for answer in came] == [*numbers]
        return [answer.codes[T0] for answer in came]

    async def prove(self, number: int = 0, **options: Any) -> None:
        """Let one batch be accepted, so that later ones are pipelined."""
        self.produces(number, **options)
        await self.accepts(number)
        assert await self.gets(number) == [0]

    async def rises(self, number: int = 1) -> None:
        """Let broker `number` accept connections from now on."""
        broker = self.brokers[number - 1]
        if number in self.deaf:
            await self.deaf[number].open(broker)
        else:
            await broker.start(broker.port)

    async def still(self, seconds: float = SILENCE_S) -> bool:
        """Whether nothing reaches the client for that long."""
        return await self.client.is_silent(seconds)

    async def undialled(self) -> None:
        """Wait for a request that could not be written because its broker refused the dial."""
        await eventually(lambda: self.proxy.retries(NOT_WRITTEN) >= 1)

    async def until_sessions(self, count: int = 0) -> None:
        """Wait until the proxy has this many client connections."""
        await eventually(lambda: self.sessions == count, f"{count} client connections are left")


@asynccontextmanager
async def staged(
    *scripts: Script | Conduct,
    owners: Sequence[int] | None = None,
    clients: int = 1,
    at: float | None = None,
    ids: Iterable[int] = (1, 2, 3),
    **options: Any,
) -> AsyncIterator[Scene]:
    """A scene for a test that makes its scripts in its body or from its parameters."""
    scene = Scene(at or 0.0)
    async with AsyncExitStack() as stack:
        for number, (node_id, script) in enumerate(zip(ids, scripts, strict=False), 1):
            broker = ScriptedUpstream(node_id, None if isinstance(script, Conduct) else script)
            scene.brokers.append(broker)
            broker.answers_probes = script is not HANGS
            if script is DEAF:
                scene.deaf[number] = stack.enter_context(DeafListener())
                stack.push_async_callback(broker.stop)
        heard = [broker for number, broker in enumerate(scene.brokers, 1) if number not in scene.deaf]
        clock: Callable[[], float] = time.monotonic if at is None else lambda: scene.now
        scene.proxy = await stack.enter_async_context(running_proxy(*heard, clock=clock, **options))
        for number, listener in scene.deaf.items():
            scene.proxy.topology.set_broker(scene.brokers[number - 1].node_id, listener.address)
        for script, broker in zip(scripts, scene.brokers, strict=True):
            if script is DOWN:
                await broker.stop_listening()
        for index, owner in enumerate([broker.node_id for broker in scene.brokers] if owners is None else owners):
            scene.proxy.own(owner, partitions=[index])
        scene.clients = [await scene.proxy.client() for _ in range(clients)]
        yield scene


def scene(
    *scripts: Script | Conduct, one_go: bool = False, **options: Any
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run a test with a `Scene`; `one_go` as in `in_one_go`, the rest as in `staged`."""

    def decorated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        async def run(**arguments: Any) -> None:
            async with staged(*scripts, **options) as given:
                await test(given, **arguments)

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return both_loops(in_one_go(run) if one_go else run)

    return decorated

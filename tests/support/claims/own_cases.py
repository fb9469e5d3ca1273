"""Cases of the Own API as lists of steps, and their setting: named connections to proxies with several workers each.

Each case has its own topic, gated by its own writer group. A resource that is a number stands for that partition of the
case's topic; any other resource is used as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import psutil

from kproxy.claims.keys import OwnKeys
from kproxy.etcd import EtcdClient
from kproxy_codec.api_keys import OWN
from kproxy_codec.error_codes import NONE, POLICY_VIOLATION
from kproxy_codec.own import NO_FENCE, NO_GENERATION, OWN_MAX_VERSION, WHOLE_GROUP, OwnResponse
from tests.support.brokers.scripted_upstream import HOST
from tests.support.claims.own_client import OwnClient
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import port_of
from tests.support.processes.worker_processes import worker_pids
from tests.support.waiting import PATIENCE_S

# The number of connections that are opened at once.
AT_ONCE = 24


class Place(NamedTuple):
    """A worker of a proxy: proxies count from 0, their workers from 1."""

    proxy: int
    worker: int


class Pool:
    """Connections to each worker of several proxies: the system chooses the worker, so they are opened in advance."""

    def __init__(self, proxies: Sequence[KproxyProcess]) -> None:
        self.proxies = proxies
        self._making = asyncio.Lock()
        self._pids = [worker_pids(process) for process in proxies]
        self._stock: dict[Place, list[OwnClient]] = {
            Place(proxy, worker): [] for proxy, pids in enumerate(self._pids) for worker in pids
        }

    async def connect(self, place: Place) -> OwnClient:
        deadline = time.monotonic() + PATIENCE_S
        async with self._making:
            while not self._stock[place]:
                assert time.monotonic() < deadline, f"no connection reaches {place} of {self._pids}"
                port = port_of(self.proxies[place.proxy])
                await self._sort(place.proxy, [await OwnClient.connect(HOST, port) for _ in range(AT_ONCE)])
            return self._stock[place].pop()

    async def _sort(self, proxy: int, clients: list[OwnClient]) -> None:
        """Sort connections by the worker that accepted them; a connection is accepted once it has an answer."""
        await asyncio.gather(*(client.api_versions() for client in clients))
        for worker, pid in self._pids[proxy].items():
            held = {each.raddr.port for each in psutil.Process(pid).net_connections("tcp") if each.raddr}
            self._stock[Place(proxy, worker)] += [each for each in clients if each.raw.own_port in held]

    async def close(self) -> None:
        for client in [each for clients in self._stock.values() for each in clients]:
            await client.close()


def writers_of(topic: str) -> str:
    """The writer group of a topic."""
    return f"{topic}-writers"


class CaseRun:
    """A running case: its names, its connections, and the fences that were granted."""

    def __init__(
        self, topic: str, where: str, places: Mapping[str, Place], pool: Pool, etcd: EtcdClient, keys: OwnKeys
    ) -> None:
        self.topic, self.group, self.where = topic, writers_of(topic), where
        self._places, self._pool, self._etcd, self._keys = places, pool, etcd, keys
        self.clients: dict[str, OwnClient] = {}
        # By group and resource: the latest fence; a later grant is above it.
        self.fences: dict[tuple[str, str], int] = {}

    async def open(self, *names: str) -> None:
        for name in names:
            self.clients[name] = await self._pool.connect(self._places[name])

    def resource(self, name: str) -> str:
        return f"{self.topic}/{name}" if name.isascii() and name.isdigit() else name

    def value(self, who: str) -> bytes:
        """The value that a connection writes in this run."""
        return f"{self.where}: {who}".encode()

    def port_of(self, name: str) -> int:
        """The port of a connection's proxy."""
        return port_of(self._pool.proxies[self._places[name].proxy])

    async def end_of(self, partition: int) -> int:
        """The offset of the next record."""
        client = await self._pool.connect(self._places["A"])
        records = (await client.fetch(self.topic, partition, 0)).records
        await client.close()
        return records[-1].offset + 1 if records else 0

    async def until_free(self, group: str, resource: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self._etcd.get(self._keys.claim(group, resource)) is not None:
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()


Checked = Awaitable[None]
Step = Callable[[CaseRun], Awaitable[Checked]]
"""A step sends its request; awaiting the result waits for the expected outcome, and fails if another one comes."""


async def take(run: CaseRun, steps: Sequence[Step]) -> None:
    for number, step in enumerate(steps, 1):
        try:
            await (await step(run))
        except (AssertionError, ConnectionError, TimeoutError) as error:
            raise AssertionError(f"step {number} of {len(steps)}: {error!r}") from error


def pipelined(*steps: Step) -> Step:
    """Send all steps before the first answer is awaited."""

    async def send(run: CaseRun) -> Checked:
        checks = [await step(run) for step in steps]

        async def check() -> None:
            for each in checks:
                await each

        return check()

    return send


def _step(step: Callable[[CaseRun], Awaitable[None]]) -> Step:
    async def send(run: CaseRun) -> Checked:
        return step(run)

    return send


# Claims


class New(NamedTuple):
    """Granted, with a fence above all earlier fences of the resource."""

    generation: int


class Same(NamedTuple):
    """Granted with the fence that the resource, or `of` another name, already has."""

    generation: int
    of: str | None = None


class Refused(NamedTuple):
    error_code: int


Outcome = New | Same | Refused


def own(
    who: str,
    resources: Sequence[tuple[str, int]] | None,
    *outcomes: Outcome,
    error_code: int = NONE,
    group: str | None = None,
    version: int = OWN_MAX_VERSION,
) -> Step:
    """`who` claims resources, each with a generation (None: the whole group); `outcomes` has one outcome for each.

    `error_code` is that of the request as a whole; `group` is by default that of the topic's writers.
    """

    async def send(run: CaseRun) -> Checked:
        asked_group = run.group if group is None else group
        asked = None if resources is None else [(run.resource(name), generation) for name, generation in resources]
        highest = max(run.fences.values(), default=0)
        answer = run.clients[who].send_own(asked_group, asked, version)

        async def check() -> None:
            response = await answer
            assert (response.error_code, response.group) == (error_code, asked_group), response
            names = [WHOLE_GROUP] if asked is None else [resource for resource, _ in asked]
            assert [each.resource for each in response.resources] == ([] if error_code else names), response
            assert len(outcomes) == len(response.resources), response
            _check(run, asked_group, response, outcomes, highest, with_fence=version > 0)

        return check()

    return send


def _check(
    run: CaseRun, group: str, response: OwnResponse, outcomes: Sequence[Outcome], highest: int, *, with_fence: bool
) -> None:
    for found, outcome in zip(response.resources, outcomes, strict=True):
        if isinstance(outcome, Refused):
            assert found[1:] == (outcome.error_code, NO_GENERATION, NO_FENCE), f"{found}, expected was {outcome}"
            continue
        assert found[1:3] == (NONE, outcome.generation), f"{found}, expected was {outcome}"
        if not with_fence:
            assert found.fence == NO_FENCE, found
            continue
        if isinstance(outcome, Same):
            of = found.resource if outcome.of is None else run.resource(outcome.of)
            assert found.fence == run.fences[group, of], f"{found}, expected was {outcome} of {run.fences}"
        else:
            assert found.fence > highest, f"{found} is not above the fences before: {run.fences}"
        run.fences[group, found.resource] = found.fence


def severed(*names: str) -> Step:
    """Wait until the proxy has ended these connections."""

    async def step(run: CaseRun) -> None:
        for name in names:
            assert await run.clients[name].wait_closed(PATIENCE_S), f"{name} is not severed"

    return _step(step)


def served(*names: str) -> Step:
    """Check that these connections still get answers."""

    async def step(run: CaseRun) -> None:
        for name in names:
            assert OWN in await run.clients[name].api_versions()

    return _step(step)


def closes(who: str) -> Step:
    async def step(run: CaseRun) -> None:
        await run.clients[who].close()

    return _step(step)


def breaks(who: str) -> Step:
    """Reset the connection of `who`."""

    async def step(run: CaseRun) -> None:
        run.clients[who].abort()

    return _step(step)


def comes_back(who: str) -> Step:
    """Connect `who` to the same worker again."""

    async def step(run: CaseRun) -> None:
        await run.open(who)

    return _step(step)


def freed(*resources: str, group: str | None = None) -> Step:
    """Wait until nobody owns these resources."""

    async def step(run: CaseRun) -> None:
        for each in resources:
            await run.until_free(run.group if group is None else group, run.resource(each))

    return _step(step)


# Effects of claims


def writes(who: str, *partitions: int, error_code: int = NONE, acks: int = -1, topic: str | None = None) -> Step:
    """`who` produces to partitions of the case's topic, or another, one request each."""

    async def send(run: CaseRun) -> Checked:
        named = run.topic if topic is None else topic
        answers = [run.clients[who].send_produce(named, each, run.value(who), acks) for each in partitions]

        async def check() -> None:
            found = [(await answer).error_code for answer in answers]
            assert found == [error_code] * len(partitions), f"{who} produces to {named} {partitions}: {found}"

        return check()

    return send


def may_not_write(who: str, *partitions: int, acks: int = -1) -> Step:
    return writes(who, *partitions, error_code=POLICY_VIOLATION, acks=acks)


def reads(who: str, *partitions: int, error_code: int = NONE) -> Step:
    async def step(run: CaseRun) -> None:
        found = [(await run.clients[who].fetch(run.topic, each, 0)).error_code for each in partitions]
        assert found == [error_code] * len(partitions), f"{who} fetches {partitions}: {found}"

    return _step(step)


def may_not_read(who: str, *partitions: int) -> Step:
    return reads(who, *partitions, error_code=POLICY_VIOLATION)


def holds(who: str, partition: int, *values: str) -> Step:
    """All records that this run wrote to a partition, as `who` reads them."""

    async def step(run: CaseRun) -> None:
        fetched = await run.clients[who].fetch(run.topic, partition, 0)
        found = [each.value for each in fetched.records if each.value.startswith(run.value(""))]
        assert found == [run.value(each) for each in values]

    return _step(step)


def led_by(who: str, *partitions: int) -> Step:
    """Check that Metadata from any proxy names the proxy of `who` as the leader."""

    async def step(run: CaseRun) -> None:
        for name, client in run.clients.items():
            if not client.closed:
                leaders = [(await client.metadata_leader(run.topic, each)).port for each in partitions]
                assert leaders == [run.port_of(who)] * len(partitions), f"{name} is told that {leaders} lead"

    return _step(step)

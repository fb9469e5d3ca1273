"""Provide a fixture for tests of the Own API: two proxies with two workers each, reference brokers, and one etcd.

`own_site` is shared by the whole run, so a test leaves no claims behind. Topics exist in advance, each gated by its own
writer group.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kproxy.claims.keys import OwnKeys
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from tests.support.brokers.reference_broker import start_brokers
from tests.support.brokers.scripted_upstream import HOST
from tests.support.claims.own_cases import Place, Pool, writers_of
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.waiting import PATIENCE_S

PARTITIONS = 2
TOPICS = [f"own-{number}" for number in range(60)]
# A stopped process delays claims for this long at most.
# For proxies that tests kill, and for the others.
TTL_S = 6
LASTING_TTL_S = 60
OPEN_TOPIC = "everybody-s"

_Value = TypeVar("_Value")


class OwnSite:
    """`run` runs a coroutine on the event loop that all connections here belong to."""

    def __init__(self, directory: Path, etcd: str, prefix: str, stack: ExitStack) -> None:
        self.etcd_endpoint, self.prefix, self._directory = etcd, prefix, directory
        self.keys = OwnKeys(prefix)
        self._runner = stack.enter_context(asyncio.Runner())
        self._started = 0
        self._unused = iter(TOPICS)
        self._topics: dict[str, str] = {}
        # Long, because on a busy machine a short lease would end, and then nobody may read or write.
        lasting = ("--workers", "2", "--lease-ttl", str(LASTING_TTL_S))
        self.proxies = [stack.enter_context(self.proxy(*lasting)) for _ in range(2)]
        self.pool, self.etcd = Pool(self.proxies), EtcdClient([etcd])
        self.run(self.etcd.connect())
        stack.callback(lambda: self.run(self.etcd.close()))
        stack.callback(lambda: self.run(self.pool.close()))

    def run(self, work: Coroutine[Any, Any, _Value]) -> _Value:
        return self._runner.run(work)

    def topic(self, use: str) -> str:
        """The topic of this use, which has no other use."""
        if use not in self._topics:
            self._topics[use] = next(self._unused)
        return self._topics[use]

    @contextmanager
    def proxy(self, *more: str, etcd: str | None = None) -> Iterator[KproxyProcess]:
        """Run one more proxy until the block ends."""
        self._started += 1
        arguments = ["serve", "--listen", f"{HOST}:0", "--admin", f"{HOST}:0", "--lease-ttl", str(TTL_S), *more]
        arguments += ["--etcd", etcd or self.etcd_endpoint, "--prefix", self.prefix]
        arguments += [f"--writer-group={topic}={writers_of(topic)}" for topic in TOPICS]
        with serving(arguments, self._directory / f"proxy-{self._started}") as process:
            yield process

    async def create_topics(self) -> None:
        client = await self.pool.connect(Place(0, 1))
        await client.create_topics([OPEN_TOPIC, *TOPICS], PARTITIONS)
        await client.close()

    async def members(self) -> int:
        return len((await self.etcd.get_prefix(self.keys.members)).kvs)

    async def until_nothing_is_claimed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.etcd.get_prefix(self.keys.claims)).kvs:
                await asyncio.sleep(0.005)


def on_site(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test's coroutine on the event loop of its `own_site`, and wait until it leaves no claims behind."""

    @functools.wraps(test)
    def run(own_site: OwnSite, **given: object) -> None:
        own_site.run(test(own_site=own_site, **given))
        own_site.run(own_site.until_nothing_is_claimed())

    return run


@pytest.fixture(scope="session")
def own_site(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnSite]:
    directory, prefix = tmp_path_factory.mktemp("own-site"), f"/own-site-{uuid.uuid4().hex[:10]}"
    with ExitStack() as stack:
        stack.enter_context(start_brokers((1, 2), directory, etcd.endpoint, prefix, num_partitions=PARTITIONS))
        site = OwnSite(directory, etcd.endpoint, prefix, stack)
        site.run(site.create_topics())
        yield site

"""Run brokers and two proxies, each behind a relay, for clients that own their partitions.

The relays can end connections, or stop carrying bytes without ending them, like a network. The topics of the site have
the writer group WRITERS.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from tests.support.brokers.reference_broker import BrokerProcess, start_brokers
from tests.support.clients.kafka_io import read_topic
from tests.support.etcd.embedded import Relay
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.waiting import wait_for

WRITERS = "writers"
PARTITIONS = 4
# Long, because no test waits for the end of a lease: a machine that stops for seconds must not end it.
TTL_S = 60
_TOPICS = 60
_TIMEOUT_S = 60.0


class RelayThread:
    """Relays on an event loop and a thread of their own, so that tests that block may use them too."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_TIMEOUT_S)
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_TIMEOUT_S)

    def call(self, step: Callable[[], None]) -> None:
        async def run() -> None:
            step()

        self.run(run())


class RelayedProxy:
    """A proxy, and the relay before it."""

    def __init__(self, process: KproxyProcess, relay: Relay, thread: RelayThread) -> None:
        self.process = process
        self._relay = relay
        self._thread = thread

    @property
    def port(self) -> int:
        """The relay's port."""
        return self._relay.port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End all connections."""
        self._thread.run(self._relay.cut())

    def freeze(self) -> None:
        """Stop carrying bytes on the existing connections, without ending them."""
        self._thread.call(self._relay.freeze)


class OwnedTopics:
    """The site. `topic` returns an unused topic with PARTITIONS partitions."""

    def __init__(self, brokers: list[BrokerProcess], proxies: list[RelayedProxy]) -> None:
        self.brokers = brokers
        self.proxies = proxies
        self._unused = itertools.count()

    @property
    def bootstrap(self) -> str:
        return ",".join(each.address for each in self.proxies)

    @property
    def broker_addresses(self) -> str:
        return ",".join(each.address for each in self.brokers)

    def topic(self) -> str:
        """A topic that both proxies know: a claim of a partition that a proxy does not know yet is refused at once."""
        number = next(self._unused)
        assert number < _TOPICS, "there are no more of them"
        topic = _name(number)
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.create_topics([NewTopic(topic, PARTITIONS)])[topic].result(_TIMEOUT_S)
        for proxy in self.proxies:
            admin = AdminClient({"bootstrap.servers": proxy.address})
            wait_for(partial(_has_leaders, admin, topic), what=f"{topic} is known at {proxy.address}")
        return topic

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.cut()

    def log(self, topic: str, partition: int = 0) -> list[bytes]:
        """All values in a partition, read from the brokers themselves."""
        read = read_topic(self.broker_addresses, topic, PARTITIONS, 0)
        return [each.value or b"" for each in read if each.partition == partition]


def _has_leaders(admin: AdminClient, topic: str) -> bool:
    known = admin.list_topics(topic, timeout=_TIMEOUT_S).topics[topic]
    return (
        known.error is None
        and len(known.partitions) == PARTITIONS
        and all(each.leader >= 0 for each in known.partitions.values())
    )


def _name(number: int) -> str:
    return f"orders-{number}"


@contextmanager
def _relayed_proxy(etcd: str, prefix: str, directory: Path, thread: RelayThread) -> Iterator[RelayedProxy]:
    # The relay's port is known before the proxy starts, which names it to clients.
    relay = Relay("http://127.0.0.1:1")
    thread.run(relay.open())
    try:
        arguments = ["serve", "--listen", "127.0.0.1:0", "--advertise", f"127.0.0.1:{relay.port}"]
        arguments += ["--etcd", etcd, "--prefix", prefix, "--lease-ttl", str(TTL_S)]
        for number in range(_TOPICS):
            arguments += ["--writer-group", f"{_name(number)}={WRITERS}"]
        with serving(arguments, directory / f"proxy-{relay.port}") as process:
            relay.target(f"http://{process.kafka}")
            yield RelayedProxy(process, relay, thread)
    finally:
        thread.run(relay.shut())


@pytest.fixture(scope="session")
def owned_topics(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnedTopics]:
    directory, prefix = tmp_path_factory.mktemp("owned"), f"/owned-{uuid.uuid4().hex[:10]}"
    with ExitStack() as stack:
        brokers = stack.enter_context(
            start_brokers((1, 2), directory, etcd.endpoint, prefix, num_partitions=PARTITIONS)
        )
        thread = stack.enter_context(RelayThread())
        proxies = [stack.enter_context(_relayed_proxy(etcd.endpoint, prefix, directory, thread)) for _ in range(2)]
        yield OwnedTopics(brokers, proxies)

"""Host names of brokers: an unanswered name lookup delays no dial to another broker."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kproxy.routing.topology import Address
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.scene import ANSWERS, NOT_WRITTEN, Scene, scene
from tests.support.waiting import eventually

NOT_LEADER = 6
PLAIN = batch(producer_id=-1)
# More than any event loop has threads for names.
SLOW = [f"slow{n}.test" for n in range(40)]
QUICK = "quick.test"
# A dial ends after a second; a lookup that waits for a slow name takes far longer.
SOON_S = 20.0


class Names:
    """The system's resolver with its own names: `slow…` wait for `answer`, and all others are this machine."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.asked = Counter[str]()
        self._real = socket.getaddrinfo

    def getaddrinfo(self, host: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else str(host)
        if not name.endswith(".test"):
            return self._real(host, *arguments, **options)
        self.asked[name] += 1
        if name in SLOW:
            self.answer.wait(300)
        return self._real("127.0.0.1", *arguments, **options)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    yield names
    names.answer.set()


async def code_of(client: RawClient, topic: str = "t", partition_index: int = 0) -> int:
    client.send(produce_frame({topic: [partition_index]}, records=PLAIN))
    return (await client.answer()).codes[topic, partition_index]


def name(s: Scene, host: str = QUICK) -> None:
    s.proxy.topology.set_broker(1, Address(host, s.broker.port))


def lookups() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("resolve")]


@scene(ANSWERS, clients=len(SLOW) + 1)
async def test_slow_name_lookups_delay_no_other_dial(s: Scene, names: Names) -> None:
    name(s)
    for broker, host in enumerate(SLOW, 100):
        s.proxy.topology.set_broker(broker, Address(host, s.broker.port))
        s.proxy.own(broker, "slow", [broker])
    lucky, *unlucky = s.clients
    asking = [asyncio.ensure_future(code_of(client, "slow", broker)) for broker, client in enumerate(unlucky, 100)]
    await eventually(lambda: len(names.asked) == len(SLOW), "each name is asked for")
    began = time.monotonic()
    assert await code_of(lucky) == 0
    assert time.monotonic() - began < SOON_S
    assert await asyncio.gather(*asking) == [NOT_LEADER] * len(SLOW)
    # One thread per name, however many dials wait for it.
    assert {names.asked[host] for host in SLOW} == {1}
    # The process may end meanwhile.
    assert {each.daemon for each in lookups()} == {True}
    # After an answer they are normal brokers.
    names.answer.set()
    await eventually(lambda: not lookups())

    async def is_one() -> bool:
        return await code_of(unlucky[0], "slow", 100) == 0

    await eventually(is_one)


@scene(ANSWERS, clients=21)
async def test_one_name_lookup_serves_all_connections(s: Scene, names: Names) -> None:
    name(s)
    assert await asyncio.gather(*map(code_of, s.clients[1:])) == [0] * 20
    assert names.asked == {QUICK: 1}
    # An answer is kept briefly: the name's address may change.
    await asyncio.sleep(1.1)
    assert await code_of(s.client) == 0
    assert names.asked == {QUICK: 2}


@pytest.mark.parametrize("at_once", [False, True])
@scene(ANSWERS)
async def test_each_address_of_a_name_is_tried(s: Scene, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One dial tries all addresses of one lookup; an address that failed is not used again, even if known."""
    real, addresses = socket.getaddrinfo, ["127.0.0.2", "127.0.0.1"]

    def several(host: Any, *arguments: Any, **options: Any) -> Any:
        found = [host] if host != QUICK else addresses if at_once else [addresses.pop(0)]
        return [row for each in found for row in real(each, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", several)
    name(s)
    assert await code_of(s.client) == 0
    assert not at_once or s.proxy.retries(NOT_WRITTEN) == 0


@scene(ANSWERS)
async def test_name_lookup_is_retried_when_threads_are_available(s: Scene) -> None:
    name(s, "localhost")
    size = threading.stack_size(1 << 46)
    try:
        assert await code_of(s.client) == NOT_LEADER
    finally:
        threading.stack_size(size)
    assert await code_of(s.client) == 0

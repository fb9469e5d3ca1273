"""Host names are looked up once for all who ask, kept for a second, and tried address by address."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import Counter
from typing import Any

import pytest

from kproxy.runtime.resolver import FRESH_S, MAX_KNOWN, MAX_LOOKUPS, Resolver, dial

ADDRESSES = ("192.0.2.1", "192.0.2.2")


class Lookups:
    """Answers lookups of names ending in `.test` with ADDRESSES, others as the system does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = Counter[str]()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: str, *arguments: Any, **options: Any) -> list[Any]:
        self.asked[host] += 1
        self.may_answer.wait(60)
        if not host.endswith(".test"):
            return self._real(host, *arguments, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ADDRESSES]


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Lookups:
    return Lookups(monkeypatch)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_address_is_not_looked_up(lookups: Lookups, address: str) -> None:
    assert await Resolver().addresses(address) == (address,)
    assert not lookups.asked


async def test_name_is_looked_up_once_a_second(lookups: Lookups) -> None:
    now = [0.0]
    resolver = Resolver(lambda: now[0])
    assert set(await resolver.addresses("localhost")) <= {"127.0.0.1", "::1"}
    for now[0], asked in [(FRESH_S - 0.01, 1), (FRESH_S, 2), (FRESH_S + 0.5, 2)]:
        await resolver.addresses("localhost")
        assert lookups.asked["localhost"] == asked
    resolver.forget("localhost")
    await resolver.addresses("localhost")
    assert lookups.asked["localhost"] == 3


async def test_lookups_under_way_are_shared_and_bounded(lookups: Lookups) -> None:
    resolver = Resolver()
    lookups.may_answer.clear()
    names = [f"{number}.test" for number in range(MAX_LOOKUPS)]
    waiting = [asyncio.ensure_future(resolver.addresses(name)) for name in names * 2]
    await asyncio.sleep(0)
    with pytest.raises(OSError, match=r"one-more\.test is not looked up: 64 other lookups are in progress"):
        await resolver.addresses("one-more.test")
    lookups.may_answer.set()
    assert await asyncio.gather(*waiting) == [ADDRESSES] * len(waiting)
    assert lookups.asked == Counter(names)


async def test_oldest_known_name_is_forgotten_first(lookups: Lookups) -> None:
    now = [0.0]
    resolver = Resolver(lambda: now[0])
    for number in range(MAX_KNOWN):
        await resolver.addresses(f"{number}.test")
    # It is the newest again.
    now[0] = FRESH_S
    await resolver.addresses("0.test")
    await resolver.addresses("new.test")
    now[0] = FRESH_S / 2
    for name, asked in [("2.test", 1), ("0.test", 2), ("1.test", 2)]:
        await resolver.addresses(name)
        assert lookups.asked[name] == asked


async def test_next_address_is_tried_after_a_refusal(lookups: Lookups) -> None:
    tried = []

    async def connect(address: str, port: int) -> str:
        tried.append(address)
        if address == ADDRESSES[0]:
            raise ConnectionRefusedError
        return f"{address}:{port}"

    assert await dial(connect, "broker.test", 9092) == f"{ADDRESSES[1]}:9092"
    assert tried == list(ADDRESSES)


@pytest.mark.parametrize(("failure", "tries"), [(ConnectionRefusedError("first"), 2), (ssl.SSLError("first"), 1)])
async def test_first_failure_is_raised_and_name_forgotten(lookups: Lookups, failure: OSError, tries: int) -> None:
    failures = [failure, OSError("second")]
    tried = 0

    async def connect(address: str, port: int) -> None:
        nonlocal tried
        tried += 1
        raise failures[ADDRESSES.index(address)]

    with pytest.raises(OSError, match="first"):
        await dial(connect, "broker.test", 9092)
    assert tried == tries


@pytest.mark.parametrize("host", ["x" * 64 + ".example", ".example", "a\0b"])
async def test_impossible_host_name_is_an_oserror(lookups: Lookups, host: str) -> None:
    async def connect(address: str, port: int) -> None:
        raise AssertionError(address)

    with pytest.raises(OSError, match=r"cannot be a host name|not known|embedded"):
        await dial(connect, host, 9092)

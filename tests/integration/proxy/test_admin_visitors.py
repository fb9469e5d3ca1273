"""Idle connections to an admin page, with and without TLS, are bounded in number and time."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web

from kproxy.config.tls import ListenerTls
from kproxy.observe import http_page
from kproxy.observe.http_page import HttpPage, Readiness, VitalPages
from kproxy.security.tls_acceptor import load_for_acceptor
from tests.support.security.tls_files import Pair, Signer, client_context

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ALIVE = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Pages:
    """The only page that is asked for, and what each page begins with."""

    async def sample(self) -> None:
        """Nothing changes."""

    overview = sample

    async def liveness(self) -> Readiness:
        return Readiness(True, "alive")


@pytest.fixture(scope="module")
def pair(signer: Signer) -> Pair:
    return signer.issue("page", "127.0.0.1")


class Site:
    """A page and its counters."""

    def __init__(self, port: int, client: ssl.SSLContext | None, counters: Counter[str]) -> None:
        self._counters = counters
        self._port = port
        self._client = client

    @property
    def cut(self) -> dict[str, int]:
        """The number of counted connections that were closed."""
        return {name: count for name, count in self._counters.items() if name.startswith("page.cut.")}

    async def connect(self) -> Stream:
        return await asyncio.open_connection("127.0.0.1", self._port, ssl=self._client)


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
async def site(request: pytest.FixtureRequest, signer: Signer, pair: Pair) -> AsyncIterator[Site]:
    loaded = load_for_acceptor(ListenerTls(Path(pair.cert), Path(pair.key)))
    counters = Counter[str]()

    async def echo(asked: web.Request) -> web.Response:
        return web.Response(body=await asked.read())

    page = HttpPage(cast(VitalPages, Pages()), [web.post("/echo", echo)])
    port = await page.start("127.0.0.1", 0, (lambda: loaded) if request.param else None, counters)
    yield Site(port, client_context(signer.ca) if request.param else None, counters)
    await page.stop()


async def answer(stream: Stream, request: bytes = ALIVE) -> bytes:
    """The first line of the answer; empty if the connection has ended."""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            stream[1].write(request)
            return await stream[0].readline()
    return b""


async def end(stream: Stream) -> None:
    """Wait until the page has closed the connection."""
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await stream[0].read()


async def test_connection_without_a_request_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_page, "REQUEST_S", 0.3)
    silent, half = await site.connect(), await site.connect()
    half[1].write(ALIVE[:20])
    await end(silent)
    await end(half)
    assert site.cut == {"page.cut.idle": 2}
    asking = await site.connect()
    assert b"200" in await answer(asking)
    await asyncio.sleep(0.5)
    # From its first request on, the usual HTTP timeout applies.
    assert not asking[0].at_eof()
    assert site.cut == {"page.cut.idle": 2}


async def test_missing_request_body_is_not_awaited(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_page, "BODY_S", 0.3)
    head = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n\r\n"
    assert b"408" in await answer(await site.connect(), head + b"12")
    assert b"200" in await answer(await site.connect(), head + b"12345")


@pytest.mark.parametrize("target", ["GET http://xn--a/livez", "CONNECT xn--a:80"])
async def test_url_without_host_name_is_refused(site: Site, target: str) -> None:
    """aiohttp's task ended with an error, and the client waited until its connection was cut."""
    stream = await site.connect()
    assert b"400" in await answer(stream, f"{target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    assert site.cut == {}


async def test_idle_visitors_do_not_block_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_page, "MAX_CONNECTIONS", 5)
    first = await site.connect()
    assert b"200" in await answer(first)
    silent = [await site.connect() for _ in range(5)]
    asking = [await site.connect() for _ in range(3)]
    for stream in asking:
        assert b"200" in await answer(stream)
    for stream in (first, *silent[:3]):
        await end(stream)
    assert site.cut == {"page.cut.crowded": 4}
    assert b"200" in await answer(silent[-1])
    # While all have a request, another one is closed.
    head = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\n"
    asking = [await site.connect() for _ in range(5)]
    for _, writer in asking:
        writer.write(head)
    await asyncio.sleep(0.3)
    assert await answer(await site.connect()) == b""
    for stream in asking:
        assert b"200" in await answer(stream, b"x")
    assert b"200" in await answer(await site.connect())

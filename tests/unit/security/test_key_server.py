"""Token keys from a URL: when they are fetched, and which are refused."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from kproxy.security import key_server
from kproxy.security.key_server import FetchFailed, KeyServer, fetch_keys
from kproxy.security.tokens import MOST_FILE_BYTES, InvalidToken, TokenOptions
from tests.support.security import sasl_client as sasl
from tests.support.security.tls_files import Signer
from tests.support.waiting import eventually

HOURS = 10_000.0


class Issuer:
    """Answers with `content`, or not at all if `content` is None."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.asked = 0

    async def fetch(self, url: str) -> bytes:
        self.asked += 1
        await asyncio.sleep(0)
        if self.content is None:
            raise FetchFailed("it is not there")
        return self.content


@contextlib.asynccontextmanager
async def keys_of(issuer: Issuer, refresh_s: float = HOURS) -> AsyncIterator[KeyServer]:
    options = TokenOptions(sasl.ISSUER, (sasl.AUDIENCE,))
    server = KeyServer("https://i", options, refresh_s, counters=Counter(), fetch=issuer.fetch)
    running = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def accepts(server: KeyServer, number: int = 0) -> bool:
    try:
        server.current.verify(sasl.token(number))
    except InvalidToken:
        return False
    return True


async def asked(issuer: Issuer, more: int) -> None:
    """Wait until it has received `more` further requests."""
    before = issuer.asked
    await eventually(lambda: issuer.asked >= before + more, "the issuer is asked")


async def test_last_good_keys_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_server, "RETRY_S", 0.01)
    issuer = Issuer(None)
    with capture_logs() as logs:
        async with keys_of(issuer, 0.02) as server:
            await asked(issuer, 5)
            assert not accepts(server)
            issuer.content = sasl.jwks(0).encode()
            await eventually(lambda: accepts(server), "the keys are used")
            for bad in (None, b"", b"{}", b'{"keys": 1}', sasl.jwks(1).encode()[:-1]):
                issuer.content = bad
                await asked(issuer, 5)
                assert accepts(server)
            # The issuer rotated its keys: the new key is accepted, the old one is not.
            issuer.content = sasl.jwks(1).encode()
            await eventually(lambda: accepts(server, 1), "the new key is used")
            assert not accepts(server, 0)
    told = [(each["event"], each.get("consequence")) for each in logs]
    assert told == [
        ("token keys not fetched", "no token is accepted"),
        ("token keys fetched", None),
        ("token keys not fetched", "the keys fetched last stay in use"),
        ("token keys fetched", None),
    ]


async def test_token_with_another_key_refetches_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_server, "RETRY_S", 0.05)
    issuer = Issuer(sasl.jwks(0).encode())
    async with keys_of(issuer) as server:
        await eventually(lambda: accepts(server), "the keys are used")
        issuer.content = sasl.jwks(0, 1).encode()
        # The proxy also asks on another thread.
        assert not await asyncio.to_thread(accepts, server, 1)
        await eventually(lambda: accepts(server, 1), "the new key is used")
        # Many tokens do not make the proxy ask the issuer each time.
        monkeypatch.setattr(key_server, "RETRY_S", HOURS)
        before = issuer.asked
        assert not accepts(server, 2)
        await eventually(lambda: issuer.asked > before, "the issuer is asked")
        asked_then = issuer.asked
        for _ in range(100):
            assert not accepts(server, 2)
            await asyncio.sleep(0)
        # One request may have been under way, after a short pause.
        assert issuer.asked <= asked_then + 1


@contextlib.asynccontextmanager
async def web_server(answer: web.Response, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    async def handle(_: web.Request) -> web.Response:
        return answer

    application = web.Application()
    application.router.add_get("/keys", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}/keys"
    finally:
        await runner.cleanup()


async def test_complete_answer_is_accepted() -> None:
    async with web_server(web.Response(body=b"x" * MOST_FILE_BYTES)) as url:
        assert len(await fetch_keys(url)) == MOST_FILE_BYTES


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: web.Response(status=404), "status 404"),
        (lambda: web.Response(status=302, headers={"Location": "/elsewhere"}), "status 302"),
        (lambda: web.Response(body=b"x" * (MOST_FILE_BYTES + 1)), "longer than"),
    ],
    ids=["an error", "a redirect", "too long"],
)
async def test_invalid_key_answer_is_rejected(answer: object, reason: str) -> None:
    assert callable(answer)
    async with web_server(answer()) as url:
        with pytest.raises(FetchFailed, match=reason):
            await fetch_keys(url)


async def test_untrusted_server_certificate_is_rejected(tmp_path: Path) -> None:
    pair = Signer(tmp_path).issue("issuer", "127.0.0.1")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.cert, pair.key)
    async with web_server(web.Response(text="{}"), tls) as url:
        with pytest.raises(FetchFailed, match="Certificate"):
            await fetch_keys(url)


async def test_compressed_answer_is_not_expanded() -> None:
    """A megabyte of zeros compresses to a thousand bytes."""
    packed = gzip.compress(bytes(1 << 20))
    async with web_server(web.Response(body=packed, headers={"Content-Encoding": "gzip"})) as url:
        assert await fetch_keys(url) == packed


async def _leaves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_absent_or_silent_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    monkeypatch.setattr(key_server, "FETCH_S", 0.2)
    async with silent:
        with pytest.raises(FetchFailed, match="Timeout"):
            await fetch_keys(f"http://127.0.0.1:{port}/")
    with pytest.raises(FetchFailed, match="Connect"):
        await fetch_keys(f"http://127.0.0.1:{port}/")
    async with await asyncio.start_server(_leaves, "127.0.0.1", port):
        with pytest.raises(FetchFailed, match="Disconnected"):
            await fetch_keys(f"http://127.0.0.1:{port}/")

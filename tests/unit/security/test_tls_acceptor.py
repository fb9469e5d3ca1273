"""One listener's acceptor on this event loop: which clients it admits or refuses, and the counts of both."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kproxy.config.tls import ListenerTls, Loaded
from kproxy.errors import StartupError
from kproxy.runtime.sockets import bind, bound_port
from kproxy.security import tls_acceptor
from kproxy.security.proxy_protocol import SIGNATURE, Source
from kproxy.security.tls_acceptor import TlsAcceptor, load_for_acceptor
from kproxy_codec.foreign import ANSWER_TO_HTTP
from tests.support.security.client_hello import EXTENSIONS, client_hello
from tests.support.security.tls_files import Signer, client_context
from tests.support.waiting import eventually

Begin = Callable[..., Awaitable["Site"]]
HEADER = SIGNATURE + b"\x21\x11\x00\x0c" + bytes([192, 0, 2, 9, 127, 0, 0, 1]) + struct.pack(">HH", 1234, 9092)


class Session(asyncio.Protocol):
    """Sends back all bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Site:
    """An acceptor, and its admitted connections."""

    def __init__(self, tls: Loaded | None, **options: Any) -> None:
        self.counters = Counter[str]()
        self.sources: list[Source | None] = []
        self.welcomed = 0
        self.acceptor: TlsAcceptor[Session] = TlsAcceptor(
            "test",
            (lambda: tls) if tls is not None else None,
            session=self.make,
            welcome=self.welcome,
            counters=self.counters,
            **{"max_half_open": 10, **options},
        )
        self.host, self.port = "", 0
        self.is_full = False

    def make(self, source: Source | None) -> Session | None:
        self.sources.append(source)
        return Session() if not self.is_full else None

    def welcome(self, session: Session) -> None:
        self.welcomed += 1

    async def tell(self, data: bytes, context: ssl.SSLContext | None = None) -> bytes:
        """Send `data`; return the bytes that the client receives, at most as many as it has sent."""
        async with asyncio.timeout(60):
            name = "localhost" if context is not None else None
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context, server_hostname=name)
            try:
                writer.write(data)
                return await reader.read(1 << 16)
            finally:
                writer.close()

    async def settled(self) -> None:
        """Wait until nothing is half open."""
        await eventually(lambda: not self.acceptor.half_open)


@pytest.fixture
async def begin() -> AsyncIterator[Begin]:
    sites: list[Site] = []

    async def begun(tls: Loaded | None = None, host: str = "127.0.0.1", **options: Any) -> Site:
        site = Site(tls, **options)
        server = await bind(asyncio.Protocol, host, 0)
        site.host, site.port = host, bound_port(server)
        site.acceptor.open(server)
        sites.append(site)
        return site

    yield begun
    for site in sites:
        await site.acceptor.close()


@pytest.fixture(scope="module")
def loaded(signer: Signer) -> Loaded:
    return load_for_acceptor(ListenerTls(*signer.issue("server", "localhost")))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_plain_client_is_accepted_without_count(begin: Begin, host: str) -> None:
    site = await begin(host=host)
    assert await site.tell(b"ping") == b"ping"
    assert (site.sources, site.welcomed, site.counters) == ([None], 1, {})


async def test_tls_client_is_accepted_and_counted_once(begin: Begin, loaded: Loaded, signer: Signer) -> None:
    site = await begin(loaded)
    assert site.acceptor.expires_at is not None
    assert await site.tell(b"ping", client_context(signer.ca)) == b"ping"
    assert (site.welcomed, site.counters) == (1, {"tls.handshakes.done": 1})


async def test_client_without_tls_is_refused(begin: Begin, loaded: Loaded) -> None:
    site = await begin(loaded)
    for text, answer in ((b"ping", b""), (b"GET / HTTP/1.1\r\n\r\n", ANSWER_TO_HTTP), (b"SSH-2.0-x\r\n", b"")):
        assert await site.tell(text) == answer
    assert site.counters == {"tls.handshakes.failed.plain_text": 3}
    assert site.welcomed == 0


async def test_refused_client_reads_the_end_at_once(
    begin: Begin, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client may continue to send; the connection lingers, but signals its end at once."""
    monkeypatch.setattr(tls_acceptor, "LINGER_S", 1_000.0)
    site = await begin(loaded)
    assert await site.tell(b"ping") == b""
    await site.settled()


async def test_oversized_hello_is_logged_and_counted(begin: Begin, loaded: Loaded) -> None:
    site = await begin(loaded)
    assert await site.tell(client_hello({**EXTENSIONS, 21: bytes(9_000)})) == b""
    await site.settled()
    assert (site.welcomed, site.counters) == (0, {"tls.handshakes.failed.other": 1})


async def test_failed_handshake_gets_an_alert(begin: Begin, signer: Signer) -> None:
    tls = ListenerTls(*signer.issue("strict", "localhost"), client_ca=signer.ca, client_auth="required")
    site = await begin(load_for_acceptor(tls))
    context = client_context(signer.ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="ALERT"):
        await site.tell(b"ping", context)
    await site.settled()
    assert site.counters == {"tls.handshakes.failed.no_certificate": 1}
    assert site.welcomed == 0


async def test_handshake_waits_for_its_turn(
    begin: Begin, loaded: Loaded, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = asyncio.Event()

    class Pace:
        async def turn(self) -> None:
            await begins.wait()

        def worked(self, seconds: float) -> None:
            assert seconds >= 0

    monkeypatch.setattr(tls_acceptor, "_pace_of_loop", Pace)
    site = await begin(loaded)
    answer = asyncio.create_task(site.tell(b"ping", client_context(signer.ca)))
    await asyncio.sleep(0.1)
    assert (site.acceptor.half_open, site.welcomed) == (1, 0)
    begins.set()
    assert await answer == b"ping"


async def test_oldest_of_too_many_is_refused(begin: Begin, loaded: Loaded, signer: Signer) -> None:
    site = await begin(loaded, max_half_open=2)
    idle = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(2)]
    await eventually(lambda: site.acceptor.half_open == 2)
    assert await site.tell(b"ping", client_context(signer.ca)) == b"ping"
    async with asyncio.timeout(60):
        assert await idle[0][0].read() == b""
    assert site.counters == {"tls.handshakes.failed.crowded": 1, "tls.handshakes.done": 1}
    assert site.acceptor.half_open == 1
    # Refused connections are not remembered.
    assert not site.acceptor._evicted
    for _, writer in idle:
        writer.close()


async def test_balancer_names_the_source(begin: Begin) -> None:
    site = await begin(proxy_protocol=True)
    assert await site.tell(HEADER + b"ping") == b"ping"
    assert site.sources == [Source("192.0.2.9", 1234)]
    assert await site.tell(b"ping" * 8) == b""
    await site.settled()
    assert site.counters == {"tls.handshakes.failed.proxy_header": 1}


@pytest.mark.parametrize(("network", "is_let_in"), [("127.0.0.0/8", True), ("192.0.2.0/24", False)])
async def test_only_balancers_may_send_a_header(begin: Begin, network: str, is_let_in: bool) -> None:
    site = await begin(proxy_protocol=True, proxy_senders=[ipaddress.ip_network(network)])
    try:
        assert await site.tell(HEADER + b"ping") == (b"ping" if is_let_in else b"")
    except ConnectionError:
        assert not is_let_in
    assert site.counters == ({} if is_let_in else {"tls.handshakes.failed.proxy_sender": 1})


@pytest.mark.parametrize("is_refused", [True, False], ids=["beyond the limit", "without a session"])
async def test_client_too_many_is_cut_off(begin: Begin, is_refused: bool) -> None:
    site = await begin(refuses=lambda: is_refused)
    site.is_full = not is_refused
    with contextlib.suppress(ConnectionError):
        assert await site.tell(b"ping") == b""
    assert (site.welcomed, site.sources) == (0, [] if is_refused else [None])


async def test_listener_in_use_is_named(begin: Begin) -> None:
    one, other = Site(None), Site(None)
    first = await bind(asyncio.Protocol, "127.0.0.1", 0)
    port = bound_port(first)
    second = await bind(asyncio.Protocol, "127.0.0.1", port)
    one.acceptor.open(first)
    with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port} "):
        other.acceptor.open(second)
    await other.acceptor.close()
    await one.acceptor.close()


async def test_longest_header_has_4_kib(begin: Begin) -> None:
    # The balancer's own connection: bytes after the fixed part have no meaning.
    for length, is_let_in in ((4_080, True), (4_081, False)):
        site = await begin(proxy_protocol=True)
        header = SIGNATURE + b"\x20\x00" + struct.pack(">H", length) + bytes(length)
        with contextlib.suppress(ConnectionError):
            assert await site.tell(header + b"ping") == (b"ping" if is_let_in else b"")
        assert site.sources == ([None] if is_let_in else [])


async def test_handshake_has_a_deadline(begin: Begin, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_acceptor, "HANDSHAKE_S", 0.1)
    site = await begin(loaded)
    assert await site.tell(b"") == b""
    await site.settled()
    assert site.counters == {"tls.handshakes.failed.timeout": 1}


async def test_acceptor_closes_unfinished_connections(begin: Begin, loaded: Loaded) -> None:
    site = await begin(loaded)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    await eventually(lambda: site.acceptor.half_open > 0)
    async with asyncio.timeout(60):
        await site.acceptor.close()
        assert await reader.read() == b""
    assert site.acceptor.half_open == 0
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", site.port)
    writer.close()

"""The CPU cost of an unauthenticated client's bytes is in proportion to their length.

Every parser that runs before a client is authenticated gets inputs of up to 64 KiB: repeated pieces that are known to
be expensive (combining marks, near matches of a pattern, nested and repeated fields), and random ones from a seed that
is printed. An input that is eight times as long must not cost much more than eight times as much. TLS gets every pair
of extensions of a ClientHello, filled up; the admin page gets first lines, headers and bodies.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations, product
from random import Random
from typing import Final, cast

import pytest

from kproxy.broker.replication.authentication import AuthenticationFailed, ListenerHandshake, Secret
from kproxy.claims.admin import ClaimsAdmin
from kproxy.config.tls import ListenerTls
from kproxy.observe import http_page
from kproxy.observe.exposition import render
from kproxy.observe.http_page import HttpPage, Readiness
from kproxy.observe.page import ReplicaPages
from kproxy.observe.page_guard import PageGuard
from kproxy.proxy.overview import ProxyObserver
from kproxy.proxy.process_host import OwnPages
from kproxy.security.proxy_protocol import MAX_BYTES, SIGNATURE, ProxyHeader, ProxyHeaderError
from kproxy.security.sasl import MOST_FRAME_BYTES, Pending, SaslExchange
from kproxy.security.tls_acceptor import MOST_HELLO_BYTES, load_for_acceptor
from kproxy_codec.api_keys import API_VERSIONS, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.framing import request_header
from tests.support.clients.raw_client import raw_frame
from tests.support.rules import examples
from tests.support.security import client_hello as hello
from tests.support.security import sasl_client as client
from tests.support.security.tls_files import Signer

TIMES: Final = 8
# Linear work takes TIMES as long; the rest is noise. Quadratic work takes TIMES * TIMES.
MOST_RATIO: Final = 3.0 * TIMES
# Shorter times are not compared, because a turn of the event loop may take fifty times as long.
SHORT_S: Final = 0.001
PIECES: Final = (
    "a",
    "\u0300",
    "\u0301\u0327",
    "e\u0301\u0327",
    "\uac00\u0300",
    "\ufdfa",
    "=2C",
    ",",
    "n=",
    "a=b,",
    "auth=bearer x\x01",
    "auth=bearer ",
    "auth=",
    "x=y\x01",
    "\x01",
    "\x00",
    "\x00\x01",
    "\xff\xff",
)
BEGINNINGS: Final = ("", "n,,", "n,,n=", "n,,n=a,r=", "n,a=", "n,,\x01", "n,,\x01auth=bearer ", "\x00", "a\x00b\x00")
ENDS: Final = ("", "\x01", "\x01\x01", ",r=abc")
Taker = Callable[[bytes], object]
SECRET: Final = Secret.of(secrets.token_urlsafe(32))


def take_by(mechanism: str, version: int, *, carries: bool = False) -> Taker:
    """Let an exchange take one message of the mechanism; after SaslHandshake v0 it is a frame of its own."""

    def take(message: bytes) -> object:
        begin = client.carrying if carries else client.exchange
        exchange = begin(mechanism, allows_v0=version == 0)
        receive(exchange, client.handshake(mechanism, version))
        return receive(exchange, raw_frame(message) if version == 0 else client.authenticate(message))

    return take


def receive(exchange: SaslExchange, frame: bytes) -> object:
    outcome = exchange.receive(memoryview(bytearray(frame)))
    return outcome.step() if isinstance(outcome, Pending) else outcome


def take_as_request(api_key: int, version: int) -> Taker:
    """Let an exchange take this as the body of a request."""

    def take(body: bytes) -> object:
        return receive(client.exchange(), raw_frame(request_header(api_key, version, 1, b"c") + body))

    return take


def take_proxy_header(rest: bytes) -> None:
    header, announced = ProxyHeader(), rest[:MAX_BYTES]
    with suppress(ProxyHeaderError):
        header.receive(SIGNATURE + b"\x21\x11" + len(announced).to_bytes(2, "big"))
        header.receive(announced)


def take_from_follower(message: bytes) -> None:
    with suppress(AuthenticationFailed):
        ListenerHandshake(SECRET).answer(message)


TAKERS: Final[dict[str, Taker]] = {
    **{f"{name} v{v}": take_by(name, v) for name in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512") for v in (0, 1)},
    **{f"carried {name} v{v}": take_by(name, v, carries=True) for name in ("PLAIN", "OAUTHBEARER") for v in (0, 1)},
    **{f"SaslHandshake v{v}": take_as_request(SASL_HANDSHAKE, v) for v in (0, 1)},
    **{f"SaslAuthenticate v{v}": take_as_request(SASL_AUTHENTICATE, v) for v in (0, 1, 2)},
    **{f"ApiVersions v{v}": take_as_request(API_VERSIONS, v) for v in (0, 3)},
    "PROXY header": take_proxy_header,
    "replication": take_from_follower,
}


def cpu_s(take: Taker, message: bytes) -> float:
    """The least CPU time of three runs."""
    least = float("inf")
    for _ in range(3):
        began = time.thread_time()
        take(message)
        least = min(least, time.thread_time() - began)
        if least < SHORT_S:
            break
    return least


def messages(random: Random) -> list[tuple[str, str, str]]:
    """Beginnings, pieces and ends: the known ones in all combinations, and random pieces."""
    known = list(product(BEGINNINGS, PIECES, ENDS))
    mixed = ["".join(random.choices(PIECES, k=random.randint(2, 4))) for _ in range(examples(24))]
    noise = [random.randbytes(random.randint(1, 6)).decode("latin-1") for _ in range(examples(12))]
    return known + [(random.choice(BEGINNINGS), piece, random.choice(ENDS)) for piece in (*mixed, *noise)]


def of_length(message: tuple[str, str, str], size: int) -> bytes:
    beginning, piece, end = (part.encode() for part in message)
    return beginning + piece * ((size - len(beginning) - len(end)) // len(piece)) + end


def check(take: Taker, message: Callable[[int], bytes], longest: int, told: str) -> None:
    """Fail if the message costs more than its length explains."""
    long_s = cpu_s(take, message(longest))
    if long_s > SHORT_S:
        short_s = cpu_s(take, message(longest // TIMES))
        assert long_s / short_s < MOST_RATIO, f"{told}: {long_s * 1e3:.1f} ms"


@pytest.mark.parametrize("taker", TAKERS)
def test_cost_depends_only_on_length(taker: str) -> None:
    seed = secrets.randbelow(1 << 32)
    for message in messages(Random(seed)):
        check(TAKERS[taker], partial(of_length, message), MOST_FRAME_BYTES - 100, f"{message!r}; seed {seed}")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    pair = Signer(tmp_path_factory.mktemp("signer") / "ca").issue("server", "localhost")
    return load_for_acceptor(ListenerTls(pair.cert, pair.key)).context


def test_hello_cost_depends_only_on_its_length(tls: ssl.SSLContext) -> None:
    """Each pair of extensions shares the bytes, and each has them alone, with TLS 1.3 and without."""

    def take(message: bytes) -> None:
        incoming = ssl.MemoryBIO()
        incoming.write(message)
        with suppress(ssl.SSLError):
            tls.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True).do_handshake()

    every = [*hello.CIPHERS_FILL, *hello.FILLS]
    honest_s = cpu_s(take, hello.client_hello(hello.EXTENSIONS))
    for names in [*combinations(every, 2), *((name,) for name in every)]:
        for kinds in (tuple(hello.EXTENSIONS), (hello.SIGNATURES, hello.GROUPS)):
            check(take, partial(filled, names, kinds), LONGEST_HELLO, f"{names} {kinds}")
            # The longest ClientHello that the proxy reads.
            assert cpu_s(take, filled(names, kinds, MOST_HELLO_BYTES)) < MOST_RATIO * honest_s, f"{names} {kinds}"
    for kinds in (range(0x5000, 0x10000), [0x5000] * 0x8000):
        check(take, partial(with_kinds, kinds), LONGEST_HELLO, f"extensions {kinds[:2]}")


LONGEST_HELLO: Final = 65_000


def filled(names: Sequence[str], kinds: Sequence[int], size: int) -> bytes:
    """A ClientHello whose extensions of these names are filled up; `kinds` are its other extensions."""
    room = (size - 300) // len(names)
    fields = {kind: hello.EXTENSIONS[kind] for kind in kinds}
    fields |= {kind: fill(room) for kind, fill in (hello.FILLS[name] for name in names if name in hello.FILLS)}
    ciphers = [hello.CIPHERS_FILL[name](room)[2:] for name in names if name in hello.CIPHERS_FILL]
    return hello.client_hello(fields, ciphers[0] if ciphers else hello.CIPHERS)


def with_kinds(kinds: Sequence[int], size: int) -> bytes:
    """A ClientHello with empty extensions of these kinds."""
    empty = b"".join(hello.number(kind) + bytes(2) for kind in kinds[: (size - 300) // 4])
    return hello.client_hello(hello.EXTENSIONS, more=empty)


class _Pages(OwnPages):
    """A page whose content does not matter."""

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        return render((), accept)

    async def readiness(self) -> Readiness:
        return Readiness(True, "ready")

    async def table(self, request: object) -> bytes:
        return b"{}"


class _Observer:
    async def sample(self) -> None:
        """Nothing changes."""


@pytest.fixture(scope="module", params=[False, True], ids=["open", "token"])
def ask(request: pytest.FixtureRequest) -> Iterator[Taker]:
    """Send a request to a page, and wait until the page has closed the connection."""
    guard = PageGuard((lambda: "0123456789abcdef") if request.param else (lambda: ""))
    pages = _Pages(cast(ProxyObserver, _Observer()), lambda: cast(ClaimsAdmin, None), cast(ReplicaPages, None))
    page = HttpPage(pages, pages.routes(), guard)
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        # aiohttp does not answer a host that is not a valid IDNA name: the page closes the connection.
        patch.setattr(http_page, "REQUEST_S", 0.2)
        port = runner.run(page.start("127.0.0.1", 0))

        async def take(message: bytes) -> bytes:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(message)
                answer = b""
                with suppress(ConnectionError):
                    answer = await reader.read()
                writer.close()
                return answer

        yield lambda message: runner.run(take(message))
        runner.run(page.stop())


HEADERS: Final = b"Host: 127.0.0.1\r\nConnection: close\r\n"
TO_PAGE: Final[dict[str, tuple[bytes, bytes]]] = {
    "method": (b"", b" / HTTP/1.1\r\n" + HEADERS + b"\r\n"),
    "path": (b"GET /", b" HTTP/1.1\r\n" + HEADERS + b"\r\n"),
    "query": (b"GET /table?", b" HTTP/1.1\r\n" + HEADERS + b"\r\n"),
    "authority": (b"GET http://", b"/ HTTP/1.1\r\n" + HEADERS + b"\r\n"),
    "version": (b"GET / HTTP/1.1", b"\r\n" + HEADERS + b"\r\n"),
    "host": (b"GET /table HTTP/1.1\r\nConnection: close\r\nHost: ", b"\r\n\r\n"),
    "headers": (b"GET /table HTTP/1.1\r\n" + HEADERS, b"\r\n\r\n"),
    **{
        name: (f"GET {path} HTTP/1.1\r\n".encode() + HEADERS + f"{name}: ".encode(), b"\r\n\r\n")
        for name, path in (
            ("Authorization", "/table"),
            ("Authorization: Bearer", "/table"),
            ("Accept", "/metrics"),
            ("Cookie", "/table"),
            ("Content-Type", "/own/free"),
            ("Expect", "/table"),
        )
    },
    "Origin": (b"POST /own/free HTTP/1.1\r\n" + HEADERS + b"Content-Length: 0\r\nOrigin: ", b"\r\n\r\n"),
    "chunks": (
        b"POST /own/free HTTP/1.1\r\n"
        + HEADERS
        + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"0\r\n\r\n",
    ),
    "order": (b"POST /own/free HTTP/1.1\r\n" + HEADERS + b"Content-Type: application/json\r\n", b""),
}
PAGE_PIECES: Final = (
    "a",
    ":",
    "%41",
    "%",
    "/../",
    "a=b&",
    "a:1.",
    "[::",
    ".xn--a",
    "\u0300",
    "a, ",
    "application/openmetrics-text;q=0.5,",
    " \t",
    "a: b\r\n",
    "a: b\r\n c\r\n",
    "1\r\na\r\n",
    "1;a=b\r\na\r\n",
    '{"group": [',
)


def test_page_cost_depends_only_on_length(ask: Taker, request: pytest.FixtureRequest) -> None:
    has_token = "token" in request.node.name
    places = {name: ends for name, ends in TO_PAGE.items() if not has_token or name.startswith("Authorization")}
    seed = secrets.randbelow(1 << 32)
    random = Random(seed)
    pieces = [*PAGE_PIECES, *("".join(random.choices(PAGE_PIECES, k=3)) for _ in range(examples(6)))]
    for (place, ends), piece, longest in product(places.items(), pieces, (LONGEST_LINE, LONGEST_REQUEST)):
        check(ask, partial(request_of, ends, piece.encode()), longest, f"{place} {piece!r}; seed {seed}")


# A longer line is refused unread.
LONGEST_LINE: Final = 8_000
LONGEST_REQUEST: Final = 65_000


def request_of(ends: tuple[bytes, bytes], piece: bytes, size: int) -> bytes:
    """The piece, repeated, between the ends; without a second end it is the body."""
    beginning, end = ends
    body = piece * ((size - len(beginning) - len(end)) // len(piece))
    return beginning + (b"" if end else b"Content-Length: %d\r\n\r\n" % len(body)) + body + end

"""What a stranger may send costs CPU in proportion to its length, whatever is in it.

Everything that is read before a client is authenticated gets inputs of up to 64 KiB: repeated pieces that are known to
be dear (combining marks, near matches of a pattern, nested and repeated fields), and random ones from a seed that is
printed. An input that is eight times as long may not cost much more than eight times as much.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from random import Random
from typing import Final

import pytest

from kproxy.broker.replication.authentication import AuthenticationFailed, ListenerHandshake, Secret
from kproxy.security.proxy_protocol import MAX_BYTES, SIGNATURE, ProxyHeader, ProxyHeaderError
from kproxy.security.sasl import MOST_FRAME_BYTES, Pending, SaslExchange
from kproxy_codec.api_keys import API_VERSIONS, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.framing import request_header
from tests.support.clients.raw_client import raw_frame
from tests.support.rules import examples
from tests.support.security import sasl_client as client

TIMES: Final = 8
# Linear work takes TIMES as long; the rest is noise. Quadratic work takes TIMES * TIMES.
MOST_RATIO: Final = 3.0 * TIMES
# Shorter ones are not compared: a turn of the event loop may take fifty times as long.
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
    """Have an exchange take one message of the mechanism; after SaslHandshake v0 it is a frame of its own."""

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
    """Have an exchange take this as the body of a request."""

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
    """The least of three."""
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


@pytest.mark.parametrize("taker", TAKERS)
def test_cost_grows_with_length_alone(taker: str) -> None:
    seed = secrets.randbelow(1 << 32)
    take, longest = TAKERS[taker], MOST_FRAME_BYTES - 100
    for message in messages(Random(seed)):
        long_s = cpu_s(take, of_length(message, longest))
        if long_s > SHORT_S:
            short_s = cpu_s(take, of_length(message, longest // TIMES))
            assert long_s / short_s < MOST_RATIO, f"{message!r}: {long_s * 1e3:.1f} ms; seed {seed}"

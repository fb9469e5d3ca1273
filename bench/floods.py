"""`make bench SECTION=floods`: what floods of a listener with TLS and SASL do to a client that behaves; four minutes.

An authenticated client sends RATE requests a second. Its latency is taken without a flood and then under one, for each
flood in turn, and with it the proxy's memory and the metrics that count the flood. A flood is a process of the lowest
priority, because here it shares the machine's cores with the proxy, unlike a flood from elsewhere. It reconnects when
the proxy closes a connection.

The control is a second proxy with brokers of its own, which is not flooded. The same client's latency through it, while
the flood goes to the first proxy, is what the busy machine adds; only the rest is the flooded proxy's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
import sys
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm
from rich.console import Console
from rich.table import Table

from bench.access import PASSWORD, USER, authenticate
from bench.connections import allow_files
from bench.latency import TooSlow, paced_latencies
from bench.load import CONNECTIONS, SHAPES, produce_frame
from bench.plain_figures import percentile
from bench.processes import child, first_line, resident_bytes, scratch, started
from bench.quick import BROKERS, serving, write_table
from bench.tls import NAME, make_certificates
from kproxy.security.users import make_credential, write_users
from kproxy_codec.api_keys import SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.framing import request_header
from kproxy_codec.primitives import INT16, INT32

LOCAL: Final = "127.0.0.1"
RATE: Final = 500
QUIET_S: Final = 4.0
FLOODED_S: Final = 8.0
# Until a flood is at its height.
RISE_S: Final = 2.0
PIPELINE: Final = 10_000
# More than any kind may have open in this process and in the proxy.
FILES: Final = 8_000
_COUNTED: Final = re.compile(
    r"^(kproxy_client_handshakes_total|kproxy_client_connections_cut_total|kproxy_authentications_total)"
    r"(?:\{(.*)\})? (\S+)$",
    re.MULTILINE,
)


def floods(console: Console) -> None:
    """Print the table of all floods. Raise SystemExit if the limit of open files is too low."""
    allow_files(FILES)
    title = f"A client of {RATE} requests/s over TLS; ms, without a flood → under it (through the control)"
    table = Table(title=title, title_style="")
    for heading in ("flood", "p50", "p99", "p99, ×", "p99, × control", "memory, MB", "counted"):
        table.add_column(heading, justify="left" if heading in ("flood", "counted") else "right")
    with scratch() as (stack, directory):
        context = make_certificates(directory)
        config = _configure(directory)
        pid, port, ready = _started(stack, directory / "flooded", config)
        _, control_port, _ = _started(stack, directory / "control", config)
        admin = ready.partition("admin=")[2].split()[0]
        for name in FLOODS:
            quiet = _latencies(port, context, QUIET_S)
            before = _counts(admin)
            authority = str(directory / "ca.pem")
            with child(sys.executable, "-m", "bench.floods", name, str(port), authority) as flood:
                first_line(flood)
                try:
                    flooded = _latencies(port, context, FLOODED_S)
                except TooSlow as error:
                    table.add_row(name, "-", str(error), "-", "-", "-", "-")
                    continue
                memory = resident_bytes(pid) / 1e6
                counted = _counts(admin) - before
                control = _latencies(control_port, context, FLOODED_S)
            table.add_row(
                name,
                *(f"{_ms(quiet, each)} → {_ms(flooded, each)} ({_ms(control, each)})" for each in (50, 99)),
                f"{percentile(flooded, 99) / percentile(quiet, 99):.1f}",
                f"{percentile(flooded, 99) / percentile(control, 99):.1f}",
                f"{memory:.0f}",
                ", ".join(f"{what} {count:,.0f}" for what, count in counted.most_common(4)) or "nothing",
            )
    console.print(table)


def _started(stack: contextlib.ExitStack, directory: Path, config: Path) -> tuple[int, int, str]:
    """Start kproxy before brokers of its own; return (pid, port, ready line). `directory` is made for its table."""
    directory.mkdir()
    table = write_table(started(stack, *["fast_broker"] * BROKERS), directory)
    return stack.enter_context(_proxy(table, "--config", str(config), "--admin", f"{LOCAL}:0"))


@contextlib.contextmanager
def _proxy(table: Path, *flags: str) -> Iterator[tuple[int, int, str]]:
    """Run kproxy; yield (pid, port, ready line)."""
    ready: list[str] = []
    with serving(table, *flags, command=("kproxy", "--log-level", "error"), on_ready=ready.append) as served:
        yield served[0].pid, served[1], ready[0]


def _configure(directory: Path) -> Path:
    kind = "SCRAM-SHA-256"
    public = rsa.generate_private_key(public_exponent=65_537, key_size=2_048).public_key()
    keys = directory / "keys.json"
    keys.write_text(json.dumps({"keys": [{**RSAAlgorithm.to_jwk(public, as_dict=True), "kid": "bench"}]}))
    users = directory / "users.toml"
    write_users(users, {USER: {kind: make_credential(kind, PASSWORD, 4_096, os.urandom(18))}})
    config = directory / "kproxy.toml"
    config.write_text(
        f'[tls]\ncert = "{directory / "cert.pem"}"\nkey = "{directory / "key.pem"}"\n'
        f'[sasl]\nmechanisms = ["PLAIN", "{kind}", "OAUTHBEARER"]\nusers = "{users}"\n'
        f'[oauth]\njwks = "{keys}"\nissuer = "https://bench.test/"\naudience = "bench"\n'
        f'[[acls]]\nprincipal = "User:{USER}"\noperations = ["write"]\ntopics = ["*"]\n'
    )
    return config


def _latencies(port: int, context: ssl.SSLContext, seconds: float) -> list[float]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_client(port, context)) for _ in range(CONNECTIONS)]
        return paced_latencies(sockets, produce_frame(SHAPES[0]), RATE, seconds)


def _client(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Return an authenticated connection."""
    plain = socket.create_connection((LOCAL, port), 30.0)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client = context.wrap_socket(plain, server_hostname=NAME)
    authenticate(client)
    return client


def _counts(admin: str) -> Counter[str]:
    """Return the metrics of refused clients and ended connections, by outcome."""
    with urllib.request.urlopen(f"http://{admin}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    counts: Counter[str] = Counter()
    for name, labels, value in _COUNTED.findall(text):
        label = re.search(r'outcome="([^"]*)"', labels or "")
        counts[label[1] if label else name.removeprefix("kproxy_client_").removesuffix("_total")] += int(float(value))
    return counts


def _ms(values: list[float], percent: int) -> str:
    return f"{percentile(values, percent) * 1000:.2f}"


# The floods: each keeps so many connections busy until the process is ended.

Flood = Callable[[int, ssl.SSLContext], Awaitable[None]]


async def _slow(port: int, context: ssl.SSLContext) -> None:
    """Send a byte of a handshake each second."""
    _, writer = await asyncio.open_connection(LOCAL, port)
    try:
        for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(1.0)
    finally:
        writer.close()


async def _huge(port: int, context: ssl.SSLContext) -> None:
    """Announce a frame of 2 GiB after a handshake."""
    reader, writer = await asyncio.open_connection(LOCAL, port, ssl=context, server_hostname=NAME)
    try:
        writer.write(b"\x7f\xff\xff\xff" + bytes(1_000))
        await reader.read()
        await asyncio.sleep(1.0)
    finally:
        writer.close()


async def _half_open(port: int, context: ssl.SSLContext) -> None:
    """Send the first message of TLS, but no second one."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=NAME)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    reader, writer = await asyncio.open_connection(LOCAL, port)
    try:
        writer.write(outgoing.read())
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


async def _handshakes(port: int, context: ssl.SSLContext) -> None:
    """Complete a handshake, and close the connection."""
    _, writer = await asyncio.open_connection(LOCAL, port, ssl=context, server_hostname=NAME)
    writer.close()
    await writer.wait_closed()


async def _pipeline(port: int, context: ssl.SSLContext) -> None:
    """Send requests as an authenticated client that reads no answer, to a broker of its own."""

    def send() -> None:
        frame = produce_frame(SHAPES[0], first=1)
        with _client(port, context) as client:
            client.settimeout(5.0)
            with contextlib.suppress(OSError):
                for _ in range(PIPELINE):
                    client.sendall(frame)

    await asyncio.to_thread(send)
    await asyncio.sleep(1.0)


async def _message(mechanism: bytes, token: bytes, port: int, context: ssl.SSLContext) -> None:
    """Send the first message of a mechanism, before authentication."""
    reader, writer = await asyncio.open_connection(LOCAL, port, ssl=context, server_hostname=NAME)
    try:
        for key, body in (
            (SASL_HANDSHAKE, INT16.pack(len(mechanism)) + mechanism),
            (SASL_AUTHENTICATE, INT32.pack(len(token)) + token),
        ):
            message = request_header(key, 1, 0, b"bench") + body
            writer.write(INT32.pack(len(message)) + message)
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


# Names and pairs of which SCRAM's library, and a pattern, took more than a second.
_MARKS: Final = ("n,,n=" + "a" + "\u0301\u0316" * 15_000 + ",r=nonce").encode()
_PAIRS: Final = b"n,,\x01" + b"auth=bearer x\x01" * 4_100


FLOODS: Final[dict[str, tuple[int, Flood]]] = {
    "2,000 slow handshakes": (2_000, _slow),
    "500 announce 2 GiB": (500, _huge),
    "500 half-open handshakes": (500, _half_open),
    # More than limits.max_half_open: those that wait must not keep new clients out.
    "2,000 half-open handshakes": (2_000, _half_open),
    "10,000 requests, answers unread": (1, _pipeline),
    "handshakes without end": (20, _handshakes),
    "8 SCRAM messages of 60 KB, again and again": (8, partial(_message, b"SCRAM-SHA-256", _MARKS)),
    "8 OAUTHBEARER messages of 57 KB, again and again": (8, partial(_message, b"OAUTHBEARER", _PAIRS)),
}


async def _flood(name: str, port: int, authority: str) -> None:
    context = ssl.create_default_context(cafile=authority)
    connections, flood = FLOODS[name]

    async def again() -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                await flood(port, context)
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(again())
        await asyncio.sleep(RISE_S)
        sys.stdout.write("flooding\n")
        sys.stdout.flush()


if __name__ == "__main__":
    allow_files(FILES)
    os.nice(19)
    asyncio.run(_flood(sys.argv[1], int(sys.argv[2]), sys.argv[3]))

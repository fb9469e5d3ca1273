"""What many TLS connections leave: those in their handshake are bounded, and those that ended keep nothing of TLS."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import struct
import sys
from pathlib import Path

import psutil

from kproxy_codec.api_keys import API_VERSIONS
from kproxy_codec.framing import request_header
from tests.support.clients.raw_client import raw_frame
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import counted, port_of, static_proxy
from tests.support.security.tls_files import Signer, client_context
from tests.support.waiting import wait_for

HOST = "127.0.0.1"
PATIENCE_S = 60.0
MAX_HALF_OPEN = 50
# kproxy without Python's cycle collector; with each TLS connection it says how many of them it still has in memory.
UNCOLLECTED = """
import gc, sys, weakref
from kproxy.__main__ import main
from kproxy.security.entrance import EntranceContext

alive, wrap_bio = weakref.WeakSet(), EntranceContext.wrap_bio

def wrap(*arguments, **options):
    made = wrap_bio(*arguments, **options)
    alive.add(made)
    print(f"alive={len(alive)}.", file=sys.stderr, flush=True)
    return made

EntranceContext.wrap_bio = wrap
gc.disable()
sys.exit(main())
"""


def connect(process: KproxyProcess) -> socket.socket:
    return socket.create_connection((HOST, port_of(process)), timeout=PATIENCE_S)


def serves(process: KproxyProcess, context: ssl.SSLContext) -> bool:
    with connect(process) as plain, context.wrap_socket(plain, server_hostname="localhost") as client:
        client.sendall(raw_frame(request_header(API_VERSIONS, 0, 77, b"c")))
        return struct.unpack(">i", client.recv(8)[4:8])[0] == 77


def hello() -> bytes:
    """The first message of a client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context(None).wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def test_a_crowd_of_them_is_bounded_and_a_client_comes_in_all_the_same(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    signer = Signer(tmp_path / "ca")
    pair = signer.issue("server", "localhost")
    rooms = f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n'
    context, first = client_context(signer.ca), hello()
    with static_proxy(tmp_path, {1: 1}, limits={"max_half_open": MAX_HALF_OPEN}, rooms=rooms) as process:
        assert serves(process, context)
        own = psutil.Process(process.pid)
        before = own.num_fds()
        with contextlib.ExitStack() as stack:
            for number in range(500):
                sock = stack.enter_context(connect(process))
                # Nothing, a part of the first message, all of it and no more, or a good beginning of something bad.
                sock.sendall(dice.choice([b"", first[: dice.randrange(1, len(first))], first, first[:5] + bytes(100)]))
                if number % 25 == 0:
                    assert serves(process, context)
            assert counted(process.admin, "kproxy_half_open_connections") <= MAX_HALF_OPEN
            assert own.num_fds() <= before + 2 * MAX_HALF_OPEN + 10
            assert counted(process.admin, 'kproxy_client_handshakes_total{outcome="crowded"}') > 0
            # Those that are left are not waited for for ever.
            wait_for(lambda: counted(process.admin, "kproxy_half_open_connections") == 0, PATIENCE_S)
            assert counted(process.admin, 'kproxy_client_handshakes_total{outcome="timeout"}') > 0
            assert serves(process, context)
            wait_for(lambda: own.num_fds() <= before + 1, PATIENCE_S)
        assert "Traceback" not in process.stderr()
        assert "never retrieved" not in process.stderr()


def test_an_ended_connection_leaves_nothing_of_tls_to_the_cycle_collector(tmp_path: Path) -> None:
    signer = Signer(tmp_path / "ca")
    pair = signer.issue("server", "localhost")
    rooms = f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n'
    context, connections = client_context(signer.ca), 40
    with static_proxy(tmp_path, {1: 1}, rooms=rooms, command=(sys.executable, "-c", UNCOLLECTED)) as process:
        for _ in range(connections):
            assert serves(process, context)
        alive = [int(line.partition(".")[0]) for line in process.stderr().split("alive=")[1:]]
    assert len(alive) == connections
    # Those whose end the event loop has yet to see.
    assert alive[-1] < connections // 2

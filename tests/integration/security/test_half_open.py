"""Floods of connections: those in their handshake are bounded, and ended ones leave no reference cycles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from kproxy_codec.api_keys import METADATA
from kproxy_codec.error_codes import NONE, SASL_AUTHENTICATION_FAILED
from tests.support.brokers.scripted_upstream import Asked, answers_everything
from tests.support.clients.blocking_client import connect, is_served
from tests.support.clients.raw_client import RawClient, batch, control_frame, produce_frame
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import counted, port_of, served, static_proxy
from tests.support.security import sasl_client as sasl
from tests.support.security.client_hello import EXTENSIONS, client_hello
from tests.support.security.tls_files import Signer, client_context
from tests.support.waiting import PATIENCE_S, eventually, wait_for

MAX_HALF_OPEN = 50
# kproxy without Python's cycle collector, which prints on SIGUSR2 the objects that a collection would free.
UNCOLLECTED = """
import collections, gc, json, signal, sys
from kproxy.__main__ import main

def collect(*_):
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    counts = collections.Counter(type(each).__qualname__ for each in gc.garbage)
    print("left=" + json.dumps(counts), file=sys.stderr, flush=True)

gc.disable()
signal.signal(signal.SIGUSR2, collect)
sys.exit(main())
"""


def serves(process: KproxyProcess, context: ssl.SSLContext) -> bool:
    with connect(process) as plain, context.wrap_socket(plain, server_hostname="localhost") as client:
        return is_served(client)


def test_half_open_connections_are_bounded_and_clients_admitted(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    signer = Signer(tmp_path / "ca")
    pair = signer.issue("server", "localhost")
    rooms = f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n'
    context, first = client_context(signer.ca), client_hello(EXTENSIONS)
    with static_proxy(tmp_path, {1: 1}, limits={"max_half_open": MAX_HALF_OPEN}, rooms=rooms) as process:
        assert serves(process, context)
        own = psutil.Process(process.pid)
        before = own.num_fds()
        with contextlib.ExitStack() as stack:
            for number in range(500):
                sock = stack.enter_context(connect(process))
                # Nothing, part of the first message, exactly the message, or a valid beginning of an invalid one.
                sock.sendall(dice.choice([b"", first[: dice.randrange(1, len(first))], first, first[:5] + bytes(100)]))
                if number % 25 == 0:
                    assert serves(process, context)
            assert counted(process.admin, "kproxy_half_open_connections") <= MAX_HALF_OPEN
            assert own.num_fds() <= before + 2 * MAX_HALF_OPEN + 10
            assert counted(process.admin, 'kproxy_client_handshakes_total{outcome="crowded"}') > 0
            # The rest is not awaited for ever.
            wait_for(lambda: counted(process.admin, "kproxy_half_open_connections") == 0, PATIENCE_S)
            assert counted(process.admin, 'kproxy_client_handshakes_total{outcome="timeout"}') > 0
            assert serves(process, context)
            wait_for(lambda: own.num_fds() <= before + 1, PATIENCE_S)
        assert "Traceback" not in process.stderr()
        assert "never retrieved" not in process.stderr()


def answer(asked: Asked) -> None:
    if asked.header.api_key == METADATA:
        asked.answer_message(brokers=[], topics=[], controller_id=-1, cluster_id="c")
    else:
        answers_everything(asked)


Ending = Callable[[RawClient], Awaitable[None]]


async def metadata(client: RawClient) -> None:
    client.send(control_frame(METADATA, 9, topics=None))
    await client.answer(METADATA, 9)


async def produce(client: RawClient) -> None:
    client.send(produce_frame())
    assert (await client.answer()).codes == {("t", 0): NONE}


async def leave_requests(client: RawClient) -> None:
    await produce(client)
    client.send(*[produce_frame(records=batch(n)) for n in range(1, 21)])
    await client.sent()
    client.abort()


async def announce_too_much(client: RawClient) -> None:
    client.send(b"\x7f\xff\xff\xff")
    assert await client.is_closed()


async def nothing(client: RawClient) -> None:
    pass


def logged_in(then: Ending) -> Ending:
    async def log_in(client: RawClient) -> None:
        await sasl.log_in(client)
        await then(client)

    return log_in


async def be_refused(client: RawClient) -> None:
    assert (await sasl.present(client, sasl.plain("alice", "wrong"))).error_code == SASL_AUTHENTICATION_FAILED


ENDINGS: Mapping[str, Sequence[Ending]] = {
    "without security": (nothing, announce_too_much, metadata, produce, leave_requests),
    "with TLS and SASL": (nothing, announce_too_much, be_refused, *map(logged_in, (metadata, produce, leave_requests))),
}


@pytest.mark.parametrize("listener", ENDINGS)
async def test_ended_connection_leaves_no_reference_cycle(tmp_path: Path, listener: str) -> None:
    """The collector stops the event loop: for 20 ms if a flood of 200 connections leaves reference cycles."""
    connections, rooms = 20, ""
    contexts: list[ssl.SSLContext | None] = [None]
    if listener != "without security":
        signer, stranger = Signer(tmp_path / "ca"), Signer(tmp_path / "another")
        pair = signer.issue("server", "localhost")
        rooms = f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n' + sasl.ALLOW_ALL
        rooms += f'[sasl]\nmechanisms = ["PLAIN"]\nusers = "{sasl.users_file(tmp_path)}"\n'
        contexts = [client_context(signer.ca), client_context(stranger.ca)]
    async with served(tmp_path, answer, rooms=rooms, command=(sys.executable, "-c", UNCOLLECTED)) as site:
        process = site.process

        async def come_and_go(ending: Ending, tls: ssl.SSLContext | None) -> None:
            client = await RawClient().connect(port_of(process), tls=tls)
            await ending(client)
            client.close()

        for ending in ENDINGS[listener]:
            await asyncio.gather(*(come_and_go(ending, contexts[0]) for _ in range(connections)))
        for context in contexts[1:]:
            for refused in await asyncio.gather(
                *(come_and_go(nothing, context) for _ in range(connections)), return_exceptions=True
            ):
                assert isinstance(refused, ssl.SSLError)
        await eventually(lambda: counted(process.admin, "kproxy_client_connections ") == 0)
        os.kill(process.pid, signal.SIGUSR2)
        await eventually(lambda: "left=" in process.stderr())
    left = json.loads(process.stderr().partition("left=")[2].partition("\n")[0])
    # One leftover object per connection would give this many.
    assert sum(left.values()) < connections, left

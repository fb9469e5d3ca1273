"""Host names of brokers: an unanswered name lookup delays no dial to another broker."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from kproxy.routing.topology import Address
from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.dev import KPROXY, serving
from tests.support.processes.served import ServedBroker, port_of
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
    # After an answer they are normal brokers.
    names.answer.set()
    await eventually(lambda: not [each for each in threading.enumerate() if each.name.startswith("resolve")])

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


# A real name server


class _NameServer(asyncio.DatagramProtocol):
    """Resolves QUICK to this machine, and answers for no other name."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        self.asked = Counter[str]()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += 1 + data[at]
        question, name = data[12 : at + 5], ".".join(labels)
        self.asked[name] += 1
        if name != QUICK:
            return
        is_address = question[-4:-2] == b"\x00\x01"
        answer = b"\xc0\x0c\x00\x01\x00\x01" + struct.pack(">ih", 0, 4) + bytes([127, 0, 0, 1])
        head = data[:2] + struct.pack(">HHHHH", 0x8180, 1, is_address, 0, 0)
        self._transport.sendto(head + question + (answer if is_address else b""), addr)


@contextmanager
def _port_53() -> Iterator[socket.socket]:
    """Bind port 53 at an unused address. Skip the test if that is impossible."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        try:
            bound.bind((f"127.53.{os.getpid() >> 8 & 255}.{os.getpid() % 254 + 1}", 53))
        except OSError as error:
            pytest.skip(f"no name server can be had: {error}")
        bound.setblocking(False)
        yield bound


def _with_name_server(address: str, directory: Path) -> list[str]:
    """The command prefix that selects that name server. Skip the test if that is impossible."""
    resolv = directory / "resolv.conf"
    resolv.write_text(f"nameserver {address}\n")
    script = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    if shutil.which("unshare") is None or not sys.platform.startswith("linux"):
        pytest.skip("there are no mount namespaces")
    prefix = ["unshare", "-m", "sh", "-c", script, str(resolv)]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces need rights that are not given here")
    return prefix


async def test_unanswered_name_lookups_do_not_affect_other_brokers(
    tmp_path: Path,
) -> None:
    with _port_53() as bound:
        prefix = _with_name_server(bound.getsockname()[0], tmp_path)
        transport, server = await asyncio.get_running_loop().create_datagram_endpoint(_NameServer, sock=bound)
        upstream = await ServedBroker(1, answers_everything).start()
        lines = ["[ownership]", 'ownership = "static"', "[brokers]", f'1 = "{QUICK}:{upstream.port}"']
        lines += [f'{broker} = "{host}:{upstream.port}"' for broker, host in enumerate(SLOW[:8], 100)]
        lines += ["[[topics]]", 'name = "t"', f"owners = [1, {', '.join(map(str, range(100, 108)))}]"]
        (tmp_path / "kproxy.toml").write_text("\n".join(lines))
        arguments = ["serve", "--config", tmp_path / "kproxy.toml", "--listen", "127.0.0.1:0"]
        with serving(arguments, tmp_path / "stderr", [*prefix, *KPROXY]) as process:
            clients = [await RawClient().connect(port_of(process)) for _ in range(8)]
            asking = [asyncio.ensure_future(code_of(each, "t", at)) for at, each in enumerate(clients, 1)]
            await eventually(lambda: len(server.asked) >= 4, "the slow names are asked for")
            client = await RawClient().connect(port_of(process))
            began = time.monotonic()
            assert await code_of(client) == 0
            assert time.monotonic() - began < SOON_S
            assert await asyncio.gather(*asking) == [NOT_LEADER] * 8
            for each in (client, *clients):
                each.close()
            began = time.monotonic()
        # The end of the process does not wait for lookup threads either.
        assert time.monotonic() - began < SOON_S
        await upstream.stop()
        transport.close()

"""Run brokers and two proxies for histories of ownership, with links that a test can hold, cut and kill.

    clients - proxies - Way (held_bytes) - brokers - etcd
                 `------ Relay ----------------------'

Relays run on the test's event loop, so blocking work needs a thread: `await asyncio.to_thread(...)`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from pathlib import Path
from typing import Final

import psutil

from kproxy.broker.keys import Keys
from kproxy.claims.keys import OwnKeys, decode_member
from kproxy.etcd import EtcdClient
from tests.support.brokers.held_bytes import HOST, Way
from tests.support.brokers.reference_broker import BrokerProcess
from tests.support.brokers.topics import put_topic
from tests.support.claims.own_client import OwnClient
from tests.support.clients.attempts import Stored
from tests.support.etcd.embedded import Relay
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.ports import free_port
from tests.support.waiting import eventually

BROKERS: Final = (1, 2, 3)
PROXIES: Final = 2
TTL_S: Final = 2
# Claims that must wait longer are answered with 7, and asked for again.
OWN_TIMEOUT_S: Final = 5.0
# Short, because clients do not leave by themselves when a proxy gets SIGTERM.
DRAIN_S: Final = 1.0
PATIENCE_S: Final = 60.0
UNBOUND: Final = (sys.executable, "-P", "-m", "tests.support.processes.unbound_proxy_main")


class Proxy:
    """A `kproxy serve` that keeps its port over restarts, behind a relay to etcd."""

    def __init__(self, way: Relay, file: Path, command: Sequence[str] | None) -> None:
        self.way = way
        self.port = free_port()
        self._file = file
        self._command = command
        self._starts = 0
        self._read_to = 0
        self._process: KproxyProcess | None = None
        self._is_killed = False

    @property
    def process(self) -> KproxyProcess:
        assert self._process is not None, "not started"
        return self._process

    def _start(self) -> None:
        arguments = ["serve", "--config", self._file, "--listen", f"{HOST}:{self.port}", "--etcd", self.way.endpoint]
        self._starts += 1
        self._read_to = 0
        self._process = KproxyProcess(arguments, self._file.with_suffix(f".{self._starts}.stderr"), self._command)
        self._is_killed = False

    async def up(self) -> None:
        """Start, and wait until it serves."""
        await asyncio.to_thread(self._start)
        await asyncio.to_thread(self.process.wait_ready)

    async def down(self) -> None:
        """kill -9."""
        self._is_killed = True
        self.process.signal(signal.SIGKILL)
        await asyncio.to_thread(self.process.stop)

    async def terminate(self) -> None:
        """SIGTERM: it answers the requests that it has read, and gives up its claims."""
        self._is_killed = True
        self.process.signal(signal.SIGTERM)
        await asyncio.to_thread(self.process.wait)
        await asyncio.to_thread(self.process.stop)

    def stop(self) -> None:
        """Ensure that the process has ended, whatever its state."""
        if self._process is not None and not self._is_killed:
            self.process.signal(signal.SIGKILL)
            self.process.stop()

    def has_lost_claims(self) -> bool:
        """Whether it has lost claims since the last call without a new owner: on a busy machine a lease may end."""
        with self.process.stderr_path.open("rb") as file:
            file.seek(self._read_to)
            found = file.read()
            self._read_to = file.tell()
        return any(sign in found for sign in (b"its lease in etcd has ended", b"was freed"))

    def upstream_ports(self) -> list[int]:
        """The ports of its connections to brokers."""
        return [each.laddr.port for each in psutil.Process(self.process.pid).net_connections("tcp") if each.laddr]

    async def heal(self) -> None:
        if not self.way.is_open:
            await self.way.open()
        elif self.way.is_dead:
            await self.way.restore()
        if self._is_killed:
            await self.up()
        else:
            self.process.signal(signal.SIGCONT)


class Broker(BrokerProcess):
    """A broker of which clients learn only `way`'s address; its port stays the same over restarts."""

    def __init__(self, node_id: int, way: Way, data_dir: Path, etcd: str, prefix: str) -> None:
        self.way = way
        self._is_killed = False
        super().__init__(node_id, data_dir, etcd, prefix, listen=way.target_port, advertise=way.port, lease_ttl_s=TTL_S)

    async def up(self) -> None:
        self.start(wait=False)
        self._is_killed = False
        await asyncio.to_thread(self.wait_ready)

    async def down(self) -> None:
        """kill -9."""
        self._is_killed = True
        await asyncio.to_thread(self.kill)

    async def heal(self) -> None:
        if self._is_killed:
            await self.up()
        else:
            self.signal(signal.SIGCONT)


class OwnSite:
    """`proxies` by number, `brokers` by id. Opened by `own_site`."""

    def __init__(
        self, client: EtcdClient, prefix: str, etcd: str, directory: Path, writer_groups: Mapping[str, str]
    ) -> None:
        self.client = client
        self.prefix = prefix
        self.keys = Keys(prefix)
        self.own_keys = OwnKeys(prefix)
        self.etcd = etcd
        self.directory = directory
        self.writer_groups = writer_groups
        self.proxies: list[Proxy] = []
        self.brokers: dict[int, Broker] = {}

    async def put_topic(self, topic: str, replicas: list[list[int]]) -> None:
        await put_topic(self.client, self.keys, topic, replicas)

    async def leader(self, topic: str, partition: int) -> int | None:
        found = await self.client.get(self.keys.lease(topic, partition))
        return None if found is None else int(found.value)

    async def revoke_lease(self, proxy: Proxy) -> None:
        """Revoke the lease of a proxy's claims; the proxy learns this from etcd."""
        for entry in (await self.client.get_prefix(self.own_keys.members)).kvs:
            if decode_member(entry.value).port == proxy.port:
                await self.client.lease_revoke(entry.lease_id)

    async def heal(self) -> None:
        """Make all processes serve again, after any fault."""
        await asyncio.gather(*(each.heal() for each in (*self.brokers.values(), *self.proxies)))

    def release(self) -> None:
        """Deliver the bytes held on their way to brokers."""
        for broker in self.brokers.values():
            broker.way.release()

    async def all_arrived(self) -> None:
        """Wait until all bytes have arrived, including those on connections of departed clients."""
        await eventually(
            lambda: not any(each.way.left_behind() for each in self.brokers.values()),
            timeout_s=PATIENCE_S,
            what="what was held has arrived",
        )

    async def log(self, topic: str, partition: int, at_least: int = 0) -> list[Stored]:
        """All records of the leader, read without a proxy, once it shows at least this many."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            node_id = await self.leader(topic, partition)
            found = await self._read(node_id, topic, partition) if node_id is not None else []
            if isinstance(found, list) and len(found) >= at_least:
                return found
            assert time.monotonic() < deadline, f"{topic}-{partition}, led by {node_id}: {found}; wanted: {at_least}"
            await asyncio.sleep(0.05)

    async def _read(self, node_id: int, topic: str, partition: int) -> list[Stored] | str:
        """The records of one broker, or the name of the error."""
        found: list[Stored] = []
        try:
            client = await OwnClient.connect(HOST, self.brokers[node_id].way.target_port)
        except OSError as error:
            return str(error)
        try:
            while True:
                fetched = await client.fetch(topic, partition, found[-1].offset + 1 if found else 0)
                if fetched.error_code != 0:
                    return f"error {fetched.error_code}"
                if not fetched.records:
                    return found
                found += fetched.records
        except ConnectionError as error:
            return str(error)
        finally:
            await client.close()


@asynccontextmanager
async def own_site(
    etcd: str, client: EtcdClient, prefix: str, directory: Path, writer_groups: Mapping[str, str]
) -> AsyncIterator[OwnSite]:
    """Run the whole site until the block ends."""
    site = OwnSite(client, prefix, etcd, directory, writer_groups)
    async with AsyncExitStack() as stack:
        for node_id in BROKERS:
            way = await stack.enter_async_context(Way(free_port()))
            broker = site.brokers[node_id] = Broker(node_id, way, directory / f"broker-{node_id}", etcd, prefix)
            stack.callback(broker.stop)
        await asyncio.gather(*(each.up() for each in site.brokers.values()))
        yield await stack.enter_async_context(with_proxies(site))


@asynccontextmanager
async def with_proxies(site: OwnSite, command: Sequence[str] | None = None) -> AsyncIterator[OwnSite]:
    """Put two more proxies before the same brokers until the block ends."""
    other = copy(site)
    other.proxies = []
    groups = ", ".join(f'"{topic}={group}"' for topic, group in site.writer_groups.items())
    async with AsyncExitStack() as stack:
        for _ in range(PROXIES):
            relay = await stack.enter_async_context(Relay(site.etcd))
            file = site.directory / f"proxy-{relay.port}.toml"
            file.write_text(
                f'[ownership]\nownership = "etcd"\nprefix = "{site.prefix}"\n[own]\nwriter_group = [{groups}]\n'
                f"[fleet]\nlease_ttl = {TTL_S}\n[limits]\nown_timeout_s = {OWN_TIMEOUT_S}\n"
                f"drain_s = {DRAIN_S}\n"
            )
            proxy = Proxy(relay, file, command)
            other.proxies.append(proxy)
            stack.callback(proxy.stop)
        await asyncio.gather(*(each.up() for each in other.proxies))
        yield other

"""Run brokers on a three-member etcd, behind relays that a test can shut: to etcd, and to their followers.

Relays run on the test's event loop, so blocking work needs a thread: `await asyncio.to_thread(...)`.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from kproxy.broker.disk import read_json
from kproxy.broker.keys import Keys, StateValue, decode_value
from kproxy.etcd import EtcdClient, EtcdError
from tests.support.brokers.reference_broker import BrokerProcess
from tests.support.brokers.topics import put_topic
from tests.support.clients.attempts import Address, Stored, log_bytes, stored
from tests.support.etcd.embedded import Relay, connected
from tests.support.etcd.etcd_cluster import EtcdCluster
from tests.support.processes.ports import free_port
from tests.support.waiting import PATIENCE_S, eventually

HOST = "127.0.0.1"


class FaultyBroker(BrokerProcess):
    """One broker; its ports stay the same over restarts."""

    def __init__(
        self,
        node_id: int,
        data_dir: Path,
        etcd_ways: Sequence[Relay],
        prefix: str,
        *,
        has_followers: bool,
        **options: Any,
    ) -> None:
        self.replication_way = Relay(f"http://{HOST}:{free_port()}")
        self.etcd_ways = list(etcd_ways)
        self._has_followers = has_followers
        super().__init__(node_id, data_dir, "", prefix, **options)

    async def open_ways(self) -> None:
        """Start the relays, and give the process their addresses."""
        for way in (*self.etcd_ways, self.replication_way):
            await way.open()
        self.arguments[2] = ",".join(way.endpoint for way in self.etcd_ways)
        self.arguments.append(f"listen={free_port()}")
        if self._has_followers:
            port, told = self.replication_way.target_port, self.replication_way.port
            self.arguments += [f"replication_listen={port}", f"replication_at={told}"]

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def client_address(self) -> Address:
        return self.host, self.port

    async def up(self) -> None:
        """Start, and wait until it serves."""
        self.start(wait=False)
        await asyncio.to_thread(self.wait_ready)

    async def down(self) -> None:
        """kill -9."""
        await asyncio.to_thread(self.kill)

    async def cut_off_from_etcd(self, how: str) -> None:
        """`refused`: connections end and no new one is accepted. `silent`: from now on every packet is dropped."""
        for way in self.etcd_ways:
            if how == "refused":
                await way.shut()
            else:
                way.blackhole()

    async def heal(self) -> None:
        """Make it serve again with open links, after any fault."""
        for way in (*self.etcd_ways, self.replication_way):
            if not way.is_open:
                await way.open()
            if way.is_dead:
                await way.restore()
        if self.is_running:
            self.signal(signal.SIGCONT)
        else:
            await self.up()


class FaultySite:
    """`brokers` by id. Opened by `faulty_site`."""

    def __init__(self, etcd: EtcdCluster, client: EtcdClient, prefix: str, directory: Path) -> None:
        self.etcd = etcd
        self.client = client
        self.prefix = prefix
        self.keys = Keys(prefix)
        self.brokers: dict[int, FaultyBroker] = {}
        self.directory = directory
        self._stack = AsyncExitStack()

    async def add(
        self,
        node_ids: Iterable[int],
        *,
        etcd_members: Sequence[int] = (0, 1, 2),
        has_followers: bool = True,
        **options: Any,
    ) -> None:
        """Start brokers side by side, with these members of etcd."""
        added = []
        for node_id in node_ids:
            ways = [Relay(self.etcd.members[number].endpoint) for number in etcd_members]
            data_dir = self.directory / str(node_id)
            broker = FaultyBroker(node_id, data_dir, ways, self.prefix, has_followers=has_followers, **options)
            self._stack.callback(broker.stop)
            for way in (*ways, broker.replication_way):
                self._stack.push_async_callback(way.shut)
            await broker.open_ways()
            self.brokers[node_id] = broker
            added.append(broker)
        for broker in added:
            broker.start(wait=False)
        for broker in added:
            await asyncio.to_thread(broker.wait_ready)

    async def close(self) -> None:
        await self._stack.aclose()

    async def heal(self) -> None:
        await asyncio.gather(*(broker.heal() for broker in self.brokers.values()))

    def addresses(self) -> list[Address]:
        """The addresses of all brokers, dead or alive, for clients."""
        return [broker.client_address for broker in self.brokers.values()]

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.address for broker in self.brokers.values())

    # State in etcd

    async def put_topic(self, topic: str, replicas: list[list[int]], **configs: str) -> None:
        await put_topic(self.client, self.keys, topic, replicas, configs)

    async def owner(self, topic: str, partition: int = 0) -> int | None:
        found = await self.client.get(self.keys.lease(topic, partition))
        return None if found is None else int(found.value)

    async def end_lease(self, node_id: int) -> None:
        """Revoke the lease of a dead broker: it ends as at the end of its TTL."""
        found = await self.client.get(self.keys.broker(node_id))
        if found is not None:
            await self.client.lease_revoke(found.lease_id)

    async def state(self, topic: str, partition: int = 0) -> StateValue | None:
        found = await self.client.get(self.keys.state(topic, partition))
        return None if found is None else decode_value(found.value, StateValue)

    async def led_by(self, topic: str, partition: int, node_ids: Iterable[int], timeout_s: float = PATIENCE_S) -> int:
        """Wait until one of these brokers owns the partition; return its id."""
        wanted = set(node_ids)
        owner: int | None = None

        async def is_led() -> bool:
            nonlocal owner
            owner = await self.owner(topic, partition)
            return owner in wanted

        await eventually(
            is_led,
            timeout_s=timeout_s,
            ignored=(EtcdError,),
            what=f"{topic}-{partition} is led by one of {sorted(wanted)}",
        )
        assert owner is not None
        return owner

    async def in_sync(
        self, topic: str, partition: int, node_ids: Iterable[int], timeout_s: float = PATIENCE_S
    ) -> StateValue:
        """Wait until the ISR is exactly these brokers."""
        wanted = set(node_ids)
        state: StateValue | None = None

        async def is_in_sync() -> bool:
            nonlocal state
            state = await self.state(topic, partition)
            # The ISR has this value from the start, before any broker leads.
            if state is None or state.leader_epoch < 0:
                return False
            return {replica.node_id for replica in state.isr} == wanted

        try:
            await eventually(is_in_sync, timeout_s=timeout_s, ignored=(EtcdError,))
        except AssertionError:
            raise AssertionError(f"the ISR of {topic}-{partition} is {state}, not {sorted(wanted)}") from None
        assert state is not None
        return state

    # Contents of the disks

    def log_bytes(self, node_id: int, topic: str, partition: int = 0) -> bytes:
        return log_bytes(self.brokers[node_id].data_dir / f"{topic}-{partition}")

    def log_id(self, node_id: int, topic_id: uuid.UUID | None, partition: int) -> uuid.UUID | None:
        """The id of the log on that broker's disk; None if there is none."""
        found = read_json(self.brokers[node_id].data_dir / "log-ids" / f"{topic_id}-{partition}")
        return None if found is None else uuid.UUID(str(found["log_id"]))

    def _log_size(self, node_id: int, topic: str, partition: int) -> int:
        directory = self.brokers[node_id].data_dir / f"{topic}-{partition}"
        return sum(file.stat().st_size for file in directory.glob("*.log"))

    async def same_logs(
        self, topic: str, partition: int, node_ids: Sequence[int], timeout_s: float = PATIENCE_S
    ) -> list[Stored]:
        """Wait until the logs of these brokers are the same to the last byte; return their content."""
        return stored(await self.same_log_bytes(topic, partition, node_ids, timeout_s))

    async def same_log_bytes(
        self, topic: str, partition: int, node_ids: Sequence[int], timeout_s: float = PATIENCE_S
    ) -> bytes:
        """Like `same_logs`, from the files on the disks."""

        async def are_same() -> bool:
            sizes = {self._log_size(node_id, topic, partition) for node_id in node_ids}
            return len(sizes) == 1 and len({self.log_bytes(each, topic, partition) for each in node_ids}) == 1

        try:
            await eventually(are_same, timeout_s=timeout_s, ignored=(EtcdError,))
        except AssertionError:
            logs = {node_id: stored(self.log_bytes(node_id, topic, partition))[-8:] for node_id in node_ids}
            raise AssertionError(f"the logs of {topic}-{partition} differ; their ends: {logs}") from None
        return self.log_bytes(node_ids[0], topic, partition)


@asynccontextmanager
async def faulty_site(etcd: EtcdCluster, prefix: str, directory: Path) -> AsyncIterator[FaultySite]:
    """A site without brokers yet; everything is stopped at the end."""
    async with connected(EtcdClient(etcd.endpoints, timeout_s=20.0)) as client:
        site = FaultySite(etcd, client, prefix, directory)
        try:
            yield site
        finally:
            await site.close()

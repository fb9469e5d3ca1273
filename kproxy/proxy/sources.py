"""The ownership source that the configuration names, opened: its table loaded once, and kept current until closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from codec.api_keys import PRODUCE
from codec.produce import TOPIC_IDS_FROM
from kproxy.config import ProxyConfig
from kproxy.errors import StartupError
from kproxy.ownership.etcd import EtcdClient, EtcdError
from kproxy.ownership.kafka_metadata import KafkaMetadata
from kproxy.ownership.leases import LeaseTable
from kproxy.ownership.static_table import StaticTable
from kproxy.proxy.versions import NO_CAPS
from kproxy.routing import retry
from kproxy.routing.topology import Address, Topology

# Topics are known by their names alone.
_WITHOUT_TOPIC_IDS: Mapping[int, int] = MappingProxyType({PRODUCE: TOPIC_IDS_FROM - 1})
SYNC_TIMEOUT_S = 30.0
# A Kafka cluster that is there answers at once; one that is not should be said soon.
KAFKA_SYNC_TIMEOUT_S = 10.0


class Source(Protocol):
    """Feeds a topology."""

    @property
    def age_s(self) -> float:
        """Seconds since the source last said anything."""
        ...

    @property
    def stale(self) -> bool:
        """Whether that is too long ago."""
        ...

    async def run(self) -> None:
        """Keep the topology current until cancelled."""
        ...

    async def wait_synced(self) -> None:
        """Until the table has been loaded once."""
        ...

    def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> Awaitable[object]:
        """Read one partition's owner anew, after a broker refused a request routed at `seen_revision`; coalesced."""
        ...


@dataclass(frozen=True)
class OpenSource:
    """`ready` is what the ready line says of it; `following` ends only with an error or when the source is closed.

    `version_caps`: the highest versions by API key that can be served with what the source knows.
    """

    source: Source
    conduct: retry.Conduct
    following: asyncio.Task[None]
    ready: str
    version_caps: Mapping[int, int]


@contextlib.asynccontextmanager
async def open_source(config: ProxyConfig, topology: Topology) -> AsyncIterator[OpenSource]:
    """Raises StartupError where the source does not answer."""
    async with contextlib.AsyncExitStack() as stack:
        if config.ownership == "etcd":
            opened = await _open_etcd(config, topology, stack)
        elif config.ownership == "kafka":
            opened = await _open_kafka(config, topology, stack)
        else:
            opened = _open_static(config, topology, stack)
        yield opened


async def _open_etcd(config: ProxyConfig, topology: Topology, stack: contextlib.AsyncExitStack) -> OpenSource:
    client = EtcdClient(config.etcd)
    stack.push_async_callback(client.close)
    table = LeaseTable(client, config.prefix, topology)
    try:
        await client.connect()
        following = _follow(table, stack)
        async with asyncio.timeout(SYNC_TIMEOUT_S):
            await table.wait_synced()
    except TimeoutError as error:
        raise StartupError(
            f"etcd at {client.endpoints} answers, but its partition leases could not be read in time"
        ) from error
    except EtcdError as error:
        raise StartupError(f"{error} Start etcd, or give its address with --etcd.") from error
    # KafScale's topics have no ids; those of reference brokers, made later, will have some.
    caps = _WITHOUT_TOPIC_IDS if topology.owned_count and not topology.topic_ids else NO_CAPS
    return OpenSource(table, retry.LEASED, following, f" etcd={client.endpoints}", caps)


async def _open_kafka(config: ProxyConfig, topology: Topology, stack: contextlib.AsyncExitStack) -> OpenSource:
    metadata = KafkaMetadata([Address(*address) for address in config.bootstrap], topology)
    following = _follow(metadata, stack)
    try:
        async with asyncio.timeout(KAFKA_SYNC_TIMEOUT_S):
            await metadata.wait_synced()
    except TimeoutError as error:
        where = ", ".join(map(str, config.bootstrap))
        reason = metadata.last_error or "its metadata did not come in time"
        raise StartupError(
            f"no Kafka cluster answers at {where} ({reason}): start it, or give others of its brokers with --bootstrap"
        ) from error
    return OpenSource(metadata, retry.KAFKA, following, "", NO_CAPS)


def _open_static(config: ProxyConfig, topology: Topology, stack: contextlib.AsyncExitStack) -> OpenSource:
    table = StaticTable(topology)
    if config.owners is not None:
        brokers = {number: Address(*address) for number, address in config.owners.brokers.items()}
        table.load(brokers, [(topic.name, topic.owners) for topic in config.owners.topics])
    return OpenSource(table, retry.KAFKA, _follow(table, stack), "", _WITHOUT_TOPIC_IDS)


def _follow(source: Source, stack: contextlib.AsyncExitStack) -> asyncio.Task[None]:
    task = asyncio.create_task(source.run())
    stack.push_async_callback(cancel, task)
    return task


async def cancel(task: asyncio.Task[Any]) -> None:
    """End a task and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

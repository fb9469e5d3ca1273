"""Open the configured ownership source, which keeps the routing table.

Its table is loaded once, and kept current until it is closed. Owners that a request shows to be outdated are looked up
again (`OwnerLookups`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from kproxy.config import ProxyConfig
from kproxy.etcd import EtcdClient, IdBlocks, connect
from kproxy.ownership.kafka_metadata import KafkaMetadata
from kproxy.ownership.leases import LeaseTable
from kproxy.ownership.static_table import StaticTable
from kproxy.proxy.api_versions import NO_CAPS
from kproxy.proxy.context import OwnershipSource, ProxyContext
from kproxy.proxy.coordinators import LeasedCoordinators
from kproxy.routing import retry
from kproxy.routing.topology import Topology
from kproxy.runtime.tasks import cancel, in_time
from kproxy.security.broker_auth import BrokerAuth
from kproxy_codec import fetch, produce
from kproxy_codec.api_keys import FETCH, OFFSET_COMMIT, OFFSET_FETCH, PRODUCE
from kproxy_codec.coordination import OFFSETS_BY_ID_FROM

# For sources that know topics only by their names: the highest versions that name topics by name.
_WITHOUT_TOPIC_IDS: Mapping[int, int] = MappingProxyType(
    {
        PRODUCE: produce.TOPIC_IDS_FROM - 1,
        FETCH: fetch.TOPIC_IDS_FROM - 1,
        OFFSET_COMMIT: OFFSETS_BY_ID_FROM - 1,
        OFFSET_FETCH: OFFSETS_BY_ID_FROM - 1,
    }
)
# A working source answers at once; a longer wait is reported, and then again and again. Seconds.
FIRST_PATIENCE_S = 1.0
PATIENCE_S = 5.0
# A lookup takes two of etcd's transactions; a Kafka cluster is asked about whole topics.
MAX_LOOKUPS: Final = 256


class Source(OwnershipSource, Protocol):
    """Feeds a topology."""

    @property
    def age_s(self) -> float:
        """Seconds since the last news from the source."""
        ...

    @property
    def stale(self) -> bool:
        """Whether the last update is too old."""
        ...

    async def run(self) -> None:
        """Keep the topology current until cancelled."""
        ...

    async def wait_synced(self) -> None:
        """Wait until the table has been loaded once."""
        ...

    async def reload(self) -> str:
        """Read everything again on request (SIGHUP).

        Returns the result in a few words. Raises StartupError if it cannot be read; the table is kept.
        """
        ...


@dataclass(frozen=True)
class OpenSource:
    """An ownership source that runs.

    `ready` is its part of the ready line; `following` ends only with an error or on close.

    `version_caps`: the highest versions by API key that the source allows. `producer_ids` and `leased_coordinators`:
    as in ProxyContext, if the source has them. Call `broker_lost` when a connection to a broker ends or fails.
    """

    source: Source
    semantics: retry.BrokerSemantics
    following: asyncio.Task[None]
    ready: str
    version_caps: Mapping[int, int]
    producer_ids: IdBlocks | None = None
    leased_coordinators: LeasedCoordinators | None = None
    broker_lost: Callable[[], None] = lambda: None


@contextlib.asynccontextmanager
async def open_source(
    config: ProxyConfig,
    topology: Topology,
    waits: Callable[[str], None] = lambda sentence: None,
    access: BrokerAuth | None = None,
) -> AsyncIterator[OpenSource]:
    """Open the source as soon as it answers, however long that takes.

    Brokers are accessed by `access`, in plain text by default. `waits` is called periodically with the reason for
    waiting.

    Raises StartupError for errors that waiting does not resolve.
    """
    async with contextlib.AsyncExitStack() as stack:
        if config.ownership == "etcd":
            opened = await _open_etcd(config, topology, stack, waits, access or BrokerAuth())
        elif config.ownership == "kafka":
            opened = await _open_kafka(config, topology, stack, waits, access or BrokerAuth())
        else:
            opened = await _open_static(config, topology, stack)
        yield opened


async def _open_etcd(
    config: ProxyConfig,
    topology: Topology,
    stack: contextlib.AsyncExitStack,
    waits: Callable[[str], None],
    access: BrokerAuth,
) -> OpenSource:
    client = EtcdClient(config.etcd, config.etcd_options)
    stack.push_async_callback(client.close)
    table = LeaseTable(client, config.prefix, topology, access=access)
    await connect(client, lambda error: waits(f"{error} Start etcd, or give its address with --etcd."))
    following = _follow(table, stack)

    def reason() -> str:
        if table.last_error is None:
            return f"etcd at {client.endpoints} is handing out its partition leases."
        return f"etcd at {client.endpoints} answers, but its partition leases could not be read ({table.last_error})."

    await _loaded(table, following, lambda: waits(reason()))
    # Topic ids come from keys; later topics will have some.
    caps = _WITHOUT_TOPIC_IDS if topology.owned_count and not topology.topic_ids else NO_CAPS
    ids = IdBlocks(client, f"{config.prefix.rstrip('/')}/producer-ids")
    coordinators = LeasedCoordinators(table.directory.groups, topology)
    return OpenSource(table, retry.LEASED, following, f" etcd={client.endpoints}", caps, ids, coordinators)


async def _open_kafka(
    config: ProxyConfig,
    topology: Topology,
    stack: contextlib.AsyncExitStack,
    waits: Callable[[str], None],
    access: BrokerAuth,
) -> OpenSource:
    bootstrap = config.bootstrap
    metadata = KafkaMetadata(bootstrap, topology, interval_s=config.refresh_s, access=access)
    following = _follow(metadata, stack)
    where = ", ".join(map(str, config.bootstrap))

    def reason() -> str:
        why = metadata.last_error or "its metadata has not come yet"
        return f"no Kafka cluster answers at {where} ({why}): start it, or give others of its brokers with --bootstrap."

    await _loaded(metadata, following, lambda: waits(reason()))
    return OpenSource(metadata, retry.KAFKA, following, "", NO_CAPS, broker_lost=metadata.broker_lost)


async def _open_static(config: ProxyConfig, topology: Topology, stack: contextlib.AsyncExitStack) -> OpenSource:
    if config.owners is None:
        raise ValueError("the static ownership source needs the configuration's owners")
    table = StaticTable(topology, config.owners)
    return OpenSource(table, retry.KAFKA, _follow(table, stack), "", _WITHOUT_TOPIC_IDS)


async def _loaded(source: Source, following: asyncio.Task[None], waits: Callable[[], None]) -> None:
    """Wait until the source has its table."""
    patience_s = FIRST_PATIENCE_S
    while not await in_time(source.wait_synced(), following, patience_s):
        waits()
        patience_s = PATIENCE_S


def _follow(source: Source, stack: contextlib.AsyncExitStack) -> asyncio.Task[None]:
    task = asyncio.create_task(source.run())
    stack.push_async_callback(cancel, task)
    return task


class OwnerLookups:
    """Look up partitions' owners again for one client connection; each lookup is a task.

    Invariants
    1. One task for each partition. If the owner is requested again while its task waits, the task reads once more: the
       pending answer may be older than the latest refusal.
    2. No task begins after `close`, as it would have no owner.
    3. At most MAX_LOOKUPS tasks. The topology receives the result. A partition that gets no task is looked up after its
       next refusal.
    """

    __slots__ = ("_again", "_closed", "_context", "_tasks")

    def __init__(self, context: ProxyContext) -> None:
        self._context = context
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        # A dict: an empty set takes 216 bytes.
        self._again: dict[tuple[bytes, int], None] = {}
        self._closed = False

    def ask(self, topic: bytes, partition_index: int, routed_at: int) -> None:
        """Look up an owner, unless the source has reported a new one since version `routed_at`."""
        partition = (topic, partition_index)
        if self._context.topology.owner_version(topic, partition_index) > routed_at:
            return
        if partition in self._tasks:
            self._again[partition] = None
        elif len(self._tasks) < MAX_LOOKUPS and not self._closed:
            task = self._tasks[partition] = asyncio.ensure_future(self._refresh(partition))
            task.add_done_callback(lambda _: self._tasks.pop(partition, None))

    def is_under_way(self, topic: bytes, partition_index: int) -> bool:
        """Whether a lookup is running or would be repeated."""
        return (topic, partition_index) in self._tasks

    async def _refresh(self, partition: tuple[bytes, int]) -> None:
        topology = self._context.topology
        seen_revision = topology.owner_revision(*partition)
        is_wanted = True
        while is_wanted:
            self._again.pop(partition, None)
            topic, partition_index = partition
            # The source finds a topic id that the topology does not know.
            await self._context.source.refresh(topology.name_of(topic) or topic, partition_index, seen_revision)
            is_wanted = partition in self._again and topology.owner_revision(*partition) == seen_revision
        self._again.pop(partition, None)

    async def close(self) -> None:
        """Cancel all lookups, and begin none for acks=0 batches that are lost later."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

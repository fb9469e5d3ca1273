"""Read the reference brokers' replicas and ISRs from etcd, on demand.

They route no request, so no mirror is needed. A read sees one state of etcd, at one revision:

    {prefix}/refbroker/topics/{topic}                   "topic_id", "replicas" by partition, "configs"
    {prefix}/refbroker/partitions/{topic}/{partition}   "leader_epoch", "isr", "topic_id"
    {prefix}/partition-leases/{topic}/{partition}       the leader
    {prefix}/brokers/{id}                               the live brokers

A partition without a state, or with the state of an earlier topic of its name, has no row. If no topic has a key, as
with KafScale's brokers, the rest is not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from uuid import UUID

import msgspec

from kproxy.config.etcd import EtcdOptions
from kproxy.etcd import EtcdClient, EtcdError, KeyValue
from kproxy.observe.table import NO_LEADER, ReplicaRow, Replication
from kproxy.ownership.directory import PORTION_ENTRIES
from kproxy.ownership.lease_keys import InvalidEntry, parse_broker_key, parse_lease_key, parse_owner

FRESH_S = 1.0
# Shorter than the timeout of the admin page's clients.
TIMEOUT_S = 2.0
MIN_INSYNC_REPLICAS = "min.insync.replicas"


_Member = tuple[int, UUID]
"""A broker and the id of its log."""


class _Topic(msgspec.Struct, frozen=True):
    topic_id: UUID
    replicas: list[list[int]]
    configs: dict[str, str]


class _State(msgspec.Struct, frozen=True):
    leader_epoch: int
    isr: list[_Member]
    topic_id: UUID


def _min_insync_replicas(topic: _Topic, replicas: int) -> int:
    """The topic's min.insync.replicas; its default is that of brokers without --min-insync-replicas."""
    told = topic.configs.get(MIN_INSYNC_REPLICAS, "")
    wanted = int(told) if told.isdecimal() else 2 if replicas >= 3 else 1
    return min(wanted, replicas)


async def read_replication(client: EtcdClient, prefix: str) -> Replication:
    """Read the present replicas and ISRs. Skip invalid entries. Raises EtcdError."""
    root = prefix.rstrip("/")
    found = await client.get_prefix(f"{root}/refbroker/topics/")
    revision = found.revision
    topics: dict[str, tuple[_Topic, int]] = {}
    async for name, kv in _entries(found.kvs, f"{root}/refbroker/topics/"):
        try:
            topics[name] = msgspec.json.decode(kv.value, type=_Topic), kv.create_revision
        except msgspec.MsgspecError:
            continue
    if not topics:
        return Replication(revision, [], [])

    async def entries(prefix: str) -> AsyncIterator[tuple[str, KeyValue]]:
        snapshot = await client.get_prefix(prefix, revision=revision)
        async for entry in _entries(snapshot.kvs, prefix):
            yield entry

    live = {int(name) async for name, _ in entries(f"{root}/brokers/") if _is_broker(name)}
    owners = {name: kv async for name, kv in entries(f"{root}/partition-leases/")}
    rows = []
    async for name, kv in entries(f"{root}/refbroker/partitions/"):
        try:
            topic_name, partition = parse_lease_key(name)
            topic, create_revision = topics[topic_name.decode()]
            state = msgspec.json.decode(kv.value, type=_State)
            if state.topic_id != topic.topic_id:
                continue
            replicas = topic.replicas[partition]
        except (InvalidEntry, KeyError, IndexError, msgspec.MsgspecError):
            continue
        rows.append(
            ReplicaRow(
                topic_name.decode(),
                partition,
                _leader(owners.get(name), create_revision, live),
                state.leader_epoch,
                replicas,
                sorted({node_id for node_id, _ in state.isr}),
                _min_insync_replicas(topic, len(replicas)),
            )
        )
    return Replication(revision, sorted(live), sorted(rows, key=lambda row: row.place))


async def _entries(kvs: Sequence[KeyValue], prefix: str) -> AsyncIterator[tuple[str, KeyValue]]:
    """Yield each entry with its key after the prefix; let the event loop run in between."""
    for position, kv in enumerate(kvs):
        yield kv.key.removeprefix(prefix), kv
        if position % PORTION_ENTRIES == PORTION_ENTRIES - 1:
            await asyncio.sleep(0)


def _is_broker(name: str) -> bool:
    try:
        parse_broker_key(name)
    except InvalidEntry:
        return False
    return True


def _leader(lease: KeyValue | None, create_revision: int, live: set[int]) -> int:
    """The live broker in the lease key; a key older than the topic belongs to a deleted topic of the same name."""
    if lease is None or lease.mod_revision < create_revision:
        return NO_LEADER
    try:
        owner = parse_owner(lease.value)
    except InvalidEntry:
        return NO_LEADER
    return owner if owner in live else NO_LEADER


class ReplicationReader:
    """Reads the replicas on demand, at most once every FRESH_S. Connects to etcd on the first read."""

    def __init__(
        self, endpoints: Sequence[str], options: EtcdOptions, prefix: str, *, clock: Callable[[], float]
    ) -> None:
        self._client = EtcdClient(endpoints, options, timeout_s=TIMEOUT_S)
        self._prefix = prefix
        self._clock = clock
        self._connected = False
        self._at_work = asyncio.Lock()
        self._fresh_until = float("-inf")
        self._last: Replication | EtcdError | None = None

    async def read(self) -> Replication:
        """Return the replicas' state, from a read that is at most FRESH_S old. Raises EtcdError."""
        async with self._at_work:
            if self._last is None or self._clock() >= self._fresh_until:
                try:
                    if not self._connected:
                        await self._client.connect()
                        self._connected = True
                    self._last = await read_replication(self._client, self._prefix)
                except EtcdError as error:
                    self._last = error
                self._fresh_until = self._clock() + FRESH_S
            last = self._last
        if isinstance(last, EtcdError):
            raise last
        return last

    async def close(self) -> None:
        await self._client.close()

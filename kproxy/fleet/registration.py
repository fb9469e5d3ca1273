"""Register this proxy in etcd, so that other proxies name it to their clients.

The key is `{prefix}/kproxy/proxies/{id}`, on a lease of its own.

The value is JSON with node_id, host and port, and for a proxy with several listeners their advertised addresses by
name, `listeners`. `FleetView` (kproxy.fleet.view) reads the entries.

States
  out           there is no entry yet, or the lease was lost, or etcd does not answer
  registered    an entry with this address is on our lease
  standing by   an entry with this address is on the lease of another process; clients see the address anyway

Transitions
  out -> registered           the lowest free id is claimed; or an existing entry with this address is taken over: its
                              process has ended before its lease, or is a second live one
  registered -> out           the lease is gone, or the entry was deleted
  registered, out -> standing by   another process has the entry: two live processes advertise one address
  standing by -> registered   the other's entry has gone
  any -> out                  etcd does not answer; or `run` is cancelled, and revokes the lease before it ends

Invariants
1. An entry is created only if there is none, and replaced only if unchanged since it was read (by mod_revision), with
   the same address. So an id belongs to one address as long as the entry exists, and two addresses never share an id.
2. Of two live processes with one address the later one has the entry; the earlier never takes it back, so that the
   entry does not alternate. Both log this.
3. After every claim the lease holds the entry or is revoked. A lease that cannot be revoked ends by itself, and the
   entry on it has this address.
4. An unreachable etcd is asked again for ever.
"""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta

from kproxy.address import Address
from kproxy.etcd import EtcdClient, EtcdError, KeyValue, LeaseLost, TxnCompare, key_absent, mod_revision_is, put_op
from kproxy.etcd.lease import lease_keep_alive
from kproxy.ownership.lease_keys import InvalidEntry, parse_address, parse_broker_key
from kproxy.routing.fleet import FIRST_NODE_ID, Proxy


def proxies_prefix(prefix: str) -> str:
    """Return the prefix of the keys of all proxies; `prefix` is that of all keys."""
    return f"{prefix.rstrip('/')}/kproxy/proxies/"


Listeners = Mapping[str, tuple[str, int]]
"""Advertised addresses, host and port, by the names of listeners."""
NO_LISTENERS: Listeners = MappingProxyType({})


def encode_proxy(proxy: Proxy, listeners: Listeners = NO_LISTENERS) -> bytes:
    value: dict[str, object] = proxy._asdict()
    if listeners:
        value["listeners"] = {name: {"host": host, "port": port} for name, (host, port) in listeners.items()}
    return json.dumps(value).encode()


def parse_proxy_id(rest: str) -> int:
    """Parse the part of a key after the prefix. Raises InvalidEntry."""
    node_id = parse_broker_key(rest)
    if node_id < FIRST_NODE_ID:
        raise InvalidEntry("an id that does not belong to a proxy")
    return node_id


def parse_proxy(rest: str, value: bytes) -> Proxy:
    """Parse the part of a key after the prefix, and its value.

    Raises InvalidEntry.
    """
    node_id = parse_proxy_id(rest)
    host, port = parse_address(node_id, value)
    return Proxy(node_id, host, port)


# A configuration may have fewer; the rest is for later versions.
MAX_LISTENERS = 32


class _Address(msgspec.Struct):
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65_535)]


class _Entry(msgspec.Struct):
    listeners: dict[str, _Address] = {}


def parse_listeners(value: bytes) -> Listeners:
    """Parse the addresses by listener of an entry that `parse_proxy` accepts. Raises InvalidEntry."""
    try:
        listeners = msgspec.json.decode(value, type=_Entry).listeners
    except msgspec.MsgspecError as error:
        raise InvalidEntry("its listeners are not addresses") from error
    if len(listeners) > MAX_LISTENERS:
        raise InvalidEntry("too many listeners")
    return {name: (each.host, each.port) for name, each in listeners.items()}


# How often an entry is read within the lease's TTL.
LOOKS_PER_TTL = 4
RETRY_PAUSE_S = 0.5
# A stopping proxy does not wait longer for etcd, as its lease ends by itself.
REVOKE_TIMEOUT_S = 2.0

log = structlog.get_logger(__name__)


class RegistrarState(enum.Enum):
    OUT = "out"
    REGISTERED = "registered"
    STANDING_BY = "standing by"


@dataclass(eq=False)
class Registrar:
    """Registers the address `host`, `port` until cancelled.

    `run` is one coroutine that the caller owns.

    `listeners` are the addresses of its named listeners. `prefix` is that of all keys; `ttl_s` the lease's TTL in
    seconds, of which etcd may grant more.
    """

    client: EtcdClient
    prefix: str
    host: str
    port: int
    _: KW_ONLY
    ttl_s: int
    listeners: Listeners = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The prefix of the keys of all entries.
        self._entries = proxies_prefix(self.prefix)
        self._lease_id = 0
        self._key = ""
        self._entered = asyncio.Event()
        self.state = RegistrarState.OUT
        self.node_id: int | None = None
        self.last_error: EtcdError | None = None

    async def wait_entered(self) -> None:
        """Wait until an entry with this address, of any process, exists."""
        await self._entered.wait()

    async def run(self) -> None:
        """Keep the entry registered until cancelled."""
        may_take_over = True
        try:
            while True:
                try:
                    await self._claim(may_take_over=may_take_over)
                    if self.state is RegistrarState.REGISTERED:
                        may_take_over = await self._hold()
                    else:
                        await asyncio.sleep(self.ttl_s / LOOKS_PER_TTL)
                except EtcdError as error:
                    if self.last_error is None or self.state is not RegistrarState.OUT:
                        log.warning("proxy not registered", address=self._address, reason=str(error))
                    self.last_error = error
                    self.state = RegistrarState.OUT
                    await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            await self._give_up()

    @property
    def _address(self) -> str:
        return str(Address(self.host, self.port))

    # Claiming

    async def _claim(self, *, may_take_over: bool) -> None:
        """Register, or stand by. Raises EtcdError."""
        while True:
            entries = (await self.client.get_prefix(self._entries)).kvs
            mine = next((kv for kv in entries if self._is_mine(kv)), None)
            if mine is not None and not may_take_over:
                self._stand_by(mine)
                return
            node_id = self._lowest_free(entries) if mine is None else self._id_of(mine.key)
            key = f"{self._entries}{node_id}"
            absent_or_as_seen = key_absent(key) if mine is None else mod_revision_is(key, mine.mod_revision)
            if await self._put(node_id, key, absent_or_as_seen):
                self._registered(node_id, key, mine)
                return
            # Another process was faster: read the entries again.

    async def _put(self, node_id: int, key: str, condition: TxnCompare) -> bool:
        """Put the entry on a new lease if the condition holds; return whether it did."""
        lease = await self.client.lease_grant(self.ttl_s)
        self._lease_id, done = lease.lease_id, False
        try:
            value = encode_proxy(Proxy(node_id, self.host, self.port), self.listeners)
            done = (await self.client.txn([condition], [put_op(key, value, lease.lease_id)])).succeeded
        finally:
            if not done:
                await self._give_up()
        return done

    def _registered(self, node_id: int, key: str, replaced: KeyValue | None) -> None:
        self.state, self.node_id, self._key = RegistrarState.REGISTERED, node_id, key
        self.last_error = None
        self._entered.set()
        log.info("proxy registered", node_id=node_id, address=self._address)
        if replaced is not None:
            log.warning(
                "proxy entry taken over from another process",
                address=self._address,
                advice="if that process has not ended, give each proxy its own --advertise",
                node_id=node_id,
            )

    def _stand_by(self, held: KeyValue) -> None:
        self.state, self.node_id = RegistrarState.STANDING_BY, self._id_of(held.key)
        self.last_error = None
        self._entered.set()

    def _is_mine(self, kv: KeyValue) -> bool:
        try:
            return parse_proxy(kv.key.removeprefix(self._entries), kv.value).address == (self.host, self.port)
        except InvalidEntry:
            return False

    def _id_of(self, key: str) -> int:
        return parse_proxy_id(key.removeprefix(self._entries))

    def _lowest_free(self, entries: Sequence[KeyValue]) -> int:
        """Return the lowest id without an entry; an invalid entry takes its id too."""
        taken = {kv.key for kv in entries}
        node_id = FIRST_NODE_ID
        while f"{self._entries}{node_id}" in taken:
            node_id += 1
        return node_id

    # Holding

    async def _hold(self) -> bool:
        """Wait until the entry is no longer ours; return whether it may be taken over from its owner."""
        keeper = asyncio.create_task(
            lease_keep_alive(self.client, self._lease_id, clock=time.monotonic, on_renewed=lambda *_: None)
        )
        looker = asyncio.create_task(self._until_another_is_seen())
        try:
            await asyncio.wait((keeper, looker), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (keeper, looker):
                task.cancel()
            outcome = await asyncio.gather(keeper, looker, return_exceptions=True)
        self.state = RegistrarState.OUT
        seen = outcome[1]
        if isinstance(seen, KeyValue) and self._is_mine(seen):
            log.error(
                "another proxy registered with this address",
                address=self._address,
                advice="give each proxy its own --advertise; both serve under one name until one of them ends",
                node_id=self.node_id,
            )
            await self._give_up()
            return False
        for each in outcome:
            if isinstance(each, Exception) and not isinstance(each, LeaseLost):
                raise each
        log.warning("proxy entry lost", node_id=self.node_id, address=self._address)
        await self._give_up()
        return True

    async def _until_another_is_seen(self) -> KeyValue | None:
        """Wait for another entry in place of ours; return it, or None if there is none. Ignore failed reads."""
        while True:
            await asyncio.sleep(self.ttl_s / LOOKS_PER_TTL)
            try:
                found = await self.client.get(self._key)
            except EtcdError as error:
                log.debug("proxy entry not read", reason=str(error))
                continue
            if found is None or found.lease_id != self._lease_id:
                return found

    async def _give_up(self) -> None:
        """Revoke the lease, if any, and so remove the entry. If etcd does not answer, this is only logged."""
        lease_id, self._lease_id = self._lease_id, 0
        self.state = RegistrarState.OUT
        if lease_id:
            try:
                async with asyncio.timeout(REVOKE_TIMEOUT_S):
                    await self.client.lease_revoke(lease_id)
            except (EtcdError, TimeoutError) as error:
                log.warning("proxy lease not revoked", address=self._address, reason=str(error) or "no answer in time")

"""Find the coordinators of groups and transactions, and send requests to them.

Answers to clients name proxies as the only coordinators (kproxy.proxy.virtual_brokers). `Coordinators` remembers the
real coordinators from brokers' answers to FindCoordinator. Clients send it first, and again after NOT_COORDINATOR, so a
client's own request corrects an outdated entry.

Each of KafScale's brokers answers that it is the coordinator itself. With them a lease in etcd names a group's
coordinator: `LeasedCoordinators`. A group without a lease is coordinated by the broker that is asked first, which takes
the lease; every proxy asks the same one first.

`CoordinatorRequests` sends a client's request about one key once, to the known coordinator. If none is known (the
client's FindCoordinator was long ago, and the entry is forgotten), the proxy first sends FindCoordinator itself.
kproxy.proxy.distribution divides requests about several keys. The client acts on the answer, as in Kafka: a broker's
error code is passed on, and no answer becomes NOT_COORDINATOR, after which clients look for the coordinator
again and repeat the request. If brokers have no transactions, a transactional producer is refused at once, fatally.

Invariants
1. At most MAX_REMEMBERED coordinators, of keys of at most MAX_KEY_LENGTH characters, are remembered.
2. A coordinator whose connection was lost is forgotten.
3. Requests for one key are sent in the order in which they came. A client has one connection to each coordinator for
   them, which no other requests use: a JoinGroup may wait for minutes.
4. No leader epoch passes, in requests or in answers, so that none is compared with one of another source.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from kproxy.ownership.directory import GroupLeases
from kproxy.proxy.apis import APIS, REQUEST_KEY_TYPES
from kproxy.proxy.broker_connection import Lost, Upstream, ask
from kproxy.proxy.refusals import refusal
from kproxy.routing.rendezvous import preferred
from kproxy.routing.topology import Topology
from kproxy_codec import api_keys as keys
from kproxy_codec.coordination import (
    BATCHED_FROM,
    COMMIT_EPOCH_FROM,
    FETCH_EPOCH_FROM,
    GROUP,
    TELL_ERRORS,
    TRANSACTION,
    Found,
    blank_committed_epochs,
    coordination_key,
    error_codes,
    parse_find_coordinator,
)
from kproxy_codec.error_codes import (
    COORDINATOR_NOT_AVAILABLE,
    NONE,
    NOT_COORDINATOR,
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    UNSUPPORTED_VERSION,
)
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import RequestHeader, response_body_offset
from kproxy_codec.partitioned import set_correlation_id, set_response_correlation_id
from kproxy_codec.primitives import Buffer

if TYPE_CHECKING:
    # The context holds `Coordinators`.
    from kproxy.proxy.connections import Connections
    from kproxy.proxy.context import ProxyContext

log = structlog.get_logger(__name__)

MAX_REMEMBERED: Final = 10_000
MAX_KEY_LENGTH: Final = 1_000

NO_TRANSACTIONS: Final = "the brokers behind this proxy keep no transactions: produce without a transactional.id"


class Coordinators:
    """Remember the brokers that were last reported as coordinators of keys.

    The least recently used are forgotten first.
    """

    are_leased = False

    def __init__(self) -> None:
        self._brokers: dict[tuple[int, str], int] = {}

    def get(self, key_type: int, key: str) -> int | None:
        broker = self._brokers.pop((key_type, key), None)
        if broker is not None:
            self._brokers[key_type, key] = broker
        return broker

    def remember(self, key_type: int, key: str, broker: int) -> None:
        if len(key) > MAX_KEY_LENGTH:
            return
        self._brokers.pop((key_type, key), None)
        self._brokers[key_type, key] = broker
        if len(self._brokers) > MAX_REMEMBERED:
            del self._brokers[next(iter(self._brokers))]

    def refused(self, key_type: int, key: str, broker_id: int) -> None:
        """Do nothing: the client sends FindCoordinator again, and `take` gets the answer."""

    def forget(self, key_type: int, key: str) -> None:
        self._brokers.pop((key_type, key), None)

    def take(self, key_type: int, found: Found) -> None:
        """Record the coordinator in a broker's answer to FindCoordinator."""
        if found.error_code == NONE:
            self.remember(key_type, found.key, found.node_id)
        else:
            self.forget(key_type, found.key)


class LeasedCoordinators:
    """Read the coordinators of groups only from their leases.

    A group whose holder is gone waits for the end of its lease, as a partition does. A group without a lease is not
    offered again to a broker that refused it, such as a stopping one, unless all did. At most MAX_REMEMBERED refused
    groups are remembered.
    """

    are_leased = True

    def __init__(self, leases: GroupLeases, topology: Topology) -> None:
        self._leases = leases
        self._topology = topology
        self._refused_by: dict[str, frozenset[int]] = {}

    def get(self, key_type: int, key: str) -> int | None:
        if key_type != GROUP:
            return None
        holder = self._leases.holder(key)
        if holder is not None:
            self._refused_by.pop(key, None)
            return holder
        refused_by = self._refused_by.get(key, frozenset())
        takers = [broker_id for broker_id in self._topology.takers if broker_id not in refused_by]
        if not takers:
            self._refused_by.pop(key, None)
        return preferred(key.encode(errors="surrogateescape"), takers or self._topology.takers)

    def refused(self, key_type: int, key: str, broker_id: int) -> None:
        """Note that a broker does not coordinate a group."""
        if key_type != GROUP or self._leases.holder(key) is not None or len(key) > MAX_KEY_LENGTH:
            return
        self._refused_by[key] = self._refused_by.pop(key, frozenset()) | {broker_id}
        if len(self._refused_by) > MAX_REMEMBERED:
            del self._refused_by[next(iter(self._refused_by))]

    def forget(self, key_type: int, key: str) -> None:
        """Do nothing: the lease names the coordinator of a group."""

    def take(self, key_type: int, found: Found) -> None:
        """Do nothing: brokers' answers do not count."""


@dataclass
class CoordinatorRequests:
    """Send one client connection's requests to coordinators, on `connections`.

    `find` asks any broker for the coordinators of keys, and updates `context.coordinators`. `commits` is the
    connection's: it is held while a commit's epochs are removed, so that no later commit overtakes it.
    """

    context: ProxyContext
    connections: Connections
    find: Callable[[int, Sequence[str]], Awaitable[None]]
    commits: asyncio.Lock

    async def refuse_transactions(self, header: RequestHeader, body: memoryview) -> list[Buffer] | None:
        """Refuse a request about transactions if brokers have none.

        FindCoordinator is one of them. None for other requests. Raises CodecError.
        """
        if header.api_key == keys.FIND_COORDINATOR:
            key_type = parse_find_coordinator(header.api_version, body).key_type
        else:
            key = coordination_key(header.api_key, header.api_version, body)
            key_type = REQUEST_KEY_TYPES[APIS[header.api_key].handling] if key else GROUP
        if key_type != TRANSACTION or keys.END_TXN in self.context.brokers.offered.ranges:
            return None
        self.context.counters["transactions.refused"] += 1
        log.warning("transactional producer refused", reason=NO_TRANSACTIONS)
        return await self._refusal(header, body, _no_transactions_code(header))

    async def answer(self, frame: memoryview, header: RequestHeader, key: str) -> list[Buffer]:
        """Return the coordinator's answer, or a refusal. Raises CodecError."""
        api = APIS[header.api_key]
        key_type = REQUEST_KEY_TYPES[api.handling]
        body = frame[header.body_offset :]
        if header.api_version >= COMMIT_EPOCH_FROM.get(header.api_key, header.api_version + 1):
            async with self.commits:
                work = blank_committed_epochs(header.api_key, header.api_version, body)
                await self.context.portions.of(work, len(body))
        broker = (await self.brokers_for(key_type, [key]))[key]
        if broker is None:
            return await self._refusal(header, body, COORDINATOR_NOT_AVAILABLE)
        upstream = self.connections.to(broker)
        correlation_id = upstream.next_correlation_id()
        set_correlation_id(frame, correlation_id)
        try:
            async with asyncio.timeout(None if api.waits else self.context.limits.control_timeout_s):
                answer = await ask(upstream, correlation_id, [frame])
        except (Lost, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                upstream.give_up("it does not answer as a coordinator", "timeout")
            self.context.coordinators.forget(key_type, key)
            return await self._refusal(header, body, NOT_COORDINATOR)
        try:
            await self._inspect(header, answer, key, upstream)
        except CodecError as error:
            upstream.distrust(str(error))
            return await self._refusal(header, body, NOT_COORDINATOR)
        set_response_correlation_id(answer, header.correlation_id)
        return [answer]

    async def _inspect(self, header: RequestHeader, answer: memoryview, key: str, upstream: Upstream) -> None:
        """Replace leader epochs by -1, and note NOT_COORDINATOR. Raises CodecError."""
        api_key, version = header.api_key, header.api_version
        has_epochs = api_key == keys.OFFSET_FETCH and version >= FETCH_EPOCH_FROM
        coordinators = self.context.coordinators
        if not has_epochs and not (coordinators.are_leased and api_key in TELL_ERRORS):
            return
        body = answer[response_body_offset(answer, api_key, version) :]
        codes = await self.context.portions.of(error_codes(api_key, version, body, without_epochs=True), len(body))
        if coordinators.are_leased and NOT_COORDINATOR in codes:
            coordinators.refused(GROUP, key, upstream.owner)

    async def _refusal(self, header: RequestHeader, request_body: memoryview, error_code: int) -> list[Buffer]:
        """Build an answer with this error code everywhere. Raises CodecError."""
        return await refusal(self.context.portions, header, request_body, error_code, NO_TRANSACTIONS)

    async def brokers_for(self, key_type: int, names: Sequence[str]) -> dict[str, int | None]:
        """Return the coordinator of each key, whose address is known; None where there is none."""
        found = {name: self._broker_for(key_type, name) for name in names}
        unknown = [name for name, broker in found.items() if broker is None]
        if unknown and not self.context.coordinators.are_leased:
            await self.find(key_type, unknown)
            found |= {name: self._broker_for(key_type, name) for name in unknown}
        return found

    def _broker_for(self, key_type: int, key: str) -> int | None:
        broker = self.context.coordinators.get(key_type, key)
        return broker if broker is not None and self.context.topology.address(broker) is not None else None


def _no_transactions_code(header: RequestHeader) -> int:
    """Return a code that is fatal for the producer.

    librdkafka asks for one coordinator, and asks again for a minute after any code but
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED. Java asks for several, and shows the text that comes with any code but that.
    """
    if header.api_key == keys.FIND_COORDINATOR and header.api_version >= BATCHED_FROM:
        return UNSUPPORTED_VERSION
    return TRANSACTIONAL_ID_AUTHORIZATION_FAILED

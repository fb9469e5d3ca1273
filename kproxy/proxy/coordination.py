"""Requests about a transactional id or a group: they go to the broker that coordinates it.

A client's request is sent once, to the coordinator that `coordinators` names; where nothing is remembered (another
connection asked, long ago) the proxy asks first. What comes of it is the client's to act on, in the words of Kafka's
own protocol: a broker's error code is handed on, a lost connection becomes NOT_COORDINATOR, upon which clients look for
the coordinator anew and repeat themselves.

Where the brokers keep no transactions a transactional producer is told so at once, with a code that it takes as final.

Invariants
1. A coordinator that a connection was lost to is forgotten.
2. Requests for one key are sent in the order in which they came, on one connection, which nothing else uses: a
   JoinGroup may wait for minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

import structlog

from kproxy.proxy.broker_connection import Lost, Upstream, ask
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_response, encode_response
from kproxy_codec.coordination import (
    BATCHED_FROM,
    GROUP,
    REFUSED_BY_PARTITION,
    TELL_ERRORS,
    TRANSACTION,
    Found,
    answer_find_coordinator,
    coordination_key,
    error_codes,
    parse_find_coordinator,
    refuse_partitions,
)
from kproxy_codec.error_codes import (
    COORDINATOR_NOT_AVAILABLE,
    NOT_COORDINATOR,
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    UNSUPPORTED_VERSION,
)
from kproxy_codec.errors import CodecError
from kproxy_codec.headers import RequestHeader, response_body_offset, response_header
from kproxy_codec.partitioned import set_correlation_id, set_response_correlation_id, with_length
from kproxy_codec.primitives import Buffer

log = structlog.get_logger(__name__)

NO_TRANSACTIONS: Final = "the brokers behind this proxy keep no transactions: produce without a transactional.id"

# Of OffsetFetch: an error for the request as a whole, leader epochs.
_FETCH_ERROR_FROM: Final = 2
_FETCH_EPOCH_FROM: Final = 5


class Coordinated(NamedTuple):
    """The kind of key that a request is about, and whether the answer waits for others."""

    key_type: int
    waits: bool = False


COORDINATED: Final[Mapping[int, Coordinated]] = {
    keys.INIT_PRODUCER_ID: Coordinated(TRANSACTION),
    keys.ADD_PARTITIONS_TO_TXN: Coordinated(TRANSACTION),
    keys.ADD_OFFSETS_TO_TXN: Coordinated(TRANSACTION),
    keys.END_TXN: Coordinated(TRANSACTION),
    keys.TXN_OFFSET_COMMIT: Coordinated(GROUP),
    keys.OFFSET_COMMIT: Coordinated(GROUP),
    keys.OFFSET_FETCH: Coordinated(GROUP),
    keys.JOIN_GROUP: Coordinated(GROUP, waits=True),
    keys.HEARTBEAT: Coordinated(GROUP),
    keys.LEAVE_GROUP: Coordinated(GROUP),
    keys.SYNC_GROUP: Coordinated(GROUP, waits=True),
}


class Coordination:
    """The coordinated requests of one client connection.

    They go out on `connections`; `find` asks any broker who coordinates a key, so that `context.coordinators` knows.
    """

    def __init__(
        self,
        context: ProxyContext,
        connections: Connections,
        find: Callable[[int, str], Awaitable[None]],
    ) -> None:
        self._context = context
        self._connections = connections
        self._find = find

    async def refuses(self, header: RequestHeader, body: memoryview) -> list[Buffer] | None:
        """The final answer to a request about transactions, FindCoordinator included, where there are none.

        Raises CodecError.
        """
        if header.api_key == keys.FIND_COORDINATOR:
            key_type = parse_find_coordinator(header.api_version, body).key_type
        else:
            key = coordination_key(header.api_key, header.api_version, body)
            key_type = COORDINATED[header.api_key].key_type if key else GROUP
        if key_type != TRANSACTION or keys.END_TXN in self._context.versions.offered.ranges:
            return None
        self._context.counters["transactions.refused"] += 1
        log.warning("transactional producer refused", reason=NO_TRANSACTIONS)
        return await self._refusal(header, body, _no_transactions_code(header))

    async def answer(self, frame: memoryview, header: RequestHeader, key: str) -> list[Buffer]:
        """The coordinator's answer, or one that says that there is none at the moment. Raises CodecError."""
        key_type, waits = COORDINATED[header.api_key]
        body = frame[header.body_offset :]
        upstream = await self._upstream_for(key_type, key)
        if upstream is None:
            return await self._refusal(header, body, COORDINATOR_NOT_AVAILABLE)
        correlation_id = upstream.next_correlation_id()
        set_correlation_id(frame, correlation_id)
        try:
            async with asyncio.timeout(None if waits else self._context.limits.control_timeout_s):
                answer = await ask(upstream, correlation_id, [frame])
        except (Lost, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                upstream.give_up("it does not answer as a coordinator")
            self._context.coordinators.forget(key_type, key)
            return await self._refusal(header, body, NOT_COORDINATOR)
        try:
            await self._look_at(header, answer, key, upstream)
        except CodecError as error:
            upstream.distrust(str(error))
            return await self._refusal(header, body, NOT_COORDINATOR)
        set_response_correlation_id(answer, header.correlation_id)
        return [answer]

    async def _look_at(self, header: RequestHeader, answer: memoryview, key: str, upstream: Upstream) -> None:
        """Make leader epochs unknown, as in all answers of the proxy, and learn of a coordinator that is none any more.

        Raises CodecError.
        """
        api_key, version = header.api_key, header.api_version
        has_epochs = api_key == keys.OFFSET_FETCH and version >= _FETCH_EPOCH_FROM
        coordinators = self._context.coordinators
        if not has_epochs and not (coordinators.are_leased and api_key in TELL_ERRORS):
            return
        body = answer[response_body_offset(answer, api_key, version) :]
        codes = await self._context.portions.of(error_codes(api_key, version, body, without_epochs=True), len(body))
        if coordinators.are_leased and NOT_COORDINATOR in codes:
            coordinators.refused(GROUP, key, upstream.owner)

    async def _refusal(self, header: RequestHeader, request_body: memoryview, error_code: int) -> list[Buffer]:
        """An answer that gives this error wherever one of its kind can give one. Raises CodecError."""
        key, version = header.api_key, header.api_version
        head = response_header(key, version, header.correlation_id)
        if key == keys.FIND_COORDINATOR:
            work = answer_find_coordinator(
                version, request_body, lambda _, key: Found(key, -1, "", -1, error_code, NO_TRANSACTIONS)
            )
        elif key in REFUSED_BY_PARTITION and not (key == keys.OFFSET_FETCH and version >= _FETCH_ERROR_FROM):
            work = refuse_partitions(key, version, request_body, error_code)
        else:
            return with_length([head, encode_response(build_response(key, version, error_code=error_code))])
        return with_length([head, await self._context.portions.of(work, len(request_body))])

    async def _upstream_for(self, key_type: int, key: str) -> Upstream | None:
        """The connection to the coordinator; None where none is to be found."""
        coordinators, topology = self._context.coordinators, self._context.topology
        broker = coordinators.get(key_type, key)
        if not coordinators.are_leased and (broker is None or topology.address(broker) is None):
            await self._find(key_type, key)
            broker = coordinators.get(key_type, key)
        if broker is None or topology.address(broker) is None:
            return None
        return self._connections.to(broker)


def _no_transactions_code(header: RequestHeader) -> int:
    """A code that ends the producer at once.

    librdkafka asks for one coordinator and repeats itself for a minute after any code but this one. Java asks for
    several and would report this one without the text that goes with it; after any other it shows the text.
    """
    if header.api_key == keys.FIND_COORDINATOR and header.api_version >= BATCHED_FROM:
        return UNSUPPORTED_VERSION
    return TRANSACTIONAL_ID_AUTHORIZATION_FAILED

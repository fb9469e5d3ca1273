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
from typing import Any, Final, NamedTuple

import structlog

from codec import api_keys as keys
from codec.control import Message, build_response, decode_response, encode_response
from codec.error_codes import (
    COORDINATOR_NOT_AVAILABLE,
    NOT_COORDINATOR,
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    UNSUPPORTED_VERSION,
)
from codec.errors import CodecError
from codec.headers import RequestHeader, response_body_offset, response_header
from codec.partitioned import set_correlation_id, set_response_correlation_id, with_length
from codec.primitives import Buffer
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.coordinators import BATCHED_FROM, GROUP, TRANSACTION, key_type_of
from kproxy.proxy.question import Lost, ask
from kproxy.proxy.upstream import Upstream

log = structlog.get_logger(__name__)

NO_TRANSACTIONS: Final = "the brokers behind this proxy keep no transactions: produce without a transactional.id"

# Versions of OffsetFetch.
_FETCH_ERROR_FROM: Final = 2
_FETCH_EPOCH_FROM: Final = 5


class Coordinated(NamedTuple):
    """The kind of key that a request is about, the field it stands in, and whether the answer waits for others."""

    key_type: int
    field: str
    waits: bool = False


COORDINATED: Final[Mapping[int, Coordinated]] = {
    keys.INIT_PRODUCER_ID: Coordinated(TRANSACTION, "transactional_id"),
    keys.ADD_PARTITIONS_TO_TXN: Coordinated(TRANSACTION, "v3_and_below_transactional_id"),
    keys.ADD_OFFSETS_TO_TXN: Coordinated(TRANSACTION, "transactional_id"),
    keys.END_TXN: Coordinated(TRANSACTION, "transactional_id"),
    keys.TXN_OFFSET_COMMIT: Coordinated(GROUP, "group_id"),
    keys.OFFSET_COMMIT: Coordinated(GROUP, "group_id"),
    keys.OFFSET_FETCH: Coordinated(GROUP, "group_id"),
    keys.JOIN_GROUP: Coordinated(GROUP, "group_id", waits=True),
    keys.HEARTBEAT: Coordinated(GROUP, "group_id"),
    keys.LEAVE_GROUP: Coordinated(GROUP, "group_id"),
    keys.SYNC_GROUP: Coordinated(GROUP, "group_id", waits=True),
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

    def refuses(self, header: RequestHeader, request: Message) -> list[Buffer] | None:
        """The final answer to a request about transactions, FindCoordinator included, where there are none."""
        if header.api_key == keys.FIND_COORDINATOR:
            key_type = key_type_of(request)
        else:
            key_type = COORDINATED[header.api_key].key_type if coordination_key(header, request) else GROUP
        if key_type != TRANSACTION or keys.END_TXN in self._context.versions.offered.ranges:
            return None
        self._context.counters["transactions.refused"] += 1
        log.warning("transactional producer refused", reason=NO_TRANSACTIONS)
        return _refusal(header, request, _no_transactions_code(header))

    async def answer(self, frame: memoryview, header: RequestHeader, request: Message) -> list[Buffer]:
        """The coordinator's answer, or one that says that there is none at the moment."""
        key_type, _, waits = COORDINATED[header.api_key]
        key = coordination_key(header, request)
        upstream = await self._upstream_for(key_type, key)
        if upstream is None:
            return _refusal(header, request, COORDINATOR_NOT_AVAILABLE)
        correlation_id = upstream.next_correlation_id()
        set_correlation_id(frame, correlation_id)
        try:
            async with asyncio.timeout(None if waits else self._context.limits.control_timeout_s):
                answer = await ask(upstream, correlation_id, [frame])
        except (Lost, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                upstream.give_up("it does not answer as a coordinator")
            self._context.coordinators.forget(key_type, key)
            return _refusal(header, request, NOT_COORDINATOR)
        if self._context.coordinators.are_leased and _says_not_coordinator(header, answer):
            self._context.coordinators.refused(key_type, key, upstream.owner)
        if header.api_key == keys.OFFSET_FETCH and header.api_version >= _FETCH_EPOCH_FROM:
            try:
                return _without_epochs(header, answer)
            except CodecError as error:
                upstream.distrust(str(error))
                return _refusal(header, request, NOT_COORDINATOR)
        set_response_correlation_id(answer, header.correlation_id)
        return [answer]

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


def coordination_key(header: RequestHeader, request: Message) -> str:
    """The key that a request is about; empty where it is about none, as InitProducerId without a transactional id."""
    key: str | None = getattr(request, COORDINATED[header.api_key].field)
    return key or ""


def _says_not_coordinator(header: RequestHeader, answer: memoryview) -> bool:
    """Whether that is the answer. What cannot be read is left to the client."""
    try:
        body = answer[response_body_offset(answer, header.api_key, header.api_version) :]
        message = decode_response(header.api_key, header.api_version, body)
    except CodecError:
        return False
    if header.api_key == keys.OFFSET_COMMIT:
        return any(each.error_code == NOT_COORDINATOR for topic in message.topics for each in topic.partitions)
    return getattr(message, "error_code", None) == NOT_COORDINATOR


def _without_epochs(header: RequestHeader, answer: memoryview) -> list[Buffer]:
    """An answer to OffsetFetch with leader epochs unknown, as in every other answer of the proxy. Raises CodecError."""
    body = answer[response_body_offset(answer, header.api_key, header.api_version) :]
    message = decode_response(header.api_key, header.api_version, body)
    for topic in message.topics:
        for partition in topic.partitions:
            partition.committed_leader_epoch = -1
    head = response_header(header.api_key, header.api_version, header.correlation_id)
    return with_length([head, encode_response(message)])


def _refusal(header: RequestHeader, request: Message, error_code: int) -> list[Buffer]:
    """An answer that gives this error wherever one of its kind can give one."""
    fields = _REFUSALS.get(header.api_key, _refuse_all)(request, error_code)
    body = encode_response(build_response(header.api_key, header.api_version, **fields))
    return with_length([response_header(header.api_key, header.api_version, header.correlation_id), body])


def _refuse_all(request: Message, error_code: int) -> dict[str, Any]:
    return {"error_code": error_code}


def _refuse_to_find(request: Message, error_code: int) -> dict[str, Any]:
    refused = {"error_code": error_code, "error_message": NO_TRANSACTIONS, "node_id": -1, "host": "", "port": -1}
    if request.version < BATCHED_FROM:
        return refused
    return {"coordinators": [{**refused, "key": key} for key in request.coordinator_keys]}


def _refuse_partitions(request: Message, error_code: int) -> dict[str, Any]:
    topics = []
    for topic in request.v3_and_below_topics:
        refused = [{"partition_index": index, "partition_error_code": error_code} for index in topic.partitions]
        topics.append({"name": topic.name, "results_by_partition": refused})
    return {"results_by_topic_v3_and_below": topics}


def _refuse_to_fetch(request: Message, error_code: int) -> dict[str, Any]:
    if request.version >= _FETCH_ERROR_FROM:
        return {"error_code": error_code, "topics": []}
    topics = []
    for topic in request.topics or []:
        refused = [{"partition_index": index, "error_code": error_code} for index in topic.partition_indexes]
        topics.append({"name": topic.name, "partitions": refused})
    return {"topics": topics}


def _refuse_offsets(request: Message, error_code: int) -> dict[str, Any]:
    topics = []
    for topic in request.topics:
        refused = [{"partition_index": each.partition_index, "error_code": error_code} for each in topic.partitions]
        topics.append({"name": topic.name, "partitions": refused})
    return {"topics": topics}


_REFUSALS: Final[Mapping[int, Callable[[Message, int], dict[str, Any]]]] = {
    keys.FIND_COORDINATOR: _refuse_to_find,
    keys.ADD_PARTITIONS_TO_TXN: _refuse_partitions,
    keys.TXN_OFFSET_COMMIT: _refuse_offsets,
    keys.OFFSET_COMMIT: _refuse_offsets,
    keys.OFFSET_FETCH: _refuse_to_fetch,
}

"""The Own API at one client connection, and what claims mean for what the connection may write and read.

A topic with a writer group is written by whoever owns its partition in that group, and by nobody else: not being the
owner is POLICY_VIOLATION, which no client retries. Readers that are bound to a group keep each other out; who is bound
to none reads as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, Protocol

import structlog

from kproxy.claims.holdings import Holdings
from kproxy.claims.service import OwnService
from kproxy.claims.settlement import Settlement
from kproxy.config import ProxyConfig
from kproxy.etcd import EtcdClient, connect
from kproxy.proxy.binding import Binder, Releases
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.routing.split import NOTHING_REFUSED, Entry
from kproxy.runtime.tasks import cancel, in_time
from kproxy_codec.error_codes import POLICY_VIOLATION, UNKNOWN_TOPIC_ID
from kproxy_codec.headers import RequestHeader, response_header
from kproxy_codec.own import FenceBinding, encode_own_response, parse_own_request
from kproxy_codec.partitioned import PartitionedRequest, with_length
from kproxy_codec.primitives import Buffer

# An etcd that is there answers at once; a proxy without it serves as well, and grants nothing.
PATIENCE_S: Final = 2.0
# Of a client's id: so much of it is told to those who look at claims.
MAX_CLIENT_BYTES: Final = 100

log = structlog.get_logger(__name__)


class Respond(Protocol):
    """Takes the whole answer, or nothing once a request that has no answer (acks=0) is done with.

    `is_allowed` is asked when the answer's turn comes to be written.
    """

    def __call__(self, answer: list[Buffer], is_allowed: Callable[[], bool] | None = None, /) -> None: ...


class Owning:
    """The claims of one connection; `client` is what it is called, `sever` ends it."""

    def __init__(
        self,
        context: ProxyContext,
        own: OwnService,
        connections: Connections,
        client: str,
        sever: Callable[[str], None],
    ) -> None:
        self._context = context
        self._own = own
        self.holdings = own.connection(client, sever)
        self.binder = Binder(context, connections)
        self._is_claiming = False
        # What was read while it claims: whether that may be handed over is known when it has claimed.
        self._read_meanwhile: list[Callable[[], None]] = []

    async def answer(self, frame: memoryview, header: RequestHeader) -> list[Buffer]:
        """The whole answer to an Own request. Raises CodecError."""
        request = parse_own_request(frame, header)
        self._is_claiming = True
        try:
            response = await self._own.own(self.holdings, request, self._bind)
        finally:
            self._is_claiming = False
            read, self._read_meanwhile = self._read_meanwhile, []
            for hand_over in read:
                hand_over()
        body = encode_own_response(response, header.api_version)
        return with_length([response_header(header.api_key, header.api_version, header.correlation_id), body])

    async def _bind(self, bindings: list[FenceBinding], deadline: float) -> dict[tuple[str, int], int]:
        await self._context.versions.current()
        if not self._own.has_fences():
            return {}
        return await self.binder.bind(bindings, deadline)

    def read(self, request: PartitionedRequest, respond: Respond) -> tuple[Mapping[Entry, int], Respond]:
        """Entries of a fetch request that are refused, with the error code of each, and where its answer is to go.

        What is read while another one claims it is not handed over: the connection ends instead. What it claims itself
        meanwhile waits for that: the answer to the claim comes behind it in any case.
        """
        refused = refused_reads(self._own, self.holdings, request)
        if self.holdings.group is None:
            return refused, respond

        def is_allowed() -> bool:
            return refused_reads(self._own, self.holdings, request).keys() <= refused.keys()

        def respond_if_still_allowed(answer: list[Buffer], _: Callable[[], bool] | None = None) -> None:
            if is_allowed():
                # It may have to wait for answers to what was asked before.
                respond(answer, is_allowed)
            elif self._is_claiming:
                self._read_meanwhile.append(lambda: respond_if_still_allowed(answer))
            else:
                self.holdings.sever("what it was reading was claimed by another, or not granted in time")

        return refused, respond_if_still_allowed

    def end(self) -> None:
        """The connection has ended."""
        self._own.ended(self.holdings)


def refused_writes(own: OwnService, holdings: Holdings | None, request: PartitionedRequest) -> Mapping[Entry, int]:
    """The entries of a produce request that this connection may not write, with the error code of each."""
    refused: dict[Entry, int] = {}
    for topic_place, topic in enumerate(request.topics):
        group = own.gated.get(topic.name)
        if group is None:
            if request.is_nameless(topic):
                # It may turn out to be a gated one: let the client ask again, by then it has a name.
                refused |= dict.fromkeys(_entries(topic_place, len(topic.partitions)), UNKNOWN_TOPIC_ID)
            continue
        owns = holdings if holdings is not None and holdings.group == group and own.is_live() else None
        for ordinal, partition_index in enumerate(topic.partitions):
            if owns is None or not owns.write_fence(topic.name, partition_index):
                refused[topic_place, ordinal] = POLICY_VIOLATION
    return refused or NOTHING_REFUSED


def _entries(topic_place: int, count: int) -> list[Entry]:
    return [(topic_place, ordinal) for ordinal in range(count)]


def refused_reads(own: OwnService, holdings: Holdings, request: PartitionedRequest) -> Mapping[Entry, int]:
    """The entries of a fetch request that another connection of the same group has for itself."""
    group = holdings.group
    if group is None:
        return NOTHING_REFUSED
    refused: dict[Entry, int] = {}
    is_live = own.is_live()
    for topic_place, topic in enumerate(request.topics):
        for ordinal, partition_index in enumerate(topic.partitions):
            resource = f"{topic.name.decode(errors='replace')}/{partition_index}"
            if is_live and (holdings.may_read(resource) or own.table.owner(group, resource) is None):
                continue
            refused[topic_place, ordinal] = POLICY_VIOLATION
    return refused or NOTHING_REFUSED


@contextlib.asynccontextmanager
async def open_own(
    config: ProxyConfig, host: str, port: int, counters: Counter[str]
) -> AsyncIterator[OwnService | None]:
    """What claims are made with, where there is an etcd. Use `attach` once clients are about to be served.

    Raises StartupError for what waiting does not mend.
    """
    if not config.etcd:
        yield None
        return
    client = EtcdClient(config.etcd, config.etcd_options)
    own = OwnService(
        client,
        config.prefix,
        host,
        port,
        ttl_s=config.lease_ttl_s,
        writer_groups=config.writer_groups,
        timeout_s=config.limits.own_timeout_s,
        settlement=Settlement(config.writer_groups, time.monotonic, unsettled_s=config.limits.own_unsettled_s),
        counters=counters,
    )

    async def serve() -> None:
        await connect(client, lambda error: log.debug("etcd_not_connected", reason=str(error)))
        await own.run()

    own.running = serving = asyncio.create_task(serve())
    try:
        if not await in_time(own.wait_ready(), serving, PATIENCE_S):
            log.warning("etcd does not answer: until it does nothing can be claimed", etcd=client.endpoints)
        yield own
    finally:
        await own.all_freed()
        await cancel(serving)
        await client.close()


@contextlib.asynccontextmanager
async def attach(own: OwnService | None, context: ProxyContext) -> AsyncIterator[None]:
    """Let claims reach the brokers that `context` knows."""
    if own is None:
        yield
        return
    releases = Releases(context, own)
    own.releasing.tell = releases.add
    own.gates.partitions_of = lambda topic: context.topology.partition_indexes(topic.encode())
    own.has_fences = lambda: context.versions.fenced
    running = asyncio.create_task(releases.run())
    try:
        yield
    finally:
        await cancel(running)

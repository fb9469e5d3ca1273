"""Serve the Own API, refuse writes without a claim, and bind fences at the leaders.

If a topic has a writer group, only claimants of its partitions in that group may write to it: a produce request of any
other client gets POLICY_VIOLATION, which no client retries. Readers bound to a group exclude each other; other readers
read as usual.

A leader that knows fences (kproxy_codec.own, BindFences) serves a connection's requests in order: a batch that is sent
after a binding is checked against its fence. So a claim is bound when it is made, on the connection of its client's
writes, and again before the first batch on every other connection to the current leader.

Invariants
1. On a connection to a broker that may keep fences, no batch for a claimed partition precedes a binding of its fence.
2. A binding that failed counts as none: the next batch is preceded by another.
3. At most MAX_RELEASES releases of fences wait; more are dropped. A partition that is claimed again is not released.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from kproxy.claims.connection import ClaimingConnection
from kproxy.claims.inflight_writes import InflightWrites
from kproxy.claims.release import Release
from kproxy.claims.service import OwnService
from kproxy.config import ProxyConfig
from kproxy.etcd import EtcdClient, connect
from kproxy.proxy.answer_reader import QuietTicket
from kproxy.proxy.broker_connection import Lost, Upstream, ask
from kproxy.proxy.connections import Connections, NoAddress
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.sources import OwnerLookups
from kproxy.routing.actions import Fenced
from kproxy.routing.retry import BrokerSemantics
from kproxy.routing.split import NOTHING_REFUSED, Entry, route
from kproxy.routing.topology import NO_OWNER, Address, Topology
from kproxy.runtime.tasks import cancel, in_time
from kproxy_codec.api_keys import BIND_FENCES
from kproxy_codec.error_codes import (
    NONE,
    POLICY_VIOLATION,
    REQUEST_TIMED_OUT,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import RequestHeader, request_header
from kproxy_codec.own import (
    BIND_FENCES_VERSION,
    MAX_RESOURCES,
    FenceBinding,
    encode_bind_fences_request,
    encode_own_response,
    parse_bind_fences_response,
    parse_own_request,
)
from kproxy_codec.partitioned import PartitionedRequest, with_length
from kproxy_codec.primitives import Buffer

if TYPE_CHECKING:
    from kproxy.proxy.client_session import ClientSession

# How long a starting proxy waits for etcd. Without etcd it serves, but grants no claims.
ETCD_WAIT_S: Final = 2.0
# How much of a client's id is shown in lists of claims.
MAX_CLIENT_BYTES: Final = 100
MAX_RELEASES: Final = 10_000
RELEASE_TIMEOUT_S: Final = 30.0
ATTEMPT_TIMEOUT_S: Final = 5.0
FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.5
_CLIENT_ID: Final = b"kproxy-own"
# Error codes of a binding that a retry does not change.
_FINAL: Final = frozenset({NONE, POLICY_VIOLATION, UNKNOWN_TOPIC_OR_PARTITION})

Partition = tuple[str, int]
log = structlog.get_logger(__name__)


class NoClaims(Exception):
    """Raised for an Own request where no etcd is configured."""


class Respond(Protocol):
    """Receives the whole answer, or nothing at the end of a request without an answer (acks=0).

    `is_allowed` is called just before the answer is written.
    """

    def __call__(self, answer: list[Buffer], is_allowed: Callable[[], bool] | None = None, /) -> None: ...


class ClientClaims:
    """Serves Own requests of one client connection, if there is a service for them.

    It is also all that the core of the connection reads besides its events (kproxy.routing.actions.View).
    """

    __slots__ = (
        "_client",
        "_connections",
        "_context",
        "_is_claiming",
        "_lookups",
        "_own",
        "_pending_reads",
        "connection",
        "topology",
    )

    def __init__(
        self, context: ProxyContext, connections: Connections, client: ClientSession, lookups: OwnerLookups
    ) -> None:
        self._context = context
        self._lookups = lookups
        self.topology: Topology = context.topology
        self._own = context.own
        self._connections = connections
        self._client = client
        # Its claims; None before the first Own request.
        self.connection: ClaimingConnection | None = None
        self._is_claiming = False
        # Fetch answers that arrived during a claim; its outcome decides whether the client may have them.
        self._pending_reads: Sequence[Callable[[], None]] = ()

    # The view of the core

    @property
    def semantics(self) -> BrokerSemantics:
        return self._context.semantics

    @property
    def keeps_producer_state(self) -> bool:
        return self._context.keeps_producer_state

    @property
    def gated(self) -> Collection[bytes]:
        return self._own.unsettled.topics if self._own is not None and self._own.gated else ()

    @property
    def fenced(self) -> bool:
        return self._context.brokers.fenced

    @property
    def has_claims(self) -> bool:
        return self.connection is not None

    @property
    def max_nameless(self) -> int:
        return self._context.limits.max_open_requests

    def is_reread(self, topic: bytes, partition_index: int) -> bool:
        return self._lookups.is_under_way(topic, partition_index)

    def is_hung(self, address: Address | None) -> bool:
        return self._context.brokers.is_hung(address)

    def write_fence(self, topic: bytes, partition_index: int) -> int:
        """Return the fence for writes to a gated partition; 0 if the client may not write."""
        return self.connection.write_fence(topic, partition_index) if self.connection is not None else 0

    # Claims

    @property
    def binder(self) -> FenceBinder:
        """Binds fences on the client's connections."""
        return FenceBinder(self._context, self._connections)

    def have_lapsed(self) -> bool:
        """Whether another client may have this client's claims by now.

        Admitted requests wait for a dial or a retry, and this process may have been suspended.
        """
        own, connection = self._own, self.connection
        return own is not None and connection is not None and connection.group is not None and not own.is_live()

    def gates(self, request: PartitionedRequest) -> bool:
        """Whether a topic of the request has a writer group."""
        return self._own is not None and any(topic.name in self._own.gated for topic in request.topics)

    def lapse(self) -> None:
        """End the client's connection because its claims have lapsed."""
        if self.connection is not None:
            reason = "another client may have its claims by now: the proxy's lease in etcd is not certain to live"
            self.connection.sever(reason)

    async def answer(self, frame: memoryview, header: RequestHeader, client: str) -> Buffer:
        """Return the body of an answer to Own; `client` is the client's name. Raises CodecError, NoClaims."""
        if self._own is None:
            raise NoClaims("the proxy keeps no claims, because it has no etcd (--etcd URL)")
        if self.connection is None:
            self.connection = self._own.connection(client, self._client.sever)
        request = parse_own_request(frame, header)
        self._is_claiming = True
        try:
            response = await self._own.own(self.connection, request, self._bind)
        finally:
            self._is_claiming = False
            pending, self._pending_reads = self._pending_reads, ()
            for respond in pending:
                respond()
        return encode_own_response(response, header.api_version)

    async def _bind(self, bindings: list[FenceBinding], deadline: float) -> dict[tuple[str, int], int]:
        await self._context.brokers.current()
        if self._own is None or not self._own.brokers.have_fences():
            return {}
        return await self.binder.bind(bindings, deadline)

    def read(self, request: PartitionedRequest, respond: Respond) -> tuple[Mapping[Entry, int], Respond]:
        """Return the refused entries of a fetch request, with error codes, and the callback for its answer.

        If another connection claims a partition while it is read, the client does not get the answer: the connection
        ends instead. If this connection claims meanwhile, the answer waits for the claim; the answer to the claim comes
        after it.
        """
        own, connection = self._own, self.connection
        if own is None or connection is None or connection.group is None:
            return NOTHING_REFUSED, respond
        refused = refused_reads(own, connection, request)

        def is_allowed() -> bool:
            return refused_reads(own, connection, request).keys() <= refused.keys()

        def respond_if_still_allowed(answer: list[Buffer], _: Callable[[], bool] | None = None) -> None:
            if is_allowed():
                # It may need to wait for answers to earlier requests.
                respond(answer, is_allowed)
            elif self._is_claiming:
                self._pending_reads = (*self._pending_reads, lambda: respond_if_still_allowed(answer))
            else:
                connection.sever("another client claimed a partition that it was reading, or its claim failed")

        return refused, respond_if_still_allowed

    def end(self) -> None:
        """Free the claims, because the connection has ended."""
        if self._own is not None and self.connection is not None:
            self._own.ended(self.connection)


def refused_writes(
    own: OwnService, connection: ClaimingConnection | None, request: PartitionedRequest
) -> Mapping[Entry, int]:
    """Return the entries of a produce request that this connection may not write, with error codes."""
    refused: dict[Entry, int] = {}
    for topic_place, topic in enumerate(request.topics):
        group = own.gated.get(topic.name)
        if group is None:
            if request.is_nameless(topic):
                # The topic may be gated: the client retries, and the name is known by then.
                entries = ((topic_place, ordinal) for ordinal in range(len(topic.partitions)))
                refused |= dict.fromkeys(entries, UNKNOWN_TOPIC_ID)
            continue
        owns = connection if connection is not None and connection.group == group and own.is_live() else None
        for ordinal, partition_index in enumerate(topic.partitions):
            if owns is None or not owns.write_fence(topic.name, partition_index):
                refused[topic_place, ordinal] = POLICY_VIOLATION
    return refused or NOTHING_REFUSED


def refused_reads(own: OwnService, connection: ClaimingConnection, request: PartitionedRequest) -> Mapping[Entry, int]:
    """Return the entries of a fetch request that others of the group own, or may own, with error codes."""
    group = connection.group
    if group is None:
        return NOTHING_REFUSED
    refused: dict[Entry, int] = {}
    is_live = own.is_live()
    for topic_place, topic in enumerate(request.topics):
        is_nameless = request.is_nameless(topic)
        for ordinal, partition_index in enumerate(topic.partitions):
            resource = f"{topic.name.decode(errors='replace')}/{partition_index}"
            if is_nameless:
                # It may be claimed: the client retries, and the name is known by then.
                refused[topic_place, ordinal] = UNKNOWN_TOPIC_ID
            elif not is_live or not (connection.may_read(resource) or own.table.owner(group, resource) is None):
                refused[topic_place, ordinal] = POLICY_VIOLATION
    return refused or NOTHING_REFUSED


def _request(correlation_id: int, bindings: Sequence[FenceBinding]) -> list[Buffer]:
    head = request_header(BIND_FENCES, BIND_FENCES_VERSION, correlation_id, _CLIENT_ID)
    return with_length([head, encode_bind_fences_request(bindings)])


class _BindingTicket(QuietTicket):
    """The ticket of a binding before a batch. Its answer only updates `Upstream.fences`; the batch's says more."""

    def __init__(self, upstream: Upstream, bindings: Sequence[FenceBinding]) -> None:
        self._upstream = upstream
        self._bindings = bindings

    def answered(self, frame: memoryview) -> None:
        _record(self._upstream, self._bindings, _codes(self._upstream, frame))


def _codes(upstream: Upstream, frame: memoryview) -> dict[Partition, int]:
    try:
        return {(each.topic, each.partition_index): each.error_code for each in parse_bind_fences_response(frame)}
    except CodecError as error:
        upstream.distrust(str(error))
        return {}


def _record(upstream: Upstream, bindings: Iterable[FenceBinding], codes: dict[Partition, int]) -> None:
    """Record in `upstream.fences` the fences that are bound on the connection."""
    for binding in bindings:
        partition = binding.topic.encode(), binding.partition_index
        if codes.get(binding[:2]) != NONE or binding.is_released:
            if upstream.fences.get(partition) == binding.fence:
                del upstream.fences[partition]
        else:
            upstream.fences[partition] = binding.fence


class FenceBinder:
    """Binds fences on `connections`."""

    def __init__(self, context: ProxyContext, connections: Connections) -> None:
        self._context = context
        self._connections = connections

    def before(self, upstream: Upstream, fences: Iterable[Fenced]) -> None:
        """Bind the fences of a batch that is about to be sent on `upstream` (invariant 1)."""
        if not self._context.brokers.may_have_fences(upstream.owner):
            return
        bindings = []
        for partition, fence in fences:
            if upstream.fences.get(partition) != fence:
                upstream.fences[partition] = fence
                bindings.append(FenceBinding(partition[0].decode(), partition[1], fence))
        if bindings:
            correlation_id = upstream.next_correlation_id()
            upstream.send(_BindingTicket(upstream, bindings), correlation_id, _request(correlation_id, bindings))

    async def bind(self, bindings: Sequence[FenceBinding], deadline: float) -> dict[Partition, int]:
        """Bind at the leaders; return an error code for each partition.

        The code is REQUEST_TIMED_OUT where no leader has decided by the deadline (in seconds of the event loop's
        clock). If a leader moves, the new one is asked.
        """
        loop = asyncio.get_running_loop()
        codes: dict[Partition, int] = {binding[:2]: REQUEST_TIMED_OUT for binding in bindings}
        refused_by: dict[Partition, set[int]] = {}
        pending, pause = list(bindings), FIRST_PAUSE_S
        while pending and loop.time() < deadline:
            by_leader: dict[int, list[FenceBinding]] = {}
            for binding in pending:
                by_leader.setdefault(self._leader(binding, refused_by), []).append(binding)
            by_leader.pop(NO_OWNER, None)
            routed_at = self._context.topology.version
            answers = await asyncio.gather(*(self._ask(*each, deadline) for each in by_leader.items()))
            for leader, answer in zip(by_leader, answers, strict=True):
                for partition, code in answer.items():
                    codes[partition] = code if code in _FINAL else REQUEST_TIMED_OUT
                    if code not in _FINAL:
                        refused_by.setdefault(partition, set()).add(leader)
            pending = [each for each in pending if codes[each[:2]] not in _FINAL]
            if pending:
                if routed_at == self._context.topology.version:
                    await self._refresh_leader(pending, deadline)
                await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return codes

    def _leader(self, binding: FenceBinding, refused_by: dict[Partition, set[int]]) -> int:
        topic, partition_index = binding.topic.encode(), binding.partition_index
        return route(
            self._context.topology, topic, partition_index, refused_by=refused_by.get(binding[:2], frozenset())
        )

    async def _ask(self, leader: int, bindings: Sequence[FenceBinding], deadline: float) -> dict[Partition, int]:
        """Return the leader's error codes; those received so far if it does not answer."""
        loop = asyncio.get_running_loop()
        said: dict[Partition, int] = {}
        for start in range(0, len(bindings), MAX_RESOURCES):
            some = bindings[start : start + MAX_RESOURCES]
            try:
                upstream = self._connections.to(leader)
                correlation_id = upstream.next_correlation_id()
                timeout_s = min(ATTEMPT_TIMEOUT_S, max(0.0, deadline - loop.time()))
                async with asyncio.timeout(timeout_s):
                    frame = await ask(upstream, correlation_id, _request(correlation_id, some))
            except (Lost, NoAddress, TimeoutError) as error:
                log.info(
                    "fences not bound", broker=leader, partitions=len(some), reason=str(error) or type(error).__name__
                )
                return said
            codes = _codes(upstream, frame)
            _record(upstream, some, codes)
            said |= codes
        return said

    async def _refresh_leader(self, bindings: Sequence[FenceBinding], deadline: float) -> None:
        """Refresh the leader of the first partition; one refresh updates the topology for all."""
        topic, partition_index = bindings[0].topic.encode(), bindings[0].partition_index
        seen_revision = self._context.topology.owner_revision(topic, partition_index)
        try:
            async with asyncio.timeout(min(1.0, max(0.0, deadline - asyncio.get_running_loop().time()))):
                await self._context.source.refresh(topic, partition_index, seen_revision)
        except TimeoutError:
            return


class ProxyBrokers:
    """The brokers that `context` knows, as claims need them. The caller owns the coroutine `run`."""

    def __init__(self, context: ProxyContext, own: OwnService) -> None:
        self._own = own
        self._context = context
        self._connections = Connections(context)
        self._binder = FenceBinder(context, self._connections)
        self._waiting: dict[Partition, int] = {}
        self._wake = asyncio.Event()

    def have_fences(self) -> bool:
        return self._context.brokers.fenced

    def partition_indexes(self, topic: str) -> Collection[int]:
        return self._context.topology.partition_indexes(topic.encode())

    def release(self, release: Release) -> None:
        if len(self._waiting) < MAX_RELEASES and self.have_fences():
            self._waiting[release.topic, release.partition_index] = release.revision
            self._wake.set()

    async def run(self) -> None:
        """Release until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                waiting, self._waiting = self._waiting, {}
                bindings = [
                    FenceBinding(*partition, revision, is_released=True)
                    for partition, revision in waiting.items()
                    if not self._own.releases.is_owned(*partition)
                ]
                codes = await self._binder.bind(bindings, loop.time() + RELEASE_TIMEOUT_S) if bindings else {}
                failed = [partition for partition, code in codes.items() if code not in _FINAL]
                self._context.counters["own.released"] += len(codes) - len(failed)
                if failed:
                    log.warning("partitions not released at their leaders", partitions=len(failed), first=failed[0])
        finally:
            await self._connections.close()


@contextlib.asynccontextmanager
async def open_own(
    config: ProxyConfig, host: str, port: int, counters: Counter[str]
) -> AsyncIterator[OwnService | None]:
    """Run the Own API if there is an etcd. Call `attach` before serving clients.

    Raises StartupError for errors that waiting does not resolve.
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
        unsettled=InflightWrites(config.writer_groups, time.monotonic, unsettled_s=config.limits.own_unsettled_s),
        counters=counters,
    )

    async def serve() -> None:
        await connect(client, lambda error: log.debug("etcd not connected", reason=str(error)))
        await own.run()

    own.running = serving = asyncio.create_task(serve())
    try:
        if not await in_time(own.wait_ready(), serving, ETCD_WAIT_S):
            log.warning("etcd not answering", consequence="nothing can be claimed until it does", etcd=client.endpoints)
        yield own
    finally:
        await own.all_freed()
        await cancel(serving)
        await client.close()


@contextlib.asynccontextmanager
async def attach(own: OwnService | None, context: ProxyContext) -> AsyncIterator[None]:
    """Connect the Own API to the brokers that `context` knows."""
    if own is None:
        yield
        return
    brokers = ProxyBrokers(context, own)
    own.brokers.attach(brokers)
    running = asyncio.create_task(brokers.run())
    try:
        yield
    finally:
        await cancel(running)

"""Fences at the leaders of partitions: bound on the connections that writes go out on, and released.

A leader that knows fences (kproxy_codec.own, BindFences) serves a connection's requests in order: what is sent behind a
binding stands behind its fence. So a claim is bound when it is made, on the connection that its client's writes take,
and again before the first batch on every other connection to whoever leads by then.

Invariants
1. Nothing of a claimed partition is sent on a connection before a binding of its fence.
2. A binding that failed counts as none: the next batch is preceded by another.
3. At most MAX_RELEASES wait; a release that a later claim has made pointless is not sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

import structlog

from kproxy.claims.holdings import Holdings
from kproxy.claims.releasing import Release
from kproxy.claims.service import OwnService
from kproxy.proxy.broker_connection import Lost, Upstream, ask
from kproxy.proxy.connections import Connections, NoAddress
from kproxy.proxy.context import ProxyContext
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Selection, route
from kproxy.routing.topology import NO_OWNER
from kproxy_codec.api_keys import BIND_FENCES
from kproxy_codec.error_codes import (
    NONE,
    POLICY_VIOLATION,
    REQUEST_TIMED_OUT,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from kproxy_codec.errors import CodecError
from kproxy_codec.headers import request_header
from kproxy_codec.own import (
    BIND_FENCES_VERSION,
    MAX_RESOURCES,
    FenceBinding,
    encode_bind_fences_request,
    parse_bind_fences_response,
)
from kproxy_codec.partitioned import with_length
from kproxy_codec.primitives import Buffer

MAX_RELEASES: Final = 10_000
RELEASE_TIMEOUT_S: Final = 30.0
ATTEMPT_TIMEOUT_S: Final = 5.0
FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.5
_CLIENT_ID: Final = b"kproxy-own"
# What no other attempt changes.
_FINAL: Final = frozenset({NONE, POLICY_VIOLATION, UNKNOWN_TOPIC_OR_PARTITION})

Partition = tuple[str, int]
log = structlog.get_logger(__name__)


def _request(correlation_id: int, bindings: Sequence[FenceBinding]) -> list[Buffer]:
    head = request_header(BIND_FENCES, BIND_FENCES_VERSION, correlation_id, _CLIENT_ID)
    return with_length([head, encode_bind_fences_request(bindings)])


class _BoundBefore:
    """The ticket of a binding that goes before a batch: nobody waits for it, the batch's own answer says more."""

    expects_answer = True
    may_wait_until = -inf

    def __init__(self, upstream: Upstream, bindings: Sequence[FenceBinding]) -> None:
        self._upstream = upstream
        self._bindings = bindings

    def sent(self) -> None:
        """Never said: it has an answer."""

    def unconfirmed(self) -> None:
        """Never said, for the same reason."""

    def answered(self, frame: memoryview) -> None:
        _note(self._upstream, self._bindings, _codes(self._upstream, frame))

    def lost(self, *, written: bool) -> None:
        """With the connection, and so is what was bound on it."""


def _codes(upstream: Upstream, frame: memoryview) -> dict[Partition, int]:
    try:
        return {(each.topic, each.partition_index): each.error_code for each in parse_bind_fences_response(frame)}
    except CodecError as error:
        upstream.distrust(str(error))
        return {}


def _note(upstream: Upstream, bindings: Iterable[FenceBinding], codes: dict[Partition, int]) -> None:
    """Remember what is bound on a connection."""
    for binding in bindings:
        partition = binding.topic.encode(), binding.partition_index
        if codes.get(binding[:2]) != NONE or binding.is_released:
            if upstream.fences.get(partition) == binding.fence:
                del upstream.fences[partition]
        else:
            upstream.fences[partition] = binding.fence


class Binder:
    """Binds on `connections`."""

    def __init__(self, context: ProxyContext, connections: Connections) -> None:
        self._context = context
        self._connections = connections

    def before(self, upstream: Upstream, exchange: Exchange, selection: Selection, holdings: Holdings) -> None:
        """Have a batch that is about to be sent on `upstream` stand behind its fences."""
        if not self._context.versions.may_have_fences(upstream.owner):
            return
        bindings = []
        for topic_place, ordinals in selection:
            topic = exchange.request.topics[topic_place]
            for ordinal in ordinals:
                partition = topic.name, topic.partitions[ordinal]
                fence = holdings.write_fence(*partition)
                if fence and upstream.fences.get(partition) != fence:
                    upstream.fences[partition] = fence
                    bindings.append(FenceBinding(topic.name.decode(), partition[1], fence))
        if bindings:
            correlation_id = upstream.next_correlation_id()
            upstream.send(_BoundBefore(upstream, bindings), correlation_id, _request(correlation_id, bindings))

    async def bind(self, bindings: Sequence[FenceBinding], deadline: float) -> dict[Partition, int]:
        """An error code for each partition, REQUEST_TIMED_OUT where no leader has said yes or no by the deadline.

        `deadline` is in seconds of the event loop's clock. A leader that moves is followed.
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
                    await self._look_again(pending, deadline)
                await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return codes

    def _leader(self, binding: FenceBinding, refused_by: dict[Partition, set[int]]) -> int:
        topic, partition_index = binding.topic.encode(), binding.partition_index
        return route(
            self._context.topology, topic, partition_index, refused_by=refused_by.get(binding[:2], frozenset())
        )

    async def _ask(self, leader: int, bindings: Sequence[FenceBinding], deadline: float) -> dict[Partition, int]:
        """What the leader says; nothing where it does not."""
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
                log.info("fences not bound", broker=leader, partitions=len(some), reason=repr(error))
                return said
            codes = _codes(upstream, frame)
            _note(upstream, some, codes)
            said |= codes
        return said

    async def _look_again(self, bindings: Sequence[FenceBinding], deadline: float) -> None:
        """Have the source say anew who leads the first of them: that it does once is a sign for all."""
        topic, partition_index = bindings[0].topic.encode(), bindings[0].partition_index
        seen_revision = self._context.topology.owner_revision(topic, partition_index)
        try:
            async with asyncio.timeout(min(1.0, max(0.0, deadline - asyncio.get_running_loop().time()))):
                await self._context.source.refresh(topic, partition_index, seen_revision)
        except TimeoutError:
            return


class Releases:
    """Tells leaders of partitions that nobody owns any more. `run` is one coroutine that the caller owns."""

    def __init__(self, context: ProxyContext, own: OwnService) -> None:
        self._own = own
        self._context = context
        self._connections = Connections(context, lambda slow: None)
        self._binder = Binder(context, self._connections)
        self._waiting: dict[Partition, int] = {}
        self._wake = asyncio.Event()

    def add(self, release: Release) -> None:
        """Released as soon as its leader can be told."""
        if len(self._waiting) < MAX_RELEASES and self._own.has_fences():
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
                    if not self._own.releasing.is_owned(*partition)
                ]
                codes = await self._binder.bind(bindings, loop.time() + RELEASE_TIMEOUT_S) if bindings else {}
                failed = [partition for partition, code in codes.items() if code not in _FINAL]
                self._context.counters["own.released"] += len(codes) - len(failed)
                if failed:
                    log.warning("partitions not released at their leaders", partitions=len(failed), first=failed[0])
        finally:
            await self._connections.close()

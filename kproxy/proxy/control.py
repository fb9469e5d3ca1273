"""Requests about the cluster: a broker answers them, and the proxy sees to it that only proxies are named.

ApiVersions is answered here, from what the proxy and all its brokers serve. Everything else goes to one broker as
received. A broker that cannot be reached, does not answer or answers nonsense is passed over for the next one; a
request that may have been carried out and must not be twice is given up instead, and the client's connection closed,
which is what the client would have seen of the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from typing import Any, Final, TypeVar

from kproxy.proxy.broker_connection import Lost, Upstream, ask
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.coordination import Coordination
from kproxy.proxy.naming import named, renamed
from kproxy.proxy.native import answer_natively, lacks_producer_id
from kproxy.proxy.versions import OFFERS, Handling, Offered, Ranges
from kproxy.routing.rendezvous import preferred
from kproxy.routing.topology import Address
from kproxy_codec import api_keys as keys
from kproxy_codec.api_keys import is_flexible
from kproxy_codec.cluster import ASK_ANOTHER, Named, asks_for_all_topics, leaderless_metadata, rename_brokers
from kproxy_codec.control import Message, build_request, build_response, encode_request, encode_response
from kproxy_codec.coordination import (
    BATCHED_FROM,
    KEY_TYPES_FROM,
    Found,
    coordination_key,
    parse_find_coordinator,
    replace_coordinators,
)
from kproxy_codec.error_codes import UNSUPPORTED_VERSION
from kproxy_codec.errors import CodecError
from kproxy_codec.headers import (
    RequestHeader,
    parse_request_header,
    request_header,
    response_body_offset,
    response_header,
)
from kproxy_codec.partitioned import set_correlation_id, set_response_correlation_id, with_length
from kproxy_codec.primitives import Buffer
from kproxy_codec.walk import Walk

# Up to this version of ApiVersions a feature that is supported from level 0 cannot be said (KIP-1022).
_NO_LEVEL_0_TO = 3
_FEATURES_FROM = 3
# Requests for all topics that many may ask alike are a few bytes long.
_MAX_SHARED_BYTES: Final = 64

Result = TypeVar("Result")
# What is made of the answer to a request, given that, the request and its header.
Take = Callable[[memoryview, memoryview, RequestHeader], Awaitable[Result]]


class _AskAnother(Exception):
    """A reference broker that has lost its lease does not know the cluster, and says so."""


class Unanswerable(Exception):
    """There is no answer to give; the connection is closed instead."""


class ControlPlane:
    """The control-plane requests of one client connection.

    `on_pressure` is told what `Connections` tells; `on_offered` of the versions that the client is about to learn.
    """

    def __init__(
        self, context: ProxyContext, on_pressure: Callable[[bool], None], on_offered: Callable[[Ranges], None]
    ) -> None:
        self._context = context
        self._on_offered = on_offered
        self._connections = Connections(context, on_pressure)
        # A request to a coordinator may wait for others; nothing else must wait behind it.
        self._coordinators = Connections(context, on_pressure)
        self._coordination = Coordination(context, self._coordinators, self._find_coordinator)
        # Spreads the control planes of many connections over the brokers.
        self._key = context.random.randbytes(8)
        # Brokers that gave no answer when they were asked last: they are asked after the others.
        self._doubted: set[int] = set()

    async def answer(self, frame: memoryview, header: RequestHeader) -> list[Buffer]:
        """The whole answer to a request. Raises CodecError for one that is malformed, Unanswerable where none comes."""
        if header.api_key == keys.API_VERSIONS:
            return _framed(header, encode_response(await self._api_versions(frame, header)))
        offer, body = OFFERS[header.api_key], frame[header.body_offset :]
        if offer.handling is Handling.COORDINATED or header.api_key == keys.FIND_COORDINATOR:
            refusal = await self._coordination.refuses(header, body)
            if refusal is not None:
                return refusal
            if offer.handling is Handling.COORDINATED:
                key = coordination_key(header.api_key, header.api_version, body)
                if key:
                    return await self._coordination.answer(frame, header, key)
            if header.api_key in self._context.versions.offered.native:
                return _framed(header, await answer_natively(self._context, header, body))
        try:
            async with asyncio.timeout(self._context.limits.control_timeout_s):
                if offer.handling is Handling.REWRITTEN:
                    return _framed(header, await self._rewritten(frame, header))
                answer = await self._ask_any(frame, header, self._forwarded)
        except (TimeoutError, Unanswerable) as error:
            if header.api_key != keys.METADATA:
                raise Unanswerable(f"no broker answered {keys.name_of(header.api_key)}: {error}") from error
            nobody_leads = leaderless_metadata(header.api_version, body, self._named())
            return _framed(header, await self._context.portions.of(nobody_leads, len(body)))
        if header.api_key == keys.INIT_PRODUCER_ID and self._context.producer_ids and lacks_producer_id(header, answer):
            self._context.versions.disprove(keys.INIT_PRODUCER_ID)
            return _framed(header, await answer_natively(self._context, header, body))
        return answer

    async def _rewritten(self, frame: memoryview, header: RequestHeader) -> Buffer:
        """The body of an answer that names proxies alone."""
        body = frame[header.body_offset :]
        if not (
            header.api_key == keys.METADATA
            and len(body) <= _MAX_SHARED_BYTES
            and asks_for_all_topics(header.api_version, body)
        ):
            return await self._ask_any(frame, header, self._without_brokers)
        same = header.api_version, bytes(body)
        answer = await self._context.all_topics.ask(same, lambda: self._all_topics(frame, header))
        if answer is None:
            raise Unanswerable("no broker can be reached")
        return answer

    async def _all_topics(self, frame: memoryview, header: RequestHeader) -> Buffer | None:
        try:
            return await self._ask_any(frame, header, self._without_brokers)
        except Unanswerable:
            return None

    async def _ask_any(self, frame: memoryview, header: RequestHeader, take: Take[Result]) -> Result:
        """What `take` makes of the answer of one broker; they are tried in this connection's own order, each once."""
        offer = OFFERS[header.api_key]
        untried = set(self._context.topology.brokers)
        while untried:
            broker = preferred(self._key, self._likeliest(untried))
            if broker is None:
                break
            untried.discard(broker)
            if self._context.topology.address(broker) is None:
                # It has left while another one was asked.
                continue
            upstream = self._connections.to(broker)
            try:
                async with asyncio.timeout(self._context.limits.control_attempt_s if offer.repeatable else None):
                    answer = await self._ask(upstream, frame)
                # Not within the broker's time: this may have to wait for its turn.
                taken = await take(answer, frame, header)
                self._doubted.discard(broker)
                return taken
            except Lost as lost:
                if lost.written and not offer.repeatable:
                    raise Unanswerable("the broker's connection ended before it answered") from lost
            except TimeoutError:
                # What is asked of it next must not wait behind this.
                upstream.give_up("it does not answer")
            except CodecError as error:
                upstream.distrust(str(error))
            except _AskAnother:
                pass
            self._doubted.add(broker)
        raise Unanswerable("no broker can be reached")

    def _likeliest(self, untried: set[int]) -> set[int]:
        """Those that nothing speaks against, as far as this connection and the others know; all, where all are bad."""
        health, brokers = self._context.health, self._context.topology.brokers
        likely = untried - self._doubted
        if not health.all_well:
            likely = {broker for broker in likely if broker in brokers and health.is_well(brokers[broker])}
        return likely or untried - self._doubted or untried

    async def _forwarded(self, answer: memoryview, frame: memoryview, header: RequestHeader) -> list[Buffer]:
        set_response_correlation_id(answer, header.correlation_id)
        return [answer]

    async def _without_brokers(self, answer: memoryview, frame: memoryview, header: RequestHeader) -> Buffer:
        """The body of a broker's answer to `frame` as the client gets it. Raises CodecError, _AskAnother."""
        key, version = header.api_key, header.api_version
        body = answer[response_body_offset(answer, key, version) :]
        if key == keys.METADATA and bytes(body[-len(ASK_ANOTHER) :]) == ASK_ANOTHER:
            raise _AskAnother
        if key == keys.FIND_COORDINATOR:
            asked = parse_find_coordinator(version, frame[header.body_offset :])
            work = replace_coordinators(version, asked, body, self._learn)
        else:
            work = rename_brokers(key, version, body, self._named())
        return await self._context.portions.of(work, len(body))

    def _named(self) -> Named:
        return named(self._context.fleet, self._context.own)

    def _learn(self, key_type: int, found: Found) -> Found:
        self._context.coordinators.take(key_type, found)
        return renamed(self._context.fleet, key_type, found)

    async def _ask(self, upstream: Upstream, frame: memoryview) -> memoryview:
        correlation_id = upstream.next_correlation_id()
        set_correlation_id(frame, correlation_id)
        return await ask(upstream, correlation_id, [frame])

    async def _find_coordinator(self, key_type: int, key: str) -> None:
        """Ask who coordinates a key; the answer is remembered, where there is one."""
        highest = self._context.versions.offered.ranges.get(keys.FIND_COORDINATOR, (0, 0))[1]
        version = min(highest, BATCHED_FROM - 1)
        key_types = {"key_type": key_type} if version >= KEY_TYPES_FROM else {}
        head = request_header(keys.FIND_COORDINATOR, version, 0, b"kproxy")
        body = encode_request(build_request(keys.FIND_COORDINATOR, version, key=key, **key_types))
        frame = memoryview(bytearray(b"".join(with_length([head, body]))))
        try:
            async with asyncio.timeout(self._context.limits.control_timeout_s):
                await self._ask_any(frame, parse_request_header(frame), self._without_brokers)
        except (TimeoutError, Unanswerable):
            self._context.counters["coordinators.not_found"] += 1

    def give_up_broker(self, address: Address) -> None:
        """The broker there hangs: what was asked of it is asked elsewhere, or, of a coordinator, by the client anew."""
        self._connections.give_up_at(address)
        self._coordinators.give_up_at(address)

    # ApiVersions

    async def _api_versions(self, frame: memoryview, header: RequestHeader) -> Message:
        lowest, highest = OFFERS[keys.API_VERSIONS][:2]
        if not lowest <= header.api_version <= highest:
            # KIP-511: in version 0, with what would have been understood.
            mine = {"api_key": keys.API_VERSIONS, "min_version": lowest, "max_version": highest}
            self._context.tally.error(keys.API_VERSIONS, UNSUPPORTED_VERSION)
            return build_response(keys.API_VERSIONS, 0, error_code=UNSUPPORTED_VERSION, api_keys=[mine])
        _check_api_versions(header, frame)
        offered = await self._context.versions.current()
        self._on_offered(offered.ranges)
        return _api_versions_response(header.api_version, offered)

    @property
    def upstreams(self) -> Iterable[Upstream]:
        """Connections to brokers, open or closed."""
        return chain(self._connections.by_broker.values(), self._coordinators.by_broker.values())

    @property
    def upstream_count(self) -> int:
        """Open connections to brokers."""
        return self._connections.open_count + self._coordinators.open_count

    async def close(self) -> None:
        await asyncio.gather(self._connections.close(), self._coordinators.close())


def _check_api_versions(header: RequestHeader, frame: memoryview) -> None:
    """Raises CodecError for what is no such request; what it says of the client's software is not asked for."""
    walk = Walk(frame[header.body_offset :], compact=is_flexible(keys.API_VERSIONS, header.api_version))
    if walk.compact:
        walk.text()
        walk.text()
    walk.end()


def _framed(header: RequestHeader, body: Buffer) -> list[Buffer]:
    return with_length([response_header(header.api_key, header.api_version, header.correlation_id), body])


def _api_versions_response(api_version: int, offered: Offered) -> Message:
    fields: dict[str, Any] = {
        "api_keys": [
            {"api_key": key, "min_version": lowest, "max_version": highest}
            for key, (lowest, highest) in sorted(offered.ranges.items())
        ]
    }
    if api_version >= _FEATURES_FROM:
        fields["supported_features"] = [
            {"name": name, "min_version": lowest, "max_version": highest}
            for name, (lowest, highest) in sorted(offered.supported.items())
            if lowest > 0 or api_version > _NO_LEVEL_0_TO
        ]
        fields["finalized_features_epoch"] = offered.epoch
        fields["finalized_features"] = [
            {"name": name, "min_version_level": lowest, "max_version_level": highest}
            for name, (lowest, highest) in sorted(offered.finalized.items())
        ]
    return build_response(keys.API_VERSIONS, api_version, **fields)

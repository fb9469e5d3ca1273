"""Requests about the cluster: a broker answers them, and the proxy sees to it that only proxies are named.

ApiVersions is answered here, from what the proxy and all its brokers serve. Everything else goes to one broker as
received. A broker that cannot be reached, does not answer or answers nonsense is passed over for the next one; a
request that may have been carried out and must not be twice is given up instead, and the client's connection closed,
which is what the client would have seen of the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from codec import api_keys as keys
from codec.control import (
    Message,
    build_request,
    build_response,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from codec.error_codes import UNSUPPORTED_VERSION
from codec.errors import CodecError
from codec.headers import (
    RequestHeader,
    parse_request_header,
    request_header,
    response_body_offset,
    response_header,
)
from codec.partitioned import set_correlation_id, set_response_correlation_id, with_length
from codec.primitives import Buffer
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.coordination import Coordination, coordination_key
from kproxy.proxy.coordinators import BATCHED_FROM, KEY_TYPES_FROM
from kproxy.proxy.naming import metadata_without_brokers, rename, rename_coordinators
from kproxy.proxy.naming_claimants import Claimants
from kproxy.proxy.native import answer_natively, lacks_producer_id
from kproxy.proxy.question import Lost, ask
from kproxy.proxy.upstream import Upstream
from kproxy.proxy.versions import OFFERS, Handling, Offer, Offered, Ranges
from kproxy.routing.rendezvous import preferred
from kproxy.routing.topology import Address

# Up to this version of ApiVersions a feature that is supported from level 0 cannot be said (KIP-1022).
_NO_LEVEL_0_TO = 3
_FEATURES_FROM = 3


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
        self._claimants = Claimants(context.own, context.fleet)
        # Spreads the control planes of many connections over the brokers.
        self._key = context.random.randbytes(8)
        # Brokers that gave no answer when they were asked last: they are asked after the others.
        self._doubted: set[int] = set()

    async def answer(self, frame: memoryview, header: RequestHeader) -> list[Buffer]:
        """The whole answer to a request. Raises CodecError for one that is malformed, Unanswerable where none comes."""
        if header.api_key == keys.API_VERSIONS:
            return _framed(header, encode_response(await self._api_versions(frame, header)))
        offer = OFFERS[header.api_key]
        if offer.handling is Handling.COORDINATED or header.api_key == keys.FIND_COORDINATOR:
            request = decode_request(header.api_key, header.api_version, frame[header.body_offset :])
            refusal = self._coordination.refuses(header, request)
            if refusal is not None:
                return refusal
            if offer.handling is Handling.COORDINATED and coordination_key(header, request):
                return await self._coordination.answer(frame, header, request)
            if header.api_key in self._context.versions.offered.native:
                return _framed(header, encode_response(await answer_natively(self._context, header, request)))
        try:
            async with asyncio.timeout(self._context.limits.control_timeout_s):
                answer = await self._ask_any(frame, header, offer)
        except (TimeoutError, Unanswerable) as error:
            if header.api_key != keys.METADATA:
                raise Unanswerable(f"no broker answered {keys.name_of(header.api_key)}: {error}") from error
            message = metadata_without_brokers(header.api_version, frame[header.body_offset :], self._context.fleet)
            return _framed(header, encode_response(message))
        if header.api_key == keys.INIT_PRODUCER_ID and self._context.producer_ids and lacks_producer_id(header, answer):
            self._context.versions.disprove(keys.INIT_PRODUCER_ID)
            return _framed(header, encode_response(await answer_natively(self._context, header, request)))
        return answer

    async def _ask_any(self, frame: memoryview, header: RequestHeader, offer: Offer) -> list[Buffer]:
        """The answer, from one broker; they are tried in this connection's own order, each once."""
        untried = set(self._context.topology.brokers)
        while untried:
            broker = preferred(self._key, untried - self._doubted or untried)
            if broker is None:
                break
            untried.discard(broker)
            if self._context.topology.address(broker) is None:
                # It has left while another one was asked.
                continue
            upstream = self._connections.to(broker)
            try:
                async with asyncio.timeout(self._context.limits.control_attempt_s if offer.repeatable else None):
                    answer = self._read(await self._ask(upstream, frame), frame, header)
                self._doubted.discard(broker)
                return answer
            except Lost as lost:
                if lost.written and not offer.repeatable:
                    raise Unanswerable("the broker's connection ended before it answered") from lost
            except TimeoutError:
                # What is asked of it next must not wait behind this.
                upstream.give_up("it does not answer")
            except CodecError as error:
                upstream.distrust(str(error))
            self._doubted.add(broker)
        raise Unanswerable("no broker can be reached")

    def _read(self, answer: memoryview, frame: memoryview, header: RequestHeader) -> list[Buffer]:
        """A broker's answer to `frame` as the client gets it. Raises CodecError."""
        if OFFERS[header.api_key].handling is not Handling.REWRITTEN:
            set_response_correlation_id(answer, header.correlation_id)
            return [answer]
        body = answer[response_body_offset(answer, header.api_key, header.api_version) :]
        message = decode_response(header.api_key, header.api_version, body)
        if header.api_key == keys.FIND_COORDINATOR:
            asked = decode_request(header.api_key, header.api_version, frame[header.body_offset :])
            self._context.coordinators.take(asked, message)
            rename_coordinators(asked, message, self._context.fleet)
        else:
            rename(header.api_key, message, self._context.fleet, self._claimants.leaders)
        return _framed(header, encode_response(message))

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
                await self._ask_any(frame, parse_request_header(frame), OFFERS[keys.FIND_COORDINATOR])
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
            self._context.tally.errors[keys.API_VERSIONS, UNSUPPORTED_VERSION] += 1
            return build_response(keys.API_VERSIONS, 0, error_code=UNSUPPORTED_VERSION, api_keys=[mine])
        decode_request(keys.API_VERSIONS, header.api_version, frame[header.body_offset :])
        offered = await self._context.versions.current()
        self._on_offered(offered.ranges)
        return _api_versions_response(header.api_version, offered)

    @property
    def upstream_count(self) -> int:
        """Open connections to brokers."""
        return self._connections.open_count + self._coordinators.open_count

    async def close(self) -> None:
        await asyncio.gather(self._connections.close(), self._coordinators.close())


def _framed(header: RequestHeader, body: bytes) -> list[Buffer]:
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

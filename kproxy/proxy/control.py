"""Requests about the cluster: a broker answers them, and the proxy sees to it that only the proxy is named.

ApiVersions is answered here, from what the proxy and all its brokers serve. Everything else goes to one broker as
received. A broker that cannot be reached, does not answer or answers nonsense is passed over for the next one; a
request that may have been carried out and must not be twice is given up instead, and the client's connection closed,
which is what the client would have seen of the broker.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from codec import api_keys as keys
from codec.control import Message, build_response, decode_request, decode_response, encode_response
from codec.error_codes import NONE, UNSUPPORTED_VERSION
from codec.errors import CodecError, UnsupportedVersion
from codec.headers import RequestHeader, request_header, response_body_offset, response_header
from codec.partitioned import set_correlation_id, set_response_correlation_id, with_length
from codec.primitives import Buffer
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.naming import metadata_without_brokers, rename
from kproxy.proxy.question import Lost, ask
from kproxy.proxy.upstream import Upstream
from kproxy.proxy.versions import OFFERS, Handling, Offer, Ranges, intersect
from kproxy.routing.rendezvous import preferred
from kproxy.routing.topology import Address

# The oldest version that every broker answers; enough to learn the ranges.
_ASKED_API_VERSIONS = 0
_ASK_VERSIONS_TIMEOUT_S = 2.0
# A broker that did not say in time is not asked again for so long: one that hangs must not hold up every new client.
_SILENT_FOR_S = 10.0


class Unanswerable(Exception):
    """There is no answer to give; the connection is closed instead."""


class ControlPlane:
    """The control-plane requests of one client connection; `connect` dials a broker of the topology."""

    def __init__(self, context: ProxyContext, connect: Callable[[int], Upstream]) -> None:
        self._context = context
        self._connect = connect
        self._upstreams: dict[int, Upstream] = {}
        # Spreads the control planes of many connections over the brokers.
        self._key = context.random.randbytes(8)
        # Brokers that gave no answer when they were asked last: they are asked after the others.
        self._doubted: set[int] = set()

    async def answer(self, frame: memoryview, header: RequestHeader) -> list[Buffer]:
        """The whole answer to a request. Raises CodecError for one that is malformed, Unanswerable where none comes."""
        if header.api_key == keys.API_VERSIONS:
            return _framed(header, encode_response(await self._api_versions(frame, header)))
        offer = OFFERS[header.api_key]
        if not offer.min_version <= header.api_version <= offer.max_version:
            raise UnsupportedVersion(
                f"{keys.name_of(header.api_key)} v{header.api_version}: "
                f"versions {offer.min_version} to {offer.max_version} are served"
            )
        try:
            async with asyncio.timeout(self._context.limits.control_timeout_s):
                return await self._ask_any(frame, header, offer)
        except (TimeoutError, Unanswerable) as error:
            if header.api_key != keys.METADATA:
                raise Unanswerable(f"no broker answered {keys.name_of(header.api_key)}: {error}") from error
            message = metadata_without_brokers(header.api_version, frame[header.body_offset :], self._context.identity)
            return _framed(header, encode_response(message))

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
            upstream = self._upstream_of(broker)
            try:
                async with asyncio.timeout(self._context.limits.control_attempt_s if offer.repeatable else None):
                    answer = self._read(await self._ask(upstream, frame), header, offer)
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

    def _read(self, answer: memoryview, header: RequestHeader, offer: Offer) -> list[Buffer]:
        """A broker's answer as the client gets it. Raises CodecError."""
        if offer.handling is Handling.FORWARDED:
            set_response_correlation_id(answer, header.correlation_id)
            return [answer]
        body = answer[response_body_offset(answer, header.api_key, header.api_version) :]
        message = decode_response(header.api_key, header.api_version, body)
        rename(header.api_key, message, self._context.identity)
        return _framed(header, encode_response(message))

    async def _ask(self, upstream: Upstream, frame: memoryview) -> memoryview:
        correlation_id = upstream.next_correlation_id()
        set_correlation_id(frame, correlation_id)
        return await ask(upstream, correlation_id, [frame])

    def _upstream_of(self, broker: int) -> Upstream:
        upstream = self._upstreams.get(broker)
        if upstream is None or upstream.closed:
            upstream = self._upstreams[broker] = self._connect(broker)
        return upstream

    def give_up_broker(self, address: Address) -> None:
        """The broker there hangs: what was asked of it is asked elsewhere, if it can be."""
        for upstream in list(self._upstreams.values()):
            if upstream.address == address and not upstream.closed:
                upstream.give_up("its broker hangs")

    # ApiVersions

    async def _api_versions(self, frame: memoryview, header: RequestHeader) -> Message:
        offer = OFFERS[keys.API_VERSIONS]
        if header.api_version > offer.max_version:
            # KIP-511: in version 0, with what would have been understood.
            ranges = {keys.API_VERSIONS: (offer.min_version, offer.max_version)}
            return _api_versions_response(0, ranges, UNSUPPORTED_VERSION)
        decode_request(keys.API_VERSIONS, header.api_version, frame[header.body_offset :])
        return _api_versions_response(header.api_version, await self._common_ranges(), NONE)

    async def _common_ranges(self) -> Ranges:
        brokers = dict(self._context.topology.brokers)
        known = await asyncio.gather(*(self._ranges_of(broker, address) for broker, address in brokers.items()))
        return intersect(ranges for ranges in known if ranges is not None)

    async def _ranges_of(self, broker: int, address: Address) -> Ranges | None:
        """What a broker serves, asked once for each of its addresses; None where it does not say."""
        cache = self._context.version_ranges
        if (broker, address) in cache:
            return cache[broker, address]
        if self._context.clock() < self._context.silent_until.get((broker, address), -math.inf):
            return None
        request = request_header(keys.API_VERSIONS, _ASKED_API_VERSIONS, 0, b"kproxy")
        frame = memoryview(bytearray(b"".join(with_length([request]))))
        upstream = self._upstream_of(broker)
        try:
            async with asyncio.timeout(_ASK_VERSIONS_TIMEOUT_S):
                answer = await self._ask(upstream, frame)
            body = answer[response_body_offset(answer, keys.API_VERSIONS, _ASKED_API_VERSIONS) :]
            message = decode_response(keys.API_VERSIONS, _ASKED_API_VERSIONS, body)
        except Lost:
            return None
        except TimeoutError:
            self._context.silent_until[broker, address] = self._context.clock() + _SILENT_FOR_S
            upstream.give_up("it does not say what it serves")
            return None
        except CodecError as error:
            upstream.distrust(str(error))
            return None
        ranges = {api.api_key: (api.min_version, api.max_version) for api in message.api_keys}
        cache[broker, address] = ranges
        return ranges

    async def close(self) -> None:
        await asyncio.gather(*(upstream.close() for upstream in self._upstreams.values()))


def _framed(header: RequestHeader, body: bytes) -> list[Buffer]:
    return with_length([response_header(header.api_key, header.api_version, header.correlation_id), body])


def _api_versions_response(api_version: int, ranges: Ranges, error_code: int) -> Message:
    api_list = [
        {"api_key": key, "min_version": lowest, "max_version": highest}
        for key, (lowest, highest) in sorted(ranges.items())
    ]
    return build_response(keys.API_VERSIONS, api_version, error_code=error_code, api_keys=api_list)

"""Which APIs the broker offers, in which versions, and who serves them."""

from __future__ import annotations

from collections.abc import Awaitable
from types import MappingProxyType
from typing import NamedTuple

from kproxy.broker.apis import (
    api_versions,
    bind_fences,
    create_topics,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_topic_partitions,
    fetch,
    find_coordinator,
    init_producer_id,
    list_offsets,
    metadata,
    produce,
)
from kproxy.broker.context import Body, Broker, CloseConnection, Handler, Request
from kproxy_codec.api_keys import (
    API_VERSIONS,
    BIND_FENCES,
    FETCH,
    LIST_OFFSETS,
    PRODUCE,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    name_of,
)
from kproxy_codec.foreign import SASL_HANDSHAKE_REFUSED, sasl

# What is not a partitioned API is small, and its codec is not made for anything else.
MAX_CONTROL_BYTES = 1 << 20
_LARGE_APIS = frozenset({PRODUCE, FETCH, LIST_OFFSETS, BIND_FENCES})


class _Api(NamedTuple):
    min_version: int
    max_version: int
    handler: Handler


_APIS: dict[int, _Api] = {
    module.API_KEY: _Api(module.MIN_VERSION, module.MAX_VERSION, module.handle)
    for module in (
        bind_fences,
        create_topics,
        delete_topics,
        describe_cluster,
        describe_configs,
        describe_topic_partitions,
        fetch,
        find_coordinator,
        init_producer_id,
        list_offsets,
        metadata,
        produce,
    )
}

OFFERED = MappingProxyType(
    {api_key: (api.min_version, api.max_version) for api_key, api in _APIS.items()}
    | {
        API_VERSIONS: (api_versions.MIN_VERSION, api_versions.MAX_VERSION),
        PRODUCE: (produce.OFFERED_MIN_VERSION, produce.MAX_VERSION),
    }
)
"""API key -> the lowest and highest version that ApiVersions names."""


def serve(broker: Broker, request: Request) -> Body | Awaitable[Body | None] | None:
    """The answer's body, or what will be it, or None for no answer. Raises CodecError, CloseConnection."""
    api_key, version = request.header.api_key, request.header.api_version
    if api_key not in _LARGE_APIS and len(request.frame) > MAX_CONTROL_BYTES:
        raise CloseConnection(f"{name_of(api_key)} of {len(request.frame)} bytes; at most {MAX_CONTROL_BYTES} are read")
    if api_key == API_VERSIONS:
        return api_versions.answer(request, OFFERED)
    api = _APIS.get(api_key)
    if api is None and api_key in (SASL_HANDSHAKE, SASL_AUTHENTICATE):
        answer = [SASL_HANDSHAKE_REFUSED] if api_key == SASL_HANDSHAKE else None
        raise CloseConnection(str(sasl(request.header)), answer)
    if api is None:
        raise CloseConnection(f"API key {api_key} version {version} is not offered")
    if not api.min_version <= version <= api.max_version:
        raise CloseConnection(
            f"{name_of(api_key)} v{version} is not offered; versions {api.min_version} to {api.max_version} are"
        )
    return api.handler(broker, request)

"""Dispatch each request to the handler of its API, and handle ApiVersions, which lists the offered APIs.

ApiVersions, versions 0-4
- An unknown version is answered in version 0 with UNSUPPORTED_VERSION and the whole list (KIP-511).
- From version 3, a client's software name and version must match Kafka's pattern, else INVALID_REQUEST.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kproxy.broker.apis import bind_fences, coordinators, describe, fetch, groups, produce, topics
from kproxy.broker.context import Answer, Body, Broker, CloseConnection, Handler, Request
from kproxy_codec import api_keys, control, error_codes
from kproxy_codec.fetch import MAX_VERSION as FETCH_MAX_VERSION
from kproxy_codec.foreign import SASL_HANDSHAKE_REFUSED, sasl
from kproxy_codec.own import BIND_FENCES_VERSION
from kproxy_codec.produce import MAX_VERSION as PRODUCE_MAX_VERSION

# Requests of other APIs are small, and their codec is too slow for large ones.
MAX_CONTROL_BYTES = 1 << 20
_LARGE_APIS = frozenset({api_keys.PRODUCE, api_keys.FETCH, api_keys.LIST_OFFSETS, api_keys.BIND_FENCES})
API_VERSIONS_MAX = 4


class _Api(NamedTuple):
    min_version: int
    max_version: int
    handler: Handler


_APIS: dict[int, _Api] = {
    api_keys.PRODUCE: _Api(3, PRODUCE_MAX_VERSION, produce.handle),
    api_keys.FETCH: _Api(4, FETCH_MAX_VERSION, fetch.handle),
    api_keys.LIST_OFFSETS: _Api(1, 11, fetch.handle_list_offsets),
    api_keys.OFFSET_FOR_LEADER_EPOCH: _Api(2, 4, fetch.handle_offset_for_leader_epoch),
    api_keys.METADATA: _Api(0, 13, describe.handle_metadata),
    api_keys.FIND_COORDINATOR: _Api(0, 6, coordinators.handle_find_coordinator),
    api_keys.OFFSET_COMMIT: _Api(2, 10, groups.handle_offset_commit),
    api_keys.OFFSET_FETCH: _Api(1, 10, groups.handle_offset_fetch),
    api_keys.OFFSET_DELETE: _Api(0, 0, groups.handle_offset_delete),
    api_keys.JOIN_GROUP: _Api(0, 9, groups.handle_join_group),
    api_keys.SYNC_GROUP: _Api(0, 5, groups.handle_sync_group),
    api_keys.HEARTBEAT: _Api(0, 4, groups.handle_heartbeat),
    api_keys.LEAVE_GROUP: _Api(0, 5, groups.handle_leave_group),
    api_keys.LIST_GROUPS: _Api(0, 5, groups.handle_list_groups),
    api_keys.DESCRIBE_GROUPS: _Api(0, 6, groups.handle_describe_groups),
    api_keys.DELETE_GROUPS: _Api(0, 2, groups.handle_delete_groups),
    api_keys.CONSUMER_GROUP_HEARTBEAT: _Api(0, 1, groups.handle_consumer_group_heartbeat),
    api_keys.CREATE_TOPICS: _Api(2, 7, topics.handle_create_topics),
    api_keys.DELETE_TOPICS: _Api(1, 6, topics.handle_delete_topics),
    api_keys.INIT_PRODUCER_ID: _Api(0, 5, coordinators.handle_init_producer_id),
    api_keys.DESCRIBE_CONFIGS: _Api(1, 4, describe.handle_describe_configs),
    api_keys.DESCRIBE_CLUSTER: _Api(0, 2, describe.handle_describe_cluster),
    api_keys.DESCRIBE_TOPIC_PARTITIONS: _Api(0, 0, describe.handle_describe_topic_partitions),
    api_keys.BIND_FENCES: _Api(BIND_FENCES_VERSION, BIND_FENCES_VERSION, bind_fences.handle),
}

OFFERED = MappingProxyType(
    {api_key: (api.min_version, api.max_version) for api_key, api in _APIS.items()}
    # Produce from version 0: otherwise librdkafka silently drops compression.
    | {api_keys.API_VERSIONS: (0, API_VERSIONS_MAX), api_keys.PRODUCE: (0, PRODUCE_MAX_VERSION)}
)
"""API key -> the lowest and highest version that ApiVersions names."""


def serve(broker: Broker, request: Request) -> Answer:
    """Answer a request. Raises CodecError, CloseConnection."""
    api_key, version = request.header.api_key, request.header.api_version
    name = api_keys.name_of(api_key)
    if api_key not in _LARGE_APIS and len(request.frame) > MAX_CONTROL_BYTES:
        raise CloseConnection(f"{name} has {len(request.frame)} bytes; expected at most {MAX_CONTROL_BYTES}")
    if api_key == api_keys.API_VERSIONS:
        return answer_api_versions(request, OFFERED)
    api = _APIS.get(api_key)
    if api is None and api_key in (api_keys.SASL_HANDSHAKE, api_keys.SASL_AUTHENTICATE):
        answer = [SASL_HANDSHAKE_REFUSED] if api_key == api_keys.SASL_HANDSHAKE else None
        raise CloseConnection(str(sasl(request.header)), answer)
    if api is None:
        raise CloseConnection(f"API key {api_key} version {version} is not offered")
    if not api.min_version <= version <= api.max_version:
        served = f"expected {api.min_version} to {api.max_version}"
        raise CloseConnection(f"{name} v{version} is not offered; {served}")
    return api.handler(broker, request)


_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


def answer_api_versions(request: Request, offered: Mapping[int, tuple[int, int]]) -> Body:
    """Answer ApiVersions with `offered`: API key -> lowest and highest version."""
    version = request.header.api_version
    keys: Iterable[dict[str, int]] = [
        {"api_key": api_key, "min_version": lowest, "max_version": highest}
        for api_key, (lowest, highest) in sorted(offered.items())
    ]
    if not 0 <= version <= API_VERSIONS_MAX:
        version, error_code = 0, error_codes.UNSUPPORTED_VERSION
    else:
        message = request.message()
        named = version < 3 or all(
            map(_SOFTWARE.fullmatch, (message.client_software_name, message.client_software_version))
        )
        error_code = error_codes.NONE if named else error_codes.INVALID_REQUEST
    response = control.build_response(api_keys.API_VERSIONS, version, error_code=error_code, api_keys=keys)
    return [control.encode_response(response)]

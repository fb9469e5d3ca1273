"""The table of the APIs that the broker offers, and ApiVersions.

ApiVersions, versions 0-4
- An unknown version is answered in version 0 with UNSUPPORTED_VERSION and the whole list (KIP-511).
- From version 3, a client's software name and version must match Kafka's pattern, else INVALID_REQUEST.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kproxy.broker.apis import bind_fences, coordinators, describe, fetch, groups, produce, topics
from kproxy.broker.context import Body, Broker, CloseConnection, Handler, Request
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import (
    API_VERSIONS,
    BIND_FENCES,
    CONSUMER_GROUP_HEARTBEAT,
    CREATE_TOPICS,
    DELETE_GROUPS,
    DELETE_TOPICS,
    DESCRIBE_CLUSTER,
    DESCRIBE_CONFIGS,
    DESCRIBE_GROUPS,
    DESCRIBE_TOPIC_PARTITIONS,
    FETCH,
    FIND_COORDINATOR,
    HEARTBEAT,
    INIT_PRODUCER_ID,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_GROUPS,
    LIST_OFFSETS,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    OFFSET_FOR_LEADER_EPOCH,
    PRODUCE,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    SYNC_GROUP,
    name_of,
)
from kproxy_codec.fetch import MAX_VERSION as FETCH_MAX_VERSION
from kproxy_codec.foreign import SASL_HANDSHAKE_REFUSED, sasl
from kproxy_codec.own import BIND_FENCES_VERSION
from kproxy_codec.produce import MAX_VERSION as PRODUCE_MAX_VERSION

# Requests of other APIs are small, and their codec is too slow for large ones.
MAX_CONTROL_BYTES = 1 << 20
_LARGE_APIS = frozenset({PRODUCE, FETCH, LIST_OFFSETS, BIND_FENCES})
API_VERSIONS_MAX = 4


class _Api(NamedTuple):
    min_version: int
    max_version: int
    handler: Handler


_APIS: dict[int, _Api] = {
    PRODUCE: _Api(3, PRODUCE_MAX_VERSION, produce.handle),
    FETCH: _Api(4, FETCH_MAX_VERSION, fetch.handle),
    LIST_OFFSETS: _Api(1, 11, fetch.handle_list_offsets),
    OFFSET_FOR_LEADER_EPOCH: _Api(2, 4, fetch.handle_offset_for_leader_epoch),
    METADATA: _Api(0, 13, describe.handle_metadata),
    FIND_COORDINATOR: _Api(0, 6, coordinators.handle_find_coordinator),
    OFFSET_COMMIT: _Api(2, 10, groups.handle_offset_commit),
    OFFSET_FETCH: _Api(1, 10, groups.handle_offset_fetch),
    OFFSET_DELETE: _Api(0, 0, groups.handle_offset_delete),
    JOIN_GROUP: _Api(0, 9, groups.handle_join_group),
    SYNC_GROUP: _Api(0, 5, groups.handle_sync_group),
    HEARTBEAT: _Api(0, 4, groups.handle_heartbeat),
    LEAVE_GROUP: _Api(0, 5, groups.handle_leave_group),
    LIST_GROUPS: _Api(0, 5, groups.handle_list_groups),
    DESCRIBE_GROUPS: _Api(0, 6, groups.handle_describe_groups),
    DELETE_GROUPS: _Api(0, 2, groups.handle_delete_groups),
    CONSUMER_GROUP_HEARTBEAT: _Api(0, 1, groups.handle_consumer_group_heartbeat),
    CREATE_TOPICS: _Api(2, 7, topics.handle_create_topics),
    DELETE_TOPICS: _Api(1, 6, topics.handle_delete_topics),
    INIT_PRODUCER_ID: _Api(0, 5, coordinators.handle_init_producer_id),
    DESCRIBE_CONFIGS: _Api(1, 4, describe.handle_describe_configs),
    DESCRIBE_CLUSTER: _Api(0, 2, describe.handle_describe_cluster),
    DESCRIBE_TOPIC_PARTITIONS: _Api(0, 0, describe.handle_describe_topic_partitions),
    BIND_FENCES: _Api(BIND_FENCES_VERSION, BIND_FENCES_VERSION, bind_fences.handle),
}

OFFERED = MappingProxyType(
    {api_key: (api.min_version, api.max_version) for api_key, api in _APIS.items()}
    # Produce from version 0: otherwise librdkafka silently drops compression.
    | {API_VERSIONS: (0, API_VERSIONS_MAX), PRODUCE: (0, PRODUCE_MAX_VERSION)}
)
"""API key -> the lowest and highest version that ApiVersions names."""


def serve(broker: Broker, request: Request) -> Body | Awaitable[Body | None] | None:
    """Answer a request: the body, an awaitable of it, or None for no answer. Raises CodecError, CloseConnection."""
    api_key, version = request.header.api_key, request.header.api_version
    if api_key not in _LARGE_APIS and len(request.frame) > MAX_CONTROL_BYTES:
        raise CloseConnection(f"{name_of(api_key)} of {len(request.frame)} bytes; at most {MAX_CONTROL_BYTES} are read")
    if api_key == API_VERSIONS:
        return answer_api_versions(request, OFFERED)
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
        message = control.decode_request(API_VERSIONS, version, request.body)
        named = version < 3 or all(
            map(_SOFTWARE.fullmatch, (message.client_software_name, message.client_software_version))
        )
        error_code = error_codes.NONE if named else error_codes.INVALID_REQUEST
    response = control.build_response(API_VERSIONS, version, error_code=error_code, api_keys=keys)
    return [control.encode_response(response)]

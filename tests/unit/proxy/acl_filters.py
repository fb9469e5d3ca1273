"""Make ACL filters for clients with some rights, and ask for their decisions about requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from kproxy.proxy.access import AccessControl, ClientAccess
from kproxy.proxy.acl_filter import AclFilter, Filtered
from kproxy.proxy.long_answers import Portions
from kproxy.routing.topology import Topology
from kproxy.security.acls import Acl, Operation, Resource, Rules
from kproxy_codec.control import build_request, decode_request, decode_response, encode_request
from kproxy_codec.framing import parse_request_header, request_header
from kproxy_codec.partitioned import with_length

Right = tuple[Operation, Resource, str]


def acls_of(rights: Iterable[Right], principal: str = "*") -> list[Acl]:
    return [
        Acl(f"User:{principal}", False, frozenset({operation}), kind, name, False) for operation, kind, name in rights
    ]


def access_of(rights: Iterable[Right] = (), counters: Counter[str] | None = None, **options: Any) -> ClientAccess:
    """The access of a client with these rights alone."""
    rules = Rules(acls_of(rights))
    return AccessControl(lambda: rules, Counter() if counters is None else counters, **options).client()


def filter_of(access: ClientAccess, ids: Mapping[str, UUID] | None = None, **options: Any) -> AclFilter:
    """The filter of a client; `ids` are the ids of topics that are known."""
    topology = Topology()
    for name, topic_id in (ids or {}).items():
        topology.set_topic_id(name.encode(), topic_id.bytes)
    return AclFilter(access, topology, Portions(), **options)


def request(api_key: int, version: int, **fields: object) -> memoryview:
    body = encode_request(build_request(api_key, version, **fields))
    return memoryview(bytearray(b"".join(with_length([request_header(api_key, version, 1, b"c"), body]))))


async def filtered(by: AclFilter, api_key: int, version: int, **fields: object) -> tuple[Filtered, Any]:
    """The decision, and the request that brokers get; None if they get none."""
    frame = request(api_key, version, **fields)
    found = await by.screen(frame, parse_request_header(frame))
    if found.answer is not None:
        return found, None
    return found, decode_request(api_key, version, found.frame[parse_request_header(found.frame).body_offset :])


async def answered(by: AclFilter, api_key: int, version: int, **fields: object) -> Any:
    """The filter's own answer to a request that reaches no broker."""
    found, _ = await filtered(by, api_key, version, **fields)
    assert found.answer is not None
    return decode_response(api_key, version, found.answer)

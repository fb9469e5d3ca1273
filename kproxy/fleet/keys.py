"""The keys under which proxies stand in etcd: `{prefix}/kproxy/proxies/{id}`, JSON with node_id, host and port."""

from __future__ import annotations

import json

from kproxy.ownership.lease_keys import Senseless, parse_address, parse_broker_key
from kproxy.routing.fleet import FIRST_NODE_ID, Proxy


def proxies_prefix(prefix: str) -> str:
    """What the keys of all proxies begin with; `prefix` is the root of all keys."""
    return f"{prefix.rstrip('/')}/kproxy/proxies/"


def encode_proxy(proxy: Proxy) -> bytes:
    return json.dumps(proxy._asdict()).encode()


def parse_proxy_id(rest: str) -> int:
    """The part of a key after the prefix. Raises Senseless."""
    node_id = parse_broker_key(rest)
    if node_id < FIRST_NODE_ID:
        raise Senseless("an id that is no proxy's")
    return node_id


def parse_proxy(rest: str, value: bytes) -> Proxy:
    """The part of a key after the prefix, and its value. Raises Senseless."""
    node_id = parse_proxy_id(rest)
    host, port = parse_address(node_id, value)
    return Proxy(node_id, host, port)

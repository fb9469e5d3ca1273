"""From what a person writes for `--etcd` to the target gRPC dials.

gRPC takes several addresses in one target only as literals of one family (`ipv4:a,b`), and a single name as
`dns:///name`, which it resolves again whenever a connection is lost. Several names are therefore resolved here, once,
when the client connects.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple

from kproxy.ownership.etcd.errors import EtcdMisused, EtcdUnavailable

DEFAULT_PORT = 2379


class Endpoint(NamedTuple):
    """One etcd member as configured."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """`host`, `host:port`, `[v6]:port`, each with `http://` before it or not. EtcdMisused names what is wrong."""
    rest = text.strip()
    scheme, separator, after = rest.partition("://")
    if separator:
        if scheme.lower() == "https":
            raise EtcdMisused(f"etcd endpoint {text!r} asks for TLS, which this version does not speak: use http://.")
        if scheme.lower() != "http":
            raise EtcdMisused(f"etcd endpoint {text!r} has an unknown scheme: write host:port or http://host:port.")
        rest = after
    rest = rest.removesuffix("/")
    if rest.startswith("["):
        host, bracket, port_text = rest[1:].partition("]")
        if not bracket or (port_text and not port_text.startswith(":")):
            raise EtcdMisused(f"etcd endpoint {text!r} is not an address: write [address]:port.")
        port_text = port_text[1:]
    elif rest.count(":") > 1:
        host, port_text = rest, ""
    else:
        host, _, port_text = rest.partition(":")
    return Endpoint(_checked_host(host, text), _checked_port(port_text, text))


def _checked_host(host: str, text: str) -> str:
    if not host or any(character.isspace() or character in "/,@?#[]" for character in host):
        raise EtcdMisused(f"etcd endpoint {text!r} has no usable host: write host:port.")
    if ":" in host and _family(host) != socket.AF_INET6:
        raise EtcdMisused(f"etcd endpoint {text!r} is not an address: write host:port or [address]:port.")
    return host


def _checked_port(port_text: str, text: str) -> int:
    if not port_text:
        return DEFAULT_PORT
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and 0 < int(port_text) < 65536):
        raise EtcdMisused(f"etcd endpoint {text!r} has no usable port: a port is a number from 1 to 65535.")
    return int(port_text)


def _family(host: str) -> socket.AddressFamily | None:
    """The family of an address literal; None for a name."""
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        return None
    return socket.AF_INET if version == 4 else socket.AF_INET6


async def grpc_target(endpoints: Sequence[Endpoint]) -> str:
    """What to hand to `grpc.aio.insecure_channel`. EtcdUnavailable where a name does not resolve."""
    if not endpoints:
        raise EtcdMisused("No etcd endpoint is configured: give at least one, such as http://127.0.0.1:2379.")
    if len(endpoints) == 1 and _family(endpoints[0].host) is None:
        return f"dns:///{endpoints[0]}"
    per_endpoint = [await _resolve(endpoint) for endpoint in endpoints]
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        chosen = [[address for address in addresses if _family(address.host) == family] for addresses in per_endpoint]
        if all(chosen):
            unique = dict.fromkeys(address for addresses in chosen for address in addresses)
            return f"{scheme}:" + ",".join(str(address) for address in unique)
    names = ", ".join(str(endpoint) for endpoint in endpoints)
    raise EtcdMisused(f"The etcd endpoints {names} share no address family: give all as IPv4 or all as IPv6.")


async def _resolve(endpoint: Endpoint) -> list[Endpoint]:
    if _family(endpoint.host) is not None:
        return [endpoint]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EtcdUnavailable(f"The etcd endpoint {endpoint} cannot be resolved: {error.strerror or error}.") from error
    return [Endpoint(str(address[0]), endpoint.port) for _, _, _, _, address in found]

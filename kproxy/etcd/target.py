"""From what a person writes for `--etcd` to where gRPC dials.

Each member gets a target, and so a channel, of its own. A target of several addresses (`ipv4:a,b`) has one
authority: members whose certificates are made out to themselves would not verify, names could not be in it, and which
member a call goes to would be gRPC's choice. gRPC resolves a name, and again whenever a connection is lost.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from kproxy.etcd.errors import EtcdMisused

DEFAULT_PORT = 2379


class Endpoint(NamedTuple):
    """One etcd member as configured."""

    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """What gRPC dials."""
        return f"dns:///{self}"


def parse_endpoints(texts: Sequence[str]) -> tuple[Endpoint, ...]:
    """The members, each once. EtcdMisused names what is wrong."""
    if not texts:
        raise EtcdMisused("No etcd endpoint is configured: give at least one, such as http://127.0.0.1:2379.")
    endpoints = tuple(dict.fromkeys(parse_endpoint(text) for text in texts))
    if len({endpoint.tls for endpoint in endpoints}) > 1:
        listed = ", ".join(texts)
        raise EtcdMisused(f"The etcd endpoints {listed} are not all of one kind: write https:// for each, or for none.")
    return endpoints


def parse_endpoint(text: str) -> Endpoint:
    """`host`, `host:port`, `[v6]:port`, each with `http://` or `https://` before it or not (that is plain, too)."""
    rest = text.strip()
    scheme, separator, after = rest.partition("://")
    tls = False
    if separator:
        tls = scheme.lower() == "https"
        if scheme.lower() not in ("http", "https"):
            raise EtcdMisused(f"etcd endpoint {text!r} has an unknown scheme: write http://host:port or https://...")
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
    return Endpoint(_checked_host(host, text), _checked_port(port_text, text), tls)


def _checked_host(host: str, text: str) -> str:
    if not host or any(character.isspace() or character in "/,@?#[]" for character in host):
        raise EtcdMisused(f"etcd endpoint {text!r} has no usable host: write host:port.")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise EtcdMisused(f"etcd endpoint {text!r} is not an address: write host:port or [address]:port.") from None
    return host


def _checked_port(port_text: str, text: str) -> int:
    if not port_text:
        return DEFAULT_PORT
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and 0 < int(port_text) < 65536):
        raise EtcdMisused(f"etcd endpoint {text!r} has no usable port: a port is a number from 1 to 65535.")
    return int(port_text)

"""Check the options of listeners: one by `[listen]` and `[tls]`, or several by `[[listeners]]` in the file."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

import msgspec

from kproxy.config.parsing import (
    WILDCARDS,
    Address,
    Texts,
    keys_of,
    nearest,
    parse_address,
    parse_value,
    split_list,
    unknown,
)
from kproxy.config.tls import ListenerTls
from kproxy.errors import StartupError

# The addresses of this many listeners fit into the proxy's entry in etcd.
MAX_LISTENERS: Final = 8
# The number is bounded, as a client's address is compared with each of them.
MAX_SENDERS: Final = 256
# The form of names in Kafka's `listeners`, where a name is part of a key.
_NAME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9_-]{0,31}")
Identity = Literal["proxy", "client"]
"""The identity with which a client's broker connections authenticate."""
SECTION: Final = "listeners"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ListenerSection(msgspec.Struct, kw_only=True):
    """One of `[[listeners]]` as given."""

    name: str | None = None
    listen: str | None = None
    advertise: str | None = None
    proxy_protocol: bool = False
    proxy_protocol_from: Texts | None = None
    tls: ListenerTls = msgspec.field(default_factory=ListenerTls)
    sasl: str | list[str] | None = None
    identity: Identity | None = None


@dataclass(frozen=True)
class ListenerConfig:
    """A listener, checked.

    `name` is empty for the listener of `[listen]`. Clients of a listener see the listeners with the same name of all
    proxies on one etcd. `advertise` None stands for the address of the listener. With `proxy_protocol` a connection
    begins with a header of the PROXY protocol, version 2; with `proxy_protocol_from` only connections from these
    networks are accepted. `sasl` has the mechanisms to offer, None for those of `[sasl]` that fit. `identity` is that
    of clients' broker connections, None for that of `[sasl]`. `only_ipv6`: another listener has the port for IPv4.
    """

    name: str
    listen: Address
    advertise: Address | None
    proxy_protocol: bool = False
    tls: ListenerTls | None = None
    sasl: tuple[str, ...] | None = None
    identity: Identity | None = None
    proxy_protocol_from: tuple[Network, ...] | None = None
    only_ipv6: bool = False

    def advertised(self, port: int) -> Address:
        """Return the address that clients see; `port` is the listener's real port."""
        host, advertised_port = self.advertise or self.listen
        return Address(host, advertised_port or port)

    @property
    def has_ipv6(self) -> bool:
        """Whether the listener's address is of IPv6."""
        return ":" in self.listen.host

    @property
    def is_plain(self) -> bool:
        """Whether connections begin with Kafka's protocol."""
        return self.tls is None and not self.proxy_protocol


def parse_listeners(given: object, where: str, advertise: str | None, source: str) -> tuple[ListenerConfig, ...]:
    """Parse the array `[[listeners]]` of a file, which `where` names.

    The option `advertise`, from `source`, has addresses by the names of listeners, which override the file's, so that
    several proxies can have the same file. Raises StartupError.
    """
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise StartupError(f"invalid listeners in {where}; expected tables, each written as [[listeners]].")
    if len(given) > MAX_LISTENERS:
        raise StartupError(f"{where} has {len(given)} listeners; at most {MAX_LISTENERS} are allowed.")
    told = {} if advertise is None else _addresses_by_name(advertise, source)
    listeners = tuple(_parse_one(each, number, where, told) for number, each in enumerate(given, 1))
    for name in told.keys() - {each.name for each in listeners}:
        raise StartupError(f"{source}: unknown listener {name[:60]!r}; expected the name of one in {where}.")
    for what, values in (
        ("name", [each.name for each in listeners]),
        ("address", [str(each.listen) for each in listeners if each.listen.port]),
        ("advertised address", _advertised_by_family(listeners)),
    ):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise StartupError(
                f"listeners in {where}: two have the same {what}, {twice}; expected a different one for each."
            )
    taken = {each.listen.port for each in listeners if not each.has_ipv6} - {0}
    return tuple(replace(each, only_ipv6=each.has_ipv6 and each.listen.port in taken) for each in listeners)


def _advertised_by_family(listeners: Sequence[ListenerConfig]) -> list[str]:
    """Return the advertised addresses, but only one if both families of a port advertise the same.

    A host name may have addresses of both families.
    """
    pairs = {(str(each.advertise), each.listen.port) for each in listeners if each.has_ipv6}
    return [
        str(each.advertise)
        for each in listeners
        if each.advertise is not None and (each.has_ipv6 or (str(each.advertise), each.listen.port) not in pairs)
    ]


def _addresses_by_name(text: str, source: str) -> dict[str, Address]:
    addresses: dict[str, Address] = {}
    for part in split_list(text, source):
        name, equals, address = part.partition("=")
        if not equals:
            raise StartupError(
                f"{source}: the name of the listener is missing: write NAME=HOST:PORT, for example "
                f"external=kafka.example.org:9093."
            )
        if name in addresses:
            raise StartupError(f"{source}: listener {name[:60]!r} is listed twice: keep one of its addresses.")
        addresses[name] = parse_address(address, source)
    return addresses


def _parse_one(given: Mapping[str, object], number: int, where: str, told: Mapping[str, Address]) -> ListenerConfig:
    title = f"listener {given['name']!r}"[:60] if "name" in given else f"listener {number}"
    title += f" in {where}"
    section: ListenerSection = _parse_table(ListenerSection, given, "", title, where)
    if section.name is None or _NAME.fullmatch(section.name) is None:
        raise StartupError(
            f"{title} needs a name of ASCII letters, digits, '_' and '-', at most 32, for example name = \"external\"."
        )
    if section.listen is None:
        raise StartupError(f'{title} needs an address, for example listen = "0.0.0.0:9093".')
    listen = parse_address(section.listen, f"listen of {title}")
    advertise = told.get(section.name)
    if advertise is None and section.advertise is not None:
        advertise = parse_address(section.advertise, f"advertise of {title}")
    for address in (advertise,) if advertise is not None else (listen,):
        if address.host in WILDCARDS:
            raise StartupError(
                f"{title}: clients cannot connect to {address.host}: set its advertise to an address that they reach."
            )
    sources = {key: f"tls.{key} of {title}" for key in ListenerTls.__struct_fields__}
    sasl = None
    if section.sasl is not None:
        sasl = split_list(section.sasl, f"sasl of {title}") if section.sasl else ()
    return ListenerConfig(
        section.name,
        listen,
        advertise,
        section.proxy_protocol,
        section.tls.checked(sources),
        sasl,
        section.identity,
        proxy_senders(section.proxy_protocol_from, section.proxy_protocol, f"proxy_protocol_from of {title}"),
    )


def _parse_table(kind: type[msgspec.Struct], given: Mapping[str, object], within: str, title: str, where: str) -> Any:
    """Return the struct of a listener, or of a table `within` it. Raises StartupError."""
    known = {f"{SECTION}.{within}{key}": takes for key, (takes, _) in keys_of(kind).items()}
    values: dict[str, Any] = {}
    for key, value in given.items():
        takes = known.get(f"{SECTION}.{within}{key}")
        if takes is None:
            path = f"{SECTION}.{within}{key}"
            unknown(path, f"in {where}", nearest(path, known), False)
        if takes is ListenerTls and isinstance(value, dict):
            values[key] = _parse_table(takes, value, f"{key}.", title, where)
        else:
            values[key] = parse_value(takes, value, f"{within}{key} of {title}", strict=True)
    return cast(Any, kind)(**values)


def proxy_senders(texts: Texts | None, proxy_protocol: bool, source: str) -> tuple[Network, ...] | None:
    """Return the networks that may send headers of the PROXY protocol; None if all may. Raises StartupError."""
    if texts is None:
        return None
    if not proxy_protocol:
        raise StartupError(f"{source} applies only to the PROXY protocol: set proxy_protocol = true as well.")
    if len(texts) > MAX_SENDERS:
        raise StartupError(f"{source} has {len(texts)} entries; at most {MAX_SENDERS} are allowed: name networks.")
    networks: list[Network] = []
    for text in texts:
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise StartupError(
                f"{source}: {text[:60]!r} is no address and no network ({str(error)[-60:]}); expected, for example, "
                f'"10.0.0.7", "10.0.0.0/8" or "fd00::/8".'
            ) from error
    return tuple(networks)


def advertised_listeners(listeners: Sequence[ListenerConfig], ports: Sequence[int]) -> dict[str, Address]:
    """Return, by name, the addresses that clients of named listeners see."""
    pairs = zip(listeners, ports, strict=True)
    return {listener.name: listener.advertised(port) for listener, port in pairs if listener.name}


def ready_listeners(listeners: Sequence[ListenerConfig], ports: Sequence[int]) -> str:
    """Return the part of the ready line with the names and addresses of named listeners."""
    named = [
        f"{each.name}@{Address(each.listen.host, port)}"
        for each, port in zip(listeners, ports, strict=True)
        if each.name
    ]
    return f" listeners={','.join(named)}" if named else ""

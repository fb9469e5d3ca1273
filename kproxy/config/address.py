"""Addresses as people write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kproxy.errors import StartupError

DEFAULT_LISTEN = "127.0.0.1:9092"
DEFAULT_ADMIN = "127.0.0.1:9644"
WILDCARDS = ("0.0.0.0", "::", "*")  # noqa: S104 - compared with, not bound


class Address(NamedTuple):
    """Where to listen or connect. `host` has no brackets, also where it is an IPv6 address; port 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, source: str) -> Address:
    """`host:port`, `[IPv6]:port`. StartupError, with `source` as the subject, for anything else."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        bracketed = True
    else:
        bracketed = False
    if not colon:
        raise StartupError(f"{source}: {text!r} has no port: write HOST:PORT, for example {DEFAULT_LISTEN}.")
    if ":" in host and not bracketed:
        raise StartupError(f"{source}: {text!r} is not an address: an IPv6 host goes in brackets, as in [::1]:9092.")
    if not host or any(character.isspace() or character in "/,@[]" for character in host):
        raise StartupError(f"{source}: {text!r} has no usable host: write HOST:PORT, for example {DEFAULT_LISTEN}.")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535):
        raise StartupError(f"{source}: {text!r} has no usable port: a port is a number from 0 to 65535.")
    return Address(host, int(port))


def split_list(value: str | Sequence[str], source: str) -> tuple[str, ...]:
    """`"a,b"` or `["a", "b"]`, neither empty nor with empty parts."""
    parts = tuple(part.strip() for part in (value.split(",") if isinstance(value, str) else value))
    if not parts or not all(parts):
        raise StartupError(f"{source}: {value!r} is not a list of addresses: write them with commas between.")
    return parts


def advertised(listen: Address, advertise: Address | None) -> Address | None:
    """`advertise`, checked: what is listened on cannot be told to clients where it is every address of the machine."""
    if advertise is None and listen.host in WILDCARDS:
        raise StartupError(
            f"clients cannot connect to {listen.host}: with --listen {listen} "
            f"give --advertise HOST:PORT as well, an address that clients reach."
        )
    if advertise is not None and advertise.host in WILDCARDS:
        raise StartupError(f"clients cannot connect to {advertise.host}: give --advertise an address that they reach.")
    return advertise

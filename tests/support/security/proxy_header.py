"""Build headers of the PROXY protocol, version 2, as load balancers write them."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence

import crc32c

SIGNATURE = b"\x0d\x0a\x0d\x0a\x00\x0d\x0a\x51\x55\x49\x54\x0a"
PROXY, LOCAL = 0x21, 0x20


def extension(kind: int, value: bytes) -> bytes:
    return struct.pack(">BH", kind, len(value)) + value


def header(
    source: tuple[str, int] = ("203.0.113.7", 4711),
    destination: tuple[str, int] = ("198.51.100.1", 9092),
    *,
    command: int = PROXY,
    family: int | None = None,
    extensions: Sequence[bytes] = (),
    checksum: bool = False,
) -> bytes:
    """A header for a TCP connection; `checksum` adds that extension between the others."""
    addresses = [ipaddress.ip_address(host) for host, _ in (source, destination)]
    if family is None:
        family = 0x11 if addresses[0].version == 4 else 0x21
    rest = b"".join(each.packed for each in addresses) + struct.pack(">HH", source[1], destination[1])
    half = len(extensions) // 2
    rest += b"".join(extensions[:half])
    at = len(SIGNATURE) + 4 + len(rest) + 3
    rest += extension(0x03, bytes(4)) if checksum else b""
    rest += b"".join(extensions[half:])
    whole = SIGNATURE + struct.pack(">BBH", command, family, len(rest)) + rest
    return whole[:at] + struct.pack(">I", crc32c.crc32c(whole)) + whole[at + 4 :] if checksum else whole

"""Build a TLS ClientHello (RFC 8446, section 4.1.2) with any extensions, even some that no library sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MOST_RECORD_BYTES: Final = 1 << 14
VERSIONS, SIGNATURES, GROUPS, SHARES, PADDING = 43, 13, 10, 51, 21
X25519: Final = 29


def number(value: int) -> bytes:
    return value.to_bytes(2, "big")


def sized(content: bytes) -> bytes:
    return number(len(content)) + content


def share(group: int, key: bytes) -> bytes:
    return number(group) + sized(key)


# The extensions of an ordinary client.
EXTENSIONS: Final = {
    VERSIONS: b"\x04\x03\x04\x03\x03",
    SIGNATURES: sized(b"\x04\x03\x08\x04\x04\x01"),
    GROUPS: sized(number(X25519)),
    SHARES: sized(share(X25519, b"\x09" + bytes(31))),
}
CIPHERS: Final = b"\x13\x01\xc0\x2b"


def client_hello(extensions: dict[int, bytes], ciphers: bytes = CIPHERS, more: bytes = b"") -> bytes:
    """One message, in records of maximum length. `more` are encoded extensions."""
    fields = b"".join(number(kind) + sized(content) for kind, content in extensions.items()) + more
    body = b"\x03\x03" + bytes(32) + b"\x00" + sized(ciphers) + b"\x01\x00" + sized(fields)
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    parts = (message[at : at + MOST_RECORD_BYTES] for at in range(0, len(message), MOST_RECORD_BYTES))
    return b"".join(b"\x16\x03\x01" + sized(part) for part in parts)


def _repeated(element: bytes, last: bytes = b"") -> Callable[[int], bytes]:
    """A list that repeats the element while there is room, and ends with another."""
    return lambda room: sized(element * max(0, (room - len(last) - 2) // len(element)) + last)


UNKNOWN, OTHER = 0x1234, 0x2345
CIPHERS_FILL: Final = {
    "unknown ciphers": _repeated(b"\x77\x77"),
    "one cipher": _repeated(b"\x13\x01"),
    "one cipher of TLS 1.2": _repeated(b"\xc0\x2b"),
    "signalling ciphers": _repeated(b"\x00\xff"),
}
# Ways to fill extensions: the extension's kind, and its content for a number of bytes.
FILLS: Final[dict[str, tuple[int, Callable[[int], bytes]]]] = {
    "unknown groups": (GROUPS, _repeated(number(UNKNOWN), number(OTHER))),
    "one group": (GROUPS, _repeated(number(X25519))),
    "shares of the last group": (SHARES, _repeated(share(OTHER, b"x"))),
    "shares of the first group": (SHARES, _repeated(share(UNKNOWN, b"x"))),
    "shares of a known group": (SHARES, _repeated(share(X25519, b"x" * 32))),
    "one signature": (SIGNATURES, _repeated(b"\x04\x03")),
    "unknown signatures": (SIGNATURES, _repeated(b"\x44\x33")),
    "signatures of certificates": (50, _repeated(b"\x04\x03")),
    "protocols": (16, _repeated(b"\x01a")),
    "a server name": (0, lambda room: sized(b"\x00" + sized(b"a" * (room - 5)))),
    "server names": (0, _repeated(b"\x00" + sized(b"a"))),
    "a cookie": (44, lambda room: sized(b"c" * (room - 2))),
    "padding": (PADDING, bytes),
    "a ticket": (35, bytes),
    "responders": (5, lambda room: b"\x01" + _repeated(sized(b"r"))(room - 5) + sized(b"")),
    "known versions": (VERSIONS, lambda room: b"\xfe" + b"\x03\x04" * 127),
    # It must be the last one.
    "keys shared before": (41, lambda room: _identities(room // 140)),
}


def _identities(count: int) -> bytes:
    return sized((sized(bytes(96)) + bytes(4)) * count) + sized((b"\x20" + bytes(32)) * count)

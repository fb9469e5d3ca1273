"""Read the header of the PROXY protocol, version 2, in which a load balancer names the source of a connection.

Source: "The PROXY protocol, versions 1 & 2" of HAProxy. Version 1 is text and is not read. A header is read strictly: a
connection without a correct header is closed, as its bytes may come from anybody.

States
  signature   the first 16 bytes are awaited: signature, version and command, family, length
  addresses   the rest, whose length is known, is awaited
  done        `source` is known, or is None
  failed      the bytes are not a header

Transitions
  signature -> addresses   the 16 bytes are correct, and more follow
  signature -> done        they are correct, and none follow
  addresses -> done        addresses and extensions are correct, or the command is LOCAL, whose rest is ignored
  signature, addresses -> failed   anything else; `receive` raises ProxyHeaderError

Invariants
1. At most `needed` bytes are taken at a time, and never a byte that follows the header.
2. At most MAX_BYTES are taken in total; a longer header fails after its first 16 bytes.
3. In `done` and `failed` nothing more is taken.
"""

from __future__ import annotations

import ipaddress
import struct
from enum import Enum
from typing import Final, NamedTuple

import crc32c

SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
MAX_BYTES: Final = 4096
_HEAD: Final = struct.Struct(">12sBBH")
_LOCAL, _PROXY = 0x20, 0x21
_UNSPECIFIED, _TCP4, _TCP6 = 0x00, 0x11, 0x21
_OF_FAMILY: Final = {_TCP4: struct.Struct(">4s4sHH"), _TCP6: struct.Struct(">16s16sHH")}
_EXTENSION: Final = struct.Struct(">BH")
_CRC32C: Final = 0x03
_CHECKSUM: Final = struct.Struct(">I")


class ProxyHeaderError(ValueError):
    """The bytes are not an acceptable header; the message states the reason."""


class Source(NamedTuple):
    """The source of the connection."""

    host: str
    port: int


class State(Enum):
    SIGNATURE = "signature"
    ADDRESSES = "addresses"
    DONE = "done"
    FAILED = "failed"


class ProxyHeader:
    """Reads one header."""

    def __init__(self) -> None:
        self.state = State.SIGNATURE
        self.source: Source | None = None
        self._received = b""
        self._length = _HEAD.size

    @property
    def needed(self) -> int:
        """The number of bytes that may be received now; 0 when the header is done or has failed."""
        return 0 if self.state in (State.DONE, State.FAILED) else self._length - len(self._received)

    def receive(self, data: bytes) -> None:
        """Take at most `needed` bytes. Raises ProxyHeaderError; ValueError for more bytes than that."""
        if not 0 < len(data) <= self.needed:
            raise ValueError(f"{len(data)} bytes; expected at most {self.needed}")
        self._received += data
        try:
            if self.state is State.SIGNATURE:
                self._look_at_signature()
            if self.needed == 0:
                # LOCAL is the load balancer's own connection (a health check), where the rest has no meaning.
                self.source = self._parse() if self._received[12] == _PROXY else None
                self.state = State.DONE
        except ProxyHeaderError:
            self.state = State.FAILED
            raise

    def _look_at_signature(self) -> None:
        # These bytes are checked at once: a client of another protocol may send no more.
        if self._received[:12] != SIGNATURE[: len(self._received)]:
            raise ProxyHeaderError("the connection does not begin with a header of the PROXY protocol, version 2")
        if len(self._received) < _HEAD.size:
            return
        _, command, family, length = _HEAD.unpack(self._received)
        if command not in (_LOCAL, _PROXY):
            raise ProxyHeaderError(f"unknown version and command {command:#04x} of the PROXY protocol")
        if family not in (_UNSPECIFIED, _TCP4, _TCP6):
            raise ProxyHeaderError(f"family {family:#04x} of the PROXY protocol is not TCP")
        if _HEAD.size + length > MAX_BYTES:
            raise ProxyHeaderError(f"a PROXY protocol header of {_HEAD.size + length} bytes exceeds {MAX_BYTES}")
        self.state = State.ADDRESSES
        self._length += length

    def _parse(self) -> Source | None:
        rest = memoryview(self._received)[_HEAD.size :]
        layout = _OF_FAMILY.get(self._received[13])
        if layout is None:
            # The load balancer does not know the source either.
            self._check_extensions(rest, _HEAD.size)
            return None
        if len(rest) < layout.size:
            raise ProxyHeaderError(f"{len(rest)} bytes of addresses in a PROXY protocol header, not {layout.size}")
        address, _, port, _ = layout.unpack(rest[: layout.size])
        self._check_extensions(rest[layout.size :], _HEAD.size + layout.size)
        return Source(str(ipaddress.ip_address(address)), port)

    def _check_extensions(self, rest: memoryview, begins_at: int) -> None:
        at = 0
        while at < len(rest):
            if len(rest) - at < _EXTENSION.size:
                raise ProxyHeaderError("an extension in a PROXY protocol header is cut short")
            kind, length = _EXTENSION.unpack(rest[at : at + _EXTENSION.size])
            value_at = at + _EXTENSION.size
            if length > len(rest) - value_at:
                raise ProxyHeaderError("an extension in a PROXY protocol header is longer than the header")
            if kind == _CRC32C:
                self._verify(begins_at + value_at, length)
            at = value_at + length

    def _verify(self, at: int, length: int) -> None:
        if length != _CHECKSUM.size:
            raise ProxyHeaderError("the checksum of a PROXY protocol header does not have four bytes")
        (said,) = _CHECKSUM.unpack(self._received[at : at + length])
        if crc32c.crc32c(self._received[:at] + bytes(length) + self._received[at + length :]) != said:
            raise ProxyHeaderError("the checksum of a PROXY protocol header is wrong")

"""Read a certificate's names and expiry by a handshake of this process with itself.

The handshake happens in memory. The standard library shows the fields of a certificate only to a peer that has verified
it, so the peer trusts the certificate itself. The handshake also shows that certificate and key belong together, and
that the certificate is valid today and for this purpose.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEY = b"PRIVATE KEY-----"
_BEGIN = "-----BEGIN CERTIFICATE-----"
_END = "-----END CERTIFICATE-----"
# A handshake takes three or four turns.
_MAX_TURNS = 10


@dataclass(frozen=True)
class Certificate:
    """A certificate. `expires_at` is in seconds since the epoch; `names` has its alternative names."""

    expires_at: float
    names: tuple[str, ...]

    def is_for(self, name: str) -> bool:
        """Whether the certificate has this name."""
        return is_among(name, self.names)


def is_among(name: str, names: Iterable[str]) -> bool:
    """Whether a DNS name or IP address is one of a certificate's; a wildcard stands for the first label."""
    wanted = _normal(name)
    return any(_matches(_normal(each), wanted) for each in names)


def _normal(name: str) -> str:
    with suppress(ValueError):
        # OpenSSL writes IPv6 addresses in full.
        return str(ipaddress.ip_address(name))
    return name.lower().rstrip(".")


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith("*."):
        return pattern == name
    first, dot, rest = name.partition(".")
    return bool(first and dot) and rest == pattern[2:]


def rehearse(cert: Path, key: Path, *, server_side: bool) -> Certificate:
    """Return the certificate after a handshake in which it is shown, by a server or by a client.

    Raises ssl.SSLError (SSLCertVerificationError if it has expired, or has another purpose), OSError, ValueError.
    """
    shows = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    looks = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if server_side else ssl.PROTOCOL_TLS_SERVER)
    shows.load_cert_chain(cert, key)
    looks.load_verify_locations(cadata=_first(cert.read_text()))
    looks.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if server_side:
        looks.check_hostname = False
        return _certificate(meet(shows, looks)[1])
    # The side that listens needs a certificate as well, which is not checked.
    shows.check_hostname = False
    shows.verify_mode = ssl.CERT_NONE
    looks.load_cert_chain(cert, key)
    looks.verify_mode = ssl.CERT_REQUIRED
    return _certificate(meet(looks, shows)[0])


def missing_half(cert: bytes, key: bytes, cert_named: str, key_named: str) -> str | None:
    """Return a sentence about the file that has the wrong content; None if both files look right."""
    if _BEGIN.encode() not in cert:
        if _KEY in cert:
            return f"{cert_named} holds a private key, and no certificate: give the certificate's file, in PEM."
        return f"{cert_named} holds no certificate: give a file in PEM."
    if _KEY not in key:
        if _BEGIN.encode() in key:
            return f"{key_named} holds a certificate, and no private key: give the key's file, in PEM."
        return f"{key_named} holds no private key: give a file in PEM."
    return None


def _first(text: str) -> str:
    """Return the first certificate of a chain in PEM. Raises ValueError."""
    begin = text.find(_BEGIN)
    end = text.find(_END, begin)
    if begin < 0 or end < 0:
        raise ValueError("it holds no certificate")
    return text[begin : end + len(_END)] + "\n"


def meet(server: ssl.SSLContext, client: ssl.SSLContext, *, name: str | None = None) -> tuple[ssl.SSLObject, ...]:
    """Complete a handshake in memory; return the server's side and the client's.

    `name` is the name that the client requires. Raises ssl.SSLError, ValueError.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_side=False, server_hostname=name),
    )
    # The client begins.
    waiting = [sides[1], sides[0]]
    for _ in range(_MAX_TURNS):
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
        if not waiting:
            return sides
    raise ValueError("the handshake does not end")


def names_of(fields: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return all alternative names of a certificate, given its fields as `getpeercert` returns them."""
    return tuple(str(pair[1]) for pair in (fields or {}).get("subjectAltName", ()))


def _certificate(looker: ssl.SSLObject) -> Certificate:
    fields = looker.getpeercert()
    if not fields:
        raise ValueError("it presents no certificate")
    return Certificate(ssl.cert_time_to_seconds(str(fields["notAfter"])), names_of(fields))

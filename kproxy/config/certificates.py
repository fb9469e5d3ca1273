"""Find out a certificate's names and its end by a handshake of this process with itself.

The handshake happens in memory. The standard library shows the fields of a certificate only to a peer that has verified
it, so the peer trusts the certificate itself. That also shows that certificate and key belong together, that the
certificate is valid today, and that its purpose is the right one.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

_BEGIN = "-----BEGIN CERTIFICATE-----"
_END = "-----END CERTIFICATE-----"
# A handshake takes three or four turns.
_MAX_TURNS = 10


@dataclass(frozen=True)
class Certificate:
    """`expires_at` in seconds since the epoch. `names` are its DNS names and IP addresses, as text."""

    expires_at: float
    names: tuple[str, ...]

    def is_for(self, name: str) -> bool:
        """Whether a name is one of its names; a wildcard stands for the first label."""
        wanted = name.lower().rstrip(".")
        return any(_matches(each.lower().rstrip("."), wanted) for each in self.names)


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith("*."):
        return pattern == name
    first, dot, rest = name.partition(".")
    return bool(first and dot) and rest == pattern[2:]


def rehearse(cert: Path, key: Path, *, server_side: bool) -> Certificate:
    """Return the certificate after a handshake with itself, as a server or as a client.

    Raises ssl.SSLError (SSLCertVerificationError if it has ended, or is not meant for that), OSError, ValueError.
    """
    shows = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    looks = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if server_side else ssl.PROTOCOL_TLS_SERVER)
    shows.load_cert_chain(cert, key)
    looks.load_verify_locations(cadata=_first(cert.read_text()))
    looks.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if server_side:
        looks.check_hostname = False
        return _certificate(_meet(shows, looks, looker_is_server=False))
    # The side that listens needs a certificate as well, which is not checked.
    shows.check_hostname = False
    shows.verify_mode = ssl.CERT_NONE
    looks.load_cert_chain(cert, key)
    looks.verify_mode = ssl.CERT_REQUIRED
    return _certificate(_meet(looks, shows, looker_is_server=True))


def _first(text: str) -> str:
    """The first certificate of a chain in PEM. Raises ValueError."""
    begin = text.find(_BEGIN)
    end = text.find(_END, begin)
    if begin < 0 or end < 0:
        raise ValueError("it holds no certificate")
    return text[begin : end + len(_END)] + "\n"


def _meet(server: ssl.SSLContext, client: ssl.SSLContext, *, looker_is_server: bool) -> ssl.SSLObject:
    """Do a whole handshake in memory; return the side that has verified the other. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    looker = sides[1] if looker_is_server else sides[0]
    waiting = list(sides)
    for _ in range(_MAX_TURNS):
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(side)
        if looker not in waiting:
            return looker
    raise ValueError("the handshake does not end")


def _certificate(looker: ssl.SSLObject) -> Certificate:
    fields = looker.getpeercert()
    if not fields:
        raise ValueError("it shows no certificate")
    names = tuple(str(pair[1]) for pair in fields.get("subjectAltName", ()))
    return Certificate(ssl.cert_time_to_seconds(str(fields["notAfter"])), names)

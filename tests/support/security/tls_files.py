"""Generated certificates for tests: an authority, the certificates that it signs, and those that it revokes."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

NOW = datetime.datetime.now(datetime.UTC)


class Pair(NamedTuple):
    """A certificate with its chain, and its key; both are PEM."""

    cert: Path
    key: Path


class Signer:
    """A certificate authority in a directory of its own; `ca` is its certificate. `parent` signs it; None: a root."""

    def __init__(self, directory: Path, parent: Signer | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        above = None if parent is None else parent._ca
        self._ca = trustme.CA(above, key_type=trustme.KeyType.ECDSA, organization_name=directory.name)
        self.ca = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(
        self, stem: str, *names: str, common_name: str | None = None, days: int = 30, ends_in_s: float | None = None
    ) -> Pair:
        """A certificate for `names`; it replaces the one with the same `stem`. `days` below 0: it has expired."""
        until = NOW + datetime.timedelta(days=days)
        if ends_in_s is not None:
            until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ends_in_s)
        issued = self._ca.issue_cert(
            *names,
            common_name=common_name,
            key_type=trustme.KeyType.ECDSA,
            not_before=NOW - datetime.timedelta(days=400),
            not_after=until,
        )
        pair = Pair(self.directory / f"{stem}.pem", self.directory / f"{stem}.key")
        pair.cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        # The only form that Java reads.
        key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        pair.key.touch(0o600)
        pair.key.write_bytes(key.private_bytes(*form))
        return pair

    def revoke(self, revoked: Sequence[Pair | Signer]) -> Path:
        """A revocation list with these certificates."""
        key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        authority = x509.load_pem_x509_certificate(self.ca.read_bytes())
        builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
        builder = builder.last_update(NOW - datetime.timedelta(days=1)).next_update(NOW + datetime.timedelta(days=1))
        for each in revoked:
            shown = each.ca if isinstance(each, Signer) else each.cert
            serial = x509.load_pem_x509_certificate(shown.read_bytes()).serial_number
            gone = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(NOW).build()
            builder = builder.add_revoked_certificate(gone)
        file = self.directory / "crl.pem"
        signed = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]  # an ECDSA key
        file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return file


def client_context(ca: Path | None, pair: Pair | None = None, *, check_name: bool = True) -> ssl.SSLContext:
    """The settings of a client; `ca` None: it trusts any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = check_name and ca is not None
    if ca is None:
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(ca)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context

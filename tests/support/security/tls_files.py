"""Generate certificates for tests: an authority, certificates that it signs, and certificates that it revokes."""

from __future__ import annotations

import base64
import datetime
import hashlib
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

NOW = datetime.datetime.now(datetime.UTC)
_ALTERNATIVE = x509.ExtensionOID.SUBJECT_ALTERNATIVE_NAME


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    length = bytes([size]) if size < 0x80 else bytes([0x82]) + size.to_bytes(2, "big")
    return bytes([tag]) + length + content


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
        """A certificate for `names`, by default `stem`. It replaces that of its `stem`. `days` below 0: it ended."""
        until = NOW + datetime.timedelta(days=days)
        if ends_in_s is not None:
            until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ends_in_s)
        issued = self._ca.issue_cert(
            *(names or (stem,)),
            common_name=common_name,
            key_type=trustme.KeyType.ECDSA,
            not_before=NOW - datetime.timedelta(days=400),
            not_after=until,
        )
        chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
        return self._written(stem, chain, serialization.load_pem_private_key(issued.private_key_pem.bytes(), None))

    def issue_named(self, stem: str, *names: tuple[str, bytes], common_name: str = "", unit: str = "") -> Pair:
        """A client's certificate with these bytes as its names, each `URI` or `DNS`, valid or not."""
        authority = x509.load_pem_x509_certificate(self.ca.read_bytes())
        subject = {x509.NameOID.ORGANIZATIONAL_UNIT_NAME: unit, x509.NameOID.COMMON_NAME: common_name}
        parts = [x509.NameAttribute(oid, value) for oid, value in subject.items() if value]
        key = ec.generate_private_key(ec.SECP256R1())
        builder = x509.CertificateBuilder().subject_name(x509.Name(parts)).issuer_name(authority.subject)
        builder = builder.not_valid_before(NOW - datetime.timedelta(days=1))
        builder = builder.not_valid_after(NOW + datetime.timedelta(days=1))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        if names:
            encoded = _der(0x30, b"".join(_der({"DNS": 0x82, "URI": 0x86}[kind], name) for kind, name in names))
            builder = builder.add_extension(x509.UnrecognizedExtension(_ALTERNATIVE, encoded), critical=False)
        signed = builder.sign(self._key(), hashes.SHA256())
        return self._written(stem, signed.public_bytes(serialization.Encoding.PEM), key)

    def _key(self) -> ec.EllipticCurvePrivateKey:
        key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key

    def _written(self, stem: str, chain: bytes, key: PrivateKeyTypes) -> Pair:
        pair = Pair(self.directory / f"{stem}.pem", self.directory / f"{stem}.key")
        pair.cert.write_bytes(chain)
        # The only form that Java reads.
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        pair.key.touch(0o600)
        pair.key.write_bytes(key.private_bytes(*form))
        return pair

    def revoke(self, revoked: Sequence[Pair | Signer]) -> Path:
        """A revocation list with these certificates."""
        authority = x509.load_pem_x509_certificate(self.ca.read_bytes())
        builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
        builder = builder.last_update(NOW - datetime.timedelta(days=1)).next_update(NOW + datetime.timedelta(days=1))
        for each in revoked:
            shown = each.ca if isinstance(each, Signer) else each.cert
            serial = x509.load_pem_x509_certificate(shown.read_bytes()).serial_number
            gone = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(NOW).build()
            builder = builder.add_revoked_certificate(gone)
        file = self.directory / "crl.pem"
        signed = builder.sign(self._key(), hashes.SHA256())
        file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return file


def pin_of(pair: Pair) -> str:
    """What identifies the key of a certificate, as in HTTP public key pinning (RFC 7469)."""
    key = x509.load_pem_x509_certificate(pair.cert.read_bytes()).public_key()
    info = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(info).digest()).decode()


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

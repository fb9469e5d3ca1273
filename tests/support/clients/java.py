"""Find a Java for tests that run Java programs; skip tests that need one if there is none."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.java import Java, find_java
from tests.support.brokers.kafka_jars import pyspark_jars

# For a program that runs for seconds: optimising and parallel collection cost it more than they save.
SHORT_JAVA = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m")


@functools.cache
def _java() -> Java | str:
    try:
        return find_java()
    except StartupError as error:
        return str(error)


def require_java() -> Java:
    """The Java that the demo would use, or a skip with the reason for its absence."""
    java = _java()
    if isinstance(java, str):
        pytest.skip(java)
    return java


def java_executable() -> str:
    """The `java` to run, or a skip."""
    return str(require_java().executable)


def java_program(source: Path, classpath: str, *options: str) -> list[str | Path]:
    """The command that compiles and runs a program of one file, to which its arguments are added, or a skip.

    The class path begins with the given one: an archive of classes fits only what it was made for.
    """
    path = f"{classpath}{os.pathsep}{pyspark_jars('janino-*.jar', 'commons-compiler-*.jar')}"
    compiler = ("-cp", path, "org.codehaus.janino.SimpleCompiler")
    return [java_executable(), *SHORT_JAVA, *options, *compiler, source, source.stem]

"""Apache Kafka's own jars for tests; a test that asks for them is skipped if they are not available."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from kproxy.errors import StartupError
from tests.support.brokers import jars
from tests.support.brokers.jars import CLIENT_VERSIONS, EARLIER_KAFKA_VERSION, KAFKA_VERSION

__all__ = [
    "CLIENT_VERSIONS",
    "EARLIER_KAFKA_VERSION",
    "KAFKA_VERSION",
    "client_classpath",
    "kafka_classpath",
    "pyspark_jars",
    "registry_archive",
]

T = TypeVar("T")


def kafka_classpath(version: str = KAFKA_VERSION) -> str:
    """Like `jars.kafka_classpath`; skips the test if there are no jars."""
    return _or_skip(jars.kafka_classpath, version)


def client_classpath(version: str) -> str:
    """Like `jars.client_classpath`; skips the test if there are no jars."""
    return _or_skip(jars.client_classpath, version)


def pyspark_jars(*patterns: str) -> str:
    """Like `jars.pyspark_jars`; skips the test if there are no jars."""
    return _or_skip(jars.pyspark_jars, *patterns)


def registry_archive() -> Path:
    """Like `jars.registry_archive`; skips the test if there is none."""
    return _or_skip(jars.registry_archive)


def _or_skip(find: Callable[..., T], *arguments: str) -> T:
    try:
        return find(*arguments)
    except StartupError as error:
        pytest.skip(str(error))

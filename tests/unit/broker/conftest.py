"""Fixtures shared by the tests of replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.brokers.replica_group import Group
from tests.unit.broker.slow_disk import SlowDisk


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """Three replicas of one partition, which nobody leads yet."""
    group = Group(tmp_path)
    yield group
    group.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.go_on()

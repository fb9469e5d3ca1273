"""The data directory of `kproxy dev`: its place, its one user, and the brokers it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kproxy.dev.cluster import MAX_BROKERS, ClusterDir, DevCluster, default_data_dir
from kproxy.errors import StartupError


def test_directory_is_closed_to_other_users(tmp_path: Path) -> None:
    path = tmp_path / "above" / "dev"
    ClusterDir.open(path, 3).close()
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("configured", "is_used"), [("/data", True), ("data", False), ("", False)])
def test_only_absolute_xdg_directory_is_used(configured: str, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", configured)
    assert default_data_dir().is_absolute()
    assert (default_data_dir() == Path("/data/kproxy/dev")) is is_used


@pytest.mark.parametrize("brokers", [0, MAX_BROKERS + 1])
def test_impossible_number_of_brokers_is_refused(brokers: int, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=re.escape(f"--brokers {brokers}; expected a number from 1")):
        DevCluster(tmp_path, brokers=brokers)

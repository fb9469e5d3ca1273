"""The data directory of `kproxy dev` belongs to one user alone."""

from __future__ import annotations

from pathlib import Path

from kproxy.dev.cluster import ClusterDir


def test_directory_is_closed_to_other_users(tmp_path: Path) -> None:
    path = tmp_path / "above" / "dev"
    ClusterDir.open(path, 3).close()
    assert path.stat().st_mode & 0o777 == 0o700

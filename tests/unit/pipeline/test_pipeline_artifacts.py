"""Files that Spark leaves in the working directory are removed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kproxy.pipeline.spark import Artifacts


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_new_empty_directory_is_removed_with_its_parent(tmp_path: Path) -> None:
    artifacts = Artifacts()
    (tmp_path / "artifacts" / "spark-1").mkdir(parents=True)
    artifacts.remove()
    assert list(tmp_path.iterdir()) == []


def test_existing_or_filled_directories_stay(tmp_path: Path) -> None:
    directory = tmp_path / "artifacts"
    (directory / "spark-before").mkdir(parents=True)
    artifacts = Artifacts()
    for name in ("spark-empty", "spark-full", "mine"):
        (directory / name).mkdir()
    (directory / "spark-full" / "file").touch()
    artifacts.remove()
    assert {path.name for path in directory.iterdir()} == {"spark-before", "spark-full", "mine"}


def test_existing_empty_artifacts_directory_stays(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    Artifacts().remove()
    assert (tmp_path / "artifacts").is_dir()

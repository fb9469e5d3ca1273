"""Files that Spark leaves in the working directory are removed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kproxy.pipeline.spark import Artifacts


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_empty_directory_that_has_come_goes_and_its_parent_with_it(tmp_path: Path) -> None:
    artifacts = Artifacts()
    (tmp_path / "artifacts" / "spark-1").mkdir(parents=True)
    artifacts.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_and_what_holds_anything_stays(tmp_path: Path) -> None:
    directory = tmp_path / "artifacts"
    (directory / "spark-before").mkdir(parents=True)
    artifacts = Artifacts()
    for name in ("spark-empty", "spark-full", "mine"):
        (directory / name).mkdir()
    (directory / "spark-full" / "file").touch()
    artifacts.remove()
    assert {path.name for path in directory.iterdir()} == {"spark-before", "spark-full", "mine"}


def test_a_directory_of_that_name_that_is_somebodys_stays_though_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    Artifacts().remove()
    assert (tmp_path / "artifacts").is_dir()

"""Values made from files are made again when the files change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kproxy.errors import StartupError
from kproxy.security.reloading import Reloading, Reloads


class Files:
    """Two files that belong together, as a certificate and its key do."""

    def __init__(self, directory: Path) -> None:
        self.files = [directory / "cert", directory / "key"]
        self.counters = Counter[str]()
        self.loads = 0
        self.write("1")
        self.value = Reloading("pair", self.files, self.load, counters=self.counters)

    def write(self, text: str, *, only: int | None = None) -> None:
        for number, file in enumerate(self.files):
            if only in (None, number):
                # Renamed over the old file: perhaps only its time differs.
                new = file.with_suffix(".new")
                new.write_text(text)
                new.replace(file)

    def load(self) -> str:
        self.loads += 1
        cert, key = (file.read_text() for file in self.files)
        if cert != key:
            raise StartupError("they do not belong together.")
        return cert


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_unchanged_file_is_not_loaded(files: Files) -> None:
    for _ in range(3):
        await files.value.look()
    assert (files.loads, files.value.current) == (1, "1")


async def test_change_is_loaded_once_it_is_whole(files: Files) -> None:
    files.write("2", only=0)
    await files.value.look()
    files.write("2", only=1)
    await files.value.look()
    assert files.value.current == "1"
    await files.value.look()
    assert (files.value.current, files.counters) == ("2", {"tls.reloads.done": 1})


async def test_unusable_file_is_tried_once(files: Files) -> None:
    files.write("2", only=0)
    for _ in range(5):
        await files.value.look()
    assert (files.value.current, files.counters) == ("1", {"tls.reloads.failed": 1})
    files.files[0].unlink()
    for _ in range(5):
        await files.value.look()
    assert (files.value.current, files.counters["tls.reloads.failed"]) == ("1", 2)
    files.write("3")
    for _ in range(2):
        await files.value.look()
    assert files.value.current == "3"


async def test_reload_request_takes_effect_at_once(files: Files) -> None:
    reloads = Reloads()
    reloads.add(files.value)
    files.write("2")
    await reloads.reload()
    assert (files.value.current, files.loads) == ("2", 2)
    await files.value.look()
    await files.value.look()
    assert files.loads == 2

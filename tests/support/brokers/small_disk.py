"""Provide a disk that can be filled: a small file system in memory if possible, otherwise a limit on files."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class SmallDisk(Protocol):
    """There is room for about `size` bytes, until `free`."""

    path: Path

    def confine(self, pid: int) -> None:
        """Apply the limit to the process, if the disk itself does not."""

    def fill(self) -> None:
        """Leave no room."""

    def free(self) -> None:
        """Make plenty of room."""


class _Mounted:
    """A tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def confine(self, pid: int) -> None: ...

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                return

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)
        _run("mount", "-o", "remount,size=64m", str(self.path))


class _Limited:
    """A directory, and processes whose files may not grow beyond a size (RLIMIT_FSIZE); by default this process."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._size = size
        self._pid = 0
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def confine(self, pid: int) -> None:
        self._pid = pid
        self._limit(self._size)

    def fill(self) -> None:
        self._limit(0)

    def free(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, self._before)

    def _limit(self, size: int) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (size, self._before[1]))


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[SmallDisk]:
    """A disk at `path`, which is created, with room for `size` bytes."""
    path.mkdir()
    if not _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)):
        limited = _Limited(path, size)
        try:
            yield limited
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limited._before)
        return
    try:
        yield _Mounted(path)
    finally:
        # Lazily: a process that still has a file open there must not keep it mounted.
        _run("umount", "-l", str(path))


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False

"""Files of one trail in a directory: what JSON lines and Parquet have in common.

Names are `kproxy-audit-{begin}-{incarnation}-{number}.{kind}`, with the time at which the process began in milliseconds
and its files counted from 0, both with leading zeros: sorted by name they are sorted by time, and no two processes
write to one file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kproxy.errors import StartupError

# Who writes where and when is not everybody's business.
FILE_MODE = 0o640
PREFIX = "kproxy-audit-"
# Behind the name of a file that is not whole yet.
UNFINISHED = ".tmp"
# A file is written within seconds. Processes share directories, and their clocks may differ from the disk's.
LEFT_BEHIND_S = 3600.0


class TrailFiles:
    """The names of one process's files, in turn."""

    def __init__(self, directory: Path, incarnation: str, began_ms: int, kind: str) -> None:
        self._directory = directory
        self._stem = f"{PREFIX}{began_ms:013d}-{incarnation}"
        self._kind = kind
        self._number = 0

    def next(self) -> Path:
        path = self._directory / f"{self._stem}-{self._number:06d}.{self._kind}"
        self._number += 1
        return path

    def give_back(self) -> None:
        """The last one was not used."""
        self._number -= 1

    def keep_names(self) -> None:
        """Bring to the disk what files there are: without, a new one may be gone after a power failure."""
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def prepare(directory: Path) -> None:
    """Make sure that files can be made there. Raises StartupError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"audit.sink: the directory {directory} cannot be made ({error.strerror}): name one that can be written to."
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StartupError(f"audit.sink: {directory} cannot be written to: name another, or grant the right.")


def remove_left_behind(directory: Path, now_ms: int) -> None:
    """Remove what killed processes left half written: nobody reads it, and nobody else removes it."""
    for path in directory.glob(f"{PREFIX}*{UNFINISHED}"):
        # Another process may be quicker, or it is somebody else's: it does no harm there.
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < now_ms / 1000 - LEFT_BEHIND_S:
                path.unlink()


def write_all(descriptor: int, data: bytes) -> None:
    """A disk that is nearly full takes a part of it and says nothing."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]

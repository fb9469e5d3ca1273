"""Write the trail to files of JSON lines in a directory, and name the files.

`parquet_sink` writes Parquet files.

Names are `kproxy-audit-{begin}-{incarnation}-{number}.{kind}`, with the start time of the process in milliseconds and
the number of the file from 0 on, both with leading zeros. So files sorted by name are sorted by time, and no two
processes write to one file.

`JsonSink` writes one file until it is large, then the next.
States: no file --a page--> one open --a failure, or `file_bytes` written--> no file.

Invariants
1. When `write` returns, the pages and the file's name are on the disk.
2. A file whose process was not killed holds whole lines: a failed write is cut off or its file removed, if possible.
3. A file that failed to be written or synced is not written to again: after a failed fsync the kernel may have dropped
   the data and would report the next fsync as a success.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from kproxy.errors import StartupError
from kproxy.trail.sink import BatchPreference, SinkFailed, on_thread

# The trail shows who wrote where and when, so not every user may read it.
FILE_MODE = 0o640
# A Parquet file collects rows for this long, in seconds.
PARQUET_FILE_S = 60.0
_DIRECTORY_MODE = 0o750
PREFIX = "kproxy-audit-"
# The suffix of a file that is not finished.
UNFINISHED = ".tmp"
# Writing a file takes seconds. Processes share directories, and their clocks may differ from the disk's.
LEFT_BEHIND_S = 3600.0


class TrailFiles:
    """The names of one process's files, in order."""

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
        """Reuse the last name: its file was not kept."""
        self._number -= 1

    def keep_names(self) -> None:
        """Sync the directory, so that a new file survives a power failure."""
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_directory(directory: Path) -> None:
    """Check that the directory is writable or can be created. Raise StartupError."""
    found = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    if not found.is_dir() or not os.access(found, os.W_OK | os.X_OK):
        at = "" if found == directory else f": it would be created in {found}"
        raise StartupError(f"audit.sink: {directory} is not writable{at}: name another directory, or make it writable.")


def prepare(directory: Path) -> None:
    """Create the directory and check that it is writable. Raise StartupError."""
    try:
        directory.mkdir(_DIRECTORY_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"audit.sink: the directory {directory} cannot be created ({error.strerror}): name a writable one."
        ) from error
    check_directory(directory)


def remove_left_behind(directory: Path, now_ms: int) -> None:
    """Remove unfinished files of killed processes: no one else does."""
    for path in directory.glob(f"{PREFIX}*{UNFINISHED}"):
        # Another process may have removed the file, or own it; then it may stay.
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < now_ms / 1000 - LEFT_BEHIND_S:
                path.unlink()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`: a nearly full disk writes only a part, without an error."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


FILE_BYTES = 64 << 20
WRITE_BYTES = 1 << 20


class JsonSink:
    """The JSON lines of one process. The directory exists."""

    def __init__(self, directory: Path, incarnation: str, began_ms: int, *, file_bytes: int = FILE_BYTES) -> None:
        self.preference = BatchPreference(WRITE_BYTES)
        self._directory = directory
        self._files = TrailFiles(directory, incarnation, began_ms, "jsonl")
        self._file_bytes = file_bytes
        self._path: Path | None = None
        self._descriptor = -1
        self._whole_bytes = 0
        self._writes = False

    async def write(self, pages: Sequence[bytes]) -> None:
        data = b"".join(part for page in pages for part in (page, b"\n"))
        self._writes = True
        try:
            await on_thread(lambda: self._write(data))
        except OSError as error:
            raise SinkFailed(f"{self._directory}: {error.strerror or error}") from error

    async def close(self) -> None:
        # A thread that hangs in a write still uses the file.
        if not self._writes:
            self._let_go()

    def _write(self, data: bytes) -> None:
        try:
            is_new = self._path is None
            path = self._path = self._path or self._files.next()
            if is_new:
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, FILE_MODE)
            write_all(self._descriptor, data)
            os.fsync(self._descriptor)
            if is_new:
                self._files.keep_names()
            # Fails if the file was removed: its rows could not be read.
            path.stat()
        except OSError:
            self._cut_off()
            raise
        else:
            self._whole_bytes += len(data)
            if self._whole_bytes >= self._file_bytes:
                self._let_go()
        finally:
            self._writes = False

    def _cut_off(self) -> None:
        path, descriptor = self._path, self._descriptor
        # If the disk refuses, readers ignore a partial line.
        with contextlib.suppress(OSError):
            if descriptor >= 0:
                os.ftruncate(descriptor, self._whole_bytes)
            if path is not None and not self._whole_bytes:
                path.unlink(missing_ok=True)
                self._files.give_back()
        self._let_go()

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        self._path, self._whole_bytes = None, 0
        if descriptor >= 0:
            os.close(descriptor)

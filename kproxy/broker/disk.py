"""Access the disk safely: name the disk in errors, flush names, replace files in one step, and time flushes."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import uuid
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Final

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


_SCRATCH = ".new"


class DiskError(OSError):
    """One sentence that names the disk and the directory, or the file; `errno` is the file system's."""

    def __str__(self) -> str:
        return str(self.strerror)


def disk_error(error: OSError, directory: Path) -> DiskError:
    """Convert an error of a write into `directory` to one that names its disk."""
    if isinstance(error, DiskError):
        return error
    # A relative --data-dir does not show its disk.
    whole = directory.absolute()
    disk = next(parent for parent in (whole, *whole.parents) if parent.is_mount() or parent == parent.parent)
    if error.errno in _NO_ROOM:
        message = (
            f"the disk mounted at {disk} has no room for what is written to {directory} ({error.strerror}): "
            "make room there, or keep less (retention.bytes, retention.ms)"
        )
    else:
        message = f"the disk mounted at {disk} does not take what is written to {directory} ({error.strerror or error})"
    return DiskError(error.errno, message)


class ChangedNames:
    """A directory with changed names that may not be on the disk yet.

    It holds a descriptor, so that `sync` works even if the process has run out of them. Raises OSError.
    """

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory, os.O_RDONLY)

    def sync(self) -> None:
        """Flush the names to the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def sync_directory(directory: Path) -> None:
    """Flush the names in `directory` to the disk; blocks. Raises OSError."""
    with closing(ChangedNames(directory)) as names:
        names.sync()


def read_file(path: Path) -> bytes | None:
    """Read a file; None if it does not exist. Raises OSError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DiskError(error.errno, f"{path} cannot be read ({error.strerror})") from error


def read_json(path: Path) -> dict[str, object] | None:
    """Read a JSON object; None if there is no file. Raises OSError, also for a damaged file."""
    content = read_file(path)
    if content is None:
        return None
    try:
        found = json.loads(content)
    except ValueError as error:
        raise OSError(f"{path} is damaged ({error})") from error
    if not isinstance(found, dict):
        raise OSError(f"{path} is damaged: it holds no JSON object")
    return found


def write_json(path: Path, value: dict[str, object], replacing: AbstractContextManager[object] | None = None) -> None:
    """Replace the file as `write_file` does."""
    write_file(path, json.dumps(value).encode(), replacing)


def write_file(path: Path, content: bytes, replacing: AbstractContextManager[object] | None = None) -> None:
    """Replace the file in one step.

    A reader finds the old file or the new one, also after a power cut. The step happens inside `replacing`, which may
    cancel it by raising. On OSError the old file is in place and no other file is left.
    """
    # A unique name: two threads may write the same file at once.
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_SCRATCH}")
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with replacing or nullcontext():
            scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


# About the default limit of a batch: a disk without room for one counts as failing.
_PROBE_BYTES = 1 << 20


def probe_disk(directory: Path) -> None:
    """Write, flush, read and remove a file in `directory`, as with logs; blocks. Raises OSError."""
    path = directory / f"probe{_SCRATCH}"
    try:
        with path.open("w+b", buffering=0) as file:
            written = 0
            while written < _PROBE_BYTES:
                written += file.write(bytes(_PROBE_BYTES - written))
            getattr(os, "fdatasync", os.fsync)(file.fileno())
            sync_directory(directory)
            file.seek(0)
            file.read(_PROBE_BYTES)
    except OSError as error:
        raise disk_error(error, directory) from error
    finally:
        path.unlink(missing_ok=True)


def remove_scratch_files(directory: Path) -> None:
    """Remove the unfinished files of a broker that was killed. Raises OSError."""
    for leftover in directory.glob(f"*{_SCRATCH}"):
        leftover.unlink(missing_ok=True)


FLUSH_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram's buckets, in seconds, inclusive; one more bucket has no bound."""


class FlushTimes:
    """Counts flushes by their duration, including failed ones, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bounds = FLUSH_BOUNDS_S
        self.buckets = [0] * (len(FLUSH_BOUNDS_S) + 1)
        self.seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the duration of the `with` block."""
        began = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - began
            with self._lock:
                self.buckets[bisect_left(FLUSH_BOUNDS_S, took_s)] += 1
                self.seconds += took_s


FLUSHES: Final = FlushTimes()
"""The flushes of this process."""

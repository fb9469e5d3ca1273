"""Write to a disk: errors that name it, names in directories, small JSON files, flush times."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
import uuid
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class DiskError(OSError):
    """One sentence that names the disk and the directory; `errno` is the file system's."""

    def __str__(self) -> str:
        return str(self.strerror)


def disk_error(error: OSError, directory: Path) -> DiskError:
    """`error`, which came of writing into `directory`, with the disk it came from."""
    if isinstance(error, DiskError):
        return error
    # A --data-dir may be given relative to where the broker was started, which says nothing of the disk.
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
    """The names in a directory, some of which have changed and may not be on the disk yet.

    It holds a descriptor: who brings them there needs none, be the process out of them by then. Raises OSError.
    """

    def __init__(self, directory: Path) -> None:
        self._fd = -1 if sys.platform == "win32" else os.open(directory, os.O_RDONLY)

    def sync(self) -> None:
        """Bring them to the disk, where the system knows how."""
        if self._fd >= 0:
            os.fsync(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def sync_directory(directory: Path) -> None:
    """Bring the names in `directory` to the disk, where the system knows how; blocks. Raises OSError."""
    names = ChangedNames(directory)
    try:
        names.sync()
    finally:
        names.close()


_SCRATCH = ".new"


def read_json(path: Path) -> dict[str, object] | None:
    """What the file says; None where there is none. Raises OSError, also for one that is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OSError(f"{path} is damaged ({error})") from error
    if not isinstance(found, dict):
        raise OSError(f"{path} is damaged")
    return found


def write_json(path: Path, value: dict[str, object], replacing: AbstractContextManager[object] | None = None) -> None:
    """Replace the file as one step, so that a reader finds the old one or the new one, also after a power cut.

    The step is taken inside `replacing`, which may call it off by raising. Raises OSError, with the old file in place
    and nothing beside it.
    """
    # Of its own name: two may write the same file at once.
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_SCRATCH}")
    try:
        with scratch.open("w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        with replacing or nullcontext():
            scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def remove_scratch_files(directory: Path) -> None:
    """Remove what a broker that was killed while it wrote has left. Raises OSError."""
    for leftover in directory.glob(f"*{_SCRATCH}"):
        leftover.unlink(missing_ok=True)


FLUSH_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram's buckets, in seconds, inclusive; one more bucket has no bound."""


class FlushTimes:
    """Flushes by how long they took; those that failed count as well."""

    def __init__(self) -> None:
        self._adding = threading.Lock()
        self.buckets = [0] * (len(FLUSH_BOUNDS_S) + 1)
        self.seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what is done within."""
        began = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - began
            with self._adding:
                self.buckets[bisect_left(FLUSH_BOUNDS_S, took_s)] += 1
                self.seconds += took_s


FLUSHES: Final = FlushTimes()
"""Those of this process."""

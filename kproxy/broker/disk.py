"""What a disk says when it does not take what is written to it, put so that a person knows which disk is meant."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

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

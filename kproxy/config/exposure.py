"""Find files with secrets that every user of this machine can read or change.

Files in a read-only mount are left out. Kubernetes mounts Secrets in this way, by default with mode 0644, which nobody
can change from inside; only the processes of one container have these files.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kproxy.config.parsing import unreadable

_OTHERS = stat.S_IROTH | stat.S_IWOTH


class Exposed(NamedTuple):
    """A file that others can read or change; `what` is the key of the configuration, or the flag, that names it."""

    what: str
    file: Path
    mode: int

    @property
    def advice(self) -> str:
        return f"run `chmod 600 {self.file}` (640 lets its group read)"

    def __str__(self) -> str:
        return (
            f"{self.what}: its file {self.file} has the mode {self.mode:04o}, so that others can read or change it: "
            f"{self.advice}."
        )


def is_in_read_only_mount(file: Path) -> bool:
    """Whether the file is in a read-only mount. Raises OSError."""
    return bool(os.statvfs(file).f_flag & os.ST_RDONLY)


def exposed(secrets: Iterable[tuple[str, Path | None]]) -> list[Exposed]:
    """Return the files that others can read or change, once each. Raises StartupError if a file is gone."""
    found: dict[Path, Exposed] = {}
    for what, file in secrets:
        if file is None or sys.platform == "win32":
            continue
        try:
            mode = stat.S_IMODE(file.stat().st_mode)
            is_fixed = is_in_read_only_mount(file)
        except OSError as error:
            raise unreadable(what, file, error) from error
        if mode & _OTHERS and not is_fixed:
            found.setdefault(file, Exposed(what, file, mode))
    return list(found.values())

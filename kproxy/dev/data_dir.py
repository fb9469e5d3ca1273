"""The data directory of a development cluster: path, lock, layout."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from kproxy.errors import StartupError

if sys.platform != "win32":
    import fcntl


class Layout(msgspec.Struct):
    """`cluster.json`: later starts must agree with it, since each broker has partitions of its own."""

    brokers: int


def default_data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Per user: in XDG_DATA_HOME if set, else ~/Library/Application Support on macOS, else ~/.local/share."""
    configured = environ.get("XDG_DATA_HOME", "")
    if configured and Path(configured).is_absolute():
        return Path(configured) / "kproxy" / "dev"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "kproxy" / "dev"
    return Path.home() / ".local" / "share" / "kproxy" / "dev"


class ClusterDir:
    """A locked data directory. `open` raises StartupError.

    The lock ends with `close` or with the process.
    """

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path, brokers: int) -> ClusterDir:
        """Create and lock it; check that all brokers with data in it are started."""
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            lock = (path / "lock").open("ab")
        except OSError as error:
            raise StartupError(
                f"the data directory {path} cannot be used ({error.strerror}): choose another --data-dir."
            ) from error
        opened = cls(path, lock)
        try:
            opened._take_lock()
            opened._check_layout(brokers)
        except BaseException:
            opened.close()
            raise
        return opened

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._lock.close()

    def _take_lock(self) -> None:
        if sys.platform == "win32":
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StartupError(
                f"the data directory {self.path} is in use by another `kproxy dev`: "
                f"stop that one, or choose another --data-dir."
            ) from error

    def _check_layout(self, brokers: int) -> None:
        file = self.path / "cluster.json"
        try:
            before = msgspec.json.decode(file.read_bytes(), type=Layout).brokers if file.exists() else 0
            if before > brokers:
                raise StartupError(
                    f"the data in {self.path} lies on {before} brokers: give --brokers {before} or another --data-dir."
                )
            if before < brokers:
                aside = file.with_suffix(".new")
                aside.write_bytes(msgspec.json.encode(Layout(brokers)))
                aside.replace(file)
        except (OSError, msgspec.DecodeError) as error:
            raise StartupError(f"{file} cannot be used ({error}): choose another --data-dir.") from error

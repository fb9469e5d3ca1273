"""Simulate a disk whose process dies at a chosen call, and the files that a power cut leaves.

The calls are those that change files: open, write, truncate, fsync, rename, unlink. Once dead, nothing changes any
more, whatever the code does while the exception passes through it. No data is really flushed: an fsync only remembers
the present content. A power cut leaves the flushed content of each file and any part of the rest. It leaves the flushed
names and the first of their later changes, as a journal keeps their order.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kproxy.broker import segment

CALLS = ("open", "write", "ftruncate", "replace", "unlink", "fsync")
NEVER = -1
_Names = dict[str, int]


class Died(BaseException):
    """The process is dead: no `except Exception` sees it."""


class DyingDisk:
    """One directory. `calls` counts; the process dies before the call number `dies_at`."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, dies_at: int = NEVER) -> None:
        self.directory = directory
        self.calls = 0
        self.dies_at = dies_at
        self.before_call: Callable[[], None] = lambda: None
        self._flushed: dict[int, bytes] = {}
        # Every file that ever had a name, by its inode, so that no inode is used again.
        self._inodes = directory.with_name(f"{directory.name}-inodes")
        self._inodes.mkdir()
        # The names as they were flushed, and after each change since.
        self._names: list[_Names] = [{}]
        for name in CALLS:
            patch.setattr(os, name, self._dying(getattr(os, name)))
        patch.setattr(os, "fsync", self._dying(self._fsync))
        patch.setattr(segment, "_sync_data", self._dying(self._fsync))

    def _dying(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.dies_at != NEVER and self.calls >= self.dies_at:
                raise Died
            self.calls += 1
            self.before_call()
            result = usual(*arguments, **named)
            self._note_names()
            return result

        return call

    def _note_names(self) -> None:
        names = self._names_now()
        if names != self._names[-1]:
            self._names.append(names)

    def _names_now(self) -> _Names:
        found = {entry.name: entry.inode() for entry in os.scandir(self.directory)}
        for name, inode in found.items():
            if not (self._inodes / str(inode)).exists():
                (self._inodes / str(inode)).hardlink_to(self.directory / name)
        return found

    def _fsync(self, fd: int) -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            self._names = [self._names_now()]
        else:
            self._flushed[status.st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def cut_power(self, into: Path, dice: random.Random) -> None:
        """Write the files that a power cut leaves to `into`."""
        names = dice.choice((self._names[0], self._names[-1], dice.choice(self._names)))
        for name, inode in names.items():
            was = self._inodes / str(inode)
            flushed, last = self._flushed.get(inode, b""), was.read_bytes()
            if last.startswith(flushed):
                left = last[: dice.choice((len(flushed), len(last), dice.randint(len(flushed), len(last))))]
                left += bytes(dice.choice((0, len(last) - len(left))))
            else:
                left = dice.choice((flushed, last))
            into.joinpath(name).write_bytes(left)
            shutil.copystat(was, into / name)

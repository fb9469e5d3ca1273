"""The trail as lines of JSON: one file, until it is large, then the next.

States: no file --a page--> one open --a failure, or `file_bytes` are in it--> no file.

Invariants
1. What `write` has returned for is on the disk, and its file's name is.
2. A file whose process was not killed holds whole lines: what a failed write left is cut off, or its file removed.
3. A file that could not be written or brought to the disk is not written to again: after a failed fsync the kernel may
   have forgotten what it did not write, and would call the next one a success.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from kproxy.trail.sinks.files import FILE_MODE, TrailFiles, write_all
from kproxy.trail.sinks.sink import Appetite, SinkFailed, on_thread

FILE_BYTES = 64 << 20
WRITE_BYTES = 1 << 20


class JsonSink:
    """Of one process; the directory is there."""

    def __init__(self, directory: Path, incarnation: str, began_ms: int, *, file_bytes: int = FILE_BYTES) -> None:
        self.appetite = Appetite(WRITE_BYTES)
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
        # A thread that hangs in a write has the file still.
        if not self._writes:
            self._let_go()

    def _write(self, data: bytes) -> None:
        try:
            is_new = self._path is None
            if is_new:
                self._path = self._files.next()
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, FILE_MODE)
            write_all(self._descriptor, data)
            os.fsync(self._descriptor)
            if is_new:
                self._files.keep_names()
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
        # As far as the disk lets us; who reads leaves out a line that is not whole.
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

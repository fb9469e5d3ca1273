"""What Spark 4.0 leaves in the directory that somebody stands in: `artifacts/spark-…`, one for each JVM, empty.

It makes them for files that a session may be given later, relative to where the JVM was started, and no setting puts
them elsewhere. Nobody who runs an audit wants them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


class Artifacts:
    """Made before a JVM is started in this directory; `remove` what it left once it has ended."""

    def __init__(self) -> None:
        self._directory = Path("artifacts").absolute()
        self._before = self._found()

    def _found(self) -> set[Path]:
        try:
            return set(self._directory.glob("spark-*"))
        except OSError:
            return set()

    def remove(self) -> None:
        """Empty directories that were not there before. What holds anything stays."""
        new = self._found() - self._before
        for directory in new:
            with contextlib.suppress(OSError):
                directory.rmdir()
        if new:
            with contextlib.suppress(OSError):
                self._directory.rmdir()

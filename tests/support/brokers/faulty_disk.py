"""A disk that fails on command: a library between a broker and the C library (`faulty_disk.c`), built by the tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
HANGS = "hang"


def build_shim(directory: Path) -> Path:
    """Compile the library into `directory`."""
    library = directory / "faulty_disk.so"
    command = ["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


class FaultyDisk:
    """Faults of one process's calls below `directory`, which is a real path; `environ` is for the process."""

    def __init__(self, shim: Path, directory: Path) -> None:
        self._told = directory.with_name(f"{directory.name}.fault")
        self.environ: Mapping[str, str] = {
            **os.environ,
            "LD_PRELOAD": str(shim),
            "KPROXY_DISK": f"{directory}/",
            "KPROXY_DISK_FAULT": str(self._told),
        }

    @contextmanager
    def fails(self, **faults: int | str) -> Iterator[None]:
        """Until the block ends `write`, `sync` or `read` fail with an errno, or hang (HANGS)."""
        self._tell(" ".join(f"{operation}={fault}" for operation, fault in faults.items()))
        try:
            yield
        finally:
            self.recover()

    def lose_sector(self, file: Path, position: int) -> None:
        """From now on reads of this file fail from the position to the end of its sector."""
        self._tell(f"sector={position}:{file}")

    def recover(self) -> None:
        self._told.unlink()

    def _tell(self, faults: str) -> None:
        scratch = self._told.with_suffix(".new")
        scratch.write_text(faults)
        scratch.replace(self._told)

"""Small JSON files that are read whole and replaced whole."""

from __future__ import annotations

import json
import os
import uuid
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

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

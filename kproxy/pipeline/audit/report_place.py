"""Where a report is to be, looked at before there is one: the work of an hour is not for nothing."""

from __future__ import annotations

from pathlib import Path

from kproxy.errors import StartupError


def check_report(path: Path | None) -> None:
    """Raises StartupError where the report could not be written in the end."""
    if path is None:
        return
    try:
        created = not path.exists()
        path.open("ab").close()
    except OSError as error:
        raise StartupError(
            f"The report cannot be written to {path} ({error.strerror}): name another --report."
        ) from error
    if created:
        path.unlink()

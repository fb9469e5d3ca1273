"""Times and durations as people give them on the command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from kproxy.errors import StartupError

_UNIT_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"(\d{1,9})(ms|s|m|h|d)")


def duration_ms(text: str) -> int | None:
    """`500ms`, `10s`, `15m`, `2h` or `1d` in milliseconds; None for anything else."""
    match = _DURATION.fullmatch(text)
    return None if match is None else int(match[1]) * _UNIT_MS[match[2]]


def parse_duration_ms(text: str, flag: str) -> int:
    """The same, more than nothing. Raises StartupError."""
    duration = duration_ms(text)
    if not duration:
        raise StartupError(f"{flag} {text} is no duration: write a number and its unit, as in 500ms, 10s, 2h or 1d.")
    return duration


def parse_time_ms(text: str, flag: str, now_ms: int) -> int:
    """A time in milliseconds since the epoch: ISO 8601, UTC unless it says otherwise, or a duration before `now_ms`.

    Raises StartupError.
    """
    ago = duration_ms(text)
    if ago is not None:
        return now_ms - ago
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise StartupError(
            f"{flag} {text} is no time: write it as 2026-11-21T20:00 (UTC), 2026-11-21T20:00+01:00, or 2h for 2 h ago."
        ) from error
    return round((time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp() * 1000)

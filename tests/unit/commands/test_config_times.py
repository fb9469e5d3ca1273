"""Times and durations on the command line."""

from __future__ import annotations

import pytest

from kproxy.config.parsing import parse_duration_ms, parse_time_ms
from kproxy.errors import StartupError

NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    ("text", "ms"), [("500ms", 500), ("10s", 10_000), ("15m", 900_000), ("2h", 7_200_000), ("1d", 86_400_000)]
)
def test_durations_have_a_unit(text: str, ms: int) -> None:
    assert parse_duration_ms(text, "--window") == ms
    assert parse_time_ms(text, "--from", NOW_MS) == NOW_MS - ms


@pytest.mark.parametrize("text", ["10", "s", "-1s", "1.5s", "0s", "10 s", "", "1w"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="is not a duration: write a number and its unit"):
        parse_duration_ms(text, "--window")


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2027-01-15T08:00", NOW_MS),
        ("2027-01-15 08:00:00.250", NOW_MS + 250),
        ("2027-01-15T09:00+01:00", NOW_MS),
        ("2027-01-15T08:00Z", NOW_MS),
    ],
)
def test_times_are_utc_unless_they_say_otherwise(text: str, ms: int) -> None:
    assert parse_time_ms(text, "--to", 0) == ms


@pytest.mark.parametrize("text", ["yesterday", "12:00", "2027-13-01", ""])
def test_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match=r"--to .* is not a time: write it as"):
        parse_time_ms(text, "--to", NOW_MS)

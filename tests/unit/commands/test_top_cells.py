"""How `kproxy top` prints a cell."""

from __future__ import annotations

import pytest

from kproxy.cli.top import in_bytes


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (99_940, "99.9 kB"),
        (123_456, "123 kB"),
        (2_500_000, "2.5 MB"),
        (2.5e9, "2.5 GB"),
        (7e12, "7.0 TB"),
        (4e15, "4000 TB"),
    ],
)
def test_bytes_have_a_suitable_unit(value: float, text: str) -> None:
    assert in_bytes(value) == text

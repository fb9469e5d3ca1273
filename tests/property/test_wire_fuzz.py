"""No request or answer makes kproxy/plain/wire.h read or write beyond a buffer; `make fuzz` runs far more of them."""

from __future__ import annotations

import secrets

from scripts.fuzz import fuzz

FRAMES = 200_000


def test_random_frames_under_the_sanitizers() -> None:
    seed = secrets.randbelow(1 << 40)
    print(f"seed {seed}")
    assert fuzz(FRAMES, seed).startswith(f"{FRAMES} frames with seed {seed}: ")

"""No request or answer makes kproxy/plain/wire.h read or write beyond a buffer; `make fuzz` runs far more of them."""

from __future__ import annotations

import os
import secrets

from scripts.fuzz import fuzz

FRAMES = 1_000_000 if os.environ.get("KPROXY_TEST_ALL") == "1" else 200_000


def test_frames_pass_under_the_sanitizers() -> None:
    seed = secrets.randbelow(1 << 40)
    print(f"seed {seed}")
    assert fuzz(FRAMES, seed).startswith(f"{FRAMES} frames with seed {seed}: ")

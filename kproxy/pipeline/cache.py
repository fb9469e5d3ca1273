"""Where what was downloaded or derived once is kept between runs, per user."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def user_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """kproxy's directory among the user's caches, not created here. An absolute XDG_CACHE_HOME counts on macOS too."""
    configured = environ.get("XDG_CACHE_HOME", "")
    if configured and Path(configured).is_absolute():
        return Path(configured) / "kproxy"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kproxy"
    return Path.home() / ".cache" / "kproxy"
